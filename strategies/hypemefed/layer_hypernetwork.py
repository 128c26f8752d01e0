"""Hypernetworks that guess the weights of a deep layer from those of a shallower one (HypeMeFed, section 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

SMALLEST_SINGULAR_VALUE = 0.01  # as a share of the largest

Factors = tuple[Tensor, Tensor]
"""(rank, rows) and (rank, columns): the scaled left and right singular vectors of a weight as a matrix."""


def as_matrix(weight: Tensor) -> Tensor:
    """A weight as a matrix whose rows are of outputs and whose columns are of inputs.

    (out, in) stays; (out, in, k) becomes (out, in * k); (out, in, k, k) becomes (out * k, in * k): a kernel's rows go
    with the outputs and its columns with the inputs, which is the squarest split. (out,), a bias or a norm's scale,
    becomes a matrix of one column.
    """
    if weight.dim() == 4:
        out, inputs, height, width = weight.shape
        return weight.permute(0, 2, 1, 3).reshape(out * height, inputs * width)
    return weight.reshape(weight.shape[0], -1)


def as_weight(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `as_matrix`."""
    if len(shape) == 4:
        out, inputs, height, width = shape
        return matrix.reshape(out, height, inputs, width).permute(0, 2, 1, 3)
    return matrix.reshape(tuple(shape))


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of `as_matrix` of a weight of this shape."""
    if len(shape) == 4:
        return shape[0] * shape[2], shape[1] * shape[3]
    return shape[0], math.prod(shape[1:])


def factorize(weight: Tensor, rank: int) -> Factors:
    """The top `rank` singular triples of a weight, as (S^1/2 U^T, S^1/2 V^T).

    A singular value decomposition is free in the sign of each pair of vectors, and routines choose it by chance: here
    the entry of largest size in each left vector is positive, so that equal weights have equal factors.
    """
    u, s, vt = _top_triples(weight, rank)
    root = s.sqrt()
    return (u * root).T.contiguous(), root.unsqueeze(1) * vt


def _top_triples(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vt = torch.linalg.svd(as_matrix(weight).float(), full_matrices=False)
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    largest = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).squeeze(0)
    sign = torch.where(largest < 0, -1.0, 1.0)
    return u * sign, s, sign.unsqueeze(1) * vt


class Bases:
    """Reads devices' weights in the singular vectors of the weight that they all began from.

    With that weight's U S V^T, a device's matrix W is read as (S^-1/2 V^T W^T, S^-1/2 U^T W), which is `factorize`
    where the device changed nothing, but for singular values under `SMALLEST_SINGULAR_VALUE`, whose place that takes. A
    device's own singular vectors would tell little: those of near singular values turn into one another. `gain`
    multiplies what the device changed, which is small beside the weight.
    """

    def __init__(self, begun: Tensor, rank: int, gain: float) -> None:
        self._begun, self._gain = as_matrix(begun).float(), gain
        self._u, s, self._vt = _top_triples(begun, rank)
        # What changes in directions in which the weight hardly has anything would be read as huge.
        self._root = s.clamp_min(SMALLEST_SINGULAR_VALUE * float(s[0]) or 1.0).sqrt().unsqueeze(1)

    def factors(self, weight: Tensor) -> Factors:
        """(rank, rows) and (rank, columns) of a device's weight."""
        matrix = self._begun + self._gain * (as_matrix(weight).float() - self._begun)
        return self._vt @ matrix.T / self._root, self._u.T @ matrix / self._root


@dataclass(frozen=True)
class Change:
    """Changes of a tensor by devices in a round, in units of the root mean square of their changes.

    begun: what they were sent. unit: of their changes; 0 where they changed nothing.
    """

    begun: Tensor
    unit: float

    def in_units(self, value: Tensor) -> Tensor:
        """Return what a device changed: what a hypernetwork is to guess of it."""
        return (value - self.begun) / (self.unit or 1.0)

    def guessed(self, output: Tensor) -> Tensor:
        """The tensor that a hypernetwork's output stands for."""
        return self.begun + self.unit * output

    def bases(self, rank: int) -> Bases:
        """Return how hypernetworks read the tensor: what a device changed is made as large as the tensor itself."""
        size = float(self.begun.square().mean().sqrt())
        return Bases(self.begun, rank, gain=size / self.unit if size and self.unit else 1.0)


def unit_of_changes(begun: Tensor, values: Iterable[Tensor]) -> float:
    """The root mean square of what devices changed of a tensor; all of its values and all devices count alike."""
    return float(torch.stack([(value - begun).square().mean() for value in values]).mean().sqrt())


class LowRankHypernetwork(nn.Module):
    """W' = sum_r sum_m MLP_A(a_r)_m MLP_B(b_r)_m^T over the singular vectors (a_r, b_r) of the source weight.

    Each MLP has two layers and works on one vector at a time: rows -> hidden -> m times the target's rows, and columns
    -> hidden -> m times its columns. m is 1 in the paper, and here wherever the source has about as many singular
    vectors as the target may have, up to k. A source with far fewer, such as the first convolution of a gray image with
    its three, could only make targets of that rank: there m, the nearest whole number, makes up for it.

    With `from_zero` all guesses are 0 before the first step.
    """

    def __init__(
        self, source: Sequence[int], target: Sequence[int], rank: int, hidden: int, *, from_zero: bool = False
    ) -> None:
        super().__init__()
        self.target = tuple(target)
        (rows, columns), (to_rows, to_columns) = matrix_shape(source), matrix_shape(target)
        self.rank = min(rank, rows, columns)
        self.times = max(1, round(min(rank, to_rows, to_columns) / self.rank))  # m
        self.left = mlp(rows, hidden, self.times * to_rows)
        self.right = mlp(columns, hidden, self.times * to_columns)
        if from_zero:
            for parameter in self.left[2].parameters():
                nn.init.zeros_(parameter)

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return _where(self)

    def prepare(self, weight: Tensor) -> Factors:
        """Return what of a source weight goes in."""
        return factorize(weight.to(self.device), self.rank)

    def forward(self, factors: Factors) -> Tensor:
        """The guessed weight of the target's shape."""
        left, right = (
            mlp(vectors).reshape(len(vectors) * self.times, -1)
            for mlp, vectors in zip((self.left, self.right), factors, strict=True)
        )
        return as_weight(left.T @ right, self.target)


def fit(
    network: LowRankHypernetwork, samples: Sequence[tuple[Factors, Tensor]], *, epochs: int, learning_rate: float
) -> float:
    """Train on (what `prepare` made of a source weight, target weight), one device's per step.

    Returns the last epoch's mean over the devices of the mean square of what the guessed weight lacks. Adam starts
    anew, the network goes on from where it is (the paper keeps it over rounds and drops the samples).
    """
    # Fused: the step is then one pass over the parameters, where it took twice as long as the gradients.
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, fused=True)
    moved = [(inputs, target.to(_where(network))) for inputs, target in samples]
    total = torch.zeros(())
    for _ in range(epochs):
        total = torch.zeros((), device=_where(network))
        for inputs, target in moved:
            error = (network(inputs) - target).square().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            total += error.detach()
    return total.item() / len(samples)


@dataclass
class Reading:
    """The way in which hypernetworks read and guess tensors of a round's devices.

    guess: "change", what devices changed of what they were sent; "weight", what they have, whatever they were sent.
    sent: to all devices. units: of what devices changed of each tensor (`unit_of_changes`).
    """

    guess: Literal["change", "weight"]
    sent: Mapping[str, Tensor]
    units: Mapping[str, float]
    _bases: dict[tuple[str, int], Bases] = field(default_factory=dict)

    def inputs(self, network: LowRankHypernetwork, source: str, value: Tensor) -> Factors:
        """Return what a hypernetwork reads of a device's source tensor."""
        if self.guess == "weight":
            return network.prepare(value)
        return self.in_bases_of_sent(network, source, value)

    def in_bases_of_sent(self, network: LowRankHypernetwork, source: str, value: Tensor) -> Factors:
        """Return a tensor's factors in the singular bases of what was sent; a change is made as large as the tensor."""
        key = source, network.rank
        if key not in self._bases:
            begun = self.sent[source].to(network.device)
            change = Change(begun, self.units[source])
            of_weights = self.guess == "weight"
            self._bases[key] = Bases(begun, network.rank, 1.0) if of_weights else change.bases(network.rank)
        return self._bases[key].factors(value.to(network.device))

    def wanted(self, target: str, value: Tensor) -> Tensor:
        """Return what a hypernetwork is to answer for a device that has the target."""
        return value if self.guess == "weight" else self._change(target).in_units(value)

    def guessed(self, target: str, output: Tensor) -> Tensor:
        """The tensor that a hypernetwork's answer stands for."""
        return output if self.guess == "weight" else self._change(target).guessed(output)

    def _change(self, name: str) -> Change:
        return Change(self.sent[name], self.units[name])


@torch.no_grad()
def generate(network: LowRankHypernetwork, inputs: Factors) -> Tensor:
    """The weight that the network guesses from what `prepare` made of the source weight, in main memory."""
    guess: Tensor = network(inputs)
    return guess.cpu()


def shortfall(
    network: LowRankHypernetwork, samples: Sequence[tuple[Factors, Tensor]], weights: Sequence[float]
) -> Tensor:
    """Return what guesses for devices that have the target lack of it, in the weighted mean over them.

    Added to a guess for a device that has it not, it makes of all guesses what survey sampling calls the difference
    estimator: the owners' mean, and how much more or less than for them is guessed for this device. A hypernetwork that
    guesses the same of everybody then adds nothing, where by itself it would pull the mean to what it guesses.
    """
    lacks = [target.cpu() - generate(network, inputs) for inputs, target in samples]
    return torch.stack([w * lack for w, lack in zip(weights, lacks, strict=True)]).sum(dim=0) / sum(weights)


def _where(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Return an MLP of two layers."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
