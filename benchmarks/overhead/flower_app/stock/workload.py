"""What every contestant trains: pfl-research's CNN, 50 examples per device, five steps of ten, plain SGD."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICES_PER_ROUND = 50
EXAMPLES_PER_DEVICE = 50
BATCH_SIZE = 10
LEARNING_RATE = 0.05
PARAMETERS = 1_626_442


def network() -> nn.Sequential:
    """The CNN of pfl-research's CIFAR-10 benchmark; activations in place, as in `wildflower.models.cnn`."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS
    return model


@lru_cache(maxsize=1)
def examples(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (examples, 3, 32, 32) as bytes, mapped from the file; labels; mean and deviation per channel."""
    images = torch.from_numpy(np.load(Path(folder) / "images.npy", mmap_mode="c"))
    labels = torch.from_numpy(np.load(Path(folder) / "labels.npy"))
    sample = images[:1000].float()
    return images, labels, sample.mean((0, 2, 3))[:, None, None], sample.std((0, 2, 3))[:, None, None]


def batches(folder: str, device: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one pass over a device's examples, shuffled and normalized."""
    images, labels, mean, std = examples(folder)
    first = device * EXAMPLES_PER_DEVICE % (len(images) - EXAMPLES_PER_DEVICE + 1)
    order = first + torch.randperm(EXAMPLES_PER_DEVICE)
    for picked in order.split(BATCH_SIZE):
        yield (images[picked].float() - mean).div_(std), labels[picked]


def train(model: nn.Module, folder: str, device: int) -> None:
    """One device's local training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for inputs, labels in batches(folder, device):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def round_ended(rounds_file: str) -> None:
    """Write down that one more round is over; `measure` counts the lines."""
    with Path(rounds_file).open("a") as file:
        file.write("ended\n")
