"""The ServerApp: from the configuration to task, family, fleet and strategy; runs the rounds and keeps the journal."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from wildflower.client_app.simulation import ForkServerError
from wildflower.devices.fleet import Fleet, bundled_fleet, replaced_devices
from wildflower.messages.orders import LocalTraining
from wildflower.models.cost import cost
from wildflower.models.family import Family, family_class, make_family
from wildflower.models.initial import checked_names, digest_of, folder_of_sizes, load_initial, weights_file
from wildflower.plugins.extras import MissingExtraError, check_installed
from wildflower.plugins.nearest import did_you_mean
from wildflower.plugins.reference import is_reference, one_sentence
from wildflower.rounds.engine import Engine
from wildflower.rounds.evaluation import Scorer
from wildflower.rounds.hooks import HookError
from wildflower.rounds.layout_check import DryRunError, dry_run_privacy, dry_run_secure, dry_run_tensor_sets
from wildflower.rounds.own_data import OwnData, tell_cut, tell_labels, tell_remarks
from wildflower.rounds.population import ConnectedDevices, Holdings, NoNodesError, Population, SimulatedDevices
from wildflower.rounds.standard_hooks import standard_hooks
from wildflower.server_app import checkpoint, ledger
from wildflower.server_app.config import (
    ConfigError,
    RunConfig,
    digests_of,
    keep_modules,
)
from wildflower.server_app.dry_run import dry_run_step
from wildflower.server_app.inline_tables import parse_arguments, rates_of
from wildflower.server_app.journal import Journal
from wildflower.server_app.label_spread import write_labels
from wildflower.server_app.models import MODULES, drop_models_after
from wildflower.server_app.no_progress import NoProgressError
from wildflower.server_app.node_records import take_releases
from wildflower.server_app.own_agreement import agree_here, agree_with_nodes, own_of_run, write_agreed
from wildflower.server_app.resuming import (
    check_folder,
    check_same_data,
    check_same_fleet,
    check_same_initial,
    is_of_a_folder,
)
from wildflower.server_app.run_folder import JournalError, alone_in
from wildflower.server_app.run_hooks import add_run_hooks
from wildflower.server_app.server_scoring import scorer
from wildflower.server_app.superlink_grid import SuperLinkError, SuperLinkGrid, superlink_database
from wildflower.server_app.trackers import Tracker, open_tracker
from wildflower.server_app.trial import Batches, try_networks
from wildflower.server_app.vocabulary import check_answers, check_last_token, check_same_tokens, check_vocabulary
from wildflower.strategies.aggregation import Aggregation
from wildflower.strategies.method import Method, Setup
from wildflower.strategies.privacy import BudgetSpentError, Privacy, noise_multiplier_for
from wildflower.strategies.run_settings import RoundSettings
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.data import DataSet
from wildflower.tasks.public import PublicData, load_public
from wildflower.tasks.scoring import HELD_OUT
from wildflower.tasks.task import Task, TaskSpec, labels_alike, load_data_set, load_task, with_test

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
    """What the devices of a run say of data that they alone hold; None where the server deals them out.

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
    with _ending(journal, tracker):
        first_round = _take_up(config, run_dir, engine, journal) if config.resume else 1
        _tell_run(config, run_dir, engine, first_round)
        progress = add_run_hooks(engine, config, run_dir, journal, tracker)
        start(engine, config, first_round)
        for number in range(first_round, config.rounds + 1):
            if engine.settings.privacy is not None:
                engine.settings.privacy.check_room(number)
            engine.population.release(take_releases(run_dir))  # before devices are sampled
            result = engine.run_round(grid, number, scorer)
            if result.stopped:
                log(INFO, "The run ends after round %s of %s: %s", number, config.rounds, result.stopped)
                break
        progress.check_trained()
    log(INFO, "Report: %s", run_dir / "report.html")


@contextmanager
def _ending(journal: Journal, tracker: Tracker | None) -> Iterator[None]:
    """Write the end of a run, whatever it is."""
    status: Literal["finished", "failed"] = "failed"
    try:
        yield
    except IN_WORDS as error:
        _finish_failed(journal, str(error))
        raise
    except BaseException:
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


Known = dict[tuple[str, str], Any]
"""What the checks of several runs have read, so that each file is read once."""


def _once(known: Known, kind: str, name: str, read: Callable[[], Any]) -> Any:
    if (kind, name) not in known:
        known[kind, name] = read()
    return known[kind, name]


def _fleet_digest(config: RunConfig, known: Known) -> str:
    """The digest of the run's fleet, "" where it has none; ValueError unless that has the run's number of devices."""

    def read() -> str:
        # What a model of some width needs is known once the family is built, and makes no difference here.
        return Fleet.load(fleet_path(config), devices=config.devices, seed=0, requirement=lambda _: (1, 1)).digest

    return _once(known, f"fleet of {config.devices}", config.fleet, read) if config.fleet else ""


def check_files(config: RunConfig, known: Known) -> None:
    """Raise ValueError or OSError unless the run's fleet has its number of devices, and its first weights are there.

    Devices that the fleet replaces must have examples.
    """
    _fleet_digest(config, known)
    task_spec(config)
    _once(known, "initial", config.initial.weights, lambda: initial_digest(config))


def check_same_inputs(run_dir: Path, config: RunConfig, known: Known) -> None:
    """Raise JournalError unless fleet files, first weights and data are those that the run in `run_dir` began with.

    Of data only those of a folder or of a module from outside are read: named data sets do not change, and devices
    that hold their own may. Also raises what reading the files raises.

    Args:
        run_dir: of the run.
        config: with which it would go on.
        known: what was read for other runs before; what is read now is added to it.
    """
    check_same_fleet(run_dir, config.to_dict(), _fleet_digest(config, known))
    check_same_initial(run_dir, _once(known, "initial", config.initial.weights, lambda: initial_digest(config)))
    if is_of_a_folder(config.task) and config.partition != "own":
        # Seed, devices and partition make no difference. `load_task` may know the data of an earlier moment.
        of_run = task_spec(config)
        spec = TaskSpec(of_run.name, devices=1, data_dir=of_run.data_dir, arguments=of_run.arguments)

        def identity() -> dict[str, Any]:
            return Task(spec, load_data_set(spec.name, spec.data_dir, spec.arguments)).identity()

        check_same_data(run_dir, _once(known, "data", repr(spec), identity))


def _take_up(config: RunConfig, run_dir: Path, engine: Engine, journal: Journal) -> int:
    """Restore the newest good checkpoint, or that of `resume-from`. -> the round that comes next."""
    if not config.resume_from and journal.last_round <= 1 and not checkpoint.exists(run_dir):
        # The journal is written first: a run that broke off in between has a round there, and nothing to go on from.
        log(INFO, "%s has no checkpoint yet: the run begins anew", run_dir)
        journal.drop_after(0)
        return 1
    saved = checkpoint.load(run_dir, config.resume_from, at_most=journal.last_round)
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


def named(config: RunConfig) -> RunConfig:
    """The configuration with a run name: one made of strategy, task and time where it has none."""
    if config.run_name:
        return config
    if config.resume:
        raise ConfigError("resume = True: run-name must say which run to resume")
    name = f"{config.label}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config.model_copy(update={"run_name": name})


def run_folder(config: RunConfig) -> Path:
    """The absolute folder of a named run."""
    return (Path(config.output_dir).expanduser() / config.run_name).absolute()


def build(config: RunConfig, own: OwnData | None = None) -> tuple[Engine, Scorer | None]:
    """The engine of a configuration with all it stands on, and the function that scores models.

    There is none where only devices have examples to test on.

    Args:
        own: what devices say of data that they alone hold, where they have been asked. The folders of simulated devices
            are read here.

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
    family = _family(config, task, options, family_defaults, examples)
    settings = RoundSettings(
        run=config.run_name,
        replaced_devices=spec.devices - config.devices,
        task=spec.to_json(),
        task_name=config.task,
        seed=config.seed,
        rounds=config.rounds,
        devices_per_round=config.devices_per_round,
        sampled_devices=config.sampled_devices,
        training=LocalTraining(
            epochs=config.local_epochs,
            steps=config.local_steps,
            batch_size=config.batch_size,
            micro_batch_size=config.micro_batch_size,
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            momentum=config.momentum if config.optimizer == "sgd" else 0.0,
            betas=(config.adam.betas[0], config.adam.betas[1]),
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            augment=config.augment,
            learning_rates=_learning_rates(config, family),
            layout=config.layout,
            fused=config.adam.fused,
        ),
        schedule=config.schedule.kind,
        decay_rounds=tuple(int(r) for r in config.schedule.decay_rounds),
        decay_factor=config.schedule.decay_factor,
        memory_fraction=config.budget.memory_fraction,
        transfer_seconds=config.budget.transfer_seconds or None,
        deadline_seconds=config.deadline_seconds or None,
        round_seconds=config.budget.round_seconds or None,
        evaluate_every=config.evaluate_every,
        evaluate_tiers=config.evaluate_tiers,
        statistics_devices=config.statistics.devices,
        statistics_examples=config.statistics.examples,
        deliver=config.deliver,
        personal_every=config.personal.every,
        personal_epochs=config.personal.epochs,
        personal_from=config.personal.first_round,
        state_dir=_state_dir(config),
        norm_bound=config.norm_bound,
        privacy=privacy_of(config),
        secure_minimum=config.secure_aggregation.minimum,
        aggregation=Aggregation(config.aggregation.rule, config.aggregation.trim),
        wire=config.wire,
        metric=task.metric,
        label_sets=task.label_sets is not None,
        score_without_model=task.metric.without_model(task.test.labels),
    )

    initial, initial_file = _initial(config, family, task)
    setup = Setup(
        family,
        settings,
        config.widths,
        config.below_smallest,
        config.both_models,
        config.shared,
        initial,
        _public(config, task, family),
        initial_file,
    )
    with _naming("strategy", config.strategy):
        method = kind(setup, params)
        try:
            method.family.check_left(method.smallest_architecture)
        except ValueError as error:
            raise ConfigError(f"freeze = {config.freeze!r}: {error}") from None
        dry_run_tensor_sets(method)
        dry_run_privacy(method)
        dry_run_secure(method)
        method.cost(method.smallest_architecture)
    if method.needs_classes and task.label_kind != "classes":
        other = "take a method that minimizes the task's loss alone, such as strategy = 'fedavg'"
        mask = f"set {kind.name()}.masked-loss = false, or " if getattr(params, "masked_loss", False) else ""
        raise ConfigError(
            f"strategy = {config.strategy!r}: with these settings it needs one class per example, and the labels of "
            f"{config.task!r} are {task.label_kind}: {mask}{other}"
        )
    if config.deliver == "best" and len(task.test) < HELD_OUT:
        remedy = f", or give the server a test set of at least {HELD_OUT} in data-dir" if own is not None else ""
        raise ConfigError(
            f"deliver = 'best': a fifth of the server's test set is held out to choose by, and {config.task!r} has "
            f"{len(task.test)} test examples there: set deliver = 'largest'{remedy}"
        )
    scores = scorer(task, held_out=config.deliver == "best") if len(task.test) else None
    population = _population(config, method, task, own)
    return Engine(method, population, standard_hooks(settings, population, own), own), scores


def privacy_of(config: RunConfig) -> Privacy | None:
    """How the run protects its devices; ConfigError where no noise is enough, or the accountant is not installed."""
    if not config.is_private:
        return None
    rate = config.devices_per_round / config.devices
    try:
        noise = config.dp.noise_multiplier or noise_multiplier_for(
            config.dp.epsilon, config.rounds, rate, config.dp.delta
        )
        seeded = bool(config.fleet)
        privacy = Privacy(
            config.dp.clip, noise, config.dp.delta, rate, config.devices_per_round, seeded, config.dp.epsilon
        )
        epsilon = privacy.epsilon(config.rounds)
    except ValueError as error:
        key = "dp.epsilon" if config.dp.epsilon else "dp.noise-multiplier"
        raise ConfigError(f"{key} = {config.to_dict()[key]!r}: {error}") from None
    log(
        INFO,
        "Differential privacy: noise multiplier %.4g, epsilon %.4g with delta %g after %s rounds",
        noise,
        epsilon,
        config.dp.delta,
        config.rounds,
    )
    return privacy


def task_spec(config: RunConfig) -> TaskSpec:
    """The task of a run as its messages name it. ConfigError where the fleet does not go with it."""
    replaced = replaced_devices(fleet_path(config), config.devices) if config.fleet else 0
    if replaced and not config.examples_per_device and config.partition != "own":
        raise ConfigError(
            f"fleet = {config.fleet!r} replaces {replaced} devices after every round, and all examples are dealt out "
            "to the first ones: set examples-per-device, so that each device draws its own"
        )
    if replaced and config.partition == "own":
        raise ConfigError(f"fleet = {config.fleet!r} replaces devices: it does not go with partition = 'own'")
    return TaskSpec(
        name=config.task,
        data_dir=str(Path(config.data_dir).expanduser().absolute()) if config.data_dir else "",
        partition=config.partition,
        device_folders=config.partition == "own" and bool(config.fleet),
        max_examples=config.max_examples,
        alpha=config.alpha,
        devices=config.devices + config.rounds * replaced,  # all that ever come
        seed=config.seed,
        test_fraction=config.test_fraction,
        examples_per_device=config.examples_per_device or None,
        strong_devices=config.strong.devices,
        strong_share=config.strong.share,
        strong_test=config.strong.test,
        arguments=config.own_task_arguments(),
    )


def _learning_rates(config: RunConfig, family: Family) -> dict[str, float]:
    """The multiples of the learning rate by part; ConfigError where a part is not in the family, or is frozen."""
    rates = {part: float(rate) for part, rate in rates_of(config.learning_rates).items()}
    try:
        family.check_trained(rates)
    except ValueError as error:
        raise ConfigError(f"learning-rates = {config.learning_rates!r}: {error}") from None
    return rates


def _initial(config: RunConfig, family: Family, task: Task) -> tuple[Mapping[str, Tensor], Path | None]:
    """The weights that a run is given, and their file; ({}, None) where it has none.

    The log says what was found of them, and what was not.
    """
    if not config.initial.weights:
        return {}, None
    try:
        names = checked_names(parse_arguments(config.initial.names))
        file = weights_file(config.initial.weights)
        found = load_initial(file, family, names)
        check_same_tokens(task, family, file.parent, found.tensors)
    except ValueError as error:
        why = str(error).removeprefix(f"{config.initial.weights}: ")
        raise ConfigError(f"initial.weights = {config.initial.weights!r}: {why}") from None
    log(WARNING if found.missing or found.left_over else INFO, "Initial weights: %s", found.describe())
    return found.whole(family, lambda: initial_weights(family, config.seed)), file


def initial_digest(config: RunConfig) -> str:
    """SHA-256 of the file that a run's first weights come from; "" where they are drawn."""
    return digest_of(weights_file(config.initial.weights)) if config.initial.weights else ""


def _family(
    config: RunConfig, task: Task, options: Mapping[str, Any], defaults: dict[str, Any], examples: Sequence[int]
) -> Family:
    """The family of a run; ConfigError where it cannot take the task's inputs.

    `options` are the method's and cannot be changed; `defaults` are the method's where the user says nothing else, as
    far as the family has such arguments. `examples`: of each device, for training.
    """
    name = config.family or task.family
    of_task = {"input_shape": list(task.input_shape), "classes": task.classes}
    fixed = {**of_task, **options}
    arguments = parse_arguments(config.family_arguments)
    if set(arguments) & set(fixed):
        raise ConfigError(
            f"family-arguments = {config.family_arguments!r}: {', '.join(sorted(set(arguments) & set(fixed)))} follow "
            "from task and strategy: leave them out"
        )
    try:
        known = [field.name for field in fields(family_class(name))]
        if unknown := next((key for key in arguments if key not in known), None):
            free = [key for key in known if key not in ("freeze", *fixed)]
            hint = did_you_mean(unknown, free)
            raise ConfigError(
                f"family-arguments = {config.family_arguments!r}: family {name!r} has no argument {unknown!r}; "
                f"{f'{hint} It' if hint else 'it'} has {', '.join(free) or 'none'}"
            )
        # The folder or hub name that weights come from says what model they are of, where a family can read that.
        if "model" in known and (folder := folder_of_sizes(config.initial.weights)) is not None:
            defaults = {"model": str(folder), **defaults}
        of_texts = _text_sizes(task, {**defaults, **arguments})
        if "labels" in arguments and arguments["labels"] != of_texts.get("labels", arguments["labels"]):
            raise ConfigError(
                f"family-arguments = {config.family_arguments!r}: labels = {arguments['labels']!r}, and those of "
                f"{config.task!r} are of {of_texts['labels']!r}: leave labels out"
            )
        # A family without batch norm or scaler, such as one of any modules, has nothing to say to a method's wishes.
        wishes = {
            **of_texts,
            "tokens": task.normalization is None,
            **defaults,
            **arguments,
            **options,
        }
        wanted = {key: value for key, value in wishes.items() if key in known}
        frozen = [part.strip() for part in config.freeze.split(",") if part.strip()]
        family = make_family({"name": name, **wanted, **of_task, **({"freeze": frozen} if frozen else {})})
        check_vocabulary(task, family)
        try:
            family.check_freeze()
        except ValueError as error:
            raise ConfigError(f"freeze = {config.freeze!r}: {error}") from None
        check_last_token(task, family)
        # Before they are priced: what a module keeps for later, as by `lru_cache`, then has values.
        batches = Batches(config.batch_size, config.micro_batch_size, examples)
        for finding in try_networks(family, task, batches):
            log(WARNING, "%s", finding)
        if batches.left_over:
            left = "%s of %s devices leave one example out in every pass: it would be a batch by itself"
            log(INFO, left, batches.left_over, len(examples))
        cost(family, family.full(), batch_size=config.batch_size, optimizer=config.optimizer)
        check_answers(task, family, config.batch_size)
    except (ConfigError, MissingExtraError):
        raise
    except Exception as error:
        if not isinstance(error, ValueError) and not is_reference(name):
            raise
        why = str(error) if isinstance(error, ValueError) else one_sentence(error)
        given = f" with family-arguments = {config.family_arguments!r}" if config.family_arguments else ""
        if is_reference(name):  # it may not go with any inputs
            raise ConfigError(f"family = {name!r}{given}: {why.removeprefix(f'{name}: ')}") from None
        shape = "x".join(map(str, task.input_shape))
        raise ConfigError(
            f"family = {name!r}{given} does not go with the {shape} inputs of {config.task!r}: {why}"
        ) from None
    return family


def _text_sizes(task: Task, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a task of texts says of a family that has such fields: its tokens, and whether each of them has a label.

    Whether texts come in pairs too: `separator` then is the token behind both.
    """
    if task.vocabulary is None:
        return {}
    labels = {
        "labels": "tokens" if task.label_kind == "classes of tokens" else "sequence",
        "separator": task.vocabulary.separator,  # which no model's folder says
    }
    # A model that exists has a vocabulary of its own, which is then compared with the task's.
    own = "model" in arguments
    return labels if own else labels | {"vocabulary": task.vocabulary.tokens, "pad_id": task.vocabulary.pad_id}


def _public(config: RunConfig, task: Task, family: Family) -> PublicData | None:
    """The server's public data, if the run has any; ConfigError where models could not read them."""
    if not config.public.task:
        return None
    if (config.public.task, config.public.data_dir) == (config.task, config.data_dir):
        log(WARNING, "public.task is the run's own task: its public data are the devices' own examples")
    folder = str(Path(config.public.data_dir).expanduser().absolute()) if config.public.data_dir else ""
    try:
        return load_public(
            config.public.task,
            folder,
            config.own_task_arguments() if config.public.task == config.task else None,
            task=task,
            dtype=family.input_dtype,
            examples=config.public.examples,
            seed=config.seed,
            separator=family.pair_separator,
        )
    except (ValueError, FileNotFoundError) as error:
        # Tasks name the key that the run's own data come from.
        why = re.sub(r"(?<![^\s(])data-dir\b", "public.data-dir", str(error))
        raise ConfigError(f"public.task = {config.public.task!r}: {why}") from error


def fleet_path(config: RunConfig) -> Path:
    """The fleet file of a run that has one."""
    return Path(config.fleet).expanduser() if config.fleet.endswith(".toml") else bundled_fleet(config.fleet)


def _population(config: RunConfig, method: Method, task: Task, own: OwnData | None) -> Population:
    if own is None:
        holdings = Holdings(task.training_examples, task.test_examples, len(task.test))
    else:
        holdings = Holdings(own.training, own.testing, len(task.test))
    if not config.fleet:
        minimum = min(config.devices, config.devices_per_round)
        return ConnectedDevices(holdings, minimum=minimum, report_max_age_seconds=REPORT_MAX_AGE_SECONDS)

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


def _state_dir(config: RunConfig) -> str:
    """Where simulated devices keep their state: with the run, so that a resumed run finds it and no other does.

    Nodes that act as workers keep it where they keep their own: they may be on other machines.
    """
    if config.engine == "nodes":
        return ""
    if config.state_dir:
        return str(Path(config.state_dir).expanduser().absolute())
    return str(run_folder(config) / "device-state") if config.fleet else ""
