"""A model on its way to the device that will use it, and what the device says of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from wildflower.messages.orders import EvaluationBatch, Hex64, Line, NonNegative, Typed
from wildflower.messages.programs import ProgramFormat

Version = Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9a-f]{12}$")]


class Delivery(Typed):
    """A model for a device. Its message brings the program as an array, or says how the device makes its own.

    Attributes:
        version: the round that it is of, and the beginning of its hash.
        file_format: of the program.
        task: whose examples a device holds out.
        sha256: of the program that comes; None where the device makes it.
        facts: of the file beside it: labels, shape of inputs, and so on.
        own: the one order by which the device gets its personal model, of which nothing travels back; its message
            brings that order's arrays.
    """

    run: str
    device: NonNegative
    version: Version
    file_format: ProgramFormat
    task: dict[str, Any]
    sha256: Hex64 | None = None
    facts: dict[str, Any] = Field(default_factory=dict)
    own: EvaluationBatch | None = None

    @model_validator(mode="after")
    def _of_one_device(self) -> Delivery:
        if self.own is not None and (self.own.run, [o.device for o in self.own.orders]) != (self.run, [self.device]):
            raise ValueError("its order is not that of a personal model of this device and run")
        return self


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
