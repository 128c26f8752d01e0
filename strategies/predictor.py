"""An accuracy predictor: a small network from a sub-network's decisions to its accuracy (once-for-all, section 3.4)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from wildflower.models.architecture import Architecture
from wildflower.models.elastic import ElasticSpace
from wildflower.models.space import Space
from wildflower.strategies.evolution import Picks

HIDDEN = 128
STEPS = 800
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-4
MIN_PAIRS = 8


@dataclass(frozen=True)
class Predictor:
    """A predictor that was learned from pairs of sub-networks and their accuracies.

    Attributes:
        rank_correlation: Spearman's, between predicted and measured accuracies of the pairs that were held out; NaN
            where one of both is constant.
    """

    space: Space | ElasticSpace
    network: nn.Module
    mean: float
    deviation: float
    rank_correlation: float

    def score(self, found: Sequence[Picks]) -> list[float]:
        """Return the predicted accuracies; what `wildflower.strategies.evolution` asks of a score."""
        with torch.no_grad():
            raw = self.network(encoded(self.space, found)).squeeze(1)
        return [float(value) for value in raw * self.deviation + self.mean]


def encoded(space: Space | ElasticSpace, found: Sequence[Picks]) -> Tensor:
    """Return (sub-networks, options of all decisions): 1 where an option is taken in a decision that counts."""
    starts = np.cumsum([0, *(len(options) for options in space.options)])
    features = torch.zeros(len(found), int(starts[-1]))
    for row, picks in enumerate(found):
        left_out = space.beyond(picks) if isinstance(space, ElasticSpace) else ()
        for number, (start, pick) in enumerate(zip(starts[:-1], picks, strict=True)):
            if number not in left_out:
                features[row, int(start) + pick] = 1
    return features


def fit_predictor(
    space: Space | ElasticSpace, found: Sequence[Picks], accuracies: Sequence[float], seed: int
) -> Predictor:
    """Learn from pairs; a fifth of them is held out to say how good the order of the predictions is.

    Raises ValueError for too few pairs, and for accuracies that are no finite numbers.
    """
    if len(found) != len(accuracies) or len(found) < MIN_PAIRS:
        raise ValueError(f"a predictor needs at least {MIN_PAIRS} pairs, got {len(found)} and {len(accuracies)}")
    targets = torch.tensor(list(accuracies), dtype=torch.float32)
    if not bool(torch.isfinite(targets).all()):
        raise ValueError("a predictor learns from finite accuracies")
    inputs = encoded(space, found)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(found)))
    held = max(2, len(found) // 5)
    test, train = order[:held], order[held:]
    mean, deviation = float(targets[train].mean()), float(targets[train].std().clamp(min=1e-6))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(inputs.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    wanted = (targets[train] - mean) / deviation
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(inputs[train]).squeeze(1), wanted).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        said = network(inputs[test]).squeeze(1)
    return Predictor(space, network, mean, deviation, rank_correlation(said, targets[test]))


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: the correlation of the ranks; equal values share the mean of their ranks."""
    ranks = torch.stack([_ranks(values) for values in (a, b)])
    centered = ranks - ranks.mean(dim=1, keepdim=True)
    norms = centered.norm(dim=1).prod()
    return float((centered[0] * centered[1]).sum() / norms) if norms > 0 else float("nan")


def _ranks(values: Tensor) -> Tensor:
    below = (values[:, None] > values[None, :]).sum(dim=1)
    equal = (values[:, None] == values[None, :]).sum(dim=1)
    return below + (equal - 1) / 2


def _is_of(space: ElasticSpace, picks: Picks, architecture: Architecture) -> bool:
    try:
        return space.architecture(picks) == architecture
    except ValueError:  # there are no such options
        return False


def is_of_supernet(path: Path) -> bool:
    """Return whether a file is what `wildflower supernet` writes beside the weights, of whatever space."""
    try:
        return "measured" in json.loads(path.read_text())
    except (OSError, TypeError, ValueError, RecursionError):
        return False


def load_pairs(path: Path, space: ElasticSpace) -> tuple[list[Picks], list[float]]:
    """Read what `wildflower supernet` has measured; ValueError where the file is none of its, or of another space.

    Also where an accuracy is no number from 0 to 1.
    """
    try:
        measured = json.loads(path.read_text())["measured"]
        picks = [tuple(int(pick) for pick in entry["picks"]) for entry in measured]
        accuracies = [float(entry["accuracy"]) for entry in measured]
        given = [Architecture.from_json(entry["architecture"]) for entry in measured]
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is no file of a supernet's training: {error}") from None
    for number, accuracy in enumerate(accuracies):
        if not 0 <= accuracy <= 1:  # NaN too
            raise ValueError(
                f"{path}: measured[{number}] has the accuracy {accuracy}, which is no number from 0 to 1: train the "
                "supernet anew, or take the entry out"
            )
    for one, architecture in zip(picks, given, strict=True):
        if not _is_of(space, one, architecture):
            raise ValueError(f"{path} is of another space than that of {space.family.name} with these arguments")
    return picks, accuracies
