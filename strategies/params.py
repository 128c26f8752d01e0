"""Settings: every one stands once, as a field with its default, its bounds and a sentence that says what it means.

The run configuration, `wildflower config`, the block in pyproject.toml and the tables of keys in the docs are made from
these fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from wildflower.tasks.device_data import FLOAT32_MAX

NUMBERS = "must be numbers such as [1, 0.5] or '1, 0.5'"


def kebab(name: str) -> str:
    """The key of a field: `learning_rate` is `learning-rate`."""
    return name.replace("_", "-")


class Params(BaseModel):
    """Settings that belong together: a method's own, or those of a part that several methods share.

    Every field has a default, and a description that completes the sentence "This is ...".

    switch: the field whose 0 turns the whole part off, so that nothing reads the others; "" where there is none. Below
        0 it is a method's own class attribute of the group's and the field's name, such as `distillation_steps`.
    """

    switch: ClassVar[str] = ""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=kebab, populate_by_name=True)


class HasParams:
    """A class with settings: their class is its `params_type`, or else stands in the brackets of its base."""

    params_type: ClassVar[type[Params]] = Params

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for kind in (kind for base in vars(cls).get("__orig_bases__", ()) for kind in get_args(base)):
            if "params_type" not in vars(cls) and isinstance(kind, type) and issubclass(kind, Params):
                cls.params_type = kind


def _numbers(value: object) -> tuple[float, ...]:
    """Flower's own TOML configuration holds scalars only: there a list is written "1, 0.5" or "[1, 0.5]"."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        parts: list[object] = [part for part in text.split(",") if part.strip()]
    else:
        parts = list(value) if isinstance(value, list | tuple) else [value]
        if not all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
            raise ValueError(NUMBERS)
    try:
        return tuple(float(part) for part in parts)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        raise ValueError(NUMBERS) from None


def to_scalar(value: Any) -> Any:
    """A setting's value as a TOML scalar: numbers become a text such as "1, 0.5"."""
    if isinstance(value, tuple):
        return ", ".join(str(int(v)) if float(v).is_integer() else repr(v) for v in value)
    return value


def readable(read: Callable[[str], object]) -> AfterValidator:
    """Return a validator of texts that are read later: each must be one that `read` takes."""

    def check(text: str) -> str:
        read(text)
        return text

    return AfterValidator(check)


def possible_shares(shares: tuple[float, ...]) -> tuple[float, ...]:
    """Return shares of channels that layers may keep; ValueError where one is outside of [0, 1], or all are 0."""
    if not all(0 <= share <= 1 for share in shares) or max(shares, default=0) <= 0:
        raise ValueError("every share lies in [0, 1], and one is above 0")
    return shares


def possible_betas(betas: tuple[float, ...]) -> tuple[float, ...]:
    """Return Adam's two betas; ValueError if they are none."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError("must be two numbers from 0 to below 1, such as [0.9, 0.999]")
    return betas


Numbers = Annotated[tuple[float, ...], BeforeValidator(_numbers)]
Betas = Annotated[Numbers, AfterValidator(possible_betas)]
Shares = Annotated[Numbers, AfterValidator(possible_shares)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
# Devices and servers compute with 32 bits.
Rate = Annotated[float, Field(ge=0, le=FLOAT32_MAX, allow_inf_nan=False)]
PositiveRate = Annotated[float, Field(gt=0, le=FLOAT32_MAX, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
