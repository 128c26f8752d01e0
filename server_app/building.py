"""A run's engine, built from its configuration: task, family, settings, method, devices and hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wildflower.devices.fleet import Fleet
from wildflower.messages.programs import check_writable
from wildflower.models.base import Family
from wildflower.models.frozen import check_left
from wildflower.plugins.extras import check_installed
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference, one_sentence
from wildflower.rounds.buffered import BufferedEngine
from wildflower.rounds.connected_devices import ConnectedDevices
from wildflower.rounds.engine import Engine
from wildflower.rounds.evaluation import Scorer
from wildflower.rounds.hooks import HookError, RoundHook, check_hooks
from wildflower.rounds.layout_check import DryRunError, dry_run_privacy, dry_run_secure, dry_run_tensor_sets
from wildflower.rounds.own_data import OwnData, tell_cut, tell_labels, tell_remarks
from wildflower.rounds.population import Holdings, Population
from wildflower.rounds.simulated_devices import SimulatedDevices
from wildflower.rounds.standard_hooks import standard_hooks
from wildflower.server_app.built_family import family_of
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.dry_run import dry_run_step
from wildflower.server_app.inputs import fleet_path, initial_of, public_of, task_spec
from wildflower.server_app.no_progress import NoProgressError
from wildflower.server_app.own_agreement import agree_here
from wildflower.server_app.own_hooks import hooks_named
from wildflower.server_app.round_settings import settings_of
from wildflower.server_app.server_scoring import scorer
from wildflower.strategies.method import Method, Setup
from wildflower.strategies.run_settings import RoundSettings
from wildflower.tasks.data import DataSet
from wildflower.tasks.inspection import labels_alike, with_test
from wildflower.tasks.task import Task, TaskSpec, load_task
from wildflower.tasks.two_parts import seldom_meant

# From which age on a real node's last report is asked for anew.
REPORT_MAX_AGE_SECONDS = 600.0


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
    task, own = _task_of(config, own)
    with _naming(config.strategy):
        options, family_defaults = config.method.family_options, config.method.family_defaults(config.params)
    if own is None:
        examples = [task.training_examples(device) for device in range(config.devices)]
    else:
        examples = own.told_training()
    family = family_of(config, task, options, family_defaults, examples)
    settings = settings_of(config, task, family)
    method = _method_of(config, task, family, settings)
    if config.deliver == "best" and config.evaluate_tiers and settings.deliver != "best":
        log.info("The server has no examples to choose by: a device counts with the model that it would be assigned")
    scores = scorer(task, held_out=settings.deliver == "best") if len(task.test) else None
    if config.delivery.every and not config.fleet:
        check_writable(config.delivery.format)
    population = _population(config, method, task, own)
    theirs = [*hooks_named(config.hooks), *hooks]
    with raised_as(ConfigError, "", HookError):
        check_hooks(theirs, settings)
    kind_of_rounds = BufferedEngine if settings.buffer else Engine
    return kind_of_rounds(method, population, [*standard_hooks(settings, population, own), *theirs], own), scores


def _task_of(config: RunConfig, own: OwnData | None) -> tuple[Task, OwnData | None]:
    """The task of a run, and what devices say of data that they alone hold. What is found of the data is logged."""
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
    both = seldom_meant(task.train, task.test) if own is None else ()
    tell_remarks(f"{config.data_dir or task.spec.name}: {remark}" for remark in (*task.remarks, *both))
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
    return task, own


def _method_of(config: RunConfig, task: Task, family: Family, settings: RoundSettings) -> Method:
    """The method of a run, of which all is tried that needs no device."""
    kind, params = config.method, config.params
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
    with _naming(config.strategy):
        method = kind(setup, params)
        with raised_as(ConfigError, f"freeze = {config.freeze!r}: "):
            check_left(method.family, method.smallest_architecture)
        dry_run_tensor_sets(method)
        dry_run_privacy(method)
        dry_run_secure(method)
        method.cost(method.smallest_architecture)
    takes_tokens = kind.traits(params).takes_tokens and task.label_kind == "classes of tokens"
    if method.needs_classes and task.label_kind != "classes" and not takes_tokens:
        other = "take a method that minimizes the task's loss alone, such as strategy = 'fedavg'"
        off = [f"{kind.name()}.masked-loss = false"] if getattr(params, "masked_loss", False) else []
        off += ["distillation.steps = 0"] if getattr(getattr(method, "distillation", None), "steps", 0) else []
        what = f"set {' and '.join(off)}, or " if off else ""
        raise ConfigError(
            f"strategy = {config.strategy!r}: with these settings it needs one class per example, and the labels of "
            f"{config.task!r} are {task.label_kind}: {what}{other}"
        )
    return method


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

    fleet = Fleet(fleet_path(config), devices=config.devices, seed=config.seed, requirement=requirement)
    group, count = next(iter(fleet.counts.items()), ("", config.strong.devices))
    if config.partition == "strong-and-weak" and len(fleet.counts) > 1 and count != config.strong.devices:
        raise ConfigError(
            f"strong.devices = {config.strong.devices}: the fleet's first group, {group!r}, has {count} devices, which "
            f"are those that come first in partition = 'strong-and-weak': set strong.devices = {count}"
        )
    return SimulatedDevices(fleet, config.workers, holdings, elsewhere=config.engine == "nodes")


def data_of(engine: Engine) -> dict[str, Any]:
    """Return what identifies a run's data; {} where devices hold their own, which may change between rounds."""
    return {} if engine.own is not None else load_task(TaskSpec.from_json(engine.settings.task)).identity()


def start(engine: Engine, config: RunConfig, first_round: int = 1) -> None:
    """Let the method begin, and try what its halves send each other; ConfigError where they do not agree.

    One from outside also does a step of one device, on a copy of it.
    """
    with _naming(config.strategy):
        engine.start(first_round)
        if is_reference(config.strategy) and engine.own is None:  # data that only devices have are not here
            dry_run_step(engine, load_task(TaskSpec.from_json(engine.settings.task)))  # at hand since `build`


@contextmanager
def _naming(strategy: str) -> Iterator[None]:
    """Turn what goes wrong in a method from outside into a ConfigError that names it."""
    try:
        yield
    except (ConfigError, NoProgressError):
        raise
    except DryRunError as error:
        raise ConfigError(f"strategy = {strategy!r}: {error}") from error
    except Exception as error:
        if not is_reference(strategy):
            raise
        raise ConfigError(f"strategy = {strategy!r}: {one_sentence(error)}") from error
