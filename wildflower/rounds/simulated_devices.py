"""The simulated devices of a fleet, carried by worker nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from typing_extensions import override

from wildflower.devices.clock import Timing, VirtualClock
from wildflower.devices.fleet import Fleet
from wildflower.devices.resource_report import DeviceReport
from wildflower.plugins.flower_log import log
from wildflower.rounds.population import Holdings, Population, wait_for_nodes

ELSEWHERE_SECONDS = 3600.0
"""The longest wait for an answer from a node on another machine, because a node may lose a message."""


class SimulatedDevices(Population):
    """The devices of a fleet file on a fixed number of worker nodes.

    Workers that are `elsewhere` are nodes of a deployment, maybe on several machines. A device's state stays on the
    machine that made it, so every device has its own node, as long as that is connected.

    Where the file replaces devices, those that are present change after every round. Which they are follows from seed
    and round alone, and what is held of them is one number each, however many have come and gone.
    """

    poll_seconds = 0.02
    simulated = True

    def __init__(
        self, fleet: Fleet, workers: int, holdings: Holdings, *, wait_seconds: float = 120.0, elsewhere: bool = False
    ) -> None:
        super().__init__(holdings)
        self._elsewhere = elsewhere
        self.fleet, self.clock = fleet, VirtualClock()
        self.fleet_digest, self.most_bytes = fleet.digest, fleet.most_bytes
        self._workers, self._wait_seconds = workers, wait_seconds
        self._nodes: list[int] = []
        self._chosen: list[int] = []  # the nodes that the run began with
        self._exchanges = 0
        self._present = np.arange(fleet.size if fleet.replaced else 0)

    @property
    def now_seconds(self) -> float:
        """The virtual clock."""
        return self.clock.now_seconds

    @now_seconds.setter
    def now_seconds(self, seconds: float) -> None:
        self.clock.now_seconds = seconds

    @override
    def advance(self, simulated_seconds: float, wall_seconds: float) -> list[int]:
        """Move the virtual clock, and the traces with it; devices leave, and new ones come. -> those that left."""
        self.clock.advance(simulated_seconds)
        if not self.fleet.replaced:
            return []
        left = self._exchange_devices()
        for device in left:
            self._factors.pop(device, None)
        return left

    def _exchange_devices(self) -> list[int]:
        places, numbers = self.fleet.newcomers(self._exchanges)
        left = [int(device) for device in self._present[places]]
        self._present[places] = numbers
        self._exchanges += 1
        return left

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"exchanges": self._exchanges} if self.fleet.replaced else {})

    @override
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore `state_dict`: who is present follows from how often devices were replaced."""
        super().load_state_dict(values)
        self._exchanges, self._present = 0, np.arange(len(self._present))
        for _ in range(values.get("exchanges", 0)):
            self._exchange_devices()

    @override
    def sample(
        self, grid: Grid, rng: np.random.Generator, count: int, working: Callable[[list[int]], int] = len
    ) -> list[int]:
        """A uniform sample without replacement; its cost does not depend on the size of the fleet."""
        if self.fleet.hours:
            # Simulated time passes until the hours of some devices begin.
            if seconds := self.fleet.seconds_until_hours(self.now_seconds):
                hours = self.now_seconds / 3600
                log.info("No device takes part at simulated hour %.2f: the next do %s s later", hours, round(seconds))
                self.clock.advance(seconds)
            there = self.everyone(grid)
            return [int(d) for d in rng.choice(there, size=min(count, len(there)), replace=False)]
        places = rng.choice(self.fleet.size, size=min(count, self.fleet.size), replace=False, shuffle=True)
        return [int(i) for i in (self._present[places] if self.fleet.replaced else places)]

    @override
    def everyone(self, grid: Grid) -> list[int]:
        """All that are present, and within their hours."""
        there = self.present(grid)
        return [d for d in there if self.fleet.is_there(d, self.now_seconds)] if self.fleet.hours else there

    @override
    def absences(self) -> list[str]:
        return [f"Devices of tier {tier} take part at {hours} only." for tier, hours in self.fleet.hours.items()]

    @override
    def present(self, grid: Grid) -> list[int]:
        return sorted(map(int, self._present)) if self.fleet.replaced else list(range(self.fleet.size))

    @override
    def report(self, device: int) -> DeviceReport:
        """Return what the fleet file says of the device at this simulated second."""
        return self.fleet.report(device, self.clock.now_seconds)

    @override
    def tier(self, device: int) -> str:
        return self.fleet.tier(device)

    @override
    def nodes(self, grid: Grid, devices: Sequence[int], work: Sequence[float]) -> list[int]:
        """Longest work first onto the least loaded worker; where workers are elsewhere, each device's own one."""
        if self._elsewhere:
            self._nodes = self._still_there(grid) if self._nodes else self._wait_for_workers(grid)
            return [own_node(device, self._nodes) for device in devices]
        if not self._nodes:
            self._nodes = self._wait_for_workers(grid)
        load = dict.fromkeys(self._nodes, 0.0)
        result = [0] * len(devices)
        for i in sorted(range(len(devices)), key=lambda i: -work[i]):
            node = min(load, key=lambda n: load[n])
            load[node] += work[i]
            result[i] = node
        return result

    @override
    def connected(self, grid: Grid, devices: Sequence[int]) -> list[int]:
        """All that are present: any worker carries any device."""
        present = set(map(int, self._present))
        return [device for device in devices if not self.fleet.replaced or device in present]

    @override
    def answer_seconds(self, deadline_seconds: float | None) -> float | None:
        """None, because the deadline is in simulated time; an hour for nodes elsewhere, which may lose a message."""
        return ELSEWHERE_SECONDS if self._elsewhere else None

    @override
    def timing(self, device: int, *, bytes_down: int, flops: float, bytes_up: int) -> Timing:
        """Download, training and upload under the device's links and speed, from now on."""
        return self.clock.timing(self.fleet, device, bytes_down=bytes_down, flops=flops, bytes_up=bytes_up)

    def _still_there(self, grid: Grid) -> list[int]:
        """The nodes of before that are connected; others take the places of those that are not, and of no other."""
        connected = wait_for_nodes(grid, 1, self._wait_seconds)
        there = [node for node in self._chosen if node in connected]
        spare = [node for node in connected if node not in self._chosen]
        gone = len(self._chosen) - len(there)
        found = there + spare[:gone]
        if not set(self._nodes) <= set(found):
            log.warning("%s of the run's %s nodes are gone: others carry their devices", gone, len(self._chosen))
        return found

    def _wait_for_workers(self, grid: Grid) -> list[int]:
        # The ServerApp starts before the simulation engine has registered its nodes.
        nodes = wait_for_nodes(grid, self._workers, self._wait_seconds)
        if len(nodes) < self._workers:
            log.warning(
                "The run asks for workers = %s, Flower offers %s nodes: going on with those", self._workers, len(nodes)
            )
        self._chosen = nodes[: self._workers]
        return self._chosen


def own_node(device: int, nodes: Sequence[int]) -> int:
    """The node of a device, the same as long as it is connected; where it is gone, no other device changes its own.

    Source: rendezvous hashing (Thaler and Ravishankar 1998).
    """
    return max(nodes, key=lambda node: hashlib.sha256(f"{device}/{node}".encode()).digest())
