"""Rounds over workers of their own processes, without Flower's engine."""

import math
import os
import select
import signal
import time

import psutil
import pytest
import torch
from flwr.app import Message, MessageType

from tests.rounds.methods import started_with
from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from wildflower.client_app.simulation import ForkServerError
from wildflower.messages.error import MessageError
from wildflower.messages.flower_records import make_records
from wildflower.rounds.exchange import pull
from wildflower.server_app.process_grid import LocalGrid, local_grid, scorer_on
from wildflower.server_app.server_scoring import scorer as server_scorer
from wildflower.strategies.fedavg import FedAvg
from wildflower.strategies.method import Answer, ClientContext, ClientStep, Model, Order, Training
from wildflower.tasks.task import TaskSpec, load_task


def workers_of(grid: LocalGrid) -> list[int]:
    """The process ids of a grid's workers: living children of this process's child."""
    below = [child for fork_server in psutil.Process().children() for child in fork_server.children()]
    return sorted(p.pid for p in below if p.status() != psutil.STATUS_ZOMBIE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["heterofl", "lotteryfl", "hypemefed"])
def test_any_number_of_workers_gives_the_bits_of_one_process(name, tmp_path):
    states, records = [], []
    for place, workers in (("in process", 0), ("one", 1), ("two", 2)):
        (tmp_path / place).mkdir()
        config = small_config(
            tmp_path / place, **METHODS[name], workers=workers or 2, rounds=2, evaluate_every=2, seed=11
        )
        engine, scorer = started(config)
        engine.start()
        if workers:
            with local_grid(workers) as grid:
                scorer = scorer_on(grid, TaskSpec.from_json(engine.settings.task))
                results = [engine.run_round(grid, number, scorer) for number in (1, 2)]
        else:
            results = [engine.run_round(simulated_grid(), number, scorer) for number in (1, 2)]
        assert [d["outcome"] for r in results for d in r.devices].count("trained") >= 4
        states.append(engine.state().tensors)
        scored = ("score", "loss", "score_by_tier", "score_by_exit", "accuracy_by_class", "score_by_device")
        records.append([[result.record[key] for key in scored] for result in results])
    assert same_bits(states[0], states[1])
    assert same_bits(states[0], states[2])
    assert records[0] == records[1] == records[2]


class KillsItsWorker(Training):
    """Plain training. deadly: this device's worker is killed in the middle of it."""

    deadly: bool = False

    def train(self, context: ClientContext) -> Answer:
        """Train, or die."""
        if self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(context)


class Deadly(FedAvg):
    """FedAvg in which device 3 kills its worker in round 2."""

    def client_step(self, order: Order) -> ClientStep:
        """Deadly for one device."""
        return KillsItsWorker(deadly=order.device == 3 and self.round == 2)


class NeverEnds(Training):
    """Training that does not end."""

    def train(self, context: ClientContext) -> Answer:
        """Wait for a signal."""
        signal.pause()
        raise AssertionError


class Sleepy(FedAvg):
    """FedAvg whose devices never end."""

    def client_step(self, order: Order) -> ClientStep:
        """One that does not end."""
        return NeverEnds()


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_device_that_kills_its_workers_fails_alone_and_each_worker_is_replaced(tmp_path):
    engine, scorer = started_with(Deadly, tmp_path, devices_per_round=6)
    with local_grid(2) as grid:
        outcomes = []
        for number in (1, 2, 3):
            outcomes.append({d["device"]: d["outcome"] for d in engine.run_round(grid, number, scorer).devices})
        assert len(workers_of(grid)) == 2
    assert set(outcomes[0].values()) == set(outcomes[2].values()) == {"trained"}
    failed = {device: outcome for device, outcome in outcomes[1].items() if outcome != "trained"}
    assert failed.keys() == {3}
    assert failed[3].startswith("failed: the client process died: worker ")
    assert failed[3].endswith(", for the second time over this work")


def test_a_worker_that_is_lost_between_two_rounds_costs_nothing(tmp_path):
    config = small_config(tmp_path, **METHODS["heterofl"])
    engine, scorer = started(config)
    with local_grid(2) as grid:
        engine.run_round(grid, 1, scorer)
        before = workers_of(grid)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for one in grid._workers.values():  # whose ends of the links are closed as they die
            assert select.select([one.link], [], [], 5.0)[0]
        result = engine.run_round(grid, 2, scorer)
        assert {d["outcome"] for d in result.devices} == {"trained"}
        assert not set(before) & set(workers_of(grid))


def test_without_the_process_that_forks_workers_a_run_ends_and_says_so(tmp_path, caplog):
    engine, scorer = started(small_config(tmp_path, **METHODS["heterofl"], workers=1))
    with local_grid(1) as grid:
        grid.send_and_receive([unreadable()])  # its worker has begun, so that its link is silent until it ends
        [forks] = psutil.Process().children()
        forks.kill()
        for one in grid._workers.values():  # a worker ends with the process that it was forked from
            assert select.select([one.link], [], [], 5.0)[0]
        with pytest.raises(ForkServerError, match="the process that workers are forked from is gone"):
            engine.run_round(grid, 1, scorer)
    assert "takes its place" not in caplog.text


def stopped_at_work(grid: LocalGrid) -> tuple[int, str]:
    """The process of worker 1, which is stopped, and the message that it has been sent."""
    grid.send_and_receive([unreadable()])  # it has begun
    (pid,) = workers_of(grid)
    os.kill(pid, signal.SIGSTOP)
    (message_id,) = grid.push_messages([unreadable()])
    return pid, message_id


def unreadable() -> Message:
    return Message(make_records("{}"), 1, MessageType.TRAIN)


def test_a_worker_that_is_lost_with_all_others_is_no_reply_that_cannot_be_read():
    """Else its devices would fail and the round would count, although the run is about to end."""
    with local_grid(1) as grid:
        _, message_id = stopped_at_work(grid)
        [forks] = psutil.Process().children()
        forks.kill()
        assert select.select([grid._workers[1].link], [], [], 5.0)[0]
        with pytest.raises(ForkServerError, match="the process that workers are forked from is gone"):
            list(pull(grid, {message_id: 1}))


def test_a_stopped_worker_is_told_once_and_waited_for(monkeypatch, caplog):
    monkeypatch.setattr("wildflower.server_app.process_grid.LOOK_SECONDS", 0.0)
    with local_grid(1) as grid:
        pid, message_id = stopped_at_work(grid)
        end = time.monotonic() + 5.0
        while not caplog.messages and time.monotonic() < end:
            grid.wait([message_id], 0.01)
        grid.wait([message_id], 0.01)
        assert caplog.messages == [
            f"Worker 1 is stopped, and the run waits for it: kill -CONT {pid} lets it go on, kill -KILL {pid} lets "
            "another one do its work"
        ]
        os.kill(pid, signal.SIGCONT)
        grid.wait([message_id], 5.0)
        [reply] = grid.pull_messages([message_id])
        assert reply.error.code == 2  # which is the worker's answer


@pytest.mark.parametrize(
    ("code", "memory", "words"),
    [
        (-9, True, "was killed by the kernel because memory ran out (fewer workers need less)"),
        (-9, False, "was killed (SIGKILL), most likely because memory ran out (fewer workers need less)"),
        (-15, True, "was ended by signal 15 (Terminated)"),
        (1, False, "ended with code 1"),
    ],
)
def test_the_log_says_how_a_worker_has_ended(code, memory, words, monkeypatch, caplog):
    """The kernel's count of what it has killed for memory is looked at when the grid begins, and when a worker ends."""
    counts = iter([5, 6 if memory else 5])
    monkeypatch.setattr("wildflower.client_app.worker.oom_kills", lambda: next(counts))
    monkeypatch.setattr(
        "wildflower.client_app.work.do",
        lambda *_: os._exit(code) if code >= 0 else (os.kill(os.getpid(), -code), signal.pause()),
    )
    with local_grid(1) as grid:
        (reply,) = grid.send_and_receive([Message(make_records(""), 1, MessageType.TRAIN)])
    assert (reply.error.code, reply.error.reason) == (8, f"worker 1 {words}")
    assert caplog.messages == [f"Worker 1 {words} while it worked: another one takes its place"]


def test_workers_that_end_before_they_begin_end_the_run(monkeypatch, caplog):
    def fails(tell: object) -> None:
        raise ImportError("no GPU for this one")

    monkeypatch.setattr("wildflower.client_app.undo.tell_with", fails)
    with local_grid(2) as grid:
        words = (
            r"^3 workers in a row have ended before they began, the last of them so: worker 1 ended with code 1; what"
        )
        with pytest.raises(ForkServerError, match=words):
            grid.push_messages([unreadable()])
        with pytest.raises(ForkServerError, match=words):
            grid.get_node_ids()
    assert len(caplog.messages) == 3


def test_scoring_goes_on_where_a_worker_is_killed_and_tells_what_it_cannot_score(tmp_path):
    engine, scorer = started(small_config(tmp_path, **METHODS["heterofl"]))
    family = engine.method.family.with_statistics
    network = family.build(family.full())
    model = Model(family, family.full(), {n: v for n, v in network.state_dict().items() if v.is_floating_point()})
    with local_grid(2) as grid:
        spec = TaskSpec.from_json(engine.settings.task)
        on_workers = scorer_on(grid, spec)
        by_parts = scorer_on(grid, spec, held_out=True)(model)
        assert by_parts == server_scorer(load_task(spec), held_out=True)(model)
        assert by_parts.held_out != by_parts.rest
        os.kill(workers_of(grid)[0], signal.SIGKILL)
        assert on_workers(model) == scorer(model)
        with pytest.raises(RuntimeError, match=r"a worker cannot score .* ValueError: .*: there is none"):
            on_workers(Model(family, family.full(), {"stranger": torch.zeros(1)}))
        assert on_workers(model) == scorer(model)
        for tensor in model.weights.values():
            tensor.fill_(float("nan"))
        assert math.isnan(on_workers(model).loss)


def test_what_a_worker_raises_is_the_reply_and_it_goes_on():
    def ask(grid: LocalGrid, text: str) -> Message:
        (reply,) = grid.send_and_receive([Message(make_records(text), 1, MessageType.TRAIN)])
        return reply

    with local_grid(1) as grid:
        (worker,) = workers_of(grid)
        first = ask(grid, "{}")
        assert (first.error.code, first.error.reason.split(":")[0]) == (2, MessageError.__name__)
        second = ask(grid, '{"run": 7}')
        assert (second.error.code, second.metadata.src_node_id) == (2, 1)
        assert workers_of(grid) == [worker]


def test_messages_to_one_worker_are_answered_in_turn():
    with local_grid(1) as grid:
        ids = list(
            grid.push_messages([Message(make_records(f'{{"run": {i}}}'), 1, MessageType.TRAIN) for i in range(3)])
        )
        answered: list[str] = []
        while len(answered) < 3:
            grid.wait(ids, 5.0)
            answered += [i for i in ids if list(grid.pull_messages([i]))]
        assert answered == ids
        assert list(grid.pull_messages(ids)) == []


def test_workers_end_with_their_grid_also_in_the_middle_of_work(tmp_path):
    engine, scorer = started_with(Sleepy, tmp_path, devices_per_round=6)
    with local_grid(2) as grid:
        pids = workers_of(grid)
        assert len(pids) == 2
        grid.wait = interrupt
        with pytest.raises(KeyboardInterrupt):
            engine.run_round(grid, 1, scorer)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
