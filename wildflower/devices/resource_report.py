"""What a device says of itself."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from wildflower.devices.validation import check_number, check_text, check_whole, json_object, shown
from wildflower.plugins.nearest import nearest

# More than any device has: what lies above is a mistake or an attack, and would overflow what is computed from it.
MAX_MBIT_PER_S = 1e6
MIN_PROBE_BYTES = 64 * 1024  # of one direction, and what the bandwidth service serves at least
MAX_FLOP_PER_S = 1e18
MAX_CELSIUS = 1000.0
MAX_CPUS = 1e5
MAX_KIND_LETTERS = 64
MAX_INSTANCE_LETTERS = 32
LINK_SOURCES = ("probe", "node config")


@dataclass(frozen=True)
class DeviceReport:
    """What a device says of itself; checked when it is made, so that a report that exists is a valid one.

    Whole numbers are below 2^63, links at most 10^6 Mbit/s, and `flop_per_s` is at most 10^18. What has no age of its
    own was read while the report was made.

    Attributes:
        kind: What it is: "raspberry-pi-4", "jetson-nano", "x86-64", "simulated", ...
        memory_total_bytes: Memory in which training happens: RAM within the limits of its container, or the memory
            of a CUDA card.
        memory_available_bytes: The part of it that is free now.
        down_mbit_per_s: Link from the server to the device, in 10^6 bits per second; None if nobody measured it.
        up_mbit_per_s: Link from the device to the server, likewise.
        down_age_seconds: How long ago the link was last measured; None if it was not.
        up_age_seconds: Likewise.
        links_from: "probe" if the links were measured, "node config" if the owner wrote them down; None if unknown.
        links_problem: Why the probe could not be used; None if it could, or if there is none.
        accelerator: Name of the CUDA device; None if there is none.
        cpus: CPUs that the process may use; half a one is 0.5.
        flop_per_s: Floating point operations per second in training; None if nobody measured it.
        speed_age_seconds: How long ago that was measured; None if it was not, or the owner wrote it down.
        memory_limit_bytes: What the owner set apart for training. It replaces the fraction that a budget takes of the
            available memory. None: the owner set nothing.
        payload_limit_bytes: What the owner lets travel one way in one round. None: the owner set nothing.
        transfer_limit_seconds: How long weights may travel one way, as a fleet file says; None: it says nothing.
        temperature_celsius: Of the hottest sensor; None where none can be read.
        throttled: Whether the processor is slowed down for heat or want of power; None where that cannot be read.
        instance: What the node drew at random when it started; None where it was not started by `wildflower-node`.
        instance_age_seconds: How long ago that was; None likewise.
        memory_is_ram: Whether messages lie in the same memory; false of a CUDA card with memory of its own.
    """

    kind: str
    memory_total_bytes: int
    memory_available_bytes: int
    down_mbit_per_s: float | None = None
    up_mbit_per_s: float | None = None
    accelerator: str | None = None
    cpus: float = 1.0
    flop_per_s: float | None = None
    memory_limit_bytes: int | None = None
    payload_limit_bytes: int | None = None
    transfer_limit_seconds: float | None = None
    down_age_seconds: float | None = None
    up_age_seconds: float | None = None
    links_from: str | None = None
    links_problem: str | None = None
    temperature_celsius: float | None = None
    throttled: bool | None = None
    memory_is_ram: bool = True
    speed_age_seconds: float | None = None
    instance: str | None = None
    instance_age_seconds: float | None = None

    def __post_init__(self) -> None:
        check_text(self.kind, "device report: kind", maximum=MAX_KIND_LETTERS)
        check_whole(self.memory_total_bytes, "device report: memory_total_bytes")
        check_whole(self.memory_available_bytes, "device report: memory_available_bytes")
        if self.memory_available_bytes > self.memory_total_bytes:
            raise ValueError(
                f"device report: memory_available_bytes = {self.memory_available_bytes}: "
                f"must be at most memory_total_bytes = {self.memory_total_bytes}"
            )
        if self.accelerator is not None:
            check_text(self.accelerator, "device report: accelerator")
        check_number(self.cpus, "device report: cpus", positive=True, maximum=MAX_CPUS)
        if self.down_mbit_per_s is not None:
            check_number(self.down_mbit_per_s, "device report: down_mbit_per_s", maximum=MAX_MBIT_PER_S)
        if self.up_mbit_per_s is not None:
            check_number(self.up_mbit_per_s, "device report: up_mbit_per_s", maximum=MAX_MBIT_PER_S)
        if self.flop_per_s is not None:
            check_number(self.flop_per_s, "device report: flop_per_s", positive=True, maximum=MAX_FLOP_PER_S)
        if self.memory_limit_bytes is not None:
            check_whole(self.memory_limit_bytes, "device report: memory_limit_bytes")
        if self.payload_limit_bytes is not None:
            check_whole(self.payload_limit_bytes, "device report: payload_limit_bytes")
        if self.transfer_limit_seconds is not None:
            check_number(self.transfer_limit_seconds, "device report: transfer_limit_seconds", positive=True)
        for name in ("down_age_seconds", "up_age_seconds", "speed_age_seconds"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), f"device report: {name}")
        if self.links_from is not None and self.links_from not in LINK_SOURCES:
            raise ValueError(
                f"device report: links_from = {shown(self.links_from)}: {nearest(self.links_from, LINK_SOURCES)}"
            )
        if self.links_problem is not None:
            check_text(self.links_problem, "device report: links_problem")
        if self.temperature_celsius is not None:
            check_number(
                self.temperature_celsius, "device report: temperature_celsius", minimum=-273.15, maximum=MAX_CELSIUS
            )
        if self.throttled is not None and not isinstance(self.throttled, bool):
            raise ValueError(f"device report: throttled = {shown(self.throttled)}: must be true, false or null")
        if self.instance is not None:
            check_text(self.instance, "device report: instance", maximum=MAX_INSTANCE_LETTERS)
        if self.instance_age_seconds is not None:
            check_number(self.instance_age_seconds, "device report: instance_age_seconds")
        if not isinstance(self.memory_is_ram, bool):
            raise ValueError(f"device report: memory_is_ram = {shown(self.memory_is_ram)}: must be true or false")

    def to_json(self) -> dict[str, Any]:
        """All fields by name: a dict of JSON scalars."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "DeviceReport":
        """The report of `to_json`, checked; ValueError names the key, its value and what would be right."""
        return cls(**json_object(value, "device report", [field.name for field in fields(cls)]))
