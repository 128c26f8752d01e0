"""Ensemble distillation: the server's model learns on public data what the devices' networks say together.

Source: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, Eq. 1 and
Algorithm 1; RaFL's Eqs. 8 and 9 are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wildflower.messages.sums import SCALE, WeightedSum
from wildflower.messages.tensor_sets import Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.weights import with_weights
from wildflower.plugins.flower_log import log
from wildflower.strategies.params import Count, Params, PositiveRate
from wildflower.strategies.shared_losses import divergence
from wildflower.tasks.inputs import in_layout, laid_out_for
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.public import PublicData

TOGETHER = 256  # public examples that a network reads at once where it does not learn
HELD_OUT = 0.1  # share of the public examples that say when to stop
CHECK_STEPS = 100  # steps between looks at the examples that are held out


class Ensemble(Params):
    """Ensemble distillation on the server after every round, by methods whose server learns from public data."""

    steps: Count = Field(10_000, description="Most steps of Adam in the ensemble distillation after each round")
    batch_size: Annotated[int, Field(ge=2, lt=2**31)] = Field(
        128, description="Public examples per step of ensemble distillation"
    )
    learning_rate: PositiveRate = Field(
        1e-3, description="Learning rate of ensemble distillation's Adam, which falls to 0 along a cosine"
    )
    patience: Count = Field(
        1000, description="Steps without a better loss on the held-out public examples after which distillation stops"
    )


class Teachers:
    """The sum of what the devices' networks say of the public data.

    Logits are added up as whole numbers, because networks arrive in any order. Of each no more is held than what it
    said, so that memory is that of one network and of one sum, whatever the number of devices.
    """

    def __init__(self, public: PublicData, classes: int) -> None:
        self.public = public
        self._shape = len(public), classes, *public.positions
        self._sum = self._empty()

    def _empty(self) -> WeightedSum:
        return WeightedSum(torch.zeros(math.prod(self._shape), dtype=torch.int64))

    @property
    def count(self) -> int:
        """Return how many networks there are."""
        return self._sum.weight

    def add(self, model: nn.Module) -> None:
        """Add a network's logits; MessageError, and nothing is added, where they are not finite or far too large."""
        self._sum.add(logits_of(model, self.public).flatten(), 1)

    def take_mean(self) -> Tensor:
        """The mean logits, (public examples, classes, *positions); RaFL's Eq. 8. Then start over."""
        mean = (self._sum.total.double() / (self._sum.weight * SCALE)).float().view(self._shape)
        self._sum = self._empty()
        return mean


def logits_of(model: nn.Module, public: PublicData) -> Tensor:
    """Return what a model says of all public examples in evaluation mode, (public examples, classes), on the CPU.

    Where it answers for every position, these come behind, and it says 0 of padding.
    """
    device = _device()
    model = model.to(device).eval()
    said = []
    with torch.no_grad():
        for picked in torch.arange(len(public)).split(TOGETHER):
            logits, tags = model(laid_out_for(model, public.batch(picked)).to(device)).cpu(), public.tags(picked)
            if tags is not None:  # texts are cut to the longest of a batch
                logits = logits.masked_fill((tags == NO_LABEL).unsqueeze(1), 0.0)
                logits = F.pad(logits, (0, public.inputs.shape[-1] - logits.shape[-1]))
            said.append(logits)
    return torch.cat(said)


def teach(
    family: Family,
    architecture: Architecture,
    weights: Weights,
    teachers: Tensor,
    public: PublicData,
    settings: Ensemble,
    seed: int,
    layout: str,
) -> tuple[Weights, dict[str, float | None]]:
    """Teach a network what the teachers say together, beginning with the weights that it has.

    Every step lowers L_d = KL(softmax(teachers(x)) || softmax(student(x))), the mean over a batch of public examples,
    at temperature 1; where models answer for every position, an example's is the mean over those without padding. Of
    the networks that it looked at, every `CHECK_STEPS` steps and at the end, the one with the least loss on the
    held-out examples is taken, also where that is the one it began with.

    Args:
        family, architecture: of the student.
        weights: that it begins with; not changed.
        teachers: mean logits, (public examples, classes, *positions).
        public: the public data.
        settings: the numbers of the distillation.
        seed: what the order of the examples follows from.
        layout: of images in the student's steps; the run's `layout`.

    Returns:
        The student's weights, which stay as they are where it diverges; and for the journal the steps of Adam, and
        KL(teachers || student) of the held-out examples, or without any of all, in nats, before and after.
    """
    generator = torch.Generator().manual_seed(seed)
    device = _device()
    student = with_weights(family, architecture, {n: v.clone() for n, v in weights.items()}).to(device)
    order = torch.randperm(len(public), generator=generator)
    checked, learned = order.split([held := round(HELD_OUT * len(order)), len(order) - held])
    target = teachers.log_softmax(dim=1)

    def loss_of(picked: Tensor, inputs: Tensor) -> Tensor:
        tags, wanted = public.tags(picked), target[picked]
        if tags is not None:
            tags, wanted = tags.to(device), wanted[..., : tags.shape[1]]
        return divergence(wanted.to(device), student(inputs.to(device)).log_softmax(dim=1), tags)

    def look() -> float:
        student.eval()
        with torch.no_grad():
            parts = (checked if len(checked) else learned).split(TOGETHER)
            losses = [float(loss_of(part, laid_out_for(student, public.batch(part)))) * len(part) for part in parts]
            return math.fsum(losses) / sum(map(len, parts))

    def copy() -> Weights:
        return {name: value.detach().cpu().clone() for name, value in student.state_dict().items()}

    adam = torch.optim.Adam(student.parameters(), lr=settings.learning_rate)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, settings.steps)
    before = least = look()
    best, best_step, step = copy(), 0, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the student's dropout
        for step, picked in enumerate(_batches(learned, settings, generator), start=1):
            student.train()
            adam.zero_grad(set_to_none=True)
            loss_of(picked, in_layout(public.batch(picked), layout)).backward()
            adam.step()
            cosine.step()
            if step % CHECK_STEPS and step < settings.steps:
                continue
            found = look()
            if not math.isfinite(found):
                log.warning("ensemble distillation diverged: lower ensemble.learning-rate; the averaged weights stay")
                return weights, _figures(0, None, None)
            if found < least or not len(checked):
                best, best_step, least = copy(), step, found
            elif step - best_step >= settings.patience:
                break
    return best, _figures(step, before, least)


def _figures(steps: int, before: float | None, after: float | None) -> dict[str, float | None]:
    return {
        "ensemble_steps": steps,
        "ensemble_loss_before_nats": before,
        "ensemble_loss_after_nats": after,
    }


def _batches(learned: Tensor, settings: Ensemble, generator: torch.Generator) -> Iterator[Tensor]:
    """As many batches as there are steps, of shuffled passes over the examples; what a pass leaves over is dropped."""
    size, done = min(settings.batch_size, len(learned)), 0
    while True:
        shuffled = learned[torch.randperm(len(learned), generator=generator)]
        for start in range(0, len(shuffled) - size + 1, size):
            if done == settings.steps:
                return
            yield shuffled[start : start + size]
            done += 1


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def require_public(setting: str, public: PublicData | None) -> PublicData:
    """The run's public data; ValueError where a setting needs some and the run has none, or too few."""
    if public is None:
        raise ValueError(
            f"{setting} learns from public data, and the run has none: set public.task to a task whose inputs are of "
            "the same shape"
        )
    if len(public) < 4:
        raise ValueError(f"{setting} learns from public data, and {len(public)} examples are too few: at least 4")
    return public
