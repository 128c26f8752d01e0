"""Batch norm's statistics that several devices take at once are those that each takes by itself."""

import pytest
import torch
from torch import nn

from tests.client_app.test_side_by_side import DOUBLE
from tests.client_app.work_orders import answers, batch, packed, work_order
from wildflower.client_app import side_by_side
from wildflower.client_app.stack import RowError
from wildflower.client_app.stack_operators import InTurn
from wildflower.client_app.statistics_pass import Pass, pass_at_once
from wildflower.messages.orders import LocalTraining
from wildflower.messages.packing import unpack
from wildflower.models.cnn import Cnn3, PflCnn
from wildflower.models.lenet import LeNet5
from wildflower.models.resnet import ResNet18
from wildflower.strategies.statistics import TakeStatistics

CPU = torch.device("cpu")
FAMILIES = [
    Cnn3(input_shape=(1, 16, 16), scaler=True),
    LeNet5(input_shape=(1, 16, 16)),
    ResNet18(input_shape=(1, 16, 16)),
]


def passes(family, sizes, weights=None, wrong=None):
    """Passes in float64 of batches of these sizes for each device, and of weights from these seeds."""
    architecture, found = family.width(0.125), []
    for device, of_batches in enumerate(sizes):
        seed = 0 if weights is None else weights[device]

        def build(seed=seed):
            torch.manual_seed(seed)
            return family.build(architecture).to(DOUBLE)

        def start(model, device=device, of_batches=of_batches):
            generator = torch.Generator().manual_seed(device)
            for size in of_batches:
                if device == wrong:
                    raise OSError("the card is gone")
                yield torch.rand(size, 1, 16, 16, dtype=DOUBLE, generator=generator), torch.zeros(size)

        found.append(Pass({"weights": bytes([seed])}, build, start, sum(of_batches), len(of_batches), CPU))
    return found


@pytest.mark.parametrize("weights", [None, [1, 2, 1]], ids=["one model", "two models"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_statistics_are_those_of_each_pass_by_itself(family, weights):
    made = passes(family, [(6, 6, 3), (6,), (4, 6)], weights)
    for found, each in zip(pass_at_once(made), made, strict=True):
        wanted = each.alone()
        assert wanted
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value)


def test_models_that_draw_or_that_nobody_knows_are_none():
    class Other(nn.Linear):
        def train(self, mode=True):
            return self

    with pytest.raises(InTurn, match="draws at random"):
        pass_at_once(passes(PflCnn(input_shape=(1, 16, 16)), [(4,), (4,)]))
    strange = Pass({}, lambda: Other(2, 2), lambda model: iter(()), 4, 1, CPU)
    with pytest.raises(InTurn, match="nobody knows"):
        pass_at_once([strange, strange])


def test_examples_that_cannot_be_had_concern_their_device_alone():
    with pytest.raises(RowError) as failed:
        pass_at_once(passes(FAMILIES[0], [(4,), (4,), (4,)], wrong=1))
    assert (failed.value.row, str(failed.value.error)) == (1, "the card is gone")


def test_orders_for_statistics_are_done_at_once(monkeypatch):
    family, seen = Cnn3(input_shape=(1, 8, 8)), []
    monkeypatch.setattr(side_by_side, "pass_at_once", lambda made: (seen.append(len(made)), pass_at_once(made))[1])
    orders = [work_order(device, family, local=TakeStatistics(examples=25)) for device in range(4)]
    training = LocalTraining(batch_size=10)
    found = []
    for number in (1, 4):
        content = batch(*orders, family=family, training=training, side_by_side=number, each_by_itself=True)
        reply, arrays = answers(content, [packed(family, family.width(0.5))])
        assert [update.outcome for update in reply.updates] == ["trained"] * 4
        layout = TakeStatistics().returned(family, family.width(0.5))["statistics"].layout
        found.append({u.device: unpack(arrays[u.payloads["statistics"]], layout) for u in reply.updates})
    assert seen == [4]
    for device, wanted in found[0].items():
        for name, value in wanted.items():
            torch.testing.assert_close(found[1][device][name], value)
