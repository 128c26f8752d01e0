import pytest
import torch
from client_app.training import train
from messages.layouts import sent_layout

from client_app.dynamic import DynamicRegularizer
from client_app.state import DeviceState
from messages.orders import LocalTraining, Objective, WorkOrder
from messages.packing import pack
from models.cnn import Cnn3
from tests.client_app.work_orders import cut, digits, work_order

FAMILY = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
ALPHA = 0.5


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(value)
    return model


def test_gradient_and_correction_by_hand():
    """alpha 0.5, received 2, now 3, correction 0.1, loss w x: 0.5 (3 - 2) - 0.1 + x, then 0.1 - 0.5 (3 - 2)."""
    model = model_of(2.0)
    dynamic = DynamicRegularizer(model, ALPHA, {"weight": torch.tensor([[0.1]]), "deeper.weight": torch.ones(3)})
    model.weight.data.fill_(3.0)
    loss = dynamic.added_to(lambda inputs, labels: model(inputs).sum())
    for _ in range(2):  # the second step starts from nothing too
        value = loss(torch.tensor([[4.0]]), torch.tensor([0]))
        value.backward()
        assert value.item() == 12.0
        assert model.weight.grad.item() == pytest.approx(4.4)
    kept = dynamic.after()
    assert kept["weight"].item() == pytest.approx(-0.4)
    assert kept["deeper.weight"].tolist() == [1, 1, 1]  # of a layer that it did not get this time


def test_the_first_correction_is_0():
    model = model_of(2.0)
    dynamic = DynamicRegularizer(model, ALPHA, None)
    dynamic.added_to(lambda inputs, labels: model(inputs).sum() * 0)(torch.ones(1, 1), torch.tensor([0]))
    assert model.weight.grad.item() == 0.0
    model.weight.data.fill_(3.0)
    assert dynamic.after()["weight"].item() == pytest.approx(-0.5)


def order(exit: int) -> tuple[WorkOrder, bytes]:
    architecture = FAMILY.up_to(exit)
    objective = Objective(kind="mutual learning of exits", weight=1.0, alpha=ALPHA)
    layout = sent_layout(FAMILY, architecture)
    made = work_order(
        family=FAMILY, objective=objective, architecture=architecture.to_json(), digest=layout.digest, seed=3
    )
    return made, pack(cut(FAMILY, architecture), layout)


def do(state, exit, round_number, **changes):
    made, data = order(exit)
    how = LocalTraining(steps=2, batch_size=10, learning_rate=0.1)
    return train(made, round_number, how, FAMILY, digits(), data, state, torch.device("cpu"), None, **changes)


def test_a_device_keeps_its_correction_from_round_to_round(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    received = cut(FAMILY, FAMILY.full())
    first = do(state, 3, 1)
    parameters = {name for name, _ in first.model.named_parameters()}
    kept = state.load("correction", 2)
    assert set(kept) == parameters  # no running statistics
    for name in parameters:
        torch.testing.assert_close(kept[name], -ALPHA * (first.returned[name] - received[name]))
    # Personal evaluation trains, and keeps nothing.
    do(state, 3, 2, keep=False)
    assert state.load("correction", 3).keys() == kept.keys()
    assert all(torch.equal(state.load("correction", 3)[name], kept[name]) for name in kept)
    # With the correction the second training ends elsewhere; it adds to what it kept of the layers that it has.
    second = do(state, 1, 2)
    assert not torch.equal(second.returned["block1.conv.weight"], first.returned["block1.conv.weight"])
    now = state.load("correction", 3)
    moved = second.returned["block1.conv.weight"] - received["block1.conv.weight"]
    torch.testing.assert_close(now["block1.conv.weight"], kept["block1.conv.weight"] - ALPHA * moved)
    assert torch.equal(now["block3.conv.weight"], kept["block3.conv.weight"])
