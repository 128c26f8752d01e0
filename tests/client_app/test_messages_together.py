"""Training messages of several runs, which differ in the seed, come to what each comes to by itself."""

import socket
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.client_app.test_side_by_side import DOUBLE, SPEC, assert_alike, fits_of, trained, values
from tests.client_app.work_orders import SPEC as DEALT
from tests.client_app.work_orders import Apart, batch, payload, work_order
from wildflower.client_app import frames, inbox, side_by_side, stack
from wildflower.client_app.training_message import train_together
from wildflower.messages.error import MessageError
from wildflower.messages.orders import LocalTraining, Reply, parse
from wildflower.models.cnn import Cnn3
from wildflower.strategies.shared_losses import PureLoss
from wildflower.tasks.task import TaskSpec, load_task

NETWORK = Cnn3(input_shape=(1, 8, 8), norm="static")


@pytest.fixture
def stacked(monkeypatch):
    """How many trainings were done at once, each time."""
    seen = []
    real = stack.fit_stacked
    monkeypatch.setattr(side_by_side, "fit_stacked", lambda fits, drawn: (seen.append(len(fits)), real(fits, drawn))[1])
    return seen


def message(seed, devices=(0, 1), **changes):
    """A training message of the run with this seed."""
    task = DEALT.model_copy(update={"seed": seed}).to_json()
    orders = [work_order(device, local=Apart(), seed=100 * seed + device) for device in devices]
    values = {"task": task, "side_by_side": 16, "each_by_itself": True, "run": f"run {seed}"} | changes
    return batch(*orders, **values).model_dump_json(), [payload()]


def of_each(messages):
    """What the devices of each message return, by device."""
    found = []
    for text, arrays in train_together(messages, {}):
        reply = parse(Reply, text)
        found.append((trained(reply.updates, arrays), [update.at_once for update in reply.updates]))
    return found


def test_devices_of_several_seeds_are_one_stack_and_return_what_they_return_by_themselves(stacked):
    messages = [message(1), message(2, devices=(0, 2, 3)), message(3, devices=(1,))]
    alone = [of_each([each])[0][0] for each in messages]
    stacked.clear()
    together = of_each(messages)
    assert stacked == [6]
    for wanted, (found, at_once) in zip(alone, together, strict=True):
        assert set(at_once) == {6}
        assert found.keys() == wanted.keys()
        for device, (weights, loss) in wanted.items():
            assert found[device][1] == pytest.approx(loss, rel=1e-4)
            torch.testing.assert_close(values(found[device][0]), values(weights), rtol=1e-3, atol=1e-5)


def test_in_float64_tasks_of_several_seeds_train_at_once_as_in_turn():
    def make():
        fits = fits_of([9, 14, 8], 0.25, LocalTraining(batch_size=7, epochs=2, learning_rate=0.02), NETWORK)
        tasks = [load_task(SPEC.model_copy(update={"seed": seed})) for seed in (1, 2, 3)]
        return [replace(fit, loss=PureLoss(task, fit.model)) for fit, task in zip(fits, tasks, strict=True)]

    assert next(make()[0].model.parameters()).dtype == DOUBLE
    assert_alike(make)


def test_tasks_of_other_data_are_no_stack():
    fits = fits_of([9, 8], 0.125, LocalTraining(batch_size=9), NETWORK)
    other = load_task(TaskSpec(name="digits", devices=4, seed=1, partition="iid", test_fraction=0.5))
    fits[1] = replace(fits[1], loss=PureLoss(other, fits[1].model))
    with pytest.raises(stack.InTurn, match="tasks of their own"):
        stack.fit_stacked(fits, [torch.get_rng_state()] * 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"training": LocalTraining(batch_size=10, learning_rate=0.01)},
        {"task": DEALT.model_copy(update={"seed": 2, "alpha": 9.0}).to_json()},
        {"side_by_side": 3},
    ],
)
def test_messages_of_other_settings_are_done_apart(stacked, changes):
    of_each([message(1), message(2, **changes)])
    assert stacked == [2, 2]


def test_a_message_that_is_none_of_ours_leaves_the_others(stacked):
    bad, good = train_together([("{}", []), message(1)], {})
    assert isinstance(bad, MessageError)
    assert set(trained(parse(Reply, good[0]).updates, good[1])) == {0, 1}


# What a worker of several runs is asked


@pytest.fixture
def runs():
    """The links of three runs to a worker, and the runs' own ends of them."""
    pairs = [socket.socketpair() for _ in range(3)]
    yield [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    for pair in pairs:
        for end in pair:
            end.close()


def ask(end, text, kind="train"):
    frames.send(end, {"kind": kind, "text": text}, [])


def texts(messages):
    return [header["text"] for header, _ in messages.values()]


def ask_first(ends, found):
    """A training message waits for those of other runs; one that scores does not."""
    ask(ends[0], "a")
    ask(ends[1], "b", kind="score")
    assert texts(next(found)) == ["b"]


def test_training_messages_of_all_runs_come_together_and_others_at_once(runs, monkeypatch):
    monkeypatch.setattr(inbox, "LEAST_PATIENCE", 3600.0)
    links, ends = runs
    found = inbox.messages_of(links)
    ask_first(ends, found)
    ask(ends[2], "c")
    ask(ends[1], "d")
    assert sorted(texts(next(found))) == ["a", "c", "d"]


def test_a_run_that_is_over_is_not_waited_for(runs, monkeypatch):
    monkeypatch.setattr(inbox, "LEAST_PATIENCE", 3600.0)
    links, ends = runs
    found = inbox.messages_of(links)
    ask(ends[0], "a")
    ends[1].close()
    ask(ends[2], "c")
    assert sorted(texts(next(found))) == ["a", "c"]
    ends[0].close()
    ask(ends[2], "c")
    assert texts(next(found)) == ["c"]
    ends[2].close()
    assert list(found) == []


def test_runs_that_ask_for_nothing_hold_up_no_other_for_ever(runs, monkeypatch):
    monkeypatch.setattr(inbox, "LEAST_PATIENCE", 0.0)
    links, ends = runs
    found = inbox.messages_of(links)
    for text in ("a", "b"):
        ask(ends[0], text)
        assert texts(next(found)) == [text]


def test_what_a_run_has_asked_that_is_over_is_not_done(runs, monkeypatch):
    monkeypatch.setattr(inbox, "LEAST_PATIENCE", 3600.0)
    links, ends = runs
    found = inbox.messages_of(links)
    before = set(threading.enumerate())
    ask_first(ends, found)
    reader, *_ = (thread for thread in threading.enumerate() if thread not in before)  # of the first link
    ends[0].close()
    reader.join()
    for end, text in zip(ends[1:], "bc", strict=True):
        ask(end, text)
    assert sorted(texts(next(found))) == ["b", "c"]


@pytest.mark.parametrize("kind", ["train", "score"])
def test_what_is_taken_out_of_an_inbox_is_held_by_nothing_in_it(kind, runs, monkeypatch):
    class Arrays(list):
        """Which can be looked at from outside."""

    def receive(link):
        header, arrays = frames.receive(link)
        return header, Arrays(arrays)

    monkeypatch.setattr(inbox, "frames", SimpleNamespace(receive=receive))
    links, ends = runs
    found = inbox.messages_of(links[:1])
    for _ in range(2):
        frames.send(ends[0], {"kind": kind, "text": ""}, [b"weights"])
        messages = next(found)
        arrays = weakref.ref(messages[links[0]][1])
        assert arrays() == [b"weights"]
        del messages[links[0]]
        assert arrays() is None


def test_a_link_with_what_is_no_message_is_shut(runs, caplog):
    links, ends = runs
    ends[0].sendall(b"\xff" * 8)
    for end in ends[1:]:
        end.close()
    assert list(inbox.messages_of(links)) == []
    assert ends[0].recv(1) == b""
    assert "A worker cannot read what it is asked: a header of" in caplog.text
