"""Round hooks that fill a run's folder after every round: journal, models, reports of nodes, checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from wildflower.plugins.flower_log import log
from wildflower.rounds.engine import Engine
from wildflower.rounds.hooks import Round, RoundHook
from wildflower.server_app import checkpoint
from wildflower.server_app.config import RunConfig
from wildflower.server_app.deliveries import Deliveries
from wildflower.server_app.journal import Journal
from wildflower.server_app.models import save_models
from wildflower.server_app.no_progress import Progress
from wildflower.server_app.node_records import write_nodes
from wildflower.server_app.run_records import RoundRecord, scalars_of
from wildflower.server_app.trackers import Tracker, finite
from wildflower.tasks.metrics import scale_of
from wildflower.tasks.task import TaskSpec, load_task


def add_run_hooks(
    engine: Engine,
    config: RunConfig,
    run_dir: Path,
    journal: Journal,
    tracker: Tracker | None,
    deliveries: Deliveries,
) -> Progress:
    """Add what a run writes to its engine's hooks. -> the last of them.

    The journal comes first: a checkpoint without its journal lines could not be resumed. The checkpoint comes after
    the hooks of users, so that it has what these keep after the round.
    """
    before: list[RoundHook] = [RunFolder(run_dir, engine, journal)]
    if tracker is not None:
        before.append(Tracking(tracker))
    if not engine.population.simulated:
        before.append(deliveries)
    after: list[RoundHook] = [Checkpoints(run_dir, engine, config.checkpoints.keep), Lines(config.rounds)]
    progress = Progress(run_dir, config, engine.method)
    engine.hooks[:] = [*before, *engine.hooks, *after, progress]
    return progress


class RunFolder(RoundHook):
    """Writes every round into the journal, the models of every evaluation, and what nodes said last."""

    def __init__(self, run_dir: Path, engine: Engine, journal: Journal) -> None:
        self._run_dir, self._engine, self._journal = run_dir, engine, journal

    @override
    def at_end(self, round: Round) -> None:
        assert round.result is not None
        self._journal.write_round(round.record, round.result.devices)
        if self._engine.evaluation.scored and round.record["score_by_tier"] is not None:  # there was an evaluation
            task = load_task(TaskSpec.from_json(round.settings.task))  # at hand since `build`
            save_models(self._run_dir, self._engine, task)
        if reports := round.population.newest_reports():
            write_nodes(self._run_dir, reports, round.population.quarantined())


class Tracking(RoundHook):
    """Sends the figures of every round to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    @override
    def at_end(self, round: Round) -> None:
        self._tracker.write(round.number, finite(scalars_of(RoundRecord.model_validate(round.record))))


class Checkpoints(RoundHook):
    """Saves the engine's state after every round."""

    def __init__(self, run_dir: Path, engine: Engine, keep: int) -> None:
        self._run_dir, self._engine, self._keep = run_dir, engine, keep

    @override
    def before_assigning(self, round: Round) -> None:
        self._engine.asking.oldest_checkpoint = min(checkpoint.rounds(self._run_dir), default=0)

    @override
    def at_end(self, round: Round) -> None:
        state = checkpoint.Checkpoint(round.number, round.population.now_seconds, self._engine.state())
        checkpoint.save(self._run_dir, state, self._keep)


class Lines(RoundHook):
    """Logs a line for every round."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    @override
    def at_end(self, round: Round) -> None:
        log.info("%s", _line(round.record, self._rounds))


def _line(record: dict[str, Any], rounds: int) -> str:
    label, delivered = scale_of(record["metric"]).label, record["delivered_score"]
    score = "" if delivered is None else f"delivered {label} {delivered:.4f}, "
    if record["score"] is not None:
        score += f"{label if delivered is None else 'whole model'} {record['score']:.4f}, "
    return (
        f"round {record['round']}/{rounds}: {score}"
        f"{record['devices_replied']} of {record['devices_sampled']} devices, "
        f"{(record['training_bytes_down'] + record['training_bytes_up']) / 1e6:.1f} MB, {record['wall_seconds']:.1f} s"
    )
