"""What a device of a run does in its round, done here and now."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wildflower.client_app.context import DeviceContext, Workplace
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.order import do_order
from wildflower.messages.orders import EvaluationOrder, LocalTraining
from wildflower.messages.packing import pack
from wildflower.messages.tensor_sets import Weights, digest
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.strategies.hypemefed.hypemefed import SumOfExits
from wildflower.strategies.method import ClientStep
from wildflower.tasks.task import Task


def train_locally(
    family: Family,
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    local: ClientStep,
    training: LocalTraining,
    task: Task,
    state: DeviceState,
    *,
    device: int,
    round_number: int,
    seed: int,
) -> Network:
    """A device's model after local training from some weights; what the device keeps between rounds stays as it is."""
    sent = local.sent(family, architecture)
    order = EvaluationOrder(
        device=device,
        architecture=architecture.to_json(),
        payloads={"weights": 0},
        digest=digest(sent, local.returned(family, architecture)),
        data="test set",
        client_step=local.reference(),
        seed=seed,
    )
    arrays = [pack(dict(weights), sent["weights"].layout)]
    place = Workplace(torch.device("cpu"))
    context = DeviceContext(order, local, round_number, training, family, task, arrays, state, place, evaluated_round=0)
    model = do_order(context).answer.model
    assert model is not None
    return model


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
                SumOfExits(),
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
