"""Modules of a user's own that hold tensors, parameters and modules in all kinds of places."""

import functools
import operator
import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Plain(nn.Module):
    """A hidden layer of 16 over flattened 8x8 images; what is between it and the head is each module's own."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 16), nn.Linear(16, classes)
        self.make()

    def make(self) -> None:
        """Define what the module has beside."""

    def between(self, x: Tensor) -> Tensor:
        """(batch, 16) -> (batch, 16)."""
        return x

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        return self.head(self.between(torch.relu(self.stem(images.flatten(1)))))


class Attribute(Plain):
    def make(self) -> None:
        self.scale = torch.linspace(0.5, 2, 16)

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale


class InPlace(Plain):
    def make(self) -> None:
        self.shift = torch.linspace(-1, 1, 16)

    def between(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.shift
        return x


class Index(Plain):
    def make(self) -> None:
        self.order = torch.arange(16).flip(0)

    def between(self, x: Tensor) -> Tensor:
        return x[:, self.order]


class Nested(Plain):
    def make(self) -> None:
        self.inside = {"a": [(torch.linspace(0.5, 2, 16),)], 3: deque([torch.ones(16)])}

    def between(self, x: Tensor) -> Tensor:
        return x * self.inside["a"][0][0] + self.inside[3][0]


class InSet(Plain):
    def make(self) -> None:
        self.inside = {torch.linspace(0.5, 2, 16)}

    def between(self, x: Tensor) -> Tensor:
        return x * next(iter(self.inside))


@dataclass
class Table:
    values: Tensor


class Slots:
    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = torch.linspace(0.5, 2, 16)

    def times(self, x: Tensor) -> Tensor:
        return x * self.values


class Objects(Plain):
    def make(self) -> None:
        self.table, self.times = Table(torch.linspace(-1, 1, 16)), Slots().times

    def between(self, x: Tensor) -> Tensor:
        return self.times(x) + self.table.values


class Partial(Plain):
    def make(self) -> None:
        self.times = functools.partial(torch.mul, torch.linspace(0.5, 2, 16))
        self.plus = functools.partial(torch.add, other=torch.ones(16))

    def between(self, x: Tensor) -> Tensor:
        return self.plus(self.times(x))


class Closure(Plain):
    def make(self) -> None:
        scale = torch.linspace(0.5, 2, 16)

        def times(x: Tensor, shift: Tensor = torch.ones(16)) -> Tensor:
            return x * scale + shift

        self.times = times

    def between(self, x: Tensor) -> Tensor:
        return self.times(x)


class Hook(Plain):
    def make(self) -> None:
        scale = torch.linspace(0.5, 2, 16)
        self.stem.register_forward_hook(lambda module, inputs, result: result * scale)


class Builtin(Plain):
    def make(self) -> None:
        self.first = functools.partial(operator.mul, torch.tensor(2.0))
        self.all = iter([torch.ones(16)])

    def between(self, x: Tensor) -> Tensor:
        return self.first(x)


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.linspace(0.5, 2, size)


OF_THE_FILE = torch.linspace(0.5, 2, 16)


class Cached(Plain):
    def make(self) -> None:
        self.kept = table(16)

    def between(self, x: Tensor) -> Tensor:
        return x * self.kept * OF_THE_FILE + table(len(x[0]))


class MadeLate(Plain):
    def make(self) -> None:
        self.mask = None

    def between(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.linspace(0.5, 2, 16)
        return x * self.mask


class LikeAWeight(Plain):
    def make(self) -> None:
        self.ones = torch.ones_like(self.stem.bias) * 2
        self.register_buffer("mask", torch.ones_like(self.stem.bias) / 2, persistent=False)

    def between(self, x: Tensor) -> Tensor:
        return x * self.ones + self.mask


class Rates(Plain):
    """Reads values of a constant in its constructor, as stochastic depth does."""

    def make(self) -> None:
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.places = torch.arange(16)[torch.linspace(0, 1, 16) > 0.5]

    def between(self, x: Tensor) -> Tensor:
        return x[:, self.places].repeat(1, 2) * self.rates[2]


class Marked(Plain):
    def make(self) -> None:
        self.stem.bias.factor = 2.0

    def between(self, x: Tensor) -> Tensor:
        return x * self.stem.bias.factor


class ActivationInList(Plain):
    def make(self) -> None:
        self.parts = [nn.Tanh(), self.stem]

    def between(self, x: Tensor) -> Tensor:
        return self.parts[0](x)


class Twice(Plain):
    """Parameters and a buffer that are registered, and held a second time."""

    def make(self) -> None:
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 16))
        self.square = nn.Linear(16, 16, bias=False)
        self.register_buffer("mean", torch.zeros(16))
        self.all = [self.scale, self.mean]
        self.linear = functools.partial(F.linear, weight=self.square.weight)

    def between(self, x: Tensor) -> Tensor:
        x = self.linear(x * self.all[0])
        if self.training:
            with torch.no_grad():
                self.all[1].mul_(0.5).add_(0.5 * x.mean(0))
        return x - self.mean


class DrawnByTorch(Plain):
    def make(self) -> None:
        self.features = [torch.randn(16)]

    def between(self, x: Tensor) -> Tensor:
        return x * self.features[0]


class DrawnByOthers(Plain):
    def make(self) -> None:
        self.order = torch.from_numpy(np.random.permutation(16))
        self.pairs = random.sample(range(16), 16)

    def between(self, x: Tensor) -> Tensor:
        return x[:, self.order][:, self.pairs]


class Unsteady(Plain):
    def make(self) -> None:
        self.order = torch.from_numpy(np.random.default_rng().permutation(16))

    def between(self, x: Tensor) -> Tensor:
        return x[:, self.order]


class WithParameters(Plain):
    def make(self) -> None:
        self.weights = {"scale": nn.Parameter(torch.ones(16))}


class WithAPartialOfAParameter(Plain):
    def make(self) -> None:
        self.linear = functools.partial(F.linear, weight=nn.Parameter(torch.eye(16)))


class WithModules(Plain):
    def make(self) -> None:
        self.blocks = [nn.Linear(16, 16)]


class WithAModuleInAFunction(Plain):
    def make(self) -> None:
        layer = nn.BatchNorm1d(16, affine=False)
        self.norm = lambda x: layer(x)


class WithALearnedTensor(Plain):
    def make(self) -> None:
        self.scale = torch.ones(16, requires_grad=True)


class WithAView(Plain):
    def make(self) -> None:
        self.first = self.stem.weight.data[0]

    def between(self, x: Tensor) -> Tensor:
        return x + self.first.sum()


class WithSharedMemory(Plain):
    def make(self) -> None:
        self.raw = torch.ones(16)
        self.scale = nn.Parameter(self.raw)

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale + self.raw


class WithAGradientHook(Plain):
    def make(self) -> None:
        self.stem.weight.register_hook(lambda gradient: gradient * 0)


class FromFirstWeights(Plain):
    def make(self) -> None:
        self.first = [self.stem.bias.detach().clone()]

    def between(self, x: Tensor) -> Tensor:
        return x * self.first[0]


class OrderOfFirstWeights(Plain):
    def make(self) -> None:
        self.register_buffer("order", self.stem.bias.detach().argsort())

    def between(self, x: Tensor) -> Tensor:
        return x[:, self.order]


class Normalized(Plain):
    """A layer whose weights follow from others before each pass: what is kept of them is never read."""

    def make(self) -> None:
        self.layer = nn.utils.weight_norm(nn.Linear(16, 16))
        self.other = parametrizations.weight_norm(nn.Linear(16, 16))

    def between(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x))


class Spectral(Plain):
    """Layers whose largest singular value is 1, by both of PyTorch's functions."""

    def __init__(self, classes: int = 10, width: int = 16) -> None:
        self.width = width
        super().__init__(classes)

    def make(self) -> None:
        self.new = parametrizations.spectral_norm(nn.Linear(16, self.width))
        self.old = nn.utils.spectral_norm(nn.Conv1d(1, self.width, 3, padding=1))
        self.narrow = nn.Linear(self.width, 16)

    def between(self, x: Tensor) -> Tensor:
        return self.narrow(self.new(x) + self.old(x[:, None]).mean(2))


class Codebook(Plain):
    def make(self) -> None:
        self.register_buffer("code", F.normalize(torch.randn(4, 16), dim=1))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.code.copy_(F.normalize(0.9 * self.code + 0.1 * x[:1], dim=1))
        return x @ self.code.T @ self.code


class RawCodebook(Plain):
    """The same as values without a length, which are normalized where they are read."""

    def make(self) -> None:
        self.register_buffer("code", torch.randn(4, 16))
        self.register_buffer("fixed", F.normalize(torch.randn(4, 16), dim=1))
        self.register_buffer("begun", torch.zeros(1))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.code.mul_(0.9).add_(0.1 * x[:1])
                self.begun.fill_(1)
        code = F.normalize(self.code, dim=1)
        return x @ code.T @ code + x @ self.fixed.T @ self.fixed


class ChangingMask(Plain):
    def make(self) -> None:
        self.register_buffer("mask", (torch.arange(16) % 2).float())

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mask.copy_(self.mask.flip(0))
        return x * self.mask


class Orthogonal(Plain):
    def make(self) -> None:
        self.layer = parametrizations.orthogonal(nn.Linear(16, 16))


class WideOrthogonal(Plain):
    def make(self) -> None:
        self.layer = parametrizations.orthogonal(nn.Linear(16, 8))


class Scripted(Plain):
    def make(self) -> None:
        self.layer = torch.jit.script(nn.Linear(16, 16))


class Traced(Plain):
    def make(self) -> None:
        self.layer = torch.jit.trace(nn.Linear(16, 16), torch.zeros(2, 16))


class Sparse(Plain):
    def make(self) -> None:
        self.words = nn.Embedding(10, 16, sparse=True)


class SparseInForward(Plain):
    def make(self) -> None:
        self.words = nn.Parameter(torch.ones(10, 16))

    def between(self, x: Tensor) -> Tensor:
        return x + F.embedding(torch.zeros(len(x), dtype=torch.int64), self.words, sparse=True)


class ExtraState(Plain):
    def get_extra_state(self) -> object:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None: ...


class WithAParameterOfItsClass(Plain):
    scale = nn.Parameter(torch.ones(16))

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale


class WithAModuleOfItsClass(Plain):
    layer = nn.Linear(16, 16)

    def between(self, x: Tensor) -> Tensor:
        return self.layer(x)
