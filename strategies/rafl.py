"""RaFL (Yu, Munoz and Jannesari 2024): a searched model for each device, and a small knowledge network that travels.

"Resource-Aware Heterogeneous Federated Learning with Specialized Local Models".
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.messages.error import MessageError
from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout
from wildflower.messages.sums import WeightedSum, flatten, mean_of
from wildflower.messages.tensor_sets import STATISTICS, TensorSet, TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family, with_weights
from wildflower.models.cost import Cost, cost
from wildflower.models.elastic import ElasticFamily, ElasticSpace
from wildflower.models.family import FAMILIES, family_class, make_family
from wildflower.models.layers import Network
from wildflower.models.space import Space
from wildflower.strategies.ensemble import Ensemble, Teachers, require_public, teach
from wildflower.strategies.evolution import EvolutionSearch, Picks
from wildflower.strategies.method import (
    LEADING,
    Answer,
    ClientContext,
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
from wildflower.strategies.params import Count, Params, Rate, Shares, kebab, to_scalar
from wildflower.strategies.predictor import MIN_PAIRS, fit_predictor, is_of_supernet, load_pairs
from wildflower.strategies.pricing import fits, in_floats, tensor_set_bytes
from wildflower.strategies.search import ExactSearch, PoolSearch, find_priced
from wildflower.strategies.shared_losses import divergence
from wildflower.strategies.submodel import CandidateMethod, first_weights, initial_weights
from wildflower.strategies.supernet_training import calibrated

log = logging.getLogger("flwr")  # what Flower's own log is called

# The client step ------------------------------------------------------------------------------------------------------


class MutualLearning(ClientStep):
    """A device's personal model l and the knowledge network k learn from the labels and from each other.

    They minimize L_l = CE(l(x), y) + KL(k || l) and L_k = CE(k(x), y) + KL(l || k) (Eqs. 3 to 6). The personal model
    stays on the device.

    Attributes:
        knowledge_family: JSON of the knowledge network's family; "" is the personal models' own.
        knowledge: JSON of its architecture.
        first: the device has no such personal model yet.
        drawn: it draws the first weights of its personal model itself, and is not sent them.
        calibrates: the personal model that it is sent was cut out of trained weights, and so has batch norm statistics
            of another network: it takes its own by a pass over the device's training examples.
        calibrates_knowledge: likewise the knowledge network.
        merged: knowledge networks may be added up on the way.
    """

    knowledge_family: str
    knowledge: str
    first: bool
    drawn: bool
    calibrates: bool
    calibrates_knowledge: bool
    merged: bool

    @property
    def needs_classes(self) -> bool:
        """Divergences are between distributions over classes."""
        return True

    def network(self, family: Family) -> tuple[Family, Architecture]:
        """The knowledge network's family and architecture."""
        own, architecture = _network(self.knowledge_family, self.knowledge)
        return own or family, architecture

    def _weights(self, family: Family, merge: Merge | None) -> dict[str, TensorSet]:
        own, architecture = self.network(family)
        return {"weights": TensorSet.of(own.tensors(architecture), merge)}

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The knowledge network, and at first the personal model, where the device does not draw that."""
        personal = {"personal": TensorSet.of(family.tensors(architecture))} if self.first and not self.drawn else {}
        return self._weights(family, None) | personal

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The knowledge network alone."""
        return self._weights(family, Merge() if self.merged else None)

    def facts(self, family: Family) -> dict[str, int]:
        """`personal`: 1 where the device has a personal model now, 0 where it had lost it."""
        return {"personal": 1}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """It is 0 or 1."""
        if facts["personal"][0] not in (0, 1):
            raise ValueError(f"the fact 'personal' is 0 or 1, not {facts['personal'][0]!r}")

    def _personal(self, context: ClientContext) -> tuple[Weights | None, bool]:
        """What the device keeps, which is newer than what may have been sent once more; None where it has lost it.

        Also whether it was sent with the statistics of another network.
        """
        kept = context.kept("personal")
        if kept is None and self.first and self.drawn:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(context.chance.getrandbits(63))
                return dict(context.build().state_dict()), False
        return (context.received.get("personal"), self.calibrates) if kept is None else (kept, False)

    def _knowledge(self, context: ClientContext, weights: Weights) -> Network:
        own, architecture = self.network(context.family)
        return with_weights(own, architecture, weights).to(context.device)

    def model(self, context: ClientContext) -> Network:
        """The personal model."""
        weights, cut = self._personal(context)
        if weights is None:
            raise MessageError(f"this device keeps no personal model of {context.architecture}")
        personal = context.build(weights)
        return calibrated(personal, context.one_pass(personal)) if cut else personal

    def train(self, context: ClientContext) -> Answer:
        """Train both networks in one loop; where the personal model is lost, the knowledge network alone."""
        knowledge = self._knowledge(context, context.received["weights"])
        weights, cut = self._personal(context)
        if weights is None:
            if self.calibrates_knowledge:
                calibrated(knowledge, context.one_pass(knowledge))
            loss = context.fit(knowledge, lambda inputs, labels: context.task.loss(knowledge(inputs), labels))
            return Answer(None, {"weights": dict(knowledge.state_dict())}, loss, {"personal": [0.0]})
        personal = context.build(weights)
        if cut:
            calibrated(personal, context.one_pass(personal, knowledge))
        if self.calibrates_knowledge:
            calibrated(knowledge, context.one_pass(personal, knowledge))
        loss = learn_mutually(context, personal, knowledge)
        context.keep("personal", personal.state_dict())
        return Answer(personal, {"weights": dict(knowledge.state_dict())}, loss, {"personal": [1.0]})

    @property
    def scored_beside(self) -> tuple[str, ...]:
        """The knowledge network is scored on the device's own examples, too."""
        return ("knowledge network",)

    def beside(self, context: ClientContext, answer: Answer | None) -> list[nn.Module]:
        """The knowledge network as the device has trained it, or as it was sent."""
        knowledge = self._knowledge(context, (context.received if answer is None else answer.tensor_sets)["weights"])
        if answer is None and self.calibrates_knowledge:
            calibrated(knowledge, context.one_pass(knowledge))
        return [knowledge]


def mutual_losses(personal: Tensor, knowledge: Tensor, task_loss: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """L_l and L_k of one batch (Eqs. 5 and 6): each network's loss, and its divergence from the other, held fixed.

    Args:
        personal, knowledge: logits, (batch, classes).
        task_loss: the networks' own losses, which are means over the batch.
    """
    said_l, said_k = personal.log_softmax(dim=1), knowledge.log_softmax(dim=1)
    return (
        task_loss[0] + divergence(said_k.detach(), said_l),
        task_loss[1] + divergence(said_l.detach(), said_k),
    )


def learn_mutually(context: ClientContext, personal: nn.Module, knowledge: nn.Module) -> float:
    """Train two networks on the same batches, each by an optimizer of its own; both predict before either steps.

    Returns:
        The mean of L_k over the examples seen.
    """
    networks = (personal, knowledge)
    optimizers = [context.optimizer(network) for network in networks]
    seen, total = 0, torch.zeros((), dtype=torch.float64)
    for network in networks:
        network.train()
    for batch in context.steps(*networks):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for inputs, labels, weight in batch:
            logits = [network(inputs) for network in networks]
            losses = mutual_losses(
                logits[0], logits[1], (context.task.loss(logits[0], labels), context.task.loss(logits[1], labels))
            )
            for loss in losses:
                (weight * loss).backward()
            seen += len(labels)
            total += losses[1].detach().to("cpu", torch.float64) * len(labels)
        if context.training.clip_norm:
            for network in networks:
                nn.utils.clip_grad_norm_(network.parameters(), context.training.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
    for network in networks:
        network.zero_grad(set_to_none=True)
    return float(total) / max(1, seen)


@lru_cache(maxsize=16)
def _network(family: str, architecture: str) -> tuple[Family | None, Architecture]:
    """The knowledge network as a work order names it."""
    own = make_family(json.loads(family)) if family else None
    return own, Architecture.from_json(json.loads(architecture))


# The server half ------------------------------------------------------------------------------------------------------


class RaFLParams(Params):
    """RaFL's settings."""

    space: Literal["shares", "once-for-all"] = Field(
        "shares",
        description="Which cuts of the supernet personal models may be: every layer at one of the shares, or a "
        "family's own sub-networks (docs/supernets.md), which `wildflower supernet` trains",
    )
    shares: Shares = Field(
        (0.25, 0.5, 0.75, 1.0),
        description="Shares of its channels that a layer of a personal model may keep; 0 removes layers that may go; "
        "once-for-all has none",
    )
    min_blocks: Count = Field(
        1, description="Blocks that stay of each stage of a ResNet in a personal model, where it is cut by shares"
    )
    searcher: Literal["exact", "pool", "evolution"] = Field(
        "exact",
        description="How personal models are found: by the exact search for the most parameters, by a pool of random "
        "draws, or by evolution for the best predicted accuracy, where accuracies lie beside the initial weights, and "
        "else for the most multiplications",
    )
    search_again: Rate = Field(
        0.0,
        description="Times the parameters of its personal model that a device's budget must allow for it to get a "
        "larger one; 0: never",
    )
    search_after: Count = Field(
        3,
        description="Where search-again is on, contacts in a row after which such a budget has changed for good, and "
        "likewise one that no personal model of the device fits, which sits rounds out until then",
    )
    first: Literal["sent", "drawn"] = Field(
        "sent",
        description="First weights of a personal model: the supernet's, which are sent, or weights that the device "
        "draws, so that the model never travels",
    )
    knowledge_width: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Width of the knowledge network; 0 is the smallest personal model that devices may get, or the "
        "whole of knowledge-family where that is set",
    )
    knowledge_family: str = Field(
        "", description='Family of the knowledge network (docs/families.md); "" cuts it out of the supernet'
    )
    knowledge_arguments: str = Field("", description="Arguments of the knowledge network's own family")
    fusion: Literal["average", "ensemble"] = Field(
        "average",
        description="How knowledge networks are fused: average (a), or from there on by ensemble distillation on "
        "public.task (b)",
    )

    @field_validator("search_again")
    @classmethod
    def _possible_factor(cls, factor: float) -> float:
        if 0 < factor < 1.1:
            raise ValueError("at least 1.1, or devices would be sent models hardly larger than theirs; 0 for never")
        return factor


class RaFL(CandidateMethod[RaFLParams]):
    """theta^k <- sum_l n_l / N_S theta_l^k over the devices S of a round (Eq. 7).

    With ensemble distillation theta^k goes on from there to what the devices' networks say together (Eqs. 8 and 9).

    At its first contact a device is sent the largest architecture of the supernet that fits its budget, or the one of
    the best predicted accuracy, with the supernet's weights (Eq. 2). It stays there. The supernet itself is not trained
    by the rounds. Where it is not trained before them either, its weights are random, and with `first` of "drawn"
    devices draw their own.

    The client step is `MutualLearning`.
    """

    params_type: ClassVar[type[Params]] = RaFLParams
    shared_params: ClassVar[Mapping[str, type[Params]]] = {"ensemble": Ensemble}
    family_options: ClassVar[Mapping[str, Any]] = {"norm": "batch"}

    def __init__(self, setup: Setup, params: RaFLParams) -> None:
        if setup.family.freeze:
            frozen = ", ".join(setup.family.freeze)
            raise ValueError(f"freeze = {frozen!r}: rafl trains all of both networks, so leave it empty")
        if params.first == "drawn" and setup.initial:
            raise ValueError(
                "rafl.first = 'drawn' and initial.weights: devices that draw their first weights do not begin with "
                "given ones; set rafl.first = 'sent', or leave initial.weights out"
            )
        self.space = _space(setup.family, params)
        self.pairs = _pairs(setup, self.space) if params.searcher == "evolution" else ([], [])
        super().__init__(setup, params, [self.space.largest(), self.space.smallest()])
        self.supernet = first_weights(setup)
        self.own_family = _own_family(setup.family, params)
        self.knowledge_family = self.own_family or setup.family
        self.knowledge_architecture = self._knowledge_architecture()
        self._check_size()
        first = self.supernet if self.own_family is None else initial_weights(self.own_family, setup.settings.seed)
        self.knowledge: Weights = self.knowledge_family.place(self.knowledge_architecture).gather(first)
        # Weights that were trained come with the statistics of the network that they were trained in, drawn ones with
        # none that could be wrong.
        self.given = bool(setup.initial) and _has_statistics(setup.family)
        self.knowledge_cut = self.given and self.own_family is None  # until devices have calibrated it
        self.layout = Layout.of(self.knowledge_family.tensors(self.knowledge_architecture))
        self.total = WeightedSum.zeros(self.layout)
        found = setup.shared["ensemble"]
        assert isinstance(found, Ensemble)
        self.ensemble = found
        self.teachers: Teachers | None = None
        if params.fusion == "ensemble":
            public = require_public("rafl.fusion = 'ensemble'", setup.public, self.ensemble)
            self.teachers = Teachers(public, setup.family.classes)
        self.personal_models: dict[int, list[Architecture]] = {}  # of every device those that it keeps, largest first
        self.lost_models = 0
        # By device, whether its budget asks for "more" or for "less" than its personal model, and in how many contacts
        # in a row it has done so. Devices whose budget asks for neither are not in it.
        self.changes: dict[int, tuple[str, int]] = {}
        # By device, the round in which it was last asked, and what its budget asked for: "more", "less" or nothing, "".
        self.asked: dict[int, tuple[int, str]] = {}
        self.scorers: list[tuple[int, Architecture, Selection]] = []  # the devices of the newest round

    @classmethod
    def family_defaults(cls, params: RaFLParams) -> dict[str, Any]:
        """No scaler; where layers may be left out, what passes through their place is bounded."""
        return {"scaler": False, **({"activation": "relu6"} if 0 in params.shares else {})}

    @override
    @classmethod
    def traits(cls, params: RaFLParams) -> Traits:
        return Traits(takes_initial_weights=True, public_when={"fusion": "ensemble"})

    @classmethod
    def check(cls, params: RaFLParams, *, both_models: bool) -> None:
        """Every device has two networks already."""
        if both_models:
            raise ValueError("both-models = True: rafl gives every device a personal model and the knowledge network")
        if params.knowledge_arguments and not params.knowledge_family:
            raise ValueError(
                f"rafl.knowledge-arguments = {params.knowledge_arguments!r}: they are arguments of "
                "rafl.knowledge-family, which is not set"
            )
        if params.space == "once-for-all":
            for name in ("shares", "min_blocks"):
                if getattr(params, name) != RaFLParams.model_fields[name].default:
                    raise ValueError(
                        f"rafl.{kebab(name)} = {to_scalar(getattr(params, name))!r}: rafl.space = 'once-for-all' does "
                        "not read it, because the family says which sub-networks there are: leave it out, or set "
                        "rafl.space = 'shares'"
                    )

    def _knowledge_architecture(self) -> Architecture:
        """The knowledge network's architecture in its family."""
        width = self.params.knowledge_width
        if self.own_family is not None:
            return self.own_family.width(width or 1.0)
        return self.family.width(width) if width else self.space.smallest()

    def _check_size(self) -> None:
        """Raise ValueError where the knowledge network is larger than a personal model that devices may get."""
        smallest = self._plain(self.family, self.space.smallest()).parameters
        knowledge = self._plain(self.knowledge_family, self.knowledge_architecture).parameters
        if knowledge > smallest:
            if self.own_family is None:
                lower = "lower rafl.knowledge-width"
            elif self.params.knowledge_width:
                lower = "lower rafl.knowledge-width, set smaller rafl.knowledge-arguments"
            else:  # all of its own family
                lower = "set rafl.knowledge-width below 1, or smaller rafl.knowledge-arguments"
            out = "rafl.shares" if isinstance(self.space, Space) else "the family's options"
            raise ValueError(
                f"the knowledge network has {knowledge:,} parameters, and the smallest personal model that devices "
                f"may get {smallest:,}: {lower}, or leave the smallest of {out} out"
            )

    def start(self) -> None:
        """Make the searcher, and log how large the networks are."""
        super().start()
        sizes = [self._plain(self.family, a).parameters for a in (self.space.smallest(), self.space.largest())]
        knowledge = self._plain(self.knowledge_family, self.knowledge_architecture)
        text = "Personal models of %s to %s parameters out of %.3g architectures; the knowledge network has %s"
        log.info(text, f"{sizes[0]:,}", f"{sizes[1]:,}", self.space.size, f"{knowledge.parameters:,}")
        if isinstance(self.searcher, ExactSearch) and not self.searcher.exact:
            log.info("The search is thinned out, so that a little more may fit than is found")
        if isinstance(self.searcher, EvolutionSearch) and not self.pairs[0]:
            log.info("The search is for the most multiplications: no accuracies of sub-networks lie beside the weights")
        elif isinstance(self.searcher, EvolutionSearch) and not self._predicts:
            log.info(
                "The search is for the most multiplications: accuracies of %s sub-networks lie beside the weights, and "
                "a predictor needs %s: measure more, as with wildflower supernet --pairs 200",
                len(self.pairs[0]),
                MIN_PAIRS,
            )

    # What devices get

    @property
    def _predicts(self) -> bool:
        """Whether there are enough measured accuracies to predict others from."""
        return len(self.pairs[0]) >= MIN_PAIRS

    @cached_property
    def searcher(self) -> ExactSearch | PoolSearch | EvolutionSearch:
        """Finds a personal model under what the knowledge network leaves of a budget; made when it is first asked."""
        if self.params.searcher == "pool":
            return PoolSearch(self.space, lambda architecture: self._plain(self.family, architecture))
        batch_size, optimizer = self.settings.training.examples_at_once, self.settings.optimizer
        if self.params.searcher == "exact":
            # Eq. 2 is an argmax.
            return ExactSearch(self.space, batch_size=batch_size, optimizer=optimizer, tolerance=0.0)
        score = None
        if self._predicts:
            predictor = fit_predictor(self.space, *self.pairs, self.settings.seed)
            if predictor.rank_correlation > 0:
                log.info("Accuracies are predicted, with a rank correlation of %.2f", predictor.rank_correlation)
            else:  # also NaN, where all predictions or all accuracies that were held out are alike
                log.warning(
                    "Accuracies are predicted with a rank correlation of %.2f: the predictor orders sub-networks no "
                    "better than chance does, so that devices get what a random choice would give. Measure more "
                    "sub-networks, as with wildflower supernet --pairs 200, train the supernet for longer, or set "
                    "rafl.searcher = 'exact'",
                    predictor.rank_correlation,
                )
            score = predictor.score
        return EvolutionSearch(self.space, batch_size=batch_size, optimizer=optimizer, score=score)

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The largest personal model of the device that fits, or what a search finds.

        It is searched anew where none fits any more. With `search_again` it also is where the budget allows so many
        times as much, and both only once the budget has changed for good.
        """
        kept = self._largest_kept(device, budget)
        if kept is not None and not self.params.search_again:
            return kept
        if not self.params.search_again or device not in self.personal_models:
            return self.search(device, budget) or self.below_the_smallest
        found = self.search(device, budget)
        if kept is None and found is None and self.below_the_smallest in self.personal_models[device]:
            self.asked[device] = self.round, ""
            return self.below_the_smallest  # it never fits, so that nothing has changed
        change = self._change(kept, found)
        self.asked[device] = self.round, change
        if not change or not self._for_good(device, change):
            return kept
        return found or self.below_the_smallest

    def _change(self, kept: Architecture | None, found: Architecture | None) -> str:
        """Whether a budget asks for "more" than the largest personal model that is kept and fits, or for "less"."""
        if kept is None:
            return "less"
        enough = self.params.search_again * self._plain(self.family, kept).parameters
        return "more" if found is not None and self._plain(self.family, found).parameters >= enough else ""

    def _for_good(self, device: int, change: str) -> bool:
        """Whether a change has lasted for enough contacts, this one included."""
        before, count = self.changes.get(device, ("", 0))
        return (count if before == change else 0) + 1 >= self.params.search_after

    def begin_round(self, orders: Sequence[Order]) -> None:
        """Count the contacts whose budgets asked for another personal model, also of devices that sit the round out."""
        for device, (asked, change) in self.asked.items():
            if asked != self.round:
                continue  # asked by an evaluation, which is no contact
            before, count = self.changes.pop(device, ("", 0))
            if change:
                self.changes[device] = change, 1 + (count if before == change else 0)
        self.asked.clear()

    def search(self, device: int, budget: Budget, *, grows: bool = True) -> Architecture | None:
        """The best architecture for a budget (Eq. 2), the same for a device in every round; None: none fits."""

        def price(found: Architecture) -> Cost:
            return self._price(found, first=True)

        left = self._left_for_personal(budget)
        found = None if left is None else find_priced(partial(self._find, device, grows), price, budget, left)
        if found is not None:
            return found
        smallest = self.space.smallest()
        return smallest if fits(price(smallest), budget) else None

    def _left_for_personal(self, budget: Budget) -> Budget | None:
        """What the knowledge network leaves of a budget, with payloads as 32-bit floats; None: nothing."""
        half, passes = self._half(first=True), self._passes(first=True)
        ends = (self.space.smallest(), self.space.largest())
        budget = in_floats(budget, half, self.family, ends, self.settings)
        knowledge = self._plain(self.knowledge_family, self.knowledge_architecture)
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

    def _find(self, device: int, grows: bool, left: Budget) -> Architecture | None:
        """What the searcher finds for a device under what the knowledge network leaves."""
        if isinstance(self.searcher, PoolSearch) and not grows:
            return self.searcher.largest(left)
        if isinstance(self.searcher, EvolutionSearch):
            return self._evolved(device, left)
        return self.searcher.find(left, self.settings.rng(0, 8, device))

    @cached_property
    def _evolved(self) -> Callable[[int, Budget], Architecture | None]:
        """The evolution's answers, each of which takes up to a second, and is asked for again in every evaluation."""
        return lru_cache(maxsize=4096)(lambda device, left: self.searcher.find(left, self.settings.rng(0, 8, device)))

    def _largest_kept(self, device: int, budget: Budget) -> Architecture | None:
        kept = self.personal_models.get(device, [])
        return next((a for a in kept if fits(self._price(a, first=False), budget)), None)

    def client_step(self, order: Order) -> ClientStep:
        """Mutual learning; the personal model is sent to a device that does not have it."""
        return self._half(first=self._is_first(order))

    def _half(self, *, first: bool) -> MutualLearning:
        return MutualLearning(
            knowledge_family=self._own_family_json,
            knowledge=self._knowledge_json,
            first=first,
            drawn=self.params.first == "drawn",
            calibrates=first and self.given,
            calibrates_knowledge=self.knowledge_cut,
            merged=self.params.fusion == "average",
        )

    @cached_property
    def _own_family_json(self) -> str:
        return "" if self.own_family is None else json.dumps(self.own_family.spec(), sort_keys=True)

    @cached_property
    def _knowledge_json(self) -> str:
        return json.dumps(self.knowledge_architecture.to_json())

    def payload(self, group: Group) -> TensorSets:
        """The knowledge network, and for a first contact the personal model as it lies in the supernet."""
        tensor_sets = {"weights": self.knowledge}
        if "personal" in group.sent:
            tensor_sets["personal"] = group.placement.gather(self.supernet)
        return tensor_sets

    # What comes back

    def absorb(self, contribution: Contribution) -> None:
        """Add knowledge networks, weighted by examples; under ensemble distillation also what they say."""
        if self.teachers is None:
            self.total.include(contribution.sum_of("weights"))
            return
        weights = contribution.own("weights")
        flat = flatten(weights, self.layout)
        self.total.check(flat, contribution.examples)
        self.teachers.add(with_weights(self.knowledge_family, self.knowledge_architecture, weights))
        self.total.add(flat, contribution.examples)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """The next knowledge network, and who has which personal model now."""
        lost = 0
        for done in trained:
            if done.facts["personal"][0]:
                self._note(done.device, done.order.architecture)
            else:
                lost += 1
                self.left(done.device)
        self.lost_models += lost
        self.scorers = [
            (done.device, done.order.architecture, LEADING) for done in trained if done.device in self.personal_models
        ]
        figures: dict[str, float | None] = {"personal_models_lost": lost}
        if self.total.weight:
            self.knowledge = mean_of(self.total, self.layout, self.knowledge)
            self.total = WeightedSum.zeros(self.layout)
            self.knowledge_cut = False  # its statistics are now the mean of those that devices took
        if self.teachers is not None and self.teachers.count:
            figures |= self._distill(self.teachers)
        return figures

    def left(self, device: int) -> None:
        """Its personal models are gone with the device."""
        self.personal_models.pop(device, None)
        self.changes.pop(device, None)

    def _note(self, device: int, architecture: Architecture) -> None:
        kept = self.personal_models.setdefault(device, [])
        if architecture not in kept:
            kept.append(architecture)
            kept.sort(key=lambda a: -self._plain(self.family, a).parameters)

    def _distill(self, teachers: Teachers) -> dict[str, float | None]:
        said, seed = teachers.take_mean(), int(self.rng(9).integers(2**63))
        with self.stopwatch.timed("distill"):
            self.knowledge, figures = teach(
                self.knowledge_family,
                self.knowledge_architecture,
                self.knowledge,
                said,
                teachers.public,
                self.ensemble,
                seed,
                self.settings.training.layout,
            )
        return figures

    # Scores

    @property
    def scored_architecture(self) -> Architecture:
        """The knowledge network's, in its own family."""
        return self.knowledge_architecture

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """The knowledge network; personal models live on devices."""
        return {
            a: Model(self.knowledge_family, a, self.knowledge) for a in architectures if a == self.scored_architecture
        }

    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]]:
        """The round's devices score their personal models."""
        return self.scorers

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """The personal model that the device keeps, or would be sent now; a pool does not grow by it.

        None as well where no model that it keeps fits, and it is not known yet whether its budget has changed for good.
        """
        found, kept = self._largest_kept(device, budget), self.personal_models.get(device, [])
        may_wait = self.params.search_again and kept and self.below_the_smallest not in kept
        if found is None and not (may_wait and not self._for_good(device, "less")):
            found = self.search(device, budget, grows=False) or self.below_the_smallest
        return None if found is None else (found, LEADING)

    # What it costs

    def cost(self, architecture: Architecture) -> Cost:
        """Of a first contact, at which the personal model travels too, unless the device draws it."""
        return self._price(architecture, first=True)

    def order_cost(self, order: Order) -> Cost:
        """Of an order as it is: after the first contact the knowledge network alone travels."""
        return self._price(order.architecture, first=self._is_first(order))

    def _is_first(self, order: Order) -> bool:
        return order.architecture not in self.personal_models.get(order.device, [])

    def training_cost(self, architecture: Architecture) -> Cost:
        """Both networks in one step: the sum of what training each by itself takes."""
        personal = self._plain(self.family, architecture)
        knowledge = self._plain(self.knowledge_family, self.knowledge_architecture)
        return replace(
            personal,
            peak_training_memory_bytes=personal.peak_training_memory_bytes + knowledge.peak_training_memory_bytes,
            training_flops=personal.training_flops + knowledge.training_flops,
        )

    def _price(self, architecture: Architecture, *, first: bool) -> Cost:
        down, up = tensor_set_bytes(self._half(first=first), self.family, architecture, self.settings.wire)
        personal, knowledge = self._passes(first=first)
        flops = int(self._plain(self.family, architecture).training_flops * personal)
        flops += int(self._plain(self.knowledge_family, self.knowledge_architecture).training_flops * knowledge)
        return replace(self.training_cost(architecture), download_bytes=down, upload_bytes=up, training_flops=flops)

    def _passes(self, *, first: bool) -> tuple[Fraction, Fraction]:
        """What the personal model and the knowledge network compute in a round, by what training them takes.

        A pass that calibrates is a forward one, a third of training. It sees every example of the device once. Under
        local steps, where nobody says here how many a device has, it counts as if the steps saw as many.
        """
        training = self.settings.training
        calibration = Fraction(1, 3 * (1 if training.steps else training.epochs))
        return 1 + (first and self.given) * calibration, 1 + self.knowledge_cut * calibration

    def _plain(self, family: Family, architecture: Architecture) -> Cost:
        """What training one network by itself costs."""
        training = self.settings.training
        return cost(family, architecture, batch_size=training.examples_at_once, optimizer=self.settings.optimizer)

    @property
    def remedy(self) -> str:
        """Smaller shares, or smaller options of the family."""
        if isinstance(self.space, ElasticSpace):
            return "smaller options in family-arguments, such as depths and expand_ratios (docs/supernets.md)"
        return f"smaller shares in rafl.shares = {', '.join(f'{share:g}' for share in self.params.shares)!r}"

    # State

    def state(self) -> State:
        """The knowledge network, and who has which personal models; the supernet is as the run began."""
        devices = [[d, [a.to_json() for a in kept]] for d, kept in sorted(self.personal_models.items())]
        values: dict[str, Any] = {"personal_models": devices, "lost_models": self.lost_models}
        values["knowledge_cut"] = self.knowledge_cut
        values["changes"] = [[device, *change] for device, change in sorted(self.changes.items())]
        if isinstance(self.searcher, PoolSearch):
            values["search"] = self.searcher.state_dict()
        return State({f"knowledge/{name}": value for name, value in self.knowledge.items()}, values)

    def load(self, state: State) -> None:
        """Restore `state`; ValueError where it is of another knowledge network."""
        found = {name.removeprefix("knowledge/"): value for name, value in state.tensors.items()}
        if {n: v.shape for n, v in found.items()} != {n: v.shape for n, v in self.knowledge.items()}:
            raise ValueError("the checkpoint's knowledge network is another than the configuration's")
        self.knowledge = {name: found[name] for name in self.knowledge}
        self.personal_models = {
            device: [Architecture.from_json(a) for a in kept] for device, kept in state.values["personal_models"]
        }
        self.lost_models = state.values["lost_models"]
        # Earlier versions have neither of these two.
        self.knowledge_cut = state.values.get("knowledge_cut", False)
        self.changes = {device: (change, count) for device, change, count in state.values.get("changes", [])}
        if isinstance(self.searcher, PoolSearch):
            self.searcher.load_state_dict(state.values["search"])


def _space(family: Family, params: RaFLParams) -> Space | ElasticSpace:
    """Where personal models are searched; ValueError where the family has no such space."""
    if params.space == "shares":
        try:
            return Space.of(family, sorted(params.shares), None, params.min_blocks)
        except ValueError as error:
            raise ValueError(
                f"rafl.shares = {list(params.shares)}, rafl.min-blocks = {params.min_blocks}: {error}"
            ) from None
    if not isinstance(family, ElasticFamily):
        able = ", ".join(name for name, kind in FAMILIES.items() if issubclass(kind, ElasticFamily))
        raise ValueError(
            f"rafl.space = 'once-for-all': {family.name} has no space of its own: use one of {able}, or rafl.space = "
            "'shares'"
        )
    return ElasticSpace.of(family)


def _pairs(setup: Setup, space: Space | ElasticSpace) -> tuple[list[Picks], list[float]]:
    """Sub-networks and their accuracies, as `wildflower supernet` writes them beside the weights; none without a file.

    ValueError where what lies there is something else, or of a space in which this run does not search.
    """
    file = None if setup.initial_file is None else setup.initial_file.with_suffix(".json")
    if file is None or not file.is_file():
        return [], []
    if not isinstance(space, ElasticSpace):
        if not is_of_supernet(file):
            return [], []
        raise ValueError(
            f"rafl.searcher = 'evolution': the accuracies in {file} are of sub-networks of the once-for-all space, and "
            "rafl.space = 'shares' has others: set rafl.space = 'once-for-all', or rafl.searcher = 'exact'"
        )
    try:
        return load_pairs(file, space)
    except ValueError as error:
        raise ValueError(f"rafl.searcher = 'evolution': {error}") from None


def _has_statistics(family: Family) -> bool:
    """Whether networks of a family have running statistics, which a cut of trained weights needs anew."""
    return any(name.endswith(STATISTICS) for name in family.tensors(family.full()))


def _own_family(supernet: Family, params: RaFLParams) -> Family | None:
    """The knowledge network's own family, which reads what the supernet reads; None where it is cut out of that."""
    if not params.knowledge_family:
        return None
    where = f"rafl.knowledge-family = {params.knowledge_family!r}, rafl.knowledge-arguments = "
    where += repr(params.knowledge_arguments)
    try:
        arguments = tomllib.loads(f"arguments = {{{params.knowledge_arguments}}}")["arguments"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'{where}: arguments must be like "first_channels = 16": {error}') from None
    try:
        known = {field.name for field in fields(family_class(params.knowledge_family))}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    norm = {"norm": "batch"} if "norm" in known else {}  # not every family has a kind of norm to choose
    fixed = {"input_shape": list(supernet.input_shape), "classes": supernet.classes, **norm}
    if given := sorted(arguments.keys() & {*fixed, "name", "freeze"}):
        raise ValueError(
            f"{where}: {', '.join(given)} cannot be chosen, because the knowledge network reads and predicts what "
            "personal models do, has batch norm, and is trained whole, and its family is that of "
            "rafl.knowledge-family: leave out what is named here"
        )
    try:
        family = make_family({"name": params.knowledge_family, **arguments, **fixed})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if family.input_dtype != supernet.input_dtype:
        raise ValueError(f"{where}: it reads other inputs than {supernet.name}")
    return family
