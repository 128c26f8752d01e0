"""Two boards with one key: told by the instance that every node draws when it starts, and says in every report."""

from __future__ import annotations

import time
from dataclasses import dataclass

from wildflower.devices.resource_report import DeviceReport
from wildflower.messages.error import MessageError
from wildflower.plugins.flower_log import log


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
