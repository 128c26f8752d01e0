"""Figures of rounds to MLflow or Weights & Biases, each by its own library, beside the journal (docs/trackers.md)."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, Protocol
from uuid import uuid4

from wildflower.plugins.extras import MissingExtraError, needed
from wildflower.plugins.flower_log import log
from wildflower.server_app.run_folder import JournalError
from wildflower.server_app.whole_files import write_whole

PROJECT = "wildflower"  # where the user names none
FILE = "tracker.json"  # of a run's folder: what the run is called over there, by which a resumed one is found again
MAX_PARAMETERS = 100  # in one message to MLflow
MAX_LETTERS = 500  # of a parameter's value
MAX_WAITING = 100  # rounds that may wait for a slow tracker
END_SECONDS = 60.0  # that a tracker may take at a run's end for what still waits
NO_NAME = re.compile(r"[^\w\-. /]")  # what MLflow's names cannot have


class Tracker(Protocol):
    """Where figures go."""

    def write(self, round: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a round."""

    def end(self, status: str) -> None:
        """The run is finished or failed."""


def open_tracker(name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """Return the tracker of a run, "mlflow" or "wandb". A run that goes on goes on there too.

    Raises JournalError where its library is not installed, or does not let the run begin.
    """
    try:
        with needed(name, f"tracker = {name!r}"):
            return Guarded(name, TRACKERS[name](run_dir, config))
    except MissingExtraError as error:
        raise JournalError(str(error)) from None
    except Exception as error:  # whatever the library raises
        raise JournalError(f"tracker = {name!r}: {type(error).__name__}: {error}") from error


class Guarded:
    """A tracker whose troubles end the tracking and not the run: the journal has all figures anyway.

    A thread of its own writes to it, so that no round waits for a server that is slow. Of one that is so slow that
    `MAX_WAITING` rounds wait, those that come then are left out.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._waiting: Queue[tuple[int, Mapping[str, float]] | str] = Queue()
        self._left_out: list[int] = []  # rounds
        # No process is to live on for a server that does not answer.
        self._thread = Thread(target=self._send, args=(tracker,), name=name, daemon=True)
        self._thread.start()

    def write(self, round: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a round, as long as that has always worked; this does not wait for it."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((round, scalars))
            return
        if not self._left_out:
            log.warning(
                "%s is slow: %s rounds wait for it, and figures are left out from round %s on. The journal has them",
                self._name,
                MAX_WAITING,
                round,
            )
        self._left_out.append(round)

    def end(self, status: str) -> None:
        """The run has ended: wait until the tracker has its figures, but not longer than `END_SECONDS`."""
        self._waiting.put(status)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            log.warning(
                "%s has not taken the end of the run within %s seconds: it lacks figures there, and is called running. "
                "The journal has all figures",
                self._name,
                END_SECONDS,
            )
        if self._left_out:
            log.warning("%s lacks the figures of %s rounds, for which it was too slow", self._name, len(self._left_out))

    def _send(self, tracker: Tracker) -> None:
        works = True
        while not isinstance(waiting := self._waiting.get(), str):
            round, scalars = waiting
            try:
                if works:
                    tracker.write(round, scalars)
            except Exception as error:  # whatever the library raises
                works = False
                log.warning(
                    "%s takes no more figures, from round %s on: %s: %s. The run goes on, and its journal has them",
                    self._name,
                    round,
                    type(error).__name__,
                    error,
                )
        try:
            if works:
                tracker.end(waiting)
        except Exception as error:  # whatever the library raises
            log.warning("%s does not end the run: %s: %s", self._name, type(error).__name__, error)


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says, or else in the database `mlflow.db` beside the run's folder."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        folder = run_dir.parent.absolute()
        known = _known(run_dir, "mlflow")
        # Runs of a sweep begin at once, and only one of them can make the database and the experiment.
        with (folder / ".mlflow.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db")
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            place = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        if known is not None:
            self._run = known
            self._client.update_run(known, status="RUNNING")
            return
        self._run = self._client.create_run(place, run_name=run_dir.name).info.run_id
        parameters = [Param(key, str(value)[:MAX_LETTERS]) for key, value in config.items()]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + MAX_PARAMETERS])
        _remember(run_dir, "mlflow", self._run)

    def write(self, round: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a round as metrics of that step."""
        now = int(1000 * time.time())
        metrics = [self._metric(NO_NAME.sub("_", name), value, now, round) for name, value in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, status: str) -> None:
        """The run has ended."""
        self._client.set_terminated(self._run, status="FINISHED" if status == "finished" else "FAILED")


class Wandb:
    """A run of Weights & Biases, in the project that WANDB_PROJECT names; its files lie in the run's folder."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        name = _known(run_dir, "wandb") or uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=name,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(config),
            resume="allow",
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")
        _remember(run_dir, "wandb", name)

    def write(self, round: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a round."""
        self._run.log({"round": round, **scalars})

    def end(self, status: str) -> None:
        """The run has ended."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {"mlflow": MLflow, "wandb": Wandb}


def finite(scalars: Mapping[str, float | None]) -> dict[str, float]:
    """The figures that are there, without those that are no numbers, which not every store takes."""
    return {name: value for name, value in scalars.items() if value is not None and math.isfinite(value)}


def _known(run_dir: Path, tracker: str) -> str | None:
    """What the run is called in a tracker; None where it is not there yet."""
    path = run_dir / FILE
    if not path.exists():
        return None
    name = json.loads(path.read_text(encoding="utf-8")).get(tracker)
    return str(name) if name is not None else None


def _remember(run_dir: Path, tracker: str, name: str) -> None:
    path = run_dir / FILE
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_whole(path, json.dumps(known | {tracker: name}))
