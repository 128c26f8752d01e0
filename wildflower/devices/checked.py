"""Types of values that come from a message, a file or a user: pydantic checks their bounds where they enter."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from wildflower.devices.validation import MAX_LETTERS
from wildflower.plugins.invalid import in_words

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# More than any device has: what lies above is a mistake or an attack, and would overflow what is computed from it.
MAX_MBIT_PER_S, MAX_FLOP_PER_S = 1e6, 1e18

Checked = TypeVar("Checked")


def printable(text: str) -> str:
    """Return a text that is not blank and can be printed; ValueError where it is none."""
    if not text.strip() or not text.isprintable():
        raise ValueError("must be a text of printable letters, and not blank")
    return text


Text = Annotated[str, Field(max_length=MAX_LETTERS), AfterValidator(printable)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]  # what PyTorch, NumPy and struct hold
AtLeast0 = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
MbitPerS = Annotated[float, Field(ge=0, le=MAX_MBIT_PER_S)]
FlopPerS = Annotated[float, Field(gt=0, le=MAX_FLOP_PER_S)]


def save(value: DataclassInstance, file: Path) -> None:
    """Write a dataclass as JSON: beside the file, then renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}.part")
    beside.write_text(json.dumps(asdict(value)))
    os.replace(beside, file)


def load(kind: type[Checked], file: Path) -> Checked | None:
    """Return the dataclass that `save` wrote; None where there is none, or a damaged one, which is worth no more."""
    try:
        return checked(kind, json.loads(file.read_text()), file.name)
    except (OSError, ValueError):
        return None


def checked(kind: type[Checked], values: object, what: str) -> Checked:
    """Return a model or dataclass of these values by name; ValueError says what is wrong with which, in one line."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{what}: expected a JSON object, got {type(values).__name__}")
    named: Any = kind
    try:
        return kind(**values)
    except ValidationError as error:
        fields = getattr(named, "model_fields", None) or named.__pydantic_fields__
        keys = [field.alias or name for name, field in fields.items()]
        raise ValueError(f"{what}: {in_words(error, keys)}") from None
