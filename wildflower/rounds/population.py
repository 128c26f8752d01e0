"""The devices that can be sampled: the simulated ones of a fleet, or those that connected nodes carry."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from wildflower.devices.clock import Timing
from wildflower.devices.resource_report import DeviceReport
from wildflower.plugins.flower_log import log

# What an overrun leaves of a device's budget, and what a round gives back of it.
OVERRUN_FACTOR, RECOVERY = 0.7, 1.05


@dataclass(frozen=True)
class Holdings:
    """Numbers of examples that the partition gives to devices for training and for testing, and to its test set."""

    training: Callable[[int], int]
    testing: Callable[[int], int]
    test_set: int


@dataclass(frozen=True)
class NodeState:
    """The last that is known of a node: the device it carries, its report, how old that is, and its budget's factor."""

    node: int
    device: int
    report: DeviceReport
    age_seconds: float
    memory_factor: float
    name: str = ""  # under which the node's key was enrolled


class Population(ABC):
    """The devices of a run and the nodes that carry them."""

    poll_seconds: float
    simulated: bool
    now_seconds: float  # since the run began: the virtual clock, or the wall's on hardware
    fleet_digest: str = ""  # of the files that describe simulated devices
    most_bytes: Mapping[str, Mapping[str, int | None]] = {}  # of simulated devices: `Fleet.most_bytes`
    names: Mapping[int, str] = {}  # of nodes: those under which their keys were enrolled

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.busy: set[int] = set()  # nodes that were left working: they are asked when they are free
        self.at_work: set[int] = set()  # nodes whose update is awaited in a later round: they are asked nothing
        self._factors: dict[int, float] = {}

    @abstractmethod
    def sample(
        self, grid: Grid, rng: np.random.Generator, count: int, working: Callable[[list[int]], int] = len
    ) -> list[int]:
        """Up to `count` devices that can be asked now, each at most once.

        Args:
            working: how many of some devices would be given work. On hardware the others take no place of the `count`.
        """

    @abstractmethod
    def everyone(self, grid: Grid) -> list[int]:
        """All devices that can be asked now."""

    @abstractmethod
    def present(self, grid: Grid) -> list[int]:
        """All devices that are there now, without asking them: also those that are at work, by their last reports."""

    @abstractmethod
    def report(self, device: int) -> DeviceReport:
        """The device's newest report."""

    @abstractmethod
    def tier(self, device: int) -> str:
        """The name of the device's fleet group; on hardware its kind."""

    @abstractmethod
    def nodes(self, grid: Grid, devices: Sequence[int], work: Sequence[float]) -> list[int]:
        """The node that carries each device, given how much work each has."""

    @abstractmethod
    def connected(self, grid: Grid, devices: Sequence[int]) -> list[int]:
        """Those of the devices that a node carries now."""

    @abstractmethod
    def answer_seconds(self, deadline_seconds: float | None) -> float | None:
        """Return how long answers are waited for on the clock on the wall, in a run with this deadline; None: for
        ever."""

    def examples(self, device: int) -> int:
        """Training examples that the device holds."""
        return self.holdings.training(device)

    @abstractmethod
    def advance(self, simulated_seconds: float, wall_seconds: float) -> list[int]:
        """A round ended that took this long. -> the devices that have left for good."""

    @abstractmethod
    def timing(self, device: int, *, bytes_down: int, flops: float, bytes_up: int) -> Timing | None:
        """Return how long the device takes in simulated time; None on hardware, where the clock on the wall tells."""

    def replied(self, device: int, report: DeviceReport) -> None:
        """A device sent a new report with its update; of a simulated one the fleet file knows."""

    def ask_again(self, device: int) -> None:
        """Trust no more what a device last reported: ask it before it is sampled again."""

    def absences(self) -> list[str]:
        """Return which devices take part at some times only, in sentences."""
        return []

    def newest_reports(self) -> list[NodeState]:
        """Return what the nodes of real devices said last; simulated devices have none."""
        return []

    def quarantined(self) -> Mapping[int, str]:
        """The nodes that are asked nothing any more, and why; workers of a simulation never are."""
        return {}

    def check_report(self, device: int, report: DeviceReport) -> None:
        """Raise MessageError where the report of an update cannot be of the node that carries the device.

        What a population has to do about single nodes it does here and in the next three: workers of a simulation are
        our own.
        """

    def refused(self, node: int, why: str, *, lied: bool = False) -> None:
        """The server has refused a reply of a node."""

    def accepted(self, node: int) -> None:
        """A reply of a node was good."""

    def release(self, nodes: Iterable[int]) -> None:
        """Ask nodes again that were quarantined."""

    def memory_factor(self, device: int) -> float:
        """The share of its memory budget that a device gets; below 1 after work of its outgrew its memory."""
        return self._factors.get(device, 1.0)

    def overran(self, device: int, predicted: float) -> None:
        """Lower a device's budget after an overrun, to less than what overran.

        Args:
            predicted: memory that was predicted for that work, as a share of the budget that it was given.
        """
        self._factors[device] = self.memory_factor(device) * min(OVERRUN_FACTOR, 0.9 * predicted)

    def recover(self) -> None:
        """Give every lowered budget a little back: a round has passed."""
        raised = {device: factor * RECOVERY for device, factor in self._factors.items()}
        self._factors = {device: factor for device, factor in raised.items() if factor < 1}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON: the lowered budgets."""
        return {"memory_factors": {str(device): factor for device, factor in sorted(self._factors.items())}}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._factors = {int(device): float(factor) for device, factor in values["memory_factors"].items()}


class NoNodesError(RuntimeError):
    """No node is connected, and none has come in the time that they have; the text says so to the user."""


def wait_for_nodes(grid: Grid, wanted: int, wait_seconds: float, minimum: int = 1) -> list[int]:
    """Return the connected nodes, as soon as they are enough or the time is over; NoNodesError if they are too few."""
    end = time.monotonic() + wait_seconds
    nodes = sorted(grid.get_node_ids())
    told = -1
    while len(nodes) < wanted and time.monotonic() < end:
        if len(nodes) != told:
            told = len(nodes)
            until = f"{datetime.now() + timedelta(seconds=end - time.monotonic()):%H:%M:%S}"
            # The runner shows it too.
            enough = "fewer" if minimum == 1 else f"{minimum} or more"
            log.info("Waiting for nodes: %s connected so far, %s wanted, %s from %s on", told, wanted, enough, until)
        time.sleep(0.1)
        nodes = sorted(grid.get_node_ids())
    if nodes and len(nodes) < minimum:
        raise NoNodesError(
            f"{len(nodes)} nodes have connected within {wait_seconds:g} s, and minimum-devices = {minimum}: start more "
            "nodes, or set it lower; `resume = true` goes on after the last round"
        )
    if not nodes:
        raise NoNodesError(
            f"no node has connected within {wait_seconds:g} s: start nodes that reach this SuperLink, and look at the "
            "logs of those that are started (a simulation starts its own: look at the SuperLink's log)"
        )
    return nodes
