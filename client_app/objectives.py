"""Local objectives: what a device minimizes, as functions of (model, inputs, labels)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from messages.orders import Objective
from messages.packing import MessageError
from models.architecture import Architecture
from models.base import Family
from models.layers import Network

# (inputs, labels) -> mean loss of the batch, still to be differentiated; what it differentiated itself is in `.grad`.
Loss = Callable[[Tensor, Tensor], Tensor]


class Masked(nn.Module):
    """A model whose logits of classes that a device does not hold are 0, as HeteroFL trains and tests on devices.

    They are 0, as in the original, and not minus infinity: absent classes still take part in the softmax.
    """

    absent: Tensor

    def __init__(self, model: nn.Module, present: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("absent", ~present)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, *input shape) -> (batch, classes)."""
        logits: Tensor = self.model(inputs)
        return logits.masked_fill(self.absent, 0.0)


def local_loss(
    objective: Objective,
    model: Network,
    present: Tensor,
    family: Family,
    architecture: Architecture,
    seed: int,
    teacher: Network | None = None,
) -> Loss:
    """The loss function of a work order. It is called once per step, between zeroing and applying gradients.

    Args:
        model: with the weights as they were received (FedProx keeps a copy of them).
        present: the classes that the device holds (bool, one per class).
        family: of the model, and `architecture`: which of its sub-models it is.
        seed: what an objective with chance in it draws from.
        teacher: a trained model that is constant and in evaluation mode, where the work order names one.

    Raises:
        MessageError: the objective does not go with the model.
    """
    match objective.kind:
        case "cross entropy" | "batch norm statistics":
            return lambda inputs, labels: F.cross_entropy(model(inputs), labels)
        case "masked cross entropy":
            masked = Masked(model, present)
            return lambda inputs, labels: F.cross_entropy(masked(inputs), labels)
        case "sum of exits":

            def sum_of_exits(inputs: Tensor, labels: Tensor) -> Tensor:
                return torch.stack([F.cross_entropy(logits, labels) for logits in model.exits(inputs)]).sum()

            return sum_of_exits
        case "mutual learning of exits":
            return _mutual_learning(objective.weight, model)
        case "weighted exits":
            return _weighted_exits(objective.gamma, objective.temperature, model)
        case "proximal":
            received = [p.detach().clone() for p in model.parameters()]

            def proximal(inputs: Tensor, labels: Tensor) -> Tensor:
                pairs = zip(model.parameters(), received, strict=True)
                distance = torch.stack([(p - r).square().sum() for p, r in pairs]).sum()
                return F.cross_entropy(model(inputs), labels) + objective.mu / 2 * distance

            return proximal
        case "taught":
            if teacher is None:
                raise MessageError("the objective 'taught' needs a teacher, and the work order names none")
            return _taught(objective.divergence, model, teacher)
        case "ordered dropout":
            return _ordered_dropout(objective, model, family, architecture, seed)
    raise ValueError(f"no objective is called {objective.kind!r}")


def _taught(divergence: str, model: Network, teacher: Network) -> Loss:
    """RecipFL's local loss of a small model S with a large one L (Eq. 9), T = 1 and all weights 1.

    L = CE(S(x), y) + CE(S(x), softmax L(x)) + KL(p_S || p_L), p being softmaxes of what the classifiers read; where
    that has not the same size in both models the last term is left out.
    """
    student_reads, teacher_reads = _read_by_the_classifier(model), _read_by_the_classifier(teacher)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(inputs).softmax(dim=1)
        logits = model(inputs)
        total = F.cross_entropy(logits, labels) + F.cross_entropy(logits, target)
        read, known = student_reads.pop(), teacher_reads.pop()
        if read.shape != known.shape:
            return total
        student, known = F.log_softmax(read, dim=1), F.log_softmax(known, dim=1)
        pair = (student, known) if divergence == "student || teacher" else (known, student)
        return total + _divergence(*pair)

    return loss


def _read_by_the_classifier(model: Network) -> list[Tensor]:
    """A list that holds, after every forward pass, what the last linear layer read in it."""
    reads: list[Tensor] = []
    classifier = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    classifier.register_forward_pre_hook(lambda _, read: reads.__setitem__(slice(None), [read[0]]))
    return reads


def _mutual_learning(weight: float, model: Network) -> Loss:
    """DepthFL's local loss: L = sum_i (CE_i + w / (K - 1) sum_{j != i} KL(p_j || p_i)), p_j being constant."""

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        exits = [F.log_softmax(logits, dim=1) for logits in model.exits(inputs)]
        own = torch.stack([F.nll_loss(exit, labels) for exit in exits]).sum()
        if len(exits) == 1:
            return own
        pairs = [_divergence(other.detach(), exit) for other, exit in itertools.permutations(exits, 2)]
        return own + weight / (len(exits) - 1) * torch.stack(pairs).sum()

    return loss


def _weighted_exits(gamma: float, temperature: float, model: Network) -> Loss:
    """ScaleFL's local loss: L = 2 / (K (K + 1)) (sum_j j CE_j + sum_{j < K} j gamma T^2 KL(p_K || p_j)), at T."""

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        exits = model.exits(inputs)
        terms = [F.cross_entropy(logits, labels) for logits in exits]
        if gamma:
            *early, last = [F.log_softmax(logits / temperature, dim=1) for logits in exits]
            for number, exit in enumerate(early):
                terms[number] = terms[number] + gamma * temperature**2 * _divergence(last, exit)
        total = torch.stack([number * term for number, term in enumerate(terms, start=1)]).sum()
        return total / (len(exits) * (len(exits) + 1) / 2)

    return loss


def _divergence(target: Tensor, prediction: Tensor) -> Tensor:
    """KL(target || prediction) of log-probabilities, the mean over the batch."""
    return F.kl_div(prediction, target, reduction="batchmean", log_target=True)


def _ordered_dropout(
    objective: Objective, model: Network, family: Family, architecture: Architecture, seed: int
) -> Loss:
    """FjORD's local loss: the leading cut of a width p drawn uniformly for every batch, of shared parameters.

    A cut is a sub-model without tensors of its own that computes with the leading slices of the model's parameters, so
    that its gradients arrive in them. With distillation, L = CE(F_max(x), y) + CE(F_p(x), softmax F_max(x)), the second
    softmax being constant (Horvath et al. 2021, with their alpha = T = 1). The first term is differentiated
    before the second is computed: a device never holds the activations of both.
    """
    if architecture != family.width(objective.widths[-1]):
        raise MessageError(f"ordered dropout up to width {objective.widths[-1]} is not training of {architecture}")
    if next(model.buffers(), None) is not None:
        raise MessageError("ordered dropout would mix the batch norm statistics of all widths: use norm = 'static'")
    cuts: dict[float, Callable[[Tensor], Tensor]] = {objective.widths[-1]: model}
    for width in objective.widths[:-1]:
        cuts[width] = _leading_cut(model, family, family.width(width))
    rng = random.Random(seed)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        cut = cuts[rng.choice(objective.widths)]
        if not objective.distillation:
            return F.cross_entropy(cut(inputs), labels)
        logits = model(inputs)
        own = F.cross_entropy(logits, labels)
        if cut is model:  # it agrees with itself
            return own
        target = logits.detach().softmax(dim=1)
        del logits
        own.backward()
        return own.detach() + F.cross_entropy(cut(inputs), target)

    return loss


def _leading_cut(model: Network, family: Family, architecture: Architecture) -> Callable[[Tensor], Tensor]:
    """A narrower sub-model that computes with the leading slices of the model's parameters."""
    with torch.device("meta"):
        cut = family.build(architecture)
    coordinates = family.place(architecture).coordinates

    def compute(inputs: Tensor) -> Tensor:
        slices = {name: p[coordinates[name]] for name, p in model.named_parameters() if name in coordinates}
        logits: Tensor = functional_call(cut, slices, (inputs,))
        return logits

    return compute
