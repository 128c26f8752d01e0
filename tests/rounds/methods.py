"""Small methods for tests of the contract: FedAvg over the whole model, with client steps of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.small_run import METHODS, small_config, started
from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout
from wildflower.messages.sums import SCALE, WeightedSum, split
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.layers import TensorSpec
from wildflower.rounds.engine import Engine
from wildflower.rounds.evaluation import Scorer
from wildflower.rounds.standard_hooks import standard_hooks
from wildflower.strategies.method import (
    Answer,
    ClientContext,
    ClientStep,
    Contribution,
    Method,
    Order,
    Setup,
    State,
    Trained,
    Training,
)
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params


def started_with(kind: type[Method], folder: Path, **changes: Any) -> tuple[Engine, Scorer]:
    """The engine of a small run of a method that is in no list of methods, and its scorer."""
    folder.mkdir(exist_ok=True)
    engine, scorer = started(small_config(folder, **METHODS["all-large"] | changes))
    method = kind(Setup(engine.method.family, engine.settings, (1.0, 0.5, 0.25)), kind.params_type())
    return Engine(method, engine.population, standard_hooks(engine.settings, engine.population)), scorer


# Two tensor sets that are added up with weights of their own, one that is not, and facts.


class SeveralTensorSets(Training):
    """Devices minimize the task's loss. fault: what this device does wrong with its answer."""

    fault: str = ""

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The weights, once more the biases, and by itself the mean of every bias."""
        tensors = family.tensors(architecture)
        biases = {name: spec for name, spec in tensors.items() if name.endswith(".bias")}
        means = {name: TensorSpec((1,), torch.float32, (None,)) for name in biases}
        return {
            "weights": TensorSet.of(tensors, Merge()),
            "biases": TensorSet.of(biases, Merge(weighting="uniform")),
            "means": TensorSet.of(means),
        }

    def facts(self, family: Family) -> dict[str, int]:
        """How many steps were taken, and which of two things the device is."""
        return {"steps": 1, "ends": 2}

    def train(self, context: ClientContext) -> Answer:
        """Train, and then do what is wrong."""
        answer = super().train(context)
        weights = answer.tensor_sets["weights"]
        answer.tensor_sets["biases"] = {
            name: value.clone() for name, value in weights.items() if name.endswith(".bias")
        }
        answer.tensor_sets["means"] = {n: value.mean().reshape(1) for n, value in answer.tensor_sets["biases"].items()}
        answer.facts = {"steps": [float(context.steps_taken)], "ends": [0.5, 1.5]}
        if self.fault:
            FAULTS[self.fault](answer)
        return answer


def _first(tensors: Weights) -> str:
    return next(iter(tensors))


def _fill(tensor_set: str, value: float) -> Callable[[Answer], None]:
    return lambda answer: answer.tensor_sets[tensor_set][_first(answer.tensor_sets[tensor_set])].fill_(value)


def _refuse(answer: Answer) -> None:
    raise RuntimeError("as the test asked")


def _other_shape(answer: Answer) -> None:
    name = _first(answer.tensor_sets["means"])
    answer.tensor_sets["means"][name] = torch.zeros(2)


FAULTS: dict[str, Callable[[Answer], object]] = {
    "none at all": _refuse,
    "missing tensor set": lambda answer: answer.tensor_sets.pop("biases"),
    "missing tensor set that is not merged": lambda answer: answer.tensor_sets.pop("means"),
    "extra tensor set": lambda answer: answer.tensor_sets.update(more={}),
    "missing tensor": lambda answer: answer.tensor_sets["biases"].pop(_first(answer.tensor_sets["biases"])),
    "missing tensor that is not merged": lambda answer: answer.tensor_sets["means"].pop(
        _first(answer.tensor_sets["means"])
    ),
    "tensor of another shape": _other_shape,
    "nan": _fill("biases", float("nan")),
    "nan that is not merged": _fill("means", float("nan")),
    "infinity that is not merged": _fill("means", float("inf")),
    "too large for a sum": _fill("biases", 1e30),
    "missing fact": lambda answer: answer.facts.pop("steps"),
    "extra fact": lambda answer: answer.facts.update(more=[1.0]),
    "fact of another length": lambda answer: answer.facts.update(ends=[1.0]),
    "fact of nan": lambda answer: answer.facts.update(steps=[float("nan")]),
    "fact of infinity": lambda answer: answer.facts.update(ends=[0.0, float("inf")]),
}


class Several(OneArchitecture):
    """Three tensor sets up: weights are averaged by examples and biases uniformly; the means are kept by device.

    faults: by device, what it does wrong.
    """

    params_type: ClassVar[type[Params]] = Params

    def __init__(self, setup: Setup, params: Params) -> None:
        super().__init__(setup, params)
        self.faults: dict[int, str] = {}
        self.sums: dict[str, tuple[Layout, WeightedSum]] = {}
        self.biases: Weights = {}
        self.means: dict[int, Weights] = {}
        self.trained: list[Trained] = []
        self.contributions: list[tuple[list[int], set[str], set[str]]] = []  # devices, sums, tensor sets by themselves

    def client_step(self, order: Order) -> ClientStep:
        """As the test wants it of this device."""
        return SeveralTensorSets(fault=self.faults.get(order.device, ""))

    def absorb(self, contribution: Contribution) -> None:
        """Add the sums up, and keep the rest."""
        self.contributions.append((contribution.devices, set(contribution.sums), set(contribution.each)))
        for name, total in contribution.sums.items():
            layout = contribution.group.returned[name].layout
            self.sums.setdefault(name, (layout, WeightedSum.zeros(layout)))[1].include(total)
        if contribution.each:
            [device] = contribution.devices
            self.means[device] = {name: value.clone() for name, value in contribution.own("means").items()}

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Both means, and the device with the most steps."""
        found: TensorSets = {}
        for name, (layout, total) in self.sums.items():
            mean = total.total.double() / (total.weight * SCALE)
            found[name] = {tensor: value.float() for tensor, value in split(mean, layout).items()}
        self.weights |= found.get("weights", {})
        self.biases |= found.get("biases", {})
        self.sums = {}
        self.trained = list(trained)
        return {"max_steps": max((done.facts["steps"][0] for done in trained), default=None)}

    def state(self) -> State:
        """All of it."""
        state = super().state()
        state.tensors |= {f"biases/{name}": value for name, value in self.biases.items()}
        for device, means in sorted(self.means.items()):
            state.tensors |= {f"means/{device}/{name}": value for name, value in means.items()}
        return state


# A tensor set up that has half of the bytes of the one down.


class HalfPrecision(Training):
    """Devices minimize the task's loss, and return their weights in half precision."""

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The weights as "half"."""
        tensors = family.tensors(architecture)
        half = {name: TensorSpec(spec.shape, torch.float16, spec.axes) for name, spec in tensors.items()}
        return {"half": TensorSet.of(half, Merge())}

    def train(self, context: ClientContext) -> Answer:
        """Train and round."""
        answer = super().train(context)
        rounded: dict[str, Tensor] = {name: value.half() for name, value in answer.tensor_sets["weights"].items()}
        return Answer(answer.model, {"half": rounded}, answer.loss)


class HalfUp(OneArchitecture):
    """FedAvg whose devices return half precision."""

    params_type: ClassVar[type[Params]] = Params

    def client_step(self, order: Order) -> ClientStep:
        """Half precision up."""
        return HalfPrecision()


# Something that devices keep.


class Counting(Training):
    """Devices minimize the task's loss, and count their rounds on themselves."""

    def facts(self, family: Family) -> dict[str, int]:
        """In how many rounds the device has trained."""
        return {"rounds": 1}

    def train(self, context: ClientContext) -> Answer:
        """Train and count."""
        answer = super().train(context)
        before = context.kept("rounds", per_architecture=False)
        count = torch.ones(1) if before is None else before["count"] + 1
        context.keep("rounds", {"count": count}, per_architecture=False)
        answer.facts = {"rounds": [float(count)]}
        return answer


class Counted(OneArchitecture):
    """FedAvg whose devices count. rounds: what each said last. gone: whose count was lost, in the order of loss."""

    params_type: ClassVar[type[Params]] = Params

    def __init__(self, setup: Setup, params: Params) -> None:
        super().__init__(setup, params)
        self.rounds: dict[int, float] = {}
        self.gone: list[int] = []

    def client_step(self, order: Order) -> ClientStep:
        """Counting."""
        return Counting()

    def lost(self, device: int) -> None:
        """Note it."""
        self.gone.append(device)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Note the counts."""
        self.rounds |= {done.device: done.facts["rounds"][0] for done in trained}
        return super().finish_round(trained)
