"""Remarks of a reader on files, beside their examples: what it left out and why, and what is seldom meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_REMARKS, MAX_WHAT_LETTERS, MAX_EXAMPLE_LETTERS = 20, 200, 100
MAX_DEVICES_NAMED = 10


class Remark(BaseModel):
    """A count of things of one kind, of which a person should know before round 1.

    Attributes:
        what: the things, in the plural, with the reason: "files that end in .heic, which is not read".
        example: one of them, by its path in the folder of the data.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    what: Annotated[str, Field(min_length=1, max_length=MAX_WHAT_LETTERS)]
    count: Annotated[int, Field(ge=1, lt=2**63)]
    example: Annotated[str, Field(max_length=MAX_EXAMPLE_LETTERS)] = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.count}" + (f", such as {self.example}" if self.example else "")


class Remarks:
    """Counts things by what they are, with the first of each as an example."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, what: str, example: object = "", count: int = 1) -> None:
        """Count things of one kind."""
        if count:
            self._counts[what] += count
            self._examples.setdefault(what, str(example))

    def include(self, others: Remarks) -> None:
        """Add what was counted elsewhere."""
        for what, count in others._counts.items():
            self.add(what, others._examples[what], count)

    def found(self) -> tuple[Remark, ...]:
        """Return what was counted, most first, and of no more kinds than a device may tell."""
        kinds = [
            Remark(what=_clean(what, MAX_WHAT_LETTERS), count=count, example=_clean(self._examples[what]))
            for what, count in sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        ]
        return joined(kinds)


def joined(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    """Return remarks of several readers as one list, of no more kinds than a device may tell."""
    remarks = tuple(remarks)
    if len(remarks) <= MAX_REMARKS:
        return remarks
    kept, others = remarks[: MAX_REMARKS - 1], remarks[MAX_REMARKS - 1 :]
    more = Remark(what="files of more kinds, left out", count=sum(r.count for r in others), example=others[0].example)
    return (*kept, more)


def _clean(text: str, most: int = MAX_EXAMPLE_LETTERS) -> str:
    """Return a text that can be printed and sent, whatever letters a file's name has; the end of a long one."""
    shown = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return shown if len(shown) <= most else f"...{shown[3 - most :]}"


def in_words(remarks: Iterable[Remark]) -> str:
    """Return all remarks as one text, for an error; "" where there are none."""
    return "; ".join(map(str, remarks))


def by_kind(remarks: Mapping[int, Iterable[Remark]]) -> list[str]:
    """Return a line for each kind of remark that devices make, with the sum of their counts and who they are."""
    counts: Counter[str] = Counter()
    devices: dict[str, list[int]] = {}
    examples: dict[str, str] = {}
    for device, made in sorted(remarks.items()):
        for remark in made:
            counts[remark.what] += remark.count
            devices.setdefault(remark.what, []).append(device)
            examples.setdefault(remark.what, remark.example)
    return [
        f"{named(devices[what])}: {Remark(what=what, count=counts[what], example=examples[what])}" for what in counts
    ]


def named(devices: Iterable[int]) -> str:
    """Return "device 3" or "devices 0, 1, 2 and 9 more"."""
    numbers = sorted(set(devices))
    shown = ", ".join(map(str, numbers[:MAX_DEVICES_NAMED]))
    more = f" and {len(numbers) - MAX_DEVICES_NAMED} more" if len(numbers) > MAX_DEVICES_NAMED else ""
    return f"device{'s' if len(numbers) > 1 else ''} {shown}{more}"
