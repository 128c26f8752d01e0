"""The ServerApp: from the configuration to task, family, fleet and strategy; runs the rounds and keeps the journal."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from wildflower.client_app.simulation import ForkServerError
from wildflower.plugins.beside import digests, keep
from wildflower.plugins.flower_log import log
from wildflower.rounds.engine import Engine
from wildflower.rounds.evaluation import Scorer
from wildflower.rounds.hooks import HookError
from wildflower.rounds.own_data import OwnData
from wildflower.rounds.population import NoNodesError, Population
from wildflower.server_app import checkpoint, ledger
from wildflower.server_app.building import build, data_of, start
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.deliveries import Deliveries, only_delivers
from wildflower.server_app.inputs import initial_digest, named, run_folder, task_spec
from wildflower.server_app.journal import Journal
from wildflower.server_app.label_spread import write_labels
from wildflower.server_app.model_map import write_groups
from wildflower.server_app.models import MODULES, drop_models_after
from wildflower.server_app.no_progress import NoProgressError
from wildflower.server_app.node_records import take_releases
from wildflower.server_app.own_agreement import agree_with_nodes, own_of_run, write_agreed
from wildflower.server_app.resuming import check_folder
from wildflower.server_app.run_folder import JournalError, alone_in
from wildflower.server_app.run_hooks import add_run_hooks
from wildflower.server_app.superlink_grid import SuperLinkError, SuperLinkGrid, superlink_database
from wildflower.server_app.trackers import Tracker, open_tracker
from wildflower.strategies.privacy import BudgetSpentError
from wildflower.tasks.task import TaskSpec, load_task

NUMBERS = re.compile(r"\b(node|device)s? \[?(\d{1,20}\b(?:(?:, | and )\d{1,20}\b)*)", re.IGNORECASE)


def with_names(text: str, nodes: Mapping[int, str], devices: Mapping[int, str]) -> str:
    """Return a line of a log with a name behind each number of a node or a device that has one."""

    def name(of: Mapping[int, str], number: re.Match[str]) -> str:
        found = of.get(int(number[0]))
        return f"{number[0]} ({found})" if found else number[0]

    def names(match: re.Match[str]) -> str:
        of = nodes if match[1].lower() == "node" else devices
        start = match.start(2) - match.start()
        return match[0][:start] + re.sub(r"\d+", partial(name, of), match[2])

    return NUMBERS.sub(names, text)


@contextmanager
def naming_devices(population: Population) -> Iterator[None]:
    """Name real devices in what Flower's log is given; the workers of a simulation have no names."""

    def naming(record: logging.LogRecord) -> bool:
        if population.names:
            devices = {state.device: state.name for state in population.newest_reports()}
            record.msg, record.args = with_names(record.getMessage(), population.names, devices), ()
        return True

    logger = logging.getLogger("flwr")
    logger.addFilter(naming)
    try:
        yield
    finally:
        logger.removeFilter(naming)


__all__ = ["app", "build", "run", "start"]

app = ServerApp()

# Errors whose text is all there is to know: no frame tells more.
IN_WORDS = (
    NoProgressError,
    NoNodesError,
    ConfigError,
    SuperLinkError,
    ForkServerError,
    BudgetSpentError,
    HookError,
    JournalError,
    checkpoint.CheckpointError,
)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run configuration describes."""
    config = named(RunConfig.from_run_config(context.run_config))
    simulated = bool(config.fleet) and config.engine != "nodes"
    run(SuperLinkGrid(grid, config.run_name, superlink_database(), simulated=simulated), config)


def run(grid: Grid, config: RunConfig, built: tuple[Engine, Scorer | None] | None = None) -> Path:
    """Run all rounds of an experiment over a grid; returns the run's folder.

    Args:
        grid: to the nodes.
        config: of the run.
        built: what `build` has made of it already.

    Raises:
        ConfigError, JournalError, CheckpointError: before round 1, naming what is wrong.
    """
    torch.set_num_threads(1)  # the workers need the other cores
    config = named(config)
    run_dir = run_folder(config)
    check_folder(run_dir, config.resume)
    engine, scorer = built or build(config, agreed_data(grid, config, run_dir))
    with alone_in(run_dir):
        _run(grid, config, run_dir, engine, scorer)
    return run_dir


def agreed_data(grid: Grid | None, config: RunConfig, run_dir: Path) -> OwnData | None:
    """Return what the devices of a run say of data that they alone hold; None where the server deals them out.

    A run that is resumed goes on with what its devices had agreed on. Without a fleet it needs the grid, to ask nodes.
    """
    if config.partition != "own":
        return None
    spec = task_spec(config)
    before = own_of_run(run_dir, config, spec) if config.resume else None
    if before is not None or config.fleet or grid is None:
        return before
    return agree_with_nodes(grid, config, spec)


def _run(grid: Grid, config: RunConfig, run_dir: Path, engine: Engine, scorer: Scorer | None) -> None:
    journal = _open_journal(config, run_dir, engine)
    tracker = open_tracker(config.tracker, run_dir, config.to_dict()) if config.tracker else None
    with naming_devices(engine.population), _ending(journal, tracker):
        first_round = _take_up(config, run_dir, engine, journal) if config.resume else 1
        _tell_run(config, run_dir, engine, first_round)
        deliveries = Deliveries(run_dir, config, engine)
        progress = add_run_hooks(engine, config, run_dir, journal, tracker, deliveries)
        start(engine, config, first_round)
        only = only_delivers(run_dir)
        for number in () if only else range(first_round, config.rounds + 1):
            if engine.settings.privacy is not None:
                engine.settings.privacy.check_room(number)
            engine.population.release(take_releases(run_dir))  # before devices are sampled
            result = engine.run_round(grid, number, scorer)
            if result.stopped:
                log.info("The run ends after round %s of %s: %s", number, config.rounds, result.stopped)
                break
        progress.check_trained()
        if (only or first_round > config.rounds) and not engine.population.simulated:
            deliveries.to_all(grid)
        deliveries.wait(grid)
    log.info("Report: %s", run_dir / "report.html")


@contextmanager
def _ending(journal: Journal, tracker: Tracker | None) -> Iterator[None]:
    """Write the end of a run that is finished or has failed; one that is interrupted has none, and goes on later."""
    status: Literal["finished", "failed"] = "failed"
    try:
        yield
    except IN_WORDS as error:
        _finish_failed(journal, str(error))
        raise
    except Exception:
        _finish_failed(journal, traceback.format_exc())
        raise
    else:
        journal.finish("finished")
        status = "finished"
    finally:
        if tracker is not None:  # after all that is ours: a slow one takes its time
            tracker.end(status)


def _tell_run(config: RunConfig, run_dir: Path, engine: Engine, first_round: int) -> None:
    privacy, method = engine.settings.privacy, engine.method
    if privacy is not None and (again := len(privacy.account.releases) - (first_round - 1)) > 0:
        text = (
            "The run goes on with round %s and has released %s noised models more than rounds before it: epsilon %.4g"
        )
        log.warning(text, first_round, again, privacy.account.epsilon())
    log.info("Run folder: %s", run_dir)
    log.info("%s over %s, %s devices per round", method.name(), method.family.name, config.devices_per_round)
    if ignored := config.ignored_text():
        log.warning("%s", ignored)


def _open_journal(config: RunConfig, run_dir: Path, engine: Engine) -> Journal:
    """Open the journal, and write what a run's folder has before round 1."""
    privacy = engine.settings.privacy
    if privacy is not None and not config.resume:
        ledger.begin(run_dir)
    # First of all that reads a run, because it says in words how a resumed one's configuration differs from before.
    journal = Journal.open(
        run_dir,
        config.to_dict(),
        config.resume,
        fleet=engine.population.fleet_digest,
        plugins=digests(config.modules()),
        initial=initial_digest(config),
        data=data_of(engine),
        budgets=engine.population.most_bytes,
    )
    if privacy is not None:
        ledger.keep(privacy, run_dir)
    if engine.own is not None and engine.own.spec.agreed is not None:
        write_agreed(run_dir, engine.own.spec.agreed)
    if engine.own is None and engine.population.simulated:
        write_labels(run_dir, load_task(TaskSpec.from_json(engine.settings.task)), engine.population.tier)
    write_groups(run_dir, engine.method.family)
    keep(config.modules(), run_dir / MODULES)
    return journal


def _take_up(config: RunConfig, run_dir: Path, engine: Engine, journal: Journal) -> int:
    """Restore the newest good checkpoint, or that of `checkpoints.resume-from`. -> the round that comes next."""
    if not config.checkpoints.resume_from and journal.last_round <= 1 and not checkpoint.exists(run_dir):
        # The journal is written first: a run that broke off in between has a round there, and nothing to go on from.
        log.info("%s has no checkpoint yet: the run begins anew", run_dir)
        journal.drop_after(0)
        return 1
    saved = checkpoint.load(run_dir, config.checkpoints.resume_from, at_most=journal.last_round)
    engine.load(saved.state)
    engine.population.now_seconds = saved.now_seconds
    # The checkpoints first: they must never be ahead of the journal.
    checkpoint.drop_after(run_dir, saved.round)
    journal.drop_after(saved.round)
    drop_models_after(run_dir, saved.round)
    return saved.round + 1


def _finish_failed(journal: Journal, error: str) -> None:
    """Write the end of a failed run; on a full disk that fails too, and what failed first is what counts."""
    try:
        journal.finish("failed", error)
    except (OSError, JournalError) as second:
        log.warning("The summary of the failed run could not be written: %s", second)
