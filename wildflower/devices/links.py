"""A device's links: measured by the probe now and then, kept in its state folder, averaged.

The probe may spend a share of the weights' traffic. That share is saved up until it pays for a measurement. The first
one, and one where the newest figure is a day old, are made on credit, so that the first round has figures already.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from wildflower.devices.checked import MAX_MBIT_PER_S, STRICT, AtLeast0, Text, Whole, load, save
from wildflower.devices.node_config import NodeConfig
from wildflower.devices.resource_report import MIN_PROBE_BYTES, DeviceReport
from wildflower.devices.validation import one_line

MAX_PROBE_BYTES = 2**20
OLDEST_SECONDS = 24 * 3600.0  # what was measured before says little of the link now
RETRY_SECONDS = 60.0  # after a probe that failed
LONGEST_RETRY_SECONDS = 3600.0  # after several in a row that cost something, each of which doubles the wait
ANOTHER_LINK = 2.0  # a figure that is off by this factor is of another link, and not averaged with the old one's
FILE = "links.json"

Measured = Annotated[float, Field(gt=0, le=MAX_MBIT_PER_S)]


@dataclass(config=STRICT, frozen=True)
class LinkHistory:
    """The findings of the probe so far; times are seconds since 1970.

    `credit_bytes` is what the probe may still spend; below 0 after the first measurement. `failures` counts those in a
    row that cost something.
    """

    down_mbit_per_s: Measured | None = None
    up_mbit_per_s: Measured | None = None
    measured_at: AtLeast0 = 0.0
    failed_at: AtLeast0 = 0.0
    problem: Text | None = None
    credit_bytes: Annotated[int, Field(ge=-(2**40), lt=2**63)] = 0
    failures: Whole = 0


def update_links(owner: NodeConfig, folder: Path, *, traffic_bytes: int) -> LinkHistory:
    """Book the weights' traffic since the last call, and measure the links if that pays for it.

    Args:
        owner: the device's node config.
        folder: the device's state folder.
        traffic_bytes: weights that came and went.
    """
    history = load(LinkHistory, folder / FILE) or LinkHistory()
    if owner.bandwidth_address is None:
        return history
    now = time.time()
    credit = min(history.credit_bytes + int(owner.bandwidth_share * traffic_bytes), 2 * MAX_PROBE_BYTES)
    before, history = history, replace(history, credit_bytes=credit)
    # A time that lies in the future is of a clock that was set back since, as on boards without one of their own.
    due = history.down_mbit_per_s is None or not 0 <= now - history.measured_at <= OLDEST_SECONDS
    wait_seconds = min(RETRY_SECONDS * 2 ** min(max(history.failures - 1, 0), 10), LONGEST_RETRY_SECONDS)
    waiting = 0 <= now - history.failed_at < wait_seconds
    try:
        if (due or credit >= 2 * MIN_PROBE_BYTES) and not waiting:
            # Kept before as one that failed: where nothing can be kept, every message would measure.
            before = replace(history, failed_at=now, problem="the measurement was broken off")
            save(before, folder / FILE)
            history = _measure(owner, history, _probe_bytes(history), now)
        if history != before:
            save(history, folder / FILE)
    except OSError as error:  # a full disk must not cost the device its work
        history = replace(history, problem=one_line(f"what is known of the links cannot be kept: {error}"))
    return history


def _probe_bytes(history: LinkHistory) -> int:
    """Return how much to send each way: what has been saved up, but on a slow link what passes in a second."""
    slower = min(history.down_mbit_per_s or 0.0, history.up_mbit_per_s or 0.0)
    max_bytes = min(history.credit_bytes // 2, MAX_PROBE_BYTES, int(slower * 1e6 / 8))
    return MIN_PROBE_BYTES if history.failed_at else max(MIN_PROBE_BYTES, max_bytes)


def _measure(owner: NodeConfig, history: LinkHistory, nbytes: int, now: float) -> LinkHistory:
    # grpc is not small, and most messages do without it.
    from wildflower.devices.bandwidth import BandwidthError, measure_links, read_token

    assert owner.bandwidth_address is not None
    assert owner.bandwidth_token_file is not None
    try:
        ca = None if owner.bandwidth_ca is None else Path(owner.bandwidth_ca).expanduser().read_bytes()
        token = read_token(Path(owner.bandwidth_token_file).expanduser())
        down, up = measure_links(owner.bandwidth_address, token, ca, nbytes=nbytes)
    except (BandwidthError, OSError, ValueError) as error:
        spent_bytes = error.spent_bytes if isinstance(error, BandwidthError) else 0
        return replace(
            history,
            failed_at=now,
            problem=one_line(str(error)) or type(error).__name__,
            credit_bytes=_less(history, spent_bytes),
            failures=history.failures + 1 if spent_bytes else 0,
        )
    return replace(
        history,
        down_mbit_per_s=averaged(history.down_mbit_per_s, down.mbit_per_s),
        up_mbit_per_s=averaged(history.up_mbit_per_s, up.mbit_per_s),
        measured_at=now,
        failed_at=0.0,
        problem=None,
        credit_bytes=_less(history, 2 * nbytes),
        failures=0,
    )


def _less(history: LinkHistory, spent_bytes: int) -> int:
    """Return the credit that is left; a debt is bounded, so that a link is soon measured again after long trouble."""
    return max(history.credit_bytes - spent_bytes, -2 * MAX_PROBE_BYTES)


def averaged(before: float | None, now: float) -> float:
    """Return a link's speed by the past and one new measurement.

    The mean of the times that a bit takes, half of it the new one's, so that old figures fade; a new one that is off by
    `ANOTHER_LINK` replaces them.
    """
    now = min(now, MAX_MBIT_PER_S)
    if before is None or not 1 / ANOTHER_LINK < now / before < ANOTHER_LINK:
        return now
    return 2 / (1 / before + 1 / now)


def with_links(report: DeviceReport, owner: NodeConfig, history: LinkHistory) -> DeviceReport:
    """Return the report with the links: as measured within a day, as the owner wrote them, or as measured before."""
    age = max(0.0, time.time() - history.measured_at)  # a board without a clock of its own may wake up in 1970
    links: dict[str, Any]
    written_down = owner.down_mbit_per_s is not None or owner.up_mbit_per_s is not None
    measured = owner.bandwidth_address is not None and history.down_mbit_per_s is not None
    if measured and (age <= OLDEST_SECONDS or not written_down):
        links = {
            "down_mbit_per_s": history.down_mbit_per_s,
            "up_mbit_per_s": history.up_mbit_per_s,
            "down_age_seconds": age,
            "up_age_seconds": age,
            "links_from": "probe",
        }
    else:
        links = {"down_mbit_per_s": owner.down_mbit_per_s, "up_mbit_per_s": owner.up_mbit_per_s}
        if written_down:
            links["links_from"] = "node config"
    return replace(report, **links, links_problem=history.problem if owner.bandwidth_address is not None else None)
