"""What a run left behind, for studies that look into it."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from server_app import checkpoint
from server_app.app import build
from server_app.config import RunConfig
from server_app.journal import todays_names
from strategies.submodel import SubModelStrategy
from tasks.task import TaskSpec, load_task


def trained_strategy(run: Path) -> tuple[SubModelStrategy, RunConfig]:
    """The strategy of a run's folder in the state of its last round, and the run's configuration.

    Raises:
        ValueError: the strategy has no global model.
    """
    config = RunConfig.from_run_config(json.loads((run / "config.json").read_text())["config"])
    strategy, _ = build(config)
    if not isinstance(strategy, SubModelStrategy):
        raise ValueError(f"{run}: strategy {config.strategy} has no global model")
    saved = checkpoint.load(run)
    strategy.load_state_dict(saved.state)
    strategy.round = saved.round
    return strategy, config


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's rounds.jsonl, with scores under today's names whichever version wrote them."""
    return [todays_names(json.loads(line)) for line in (run / "rounds.jsonl").read_text().splitlines()]


def summary_of(run: Path) -> dict[str, Any]:
    """A run's summary.json, likewise."""
    return todays_names(json.loads((run / "summary.json").read_text()))


def from_test_set(strategy: SubModelStrategy, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the first `count` examples of a run's test set, as a model takes them."""
    task = load_task(TaskSpec.from_json(strategy.settings.task))
    return task.prepare(task.test.inputs[:count], augment=None), task.test.labels[:count]


def from_training_set(strategy: SubModelStrategy, count: int) -> Tensor:
    """Inputs of the first `count` examples of a run's training set, as a model takes them."""
    task = load_task(TaskSpec.from_json(strategy.settings.task))
    return task.prepare(task.train.inputs[:count], augment=None)
