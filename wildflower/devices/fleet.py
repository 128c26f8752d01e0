"""The fleet: simulated devices, described by a TOML file (docs/fleets.md).

Everything a device is follows from (seed, device number, simulated time) by hashing, so that nothing is stored per
device: a fleet of 100,000 devices costs what its sampled devices cost.
"""

import hashlib
import math
import struct
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from wildflower.devices.checked import MAX_FLOP_PER_S, MAX_MBIT_PER_S
from wildflower.devices.hours import Hours, seconds_until
from wildflower.devices.quantity import (
    BYTES,
    FLOPS,
    LINK,
    PAYLOAD,
    SECONDS,
    Quantity,
    Uniform,
    parse_quantity,
)
from wildflower.devices.resource_report import DeviceReport
from wildflower.devices.time_series import LINK_COLUMNS, MEMORY_COLUMNS, Trace, read_trace
from wildflower.devices.validation import MAX_WHOLE, check_number
from wildflower.plugins.invalid import one
from wildflower.plugins.nearest import nearest
from wildflower.plugins.raised_as import raised_as

Requirement = Callable[[float], tuple[int, int]]

MAX_FILE_BYTES = 2**20
FLEETS_DIR = Path(__file__).parent / "fleets"


def _speed(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("must be a finite number above 0")
    return float(value)


def _link_range(value: object) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two amounts, such as ['30 Mbit/s', '100 Mbit/s']")
    low, high = map(LINK.amount, value)
    if low >= high:
        raise ValueError(f"{value[0]!r} is not less than {value[1]!r}; the lowest amount comes first")
    return low, high


Memory = Annotated[Quantity, BeforeValidator(partial(parse_quantity, amount=BYTES.amount))]
Link = Annotated[Quantity, BeforeValidator(partial(parse_quantity, amount=LINK.amount))]
Name = Annotated[str, Field(min_length=1)]


class GroupTable(BaseModel):
    """One `[[group]]` of a fleet file."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    name: Name
    count: int | None = Field(default=None, ge=1)
    share: float | None = Field(default=None, gt=0, le=1)
    kind: Name = "simulated"
    memory: Memory | None = None
    training_memory: Memory | None = None
    memory_trace: Name | None = None
    fits_width: float | None = Field(default=None, gt=0, le=1)
    payload: Annotated[float, BeforeValidator(PAYLOAD.amount)] | None = None
    link: Link | None = None
    down: Link | None = None
    up: Link | None = None
    down_trace: Name | None = None
    up_trace: Name | None = None
    link_range: Annotated[tuple[float, float], BeforeValidator(_link_range)] | None = None
    speed: Annotated[Quantity, BeforeValidator(partial(parse_quantity, amount=_speed))] = Uniform(1.0, 1.0)
    hours: Hours | None = None

    @model_validator(mode="after")
    def _check(self) -> "GroupTable":
        def given(*keys: str) -> list[str]:
            return [key for key in keys if getattr(self, key) is not None]

        for keys, needed in [
            (("count", "share"), True),
            (("memory", "training_memory", "memory_trace", "fits_width"), True),
            (("payload", "fits_width"), False),
            (("link", "down", "down_trace"), False),
            (("link", "up", "up_trace"), False),
        ]:
            if len(given(*keys)) > 1:
                raise ValueError(f"{' and '.join(given(*keys))} exclude each other")
            if needed and not given(*keys):
                raise ValueError(f"needs one of {', '.join(keys)}")
        if self.link_range is not None and not given("down_trace", "up_trace"):
            raise ValueError("link_range stretches traces: it needs down_trace or up_trace")
        return self


class FleetTable(BaseModel):
    """A whole fleet file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reference: Annotated[float, BeforeValidator(FLOPS.amount)] = 10e9
    transfer: Annotated[float, BeforeValidator(SECONDS.amount)] | None = None
    replaced_per_round: float = Field(default=0.0, ge=0, lt=1)
    group: list[GroupTable] = Field(min_length=1)


@dataclass(frozen=True)
class Links:
    """The capacity of one device's links, in Mbit/s over time; None: no limit."""

    down: Trace | None
    up: Trace | None


@dataclass(frozen=True)
class _Group:
    """A group as the fleet uses it: widths measured, traces read."""

    table: GroupTable
    memory: Quantity | Trace
    payload_limit_bytes: int | None
    down: Quantity | Trace | None
    up: Quantity | Trace | None

    @cached_property
    def memory_total_bytes(self) -> int:
        """Return the most memory of a device."""
        return int(self.memory.values.max() if isinstance(self.memory, Trace) else self.memory.highest)


class Fleet:
    """The set of simulated devices.

    Attributes:
        size: Number of devices at any time; the first ones are numbered from 0, the groups of the file one after the
            other.
        replaced: How many of them leave after every round; as many new ones come, with numbers from `size` on.
        tiers: Names of the groups that have devices, in the order of the file.
        hours: When devices of a group take part, such as "22:00-06:00", where the file says so. Simulated time begins
            at midnight.
        counts: How many devices each group has, where the file says so; empty where it has shares.
        digest: SHA-256 of the fleet file and of all traces that it names.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        devices: int | None = None,
        seed: int = 0,
        requirement: Requirement | None = None,
    ) -> None:
        """Read and check a fleet file.

        Args:
            path: The TOML file; `bundled_fleet` gives those that come with the project.
            devices: How many there are. Groups with shares need it; groups with counts must add up to it.
            seed: 0 or more; devices, draws and trace offsets follow from it.
            requirement: Width in (0, 1] -> (training memory, payload) in bytes of the sub-model of that width, asked
                once for every `fits_width` of the file.

        Raises:
            ValueError: names the file, the group, the key, its value and what would be right.
        """
        path = Path(path).expanduser()
        table = _read_table(path)
        counts = _counts(path, table, devices)
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed = {seed}: must be from 0 to 2^63 - 1")
        groups = [_compile(path, group, requirement) for group in table.group]
        for group in table.group:
            where = f"{path}: group {group.name!r}: highest speed times reference"
            check_number(group.speed.highest * table.reference, where, maximum=MAX_FLOP_PER_S)
        filled = [(group, count) for group, count in zip(groups, counts, strict=True) if count > 0]
        self._groups = [group for group, _ in filled]
        self._ends = list(accumulate(count for _, count in filled))
        self._seed = seed
        self._reference_flop_per_s, self._transfer_seconds = table.reference, table.transfer
        self.size = self._ends[-1]
        self.replaced = _replaced(path, table, self.size)
        self.tiers = [group.table.name for group in self._groups]
        self.counts = {group.table.name: count for group, count in filled if group.table.count is not None}
        self.digest = _digest(path, table)
        self.hours = {group.table.name: group.table.hours for group in self._groups if group.table.hours}

    @property
    def most_bytes(self) -> dict[str, dict[str, int | None]]:
        """Return the most training memory of a device of each tier, and its payload limit, whatever the links carry.

        Under one file these differ between runs where it says `fits_width`.
        """
        return {
            group.table.name: {"memory_bytes": group.memory_total_bytes, "payload_bytes": group.payload_limit_bytes}
            for group in self._groups
        }

    def is_there(self, device: int, simulated_seconds: float) -> bool:
        """Say whether that time is within the device's hours."""
        hours = self._group_of(device).table.hours
        return hours is None or not seconds_until(hours, simulated_seconds)

    def seconds_until_hours(self, simulated_seconds: float) -> float:
        """Return in how many seconds the hours of some group begin; 0 within them."""
        every = [group.table.hours for group in self._groups]
        return min(seconds_until(hours, simulated_seconds) if hours else 0.0 for hours in every)

    def newcomers(self, exchanges: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which places among the present devices become free after a round, and the numbers of who takes them.

        Args:
            exchanges: How many times devices have been replaced before.
        """
        places = np.random.default_rng([self._seed, exchanges]).choice(self.size, self.replaced, replace=False)
        first = self.size + exchanges * self.replaced
        return places, np.arange(first, first + self.replaced)

    def tier(self, device: int) -> str:
        """Return the name of the device's group."""
        return self._group_of(device).table.name

    def report(self, device: int, simulated_seconds: float = 0.0) -> DeviceReport:
        """Return what the device says of itself at that time."""
        group = self._group_of(device)
        memory_bytes = int(self._value(group.memory, "memory", device, simulated_seconds))
        # Memory that is set apart for training is taken by a budget as a whole.
        is_set_apart = group.table.memory is None and group.table.memory_trace is None
        links = self.links(device, simulated_seconds)
        down = None if links.down is None else links.down.at(simulated_seconds)
        up = None if links.up is None else links.up.at(simulated_seconds)
        return DeviceReport(
            kind=group.table.kind,
            memory_total_bytes=group.memory_total_bytes,
            memory_available_bytes=memory_bytes,
            down_mbit_per_s=down,
            up_mbit_per_s=up,
            flop_per_s=self.flop_per_s(device, simulated_seconds),
            memory_limit_bytes=memory_bytes if is_set_apart else None,
            payload_limit_bytes=group.payload_limit_bytes,
            transfer_limit_seconds=self._transfer_seconds,
        )

    def flop_per_s(self, device: int, simulated_seconds: float = 0.0) -> float:
        """Floating point operations per second of the device's training: its speed times the reference."""
        speed = self._value(self._group_of(device).table.speed, "speed", device, simulated_seconds)
        return speed * self._reference_flop_per_s

    def links(self, device: int, simulated_seconds: float = 0.0) -> Links:
        """Return the device's links, for the clock.

        A trace runs from simulated second 0 on, whatever `simulated_seconds` is; a link that is drawn is a constant,
        and one that is drawn `every = "round"` is the constant of the round that starts at `simulated_seconds`.
        """
        group = self._group_of(device)
        up_key = "up" if group.table.link is None else "down"
        return Links(
            down=self._link(group.down, "down", device, simulated_seconds, _shortest(group)),
            up=self._link(group.up, up_key, device, simulated_seconds, _shortest(group)),
        )

    def _group_of(self, device: int) -> _Group:
        if device < 0 or (device >= self.size and not self.replaced):
            raise ValueError(f"device {device} is not in the fleet: it has devices 0 to {self.size - 1}")
        # Newcomers are drawn from the groups in the first devices' proportions, whoever they come in place of.
        place = device if device < self.size else int(self._draw("group", device) * self.size)
        return self._groups[bisect_right(self._ends, place)]

    def _draw(self, key: str, device: int, moment: bytes = b"") -> float:
        """Return a number in [0, 1) that is the same for the same (seed, device, key, moment)."""
        data = struct.pack("<qq", self._seed, device) + key.encode() + b"\0" + moment
        return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) / 2**53

    def _value(self, source: Quantity | Trace, key: str, device: int, simulated_seconds: float) -> float:
        if isinstance(source, Trace):
            return source.starting_at(self._offset(key, device, len(source.values))).at(simulated_seconds)
        if isinstance(source, Uniform) and source.low == source.high:
            return source.low
        moment = struct.pack("<d", simulated_seconds) if source.every == "round" else b""
        return source.pick(self._draw(key, device, moment))

    def _link(
        self, source: Quantity | Trace | None, key: str, device: int, simulated_seconds: float, trace_seconds: int
    ) -> Trace | None:
        if source is None:
            return None
        if isinstance(source, Trace):
            return source.starting_at(self._offset("link", device, trace_seconds))
        return Trace.of([self._value(source, key, device, simulated_seconds)])

    def _offset(self, key: str, device: int, seconds: int) -> int:
        """Second of a trace at which this device starts."""
        return int(self._draw(f"{key} offset", device) * seconds)


def bundled_fleet(name: str) -> Path:
    """Return the path of a fleet file that comes with the project; ValueError names the nearest one for none."""
    path = FLEETS_DIR / f"{name}.toml"
    names = [file.stem for file in FLEETS_DIR.glob("*.toml")]
    if name not in names:
        raise ValueError(f"no fleet {name!r} comes with the project, {nearest(name, names)}")
    return path


def replaced_devices(path: str | Path, devices: int) -> int:
    """Return how many devices a fleet file replaces after every round; ValueError as `Fleet`."""
    path = Path(path).expanduser()
    table = _read_table(path)
    return _replaced(path, table, sum(_counts(path, table, devices)))


def _replaced(path: Path, table: FleetTable, size: int) -> int:
    share = table.replaced_per_round
    found = round(share * size)
    if share and not 1 <= found <= size:
        raise ValueError(
            f"{path}: replaced_per_round = {share:g}: of {size} devices that is none: at least {1 / size:.2g}, or 0"
        )
    return found


def _shortest(group: _Group) -> int:
    """Length of the shorter link trace: both directions of a device start at the same second of their files."""
    return min((len(link.values) for link in (group.down, group.up) if isinstance(link, Trace)), default=0)


def _read_table(path: Path) -> FleetTable:
    try:
        if (nbytes := path.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {nbytes} bytes: a fleet file has at most {MAX_FILE_BYTES}")
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: cannot read this fleet file: it is not in UTF-8 (byte {error.start + 1}): save it so; "
            "PowerShell's > writes UTF-16"
        ) from error
    except (OSError, tomllib.TOMLDecodeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: cannot read this fleet file: {why}") from error
    try:
        table = FleetTable.model_validate(raw)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(path, raw, one) for one in error.errors())) from None
    repeated = [name for name, times in Counter(group.name for group in table.group).items() if times > 1]
    if repeated:
        raise ValueError(f"{path}: two groups have name = {repeated[0]!r}: every group needs a name of its own")
    return table


def _explain(path: Path, raw: dict[str, Any], error: Any) -> str:
    """Return one line for one of pydantic's errors: file, group, key, value, what is wrong."""
    location = list(error["loc"])
    where, valid = f"{path}", FleetTable.model_fields
    if len(location) > 1 and location[0] == "group":
        index = location[1]
        group = raw["group"][index]
        name = group.get("name", f"number {index + 1}") if isinstance(group, dict) else f"number {index + 1}"
        where, valid, location = f"{path}: group {name!r}", GroupTable.model_fields, location[2:]
    error["loc"] = tuple(location)
    return f"{where}: {one(error, valid)}"


def _counts(path: Path, table: FleetTable, devices: int | None) -> list[int]:
    """Return the number of devices of every group."""
    shares = [group.share for group in table.group if group.share is not None]
    counts = [group.count for group in table.group if group.count is not None]
    if shares and counts:
        raise ValueError(f"{path}: some groups have count and some share: use one of them in the whole file")
    if devices is not None and devices < 1:
        raise ValueError(f"devices = {devices}: must be at least 1")
    if counts:
        if devices is not None and devices != sum(counts):
            raise ValueError(
                f"{path}: the counts of the groups add up to {sum(counts)}, and devices = {devices}: "
                f"set devices = {sum(counts)}, or give the groups shares in place of counts"
            )
        return counts
    if abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"{path}: the shares of the groups add up to {sum(shares):g}: they must add up to 1")
    if devices is None:
        raise ValueError(f"{path}: the groups have shares: say how many devices there are (devices = ...)")
    # Largest remainders: the counts add up to `devices`, and none is off by one or more.
    counts = [int(share * devices) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index] * devices)
    for index in by_remainder[: devices - sum(counts)]:
        counts[index] += 1
    return counts


def _digest(path: Path, table: FleetTable) -> str:
    """Return one hash of all files that the fleet is made of."""
    names = [name for group in table.group for name in (group.memory_trace, group.down_trace, group.up_trace) if name]
    files = [path, *(path.parent / Path(name).expanduser() for name in names)]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def _compile(path: Path, table: GroupTable, requirement: Requirement | None) -> _Group:
    where = f"{path}: group {table.name!r}"

    def trace(key: str, columns: dict[str, float]) -> Trace | None:
        name = getattr(table, key)
        if name is None:
            return None
        with raised_as(ValueError, f"{where}: {key} = {name!r}: "):
            found = read_trace(path.parent / Path(name).expanduser(), columns)
            maximum = MAX_WHOLE if columns is MEMORY_COLUMNS else MAX_MBIT_PER_S
            check_number(float(found.values.max()), "its highest value", maximum=maximum)
            if columns is LINK_COLUMNS and table.link_range is not None:
                return found.stretched(*table.link_range)
            return found

    payload_limit_bytes = None if table.payload is None else int(table.payload)
    memory: Quantity | Trace | None = table.memory or table.training_memory or trace("memory_trace", MEMORY_COLUMNS)
    if table.fits_width is not None:
        if requirement is None:
            raise ValueError(f"{where}: fits_width = {table.fits_width}: needs a family with widths to measure")
        memory_bytes, payload_limit_bytes = requirement(table.fits_width)
        memory = Uniform(float(memory_bytes), float(memory_bytes))
    assert memory is not None  # GroupTable wants one of them
    down = table.link or table.down or trace("down_trace", LINK_COLUMNS)
    up = table.link or table.up or trace("up_trace", LINK_COLUMNS)
    return _Group(table, memory, payload_limit_bytes, down, up)
