"""What a device of a run does in its round, done here and now."""

from collections.abc import Mapping, Sequence

import torch
from client_app.training import train
from messages.layouts import returned_layout, sent_layout
from strategies.work import Weights
from torch import Tensor

from client_app.state import DeviceState
from messages.orders import EvaluationOrder, LocalTraining, Objective
from messages.packing import pack
from models.architecture import Architecture
from models.base import Family
from models.layers import Network
from tasks.task import Task


def train_locally(
    family: Family,
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    objective: Objective,
    training: LocalTraining,
    task: Task,
    state: DeviceState,
    *,
    device: int,
    round_number: int,
    seed: int,
) -> Network:
    """A device's model after local training from some weights; what the device keeps between rounds stays as it is."""
    order = EvaluationOrder(
        device=device,
        architecture=architecture.to_json(),
        payload=0,
        digest=returned_layout(family, architecture, objective.kind).digest,
        data="test set",
        objective=objective,
        seed=seed,
    )
    data = pack(dict(weights), sent_layout(family, architecture))
    cpu = torch.device("cpu")
    return train(order, round_number, training, family, task, data, state, cpu, None, keep=False).model


def train_all_exits(
    family: Family,
    weights: Weights,
    devices: Sequence[int],
    training: LocalTraining,
    task: Task,
    folder: str,
    round_number: int,
) -> list[Weights]:
    """What devices return of a round in which each trains the whole network with all of its exits."""
    return [
        dict(
            train_locally(
                family,
                family.full(),
                weights,
                Objective(kind="sum of exits"),
                training,
                task,
                DeviceState(folder, "all exits", device),
                device=device,
                round_number=round_number,
                seed=1000 * round_number + device,
            ).state_dict()
        )
        for device in devices
    ]
