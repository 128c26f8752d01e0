"""The error of changes that travel as fewer bits: it is kept, and added the next time."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors import SafetensorError
from torch import Tensor

from wildflower.client_app.kept_state import DeviceState
from wildflower.messages.encoding import Wire, decode_entry, encode_entry, may_be_a_change, parts_of
from wildflower.messages.packing import Layout
from wildflower.messages.tensor_sets import Weights
from wildflower.plugins.flower_log import log

LOST_ON_THE_WIRE = "lost-on-the-wire"  # under which name, and a tensor set's, a device keeps what rounding has lost


def encoded_changes(
    contents: Weights, layout: Layout, sent: tuple[bytes, Layout] | None, wire: Wire, lost: dict[str, Tensor]
) -> bytes:
    """Return a tensor set as it travels, tensor by tensor, to hold little at once.

    Tensors that the device was sent travel as their changes; batch norm's statistics travel as values, and nothing is
    kept of them, nor under "qsgd", which loses nothing in the mean.

    Args:
        sent: the tensor set as it came, and its layout.
        lost: what rounding has lost until now by tensor; it becomes what it has lost then.

    Raises:
        MessageError: a value is not finite.
    """
    begun = {entry.name: (entry, data) for entry, data in parts_of(*sent, wire)} if sent else {}
    found = []
    for entry in layout.entries:
        value = contents[entry.name].detach().cpu()
        if not may_be_a_change(entry):
            found.append(encode_entry(value, entry, wire))
            continue
        if entry.name in begun and begun[entry.name][0].shape == entry.shape:
            value = value - decode_entry(begun[entry.name][1], entry, wire)
        if wire == "qsgd":
            found.append(encode_entry(value, entry, wire, change=True))
            continue
        if entry.name in lost and lost[entry.name].shape == value.shape:  # of a pruned tensor it is another
            value = value + lost[entry.name]
        found.append(encode_entry(value, entry, wire))
        lost[entry.name] = value - decode_entry(found[-1], entry, wire)
    return b"".join(found)


class Lost:
    """The losses by rounding of a device's tensor sets, in files beside what its client step keeps.

    A device that loses these files goes on as well without them: nothing is refused for their sake.

    Args:
        before_round: what was kept in this round or later is not used.
    """

    def __init__(self, state: DeviceState, device: int, before_round: int) -> None:
        self._state, self._device, self._before = state, device, before_round
        self.now: dict[str, Mapping[str, Tensor]] = {}  # by the key of its file

    def until_now(self, key: str) -> dict[str, Tensor]:
        """Return what has been lost until now; {} where that cannot be read.

        What is older than the last two rounds in which this device returned anything is not used.
        """
        since = self._state.second_last_round(f"{LOST_ON_THE_WIRE}-", self._before)
        try:
            return self._state.load(key, self._before, since) or {}
        except ValueError as error:
            log.warning("Device %s: what rounding has lost of its changes cannot be read: %s", self._device, error)
            return {}

    def save(self, checkpoint: int) -> None:
        """Write what has been lost `now`; delete what a run that goes on from the checkpoint's round does not read."""
        try:
            for key, tensors in self.now.items():
                self._state.save(key, self._before, tensors)
            if self.now:
                since = self._state.second_last_round(f"{LOST_ON_THE_WIRE}-", checkpoint + 1)
                self._state.forget_before(f"{LOST_ON_THE_WIRE}-", since)
        except (OSError, SafetensorError) as error:  # the update is finished, and worth more
            log.warning("Device %s: what rounding has lost of its change cannot be written: %s", self._device, error)
