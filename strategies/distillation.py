"""In-place distillation: the server makes sub-models agree with the aggregated model, without any data.

Source: the paper of dynamic model search (`wildflower.strategies.model_search`), Algorithm 1 and Eq. 2, which do not
agree with each other; what is done here stands in `distill`, and `reading` chooses among three ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wildflower.messages.tensor_sets import STATISTICS, Weights
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.models.weights import trained_parameters, with_weights
from wildflower.plugins.flower_log import log
from wildflower.strategies.noise import Noise
from wildflower.strategies.params import Params, PositiveRate
from wildflower.strategies.submodel import Cut, SubModelMethod


class Distillation(Params):
    """In-place distillation of sub-models on the server after every round, by methods that cut one global model."""

    switch: ClassVar[str] = "steps"

    steps: Annotated[int, Field(ge=-1, lt=2**31)] = Field(
        -1,
        description="Adam's steps in the distillation after each round; 0: none; -1: the paper's 100 in model-search, "
        "none in other papers' methods",
    )
    reading: Literal["students", "frozen-teacher", "live-teacher"] = Field(
        "students",
        description="How Eq. 2 is read: sub-models learn by an Adam each, then their mean; or one Adam moves the "
        "global weights by the mean gradient, taught by those that came in (frozen) or those of the step (live)",
    )
    batch_size: Annotated[int, Field(ge=2)] = Field(64, description="Noise inputs per step of distillation")
    learning_rate: PositiveRate = Field(1e-3, description="Learning rate of distillation's Adam")
    schedule: Literal["constant", "as-training"] = Field(
        "constant", description="Whether that rate stays as it is, or falls as learning-rate does"
    )
    students: Literal["random", "with-smallest", "with-whole"] = Field(
        "random",
        description="Sub-models of which the mean is taken: random ones; with the smallest in place of one of them; or "
        "with the smallest and the whole model, which counts as it is and does not learn",
    )


class Distilled(NamedTuple):
    """The result of a distillation.

    weights: of the global model.
    steps_per_second: Adam's; None where every student equals the teacher.
    mutual_information_nats: between the noise and the class that the teacher gives it; None as above.
    """

    weights: Weights
    steps_per_second: float | None = None
    mutual_information_nats: float | None = None


def mutual_information_nats(said: Tensor) -> float:
    """Mutual information of input and class, H(mean of p) - mean of H(p), of log-probabilities (inputs, classes).

    0 where a model says the same of all inputs, ln(classes) where it is sure of each and says all classes as often.
    """
    p = said.exp()
    return float(torch.special.entr(p.mean(dim=0)).sum() - torch.special.entr(p).sum(dim=1).mean())


def distill_in_place(
    method: SubModelMethod, settings: Distillation, students: Sequence[Cut], rng: np.random.Generator
) -> dict[str, float | None]:
    """Distill a method's global model into its own sub-models; the round's weights stay where that diverges.

    Under `schedule = "as-training"` the learning rate falls with that of local training.

    Returns:
        The figures of the journal: steps per second, and how far the teacher told the noise apart.
    """
    if settings.schedule == "as-training":
        rate = settings.learning_rate * method.settings.rate_factor_in(method.round)
        settings = settings.model_copy(update={"learning_rate": rate})
    seed = int(rng.integers(2**63))
    teacher = method.scored_cut(method.scored_architecture)
    try:
        distilled = distill(method.family, method.weights, teacher, students, settings, seed)
    except FloatingPointError as error:
        log.warning("Round %s: %s; the round's weights stay undistilled", method.round, error)
        return {}
    method.weights = distilled.weights
    if distilled.mutual_information_nats is not None:
        text = "Round %s: %s sub-models distilled, %.1f steps/s, mutual information of noise and class %.3f nats"
        log.info(text, method.round, len(students), distilled.steps_per_second, distilled.mutual_information_nats)
    return {
        "distillation_steps_per_second": distilled.steps_per_second,
        "distillation_mutual_information_nats": distilled.mutual_information_nats,
    }


def distill(
    family: Family,
    weights: Weights,
    taught_by: Cut,
    students: Sequence[Cut],
    settings: Distillation,
    seed: int,
    noise: Noise | None = None,
) -> Distilled:
    """Distill the global model into its own sub-models, with normal x in place of images or embeddings (`Noise`).

    L_i = KL(softmax W(x) || softmax W_i(x)) for every student W_i that is cut out of W, the teacher W being constant.
    With `reading = "students"` each student takes T_SKD steps of Adam, and every coordinate that students have becomes
    the mean over them. Otherwise there are T_SKD steps of one Adam on W, along 1/n sum_i grad L_i (Eq. 2); the teacher
    stays the W that came in, or is the W of the step. Coordinates that no student has keep their value. A student that
    equals the teacher stays as it is: Adam would make steps of full size of what rounding leaves of its gradient.

    Both sides run in evaluation mode, without dropout; running statistics of batch norms are used and left as
    they are; static batch norms normalize by the batch, as they always do. A teacher that says the same of all noise
    teaches its sub-models to say it of everything, so how far it tells the noise apart is measured.

    Args:
        family: of the global model.
        weights: of the global model; not changed.
        taught_by: what of it teaches: the largest sub-model that devices are given, for nobody trains what lies beyond.
        students: the sub-models that learn.
        settings: the method's numbers.
        seed: what the inputs follow from.
        noise: where inputs come from; None: `Noise` of the family.

    Returns:
        The new global weights, and what was measured.

    Raises:
        FloatingPointError: the distillation diverged; names the tensor.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(seed)
    lessons = _Lessons(family, settings, noise or Noise(family, weights), generator, device)
    started = time.perf_counter()
    means = settings.reading == "students"
    result = (_means if means else _along_gradients)(lessons, weights, taught_by, students)
    seconds = time.perf_counter() - started
    for name, value in result.items():
        if not bool(torch.isfinite(value).all()):
            raise FloatingPointError(f"in-place distillation diverged in {name}: lower its learning rate")
    if not lessons.said:
        return Distilled(result)
    return Distilled(result, len(lessons.said) / seconds, mutual_information_nats(torch.cat(lessons.said)))


@dataclass
class _Lessons:
    """What lessons share, and in `said` what the teacher said in each: log-probabilities (inputs, classes)."""

    family: Family
    settings: Distillation
    noise: Noise
    generator: torch.Generator
    device: torch.device
    said: list[Tensor] = field(default_factory=list)

    def network(self, cut: Cut, own: Weights) -> Network:
        """Return a sub-model over its own weights, in evaluation mode."""
        return with_weights(self.family, cut[0], own).to(self.device).eval()

    def teacher(self, cut: Cut, weights: Weights) -> Callable[[Tensor], Tensor]:
        """Return how the teacher computes on noise."""
        return self.noise.reader(self.network(cut, cut[1].gather(weights)).requires_grad_(False), cut[1])

    def learn(self, teach: Callable[[Tensor], Tensor], learn: Callable[[Tensor], Tensor]) -> None:
        """Add the gradients of KL(teacher || student) on a new batch."""
        inputs = self.noise.draw(self.settings.batch_size, self.generator).to(self.device)
        with torch.no_grad():
            target = _rows(teach(inputs)).log_softmax(dim=1)
        self.said.append(target)
        F.kl_div(_rows(learn(inputs)).log_softmax(dim=1), target, reduction="batchmean", log_target=True).backward()


def _rows(logits: Tensor) -> Tensor:
    """Return logits (batch, classes); of (batch, classes, positions) each position, none of which is padding."""
    return logits.movedim(1, -1).flatten(0, -2)


def _means(lessons: _Lessons, weights: Weights, taught_by: Cut, students: Sequence[Cut]) -> Weights:
    """Every student by an Adam of its own; then the mean over those that have a coordinate."""
    teach, taught = lessons.teacher(taught_by, weights), taught_by[1].gather(weights)
    totals = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in weights.items()}
    counts = {name: torch.zeros(value.shape, dtype=torch.int64) for name, value in weights.items()}
    for cut in students:
        before = cut[1].gather(weights)
        if _equal(cut, before, taught_by, taught):
            state = before
        else:
            student = lessons.network(cut, before)
            learn = lessons.noise.reader(student, cut[1])
            optimizer = torch.optim.Adam(student.parameters(), lr=lessons.settings.learning_rate)
            for _ in range(lessons.settings.steps):
                optimizer.zero_grad()
                lessons.learn(teach, learn)
                optimizer.step()
            state = {name: value.detach().cpu() for name, value in student.state_dict().items()}
        cut[1].add_to(totals, {name: value.double() for name, value in state.items()})
        cut[1].add_weight(counts, 1)
    return {
        name: torch.where(counts[name] > 0, (totals[name] / counts[name].clamp(min=1)).to(old.dtype), old)
        for name, old in weights.items()
    }


def _along_gradients(lessons: _Lessons, weights: Weights, taught_by: Cut, students: Sequence[Cut]) -> Weights:
    """One Adam on the global weights, along the mean of all students' gradients (Eq. 2)."""
    held = {name: value.detach().clone() for name, value in weights.items()}
    learned = {
        name: nn.Parameter(value)  # in the same memory
        for name, value in held.items()
        if value.is_floating_point() and not name.endswith(STATISTICS) and not lessons.family.is_frozen(name)
    }
    optimizer = torch.optim.Adam(learned.values(), lr=lessons.settings.learning_rate)
    teach, taught = lessons.teacher(taught_by, held), taught_by[1].gather(held)
    for _ in range(lessons.settings.steps):
        gradients = {name: torch.zeros_like(value) for name, value in learned.items()}
        for cut in students:
            own = cut[1].gather(held)
            if _equal(cut, own, taught_by, taught):
                continue
            student = lessons.network(cut, own)
            lessons.learn(teach, lessons.noise.reader(student, cut[1]))
            found = trained_parameters(student).items()
            by_name = {name: p.grad.cpu() / len(students) for name, p in found if p.grad is not None}
            cut[1].of(by_name).add_to(gradients, by_name)
        for name, parameter in learned.items():
            parameter.grad = gradients[name]
        optimizer.step()
        if lessons.settings.reading == "live-teacher":
            teach, taught = lessons.teacher(taught_by, held), taught_by[1].gather(held)
    return held


def _equal(cut: Cut, own: Weights, other: Cut, others: Weights) -> bool:
    """Whether two cuts are one and the same model."""
    return cut[0] == other[0] and all(torch.equal(own[name], value) for name, value in others.items())
