"""Methods: one file each, with both halves; `wildflower.strategies.method` is their contract.

`METHODS` holds each method's server half by the name that the run configuration uses. A new file of this folder is a
new method: the class of `Method` that it defines, or the last one where several build on one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import isabstract
from pkgutil import walk_packages

from wildflower.strategies.method import Method

DEFAULT_METHOD = "heterofl"  # of a run whose configuration says none


def _methods() -> Iterator[type[Method]]:
    for module in walk_packages(__path__, f"{__name__}."):
        for kind in vars(import_module(module.name)).values():
            own = isinstance(kind, type) and issubclass(kind, Method) and kind.__module__ == module.name
            if own and not isabstract(kind):
                yield kind


METHODS: dict[str, type[Method]] = {}  # first empty, for files that import it on the way
METHODS.update((kind.name(), kind) for kind in _methods())

__all__ = ["DEFAULT_METHOD", "METHODS"]
