"""RaFL (Yu, Munoz and Jannesari 2024): a searched model for each device, and a small knowledge network that travels.

"Resource-Aware Heterogeneous Federated Learning with Specialized Local Models".

The client step is in `mutual_learning`, the search in `personal_search`, and the knowledge network, its fusion and what
a device with both networks pays in `two_networks`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.messages.tensor_sets import STATISTICS, TensorSets
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost
from wildflower.plugins.flower_log import log
from wildflower.strategies.ensemble import Ensemble
from wildflower.strategies.method import (
    LEADING,
    ClientStep,
    Contribution,
    Group,
    Model,
    Order,
    Selection,
    Setup,
    State,
    Trained,
    Traits,
)
from wildflower.strategies.params import Params
from wildflower.strategies.pricing import fits
from wildflower.strategies.rafl.personal_search import PersonalSearch, measured_pairs, space_of
from wildflower.strategies.rafl.rafl_params import RaFLParams
from wildflower.strategies.rafl.two_networks import KnowledgeNetwork, TwoNetworks
from wildflower.strategies.search import PoolSearch
from wildflower.strategies.submodel import CandidateMethod, first_weights


class RaFL(CandidateMethod[RaFLParams]):
    """theta^k <- sum_l n_l / N_S theta_l^k over the devices S of a round (Eq. 7).

    With ensemble distillation theta^k goes on from there to what the devices' networks say together (Eqs. 8 and 9).

    At its first contact a device is sent the largest architecture of the supernet that fits its budget, or the one of
    the best predicted accuracy, with the supernet's weights (Eq. 2). It stays there. The supernet itself is not trained
    by the rounds. Where it is not trained before them either, its weights are random, and with `first` of "drawn"
    devices draw their own.
    """

    shared_params: ClassVar[Mapping[str, type[Params]]] = {"ensemble": Ensemble}
    family_options: ClassVar[Mapping[str, Any]] = {"norm": "batch"}
    fit_for: ClassVar[Traits] = Traits(
        personal=True,
        takes_initial_weights=True,
        takes_tokens=True,
        public_when={"fusion": "ensemble"},
        one_model="rafl gives every device a personal model and the knowledge network: leave it false",
    )

    def __init__(self, setup: Setup, params: RaFLParams) -> None:
        if setup.family.freeze:
            frozen = ", ".join(setup.family.freeze)
            raise ValueError(f"freeze = {frozen!r}: rafl trains all of both networks, so leave it empty")
        if params.first == "drawn" and setup.initial:
            raise ValueError(
                "rafl.first = 'drawn' and initial.weights: devices that draw their first weights do not begin with "
                "given ones; set rafl.first = 'sent', or leave initial.weights out"
            )
        self.space = space_of(setup.family, params)
        pairs = measured_pairs(setup, self.space) if params.searcher == "evolution" else ([], [])
        super().__init__(setup, params, [self.space.largest(), self.space.smallest()])
        self.supernet = first_weights(setup)
        # Weights that were trained come with the statistics of the network that they were trained in, drawn ones with
        # none that could be wrong.
        given = bool(setup.initial) and any(name.endswith(STATISTICS) for name in setup.family.tensor_names())
        self.knowledge = KnowledgeNetwork(setup, params, self.space, self.supernet, given=given)
        self.networks = TwoNetworks(setup.family, self.space, self.knowledge, params, setup.settings, given=given)
        self.search = PersonalSearch(params, self.networks, pairs)
        self.kept: dict[int, list[Architecture]] = {}  # personal models of each device, largest first
        self.lost_models = 0  # how many devices have lost theirs
        self.scorers: list[tuple[int, Architecture, Selection]] = []  # the devices of the newest round

    def _parameters(self, architecture: Architecture) -> int:
        return self.networks.personal_cost(architecture).parameters

    @override
    @classmethod
    def family_defaults(cls, params: RaFLParams) -> dict[str, Any]:
        # Where layers may be left out, what passes through their place is bounded.
        return {"scaler": False, **({"activation": "relu6"} if 0 in params.shares else {})}

    @override
    def start(self) -> None:
        super().start()
        sizes = [self._parameters(a) for a in (self.space.smallest(), self.space.largest())]
        knowledge = self.networks.knowledge_cost.parameters
        text = "Personal models of %s to %s parameters out of %.3g architectures; the knowledge network has %s"
        log.info(text, f"{sizes[0]:,}", f"{sizes[1]:,}", self.space.size, f"{knowledge:,}")
        self.search.log_limits()

    # What devices get

    @override
    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """Return the largest personal model of the device that fits, or what a search finds if none fits any more."""
        return self._largest_kept(device, budget) or self.search.find(device, budget) or self.below_the_smallest

    def _largest_kept(self, device: int, budget: Budget) -> Architecture | None:
        kept = self.kept.get(device, [])
        return next((a for a in kept if fits(self.networks.price(a, first=False), budget)), None)

    @override
    def client_step(self, order: Order) -> ClientStep:
        return self.networks.client_step(first=self._is_first(order))

    def _is_first(self, order: Order) -> bool:
        return order.architecture not in self.kept.get(order.device, [])

    @override
    def payload(self, group: Group) -> TensorSets:
        """Return the knowledge network, and for a first contact the personal model as it lies in the supernet."""
        tensor_sets = {"weights": self.knowledge.weights}
        if "personal" in group.sent:
            tensor_sets["personal"] = group.placement.gather(self.supernet)
        return tensor_sets

    # What comes back

    @override
    def absorb(self, contribution: Contribution) -> None:
        self.knowledge.add(contribution)

    @override
    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Fuse the knowledge network, and note who has which personal model now."""
        figures: dict[str, float | None] = {"personal_models_lost": self._note(trained)}
        self.scorers = [(done.device, done.order.architecture, LEADING) for done in trained if done.device in self.kept]
        self.knowledge.average()
        teachers = self.knowledge.teachers
        if teachers is not None and teachers.count:
            with self.stopwatch.timed("distill"):
                seed = int(self.rng(9).integers(2**63))
                figures |= self.knowledge.distill(teachers, seed, self.settings.training.layout)
        return figures

    @override
    def left(self, device: int) -> None:
        self.kept.pop(device, None)

    def _note(self, trained: Sequence[Trained]) -> int:
        """Note who has trained which personal model; return how many devices had lost theirs."""
        lost = [done.device for done in trained if not done.facts["personal"][0]]
        for done in trained:
            if done.device in lost:
                self.kept.pop(done.device, None)
                continue
            models = dict.fromkeys([*self.kept.get(done.device, []), done.order.architecture])
            self.kept[done.device] = sorted(models, key=self._parameters, reverse=True)
        self.lost_models += len(lost)
        return len(lost)

    # Scores

    @property
    def scored_architecture(self) -> Architecture:
        """The knowledge network's, in its own family."""
        return self.knowledge.architecture

    @override
    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """Return the knowledge network; personal models live on devices."""
        known = self.knowledge
        return {a: Model(known.family, a, known.weights) for a in architectures if a == known.architecture}

    @override
    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]]:
        return self.scorers

    @override
    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """Return the personal model that the device keeps, or would be sent now; a pool does not grow by it."""
        found = self._largest_kept(device, budget) or self.search.find(device, budget, grows=False)
        found = found or self.below_the_smallest
        return None if found is None else (found, LEADING)

    # What it costs

    @override
    def cost(self, architecture: Architecture) -> Cost:
        return self.networks.price(architecture, first=True)

    @override
    def order_cost(self, order: Order) -> Cost:
        return self.networks.price(order.architecture, first=self._is_first(order))

    @override
    def training_cost(self, architecture: Architecture) -> Cost:
        return self.networks.training_cost(architecture)

    @property
    def remedy(self) -> str:
        """Smaller shares, or smaller options of the family."""
        return self.search.remedy

    # State

    @override
    def state(self) -> State:
        """Return the knowledge network, and who has which personal models; the supernet is as the run began."""
        values: dict[str, Any] = {
            "personal_models": [[d, [a.to_json() for a in kept]] for d, kept in sorted(self.kept.items())],
            "lost_models": self.lost_models,
            "knowledge_cut": self.knowledge.cut,
        }
        if isinstance(self.search.searcher, PoolSearch):
            values["search"] = self.search.searcher.state_dict()
        return State({f"knowledge/{name}": value for name, value in self.knowledge.weights.items()}, values)

    @override
    def load(self, state: State) -> None:
        self.knowledge.load({name.removeprefix("knowledge/"): value for name, value in state.tensors.items()})
        self.knowledge.cut = state.values["knowledge_cut"]
        self.kept = {d: [Architecture.from_json(a) for a in kept] for d, kept in state.values["personal_models"]}
        self.lost_models = state.values["lost_models"]
        if isinstance(self.search.searcher, PoolSearch):
            self.search.searcher.load_state_dict(state.values["search"])
