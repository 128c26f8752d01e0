"""Models of a user's own, as functions of a level."""

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


def make(**arguments: object) -> nn.Module:
    return Deep(**arguments)


def named(name: str) -> nn.Module:
    module = nn.Sequential(nn.Flatten())
    module.add_module(name, nn.Linear(64, 10))
    return module


def sized(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def tied(classes: int) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, classes))
    module[2].weight = module[1].weight
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
