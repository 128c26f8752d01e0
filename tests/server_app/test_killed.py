"""Processes of a simulation that are killed: the run goes on, or is gone on with, and has the same bits."""

import json
import os
import signal
from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.small_run import METHODS, small_config, started
from wildflower.client_app.simulation import ForkServerError
from wildflower.server_app.app import run
from wildflower.server_app.process_grid import local_grid, scorer_on
from wildflower.tasks.task import TaskSpec

WALL = {"wall_seconds", "server_seconds", "server_peak_rss_bytes", "seconds"}
# Personal evaluations too, and models that the workers score for the server.
STATEFUL = METHODS["scaffold"] | {"wire": "int8", "personal.every": 2, "test-fraction": 0.25}
PLAIN = METHODS["heterofl"]
SECURE = METHODS["all-large"] | {"secure-aggregation.minimum": 3}
RUNS: dict[str, dict[str, Any]] = {
    "stateful": STATEFUL,
    "plain": PLAIN,
    "secure": SECURE,
    "hypernetwork": METHODS["recipfl"],
}


def config_of(folder: Path, name: str, **changes: Any):
    folder.mkdir(exist_ok=True)
    keys = RUNS[name] | {"devices-per-round": 6, "rounds": 2, "evaluate-every": 2} | changes
    return small_config(folder, **{key.replace("-", "_"): value for key, value in keys.items()})


def files_of(folder: Path) -> dict[str, bytes]:
    """What the devices of a run keep, but for the keys of secure aggregation, which are drawn anew."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("secure.")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in WALL}


def trained(folder: Path, name: str) -> dict[str, Any]:
    """All that two rounds on two workers come to."""
    config = config_of(folder, name)
    engine, _ = started(config)
    engine.start()
    with local_grid(2) as grid:
        scorer = scorer_on(grid, TaskSpec.from_json(engine.settings.task))
        results = [engine.run_round(grid, number, scorer) for number in (1, 2)]
    state = engine.state()
    return {
        "tensors": safetensors.torch.save(state.tensors),
        "values": json.dumps(state.values, sort_keys=True),
        "rounds": [without_clock(r.record) for r in results],
        "devices": [[without_clock(line) for line in r.devices] for r in results],
        "files": files_of(folder / "runs" / "small" / "device-state"),
    }


Known = Callable[[str], dict[str, Any]]


def known_by_name(tmp_path_factory, of: Callable[[Path, str], dict[str, Any]]) -> Known:
    return cache(lambda name: of(tmp_path_factory.mktemp("undisturbed"), name))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Known:
    """What rounds come to in which nobody is killed."""
    return known_by_name(tmp_path_factory, trained)


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory) -> Known:
    """What a run comes to in which nobody is killed."""
    return known_by_name(tmp_path_factory, run_here)


def kill_once(monkeypatch, where: str, marker: Path, *, when=lambda *args: True, after=False, who=os.getpid, times=1):
    """From now on the first process but this one that calls a function is killed, before it or after it."""
    here = os.getpid()

    def deadly(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs) if after else None
        if os.getpid() != here and when(*args):
            for number in range(times):
                try:
                    marker.with_suffix(f".{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(who(), signal.SIGKILL)
                signal.pause()
        return found if after else original(*args, **kwargs)

    module, _, dotted = where.partition(":")
    original = attrgetter(dotted)(import_module(module))
    monkeypatch.setattr(f"{module}.{dotted}", deadly)


ANSWERED = "wildflower.client_app.training_message:TrainingMessage.reply"


def in_round_2(message) -> bool:
    return message.batch.round == 2


MOMENTS = {
    "before it trains": (
        "stateful",
        "wildflower.client_app.training_message:do_order",
        lambda context: context._before == 2,
        False,
    ),
    "between the two files of a device": (
        "stateful",
        "wildflower.client_app.kept_state:DeviceState.save",
        lambda state, key, number, *_: number == 2 and key.startswith("control"),
        True,
    ),
    "before it answers": ("stateful", ANSWERED, in_round_2, True),
    "while it scores personal models": ("stateful", "wildflower.client_app.work:score_order", lambda *args: True, True),
    "while it scores for the server": ("plain", "wildflower.client_app.simulation:score", lambda *args: True, False),
    "plain": ("plain", ANSWERED, in_round_2, True),
    "statistics": (
        "plain",
        "wildflower.client_app.training_message:do_order",
        lambda context: type(context.client_step).__name__ == "TakeStatistics",
        True,
    ),
    "hypernetwork": ("hypernetwork", ANSWERED, in_round_2, True),
    "keys": (
        "secure",
        "wildflower.client_app.work:_keys",
        lambda b, *_: b.round == 2 and not (b.orders[0].members or b.orders[0].sealed),
        True,
    ),
    "shares": ("secure", "wildflower.client_app.work:_keys", lambda b, *_: b.round == 2 and b.orders[0].members, True),
    "masks": ("secure", ANSWERED, in_round_2, True),
    "revealed": ("secure", "wildflower.client_app.work:_keys", lambda b, *_: b.round == 2 and b.orders[0].sealed, True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_worker_changes_nothing(moment, undisturbed, tmp_path, monkeypatch, caplog):
    name, where, when, after = MOMENTS[moment]
    expected = undisturbed(name)
    kill_once(monkeypatch, where, tmp_path / "killed", when=when, after=after)
    found = trained(tmp_path / "run", name)
    assert "was killed (SIGKILL), most likely because memory ran out" in caplog.text
    assert found == expected


def test_a_second_death_over_a_device_is_its_failure_alone_and_leaves_no_trace_on_it(tmp_path, monkeypatch, caplog):
    """It comes to what it does where the device refuses to train, although it had saved its state the first time."""

    def is_3(context, *args) -> bool:
        return context.order.device == 3 and context._before == 2

    def refusing(context):
        if is_3(context):
            raise RuntimeError("as the test asked")
        return do_order(context)

    do_order = import_module("wildflower.client_app.training_message").do_order
    with monkeypatch.context() as patch:
        patch.setattr("wildflower.client_app.training_message.do_order", refusing)
        expected = trained(tmp_path / "refused", "stateful")
    kill_once(
        monkeypatch,
        "wildflower.client_app.context:DeviceContext.save",
        tmp_path / "killed",
        when=is_3,
        after=True,
        times=2,
    )
    found = trained(tmp_path / "killed twice", "stateful")
    (refused,), (killed_twice,) = (
        [line["outcome"] for line in of["devices"].pop(1) if line["outcome"] != "trained"] for of in (expected, found)
    )
    assert refused == "failed: RuntimeError: as the test asked"
    assert killed_twice.endswith("(fewer workers need less), for the second time over this work")
    assert found == expected
    deaths = [text for text in caplog.messages if "another one takes its place" in text]
    assert len(deaths) == 2
    assert "for devices [3] in round 2" in deaths[1]


def killed(what: Callable[[], object]) -> None:
    """Run something in a process of its own, which is killed in the middle of it."""
    child = os.fork()
    if child == 0:
        try:
            what()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def run_here(folder: Path, name: str = "stateful", **changes: Any) -> dict[str, bytes]:
    """What a whole run leaves in its folder that a later round stands on."""
    config = config_of(folder, name, **changes)
    with local_grid(2) as grid:
        run_dir = run(grid, config)
    lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    return (
        files_of(run_dir / "checkpoint" / "round-2")
        | files_of(run_dir / "device-state")
        | {"rounds": json.dumps([without_clock(line) for line in lines]).encode()}
    )


def takes_in_round_2(engine, work, *args) -> bool:
    return work.round == 2


# Of the server's process: in the middle of its round, between the journal and the checkpoint, and while it writes that.
SERVER = {
    "while devices train": ("stateful", "wildflower.rounds.sending:Sending.take", takes_in_round_2),
    "while devices are masked": ("secure", "wildflower.rounds.sending:Sending.take", takes_in_round_2),
    "after the journal": (
        "stateful",
        "wildflower.server_app.journal:Journal.write_round",
        lambda journal, record, *_: record["round"] == 2,
    ),
    "at the checkpoint": ("stateful", "wildflower.server_app.checkpoint:_sha256", lambda path: "round-2" in str(path)),
}


@pytest.mark.parametrize("moment", SERVER)
def test_a_run_whose_server_is_killed_is_gone_on_with(moment, tmp_path, monkeypatch, undisturbed_run):
    name, where, when = SERVER[moment]
    with monkeypatch.context() as patch:
        kill_once(patch, where, tmp_path / "killed", when=when, after=True)
        killed(lambda: run_here(tmp_path / "run", name))
    assert run_here(tmp_path / "run", name, resume=True) == undisturbed_run(name)


def test_a_run_whose_forking_process_is_killed_ends_in_words_and_is_gone_on_with(
    tmp_path, monkeypatch, undisturbed_run
):
    with monkeypatch.context() as patch:
        kill_once(patch, ANSWERED, tmp_path / "killed", when=in_round_2, after=True, who=os.getppid)
        with pytest.raises(ForkServerError, match="the process that workers are forked from is gone; short of memory"):
            run_here(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "runs" / "small" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"].startswith("the process that workers are forked from is gone")
    assert run_here(tmp_path / "run", resume=True) == undisturbed_run("stateful")
