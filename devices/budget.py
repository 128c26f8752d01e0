"""What a device may spend in one round."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from devices.report import DeviceReport
from devices.validation import MAX_WHOLE, check_number, check_whole

MIN_MBIT_PER_S = 1e-200
"""What stands for a link of 0: bytes over it take longer than any round, and yet their time is a finite number."""


@dataclass(frozen=True)
class Budget:
    """What one device may spend in one round; checked when it is made.

    Attributes:
        memory_bytes: Peak memory of training.
        payload_bytes: Weights that travel one way; None: no limit. 0: nothing can travel, the device is skipped.
        deadline_seconds: Time from work order to update; None: no limit.
        round_seconds: How long download, training and upload may take by what is known of the device; None: no limit.
        seconds_per_byte: Of the payload, down and up together; links that nobody measured take no time.
        seconds_per_flop: Of the training of one example, for all examples of the round together; 0 where nobody
            measured the device's speed.
    """

    memory_bytes: int
    payload_bytes: int | None
    deadline_seconds: float | None
    round_seconds: float | None = None
    seconds_per_byte: float = 0.0
    seconds_per_flop: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self.memory_bytes, "budget: memory_bytes")
        if self.payload_bytes is not None:
            check_whole(self.payload_bytes, "budget: payload_bytes")
        if self.deadline_seconds is not None:
            check_number(self.deadline_seconds, "budget: deadline_seconds", positive=True)
        if self.round_seconds is not None:
            check_number(self.round_seconds, "budget: round_seconds", positive=True)
        check_number(self.seconds_per_byte, "budget: seconds_per_byte")
        check_number(self.seconds_per_flop, "budget: seconds_per_flop")

    def seconds(self, payload_bytes: int, training_flops: float) -> float:
        """How long a round takes: `payload_bytes` travel each way, an example takes `training_flops` to train."""
        return payload_bytes * self.seconds_per_byte + training_flops * self.seconds_per_flop

    def in_time(self, payload_bytes: int, training_flops: float) -> bool:
        """Whether such a round is over within `round_seconds`."""
        return self.round_seconds is None or self.seconds(payload_bytes, training_flops) <= self.round_seconds

    def to_json(self) -> dict[str, Any]:
        """All fields by name: a dict of JSON scalars."""
        return asdict(self)


def budget_of(
    report: DeviceReport,
    *,
    memory_fraction: float,
    transfer_seconds: float | None,
    deadline_seconds: float | None,
    round_seconds: float | None = None,
    examples: int = 0,
) -> Budget:
    """The budget of a device that reported `report`.

    Memory is what the owner set apart, within what is available, or else `memory_fraction` of what is available. The
    payload is what the slower of the known links carries in `transfer_seconds`, within the owner's limit; a link that
    nobody measured limits nothing, a link of 0 Mbit/s makes the payload 0.

    Args:
        report: What the device said of itself.
        memory_fraction: Above 0, at most 1: the rest is left to the system and to what our cost does not foresee.
        transfer_seconds: How long weights may travel one way; None: links set no limit.
        deadline_seconds: Passed on.
        round_seconds: How long download, training and upload may take together; None: time sets no limit.
        examples: How many the device trains on in a round, one that comes twice counted twice.
    """
    fraction = check_number(memory_fraction, "memory_fraction", positive=True)
    if fraction > 1:
        raise ValueError(f"memory_fraction = {memory_fraction!r}: must be at most 1")
    if report.memory_limit_bytes is None:
        # A float may round up.
        memory_bytes = min(int(report.memory_available_bytes * fraction), report.memory_available_bytes)
    else:
        memory_bytes = min(report.memory_limit_bytes, report.memory_available_bytes)

    limits = [] if report.payload_limit_bytes is None else [report.payload_limit_bytes]
    if transfer_seconds is not None:
        check_number(transfer_seconds, "transfer_seconds", positive=True)
        links = [link for link in (report.down_mbit_per_s, report.up_mbit_per_s) if link is not None]
        limits += [payload_bytes(link, transfer_seconds) for link in links]
    budget = Budget(memory_bytes, min(limits, default=None), deadline_seconds)
    if round_seconds is None:
        return budget
    return replace(
        budget,
        round_seconds=round_seconds,
        seconds_per_byte=_seconds_per_byte(report.down_mbit_per_s) + _seconds_per_byte(report.up_mbit_per_s),
        seconds_per_flop=0.0 if report.flop_per_s is None else examples / report.flop_per_s,
    )


def _seconds_per_byte(mbit_per_s: float | None) -> float:
    """Of a link, 0 where nobody measured it. One that carries nothing takes longer than any round."""
    return 0.0 if mbit_per_s is None else 8e-6 / max(mbit_per_s, MIN_MBIT_PER_S)


def payload_bytes(mbit_per_s: float, seconds: float) -> int:
    """Whole bytes that a link carries in `seconds`, at most 2^63 - 1."""
    carried = mbit_per_s * 1e6 * seconds / 8
    return int(carried) if carried < MAX_WHOLE else MAX_WHOLE
