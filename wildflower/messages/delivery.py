"""A model on its way to the device that will use it, and what the device says of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from wildflower.messages.orders import Hex64, Line, NonNegative, Typed

Version = Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9a-f]{12}$")]


class Delivery(Typed):
    """A model for a device; its message brings the program as an array.

    Attributes:
        version: the round that it is of, and the beginning of its hash.
        sha256: of the program, a .pt2 file.
        facts: of the file beside it: labels, shape of inputs, and so on.
        task: whose examples a device holds out.
    """

    run: str
    device: NonNegative
    version: Version
    sha256: Hex64
    facts: dict[str, Any]
    task: dict[str, Any]


class Delivered(Typed):
    """The answer of a device to a delivery.

    Attributes:
        used: it uses the model now.
        why: the reason why not; else "".
        score, before: of the new model and of that before it on the device's held-out examples, by the task's metric.
    """

    run: Line
    device: NonNegative
    version: Version
    used: bool
    why: Line = ""
    score: float | None = None
    before: float | None = None
