"""The report of a device: what it says of itself."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from wildflower.devices.checked import STRICT, Above0, AtLeast0, FlopPerS, MbitPerS, Text, Whole, checked, printable

MIN_PROBE_BYTES = 64 * 1024  # of one direction, and what the bandwidth service serves at least
MAX_KIND_LETTERS = 64
MAX_CLOCK_SECONDS = 2.0**36  # since 1970: the year 4147

Kind = Annotated[str, Field(max_length=MAX_KIND_LETTERS), AfterValidator(printable)]
Instance = Annotated[str, Field(max_length=32), AfterValidator(printable)]


@dataclass(config=STRICT, frozen=True)
class DeviceReport:
    """The report of a device; checked when it is made, so that a report that exists is a valid one.

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
        resting: Why its owner lets it take no part now; None where it does.
        resting_seconds: In how many seconds it is worth asking again; None likewise.
        disk_free_bytes: What is free where the node keeps its state; None if nobody looked.
        clock_seconds: What the device's clock said when it reported, in seconds since 1970; None likewise.
        memory_is_ram: Whether messages lie in the same memory; false of a CUDA card with memory of its own.
    """

    kind: Kind
    memory_total_bytes: Whole
    memory_available_bytes: Whole
    down_mbit_per_s: MbitPerS | None = None
    up_mbit_per_s: MbitPerS | None = None
    accelerator: Text | None = None
    cpus: Annotated[float, Field(gt=0, le=1e5)] = 1.0
    flop_per_s: FlopPerS | None = None
    memory_limit_bytes: Whole | None = None
    payload_limit_bytes: Whole | None = None
    transfer_limit_seconds: Above0 | None = None
    down_age_seconds: AtLeast0 | None = None
    up_age_seconds: AtLeast0 | None = None
    links_from: Literal["probe", "node config"] | None = None
    links_problem: Text | None = None
    temperature_celsius: Annotated[float, Field(ge=-273.15, le=1000)] | None = None
    throttled: bool | None = None
    memory_is_ram: bool = True
    speed_age_seconds: AtLeast0 | None = None
    instance: Instance | None = None
    instance_age_seconds: AtLeast0 | None = None
    resting: Text | None = None
    resting_seconds: AtLeast0 | None = None
    disk_free_bytes: Whole | None = None
    clock_seconds: Annotated[float, Field(ge=0, le=MAX_CLOCK_SECONDS)] | None = None

    @model_validator(mode="after")
    def _available(self) -> Self:
        if self.memory_available_bytes > self.memory_total_bytes:
            raise ValueError(
                f"memory_available_bytes = {self.memory_available_bytes}: must be at most memory_total_bytes = "
                f"{self.memory_total_bytes}"
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name: a dict of JSON scalars."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "DeviceReport":
        """Return the report of `to_json`, checked; ValueError names the key, its value and what would be right."""
        if isinstance(value, Mapping) and (missing := [f.name for f in fields(cls) if f.name not in value]):
            raise ValueError(f"device report: the key {missing[0]!r} is missing")
        return checked(cls, value, "device report")
