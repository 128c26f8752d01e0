"""Simulated time: what a round takes on the devices of a fleet, whatever machine runs the simulation."""

import math
from dataclasses import dataclass

import numpy as np

from wildflower.devices.fleet import Fleet
from wildflower.devices.time_series import Trace
from wildflower.devices.validation import check_number


def transfer_seconds(trace: Trace | None, start_seconds: float, nbytes: int) -> float:
    """Return how long `nbytes` take over a link whose capacity follows `trace`, from second `start_seconds` on.

    The capacity is constant within each second of the trace, and the trace starts over at its end.

    Args:
        trace: Capacity in Mbit/s; None: a link without limit, which takes no time.
        start_seconds: When the transfer starts.
        nbytes: What travels.

    Returns:
        Seconds; infinity if the trace is 0 throughout or the transfer never starts.
    """
    check_number(nbytes, "nbytes")
    if math.isnan(start_seconds) or start_seconds < 0:
        raise ValueError(f"start_seconds = {start_seconds!r}: must be at least 0")
    if math.isinf(start_seconds):
        return math.inf
    if nbytes == 0 or trace is None:
        return 0.0
    period_seconds, period_mbit = len(trace.values), float(trace.cumulative[-1])
    if period_mbit == 0:
        return math.inf
    start = (start_seconds + trace.offset_seconds) % period_seconds
    second = min(int(start), period_seconds - 1)
    passed_mbit = trace.cumulative[second] + (start - second) * trace.values[second]
    # The transfer ends where the integral of the trace, taken from second 0 of the file, reaches this.
    end_mbit = float(passed_mbit) + nbytes * 8 / 1e6
    periods, rest_mbit = divmod(end_mbit, period_mbit)
    if rest_mbit == 0:  # the transfer ends within a period, not after the zeros that may end it
        periods, rest_mbit = periods - 1, period_mbit
    # The first second at whose end the rest has passed; its capacity cannot be 0, as the rest is above 0.
    last = int(np.searchsorted(trace.cumulative, rest_mbit)) - 1
    end = periods * period_seconds + last + (rest_mbit - float(trace.cumulative[last])) / float(trace.values[last])
    return max(end - start, 0.0)


@dataclass(frozen=True)
class Timing:
    """Simulated seconds of one device in one round; infinite where a link carries nothing."""

    download_seconds: float
    training_seconds: float
    upload_seconds: float

    @property
    def total_seconds(self) -> float:
        """From the start of the round until the update has arrived."""
        return self.download_seconds + self.training_seconds + self.upload_seconds


class VirtualClock:
    """The simulated time of a run.

    Attributes:
        now_seconds: Simulated seconds since the start of the run.
    """

    def __init__(self, now_seconds: float = 0.0) -> None:
        self.now_seconds = check_number(now_seconds, "now_seconds")

    def timing(self, fleet: Fleet, device: int, *, bytes_down: int, flops: float, bytes_up: int) -> Timing:
        """Return what a round that starts now takes on this device.

        Download, training and upload follow one another, and a link changes along its trace while they last. The speed
        is that of the start of the round.

        Args:
            fleet: Where the device is.
            device: Its number.
            bytes_down: Size of the weights sent to it.
            flops: Floating point operations of its training in this round.
            bytes_up: Size of its update.
        """
        check_number(flops, "flops")
        links = fleet.links(device, self.now_seconds)
        download = transfer_seconds(links.down, self.now_seconds, bytes_down)
        training = flops / fleet.flop_per_s(device, self.now_seconds)
        upload = transfer_seconds(links.up, self.now_seconds + download + training, bytes_up)
        return Timing(download, training, upload)

    def advance(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.now_seconds += check_number(seconds, "seconds")
