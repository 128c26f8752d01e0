"""Models of a user's own, as functions of a level."""

from typing import Any

import torch
from torch import Tensor, nn


class Deep(nn.Module):
    """A residual network over flattened 8x8 images."""

    def __init__(self, layers: int = 2, width: float = 1.0, hidden: int = 32, classes: int = 10) -> None:
        super().__init__()
        channels = int(hidden * width)
        self.stem = nn.Linear(64, channels)
        self.layers = nn.ModuleList([nn.Linear(channels, channels) for _ in range(layers)])
        self.norm = nn.BatchNorm1d(channels)
        self.head = nn.Linear(channels, classes)
        self.register_buffer("one", torch.ones(channels), persistent=False)
        self.register_buffer("order", torch.arange(channels))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        x = self.stem(images.flatten(1))
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(self.norm(x)[:, self.order] * self.one)


class HeadFirst(nn.Module):
    """A network that defines its head before its layers."""

    def __init__(self, layers: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.head = nn.Linear(8, classes)
        self.stem = nn.Linear(64, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        x = self.stem(images.flatten(1))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def make(**arguments: object) -> nn.Module:
    return Deep(**arguments)


def named(name: str) -> nn.Module:
    module = nn.Sequential(nn.Flatten())
    module.add_module(name, nn.Linear(64, 10))
    return module


def sized(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def tied(classes: int, layers: int = 2) -> nn.Module:
    """Square layers over one weight, each with its own bias."""
    squares = [nn.Linear(64, 64) for _ in range(layers)]
    for square in squares[1:]:
        square.weight = squares[0].weight
    return nn.Sequential(nn.Flatten(), nn.Sequential(*squares), nn.Linear(64, classes))


class Twice(nn.Module):
    """One block, with its norm, at two places."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.second = self.first
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        return self.head(self.second(self.first(images.flatten(1))))


class Masked(nn.Module):
    """Two parts with one mask, which is no part of the state."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, classes)
        mask = (torch.arange(64) % 2).float()
        self.first.register_buffer("mask", mask, persistent=False)
        self.head.register_buffer("mask", mask, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        x = self.first(images.flatten(1)) * self.first.mask
        return self.head(x * self.head.mask)


def overlapping(classes: int) -> nn.Module:
    module = tied(classes)
    module[1][1].weight = nn.Parameter(module[1][0].weight.data.t())
    return module


def broken(layers: int) -> nn.Module:
    raise KeyError("layers")


def number(layers: int) -> int:
    return layers


def pairs() -> nn.Module:
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1)), x

    return Pair(64, 10)


class Branching(Deep):
    """Goes another way where an input is bright."""

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        return super().forward(images if images.mean().item() > 0 else -images)


class RunningMean(nn.Module):
    """Takes a running mean off what its second layer gives, and writes it, and bounds of its head, in place."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, classes)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        x = self.second(torch.relu(self.first(images.flatten(1))))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * x.mean(0))
                self.head.weight.clamp_(-1, 1)
        return self.head(torch.relu(x - self.mean))


def truncated(classes: int) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    nn.init.trunc_normal_(module[1].weight, std=0.02)
    return module


def by_value(classes: int) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    return module if module[1].weight.max() < 2 else nn.Sequential()


class Shuffled(nn.Module):
    """Inputs in a fixed random order, under a fixed random mask, and a norm."""

    def __init__(self, classes: int, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(64))
        self.register_buffer("mask", torch.rand(64), persistent=False)
        self.norm = nn.BatchNorm1d(64, momentum=momentum)
        self.head = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x.flatten(1)[:, self.order] * self.mask))


class FrozenNorm(nn.Module):
    """A network whose norm stays in evaluation mode, and whose first layer is not trained."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, classes)
        self.norm = nn.BatchNorm1d(8)
        self.stem.requires_grad_(False)

    def train(self, mode: bool = True) -> "FrozenNorm":
        """All but the norm."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        return self.head(torch.relu(self.mid(self.norm(self.stem(images.flatten(1))))))


class Normed(nn.Module):
    """Convolutions under norms of one kind, of which levels have some channels and some layers."""

    def __init__(self, classes: int, width: int = 4, layers: int = 2, **norm: Any) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width, **norm)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SyncBatchNorm(width, **norm))
                for _ in range(layers)
            ]
        )
        self.last = nn.BatchNorm1d(width, **norm)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        x = torch.relu(self.norm(self.stem(images)))
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(self.last(x.mean((2, 3))))


class ByInstance(Normed):
    """With an instance norm that has statistics."""

    def __init__(self, classes: int, width: int = 4) -> None:
        super().__init__(classes, width)
        self.norm = nn.InstanceNorm2d(width, affine=True, track_running_stats=True)


class StillNorm(Normed):
    """With a norm that stays in evaluation mode, whose statistics are constants."""

    def train(self, mode: bool = True) -> "StillNorm":
        """All but one norm."""
        super().train(mode)
        self.norm.eval()
        return self


class ByHand(nn.BatchNorm2d):
    """A norm that always reads its running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width), normalized."""
        return (x - self.running_mean.view(1, -1, 1, 1)) * self.running_var.view(1, -1, 1, 1).rsqrt()


class NormedByHand(Normed):
    """With such a norm."""

    def __init__(self, classes: int, width: int = 4) -> None:
        super().__init__(classes, width)
        self.norm = ByHand(width)


class Writing(nn.Module):
    """Changes its input in place, `how`: in training and evaluation alike, or in evaluation alone."""

    def __init__(self, classes: int, how: str, hidden: int = 8) -> None:
        super().__init__()
        self.how = how
        self.rectifier = nn.ReLU(inplace=True)
        self.first, self.head = nn.Linear(64, hidden), nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, classes)."""
        match self.how:
            case "subtract":
                images -= 0.5
            case "rectify":
                images = self.rectifier(images)
            case "fill":
                images[:, :, :2] = 0
            case "out":
                torch.sub(images, 0.5, out=images)
            case "view":
                images.flatten(1)[:, 0].mul_(2)
            case "data":
                images.data.sub_(0.5)
            case "no grad":
                with torch.no_grad():
                    images.clamp_(min=0)
            case "evaluation" if not self.training:
                images -= 0.5
            case "copy":
                images = images.clone().sub_(0.5)
        return self.head(torch.relu(self.first(images.flatten(1))))


def in_sequence(classes: int, layers: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(layers)), nn.Linear(64, classes))


def ten_classes(classes: int) -> nn.Module:
    assert classes == 10
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def on_a_device(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).to("cpu")


def lazy(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def passed_on(**arguments: object) -> nn.Module:
    return FrozenNorm(**arguments)


class ClassWide(nn.Module):
    """Has as many channels inside as there are classes; `order` is what is done to the answer."""

    def __init__(self, classes, order="none"):
        super().__init__()
        self.stem, self.inner, self.order = nn.Linear(64, classes), nn.Linear(classes, classes), order
        self.out, self.head = nn.Linear(classes, 8), nn.Linear(8, classes)

    def forward(self, x):
        answer = self.head(self.out(self.inner(self.stem(x.flatten(1)).relu()).relu()).relu())
        return {"none": answer, "flip": answer.flip(1), "log": answer.log_softmax(1)}[self.order]
