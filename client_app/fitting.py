"""The training of one model on this machine: optimizer, regularizer, and the loop over the batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from wildflower.client_app.batches import micro_batches
from wildflower.client_app.sgd import Sgd
from wildflower.messages.orders import LocalTraining
from wildflower.models.layers import mean_statistics
from wildflower.models.network import Network
from wildflower.models.weights import trained_parameters
from wildflower.strategies.shared_losses import Loss, Regularizer


@dataclass(frozen=True)
class Fit:
    """One training of a model on one device.

    Attributes:
        loss: mean loss of a batch, from inputs and labels.
        start: returns the numbers of the examples of every batch, each time from the first one on.
        examples_of: the inputs and labels of some examples.
        data: names what the examples are taken from. Trainings with the same name can take theirs together, by the
            `examples_of` of any of them; None: each takes its own.
        examples: how many there are.
        regularizer: is added to the loss.
        new_statistics: as of `wildflower.strategies.method.ClientContext.fit`.
        rate: how many times the run's learning rate the model is trained with.
        factors: as of `wildflower.strategies.method.ClientContext.fit`.
        kind: the client step's name first, what trainings have in common whose losses compute the same of their tensors
            and batches; None: they are not replayed (`wildflower.client_app.captured_step`).
        memory_bytes: what the training is predicted to take.
    """

    model: Network
    loss: Loss
    start: Callable[[], Iterator[Tensor]]
    examples_of: Callable[[Tensor], tuple[Tensor, Tensor]]
    examples: int
    training: LocalTraining
    device: torch.device
    regularizer: Regularizer | None = None
    new_statistics: bool = False
    rate: float = 1.0
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    kind: tuple[Hashable, ...] | None = None
    memory_bytes: int = 0
    data: Hashable = None

    @property
    def batches(self) -> int:
        """Return how many batches there are, up to a factor that all trainings of one kind have."""
        return 1 if self.training.steps else -(-self.examples // self.training.batch_size)

    def alone(self) -> float:
        """Train this model and no other, in place, and return the mean loss over the examples seen."""
        return fit_here(self)


def optimizer_of(
    parameters: Mapping[str, nn.Parameter], training: LocalTraining, device: torch.device, rate: float = 1.0
) -> torch.optim.Optimizer:
    """Return the run's optimizer of a model's parameters, with `rate` times its learning rate."""
    rate, decay = rate * training.learning_rate, training.weight_decay
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(training.rate_of(name), []).append(parameter)
    parts = [{"params": parameters, "lr": rate * multiple} for multiple, parameters in groups.items()]
    if training.optimizer == "sgd" and device.type == "cpu":
        return Sgd(parts, momentum=training.momentum, weight_decay=decay)
    if training.optimizer == "sgd":
        return torch.optim.SGD(parts, lr=rate, momentum=training.momentum, weight_decay=decay)
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    # Where it is not fused, PyTorch chooses by the device.
    return kind(parts, lr=rate, betas=training.betas, weight_decay=decay, fused=True if training.fused else None)


def fit_here(fit: Fit) -> float:
    """Train a model, in place, and return the mean loss over the examples seen."""
    model, training = fit.model, fit.training
    parameters = trained_parameters(model)
    optimizer = optimizer_of(parameters, training, fit.device, fit.rate)
    regularize = None if fit.regularizer is None else regularizing(model, fit.regularizer)
    model.train()
    seen, total = 0, torch.zeros((), dtype=torch.float64)
    with ExitStack() as during:
        # Running statistics begin as the mean over the first batches, and not with 0 and 1, from which a few batches
        # would not lead away.
        if fit.new_statistics:
            during.enter_context(mean_statistics(model, least=0.1))
        for name in parameters.keys() & fit.factors:
            factors = fit.factors[name].to(parameters[name].dtype)
            during.enter_context(parameters[name].register_hook(partial(torch.mul, factors)))
        for picked in fit.start():
            optimizer.zero_grad(set_to_none=True)
            beside = None if regularize is None else regularize()
            parts = micro_batches(picked, training.examples_at_once)
            value = _add_mean_gradient(model, fit.loss, parts, fit.examples_of)
            if beside is not None:
                value = value + beside
            if training.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
            optimizer.step()
            examples = sum(map(len, parts))
            seen += examples
            total += value.to("cpu", torch.float64) * examples
    model.zero_grad(set_to_none=True)  # they would be held for nothing where the model is scored or teaches
    return float(total) / max(1, seen)


def _add_mean_gradient(
    model: nn.Module, loss: Loss, parts: Sequence[Tensor], examples_of: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """Add the gradient of the mean loss of a batch to `.grad`, and return that loss.

    What `.grad` holds is scaled so that the gradient of each micro-batch, which is of a mean over fewer examples, can
    be added to it as it is.
    """
    if len(parts) == 1:
        value = loss(*examples_of(parts[0]))
        value.backward()
        return value.detach()
    examples = before = sum(map(len, parts))
    losses = []
    for part in parts:
        scale_gradients(model, before / len(part))
        value = loss(*examples_of(part))
        value.backward()
        losses.append(value.detach() * len(part))
        before = len(part)
    scale_gradients(model, before / examples)
    return sum(losses, start=torch.zeros_like(losses[0])) / examples


def regularizing(model: Network, regularizer: Regularizer) -> Callable[[], Tensor | None]:
    """Return a function that sets `.grad` to the regularizer's gradient and returns its value if that is reported."""
    received: Mapping[str, Tensor] = {}
    if regularizer.strength:
        received = regularizer.toward or {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    correction = {
        name: regularizer.correction[name].to(p.device)
        for name, p in trained_parameters(model).items()
        if name in regularizer.correction
    }

    def regularize() -> Tensor | None:
        # In `.grad`, and not as terms of the loss: those would hold a copy of all parameters more.
        distances = []
        for name, parameter in trained_parameters(model).items():
            if received:
                moved = parameter.detach() - received[name]
                if regularizer.reported:
                    distances.append(moved.square().sum())
                parameter.grad = moved.mul_(regularizer.strength)
                if name in correction:
                    parameter.grad -= correction[name]
            elif name in correction:
                parameter.grad = correction[name].neg()
        return regularizer.strength / 2 * torch.stack(distances).sum() if distances else None

    return regularize


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply all gradients of a model, in place."""
    if factor != 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
