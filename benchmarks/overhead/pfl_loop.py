"""Contestant 2: pfl's FederatedAveraging on its simulated backend, in the way its benchmarks use it.

python pfl_loop.py DATA_FOLDER ROUNDS          (in an environment with `pip install pfl torch`)
"""

import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import ArtificialFederatedDataset
from pfl.data.sampling import MinimizeReuseDataSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from stock.workload import (
    BATCH_SIZE,
    DEVICES_PER_ROUND,
    EXAMPLES_PER_DEVICE,
    LEARNING_RATE,
    examples,
    network,
    round_ended,
)
from torch import Tensor, nn


class Classifier(nn.Module):
    """The network with the two methods that pfl asks for."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network()
        self.mean, self.std = mean, std

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.network((inputs.float() - self.mean).div_(self.std)), labels)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(inputs, labels)) * len(labels), len(labels))}


class RoundEnded(TrainingProcessCallback):
    """Says that a round is over."""

    def __init__(self, rounds_file: str) -> None:
        self.rounds_file = rounds_file

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        round_ended(self.rounds_file)
        return False, Metrics()


def main(data: str, rounds: int, rounds_file: str) -> None:
    torch.set_num_threads(1)
    images, labels, mean, std = examples(data)

    def user(indices: list[int]) -> Dataset:
        picked = torch.tensor(indices)[torch.randperm(len(indices))]
        return Dataset((images[picked], labels[picked]))

    sampler = MinimizeReuseDataSampler(len(images))
    length: Callable[[], int] = lambda: EXAMPLES_PER_DEVICE  # noqa: E731
    users = ArtificialFederatedDataset(user, sampler, length)
    model = Classifier(mean, std)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=1_000_000,  # in the first round only, which counts as start-up
            train_cohort_size=DEVICES_PER_ROUND,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH_SIZE),
        callbacks=[RoundEnded(rounds_file)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    np.random.seed(1)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
