"""Nodes that are not asked any more: those whose replies were refused again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from wildflower.devices.validation import one_line
from wildflower.plugins.flower_log import log

MAX_REFUSALS = 3  # in a row, after which a node is quarantined


class Quarantine:
    """Counts refused replies by node, and holds those that sent too many, each with the reason of the last one."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self._refusals: Counter[int] = Counter()
        self._lies: Counter[int] = Counter()  # of these refusals those that no good reply makes up for

    def refused(self, node: int, why: str, *, lied: bool = False) -> None:
        """The server has refused a reply of a node; one more of them may be one too many.

        lied: it has provably broken a protocol, at the cost of others. Else whoever lies in two rounds of three would
        never be quarantined.
        """
        self._refusals[node] += 1
        self._lies[node] += lied
        if self._refusals[node] < MAX_REFUSALS or node in self.held:
            return
        self.held[node] = one_line(why)
        text = (
            "Node %s is quarantined and asked nothing any more: %s replies of it were refused, the last one because: "
            "%s. `wildflower fleet RUN_DIR --release %s` releases it"
        )
        log.warning(text, node, self._refusals[node], self.held[node], node)

    def accepted(self, node: int) -> None:
        """A reply of a node was good."""
        self._refusals[node] = self._lies[node]

    def release(self, nodes: Iterable[int]) -> None:
        """Ask these again, and forget what they sent before."""
        for node in nodes:
            del self._refusals[node], self._lies[node]
            if self.held.pop(node, None) is not None:
                log.info("Node %s is released from quarantine", node)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        refusals, lies = (
            {str(node): count for node, count in sorted(counts.items()) if count}
            for counts in (self._refusals, self._lies)
        )
        held = {str(node): why for node, why in sorted(self.held.items())}
        return {"quarantine": held, "refusals": refusals, "lies": lies}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.held = {int(node): str(why) for node, why in values["quarantine"].items()}
        self._refusals, self._lies = (
            Counter({int(node): int(count) for node, count in values[name].items()}) for name in ("refusals", "lies")
        )
