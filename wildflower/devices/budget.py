"""The budget of a device: what it may spend in one round."""

from dataclasses import asdict, replace
from typing import Any

from pydantic.dataclasses import dataclass

from wildflower.devices.checked import STRICT, Above0, AtLeast0, Whole
from wildflower.devices.resource_report import DeviceReport
from wildflower.devices.validation import MAX_WHOLE

MIN_MBIT_PER_S = 1e-200
"""The speed of a link of 0: bytes over it take longer than any round, and yet their time is a finite number."""


@dataclass(config=STRICT, frozen=True)
class Budget:
    """The means of one device for one round; checked when they are made.

    Attributes:
        memory_bytes: Peak memory of training.
        download_bytes: Weights that travel to the device; None: no limit. 0: nothing can travel.
        upload_bytes: Weights that travel from the device, likewise.
        deadline_seconds: Time from work order to update; None: no limit.
        round_seconds: How long download, training and upload may take by what is known of the device; None: no limit.
        seconds_per_byte_down: Of what travels to the device; 0 where nobody measured the link.
        seconds_per_byte_up: Of what travels from the device, likewise.
        seconds_per_flop: Of the training of one example, for all examples of the round together; 0 where nobody
            measured the device's speed.
    """

    memory_bytes: Whole
    download_bytes: Whole | None = None
    upload_bytes: Whole | None = None
    deadline_seconds: Above0 | None = None
    round_seconds: Above0 | None = None
    seconds_per_byte_down: AtLeast0 = 0.0
    seconds_per_byte_up: AtLeast0 = 0.0
    seconds_per_flop: AtLeast0 = 0.0

    @property
    def both_ways_bytes(self) -> int | None:
        """Return the bytes that can travel both ways, such as a network that comes back; None: no limit."""
        return min((limit for limit in (self.download_bytes, self.upload_bytes) if limit is not None), default=None)

    @property
    def seconds_per_byte(self) -> float:
        """Return the seconds of a byte that travels both ways."""
        return self.seconds_per_byte_down + self.seconds_per_byte_up

    def seconds(self, down_bytes: int, up_bytes: int, training_flops: float) -> float:
        """Return how long a round takes in which these bytes travel, and an example takes `training_flops` to train."""
        traveling = down_bytes * self.seconds_per_byte_down + up_bytes * self.seconds_per_byte_up
        return traveling + training_flops * self.seconds_per_flop

    def can_travel(self, down_bytes: int, up_bytes: int) -> bool:
        """Return whether so much may travel to and from the device."""
        down = self.download_bytes is None or down_bytes <= self.download_bytes
        return down and (self.upload_bytes is None or up_bytes <= self.upload_bytes)

    def in_time(self, down_bytes: int, up_bytes: int, training_flops: float) -> bool:
        """Return whether such a round is over within `round_seconds`."""
        return self.round_seconds is None or self.seconds(down_bytes, up_bytes, training_flops) <= self.round_seconds

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name: a dict of JSON scalars."""
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
    """Return the budget of a device that reported `report`.

    Memory is what the owner set apart, within what is available, or else `memory_fraction` of what is available. The
    payload of each way is what its link carries in `transfer_seconds`, or in the shorter time that the report names,
    within the owner's limit; a link that nobody measured limits nothing, over a link of 0 Mbit/s nothing can travel.

    Args:
        report: What the device said of itself.
        memory_fraction: Above 0, at most 1: the rest is left to the system and to what our cost does not foresee.
        transfer_seconds: How long weights may travel one way; None: links set no limit.
        deadline_seconds: Passed on.
        round_seconds: How long download, training and upload may take together; None: time sets no limit.
        examples: How many the device trains on in a round, one that comes twice counted twice.
    """
    if report.memory_limit_bytes is None:
        # A float may round up.
        memory_bytes = min(int(report.memory_available_bytes * memory_fraction), report.memory_available_bytes)
    else:
        memory_bytes = min(report.memory_limit_bytes, report.memory_available_bytes)

    times = [seconds for seconds in (transfer_seconds, report.transfer_limit_seconds) if seconds is not None]

    def limit_bytes(mbit_per_s: float | None) -> int | None:
        limits = []
        if mbit_per_s is not None and times:
            limits.append(int(min(mbit_per_s * 1e6 * min(times) / 8, MAX_WHOLE)))  # of a link of any speed
        if report.payload_limit_bytes is not None:
            limits.append(report.payload_limit_bytes)
        return min(limits, default=None)

    budget = Budget(
        memory_bytes,
        download_bytes=limit_bytes(report.down_mbit_per_s),
        upload_bytes=limit_bytes(report.up_mbit_per_s),
        deadline_seconds=deadline_seconds,
    )
    if round_seconds is None:
        return budget
    return replace(
        budget,
        round_seconds=round_seconds,
        seconds_per_byte_down=_seconds_per_byte(report.down_mbit_per_s),
        seconds_per_byte_up=_seconds_per_byte(report.up_mbit_per_s),
        seconds_per_flop=0.0 if report.flop_per_s is None else examples / report.flop_per_s,
    )


def _seconds_per_byte(mbit_per_s: float | None) -> float:
    """Return the time of a byte over a link, 0 if nobody measured it; more than any round if it carries nothing."""
    return 0.0 if mbit_per_s is None else 8e-6 / max(mbit_per_s, MIN_MBIT_PER_S)
