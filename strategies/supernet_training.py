"""Training of a supernet on the server: the sandwich rule with in-place distillation, from public data.

Eq. 1 of RaFL minimizes the summed loss of sub-networks; which of them a step takes and what they learn from is not
printed. Here it is the sandwich rule of Yu and Huang (2019): the largest sub-network learns from labels, the smallest
and some random ones from the largest's predictions. Chance follows from the seed and the step alone, so that a resumed
training has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wildflower.messages.orders import LocalTraining
from wildflower.messages.sums import not_finite
from wildflower.models.architecture import Architecture
from wildflower.models.network import Network
from wildflower.models.supernet import Supernet
from wildflower.strategies.params import CountOrZero, Params
from wildflower.strategies.statistics import take_statistics
from wildflower.tasks.data import Data
from wildflower.tasks.task import Task

CALIBRATION_BATCHES = 20
SCORED_TOGETHER = 256


class SupernetParams(Params):
    """Settings of a supernet's training."""

    steps: CountOrZero = Field(1000, description="Steps of the optimizer, each over one batch; 0 trains nothing")
    random: CountOrZero = Field(
        2, description="Random sub-networks that learn in each step, beside the largest and the smallest"
    )


Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def sandwich_step(supernet: Supernet, batch: Batch, loss: Loss, rng: np.random.Generator, random: int) -> float:
    """Add the gradients of one step of the sandwich rule to the supernet's; return the largest one's loss.

    The largest sub-network minimizes `loss` on the labels. All others minimize the cross-entropy to its predictions,
    softmax at temperature 1, which are held fixed.
    """
    inputs, labels = batch
    space = supernet.space
    supernet.set(space.largest())
    logits = supernet(inputs)
    value = loss(logits, labels)
    value.backward()
    target = logits.detach().softmax(dim=1)
    for architecture in (space.smallest(), *(space.sample(rng) for _ in range(random))):
        supernet.set(architecture)
        F.cross_entropy(supernet(inputs), target).backward()
    return float(value.detach())


class SupernetTraining:
    """A training that can be stopped after any step and taken up again.

    Args:
        supernet: what is trained, in place.
        task: the public data are its training examples; its loss is the largest sub-network's.
        examples: which of them; the others are held out.
        training: optimizer, learning rate, batch size, clipping and augmentation of the run. The learning rate falls
            along a cosine to 0.
        seed: what batches, sub-networks and dropout follow from.
    """

    def __init__(
        self,
        supernet: Supernet,
        task: Task,
        examples: Tensor,
        training: LocalTraining,
        params: SupernetParams,
        seed: int,
    ) -> None:
        self.supernet, self.task, self.examples = supernet, task, examples
        self.training, self.params, self.seed = training, params, seed
        self.step = 0
        self.optimizer = _optimizer(training, supernet.parameters())
        self._batches = max(1, len(examples) // training.batch_size)

    def advance(self) -> float:
        """Make one step; return the largest sub-network's loss. FloatingPointError where it is not finite."""
        rng = np.random.default_rng([self.seed, self.step])
        share = self.step / self.params.steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.learning_rate * (1 + np.cos(np.pi * share)) / 2
        self.supernet.train()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**63)))
            value = sandwich_step(self.supernet, self._batch(), self.task.loss, rng, self.params.random)
        if not np.isfinite(value):
            raise self._diverged(self.step + 1)
        if self.training.clip_norm:
            nn.utils.clip_grad_norm_(self.supernet.parameters(), self.training.clip_norm)
        self.optimizer.step()
        self.step += 1
        return value

    def check_finite(self) -> None:
        """FloatingPointError where a weight is not finite: the loss of a step says nothing of what it leads to."""
        if not_finite(self.supernet.whole.state_dict()):
            raise self._diverged(self.step)

    def _diverged(self, step: int) -> FloatingPointError:
        return FloatingPointError(f"the supernet's training diverged in step {step}: lower learning-rate")

    def _batch(self) -> Batch:
        epoch, number = divmod(self.step, self._batches)
        order = np.random.default_rng([self.seed, epoch, 1]).permutation(len(self.examples))
        size = self.training.batch_size
        picked = self.examples[torch.from_numpy(order[number * size : (number + 1) * size])]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        inputs = self.task.prepare(self.task.train.inputs[picked], augment=generator if self.training.augment else None)
        return inputs, self.task.train.labels[picked]

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a resumed training needs: the weights, and what the optimizer keeps of each."""
        found = {f"weights.{name}": value.detach() for name, value in self.supernet.whole.state_dict().items()}
        for number, kept in self.optimizer.state_dict()["state"].items():
            for key, value in kept.items():
                if value is not None:
                    found[f"optimizer.{number}.{key}"] = torch.as_tensor(value)
        return found

    def load(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Take up a training from the state after `step`; ValueError where it is of another supernet."""
        weights = {n.removeprefix("weights."): v for n, v in state.items() if n.startswith("weights.")}
        kept: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                kept.setdefault(int(number), {})[key] = value
        own = self.supernet.whole.state_dict()
        if {n: v.shape for n, v in weights.items()} != {n: v.shape for n, v in own.items()}:
            raise ValueError("the checkpoint is of another supernet")
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(weights[name])
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": kept})
        self.step = step


def _optimizer(training: LocalTraining, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=training.momentum, weight_decay=decay)
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=rate, betas=training.betas, weight_decay=decay, fused=training.fused or None)


def calibrated(network: Network, batches: Iterable[Batch]) -> Network:
    """Give a cut network its own batch norm statistics, the means over these batches; return it for evaluation.

    Every sub-network has its own: those of another make its outputs worthless (Yu and Huang 2019). A network without
    running statistics stays as it is.
    """
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in network.modules()):
        take_statistics(network, batches)
    return network.eval()


def batches_of(task: Task, data: Data, examples: Tensor, size: int, limit: int | None = None) -> Iterator[Batch]:
    """Yield batches of examples in order, prepared without augmentation; the last one may be short."""
    starts = range(0, len(examples), size)
    for start in starts if limit is None else starts[:limit]:
        picked = examples[start : start + size]
        yield task.prepare(data.inputs[picked], augment=None), data.labels[picked]


@torch.no_grad()
def accuracy(network: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the share of examples whose class is predicted; ValueError without examples."""
    right = seen = 0
    for inputs, labels in batches:
        right += int((network(inputs).argmax(dim=1) == labels).sum())
        seen += len(labels)
    if not seen:
        raise ValueError("an accuracy needs at least one example")
    return right / seen


def accuracy_of(
    supernet: Supernet, architecture: Architecture, calibration: Iterable[Batch], held: Iterable[Batch]
) -> float:
    """Return the accuracy of a sub-network on held-out batches, extracted and calibrated."""
    return accuracy(calibrated(supernet.extract(architecture), calibration), held)
