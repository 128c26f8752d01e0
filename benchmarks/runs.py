"""What a run left behind, for studies that look into it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from wildflower.rounds.engine import Engine
from wildflower.server_app import checkpoint
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.strategies.submodel import SubModelMethod
from wildflower.tasks.task import TaskSpec, load_task


def with_traffic(record: Mapping[str, Any]) -> dict[str, Any]:
    """A round or a summary with `bytes_down` and `bytes_up` as recorded figures have them.

    These are of training and of batch norm statistics together, so that rows of one table are of one kind whenever they
    were run.
    """
    both = {way: record[f"training_{way}"] + record[f"statistics_{way}"] for way in ("bytes_down", "bytes_up")}
    return {**record, **both}


def trained_method(run: Path) -> tuple[SubModelMethod, Engine, RunConfig]:
    """The method of a run's folder in the state of its last round, its engine, and the run's configuration.

    Raises:
        ValueError: the method has no global model.
    """
    config = config_of(run)
    engine, _ = build(config)
    method = engine.method
    if not isinstance(method, SubModelMethod):
        raise ValueError(f"{run}: strategy {config.strategy} has no global model")
    saved = checkpoint.load(run)
    engine.load(saved.state)
    method.round = saved.round
    return method, engine, config


def config_of(run: Path) -> RunConfig:
    """What a run is made with."""
    return RunConfig.from_run_config(json.loads((run / "config.json").read_text())["config"])


def digest_of(settings: Any) -> str:
    """What tells settings that JSON can hold from others, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's rounds.jsonl, `with_traffic`."""
    return [with_traffic(json.loads(line)) for line in (run / "rounds.jsonl").read_text().splitlines()]


def first_round_with(curve: Mapping[str, float], score: float) -> str:
    """The first round that reaches a score, of scores by evaluated rounds; "never" where none does."""
    return next((str(number) for number, value in curve.items() if value >= score), "never")


def devices_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's devices.jsonl, one per order of a device."""
    return [json.loads(line) for line in (run / "devices.jsonl").read_text().splitlines()]


def summary_of(run: Path) -> dict[str, Any]:
    """A run's summary.json, likewise."""
    return with_traffic(json.loads((run / "summary.json").read_text()))


def from_test_set(method: SubModelMethod, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the first `count` examples of a run's test set, as a model takes them."""
    task = load_task(TaskSpec.from_json(method.settings.task))
    return task.prepare(task.test.inputs[:count], augment=None), task.test.labels[:count]


def from_training_set(method: SubModelMethod, count: int) -> Tensor:
    """Inputs of the first `count` examples of a run's training set, as a model takes them."""
    task = load_task(TaskSpec.from_json(method.settings.task))
    return task.prepare(task.train.inputs[:count], augment=None)
