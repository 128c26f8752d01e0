"""In-place distillation: the server makes sub-models agree with the aggregated model, without any data.

Source: "Revisiting System-Heterogeneous Federated Learning through Dynamic Model Search", Algorithm 1 and Eq. 2, which
do not agree with each other; what is done here stands in `distill`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.architecture import Architecture
from models.base import Family, with_weights
from models.placement import Placement
from strategies.work import Weights


@dataclass(frozen=True)
class Distillation:
    """steps: T_SKD, Adam's steps of every sub-model; batch_size: K, inputs per step; learning_rate: of Adam."""

    steps: int = 100
    batch_size: int = 64
    learning_rate: float = 1e-3


def distill(
    family: Family,
    weights: Weights,
    whole: Architecture,
    students: Sequence[tuple[Architecture, Placement]],
    settings: Distillation,
    seed: int,
) -> tuple[Weights, float]:
    """Distill the global model into its own sub-models, and average them back into it.

    For every student i, cut out of W: T_SKD steps of Adam on KL(softmax W(x) || softmax W_i(x)), with x ~ N(0, 1) in
    place of images, or of token embeddings. The teacher is the W that came in, frozen. Then every coordinate that
    students have becomes the mean over them; the others keep their value.

    Both sides run in evaluation mode, without dropout; running statistics of batch norms are used and left as
    they are; static batch norms normalize by the batch, as they always do.

    Args:
        family: of the global model.
        weights: of the global model; not changed.
        whole: what of it teaches: the largest architecture that devices are given, for nobody trains what lies beyond.
        students: the sub-models, and where they lie in the global one.
        settings: the method's numbers.
        seed: what the inputs follow from.

    Returns:
        The new global weights, and Adam's steps per second.

    Raises:
        FloatingPointError: the distillation diverged; names the tensor.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(seed)
    place = family.place(whole)
    teacher = with_weights(family, whole, place.gather(weights)).to(device).eval().requires_grad_(False)
    teach = on_noise(teacher, place)
    shape = noise_shape(family)
    totals = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in weights.items()}
    counts = {name: torch.zeros(value.shape, dtype=torch.int64) for name, value in weights.items()}
    started = time.perf_counter()
    for architecture, placement in students:
        student = with_weights(family, architecture, placement.gather(weights)).to(device).eval()
        learn = on_noise(student, placement)
        optimizer = torch.optim.Adam(student.parameters(), lr=settings.learning_rate)
        for _ in range(settings.steps):
            noise = torch.randn(settings.batch_size, *shape, generator=generator).to(device)
            with torch.no_grad():
                target = teach(noise).log_softmax(dim=1)
            loss = F.kl_div(learn(noise).log_softmax(dim=1), target, reduction="batchmean", log_target=True)
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
    return result, settings.steps * len(students) / seconds


def on_noise(model: nn.Module, placement: Placement) -> Callable[[Tensor], Tensor]:
    """How a (sub-)model computes on noise: as images, or in place of what its token embedding would give.

    The noise has all channels of the global embedding; a sub-model reads those that it has.
    """
    embeddings = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        return model
    [(name, embedding)] = embeddings
    channels = placement.coordinates[f"{name}.weight"][1]

    def compute(noise: Tensor) -> Tensor:
        hook = embedding.register_forward_hook(lambda *_: noise[..., channels])
        try:
            return model(torch.zeros(noise.shape[:2], dtype=torch.int64, device=noise.device))
        finally:
            hook.remove()

    return compute


def noise_shape(family: Family) -> tuple[int, ...]:
    """Of one noise input: an image, or all channels of its token embeddings."""
    return (
        family.input_shape if family.input_dtype.is_floating_point else (*family.input_shape, family.groups["stream"])
    )
