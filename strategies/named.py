"""Methods by name: the project's own, and those from outside that a run names as "package.module:Class"."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import ValidationError

from wildflower.plugins.nearest import nearest
from wildflower.plugins.reference import PluginError, class_of, is_reference, named
from wildflower.strategies import METHODS
from wildflower.strategies.method import ClientStep, Method
from wildflower.strategies.params import Params, to_scalar

_KEY = re.compile(r"[a-z0-9-]+", re.ASCII | re.IGNORECASE)


def method_of(name: str) -> type[Method]:
    """The server half of a method, by its name here or by a reference to one from outside.

    Raises ValueError with the nearest valid name, or with what is wrong with the reference.
    """
    if not is_reference(name):
        if name not in METHODS:
            module, dot, last = name.rpartition(".")
            meant = f"did you mean '{module}:{last}'?" if dot else nearest(name, METHODS)
            raise ValueError(f"no such strategy; {meant}")
        return METHODS[name]
    found = named(name, Method)
    if isinstance(found, type) and issubclass(found, ClientStep):
        raise PluginError(
            f"{name} lacks a server half: it is a client step (wildflower.strategies.method.ClientStep); name the "
            "class of wildflower.strategies.method.Method whose `client_step` returns it"
        )
    kind: type[Method] = class_of(name, Method, "a method")
    if METHODS.get(kind.name()) is kind:
        raise PluginError(f"{name} is the project's own: set strategy = {kind.name()!r}")
    if not _KEY.fullmatch(kind.name()):
        raise PluginError(f"{name}: its name(), with which its keys begin, is {kind.name()!r}: letters, digits and -")
    own = settings_of(METHODS)
    if kind.name() in METHODS or kind.name() in own:
        raise PluginError(f"{name}: the project has settings called {kind.name()}.*: give its file another name")
    for group, params in ((kind.name(), kind.params_type), *kind.shared_params.items()):
        if not _KEY.fullmatch(group):
            raise PluginError(f"{name}: a group of its settings is called {group!r}: letters, digits and -")
        if own.get(group, params) is not params:
            raise PluginError(f"{name}: the project has other settings called {group}.*: give the group another name")
        _check(name, params)
    return kind


def settings_of(methods: Mapping[str, type[Method]]) -> dict[str, type[Params]]:
    """The settings of methods, and of the parts that they share: the first part of the keys -> their class."""
    shared = {name: params for kind in methods.values() for name, params in kind.shared_params.items()}
    return {name: kind.params_type for name, kind in methods.items() if kind.params_type.model_fields} | shared


def _check(name: str, params: object) -> None:
    """Raise PluginError unless settings are as the run configuration needs them."""
    if not (isinstance(params, type) and issubclass(params, Params)):
        raise PluginError(f"{name}: its settings are {params!r}, and no class of wildflower.strategies.params.Params")
    try:
        values = params()
    except ValidationError as error:
        wrong = ", ".join(str(item["loc"][0]) for item in error.errors(include_url=False) if item["loc"])
        raise PluginError(f"{name}: the settings {params.__name__} need a default that is valid: {wrong}") from None
    for field, value in values:
        if not isinstance(to_scalar(value), bool | int | float | str):
            raise PluginError(
                f"{name}: the setting {field} of {params.__name__} is no number, text or truth value, nor numbers "
                "(wildflower.strategies.params.Numbers)"
            )
