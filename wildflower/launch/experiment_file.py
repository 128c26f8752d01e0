"""The settings of a run before it starts: the experiment file and --set over the defaults, checked."""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wildflower.plugins.beside import looked_for_beside
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference, module_label
from wildflower.plugins.user_error import UserError
from wildflower.server_app.inline_tables import flat, parse_arguments, tables_flat, to_toml, weights_of

if TYPE_CHECKING:
    from wildflower.server_app.config import RunConfig
    from wildflower.tasks.arguments import TaskArguments

DEFAULT, SET, MACHINE = "default", "--set", "this machine"


class SettingsError(UserError, ValueError):
    """Settings that no run can start with; the text says which one, where it was given and what would be right."""


@dataclass(frozen=True)
class Settings:
    """A checked run configuration and where each of its values comes from."""

    config: "RunConfig"
    sources: dict[str, str]


def resolve(experiment: Path | None, overrides: Sequence[str], given_in: str = SET) -> Settings:
    """Lay the experiment file and then `overrides` ("key=value"), `given_in` that place, over the defaults; check it.

    `workers` is the one default that depends on the machine: the CPU cores this process may use, but no more than
    there are devices. Raises SettingsError.
    """
    from wildflower.server_app.config import ConfigError, RunConfig, defaults

    from_file = {} if experiment is None else read_experiment(experiment)
    usual = defaults()
    from_command = _from_command(overrides, usual)
    strategy = (from_file | from_command).get("strategy", "")
    if is_reference(strategy):
        with suppress(ValueError):  # which is said below
            usual = defaults(strategy)
            from_command = _from_command(overrides, usual)
    if experiment is not None:
        others = _labels_of_methods(experiment, from_file) - {_table(key) for key in usual}
        if is_reference(strategy):
            others.discard(module_label(strategy))
        from_file = {key: value for key, value in from_file.items() if _table(key) not in others}
    given = from_file | from_command
    try:
        config = RunConfig.from_run_config(given)
        sources = dict.fromkeys(usual, DEFAULT)
        sources |= dict.fromkeys(from_file, str(experiment)) | dict.fromkeys(from_command, given_in)
        if given.get("strategy-settings"):
            held = [key for key, value in config.to_dict().items() if key not in given and value != usual[key]]
            sources |= dict.fromkeys(held, sources["strategy-settings"])
        if "workers" not in given:
            workers = min(cpu_cores(), config.devices)
            config = RunConfig.from_run_config(given | {"workers": workers})
            sources["workers"] = MACHINE
    except ConfigError as error:
        places = [place for place in (str(experiment) if experiment else "", given_in if overrides else "") if place]
        raise SettingsError(f"{' with '.join(places)}: {error}" if places else str(error)) from None
    return Settings(config, sources)


def _from_command(overrides: Iterable[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return tables_flat(dict(parse_override(override, defaults) for override in overrides), defaults)


def _labels_of_methods(experiment: Path, from_file: Mapping[str, Any]) -> set[str]:
    """The names of tables that belong to methods from outside: the experiment's own, and modules that lie beside it.

    A file may have such tables for several methods, of which a run reads one.
    """
    own = from_file.get("strategy", "")
    beside_it = {path.stem.replace("_", "-") for path in experiment.absolute().parent.glob("*.py")}
    return beside_it | ({module_label(own)} if is_reference(own) else set())


def _table(key: str) -> str:
    """The first part of a key that has several; "" of others."""
    return key.partition(".")[0] if "." in key else ""


def without_keys_of_others(overrides: Sequence[str], strategy: str, strategies: Iterable[str]) -> list[str]:
    """Those of a run's `overrides` ("key=value") that are not for another method from outside than its `strategy`.

    `strategies` are the methods that are compared, by their names or references.
    """
    others = {module_label(other) for other in strategies if is_reference(other)}
    if is_reference(strategy):
        others.discard(module_label(strategy))
    return [text for text in overrides if _table(text.partition("=")[0].strip()) not in others]


def strategy_of(overrides: Sequence[str], before: str) -> str:
    """The method that overrides name last, or the one that was named `before` them."""
    return str(dict(parse_override(text, {"strategy": ""}) for text in overrides).get("strategy", before))


def of_run(run_dir: Path, overrides: Sequence[str]) -> "RunConfig":
    """The configuration of a run, with `overrides` ("key=value") over it. Raises SettingsError, JournalError."""
    from wildflower.server_app.config import ConfigError, RunConfig, defaults
    from wildflower.server_app.run_folder import read_config

    written = read_config(run_dir).config
    usual = defaults(written["strategy"])
    with raised_as(SettingsError, f"{run_dir}: ", ConfigError):
        return RunConfig.from_run_config(written | _from_command(overrides, usual))


def beside(experiment: Path | None) -> AbstractContextManager[Mapping[str, Path]]:
    """Look for modules that a run names beside its experiment first; without one, where the command was typed."""
    return looked_for_beside(Path.cwd() if experiment is None else experiment.absolute().parent)


def read_experiment(path: Path) -> dict[str, Any]:
    """The flat keys of an experiment file; a table's name becomes the first part of its keys. Raises SettingsError."""
    return flat(read_toml(path, "the experiment"))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return what a TOML file of settings holds, which is called `what` where it cannot be read. Raises
    SettingsError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows write a mark of order before it
    except OSError as error:
        raise SettingsError(f"cannot read {what} {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{path} is not in UTF-8 (byte {error.start + 1}): save it so; PowerShell's > writes UTF-16"
        ) from None


def parse_override(text: str, defaults: Mapping[str, Any]) -> tuple[str, Any]:
    """Split "key=value". A key whose default is a text takes the value as it stands, quotes being optional."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise SettingsError(f"--set {text!r} is not of the form key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return key, value
    if isinstance(defaults.get(key), str) and not isinstance(parsed, str):
        return key, value
    return key, parsed


def as_overrides(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings as the command takes them, "key=value"; a table's name becomes the first part of its keys.

    Raises SettingsError for what is no setting's value.
    """
    texts: list[str] = []
    for name, value in settings.items():
        key = f"{prefix}{name}"
        texts += as_overrides(value, f"{key}.") if isinstance(value, Mapping) else [f"{key}={as_text(key, value)}"]
    return texts


def as_text(key: str, value: object) -> str:
    """A value as it stands behind `key=`, so that it is read as what it is: "3" as a text and 3 as a number.

    Raises SettingsError for what is no setting's value.
    """
    if isinstance(value, list | tuple) and all(_is_number(part) for part in value):
        value = ", ".join(str(part) for part in value)
    value = _plain(key, value, "numbers")
    if isinstance(value, str) and parse_override(f"{key}={value}", {}) == (key, value):
        return value
    return to_toml(value)


def _plain(key: str, value: object, entries: str) -> str | int | float | bool:
    """Return a setting's value as Python's own; SettingsError, which says what lists may hold, where it is none."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise SettingsError(f"{key} = {value!r}: must be a text, a number, True or False, or a list of {entries}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def place(config: "RunConfig", here: Path, now: datetime) -> tuple["RunConfig", Path]:
    """Make paths absolute against `here`, where the command was typed, and give the run a name if it has none.

    The app runs elsewhere, so a relative path would mean something else there. Returns the configuration and the
    run's folder. Raises SettingsError when a run is to be resumed and has no name.
    """
    values = config.to_dict()
    for key in ("output-dir", "data-dir"):
        if values[key] or key == "output-dir":
            values[key] = _absolute(values[key], here)
    values["task-arguments"] = _with_absolute_folders(values["task-arguments"], config.own_task_arguments(), here)
    if values["fleet"].endswith(".toml"):
        values["fleet"] = _absolute(values["fleet"], here)
    sources = weights_of(values["initial.weights"])
    for member, source in sources.items():
        if source and (here / Path(source).expanduser()).exists():  # else it is a name on the hub
            sources[member] = _absolute(source, here)
    values["initial.weights"] = sources[""] if "" in sources else inline(sources)
    output_dir = Path(values["output-dir"])
    if not values["run-name"]:
        if values["resume"]:
            raise SettingsError("resume=true needs the run-name of the run to go on with")
        values["run-name"] = free_name(output_dir, f"{config.label}-{now:%Y%m%d-%H%M%S}")
    return type(config).from_run_config(values), output_dir / values["run-name"]


def _with_absolute_folders(text: str, arguments: "TaskArguments | None", here: Path) -> str:
    """The text of a task's arguments, in which a folder that lies below `here` has its whole path.

    Only arguments whose fields are marked with `wildflower.tasks.arguments.FOLDER` may name one, such as `tokenizer`.
    """
    from wildflower.tasks.arguments import FOLDER

    fields = {} if arguments is None else type(arguments).model_fields
    values, found = parse_arguments(text), {}
    for key, value in values.items():
        extra = fields[key].json_schema_extra if key in fields else None
        may_be_folder = isinstance(extra, dict) and FOLDER.items() <= extra.items()
        if may_be_folder and isinstance(value, str) and value and (here / value).is_dir():
            found[key] = _absolute(value, here)
    return inline(values | found) if found else text


def inline(values: Mapping[str, Any]) -> str:
    """Return the inside of an inline table of TOML, which `parse_arguments` reads."""
    keys = {key: key if key.isascii() and key.isidentifier() else to_toml(key) for key in values}
    return ", ".join(f"{keys[key]} = {_inline_value(value)}" for key, value in values.items())


def _inline_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{inline(value)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline_value, value))}]"
    return to_toml(value)


def _absolute(path: str, here: Path) -> str:
    return os.path.normpath(here / Path(path).expanduser())


def free_name(output_dir: Path, name: str) -> str:
    """Return a name, with a number where a folder of that name is there."""
    number, free = 1, name
    while (output_dir / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def write_toml(values: Mapping[str, str | int | float | bool]) -> str:
    """Flat settings as TOML with quoted keys, which keeps "fedprox.mu" one key."""
    return "".join(f"{to_toml(key)} = {to_toml(value)}\n" for key, value in values.items())


def nested_toml(values: Mapping[str, Any]) -> str:
    """Settings as a person writes them: keys, then a table for each mapping and for each entry of a list of mappings.

    Raises SettingsError for what is no setting's value.
    """
    plain: list[str] = []
    tables: list[str] = []
    for key, value in values.items():
        name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else to_toml(key)
        if isinstance(value, Mapping):
            tables.append(f"\n[{name}]\n{nested_toml(value)}")
        elif isinstance(value, list | tuple) and value and all(isinstance(part, Mapping) for part in value):
            tables += [f"\n[[{name}]]\n{nested_toml(part)}" for part in value]
        elif isinstance(value, list | tuple):
            plain.append(f"{name} = [{', '.join(_toml_value(key, part) for part in value)}]\n")
        else:
            plain.append(f"{name} = {_toml_value(key, value)}\n")
    return "".join(plain + tables)


def _toml_value(key: str, value: object) -> str:
    value = _plain(key, value, "these")
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return f"'{value}'"  # as a person writes arguments
    return to_toml(value)


def cpu_cores() -> int:
    """The CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
