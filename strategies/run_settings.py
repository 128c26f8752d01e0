"""The run configuration as every method is told it: rounds, devices, local training and its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from wildflower.messages.encoding import Wire
from wildflower.messages.orders import LocalTraining
from wildflower.strategies.aggregation import MEAN, Aggregation
from wildflower.strategies.privacy import Privacy
from wildflower.tasks.metrics import ACCURACY, Metric


@dataclass(frozen=True)
class RoundSettings:
    """The run's own settings as the engine and the methods read them (`server_app/config.py` says what each means)."""

    run: str
    task: dict[str, Any]
    task_name: str
    seed: int
    rounds: int
    devices_per_round: int
    sampled_devices: int
    training: LocalTraining
    decay_rounds: tuple[int, ...] = ()
    decay_factor: float = 1.0
    schedule: str = "steps"
    memory_fraction: float = 1.0
    transfer_seconds: float | None = None
    deadline_seconds: float | None = None
    round_seconds: float | None = None
    evaluate_every: int = 1
    evaluate_tiers: bool = True
    statistics_devices: int = 0  # 0: as many as a round has, and 30 at least
    statistics_examples: int = 64  # of each of them at most; 0: all
    deliver: Literal["largest", "best"] = "largest"
    personal_every: int = 0
    personal_epochs: int = 1
    personal_from: int = 1
    state_dir: str = ""
    norm_bound: float = 0.0
    privacy: Privacy | None = None
    buffer: int = 0  # updates that make a new model, while other devices go on; 0: all of a round are waited for
    secure_minimum: int = 0  # the fewest devices whose sum the server may see; 0: it sees every device's update
    aggregation: Aggregation = MEAN
    wire: Wire = "float32"
    side_by_side: int | Literal["auto", "fastest"] = 1
    metric: Metric = ACCURACY
    label_sets: bool = False  # whether devices have classes of their own
    score_without_model: float = 0.0  # what a device counts as that is given no model

    replaced_devices: int = 0  # that come in place of others in the course of the run

    @property
    def devices(self) -> int:
        """The number of devices that the run has at any time, sampled or not."""
        return int(self.task["devices"]) - self.replaced_devices

    @property
    def enough_devices(self) -> int:
        """Return how many devices that have trained are enough, so that the rest of a round is not waited for.

        Under differential privacy all are waited for: whether one counts must not hang on the others.
        """
        return self.devices_per_round if self.privacy is None else self.devices

    def upload_bytes(self, tensor_sets_bytes: int) -> int:
        """Return what tensor sets of so many bytes take on their way up: under masks every value is an integer of 64
        bits."""
        return 2 * tensor_sets_bytes if self.secure_minimum else tensor_sets_bytes

    def rate_factor_in(self, round_number: int) -> float:
        """The factor of learning rates in one round: it falls at every decay round passed, or along a cosine."""
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * (round_number - 1) / self.rounds)) / 2
        passed = sum(round_number > r for r in self.decay_rounds)
        return float(self.decay_factor**passed)

    def training_in(self, round_number: int) -> LocalTraining:
        """The local training of one round, with its learning rate."""
        rate = self.training.learning_rate * self.rate_factor_in(round_number)
        return self.training.model_copy(update={"learning_rate": rate})

    def examples_trained(self, shard: int) -> int:
        """Return how many examples the local training of a device with `shard` of them goes through in a round."""
        training = self.training
        return training.steps * min(training.batch_size, shard) if training.steps else training.epochs * shard

    def personal_in(self, round_number: int) -> bool:
        """Return whether devices are scored on their own test shards after a round."""
        if not self.personal_every or round_number < self.personal_from:
            return False
        return round_number % self.personal_every == 0 or round_number == self.rounds

    def personal_training_in(self, round_number: int) -> LocalTraining | None:
        """Return what devices then do with the model before it is scored; None: nothing."""
        if not self.personal_epochs:
            return None
        return self.training_in(round_number).model_copy(update={"epochs": self.personal_epochs, "steps": 0})

    @property
    def optimizer(self) -> str:
        """The optimizer as the cost model names it: momentum keeps a state, micro-batches a sum of gradients."""
        return self.training.priced_optimizer

    def rng(self, round_number: int, purpose: int, *more: int) -> np.random.Generator:
        """A generator that depends on the seed, the round and the given numbers only."""
        return np.random.default_rng([self.seed, round_number, purpose, *more])
