"""The costs of orders for devices, and whether their budgets allow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from wildflower.devices.budget import Budget
from wildflower.devices.validation import MAX_WHOLE
from wildflower.messages.encoding import Wire
from wildflower.messages.tensor_sets import nbytes
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost
from wildflower.strategies.client_step import ClientStep
from wildflower.strategies.run_settings import RoundSettings


def with_parameter_copies(price: Cost, copies: int) -> Cost:
    """The cost with the memory of further tensors as large as all parameters, which a client step holds."""
    copied_bytes = copies * price.entry_bytes * price.parameters
    return replace(price, peak_training_memory_bytes=price.peak_training_memory_bytes + copied_bytes)


@lru_cache(maxsize=4096)
def tensor_set_bytes(
    local: ClientStep, family: Family, architecture: Architecture, wire: Wire = "float32"
) -> tuple[int, int]:
    """Bytes that travel to and from a device for one order."""
    return nbytes(local.sent(family, architecture), wire), nbytes(local.returned(family, architecture), wire)


def in_floats(
    budget: Budget, local: ClientStep, family: Family, ends: tuple[Architecture, Architecture], settings: RoundSettings
) -> Budget:
    """A budget for a search that prices weights as 32-bit floats, where they travel in fewer bytes or in more.

    Under int8 architectures have more or fewer scales for their weights, so that the bytes of some shrink more than
    those of others. This goes by the one of `ends`, the smallest and the largest of a space, whose bytes shrink more.
    What is found may be a little too large for the wire, which `fleet_search.find_priced` corrects. Under masks more
    bytes travel up than down.
    """
    if settings.wire == "float32" and not settings.secure_minimum:
        return budget
    down, up = Fraction(10**9), Fraction(10**9)
    for architecture in ends:
        floats = tensor_set_bytes(local, family, architecture)
        encoded = tensor_set_bytes(local, family, architecture, settings.wire)
        down = min(down, Fraction(encoded[0], floats[0]) if floats[0] else Fraction(1))
        up = min(up, Fraction(settings.upload_bytes(encoded[1]), floats[1]) if floats[1] else Fraction(1))

    def as_floats(limit_bytes: int | None, ratio: Fraction) -> int | None:
        return None if limit_bytes is None else min(int(limit_bytes / ratio), MAX_WHOLE)

    return replace(
        budget,
        download_bytes=as_floats(budget.download_bytes, down),
        upload_bytes=as_floats(budget.upload_bytes, up),
        seconds_per_byte_down=float(budget.seconds_per_byte_down * down),
        seconds_per_byte_up=float(budget.seconds_per_byte_up * up),
    )


def nothing_beside(architecture: Architecture) -> int:
    """No message lies in the memory that trains."""
    return 0


@dataclass(frozen=True)
class Means:
    """Amounts that a device may spend in a round, before anything is chosen for it.

    Attributes:
        budget: its message included.
        message_bytes: what the message that brings an architecture takes of its memory beside the training.
    """

    budget: Budget
    message_bytes: Callable[[Architecture], int] = nothing_beside

    def afford(self, architecture: Architecture, price: Cost) -> bool:
        """Return whether the device can train an architecture at this price beside the message that brings it."""
        beside_bytes = self.message_bytes(architecture)
        if beside_bytes:
            price = replace(price, peak_training_memory_bytes=price.peak_training_memory_bytes + beside_bytes)
        return fits(price, self.budget)


def fits(price: Cost, budget: Budget) -> bool:
    """Return whether a device can train an architecture of this cost, its tensors can travel, and there is time for
    both."""
    return fit_in_turn([price], budget)


def fit_in_turn(prices: Sequence[Cost], budget: Budget) -> bool:
    """Return whether a device can train these one after the other, all their tensors can travel at once, and there is
    time."""
    down_bytes, up_bytes = sum(p.download_bytes for p in prices), sum(p.upload_bytes for p in prices)
    in_memory = all(p.peak_training_memory_bytes <= budget.memory_bytes for p in prices)
    in_time = budget.in_time(down_bytes, up_bytes, sum(p.training_flops for p in prices))
    return in_memory and budget.can_travel(down_bytes, up_bytes) and in_time
