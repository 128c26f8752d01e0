"""The families by name."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import nn

from wildflower.models.base import Family
from wildflower.models.bert import Bert, BertTiny
from wildflower.models.choice import Choice
from wildflower.models.cnn import Cnn3, Cnn10, PflCnn
from wildflower.models.darts import Darts
from wildflower.models.densenet import DenseNet121
from wildflower.models.lenet import LeNet5
from wildflower.models.levels import Levels
from wildflower.models.mlp import Mlp
from wildflower.models.mobilenet import MobileNetV2, MobileNetV3
from wildflower.models.of_transformers import is_configured
from wildflower.models.ofa_resnet import OfaResNet50
from wildflower.models.resnet import ResNet18, ResNet34, ResNet152
from wildflower.models.traced.family import Traced
from wildflower.models.vgg import Vgg
from wildflower.models.vit import VitTiny
from wildflower.plugins.nearest import nearest_part
from wildflower.plugins.reference import PluginError, class_of, is_reference, named

__all__ = ["FAMILIES", "Family", "family_class", "make_family"]

FAMILIES: dict[str, type[Family]] = {
    family.name: family
    for family in (
        *(LeNet5, Mlp, Cnn3, Cnn10, PflCnn, Vgg, ResNet18, ResNet34, ResNet152, DenseNet121),
        *(MobileNetV2, MobileNetV3, OfaResNet50),
        *(VitTiny, Bert, BertTiny, Darts, Choice),
    )
}


RIGHT = {
    "tuple": "a list",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text in quotes",
}


def family_class(name: object, arguments: Collection[str] = ()) -> type[Family]:
    """Return the class of a family by its name here, or by a reference to one from outside, "package.module:Class".

    A reference to a function or to a class of modules is a family that calls it: of levels where `arguments` names
    some, and else one that cuts the module by itself.

    Raises ValueError with the nearest valid name, or with what is wrong with the reference.
    """
    if isinstance(name, str) and is_reference(name):
        found = named(name, (Family, nn.Module))
        if (
            inspect.isroutine(found)
            or is_configured(found)
            or (inspect.isclass(found) and issubclass(found, nn.Module))
        ):
            return Levels if "levels" in arguments else Traced
        kind: type[Family] = class_of(name, Family, "a family, where it is no function and no nn.Module,")
        if not isinstance(getattr(kind, "name", None), str):
            raise PluginError(f"{name} has no name: give the class one, such as name: ClassVar[str] = 'my-family'")
        return kind
    if name == Traced.name:  # what a server sends of a user's module
        return Traced
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"no family is named {name!r}; {nearest_part(str(name), FAMILIES)}")
    return FAMILIES[name]


def make_family(spec: Mapping[str, Any]) -> Family:
    """Make a family from {"name": ..., **arguments}, as `Family.spec` writes it.

    Raises ValueError for an unknown name or argument, with the nearest valid one, and for values out of bounds.
    """
    arguments = dict(spec)
    name = arguments.pop("name", None)
    kind = family_class(name, arguments)
    if kind in (Levels, Traced) and is_reference(name):
        arguments["function"] = name
    known = [field.name for field in fields(kind)]
    for key, value in arguments.items():
        if key not in known:
            raise ValueError(f"family {name!r} has no argument {key!r}; {nearest_part(key, known)}")
        if isinstance(value, list):
            arguments[key] = tuple(value)
    arguments = kind.resolved(arguments)
    _check_types(name, kind, arguments)
    if issubclass(kind, Choice):
        arguments["members"] = _members(arguments)
    return kind(**arguments)


def _check_types(name: object, kind: type[Family], arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if an argument is missing, or is of another kind than its field, such as a number for a list.

    A family itself checks the values, and may then rely on what they are.
    """
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    for key in missing:
        if key not in arguments:
            raise ValueError(f"family {name!r}: argument {key!r} is missing")
    for key, adapter in _adapters(kind).items():
        if key in arguments:
            try:
                adapter.validate_python(arguments[key])
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = "".join(f"[{part}]" for part in first["loc"])
                kind_of_value = first["type"].partition("_")[0]
                what = RIGHT.get(kind_of_value) or first["msg"].removeprefix("Input should be ")
                raise ValueError(
                    f"family {name!r}: {key}{where} = {reprlib.repr(first['input'])}: must be {what}"
                ) from None


@lru_cache(maxsize=64)
def _adapters(kind: type[Family]) -> dict[str, TypeAdapter[Any]]:
    """Return what checks the fields of a family whose types are plain values; members of a choice are families."""
    hints = get_type_hints(kind)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(kind) if field.name != "members"}


def _members(arguments: Mapping[str, Any]) -> tuple[tuple[str, Family], ...]:
    """Return the members of a choice, made with what they share."""
    members = arguments.get("members")
    if not isinstance(members, Mapping) or not all(isinstance(spec, Mapping) for spec in members.values()):
        raise ValueError(f"choice: members must be like {{large = {{name = 'lenet5'}}, ...}}, not {members!r}")
    shared = {field: arguments[field] for field in Choice.SHARED if field in arguments}
    made = []
    for member, spec in members.items():
        # A family of any modules has no norm or scaler to choose.
        known = {field.name for field in fields(family_class(spec.get("name"), spec))}
        made.append((member, make_family({**spec, **{key: shared[key] for key in shared if key in known}})))
    return tuple(made)
