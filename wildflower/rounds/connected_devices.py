"""The devices that connected nodes carry, one each."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from typing_extensions import override

from wildflower.devices.resource_report import DeviceReport
from wildflower.devices.validation import one_line
from wildflower.messages.error import MessageError
from wildflower.messages.orders import NodeReport
from wildflower.messages.wire import NODE_REPORT_LIMITS, from_records
from wildflower.plugins.flower_log import log
from wildflower.rounds.exchange import Failure, exchange, pull
from wildflower.rounds.population import Holdings, NodeState, Population, wait_for_nodes
from wildflower.rounds.quarantine import Quarantine


@dataclass
class _Seen:
    instance: str
    age_seconds: float  # of the node's process, when it reported
    at: float  # time.monotonic() of that report


class Instances:
    """The instance of every node that is listened to.

    A node that was started anew says another instance, which is younger than the last report of the one before. One
    that is older was there at the same time: then two boards have the key, and the one that started later is refused.
    """

    def __init__(self) -> None:
        self._current: dict[int, _Seen] = {}
        self._refused: dict[int, str] = {}  # node -> the instance of its second board

    def check(self, node: int, report: DeviceReport) -> None:
        """Take note of a report. Raises MessageError where it is of a second board with the node's key."""
        if report.instance is None or report.instance_age_seconds is None:
            return  # the node was not started by wildflower-node
        now = time.monotonic()
        seen = _Seen(report.instance, report.instance_age_seconds, now)
        last = self._current.setdefault(node, seen)
        if last.instance != seen.instance and seen.age_seconds >= now - last.at:
            last_age_seconds = last.age_seconds + now - last.at
            newer = seen if seen.age_seconds <= last_age_seconds else last
            if self._refused.get(node) != newer.instance:
                text = (
                    "Two boards answer with the key of node %s: the one that started later, %.0f s ago, is refused. "
                    "Give it a key of its own (deploy/certs --add-node), and revoke this one if you did not copy it"
                )
                log.warning(text, node, min(seen.age_seconds, last_age_seconds))
            self._refused[node] = newer.instance
        if self._refused.get(node) == seen.instance:
            raise MessageError("a second board answered with this node's key")
        self._current[node] = seen


WAIT_SECONDS = 600.0  # that the nodes of a round have to connect
LEAST_REST_SECONDS, LONGEST_REST_SECONDS = 60.0, 6 * 3600.0  # that a device which takes no part now is not asked
REST_POLL_SECONDS = 5.0
ASKED_BEFORE = 100  # nodes that are asked before the first round what their devices can spend


def rest_seconds(told: float) -> float:
    """Return how long a device is not asked that takes no part for as long as it has told."""
    return min(max(told, LEAST_REST_SECONDS), LONGEST_REST_SECONDS)


@dataclass
class _Known:
    node: int
    report: DeviceReport
    seen: float  # time.monotonic() of the report, or long ago where it is not to be trusted
    reported: float  # time.monotonic() of the report


class ConnectedDevices(Population):
    """One device per connected node; each says by QUERY which device it is and what it can spend.

    Only nodes that are drawn are asked, and as many more as did not answer or get no work. A node is asked again when
    its report is older than `report_max_age_seconds`, when it failed, when its device could afford nothing, or when it
    was left working at a deadline; a node that does not answer is busy or gone, and is left out of the round. Nobody
    waits for a busy node while others are free: its answer is looked for when devices are next
    sampled. Where all are busy, the next round begins when the first of them answers.

    A device belongs to the node that first said that it carries it. Another node that says so is refused as long as
    either that one or the one that carries the device now is connected: without node keys a restarted node has another
    id, with them nobody takes a device from a node that is there. A node carries one device at a time: one that says
    another number, because its config was mended, gives up the number before.
    """

    poll_seconds = 0.2
    simulated = False

    def __init__(
        self,
        holdings: Holdings,
        *,
        wanted: int,
        minimum: int = 1,
        report_max_age_seconds: float,
        query_seconds: float = 120.0,  # a first one starts the device's worker: 46 s were seen on busy machines
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        super().__init__(holdings)
        self.now_seconds = 0.0
        self._wanted, self._minimum, self._max_age, self._query_seconds, self._wait = (
            wanted,
            minimum,
            report_max_age_seconds,
            query_seconds,
            wait_seconds,
        )
        self._known: dict[int, _Known] = {}  # device -> what can be sampled now
        self._said: dict[int, _Known] = {}  # device -> what was last said, also by who is busy or gone
        self._owners: dict[int, tuple[int, int]] = {}  # device -> the first node that carried it, and the last
        self._kinds: dict[int, str] = {}  # device -> its tier: what it said first, or every report could make a new one
        self._quarantine, self._instances = Quarantine(), Instances()
        self._rests: dict[int, float] = {}  # node -> time.monotonic() until which its device takes no part
        self._told_rests: dict[int, str | None] = {}  # device -> why, as the log last said
        self._asked: dict[int, str] = {}  # busy node -> the query that it has not answered yet

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: also to whom devices belong."""
        owners = {str(device): list(nodes) for device, nodes in sorted(self._owners.items())}
        return {**super().state_dict(), **self._quarantine.state_dict(), "owners": owners}

    @override
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        super().load_state_dict(values)
        self._quarantine.load_state_dict(values)
        self._owners = {int(device): (first, last) for device, (first, last) in values["owners"].items()}

    @override
    def sample(
        self, grid: Grid, rng: np.random.Generator, count: int, working: Callable[[list[int]], int] = len
    ) -> list[int]:
        """A uniform sample of the devices whose nodes answer. NoNodesError where no node is connected for long.

        Devices that get no work are in it beside the others, so that the round's records name them.
        """
        while True:
            found = self._drawn(grid, rng, count, working)
            if found or not self._wait_for_rested(grid):
                return found

    def _drawn(
        self, grid: Grid, rng: np.random.Generator, count: int, working: Callable[[list[int]], int]
    ) -> list[int]:
        left = self._nodes_at_hand(grid)
        drawn = [left[place] for place in rng.choice(len(left), size=len(left), replace=False)] if left else []
        found, missing = list[int](), count
        while drawn and missing > 0:
            asked, drawn = drawn[:missing], drawn[missing:]
            self._query(grid, sorted(set(asked) - {known.node for known in self._known.values()}))
            carried = {known.node: device for device, known in self._known.items()}
            there = [carried[node] for node in asked if node in carried]
            found += there
            missing -= working(there)
        if not found:
            self._wait_for_the_first(grid)
            found = sorted(self._known)[:count]
        return found

    @override
    def everyone(self, grid: Grid) -> list[int]:
        """The devices whose nodes answer. NoNodesError where no node is connected for long."""
        while True:
            nodes = set(self._nodes_at_hand(grid))
            self._query(grid, sorted(nodes - {known.node for known in self._known.values()}))
            self._wait_for_the_first(grid)
            if self._known or not self._wait_for_rested(grid):
                return sorted(self._known)

    def _nodes_at_hand(self, grid: Grid) -> list[int]:
        """The nodes that are connected and neither busy nor at rest, by the devices that they have said they carry.

        What is not fresh is forgotten: a node that does not answer now with a good report is left out.
        """
        wanted = self._minimum if self._said else self._wanted
        connected = wait_for_nodes(grid, wanted, self._wait, self._minimum)
        if len(connected) < wanted:
            text = "%s nodes connected within %g s, the run asks for %s devices per round: going on with those"
            log.warning(text, len(connected), self._wait, wanted)
        self.names = getattr(grid, "names", {})
        online, now = set(grid.get_node_ids()) - self._quarantine.held.keys(), time.monotonic()
        if not online:
            log.warning("All %s connected nodes are quarantined", len(connected))
        self._look_after_busy(grid, online)
        self._rests = {node: end for node, end in self._rests.items() if now < end}
        at_hand = online - self.busy - self.at_work - self._rests.keys()
        self._known = {
            device: known
            for device, known in self._known.items()
            if known.node in at_hand and now - known.seen <= self._max_age
        }
        carried = {said.node: device for device, said in self._said.items()}
        return sorted(at_hand, key=lambda node: (node not in carried, carried.get(node, node)))

    def _wait_for_rested(self, grid: Grid) -> bool:
        """Where only nodes whose devices rest are left, wait for the first of them or another; False where none is."""
        online = set(grid.get_node_ids())
        ends = [end for node, end in self._rests.items() if node in online]
        if not ends or self.at_work:
            return False
        until = f"{datetime.now() + timedelta(seconds=min(ends) - time.monotonic()):%d %b %H:%M}"
        log.info("All devices that could be asked rest, until %s at the earliest: the round waits", until)
        while (left := min(ends) - time.monotonic()) > 0 and set(grid.get_node_ids()) == online:
            time.sleep(min(REST_POLL_SECONDS, left))
        return True

    def _rest(self, node: int, device: int, report: DeviceReport) -> None:
        """Ask a device whose owner lets it take no part now only when that may have changed."""
        if node not in self._rests and report.resting != self._told_rests.get(device):
            log.info("Device %s takes no part now: %s", device, report.resting)
        self._told_rests[device] = report.resting
        self._rests[node] = time.monotonic() + rest_seconds(report.resting_seconds or 0.0)

    def _wait_for_the_first(self, grid: Grid) -> None:
        """Where every node is still busy with an earlier round, wait until one answers."""
        end = time.monotonic() + self._wait
        if not self._known and self.busy:
            log.info("All %s nodes are busy with an earlier round: waiting for the first", len(self.busy))
        while not self._known and self.busy and time.monotonic() < end:
            time.sleep(self.poll_seconds)
            self._look_after_busy(grid, set(grid.get_node_ids()) - self._quarantine.held.keys())

    @override
    def present(self, grid: Grid) -> list[int]:
        """The devices whose nodes are connected and have said what they can spend; where none has, some are asked."""
        if not self._said:
            nodes = self._nodes_at_hand(grid)
            self._query(grid, nodes[:: math.ceil(len(nodes) / ASKED_BEFORE) or 1])
        online = set(grid.get_node_ids()) - self._quarantine.held.keys()
        return sorted(device for device, said in self._said.items() if said.node in online)

    @override
    def report(self, device: int) -> DeviceReport:
        return (self._known.get(device) or self._said[device]).report

    @override
    def newest_reports(self) -> list[NodeState]:
        """Return what every node said last, by device, also that of nodes which are busy or gone."""
        now = time.monotonic()
        return [
            NodeState(
                k.node, device, k.report, now - k.reported, self.memory_factor(device), self.names.get(k.node, "")
            )
            for device, k in sorted(self._said.items())
        ]

    def remember(self, states: Sequence[NodeState]) -> None:
        """Take what nodes said in an earlier run as what they said last, to plan with it without asking them."""
        now = time.monotonic()
        for state in states:
            self.holdings.training(state.device)  # IndexError where the run has no such device
            self._known[state.device] = self._said[state.device] = _Known(
                state.node, state.report, now, now - state.age_seconds
            )
            self._kinds[state.device] = state.report.kind
            self._factors[state.device] = state.memory_factor

    def known_devices(self) -> list[int]:
        """The devices whose reports are known."""
        return sorted(self._known)

    @override
    def tier(self, device: int) -> str:
        """The device's kind, as it first said it."""
        return self._kinds[device]

    @override
    def nodes(self, grid: Grid, devices: Sequence[int], work: Sequence[float]) -> list[int]:
        return [self._known[device].node for device in devices]

    @override
    def connected(self, grid: Grid, devices: Sequence[int]) -> list[int]:
        """Those whose node is known and online, not left working at a deadline, and whose owner lets it take part."""
        now = time.monotonic()
        resting = {node for node, end in self._rests.items() if now < end}
        online = set(grid.get_node_ids()) - self.busy - self.at_work - self._quarantine.held.keys() - resting
        return [device for device in devices if device in self._known and self._known[device].node in online]

    @override
    def absences(self) -> list[str]:
        reports = {device: said.report for device, said in sorted(self._said.items())}
        return [f"Device {device} takes no part now: {r.resting}." for device, r in reports.items() if r.resting]

    @override
    def advance(self, simulated_seconds: float, wall_seconds: float) -> list[int]:
        """Add the round's time on the wall. A node that is gone may come back, so that nobody has left for good."""
        self.now_seconds += wall_seconds
        self.recover()
        return []

    @override
    def answer_seconds(self, deadline_seconds: float | None) -> float | None:
        return deadline_seconds

    @override
    def timing(self, device: int, *, bytes_down: int, flops: float, bytes_up: int) -> None:
        return None

    @override
    def quarantined(self) -> Mapping[int, str]:
        return self._quarantine.held

    @override
    def check_report(self, device: int, report: DeviceReport) -> None:
        """MessageError where a second board with the node's key sent it, or the node carries another device now."""
        if device not in self._said:
            raise MessageError("its node has said since that it carries another device")
        self._instances.check(self._said[device].node, report)

    @override
    def refused(self, node: int, why: str, *, lied: bool = False) -> None:
        """Count it: a node whose replies are refused again and again is quarantined."""
        self._quarantine.refused(node, why, lied=lied)

    @override
    def accepted(self, node: int) -> None:
        self._quarantine.accepted(node)

    @override
    def release(self, nodes: Iterable[int]) -> None:
        self._quarantine.release(nodes)

    @override
    def replied(self, device: int, report: DeviceReport) -> None:
        known = self._known[device] = self._said[device]  # who was at work for more than a round is known again
        known.report, known.seen = report, time.monotonic()
        known.reported = known.seen
        if report.resting is not None:
            self._rest(known.node, device, report)

    @override
    def ask_again(self, device: int) -> None:
        """Its report counts as old."""
        if device in self._known:
            self._known[device].seen = float("-inf")

    def _look_after_busy(self, grid: Grid, online: set[int]) -> None:
        """Ask busy nodes that nobody has asked yet, and read what has been answered since, without waiting."""
        self._asked = {node: message for node, message in self._asked.items() if node in online}
        for node in sorted((self.busy & online) - set(self._asked)):
            query = Message(RecordDict(), node, MessageType.QUERY, ttl=self._wait)  # else 12 hours
            for message in grid.push_messages([query]):
                self._asked[node] = message
        nodes = {message: node for node, message in self._asked.items()}
        for message, reply in pull(grid, nodes):
            del self._asked[nodes[message]]
            self._learn(grid, nodes[message], reply)

    def _query(self, grid: Grid, nodes: list[int]) -> None:
        """Ask nodes for their reports, and wait for the answers."""

        def make(node: int, batch: int) -> Message:
            return Message(RecordDict(), node, MessageType.QUERY, ttl=self._query_seconds)

        queues = {node: deque([node]) for node in nodes}
        replies = exchange(
            grid, queues, make, deadline_seconds=self._query_seconds, busy=self.busy, poll_seconds=self.poll_seconds
        )
        for node, reply in replies:
            self._learn(grid, node, reply)

    def _learn(self, grid: Grid, node: int, reply: Message | Failure) -> None:
        """Take in a node's answer to a query; whatever is wrong with it is logged, and the node is left out."""
        if isinstance(reply, Failure):
            log.warning("Node %s did not report: %s", node, reply.why)
            return
        try:
            answer, _ = from_records(NodeReport, reply.content, NODE_REPORT_LIMITS)
            report = DeviceReport.from_json(answer.report)
            self.holdings.training(answer.device)  # IndexError where the run has no such device
            self._instances.check(node, report)
        except (ValueError, IndexError) as error:  # MessageError is a ValueError
            log.warning("Node %s sent a report that is refused: %s", node, one_line(str(error)))
            self.refused(node, str(error))
            return
        self._give_up_others(node, answer.device)
        first, last = self._owners.get(answer.device, (node, node))
        there = {first, last} & set(grid.get_node_ids())
        if node != first and there - {node}:
            text = "Nodes %s and %s both say they carry device %s: the second is refused"
            log.warning(text, min(there - {node}), node, answer.device)
            return
        self._owners[answer.device] = (first, node)
        self._kinds.setdefault(answer.device, report.kind)
        self.busy.discard(node)
        now = time.monotonic()
        self._known[answer.device] = self._said[answer.device] = _Known(node, report, now, now)
        if report.resting is not None:
            self._rest(node, answer.device, report)
            del self._known[answer.device]

    def _give_up_others(self, node: int, device: int) -> None:
        """Whoever says that it carries a device no longer carries another."""
        for other, nodes in list(self._owners.items()):
            if other == device or node not in nodes:
                continue
            log.warning("Node %s says it carries device %s, and no longer device %s", node, device, other)
            left = [owner for owner in nodes if owner != node]
            if left:
                self._owners[other] = (left[0], left[0])
            else:
                del self._owners[other]
                self._kinds.pop(other, None)  # none in a resumed run that has not heard of it
            for table in (self._known, self._said):
                if other in table and table[other].node == node:
                    del table[other]
