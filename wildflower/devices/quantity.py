"""Quantities of a fleet file: a text with its unit, fixed or drawn from a range or from a few values."""

import math
import re
import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from wildflower.devices.checked import MAX_MBIT_PER_S
from wildflower.devices.validation import MAX_WHOLE, check_number
from wildflower.plugins.nearest import nearest


@dataclass(frozen=True)
class Unit:
    """The units of one kind of amount, with the factor of each, and the bounds of such an amount.

    example: how an amount is written.
    """

    factors: dict[str, float]
    example: str
    least: float = 0.0
    most: float = sys.float_info.max

    def amount(self, value: object) -> float:
        """Return the number in "512 MB" times the factor of its unit; ValueError says what would be right."""
        match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"must be a text with a number and a unit, like {self.example!r}")
        number, unit = float(match[1]), match[2]
        if unit not in self.factors:
            problem = f"unknown unit {unit!r}, {nearest(unit, self.factors)}" if unit else "the unit is missing"
            raise ValueError(f"{problem}; write it like {self.example!r}")
        if not math.isfinite(number) or number < 0:
            raise ValueError(f"must not be negative or infinite; write it like {self.example!r}")
        found = number * self.factors[unit]
        if not self.least <= found <= self.most:
            raise ValueError(f"{found:g} must be at least {self.least:g} and at most {self.most:g}")
        return found


_AMOUNT = re.compile(r"\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(\S*)\s*")
_DECIMAL = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BINARY = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}

BYTES = Unit({**_DECIMAL, **_BINARY}, "512 MB", most=MAX_WHOLE)
PAYLOAD = replace(BYTES, example="400 kB", least=1)
LINK = Unit({"bit/s": 1e-6, "kbit/s": 1e-3, "Mbit/s": 1.0, "Gbit/s": 1e3}, "20 Mbit/s", most=MAX_MBIT_PER_S)
FLOPS = Unit({"MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12}, "10 GFLOP/s", least=1)
SECONDS = Unit({"s": 1.0, "min": 60.0, "h": 3600.0}, "2 s", least=1e-6)

Every = Literal["device", "round"]


@dataclass(frozen=True)
class Uniform:
    """Any value from low to high, all equally likely; one value where both are the same."""

    low: float
    high: float
    every: Every = "device"

    @property
    def highest(self) -> float:
        """Return the largest value that can be drawn."""
        return self.high

    def pick(self, draw: float) -> float:
        """Return the value for a draw in [0, 1)."""
        return self.low + (self.high - self.low) * draw


@dataclass(frozen=True)
class Choice:
    """One of a few values; `weights` are their shares, which add up to 1."""

    values: tuple[float, ...]
    weights: tuple[float, ...]
    every: Every

    @property
    def highest(self) -> float:
        """Return the largest value that can be drawn."""
        return max(self.values)

    def pick(self, draw: float) -> float:
        """Return the value for a draw in [0, 1)."""
        index = bisect_right(list(accumulate(self.weights)), draw)
        # Rounding may leave the sum of the weights a little below 1, and the draw above it.
        return self.values[min(index, len(self.values) - 1)]


Quantity = Uniform | Choice


def parse_quantity(value: object, amount: Callable[[object], float]) -> Quantity:
    """Return a fixed amount, `{ uniform = [low, high] }` or `{ choice = [a, b, ...], weights = [...] }`.

    The tables may say `every = "device"` (drawn once for each device, the default) or `every = "round"`.

    Args:
        value: As read from TOML.
        amount: Turns one written amount into a number and raises ValueError if it is none.
    """
    if not isinstance(value, dict):
        found = amount(value)
        return Uniform(found, found)
    if ("uniform" in value) == ("choice" in value):
        raise ValueError("must have either 'uniform' or 'choice'")
    valid = ["uniform", "every"] if "uniform" in value else ["choice", "weights", "every"]
    for key in value:
        if key not in valid:
            raise ValueError(f"unknown key {key!r}, {nearest(key, valid)}")
    every: Every = value.get("every", "device")
    if every not in ("device", "round"):
        raise ValueError(f"every = {every!r}: must be 'device' (drawn once for each device) or 'round'")
    if "uniform" in value:
        ends = value["uniform"]
        if not isinstance(ends, list) or len(ends) != 2:
            raise ValueError("uniform must be a list of two amounts, the lowest and the highest")
        low, high = (amount(end) for end in ends)
        if low > high:
            raise ValueError(f"uniform: {ends[0]!r} is more than {ends[1]!r}; the lowest amount comes first")
        return Uniform(low, high, every)
    values = value["choice"]
    if not isinstance(values, list) or not values:
        raise ValueError("choice must be a list of amounts")
    weights = value.get("weights", [1] * len(values))
    if not isinstance(weights, list) or len(weights) != len(values):
        raise ValueError(f"weights must be a list of {len(values)} numbers, one for each value of choice")
    shares = [check_number(weight, "weights") for weight in weights]
    if sum(shares) <= 0:
        raise ValueError("weights: at least one must be above 0")
    return Choice(tuple(amount(one) for one in values), tuple(share / sum(shares) for share in shares), every)
