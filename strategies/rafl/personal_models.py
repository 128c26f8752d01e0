"""Which personal models RaFL's devices keep, and whose budgets have come to ask for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wildflower.models.architecture import Architecture
from wildflower.strategies.method import Trained


class PersonalModels:
    """What the server knows of the models that live on devices.

    Attributes:
        kept: of every device those that it keeps, largest first.
        lost: how many devices have lost theirs.
        changes: by device, whether its budget asks for "more" or for "less" than its personal model, and in how many
            contacts in a row it has done so. Devices whose budget asks for neither are not in it.
        asked: by device, the round in which it was last asked, and what its budget asked for: "more", "less" or
            nothing, "".
    """

    def __init__(self, parameters: Callable[[Architecture], int], search_after: int) -> None:
        self._parameters, self._search_after = parameters, search_after
        self.kept: dict[int, list[Architecture]] = {}
        self.lost = 0
        self.changes: dict[int, tuple[str, int]] = {}
        self.asked: dict[int, tuple[int, str]] = {}

    def of(self, device: int) -> list[Architecture]:
        """Return the models that a device keeps, largest first."""
        return self.kept.get(device, [])

    def note(self, trained: Sequence[Trained]) -> int:
        """Note who has trained which model; return how many devices had lost theirs."""
        lost = 0
        for done in trained:
            if not done.facts["personal"][0]:
                lost += 1
                self.drop(done.device)
                continue
            kept = self.kept.setdefault(done.device, [])
            if done.order.architecture not in kept:
                kept.append(done.order.architecture)
                kept.sort(key=lambda architecture: -self._parameters(architecture))
        self.lost += lost
        return lost

    def drop(self, device: int) -> None:
        """Forget a device, with which its models are gone."""
        self.kept.pop(device, None)
        self.changes.pop(device, None)

    def for_good(self, device: int, change: str) -> bool:
        """Return whether a change has lasted for enough contacts, this one included."""
        before, count = self.changes.get(device, ("", 0))
        return (count if before == change else 0) + 1 >= self._search_after

    def count_contacts(self, round_number: int) -> None:
        """Count the contacts whose budgets asked for another model, also of devices that sit the round out."""
        for device, (asked, change) in self.asked.items():
            if asked != round_number:
                continue  # asked by an evaluation, which is no contact
            before, count = self.changes.pop(device, ("", 0))
            if change:
                self.changes[device] = change, 1 + (count if before == change else 0)
        self.asked.clear()

    def state(self) -> dict[str, Any]:
        """Return all that outlasts a round, as JSON holds it."""
        return {
            "personal_models": [[d, [a.to_json() for a in kept]] for d, kept in sorted(self.kept.items())],
            "lost_models": self.lost,
            "changes": [[device, *change] for device, change in sorted(self.changes.items())],
        }

    def load(self, values: dict[str, Any]) -> None:
        """Restore `state`."""
        self.kept = {d: [Architecture.from_json(a) for a in kept] for d, kept in values["personal_models"]}
        self.lost = values["lost_models"]
        self.changes = {device: (change, count) for device, change, count in values["changes"]}
