"""Figures to trackers, over stand-ins for their libraries; tests/server_app/with_trackers.py has the real ones."""

import json
import math
import sys
from threading import Event
from types import ModuleType, SimpleNamespace

import pytest

from tests.server_app.fake_runs import CONFIG, a_device, a_round
from wildflower.server_app import trackers
from wildflower.server_app.journal import Journal
from wildflower.server_app.run_folder import JournalError
from wildflower.server_app.run_hooks import Tracking


class FakeMLflow(ModuleType):
    """The calls that are made of MLflow; what they hold is in `runs`, by the runs' names over there."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: dict[str, SimpleNamespace] = {}
        self.experiments: list[str] = []
        self.places: list[str] = []
        self.broken = False
        self.broken_from = 10**9  # the round
        self.entities = SimpleNamespace(
            Metric=lambda key, value, timestamp, step: (key, value, step), Param=lambda key, value: (key, value)
        )

    def MlflowClient(self, uri):
        self.places.append(uri)
        return self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments.append(name)
        return name

    def create_run(self, experiment_id, run_name):
        run_id = f"{experiment_id}-{run_name}-{len(self.runs)}"
        self.runs[run_id] = SimpleNamespace(status="RUNNING", params={}, metrics=[])
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
        self.runs[run_id].status = status

    def log_batch(self, run_id, metrics=(), params=()):
        if self.broken or any(step >= self.broken_from for _, _, step in metrics):
            raise OSError("no route to host")
        assert len(params) <= 100
        self.runs[run_id].params |= dict(params)
        self.runs[run_id].metrics += metrics

    def set_terminated(self, run_id, status):
        self.runs[run_id].status = status


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict] = []
        self.lines: list[dict] = []
        self.codes: list[int] = []

    def init(self, **arguments):
        self.begun.append(arguments)
        return SimpleNamespace(
            define_metric=lambda *names, step_metric=None: None,
            log=self.lines.append,
            finish=lambda exit_code: self.codes.append(exit_code),
        )


@pytest.fixture
def mlflow(monkeypatch):
    made = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", made)
    monkeypatch.setitem(sys.modules, "mlflow.entities", made.entities)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return made


def test_mlflow_has_a_runs_settings_and_rounds(mlflow, tmp_path):
    many = {f"key-{number}": number for number in range(150)}
    journal = Tracked(tmp_path / "one", CONFIG | {"tracker": "mlflow"} | many, resume=False)
    tiers = {"a:b": 0.5}
    journal.write_round(a_round(1, score_by_tier=tiers, loss=math.nan, epsilon=None), [a_device(1, 0)])
    journal.finish("finished")
    (run,) = mlflow.runs.values()
    assert mlflow.places == [f"sqlite:///{tmp_path}/mlflow.db"]
    assert run.status == "FINISHED"
    assert run.params["learning-rate"] == "0.1"
    assert run.params["key-149"] == "149"
    metrics = {name: (value, step) for name, value, step in run.metrics}
    assert metrics["delivered_accuracy"] == (0.08, 1)
    assert metrics["accuracy_by_tier/a_b"] == (0.5, 1)
    assert metrics["training_bytes_down"] == (1000, 1)
    assert not {"loss", "epsilon"} & metrics.keys()


def test_a_run_that_goes_on_is_the_same_run_over_there(mlflow, tmp_path):
    config = CONFIG | {"tracker": "mlflow"}
    journal = Tracked(tmp_path / "one", config, resume=False)
    journal.write_round(a_round(1), [])
    journal.finish("failed", "a fault")
    (run,) = mlflow.runs.values()
    assert run.status == "FAILED"
    journal = Tracked(tmp_path / "one", config, resume=True)
    assert run.status == "RUNNING"
    journal.write_round(a_round(2), [])
    journal.finish("finished")
    Tracked(tmp_path / "two", config, resume=False)
    assert {step for _, _, step in run.metrics} == {1, 2}
    assert mlflow.experiments == ["wildflower"]
    assert len(mlflow.runs) == 2


def test_a_run_may_go_on_with_another_tracker_or_none(mlflow, tmp_path):
    for number, tracker in ((1, "mlflow"), (2, "")):
        journal = Tracked(tmp_path / "one", CONFIG | {"tracker": tracker}, resume=number > 1)
        journal.write_round(a_round(number), [])
        journal.finish("finished")
    (run,) = mlflow.runs.values()
    assert {step for _, _, step in run.metrics} == {1}


def test_a_tracker_that_breaks_off_does_not_end_the_run(mlflow, tmp_path, caplog):
    journal = Tracked(tmp_path / "one", CONFIG | {"tracker": "mlflow"}, resume=False)
    journal.write_round(a_round(1), [])
    mlflow.broken_from = 2
    journal.write_round(a_round(2), [])
    journal.write_round(a_round(3), [])
    assert journal.finish("finished").rounds == 3
    assert caplog.messages == [
        "mlflow takes no more figures, from round 2 on: OSError: no route to host. The run goes on, and its journal "
        "has them"
    ]


class Tracked:
    """A journal and the tracker beside it, as in a run."""

    def __init__(self, run_dir, config, resume):
        self.journal = Journal.open(run_dir, config, resume)
        self.tracker = trackers.open_tracker(config["tracker"], run_dir, config) if config["tracker"] else None

    def write_round(self, record, devices):
        self.journal.write_round(record, devices)
        if self.tracker is not None:
            Tracking(self.tracker).at_end(SimpleNamespace(number=record["round"], record=record))

    def finish(self, status, error=None):
        summary = self.journal.finish(status, error)
        if self.tracker is not None:
            self.tracker.end(status)
        return summary


class Slow:
    """A tracker that takes what it gets when it is let."""

    def __init__(self) -> None:
        self.let = Event()
        self.got: list[int | str] = []

    def write(self, round, scalars):
        self.let.wait(60)
        self.got.append(round)

    def end(self, status):
        self.got.append(status)


def test_a_slow_tracker_does_not_hold_the_run_and_what_waits_for_it_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(trackers, "MAX_WAITING", 3)
    slow = Slow()
    guarded = trackers.Guarded("slow", slow)
    for number in range(1, 11):
        guarded.write(number, {})
    assert slow.got == []  # all this while it has taken nothing
    slow.let.set()
    guarded.end("finished")
    *rounds, last = slow.got
    assert last == "finished"
    assert rounds[:3] == [1, 2, 3]
    assert len(rounds) <= 4  # one more if round 1 was taken, and its place free, while others waited
    assert caplog.messages[0].startswith("slow is slow: 3 rounds wait for it, and figures are left out from round")
    assert caplog.messages[1] == f"slow lacks the figures of {11 - len(slow.got)} rounds, for which it was too slow"


def test_a_tracker_that_hangs_does_not_hold_the_end_of_a_run(monkeypatch, caplog):
    monkeypatch.setattr(trackers, "END_SECONDS", 0.01)
    slow = Slow()
    guarded = trackers.Guarded("slow", slow)
    guarded.write(1, {})
    guarded.end("finished")
    assert "slow has not taken the end of the run within 0.01 seconds" in caplog.text
    slow.let.set()


def test_a_tracker_that_cannot_begin_stops_the_run_before_its_first_round(mlflow, tmp_path, monkeypatch):
    mlflow.broken = True
    with pytest.raises(JournalError, match="tracker = 'mlflow': OSError: no route to host"):
        Tracked(tmp_path / "one", CONFIG | {"tracker": "mlflow"}, resume=False)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.raises(JournalError, match=r"tracker = 'wandb' needs wandb, .*pip install .*--editable '\.\[wandb\]'"):
        Tracked(tmp_path / "two", CONFIG | {"tracker": "wandb"}, resume=False)
    mlflow.broken = False
    Tracked(tmp_path / "one", CONFIG | {"tracker": "mlflow"}, resume=False)  # the same name may begin again


def test_wandb_has_them_too(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for resume in (False, True):
        journal = Tracked(tmp_path / "one", CONFIG | {"tracker": "wandb"}, resume=resume)
        journal.write_round(a_round(1 + resume), [])
        journal.finish("finished")
    first, again = [begun["id"] for begun in wandb.begun]
    assert first == again
    assert {begun["project"] for begun in wandb.begun} == {"wildflower"}
    assert wandb.begun[0]["config"]["learning-rate"] == 0.1
    assert [(line["round"], line["accuracy"]) for line in wandb.lines] == [(1, 0.1), (2, 0.2)]
    assert wandb.codes == [0, 0]
    assert json.loads((tmp_path / "one" / trackers.FILE).read_text()) == {"wandb": first}
