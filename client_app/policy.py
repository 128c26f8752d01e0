"""Limits that a device sets itself, whatever its server says: under which masks it trains, and in which sums it is.

One sum shows nothing of one device, and two may: the updates of ten devices from some weights, less those of nine of
them from the same weights, are the update of the tenth. So the devices of every sum are parted into blocks, and before
a device confirms a sum, it notes its block. From the same weights it then takes part only in sums that its whole
block is in, as a block: whatever is taken from what, the update of one device does not remain.

That holds if a device adds the same update each time. So it trains from the same weights as it did the first time, with
the same seed. With another seed for one device alone, the difference of two sums of the same block would be the
difference of two updates of that device.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from wildflower.devices import node_config
from wildflower.devices.private import private_folder, private_open, sync
from wildflower.devices.state_folder import node_state_dir
from wildflower.messages.error import MessageError
from wildflower.messages.masks import digest_of, digests_of
from wildflower.messages.orders import Batch, Hex64, LocalTraining, StepReference, WorkOrder

MAX_REMEMBERED = 4096  # sums, and updates; then the oldest are forgotten


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Entry(_Kept):
    """A sum that a device has confirmed: its run and round, the weights before it, and the device's block."""

    round: Hex64
    weights: Hex64
    block: list[int]


class _Update(_Kept):
    """What a device has trained for a sum: from which weights, with which seed, and the digest of all else asked."""

    weights: Hex64
    seed: int
    asked: Hex64


class _Newest(_Kept):
    """How a device has trained for the newest of its updates, and in which run."""

    weights: Hex64
    run: Hex64
    training: LocalTraining
    client_step: StepReference


class _Entries(_Kept):
    sums: list[_Entry] = []
    updates: list[_Update] = []
    newest: _Newest | None = None


@dataclass(frozen=True)
class Ledger:
    """The sums that a device has confirmed, so that they could be unmasked, and its updates, in all runs, in a file."""

    path: Path

    def as_first(
        self, batch: Batch, order: WorkOrder, arrays: Sequence[bytes], weights: str
    ) -> tuple[LocalTraining, WorkOrder]:
        """Return how the device trains for an order under masks: as the first time from these weights, seed included.

        If a sum is lost, the next round begins from the same weights, and its learning rate may be another one. So in
        the run that it trained for last the device trains as the first time, whatever that round says.

        Raises:
            MessageError: from these weights the device was asked something else before.
        """
        asked, run = digests_of(batch, order, arrays)[1], digest_of(batch.run)
        with alone(self.path.parent):
            entries = self._read()
            before = next((update for update in entries.updates if update.weights == weights), None)
            if before is None:
                update = _Update(weights=weights, seed=order.seed, asked=asked)
                newest = _Newest(weights=weights, run=run, training=batch.training, client_step=order.client_step)
                self._write(_Entries(sums=entries.sums, updates=[*entries.updates, update], newest=newest))
                return batch.training, order
        last = entries.newest
        if before.asked != asked and last is not None and (last.weights, last.run) == (weights, run):
            batch = batch.model_copy(update={"training": last.training})
            order = order.model_copy(update={"client_step": last.client_step})
            asked = digests_of(batch, order, arrays)[1]
        if before.asked != asked:
            raise MessageError(
                "from these very weights this device has trained for a sum with other settings: the difference of both "
                "sums could show its update. Go on with the settings of before, or from other weights (seed, "
                "initial.weights)"
            )
        return batch.training, order.model_copy(update={"seed": before.seed})

    def block(self, run: str, round_number: int, weights: str) -> list[int]:
        """Return the only block that the device is in, in sums of these weights; [] if it may be in any.

        Raises MessageError where it has been in a sum of this round already, which was of other weights.
        """
        entries, this = self._read().sums, digest_of(run, round_number)
        found = next((entry.block for entry in entries if entry.weights == weights), [])
        if not found and any(entry.round == this for entry in entries):
            raise MessageError(
                f"this device has been in a sum of round {round_number} of the run already, from other weights: a new "
                "run has another run-name"
            )
        return found

    def add(self, run: str, round_number: int, weights: str, block: list[int]) -> None:
        """Note a sum, on the disk when this returns. Raises MessageError where the device may not be in it."""
        with alone(self.path.parent):
            check_same(self.block(run, round_number, weights), block)
            entry = _Entry(round=digest_of(run, round_number), weights=weights, block=sorted(block))
            entries = self._read()
            if entry not in entries.sums:
                self._write(_Entries(sums=[*entries.sums, entry], updates=entries.updates, newest=entries.newest))

    def _write(self, entries: _Entries) -> None:
        kept = {"sums": entries.sums[-MAX_REMEMBERED:], "updates": entries.updates[-MAX_REMEMBERED:]}
        write_whole(self.path, entries.model_copy(update=kept).model_dump_json())

    def _read(self) -> _Entries:
        try:
            return _Entries.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return _Entries()
        except (OSError, ValidationError):
            raise MessageError(
                f"{self.path}, which says in which sums this device has been, cannot be read: while it is so, the "
                "device is in no other; its owner may delete the file"
            ) from None


def check_same(before: list[int], block: list[int]) -> None:
    """Raise MessageError if a block is not that of the sum before it from the same weights."""
    if before and sorted(before) != sorted(block):
        raise MessageError(
            f"from these very weights this device has been in a sum together with {before}: the difference to a sum "
            f"with {sorted(block)} could show one device's update"
        )


@dataclass(frozen=True)
class Policy:
    """The settings of a device's owner, and what the device remembers.

    Attributes:
        minimum: the fewest devices of a sum; 0 where the device also trains without masks.
        ledger: None in a simulation, whose server has all devices' data.
    """

    minimum: int = 0
    ledger: Ledger | None = None

    def check_sum(self, fewest: int) -> None:
        """Raise MessageError if a sum may be of too few devices."""
        if fewest < self.minimum:
            raise MessageError(
                f"a sum may be of {fewest} devices, and this device's owner wants {self.minimum} at least "
                "(secure-minimum in its node config): set the run's secure-aggregation.minimum"
            )

    def check_unmasked(self, what: str) -> None:
        """Raise MessageError if the device does nothing whose result the server would see by itself."""
        if self.minimum:
            raise MessageError(
                f"this device's owner wants sums of {self.minimum} devices at least (secure-minimum in its node "
                f"config), and this is {what}"
            )


def policy_of(config: Mapping[str, object], device: int, *, simulated: bool) -> Policy:
    """Return the policy of a device of this node. MessageError where the node may not be a worker of a simulation."""
    minimum = node_config.read(config).secure_minimum or 0
    if simulated:
        Policy(minimum).check_unmasked("work for a simulation")
        return Policy()
    return Policy(minimum, Ledger(node_state_dir(config) / ".sums" / f"device-{device}.json"))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, because a server may send a device two messages at the same moment."""
    for path in (folder.parent, folder):
        private_folder(path)
    with private_open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file that only its owner can read: the whole of it or nothing, and if durable on the disk.

    To be called by who is `alone` in the file's folder.
    """
    for half in path.parent.glob(f"{path.stem}.*.part"):
        half.unlink()  # of a process that was killed here, and it may hold keys
    beside = path.with_suffix(f".{os.getpid()}.part")
    with private_open(beside, "w") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(beside, path)
    if durable:
        sync(path.parent)
