"""A method's answers about models that stay on devices. One that leaves none there overrides none of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wildflower.models.architecture import Architecture
from wildflower.strategies.client_step import ClientStep
from wildflower.strategies.contract_values import Selection


class OnDevices:
    """Questions to devices before they train, what they hold, and what becomes of it.

    first_question: what a device is asked before it trains for the first time; its facts go to `introduce`. Who gives
        no answer does not train in that round, and is asked again.
    """

    first_question: ClientStep | None = None

    def introduce(self, device: int, facts: Mapping[str, Sequence[float]]) -> None:
        """Take in a device's answer to `first_question`."""

    def lost(self, device: int) -> None:
        """Take note that what a device kept is gone; it began anew."""

    def left(self, device: int) -> None:
        """Drop what is held of a device that has left the fleet for good, also where nothing is."""

    def has_model(self, device: int) -> bool:
        """Return whether a device has a model that it could use now; by default whoever would be assigned one has.

        A method that leaves models on devices says here who has not trained one yet.
        """
        return True

    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]] | None:
        """The devices that score a model of their own on the task's test set; None: models are scored on the server.

        Where `models` has the global model all the same, that one's score is the round's, and those of devices are the
        tiers'.
        """
        return None
