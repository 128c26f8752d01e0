"""The families by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from models.base import Family, nearest
from models.bert import Bert, BertTiny
from models.choice import Choice
from models.cnn import Cnn3, Cnn10, PflCnn
from models.densenet import DenseNet121
from models.lenet import LeNet5
from models.mobilenet import MobileNetV2, MobileNetV3
from models.ofa_resnet import OfaResNet50
from models.resnet import ResNet18, ResNet34, ResNet152
from models.vgg import Vgg
from models.vit import VitTiny
from plugins.reference import PluginError, class_of, is_reference

__all__ = ["FAMILIES", "Family", "family_class", "make_family"]

FAMILIES: dict[str, type[Family]] = {
    family.name: family
    for family in (
        *(LeNet5, Cnn3, Cnn10, PflCnn, Vgg, ResNet18, ResNet34, ResNet152, DenseNet121),
        *(MobileNetV2, MobileNetV3, OfaResNet50),
        *(VitTiny, Bert, BertTiny, Choice),
    )
}


def family_class(name: object) -> type[Family]:
    """The class of a family by its name here, or by a reference to one from outside, "package.module:Class".

    Raises ValueError with the nearest valid name, or with what is wrong with the reference.
    """
    if isinstance(name, str) and is_reference(name):
        kind: type[Family] = class_of(name, Family, "a family")
        if not isinstance(getattr(kind, "name", None), str):
            raise PluginError(f"{name} has no name: give the class one, such as name: ClassVar[str] = 'my-family'")
        return kind
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"no family is named {name!r}; {nearest(str(name), FAMILIES)}")
    return FAMILIES[name]


def make_family(spec: Mapping[str, Any]) -> Family:
    """Make a family from {"name": ..., **arguments}, as `Family.spec` writes it.

    Raises ValueError for an unknown name or argument, with the nearest valid one, and for values out of bounds.
    """
    arguments = dict(spec)
    name = arguments.pop("name", None)
    kind = family_class(name)
    known = [field.name for field in fields(kind)]
    for key, value in arguments.items():
        if key not in known:
            raise ValueError(f"family {name!r} has no argument {key!r}; {nearest(key, known)}")
        if isinstance(value, list):
            arguments[key] = tuple(value)
    if issubclass(kind, Choice):
        arguments["members"] = _members(arguments)
    return kind(**arguments)


def _members(arguments: Mapping[str, Any]) -> tuple[tuple[str, Family], ...]:
    """The members of a choice, made with what they share."""
    members = arguments.get("members")
    if not isinstance(members, Mapping) or not all(isinstance(spec, Mapping) for spec in members.values()):
        raise ValueError(f"choice: members must be like {{large = {{name = 'lenet5'}}, ...}}, not {members!r}")
    shared = {field: arguments[field] for field in Choice.SHARED if field in arguments}
    return tuple((member, make_family({**spec, **shared})) for member, spec in members.items())
