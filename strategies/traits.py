"""The traits of a method: what a run may ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """The uses that a method is fit for, with some settings of its own. What it does not say, it is not.

    Attributes:
        averages: all that devices return goes into a `Method.running_mean`, and nothing relies on its being the mean:
            the run's `aggregation` may be another one, and with `buffer` there may be changes of earlier models.
        tells_more: a round tells more of a device than its share of means that are each of other coordinates, such as
            who trained, or how many own a coordinate: noise on the means does not make it differentially private.
        depends_on_rounds: what is done in a round depends on how many the run has (`settings.rounds`). It is not
            resumed for more rounds: those that are done would have been others.
        personal: a device uses a model of its own (`Method.personal`), and none of those that the server has.
        takes_initial_weights: the global model begins with `Setup.initial`, as by
            `wildflower.strategies.submodel.first_weights`.
        helps_below_smallest: devices below the smallest architecture train where `below-smallest` is "smallest".
        takes_tokens: where it needs classes, each token of an example may have one.
        public_when: the values that its settings have where it learns from `Setup.public`, by their fields' names: {}
            where it always does, None where it never does. A run whose public data nothing would read is refused.
        one_model: why no device can train a second model beside its own (`both-models`), and what to do; "" where one
            can.
    """

    averages: bool = False
    tells_more: bool = False
    depends_on_rounds: bool = False
    personal: bool = False
    takes_initial_weights: bool = False
    helps_below_smallest: bool = True
    takes_tokens: bool = False
    public_when: Mapping[str, Any] | None = None
    one_model: str = ""

    @property
    def tells_means_only(self) -> bool:
        """Return whether noise on what is averaged makes the method differentially private."""
        return self.averages and not self.tells_more
