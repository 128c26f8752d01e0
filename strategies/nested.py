"""Nested sub-models that share parameters: training several in one step, what that costs, and which to give a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise
from math import prod

from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from wildflower.messages.orders import Merge
from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import TensorSet
from wildflower.models.architecture import Architecture
from wildflower.models.base import STATISTICS, Family
from wildflower.models.cost import CONVOLUTION_KERNEL_BYTES, OPTIMIZERS, Convolution, Cost, cost
from wildflower.models.network import Network
from wildflower.models.placement import Coordinates
from wildflower.models.weights import with_weights
from wildflower.plugins.raised_as import raised_as
from wildflower.strategies.method import ClientContext
from wildflower.strategies.static_norm import MaskedTraining, masked

MOST_LEVELS = 64
"""Nested sub-models that a device trains in a step, its own included."""


class NestedTraining(MaskedTraining):
    """Training of a sub-model and of smaller ones that are cut out of it, in the same steps.

    lower: the smaller ones, largest first; each is a cut of the one before.
    masked: whether logits of classes that the device does not hold are 0, as HeteroFL's.
    """

    lower: tuple[Architecture, ...] = Field(max_length=MOST_LEVELS - 1)
    masked: bool = True

    @property
    def needs_classes(self) -> bool:
        """Where it masks those that a device does not hold."""
        return self.masked

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """All tensors of the sub-model; with the mask, rows of absent classes do not count."""
        merge = Merge(weighting=self.weighting, present_classes=self.masked)
        return {"weights": TensorSet.of(family.tensors(architecture), merge)}

    def masking(self, context: ClientContext, model: nn.Module) -> nn.Module:
        """Return a model whose logits are masked, or left as they are."""
        return masked(context, model) if self.masked else model

    def scored(self, context: ClientContext, model: Network) -> nn.Module:
        """On its own examples a device's model is masked as it was trained."""
        return self.masking(context, model)


class LeadingCut(nn.Module):
    """A smaller sub-model that computes with the leading slices of a model's parameters.

    It has no parameters of its own, so that its gradients arrive in those of the model. Buffers that are not part of
    its state are those of a fresh sub-model.
    """

    def __init__(self, model: Network, family: Family, whole: Architecture, architecture: Architecture) -> None:
        super().__init__()
        coordinates = family.place(architecture).within(family.place(whole))
        own = {name: tensor[coordinates[name]] for name, tensor in model.state_dict().items() if name in coordinates}
        # By the module's own `train`, which may leave parts in evaluation.
        self.cut = with_weights(family, architecture, own).train()
        if (device := next(model.parameters()).device).type != "cpu":  # what it has beside the slices
            self.cut.to(device)
        taken: dict[Tensor, list[str]] = {}  # a tensor that several of its modules share has several names
        for path, part in self.cut.named_modules():
            for table, its_own in ((part._parameters, ()), (part._buffers, part._non_persistent_buffers_set)):
                for name, tensor in table.items():
                    if tensor is not None and name not in its_own:
                        taken.setdefault(tensor, []).append(f"{path}.{name}" if path else name)
                        table[name] = None

        # By the names of the cut's tensors: of the model's the name, and the coordinates in it.
        self.parts: dict[str, tuple[str, tuple[Coordinates, ...]]] = {}
        for names in taken.values():
            known = next(name for name in names if name in coordinates)
            self.parts |= dict.fromkeys(names, (known, coordinates[known]))

        def slices() -> dict[str, Tensor]:
            whole_state = dict(chain(model.named_parameters(), model.named_buffers()))
            found: dict[str, Tensor] = {}
            for known, where in self.parts.values():
                found[known] = found[known] if known in found else whole_state[known][where]
            return {name: found[known] for name, (known, _) in self.parts.items()}

        self.slices = slices  # and not the model, which would become a part of this module

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, *input shape) -> logits."""
        logits: Tensor = functional_call(self.cut, self.slices(), (inputs,), tie_weights=False)
        return logits


def cuts_below(context: ClientContext, model: Network, lower: Sequence[Architecture], what: str) -> list[LeadingCut]:
    """The `LeadingCut` of each of some smaller sub-models, which come largest first.

    Args:
        context: where the device trains.
        model: its own sub-model.
        lower: the smaller ones; each is a cut of the one before, and the first of the device's own.
        what: what a message calls them.

    Raises:
        MessageError: one is no cut, or they would mix their batch norm statistics.
    """
    family, own = context.family, context.architecture
    for larger, level in pairwise((own, *lower)):
        with raised_as(MessageError, f"{what}: one is no sub-model: "):
            family.validate(level)
        if not is_cut(family, level, larger):
            raise MessageError(f"{what}: each must be a cut of the one above it, and {level} is none of {larger}")
    if lower:
        check_no_statistics(family, own, what)
    return [LeadingCut(model, family, own, level) for level in lower]


def check_no_statistics(family: Family, architecture: Architecture, what: str) -> None:
    """MessageError where an architecture keeps batch norm statistics, which nested sub-models would mix."""
    found = next((name for name in family.tensors(architecture) if name.endswith(STATISTICS)), None)
    if found is None:
        return
    if getattr(family, "norm", "batch") == "static":
        raise MessageError(
            f"{what} would mix their running statistics, such as {found}: norm = 'static' leaves out those of "
            "PyTorch's norms in training mode, and this one is of another class, or stays in evaluation mode: take a "
            "norm without statistics there, such as nn.GroupNorm"
        )
    raise MessageError(
        f"{what} would mix their batch norm statistics: use norm = 'static', or in a module of your own a norm without "
        "statistics, such as nn.GroupNorm"
    )


@lru_cache(maxsize=16384)
def is_cut(family: Family, smaller: Architecture, larger: Architecture) -> bool:
    """Return whether every tensor of one architecture is a part of the larger one's tensor of that name."""
    if smaller == larger:
        return False
    outer = family.tensors(larger)
    return all(
        name in outer and all(size <= limit for size, limit in zip(spec.shape, outer[name].shape, strict=True))
        for name, spec in family.tensors(smaller).items()
    )


@lru_cache(maxsize=4096)
def convolutions(family: Family, architecture: Architecture) -> frozenset[Convolution]:
    """The distinct convolutions of an architecture, for each of which code is compiled."""
    return frozenset(family.convolutions(architecture))


@lru_cache(maxsize=16384)
def step_bytes(
    family: Family,
    whole: Architecture,
    cut: Architecture,
    *,
    batch_size: int,
    optimizer: str,
    gradients_held: bool,
) -> int:
    """Peak memory in bytes of one step of a `LeadingCut`, without the compiled convolutions.

    A cut has the activations of its own size, but weights, gradients and optimizer state of the whole, and two tensors
    as large as the largest parameter while a slice's gradient is written into the whole one's.

    Args:
        gradients_held: whether all gradients of the whole are there before the cut begins. `cost` has let the cut's
            pile up; here they are added to those of the whole at once.
    """
    own = cost(family, cut, batch_size=batch_size, optimizer=optimizer)
    parameters = cost(family, whole, batch_size=batch_size, optimizer=optimizer).parameters
    largest = max(prod(spec.shape) for spec in family.tensors(whole).values())
    kept = OPTIMIZERS[optimizer]
    gradients = 0 if kept.accumulates else 1  # those of micro-batches go into a sum, which is one of the copies
    extra = (kept.copies + gradients) * (parameters - own.parameters) + 2 * largest
    if gradients_held:
        extra += gradients * own.parameters
    kernels = len(convolutions(family, cut))
    return own.peak_training_memory_bytes - CONVOLUTION_KERNEL_BYTES * kernels + own.entry_bytes * extra


@lru_cache(maxsize=16384)
def training_cost(
    family: Family, architecture: Architecture, lower: tuple[Architecture, ...], batch_size: int, optimizer: str
) -> Cost:
    """Return what training an architecture and some lower levels in every step costs: more than training it alone.

    Memory is that of the dearest part of a step. The own level's is that of training it alone; in the others' all
    gradients are there already (`wildflower.strategies.nested.step_bytes`). Compiled convolutions of all levels are
    kept. FLOPs are the sum. Parameters and payload are the architecture's.
    """
    whole = cost(family, architecture, batch_size=batch_size, optimizer=optimizer)
    if not lower:
        return whole
    kernels = [convolutions(family, level) for level in (architecture, *lower)]
    alone_bytes = whole.peak_training_memory_bytes - CONVOLUTION_KERNEL_BYTES * len(kernels[0])
    lower_bytes = [
        step_bytes(family, architecture, level, batch_size=batch_size, optimizer=optimizer, gradients_held=True)
        for level in lower
    ]
    flops = [cost(family, level, batch_size=batch_size, optimizer=optimizer).training_flops for level in lower]
    return replace(
        whole,
        peak_training_memory_bytes=max(alone_bytes, *lower_bytes)
        + CONVOLUTION_KERNEL_BYTES * len(frozenset().union(*kernels)),
        training_flops=whole.training_flops + sum(flops),
    )
