"""Settings of a run that do not go together, and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wildflower.models.family import FAMILIES, family_class
from wildflower.plugins.nearest import nearest
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference
from wildflower.server_app.inline_tables import rates_of
from wildflower.strategies import METHODS
from wildflower.strategies.named import method_of
from wildflower.strategies.params import kebab, to_scalar
from wildflower.tasks.device_data import FLOAT32_MAX, OwnArguments
from wildflower.tasks.spec import check_own
from wildflower.tasks.task import TASKS, kind_of

if TYPE_CHECKING:
    from wildflower.server_app.config import RunConfig

MAX_NAME_BYTES = 200  # of a folder's name, which most file systems allow 255

Need = Callable[[bool, str, str], None]
"""Raises ValueError unless its first argument holds: (whether it holds, key, why not and what would be right)."""


def check(config: RunConfig) -> None:
    """Raise ValueError where settings do not go together; the text names a key, its value and what would be right."""

    def need(good: bool, key: str, why: str) -> None:
        if not good:
            raise ValueError(f"{key} = {config.to_dict()[key]!r}: {why}")

    _check_names(config, need)
    _check_devices(config, need)
    _check_training(config, need)
    _check_method(config, need)
    need(
        not config.personal.every or config.personal.first_round <= config.rounds,
        "personal.first-round",
        f"with rounds = {config.rounds} no round is scored personally: at most that, or personal.every = 0",
    )
    if config.dp.is_on:
        _check_private(config, need)
    if config.secure_aggregation.is_on:
        _check_secure(config, need)
    if config.buffer:
        _check_buffer(config, need)
    _check_wire(config, need)
    _check_partition(config, need)


def _check_names(config: RunConfig, need: Need) -> None:
    """What is named: method, task, family, public data, run."""

    def known(key: str, value: str, names: Mapping[str, object]) -> None:
        need(value in names, key, f"no such {key}; {nearest(value, names)}")

    def from_outside(key: str, name: str, look_up: Callable[[str], object]) -> None:
        with raised_as(ValueError, f"{key} = {name!r}: "):
            look_up(name)

    from_outside("strategy", config.strategy, method_of)
    if is_reference(config.task):
        from_outside("task", config.task, kind_of)
    else:
        known("task", config.task, TASKS)
    with raised_as(ValueError, f"task-arguments = {config.task_arguments!r}: "):
        arguments = config.own_task_arguments()
    if isinstance(arguments, OwnArguments) and config.partition != "own":
        given = [
            name for name in OwnArguments.model_fields if getattr(arguments, name) and name not in arguments.dealt_out
        ]
        need(
            not given,
            "task-arguments",
            f"{', '.join(given)} would be read under partition = 'own' only: under {config.partition!r} classes, "
            "shape, mean and deviation are those of the files; leave it out",
        )
    if is_reference(config.public.task):
        from_outside("public.task", config.public.task, kind_of)
    elif config.public.task:
        known("public.task", config.public.task, TASKS)
    for family in config.families():
        if is_reference(family):
            from_outside("family", family, family_class)
    if config.family and not is_reference(config.family):
        known("family", config.family, FAMILIES)
    need(
        not config.run_name or (Path(config.run_name).name == config.run_name and config.run_name not in (".", "..")),
        "run-name",
        "the name of one folder, without / (output-dir says where it lies)",
    )
    need(
        config.run_name.isprintable() and len(config.run_name.encode(errors="replace")) <= MAX_NAME_BYTES,
        "run-name",
        f"the name of a folder has letters that can be printed, and at most {MAX_NAME_BYTES} bytes",
    )
    need(
        not config.checkpoints.resume_from or config.resume,
        "checkpoints.resume-from",
        "goes with resume = true only, and names a round of the run that is resumed",
    )


def _check_devices(config: RunConfig, need: Need) -> None:
    """Who takes part, and where devices run."""
    sampled, over_selection = config.sampled_devices, config.aggregation.over_selection
    if config.fleet:
        need(
            sampled <= config.devices,
            "devices-per-round",
            f"more than devices = {config.devices}"
            + (f" (aggregation.over-selection = {over_selection} asks {sampled})" if over_selection else ""),
        )
    most = min(config.devices, config.devices_per_round)
    need(config.minimum_devices <= most, "minimum-devices", f"a round has {most} devices: at most that")
    need(
        not over_selection or config.deadline_seconds > 0 or bool(config.fleet),
        "aggregation.over-selection",
        "needs a fleet or deadline-seconds to tell who is late",
    )
    if config.engine == "nodes":
        need(bool(config.fleet), "engine", "nodes are workers of a fleet's devices, and fleet = '' has none")
        need(config.partition != "own", "engine", "devices of partition = 'own' have their data on nodes of their own")


def _check_training(config: RunConfig, need: Need) -> None:
    """Local training: widths, optimizer, learning rates, batches."""
    need(bool(config.widths), "widths", "at least one width is needed, such as 1 or '1, 0.5'")
    need(all(0 < w <= 1 for w in config.widths), "widths", "every width is above 0 and at most 1")
    need(len(set(config.widths)) == len(config.widths), "widths", "a width is listed twice")
    need(
        not config.adam.fused or config.optimizer != "sgd",
        "adam.fused",
        "is for optimizer = 'adam' and 'adamw': PyTorch chooses by itself for sgd",
    )
    need(
        config.micro_batch_size < config.batch_size,
        "micro-batch-size",
        f"it is a part of batch-size = {config.batch_size}: fewer than that, or 0",
    )
    rates = rates_of(config.learning_rates)
    need(
        all(type(rate) in (int, float) and 0 <= rate <= FLOAT32_MAX for rate in rates.values()),
        "learning-rates",
        "every entry is a part and a multiple, such as classifier = 10",
    )
    need(
        max(rates.values(), default=0) * config.learning_rate <= FLOAT32_MAX,
        "learning-rates",
        f"times learning-rate = {config.learning_rate:g} it is more than a number of 32 bits can be",
    )


def _check_method(config: RunConfig, need: Need) -> None:
    """What the method reads, and what it does not go with."""
    for group, params in config.groups.items():
        if group not in (*METHODS, config.method_name, *config.method.shared_params):
            readers = ", ".join(name for name, kind in METHODS.items() if group in kind.shared_params)
            why = f"strategy = {config.strategy!r} does not read it: leave it out, or take one of {readers}"
            for name, default in type(params)():
                need(getattr(params, name) == default, f"{group}.{kebab(name)}", why)
    traits = config.method.traits(config.params)
    need(not config.both_models or not traits.one_model, "both-models", traits.one_model)
    when = traits.public_when
    reads = when is not None and all(getattr(config.params, name, None) == value for name, value in when.items())
    if config.public.task and not reads:
        need(False, "public.task", _why_not_public(config))
    need(
        not config.initial.weights or traits.takes_initial_weights,
        "initial.weights",
        f"strategy = {config.strategy!r} has no global model that could begin with given weights",
    )
    need(
        not config.freeze or traits.takes_initial_weights,
        "freeze",
        f"strategy = {config.strategy!r} has no global model, of which parts could be frozen",
    )
    need(
        config.aggregation.rule == "mean" or traits.averages,
        "aggregation.rule",
        f"strategy = {config.strategy!r} relies on the mean with these settings, or has none: leave it 'mean'",
    )


def _check_buffer(config: RunConfig, need: Need) -> None:
    """What does not go with asynchronous rounds (docs/asynchronous.md)."""
    need(
        config.buffer <= config.devices_per_round,
        "buffer",
        f"devices-per-round = {config.devices_per_round} are at work at any time: at most that",
    )
    need(
        config.method.traits(config.params).averages,
        "buffer",
        f"strategy = {config.strategy!r} does more with these settings than average what devices return, and what "
        "that comes to with updates of earlier models nobody knows: leave buffer 0",
    )
    without = "leave buffer 0, or leave this out"
    need(
        not config.aggregation.over_selection,
        "aggregation.over-selection",
        f"drops who comes late, and with buffer = {config.buffer} nobody does: {without}",
    )
    need(
        not (config.deadline_seconds and config.fleet),
        "deadline-seconds",
        f"ends a round, and with buffer = {config.buffer} a round ends with that many updates: {without}",
    )
    need(
        not config.dp.is_on,
        "buffer",
        "does not go with differential privacy (dp.epsilon, dp.noise-multiplier): its account wants every device in "
        "a round with one probability, and devices that are at work are in none: leave buffer 0",
    )
    need(
        not config.secure_aggregation.is_on,
        "buffer",
        "does not go with secure-aggregation, under which the devices of one round mask their updates of one model "
        "together: leave buffer 0",
    )


def _check_wire(config: RunConfig, need: Need) -> None:
    """What does not go with rounded values."""
    if config.wire == "float32":
        return
    need(
        not config.secure_aggregation.is_on,
        "wire",
        "does not go with secure-aggregation, whose masks hide integers of 64 bits: leave it 'float32'",
    )
    need(
        not config.dp.is_on,
        "wire",
        "does not go with differential privacy (dp.epsilon, dp.noise-multiplier): what rounding loses of a "
        "device's change comes in a later round, in which nobody counts it: leave it 'float32'",
    )


def _check_partition(config: RunConfig, need: Need) -> None:
    """How examples are dealt out."""
    parted = config.partition == "strong-and-weak"
    need(
        not parted or 0 < config.strong.devices < config.devices,
        "strong.devices",
        f"partition = 'strong-and-weak' needs 1 to {config.devices - 1} of the {config.devices} devices",
    )
    need(
        not parted or (not config.test_fraction and not config.examples_per_device),
        "partition",
        "deals out all examples, and the test set too: test-fraction and examples-per-device do not go with it",
    )
    need(
        config.examples_per_device == 0 or config.partition != "natural",
        "examples-per-device",
        "partition = 'natural' says itself who holds what: use iid or dirichlet, or set it to 0",
    )
    if config.partition == "own":
        with raised_as(ValueError, "partition = 'own': "):
            check_own(config.task)
        need(not config.examples_per_device, "examples-per-device", "partition = 'own': devices have what they have")
        need(
            not config.fleet or bool(config.data_dir),
            "data-dir",
            "partition = 'own' in a simulation needs a folder with a folder per device, such as devices/0000",
        )


def _check_private(config: RunConfig, need: Need) -> None:
    """What breaks differential privacy, or has no meaning with it (docs/privacy.md)."""
    with_it = "does not go with differential privacy (dp.epsilon, dp.noise-multiplier)"
    need(
        config.dp.delta < 1 / config.devices,
        "dp.delta",
        f"with devices = {config.devices} it must be below {1 / config.devices:.3g}",
    )
    need(
        config.method.traits(config.params).tells_means_only,
        "strategy",
        "with these settings it learns more of devices than the mean of what they return, to which noise is added: "
        "set dp.epsilon = 0 and dp.noise-multiplier = 0, or take a strategy that docs/privacy.md does not refuse",
    )
    need(
        config.aggregation.rule == "mean",
        "aggregation.rule",
        f"{with_it}: one device moves a mean of its kind unboundedly",
    )
    need(not config.aggregation.norm_bound, "aggregation.norm-bound", f"{with_it}: dp.clip is the bound")
    need(not config.both_models, "both-models", f"{with_it}: a device has one bounded change")
    need(
        not config.aggregation.over_selection,
        "aggregation.over-selection",
        f"{with_it}: whether a device counts would hang on the others",
    )
    need(not config.personal.every, "personal.every", f"{with_it}: devices' own scores have no noise")
    need(config.devices_per_round <= config.devices, "devices-per-round", f"more than devices = {config.devices}")


def _check_secure(config: RunConfig, need: Need) -> None:
    """What needs single updates, or would show them (docs/secure-aggregation.md)."""
    with_it = "does not go with secure-aggregation"
    need(
        config.aggregation.rule == "mean",
        "aggregation.rule",
        f"{with_it}: it needs every device's values by themselves",
    )
    need(not config.both_models, "both-models", f"{with_it}: a device masks one update in a round")
    need(not config.personal.every, "personal.every", f"{with_it}: devices' scores come one by one")
    need(
        config.secure_aggregation.minimum <= config.devices_per_round,
        "secure-aggregation.minimum",
        f"with devices-per-round = {config.devices_per_round} no sum is ever of so many",
    )
    need(
        not config.dp.is_on,
        "secure-aggregation.minimum",
        "does not go with differential privacy (dp.epsilon, dp.noise-multiplier): whether a group is large enough "
        "to count hangs on the others, and the noise is for one device",
    )


def _why_not_public(config: RunConfig) -> str:
    """What to do where a run has public data that nothing reads."""
    leave_out = "leave public.task, public.data-dir and public.examples out"
    if when := config.method.traits(config.params).public_when:
        wanted = _listed(config.method_name, when)
        return f"strategy = {config.strategy!r} learns from public data with {wanted} only: set that, or {leave_out}"
    every = {name: kind.traits(kind.params_type()).public_when for name, kind in METHODS.items()}
    able = {name: when for name, when in every.items() if when is not None}
    names = [f"{name} with {_listed(name, when)}" if when else name for name, when in able.items()]
    of_ones_own = ", or set public_when in its traits" if is_reference(config.strategy) else ""
    return (
        f"strategy = {config.strategy!r} does not learn from public data: {leave_out}, or take one of "
        f"{', '.join(names)}{of_ones_own}"
    )


def _listed(method: str, settings: Mapping[str, Any]) -> str:
    """Settings of a method, by the names of their fields, as keys with their values."""
    return " and ".join(f"{method}.{kebab(name)} = {to_scalar(value)!r}" for name, value in settings.items())
