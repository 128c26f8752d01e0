"""Modules of a user's own whose answers are wrong in one mode, or for some batches."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from own_constants import Plain
from torch import Tensor, nn


class TupleInEvaluation(Plain):
    def forward(self, images: Tensor) -> object:
        logits = super().forward(images)
        return logits if self.training else (logits, images)


class TupleInTraining(Plain):
    def forward(self, images: Tensor) -> object:
        logits = super().forward(images)
        return (logits, images) if self.training else logits


class ListInEvaluation(Plain):
    def forward(self, images: Tensor) -> object:
        logits = super().forward(images)
        return logits if self.training else [logits]


class Named(Plain):
    def forward(self, images: Tensor) -> object:
        return {"logits": super().forward(images)}


class Squeezed(Plain):
    def __init__(self, classes: int, mode: str = "evaluation") -> None:
        super().__init__(classes)
        self.mode = mode

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits if self.training or self.mode == "none" else logits.squeeze()


class Folded(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).mean(0, keepdim=True)


class Classes(Plain):
    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits if self.training else logits.argmax(1)


class Whole(Plain):
    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits if self.training else logits.int()


class OneMore(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)[..., None]


class Even(Plain):
    def forward(self, images: Tensor) -> Tensor:
        if len(images) % 2 and len(images) > 1:
            raise RuntimeError("an even batch is needed")
        return super().forward(images)


class OnlyTraining(Plain):
    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("not in evaluation mode")
        return super().forward(images)


class NoNumbers(Plain):
    def between(self, x: Tensor) -> Tensor:
        return x / (x.std(0) + 1e-6)


class Detached(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).detach()


class AlwaysDropout(Plain):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x)


class OverTheBatch(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).log_softmax(0)


class Softmax(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).softmax(1)


class Sigmoid(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).sigmoid()


class LogSoftmax(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).log_softmax(1)


class Zeros(Plain):
    """Answers with zeros at first."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class EarlierOnes(nn.Module):
    """Takes the batch for time: an answer depends on the inputs before it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.rows, self.head = nn.LSTM(8, 16), nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.rows(images[:, 0])[0][:, -1])


class OfALevel(Plain):
    def __init__(self, classes: int, wrong: bool = False) -> None:
        super().__init__(classes)
        self.wrong = wrong

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits[0] if self.wrong and not self.training else logits


class Normed(Plain):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(16)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x) if torch.is_tensor(x) else x


class ChangingInEvaluation(Plain):
    """Where PyTorch does not count it."""

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            images.data.sub_(0.5)
        return super().forward(images)


class KeepingABatch(Plain):
    def make(self) -> None:
        self.mean = None

    def between(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return x - self.mean


class CountingPasses(Plain):
    def make(self) -> None:
        self.passes = 0

    def between(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x / self.passes


class NumbersWithoutASeed(Plain):
    """In no tensor."""

    def make(self) -> None:
        self.scale = np.random.default_rng().uniform(0.5, 2, size=16).astype("float32")
        self.shift = random.SystemRandom().random()

    def between(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(self.scale) + self.shift


class FlagsFromZeros(Plain):
    def make(self) -> None:
        self.register_buffer("used", torch.zeros(16))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.used = torch.maximum(self.used, (x.detach() > 0).any(0).float())
        return x * self.used


class FirstBatchSetsWeights(Plain):
    """As in Glow: what the first batch of training sets is learned from then on."""

    def make(self) -> None:
        self.shift = nn.Parameter(torch.zeros(16))
        self.ready = False

    def between(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            self.shift.data = -x.detach().mean(0)
            self.ready = True
        return x + self.shift


class WarmUp(Plain):
    def make(self) -> None:
        self.register_buffer("steps", torch.tensor(0))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x * (self.steps / 1000 + 0.1)


class HarmlessCount(Plain):
    def make(self) -> None:
        self.passes = 0

    def between(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x
