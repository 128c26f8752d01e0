"""What a device of RaFL has and does: a personal model and the knowledge network, and what both cost together."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost, cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.space import Space
from wildflower.strategies.pricing import in_floats, tensor_set_bytes
from wildflower.strategies.rafl.knowledge_network import KnowledgeNetwork
from wildflower.strategies.rafl.mutual_learning import MutualLearning
from wildflower.strategies.rafl.rafl_params import RaFLParams
from wildflower.strategies.run_settings import RoundSettings


class TwoNetworks:
    """The work and the prices of a device with both networks.

    given: personal models lie in trained weights, and need batch norm statistics of their own at first.
    """

    def __init__(
        self,
        family: Family,
        space: Space | ElasticSpace,
        knowledge: KnowledgeNetwork,
        params: RaFLParams,
        settings: RoundSettings,
        *,
        given: bool,
    ) -> None:
        self.family, self.space, self.knowledge = family, space, knowledge
        self.params, self.settings, self.given = params, settings, given

    def client_step(self, *, first: bool) -> MutualLearning:
        """Mutual learning; first: the device has no such personal model yet."""
        return MutualLearning(
            knowledge_family=self.knowledge.own_family_json,
            knowledge=self.knowledge.architecture_json,
            first=first,
            drawn=self.params.first == "drawn",
            calibrates=first and self.given,
            calibrates_knowledge=self.knowledge.cut,
            merged=self.params.fusion == "average",
        )

    def personal_cost(self, architecture: Architecture) -> Cost:
        """What training a personal model by itself costs."""
        return self._plain(self.family, architecture)

    @property
    def knowledge_cost(self) -> Cost:
        """What training the knowledge network by itself costs."""
        return self._plain(self.knowledge.family, self.knowledge.architecture)

    def _plain(self, family: Family, architecture: Architecture) -> Cost:
        training = self.settings.training
        return cost(family, architecture, batch_size=training.examples_at_once, optimizer=self.settings.optimizer)

    def training_cost(self, architecture: Architecture) -> Cost:
        """Both networks in one step: the sum of what training each by itself takes."""
        personal, knowledge = self.personal_cost(architecture), self.knowledge_cost
        return replace(
            personal,
            peak_training_memory_bytes=personal.peak_training_memory_bytes + knowledge.peak_training_memory_bytes,
            training_flops=personal.training_flops + knowledge.training_flops,
        )

    def price(self, architecture: Architecture, *, first: bool) -> Cost:
        """What an order costs; at a first contact the personal model travels too, unless the device draws it."""
        step = self.client_step(first=first)
        down, up = tensor_set_bytes(step, self.family, architecture, self.settings.wire)
        personal, knowledge = self._passes(first=first)
        flops = int(self.personal_cost(architecture).training_flops * personal)
        flops += int(self.knowledge_cost.training_flops * knowledge)
        return replace(self.training_cost(architecture), download_bytes=down, upload_bytes=up, training_flops=flops)

    def _passes(self, *, first: bool) -> tuple[Fraction, Fraction]:
        """What the personal model and the knowledge network compute in a round, by what training them takes.

        A pass that calibrates is a forward one, a third of training. It sees every example of the device once. Under
        local steps, where nobody says here how many a device has, it counts as if the steps saw as many.
        """
        training = self.settings.training
        calibration = Fraction(1, 3 * (1 if training.steps else training.epochs))
        return 1 + (first and self.given) * calibration, 1 + self.knowledge.cut * calibration

    def left_for_personal(self, budget: Budget) -> Budget | None:
        """What the knowledge network leaves of a budget, with payloads as 32-bit floats; None: nothing."""
        step, passes = self.client_step(first=True), self._passes(first=True)
        ends = (self.space.smallest(), self.space.largest())
        budget = in_floats(budget, step, self.family, ends, self.settings)
        knowledge = self.knowledge_cost
        memory_bytes = budget.memory_bytes - knowledge.peak_training_memory_bytes
        if memory_bytes <= 0 or not budget.can_travel(knowledge.download_bytes, knowledge.upload_bytes):
            return None
        seconds = budget.round_seconds
        if seconds is not None:
            flops = float(knowledge.training_flops * passes[1])
            seconds -= budget.seconds(knowledge.download_bytes, knowledge.upload_bytes, flops)
            if seconds <= 0:
                return None
        # A personal model travels to its device and never back, and one that the device draws does not travel at all.
        left = replace(budget, memory_bytes=memory_bytes, upload_bytes=None, round_seconds=seconds)
        left = replace(left, seconds_per_byte_up=0.0, seconds_per_flop=float(left.seconds_per_flop * passes[0]))
        if self.params.first == "drawn":
            left = replace(left, download_bytes=None, seconds_per_byte_down=0.0)
        elif left.download_bytes is not None:
            left = replace(left, download_bytes=left.download_bytes - knowledge.download_bytes)
        return left

    def check_size(self) -> None:
        """Raise ValueError where the knowledge network is larger than a personal model that devices may get."""
        smallest = self.personal_cost(self.space.smallest()).parameters
        knowledge = self.knowledge_cost.parameters
        if knowledge <= smallest:
            return
        if self.knowledge.own_family is None:
            lower = "lower rafl.knowledge-width"
        elif self.params.knowledge_width:
            lower = "lower rafl.knowledge-width, set smaller rafl.knowledge-arguments"
        else:  # all of its own family
            lower = "set rafl.knowledge-width below 1, or smaller rafl.knowledge-arguments"
        out = "rafl.shares" if isinstance(self.space, Space) else "the family's options"
        raise ValueError(
            f"the knowledge network has {knowledge:,} parameters, and the smallest personal model that devices may "
            f"get {smallest:,}: {lower}, or leave the smallest of {out} out"
        )
