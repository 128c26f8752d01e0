"""Before round 1: networks of a user's own compute on batches of the sizes that will come, in both modes.

What pricing sees on tensors without values is one training step of one size. Here the smallest and the largest network,
and some between them, compute on examples of the task: on one, on two and on a last smaller batch of a device, in
evaluation mode and in training mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wildflower.models.any_network import AnyNetwork, changed_input
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.held import held_tensors, sharing, unsteady
from wildflower.models.module import ModuleFamily
from wildflower.models.network import Network
from wildflower.models.traced.family import Traced
from wildflower.models.traced.program import Program
from wildflower.models.weights import with_weights
from wildflower.plugins.draws import inputs_like, same_draws
from wildflower.plugins.flower_log import log
from wildflower.plugins.reference import PluginError, is_reference, one_sentence
from wildflower.server_app.units import counted
from wildflower.tasks.inputs import laid_out_for
from wildflower.tasks.task import Task

Mode = Literal["evaluation", "training"]
MOST_NETWORKS = 8  # that are tried, of as many levels as there may be
MOST_EXAMPLES = 64  # in one batch
MOST_NAMES = 3  # in one warning
UNIT = 1e-3  # by which a length may differ from 1


@dataclass(frozen=True)
class Batches:
    """The batches into which devices divide their examples.

    Attributes:
        batch_size, micro_batch_size: of the run; the latter is 0 where a batch is computed at once.
        examples: how many training examples each device holds, as far as that is known.
    """

    batch_size: int
    micro_batch_size: int
    examples: Sequence[int]

    @property
    def alone(self) -> str | None:
        """The key by which every example is computed by itself; None where none is."""
        sizes = {"batch-size": self.batch_size, "micro-batch-size": self.micro_batch_size}
        return next((key for key, size in sizes.items() if size == 1), None)

    @property
    def single(self) -> int:
        """Devices that hold one training example. Of more, one that is left over is not trained on by itself."""
        return self.examples.count(1)

    @property
    def left_over(self) -> int:
        """Devices that leave one example out in every pass, because it would be a batch by itself."""
        if self.batch_size == 1:
            return 0
        return sum(count > 1 and count % self.batch_size == 1 for count in self.examples)

    @property
    def rests(self) -> list[int]:
        """Sizes of last batches that are smaller, ascending."""
        at_once = self.micro_batch_size or self.batch_size
        rests = {count % self.batch_size if count > self.batch_size else count for count in self.examples}
        return sorted({min(rest, at_once) for rest in rests if rest > 1})


def try_networks(family: Family, task: Task, batches: Batches) -> list[str]:
    """Return what is worth a warning about a family's networks; raise ValueError where a run would end badly.

    Networks of described layers are tried where somebody trains on a single example, all others always.
    """
    return [finding for one in family.alternatives.values() for finding in _try(one, task, batches)]


def _try(family: Family, task: Task, batches: Batches) -> list[str]:
    of_ones_own = _is_own(family)
    alone = bool(batches.alone or batches.single)
    if not of_ones_own and not alone:
        return []
    warnings: list[str] = []
    with same_draws():
        weights = family.initial()
        architectures = _some(family) if of_ones_own else [family.smallest()]
        for number, architecture in enumerate(architectures):
            where = "its network" if len(architectures) == 1 else f"its network {architecture.to_json()}"
            trial = _Trial(family, architecture, task, weights, where)
            found = trial.run(batches.rests) if of_ones_own else []
            if number == 0:  # the others say the same
                warnings += found
                warnings += _single(trial, batches) if alone else []
    if of_ones_own:
        sizes = sorted(_sizes(batches.rests))
        log.info(
            "Tried %s of the family: in evaluation mode on batches of %s, in training mode on batches of %s",
            counted(len(architectures), "network"),
            ", ".join(map(str, sizes)),
            ", ".join(map(str, sizes[1:])),  # all but 1
        )
    return warnings


def _is_own(family: Family) -> bool:
    """Whether networks are a user's own."""
    return isinstance(family, Traced) or is_reference(family.spec()["name"])


def _sizes(rests: Sequence[int]) -> list[int]:
    """Return the sizes of batches to try: two, one and smaller last ones."""
    # The second smallest too, which may be odd where the first is even.
    return list(dict.fromkeys([2, 1, *(min(rest, MOST_EXAMPLES) for rest in rests[:2])]))


def _single(trial: _Trial, batches: Batches) -> list[str]:
    """Whether a network trains on one example, where that is asked of it."""
    why = trial.failure_alone()
    if why is None:
        return []
    fails = f"{trial.where} does not train on a single example ({why})"
    advice = "take a norm without batch statistics, such as nn.GroupNorm or nn.LayerNorm"
    if not _is_own(trial.family):
        advice = "take a family without batch norm"
    if batches.alone:
        raise ValueError(f"{batches.alone} = 1: {fails}: set it to at least 2, or {advice}")
    if batches.single == len(batches.examples):
        raise ValueError(f"every device has one training example, and {fails}: give devices at least 2, or {advice}")
    return [
        f"{batches.single} of {len(batches.examples)} devices have one training example, and {fails}. They fail in "
        f"every round in which they are asked: give devices at least 2, or {advice}"
    ]


def _some(family: Family) -> list[Architecture]:
    """The largest architecture, the smallest and some between them."""
    levels = family.candidates([1.0])
    if len(levels) > MOST_NETWORKS:
        last = len(levels) - 1
        levels = [levels[round(number * last / (MOST_NETWORKS - 1))] for number in range(MOST_NETWORKS)]
    return list(dict.fromkeys([*levels, family.smallest()]))


class _Trial:
    """One network on examples of the task."""

    def __init__(
        self, family: Family, architecture: Architecture, task: Task, weights: dict[str, Tensor], where: str
    ) -> None:
        self.family, self.architecture, self.task, self.where = family, architecture, task, where
        self._weights = family.place(architecture).gather(weights)

    def run(self, rests: Sequence[int]) -> list[str]:
        """Try everything; returns warnings."""
        self._check_constants()
        sizes = _sizes(rests)
        network = self.scored().eval()
        for size in sizes:
            self._evaluate(network, size)
        self._check_repeatable()
        warnings = self._check_independent(network) + self._check_logits()
        network = self.network().train()
        before = {name: buffer.clone() for name, buffer in network.named_buffers()}
        moved: set[str] = set()
        for size in [size for size in sizes if size > 1] * 2:
            self._train(network, size)
            moved |= {name for name, buffer in network.named_buffers() if not torch.equal(buffer, before[name])}
        self._check_kept(network, {name: before[name] for name in moved})
        return warnings + self._check_next_round(network)

    def network(self) -> Network:
        """A fresh network with its part of the first weights."""
        return with_weights(self.family, self.architecture, {n: t.clone() for n, t in self._weights.items()})

    def scored(self) -> Network:
        """A fresh network as it is scored: static norms have their statistics then."""
        family = self.family.with_statistics
        if family is self.family:
            return self.network()
        with same_draws():
            return with_weights(family, self.architecture, family.place(self.architecture).gather(family.initial()))

    def failure_alone(self) -> str | None:
        """Why the network does not train on a single example; None where it does."""
        try:
            self._loss(self.network().train(), 1, "training").backward()
        except Exception as error:  # of any kind: a model is any Python
            return one_sentence(error.__cause__ or error)
        return None

    def _evaluate(self, network: Network, size: int) -> None:
        with torch.no_grad():
            outputs, labels = self._answer(network, size, "evaluation")
            try:
                self.task.summed_loss(outputs, labels)
                self.task.metric.sums(self.task.answers(outputs), labels)
            except Exception as error:
                raise ValueError(
                    f"{self.where} answers a batch of {size} in evaluation mode with {_shape(outputs)}, of which loss "
                    f"and metric of the task cannot be computed: {one_sentence(error)}"
                ) from error

    def _train(self, network: Network, size: int) -> None:
        network.zero_grad(set_to_none=True)
        loss = self._loss(network, size, "training")
        if not loss.requires_grad:
            raise ValueError(
                f"{self.where} has nothing to train: in training mode its answer does not depend on any parameter, as "
                "under torch.no_grad() or after detach()"
            )
        try:
            loss.backward()
        except Exception as error:
            raise ValueError(
                f"{self.where} computes a batch of {size} in training mode, and no gradient of it: "
                f"{one_sentence(error)}"
            ) from error
        for name, parameter in network.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ValueError(
                    f"{self.where}: the gradient of {name} is sparse, which optimizers with momentum or weight decay "
                    "do not take: leave sparse = True out"
                )

    def _loss(self, network: Network, size: int, mode: Mode) -> Tensor:
        outputs, labels = self._answer(network, size, mode)
        try:
            return self.task.loss(outputs, labels)
        except Exception as error:
            raise ValueError(
                f"{self.where} answers a batch of {size} in {mode} mode with {_shape(outputs)}, of which the task's "
                f"loss cannot be computed: {one_sentence(error)}"
            ) from error

    def _answer(self, network: Network, size: int, mode: Mode) -> tuple[Tensor, Tensor]:
        """What the network answers to some examples, and their labels; ValueError unless it is of the right shape."""
        inputs, labels = self._examples(size)
        what = f"a batch of {size} in {mode} mode"
        given = laid_out_for(network, inputs)
        before = given.clone()
        try:
            outputs = network(given)
        except PluginError:  # says in words what is wrong
            raise
        except Exception as error:
            raise ValueError(f"{self.where} fails on {what}: {one_sentence(error)}") from error
        if not torch.equal(given, before):  # by way of `.data` or NumPy, which PyTorch does not count
            raise PluginError(changed_input(network))
        right = (len(inputs), self.family.classes, *self._positions(inputs))
        meant = f"(batch, {', '.join(map(str, right[1:]))}), here {right}"
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"{self.where} answers {what} with {_kind(outputs)}: it must be one tensor of {meant}, in both modes. "
                "Return the logits alone"
            )
        if tuple(outputs.shape) != right:
            raise ValueError(
                f"{self.where} answers {what} with {_shape(outputs)}: it must be one tensor of {meant}, in both modes"
                f"{self._hint(tuple(outputs.shape), right)}"
            )
        if not outputs.is_floating_point():
            raise ValueError(f"{self.where} answers {what} with {outputs.dtype}: it must be logits, in floating point")
        if bool(outputs.isnan().any()):
            raise ValueError(
                f"{self.where} answers {what} with values that are no numbers (NaN), with its first weights, such as "
                "after a division by a deviation that is 0"
            )
        return outputs, labels

    def _hint(self, found: tuple[int, ...], right: tuple[int, ...]) -> str:
        """What may have gone wrong with a shape."""
        if right[0] == 1 and found == right[1:]:
            return ". squeeze() without a dimension also takes the batch away: name the dimension"
        if found[:2] == right and len(found) > 2:
            return ". This is an answer for every token, and the task has one label per input"
        if found == right[:2]:
            return ". This is one answer per input, and the task has a label for every token"
        return ""

    def _positions(self, inputs: Tensor) -> tuple[int, ...]:
        return (inputs.shape[-1],) if self.task.label_kind == "classes of tokens" else ()

    def _examples(self, size: int) -> tuple[Tensor, Tensor]:
        """The first training examples, repeated where there are fewer; made ones where only devices have any."""
        data = self.task.train if len(self.task.train) else self.task.test
        if len(data):
            picked = torch.arange(size) % len(data)
            return self.task.batch(data.inputs[picked], data.labels[picked], augment=None)
        generator = torch.Generator().manual_seed(0)
        shape = (size, *self.family.input_shape)
        inputs = inputs_like(shape, self.family.input_dtype, generator)
        numbers = self.task.label_kind == "numbers"
        return inputs, torch.zeros((size, *self._positions(inputs)), dtype=torch.float32 if numbers else torch.int64)

    # Constants and buffers

    def _check_constants(self) -> None:
        """Raise ValueError where constants differ from one construction to the next, or come from first weights."""
        if not isinstance(self.family, ModuleFamily):
            return
        if names := unsteady(lambda: self._module(self.family.without_memory(self.architecture))):
            raise ValueError(
                f"{self.where}: {names[0]} has other values each time the network is made, as by a generator of "
                "numpy's or Python's without a seed, so that every device would have its own: draw it with torch, or "
                "with a seed"
            )
        shared = sharing(self.family.drawn(self.architecture))
        for name in dict.fromkeys([*shared, *self.family.from_first_weights(self.architecture)]):
            if not self._is_read(name):
                continue  # it is computed anew before each pass, such as by the older `torch.nn.utils.weight_norm`
            if name in shared:
                raise ValueError(
                    f"{self.where}: {name} shares memory with {shared[name]}, whose values come anew in every round, "
                    f"so that {name} would keep others: compute it from {shared[name]} in `forward`"
                )
            raise ValueError(
                f"{self.where}: {name} is made from first weights as they were drawn (or drawn like one), and does not "
                "travel with the weights, so that it would be of others: compute it in `forward`, or let it travel, as "
                "floating point with register_buffer"
            )

    def _is_read(self, name: str) -> bool:
        """Whether a pass reads a constant, as far as its answer shows."""
        for mode in ("evaluation", "training"):
            network = self.network().train() if mode == "training" else self.scored().eval()
            module = self._module(network)
            constant = (held_tensors(module) | dict(module.named_buffers()))[name]
            if not constant.is_floating_point():
                return True
            constant.detach().fill_(float("nan"))
            with torch.no_grad():
                outputs = network(self._examples(2)[0])
            if not isinstance(outputs, Tensor) or bool(outputs.isnan().any()):
                return True
        return False

    def _check_repeatable(self) -> None:
        """Raise ValueError where networks of equal weights answer the same input differently in evaluation mode."""
        earlier, inputs = self._examples(4)[0].split(2)
        used = self.scored().eval()
        self._said(used, earlier)
        once, again, later = (
            self._said(network, inputs) for network in (self.scored().eval(), self.scored().eval(), used)
        )
        if not _close(once, again):
            raise ValueError(
                f"{self.where} answers the same input differently each time that it is made with the same weights: its "
                "constructor draws numbers by a generator without a seed, so that every device would have its own: "
                "draw them with torch, or with a seed"
            )
        if not _close(once, later):
            raise ValueError(
                f"{self.where} answers an input in evaluation mode by what it was given before: its forward keeps "
                "something of a batch, which neither travels nor is exported: compute it from each input, or from the "
                "training data in a buffer (register_buffer) while self.training"
            )

    def _check_next_round(self, used: Network) -> list[str]:
        """Return a warning where training changes what a pass reads and what does not travel."""
        next_one = self.network()
        next_one.load_state_dict(used.state_dict())
        for network in (used, next_one):
            network.settle()
        changed = _changed(self._module(used), self._module(next_one))  # before a pass changes the other one too
        inputs = self._examples(4)[0][2:]
        for training in (False, True):
            one, other = (self._said(network.train(training), inputs) for network in (used, next_one))
            if not _close(one, other):
                names = f", such as {', '.join(changed[:MOST_NAMES])}," if changed else ""
                return [
                    f"Training changes something of {self.where}{names} that does not travel: it begins anew in every "
                    "round, and before the model is scored. A count or a flag lasts as a buffer in floating point "
                    "(register_buffer)"
                ]
        return []

    def _said(self, network: Network, inputs: Tensor) -> Tensor:
        """What a network answers, of which chance has no part."""
        with torch.no_grad(), same_draws():
            return network(laid_out_for(network, inputs.clone()))

    @staticmethod
    def _module(network: Network) -> torch.nn.Module:
        return network.module if isinstance(network, AnyNetwork) else network

    def _check_independent(self, network: Network) -> list[str]:
        """Return a warning where in evaluation mode an answer depends on the batch, or on chance."""
        inputs, _ = self._examples(2)
        with torch.no_grad():
            first, again = (network(laid_out_for(network, inputs)) for _ in range(2))
            if not _close(first, again):
                return [
                    f"In evaluation mode {self.where} answers the same input differently each time: F.dropout needs "
                    "training=self.training"
                ]
            alone = torch.cat([network(laid_out_for(network, inputs[number : number + 1])) for number in (0, 1)])
        if _close(first, alone):
            return []
        return [
            f"In evaluation mode the answer of {self.where} to an input depends on the other inputs of its batch: "
            "nn.LSTM, nn.GRU and attention need batch_first=True, and softmax must not be over dimension 0"
        ]

    def _check_logits(self) -> list[str]:
        """Return a warning where answers are probabilities, and the loss takes a softmax of them once more."""
        if self.task.label_kind == "numbers" or not self.task.sums_examples:
            return []
        network = self.scored().eval()
        with torch.no_grad(), same_draws():
            for parameter in network.parameters():
                parameter.normal_()  # logits are far from probabilities then, which first weights need not show
            outputs = network(laid_out_for(network, self._examples(8)[0]))
        if not bool(((outputs >= 0) & (outputs <= 1)).all()):
            return []
        return [
            f"The answers of {self.where} lie between 0 and 1, as behind a softmax or a sigmoid, and the loss takes a "
            "softmax of them, so that it learns slowly. Return the logits, which are what is before it"
        ]

    def _check_kept(self, network: Network, before: dict[str, Tensor]) -> None:
        """Raise ValueError where training moves a buffer that keeps a length of 1, or values of 0 and 1.

        A mean over devices has neither.

        Args:
            network: after some steps.
            before: the buffers that have moved, as they were.
        """
        if not isinstance(network, AnyNetwork | Program):
            return
        travels = network.state_dict().keys()
        for name, after in network.named_buffers():
            if name not in travels or name not in before or after.numel() == 1:
                continue
            kept = next((kind for kind in _kept(before[name]) if kind in _kept(after)), None)
            if kept is not None:
                raise ValueError(
                    f"{self.where}: training changes the buffer {name}, which has {kept}. The mean over devices, with "
                    "which the next round begins, has not: keep other values in the buffer and bring them into this "
                    "form in `forward`, or leave it out of the state with register_buffer(..., persistent=False), so "
                    "that each round begins with what the constructor makes"
                )


def _changed(used: torch.nn.Module, fresh: torch.nn.Module) -> list[str]:
    """Names of numbers and buffers that differ between two modules of one architecture."""
    buffers = dict(fresh.named_buffers())
    found = [name for name, value in used.named_buffers() if name in buffers and not torch.equal(value, buffers[name])]
    for (path, part), other in zip(used.named_modules(), fresh.modules(), strict=True):
        for name, value in vars(part).items():
            if isinstance(value, int | float) and name != "training" and value != vars(other).get(name):
                found.append(f"{path}.{name}" if path else name)
    return found


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True)


def _kept(values: Tensor) -> list[str]:
    """What is true of values and would not be of a mean of such values."""
    found = []
    exact = values.detach().double()
    for dimension, size in enumerate(exact.shape):
        if size > 1 and bool(((exact.norm(dim=dimension) - 1).abs() < UNIT).all()):
            found.append(f"length 1 along dimension {dimension}")
    if exact.dim() > 1 and abs(float(exact.norm()) - 1) < UNIT:
        found.append("length 1 as a whole")
    if bool(((exact == 0) | (exact.abs() == 1)).all()):
        found.append("no values but 0 and 1")
    return found


def _shape(outputs: Tensor) -> str:
    return f"a tensor of {tuple(outputs.shape)}"


def _kind(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(repr, list(value)[:3]))}"
    return f"a {type(value).__name__}"
