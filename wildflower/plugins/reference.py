"""References: "package.module:Name", by which a run names a method, a family or a task that is none of the project's.

A module is looked for beside the experiment first, where a command has said so (`wildflower.plugins.beside`), and else
among the installed packages. On server and nodes what lay beside the experiment is in the app's bundle, and is found
there.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from wildflower.plugins import beside
from wildflower.plugins.draws import same_draws
from wildflower.plugins.nearest import LIKENESS, did_you_mean
from wildflower.plugins.raised_as import raised_as

MAX_NAMES = 12  # of what a module has, in an error

_REFERENCE = re.compile(r"[A-Za-z_][\w.]{0,199}:[A-Za-z_]\w{0,99}", re.ASCII)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

T = TypeVar("T")


class PluginError(ValueError):
    """An error: what a reference names cannot be used; the text says why, and what would be right."""


def is_reference(name: object) -> bool:
    """Return whether a name is one of something outside the project's own tables."""
    return isinstance(name, str) and ":" in name


def class_of(reference: str, base: type, what: str) -> Any:
    """The class that a reference names, a complete one of `base`. Raises PluginError.

    Args:
        what: what is wanted, such as "a method".
    """
    found = named(reference, base)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PluginError(f"{reference} is {_described(found)}: {what} is a class of {base.__module__}.{base.__name__}")
    if inspect.isabstract(found):
        missing = " and ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise PluginError(f"{reference} lacks {missing}, which every class of {base.__module__}.{base.__name__} has")
    return found


def value_of(reference: str, kind: type[T], what: str) -> T:
    """The value of a class that a reference names. Raises PluginError."""
    found = named(reference, kind)
    if not isinstance(found, kind):
        raise PluginError(f"{reference} is {_described(found)}: {what} is a value of {kind.__module__}.{kind.__name__}")
    return found


def module_label(reference: str) -> str:
    """The last part of a reference's module in kebab case, which names what is in it: in keys, and in run names."""
    return reference.partition(":")[0].rpartition(".")[2].replace("_", "-")


def top_module(reference: str) -> str:
    """The top-level module, a package or a file, that a reference is in."""
    return reference.partition(":")[0].partition(".")[0]


def is_loaded(reference: str) -> bool:
    """Return whether a reference's module is imported already, so that looking at it runs no code."""
    return is_reference(reference) and reference.partition(":")[0] in sys.modules


def one_sentence(error: BaseException) -> str:
    """An exception of a plug-in in one sentence: its kind, what it says, and the line of the plug-in where it arose."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_other(frame.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _is_other(file: str) -> bool:
    """Whether a file is Python's, an installed package's or the app's, and so most likely no plug-in's."""
    return beside.is_code_of_the_app(Path(file)) or file.startswith(("<", *_INSTALLED))


def named(reference: str, wanted: type | tuple[type, ...]) -> Any:
    """Return what a reference names, whatever it is. Raises PluginError where there is nothing.

    Args:
        wanted: what it should be, a class or a value of it, or several of them; for the error that says what there is
            instead.
    """
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        raise PluginError(f"{reference!r} must be like 'package.module:Name'")
    name, _, attribute = reference.partition(":")
    module = _module(name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        there = [key for key, value in vars(module).items() if _fits(value, wanted, name)]
        raise PluginError(f"{name} has no {attribute}; {_meant(attribute, there)}") from None


def _fits(value: object, wanted: type | tuple[type, ...], module: str) -> bool:
    """Whether something of a module is a value of a class, or a class of it that is written there."""
    if isinstance(value, type):
        return issubclass(value, wanted) and value.__module__.startswith(module)
    return isinstance(value, wanted)


def _module(name: str) -> ModuleType:
    with raised_as(PluginError, ""):
        beside.look_for(name)
    if name in sys.modules:
        return sys.modules[name]
    try:
        with same_draws():  # a constant of the file that is drawn at random is the same in every process
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise PluginError(f"there is no module {error.name!r} {_looked(error.name)}") from None
        raise PluginError(f"{name} imports {error.name!r}, which is not there: {one_sentence(error)}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{name} cannot be imported: {one_sentence(error)}") from error


def _looked(name: str) -> str:
    """Where a module was looked for."""
    installed = f"among the installed packages of {sys.prefix}"
    folder = beside.experiment_folder()
    if folder is None:
        return f"{installed}; a file of one's own lies beside the experiment, and is run by 'wildflower run'"
    files = [path.stem for path in folder.glob("*.py")]
    meant = did_you_mean(name, files, most=1, likeness=LIKENESS)
    return f"in {folder} or {installed}" + (f"; {meant}" if meant else "")


def _meant(name: str, there: Iterable[str]) -> str:
    there = list(there)
    shown = [*there[:MAX_NAMES], *(["..."] if len(there) > MAX_NAMES else [])]
    return did_you_mean(name, there, most=1, likeness=LIKENESS) or (
        f"it has {', '.join(shown) or 'nothing of that kind'}"
    )


def _described(value: object) -> str:
    if isinstance(value, type):
        return "a class of " + ", ".join(f"{base.__module__}.{base.__name__}" for base in value.__bases__)
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"
