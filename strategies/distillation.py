"""In-place distillation: the server makes sub-models agree with the aggregated model, without any data.

Source: the paper of dynamic model search (`wildflower.strategies.model_search`), Algorithm 1 and Eq. 2, which do not
agree with each other; what is done here stands in `distill`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wildflower.messages.tensor_sets import Weights
from wildflower.models.base import Family
from wildflower.models.placement import Placement
from wildflower.models.weights import with_weights
from wildflower.strategies.params import CountOrZero, Params, PositiveRate
from wildflower.strategies.submodel import Cut, SubModelMethod

log = logging.getLogger("flwr")  # what Flower's own log is called


class Distillation(Params):
    """In-place distillation of sub-models on the server after every round, by methods that cut one global model."""

    switch: ClassVar[str] = "steps"

    steps: CountOrZero = Field(
        0, description="Adam's steps per sub-model in the distillation after each round (paper: 100); 0: none"
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
    """Distill the global model into its own sub-models, and average them back into it.

    For every student i, cut out of W: T_SKD steps of Adam on KL(softmax W(x) || softmax W_i(x)), with normal x in place
    of images, or of token embeddings (`Noise`). The teacher is the W that came in, frozen. Then every coordinate that
    students have becomes the mean over them; the others keep their value. A student that equals the teacher stays as it
    is: Adam would make steps of full size of what rounding leaves of its gradient.

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
    whole, place = taught_by
    teacher = with_weights(family, whole, place.gather(weights)).to(device).eval().requires_grad_(False)
    noise = noise or Noise(family, weights)
    teach = noise.reader(teacher, place)
    totals = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in weights.items()}
    counts = {name: torch.zeros(value.shape, dtype=torch.int64) for name, value in weights.items()}
    started = time.perf_counter()
    taught = place.gather(weights)
    said = []
    for architecture, placement in students:
        before = placement.gather(weights)
        if architecture == whole and all(torch.equal(before[name], value) for name, value in taught.items()):
            placement.add_to(totals, {name: value.double() for name, value in before.items()})
            placement.add_weight(counts, 1)
            continue
        student = with_weights(family, architecture, before).to(device).eval()
        learn = noise.reader(student, placement)
        optimizer = torch.optim.Adam(student.parameters(), lr=settings.learning_rate)
        for _ in range(settings.steps):
            inputs = noise.draw(settings.batch_size, generator).to(device)
            with torch.no_grad():
                target = teach(inputs).log_softmax(dim=1)
            said.append(target)
            loss = F.kl_div(learn(inputs).log_softmax(dim=1), target, reduction="batchmean", log_target=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {name: value.detach().cpu().double() for name, value in student.state_dict().items()}
        for name, value in state.items():
            if not bool(torch.isfinite(value).all()):
                raise FloatingPointError(f"in-place distillation diverged in {name}: lower its learning rate")
        placement.add_to(totals, state)
        placement.add_weight(counts, 1)
    seconds = time.perf_counter() - started
    result = {
        name: torch.where(counts[name] > 0, (totals[name] / counts[name].clamp(min=1)).to(old.dtype), old)
        for name, old in weights.items()
    }
    return (
        Distilled(result, len(said) / seconds, mutual_information_nats(torch.cat(said))) if said else Distilled(result)
    )


class Noise:
    """Normal inputs of a family: images of N(0, 1), or what stands in place of token embeddings.

    Channels of the latter have the mean and the spread that the global model's embeddings have over all tokens: learned
    embeddings are small beside N(0, 1), and so are those of positions, which are added to them.
    """

    def __init__(self, family: Family, weights: Weights) -> None:
        modules = family.without_memory(family.full()).named_modules()
        self._embedding = next((name for name, module in modules if isinstance(module, nn.Embedding)), None)
        self._shape, self._mean, self._spread = family.input_shape, torch.zeros(()), torch.ones(())
        if self._embedding is not None:
            table = weights[f"{self._embedding}.weight"]
            self._shape = (*self._shape, table.shape[1])
            self._mean, self._spread = table.mean(dim=0), table.std(dim=0)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return noise of (count, *an image's shape), or (count, positions, channels of the whole embedding)."""
        return self._mean + self._spread * torch.randn(count, *self._shape, generator=generator)

    def reader(self, model: nn.Module, placement: Placement) -> Callable[[Tensor], Tensor]:
        """Return how a (sub-)model computes on it; of embeddings it reads the channels that it has."""
        if self._embedding is None:
            return model
        embedding = model.get_submodule(self._embedding)
        channels = placement.coordinates[f"{self._embedding}.weight"][1]

        def compute(noise: Tensor) -> Tensor:
            hook = embedding.register_forward_hook(lambda *_: noise[..., channels])
            try:
                return model(torch.zeros(noise.shape[:2], dtype=torch.int64, device=noise.device))
            finally:
                hook.remove()

        return compute
