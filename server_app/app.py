"""The ServerApp: from the configuration to task, family, fleet and strategy; runs the rounds and keeps the journal."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from wildflower.client_app.simulation import ForkServerError
from wildflower.devices.fleet import Fleet
from wildflower.messages.programs import check_writable
from wildflower.models.frozen import check_left
from wildflower.plugins.extras import check_installed
from wildflower.plugins.reference import is_reference, one_sentence
from wildflower.rounds.buffered import BufferedEngine
from wildflower.rounds.connected_devices import ConnectedDevices
from wildflower.rounds.engine import Engine
from wildflower.rounds.evaluation import Scorer
from wildflower.rounds.hooks import HookError, RoundHook, check_hooks
from wildflower.rounds.layout_check import DryRunError, dry_run_privacy, dry_run_secure, dry_run_tensor_sets
from wildflower.rounds.own_data import OwnData, tell_cut, tell_labels, tell_remarks
from wildflower.rounds.population import Holdings, NoNodesError, Population
from wildflower.rounds.simulated_devices import SimulatedDevices
from wildflower.rounds.standard_hooks import standard_hooks
from wildflower.server_app import checkpoint, ledger
from wildflower.server_app.built_family import family_of
from wildflower.server_app.config import (
    ConfigError,
    RunConfig,
    digests_of,
    keep_modules,
)
from wildflower.server_app.deliveries import Deliveries, only_delivers
from wildflower.server_app.dry_run import dry_run_step
from wildflower.server_app.inputs import fleet_path, initial_digest, initial_of, named, public_of, run_folder, task_spec
from wildflower.server_app.journal import Journal
from wildflower.server_app.label_spread import write_labels
from wildflower.server_app.log_names import naming_devices
from wildflower.server_app.models import MODULES, drop_models_after
from wildflower.server_app.no_progress import NoProgressError
from wildflower.server_app.node_records import take_releases
from wildflower.server_app.own_agreement import agree_here, agree_with_nodes, own_of_run, write_agreed
from wildflower.server_app.own_hooks import hooks_named
from wildflower.server_app.resuming import check_folder
from wildflower.server_app.round_settings import settings_of
from wildflower.server_app.run_folder import JournalError, alone_in
from wildflower.server_app.run_hooks import add_run_hooks
from wildflower.server_app.server_scoring import scorer
from wildflower.server_app.superlink_grid import SuperLinkError, SuperLinkGrid, superlink_database
from wildflower.server_app.trackers import Tracker, open_tracker
from wildflower.strategies.method import Method, Setup
from wildflower.strategies.privacy import BudgetSpentError
from wildflower.tasks.data import DataSet
from wildflower.tasks.inspection import labels_alike, with_test
from wildflower.tasks.task import Task, TaskSpec, load_task

app = ServerApp()

# From which age on a real node's last report is asked for anew.
REPORT_MAX_AGE_SECONDS = 600.0
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
    if config.engine != "nodes":
        config = config.model_copy(update={"engine": "flower"})
    simulated = bool(config.fleet) and config.engine == "flower"
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
                log(INFO, "The run ends after round %s of %s: %s", number, config.rounds, result.stopped)
                break
        progress.check_trained()
        if (only or first_round > config.rounds) and not engine.population.simulated:
            deliveries.to_all(grid)
        deliveries.wait(grid)
    log(INFO, "Report: %s", run_dir / "report.html")


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
        log(WARNING, text, first_round, again, privacy.account.epsilon())
    log(INFO, "Run folder: %s", run_dir)
    log(INFO, "%s over %s, %s devices per round", method.name(), method.family.name, config.devices_per_round)
    if ignored := config.ignored_text():
        log(WARNING, "%s", ignored)


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
        engine.population.fleet_digest,
        digests_of(config),
        initial_digest(config),
        data_of(engine),
        engine.population.most_bytes,
    )
    if privacy is not None:
        ledger.keep(privacy, run_dir)
    if engine.own is not None and engine.own.spec.agreed is not None:
        write_agreed(run_dir, engine.own.spec.agreed)
    if engine.own is None and engine.population.simulated:
        write_labels(run_dir, load_task(TaskSpec.from_json(engine.settings.task)), engine.population.tier)
    keep_modules(config, run_dir / MODULES)
    return journal


def data_of(engine: Engine) -> dict[str, Any]:
    """Return what identifies a run's data; {} where devices hold their own, which may change between rounds."""
    return {} if engine.own is not None else load_task(TaskSpec.from_json(engine.settings.task)).identity()


def _take_up(config: RunConfig, run_dir: Path, engine: Engine, journal: Journal) -> int:
    """Restore the newest good checkpoint, or that of `checkpoints.resume-from`. -> the round that comes next."""
    if not config.checkpoints.resume_from and journal.last_round <= 1 and not checkpoint.exists(run_dir):
        # The journal is written first: a run that broke off in between has a round there, and nothing to go on from.
        log(INFO, "%s has no checkpoint yet: the run begins anew", run_dir)
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
        log(WARNING, "The summary of the failed run could not be written: %s", second)


def start(engine: Engine, config: RunConfig, first_round: int = 1) -> None:
    """Let the method begin, and try what its halves send each other; ConfigError where they do not agree.

    One from outside also does a step of one device, on a copy of it.
    """
    with _naming("strategy", config.strategy):
        engine.start(first_round)
        if is_reference(config.strategy) and engine.own is None:  # data that only devices have are not here
            dry_run_step(engine, load_task(TaskSpec.from_json(engine.settings.task)))  # at hand since `build`


@contextmanager
def _naming(key: str, name: str) -> Iterator[None]:
    """Turn what goes wrong in something from outside into a ConfigError that names it."""
    try:
        yield
    except (ConfigError, NoProgressError):
        raise
    except DryRunError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from error
    except Exception as error:
        if not is_reference(name):
            raise
        raise ConfigError(f"{key} = {name!r}: {one_sentence(error)}") from error


def build(
    config: RunConfig, own: OwnData | None = None, hooks: Sequence[RoundHook] = ()
) -> tuple[Engine, Scorer | None]:
    """The engine of a configuration with all it stands on, and the function that scores models.

    There is none where only devices have examples to test on.

    Args:
        own: what devices say of data that they alone hold, where they have been asked. The folders of simulated devices
            are read here.
        hooks: given from Python, beside those that the configuration names.

    Raises ValueError, ConfigError among them, where the data, the fleet or the family are not there or do not go
    together.
    """
    spec = task_spec(config)
    test: DataSet | None = None
    if config.partition == "own":
        if own is None and not config.fleet:
            raise ConfigError("partition = 'own': no node has been asked yet what its device's data are")
        own = own or agree_here(config, spec)
        spec, test = own.spec, own.test
    task = load_task(spec)
    if task.metric.library:
        check_installed(task.metric.library, f"the metric {task.metric.name}")
    if test is not None:
        task = with_test(task, test)
    tell_remarks(f"{config.data_dir or task.spec.name}: {remark}" for remark in task.remarks)
    if own is None:  # what devices have is looked at together
        tell_labels(labels_alike(task))
    if task.vocabulary is not None:
        cut_texts, texts = task.vocabulary.cut_texts, len(task.train) + len(task.test)
        if own is not None:  # the server's texts are those that it tests on, if any
            of_devices = own.cut_texts(range(config.devices))
            cut_texts = (test.cut_texts if test is not None else 0) + of_devices[0]
            texts += of_devices[1]
        tell_cut(cut_texts, texts, task.input_shape[0])
    tested = own is not None or any(len(task.own_test(device)[1]) for device in range(config.devices))
    if config.personal.every and not tested:
        raise ConfigError(
            f"personal.every = {config.personal.every}: no device has examples to be tested on; set test-fraction, "
            "such as 0.2, or partition = 'strong-and-weak', or personal.every = 0"
        )
    kind, params = config.method, config.params
    with _naming("strategy", config.strategy):
        options, family_defaults = kind.family_options, kind.family_defaults(params)
    if own is None:
        examples = [task.training_examples(device) for device in range(config.devices)]
    else:
        examples = own.told_training()
    family = family_of(config, task, options, family_defaults, examples)
    settings = settings_of(config, spec, task, family)
    initial, initial_file = initial_of(config, family, task)
    setup = Setup(
        family,
        settings,
        config.widths,
        config.below_smallest,
        config.both_models,
        config.shared,
        initial,
        public_of(config, task, family),
        initial_file,
    )
    with _naming("strategy", config.strategy):
        method = kind(setup, params)
        try:
            check_left(method.family, method.smallest_architecture)
        except ValueError as error:
            raise ConfigError(f"freeze = {config.freeze!r}: {error}") from None
        dry_run_tensor_sets(method)
        dry_run_privacy(method)
        dry_run_secure(method)
        method.cost(method.smallest_architecture)
    if method.needs_classes and task.label_kind != "classes":
        other = "take a method that minimizes the task's loss alone, such as strategy = 'fedavg'"
        off = [f"{kind.name()}.masked-loss = false"] if getattr(params, "masked_loss", False) else []
        off += ["distillation.steps = 0"] if getattr(getattr(method, "distillation", None), "steps", 0) else []
        what = f"set {' and '.join(off)}, or " if off else ""
        raise ConfigError(
            f"strategy = {config.strategy!r}: with these settings it needs one class per example, and the labels of "
            f"{config.task!r} are {task.label_kind}: {what}{other}"
        )
    if config.deliver == "best" and config.evaluate_tiers and settings.deliver != "best":
        log(INFO, "The server has no examples to choose by: a device counts with the model that it would be assigned")
    scores = scorer(task, held_out=settings.deliver == "best") if len(task.test) else None
    if config.delivery.every and not config.fleet:
        check_writable(config.delivery.format)
    population = _population(config, method, task, own)
    theirs = [*hooks_named(config.hooks), *hooks]
    try:
        check_hooks(theirs, settings)
    except HookError as error:
        raise ConfigError(str(error)) from None
    kind_of_rounds = BufferedEngine if settings.buffer else Engine
    return kind_of_rounds(method, population, [*standard_hooks(settings, population, own), *theirs], own), scores


def _population(config: RunConfig, method: Method, task: Task, own: OwnData | None) -> Population:
    if own is None:
        holdings = Holdings(task.training_examples, task.test_examples, len(task.test))
    else:
        holdings = Holdings(own.training, own.testing, len(task.test))
    if not config.fleet:
        return ConnectedDevices(
            holdings,
            wanted=min(config.devices, config.devices_per_round),
            minimum=config.minimum_devices,
            report_max_age_seconds=REPORT_MAX_AGE_SECONDS,
        )

    def requirement(width: float) -> tuple[int, int]:
        """Memory and payload that the method needs for the sub-model of a width."""
        needed = method.cost(method.family.width(width))
        return needed.peak_training_memory_bytes, needed.payload_bytes

    fleet = Fleet.load(fleet_path(config), devices=config.devices, seed=config.seed, requirement=requirement)
    group, count = next(iter(fleet.counts.items()), ("", config.strong.devices))
    if config.partition == "strong-and-weak" and len(fleet.counts) > 1 and count != config.strong.devices:
        raise ConfigError(
            f"strong.devices = {config.strong.devices}: the fleet's first group, {group!r}, has {count} devices, which "
            f"are those that come first in partition = 'strong-and-weak': set strong.devices = {count}"
        )
    return SimulatedDevices(fleet, config.workers, holdings, elsewhere=config.engine == "nodes")
