"""The bounds of the memory of an order's work, and refusals to do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wildflower.client_app.memory import MemoryMeter, is_out_of_memory
from wildflower.messages.orders import ModelOrder


class Refusal(Exception):
    """The device does not do this work; the text says why.

    `overrun`: less memory was there than the device had promised: work of its budget outgrew it, or was not begun since
    what is free now is less than predicted.
    """

    def __init__(self, why: str, *, overrun: bool = False) -> None:
        super().__init__(why)
        self.overrun = overrun


def limits_of(order: ModelOrder, available_bytes: int | None) -> dict[str, int]:
    """Return what bounds the memory of an order's work, by the words that say so in a refusal."""
    limits = {"the budget is": order.memory_bytes or None, "this device has free": available_bytes}
    return {what: limit_bytes for what, limit_bytes in limits.items() if limit_bytes is not None}


@contextmanager
def out_of_memory_refused(order: ModelOrder, available_bytes: int | None, meter: MemoryMeter | None) -> Iterator[None]:
    """Turn an allocation that was refused in a `with` block into a Refusal."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        limits = {} if available_bytes is None else limits_of(order, available_bytes)
        words = "".join(f", {what} {limit_bytes} bytes" for what, limit_bytes in limits.items())
        said = str(error).split("\n")[0] or type(error).__name__
        held = f" after {meter.peak_bytes()} bytes" if meter else ""
        raise Refusal(f"out of memory{held}{words}: {said}", overrun=True) from error
