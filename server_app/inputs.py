"""The inputs of a run, read before it is built: data, fleet, first weights, public data, and where it writes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from torch import Tensor

from wildflower.devices.fleet import Fleet, bundled_fleet, replaced_devices
from wildflower.models.family import Family
from wildflower.models.initial import checked_names, digest_of, load_initial, weights_file
from wildflower.plugins.flower_log import log
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.inline_tables import parse_arguments, weights_of
from wildflower.server_app.resuming import check_same, is_of_a_folder
from wildflower.server_app.vocabulary import check_same_tokens
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.public import PublicData, load_public
from wildflower.tasks.spec import load_data_set
from wildflower.tasks.task import Task, TaskSpec


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


def fleet_path(config: RunConfig) -> Path:
    """The fleet file of a run that has one."""
    return Path(config.fleet).expanduser() if config.fleet.endswith(".toml") else bundled_fleet(config.fleet)


def initial_of(config: RunConfig, family: Family, task: Task) -> tuple[Mapping[str, Tensor], Path | None]:
    """The weights that a run is given, and their file; ({}, None) where it has none.

    The log says what was found of them, and what was not.
    """
    if not config.initial.weights:
        return {}, None
    weights: dict[str, Tensor] = {}
    file = None
    try:
        names = checked_names(parse_arguments(config.initial.names))
        sources = weights_of(config.initial.weights)
        known = {prefix.removesuffix("."): (prefix, one) for prefix, one in family.alternatives.items()}
        for member, source in sources.items():
            if member not in known:
                right = ", ".join(f"{name} = '...'" for name in known) if len(known) > 1 else "one file or name"
                raise ValueError(f"{family.name} takes {right}")
            prefix, one = known[member]
            file = weights_file(source)
            found = load_initial(file, one, names)
            check_same_tokens(task, one, file.parent, found.tensors)
            log.log(WARNING if found.missing or found.left_over else INFO, "Initial weights: %s", found.describe())
            whole = found.whole(one, partial(initial_weights, one, config.seed))
            weights |= {prefix + name: tensor for name, tensor in whole.items()}
    except ValueError as error:
        why = str(error).removeprefix(f"{config.initial.weights}: ")
        raise ConfigError(f"initial.weights = {config.initial.weights!r}: {why}") from None
    return weights, None if len(known) > 1 else file


def initial_digest(config: RunConfig) -> str:
    """SHA-256 of each file that a run's first weights come from; "" where they are drawn."""
    sources = weights_of(config.initial.weights).values() if config.initial.weights else ()
    return " ".join(digest_of(weights_file(source)) for source in sources)


def public_of(config: RunConfig, task: Task, family: Family) -> PublicData | None:
    """The server's public data, if the run has any; ConfigError where models could not read them."""
    if not config.public.task:
        return None
    if (config.public.task, config.public.data_dir) == (config.task, config.data_dir):
        log.warning("public.task is the run's own task: its public data are the devices' own examples")
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
        return Fleet(fleet_path(config), devices=config.devices, seed=0, requirement=lambda _: (1, 1)).digest

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
    initial = _once(known, "initial", config.initial.weights, lambda: initial_digest(config))
    check_same(run_dir, fleet=(config.fleet, _fleet_digest(config, known)), initial=initial)
    if is_of_a_folder(config.task) and config.partition != "own":
        # Seed, devices and partition make no difference. `load_task` may know the data of an earlier moment.
        of_run = task_spec(config)
        spec = TaskSpec(name=of_run.name, devices=1, data_dir=of_run.data_dir, arguments=of_run.arguments)

        def identity() -> dict[str, Any]:
            return Task(spec, load_data_set(spec.name, spec.data_dir, spec.arguments)).identity()

        check_same(run_dir, data=_once(known, "data", repr(spec), identity))
