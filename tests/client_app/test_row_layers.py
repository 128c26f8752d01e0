"""Layers that compute for a stack give each device what its own network gives."""

import pytest
import torch
from torch import nn

from wildflower.client_app.row_layers import RowLayers, takes_rows
from wildflower.models.family import make_family

FAMILIES = {
    "cnn3": {"name": "cnn3"},
    "cnn3 static": {"name": "cnn3", "norm": "static", "scaler": True},
    "lenet5": {"name": "lenet5"},
    "mlp": {"name": "mlp"},
    "resnet18": {"name": "resnet18", "norm": "static"},
}
SIZES = (6, 4, 6)  # examples of each device


def networks(spec):
    """Three networks of a family in double precision, each of weights of its own."""
    family = make_family(spec | {"input_shape": [1, 16, 16]})
    found = []
    for seed in range(len(SIZES)):
        torch.manual_seed(seed)
        found.append(family.build(family.width(0.25)).double().train())
    return found


@pytest.mark.parametrize("sizes", [(6, 6, 6), SIZES], ids=["equal batches", "unequal batches"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_gradients_and_statistics_are_those_of_each_network(family, sizes):
    models = networks(FAMILIES[family])
    assert all(map(takes_rows, models))
    tables = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    stacked = {name: torch.stack([table[name].detach() for table in tables]) for name in tables[0]}
    trained = [name for name, _ in models[0].named_parameters()]
    for name in trained:
        stacked[name].requires_grad_()
    inputs = torch.randn(len(sizes), max(sizes), 1, 16, 16, dtype=torch.float64)
    counts = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    weights = None if len(set(sizes)) == 1 else counts.double() / torch.tensor(sizes)[:, None]
    around = nn.Sequential(models[0])  # as a loss is around a network
    with RowLayers(around, {}) as layers:
        named = {f"0.{name}": value for name, value in stacked.items()}
        found = layers.outputs(models[0], named, inputs, weights)
        (found.square() * counts[..., None]).sum().backward()
    for row, (model, size) in enumerate(zip(models, sizes, strict=True)):
        wanted = model(inputs[row, :size])
        wanted.square().sum().backward()
        torch.testing.assert_close(found[row, :size], wanted)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(stacked[name].grad[row], parameter.grad)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(stacked[name][row], buffer)


def test_other_layers_are_none_of_them():
    assert not takes_rows(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)))
    assert not takes_rows(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"))
