"""Networks of described layers: what is folded where a network is only scored."""

import pytest
import torch

from models.cnn import Cnn3, Cnn10
from models.family import make_family
from models.layers import BatchNorm, Scaler, fold_norms
from models.lenet import LeNet5
from models.mobilenet import MobileNetV2

SHAPE = (1, 28, 28)


def trained(family, architecture):
    """A network whose norms have statistics and a scale of their own."""
    torch.manual_seed(0)
    network = family.build(architecture)
    for norm in (m for m in network.modules() if isinstance(m, BatchNorm)):
        if norm.running_mean is not None:
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
        torch.nn.init.uniform_(norm.weight, 0.5, 2)
        torch.nn.init.uniform_(norm.bias, -1, 1)
    return network.eval()


@pytest.mark.parametrize(
    "family",
    [
        Cnn3(input_shape=SHAPE, scaler=True),
        Cnn10(input_shape=SHAPE, exits=(1, 10)),
        LeNet5(input_shape=SHAPE),
        MobileNetV2(input_shape=SHAPE),
        make_family({"name": "resnet18", "first_channels": 8, "input_shape": SHAPE, "scaler": True}),
        make_family({"name": "resnet18", "first_channels": 8, "input_shape": SHAPE, "preactivation": True}),
        make_family({"name": "densenet121", "growth": 2, "input_shape": SHAPE}),
        make_family({"name": "vgg", "block_channels": [4, 8], "input_shape": [6, 128], "classes": 6}),
    ],
    ids=lambda family: family.name,
)
def test_folding_norms_keeps_what_a_network_says(family):
    network = trained(family, family.width(0.5))
    x = torch.randn(4, *family.input_shape)
    with torch.no_grad():
        before = network.exits(x)
        fold_norms(network)
        for heads, now in zip(before, network.exits(x), strict=True):
            assert torch.allclose(heads, now, rtol=1e-4, atol=1e-4 * float(heads.abs().max()))


def test_norms_and_scalers_behind_convolutions_go():
    family = Cnn3(input_shape=SHAPE, scaler=True)
    network = trained(family, family.width(0.5))
    assert sum(isinstance(m, BatchNorm | Scaler) for m in network.modules()) == 6
    fold_norms(network)
    assert not any(isinstance(m, BatchNorm | Scaler) for m in network.modules())


def test_static_norms_stay():
    """They normalize by the batch that is scored, which no weights can hold."""
    family = Cnn3(input_shape=SHAPE, norm="static", scaler=True)
    network = trained(family, family.width(0.5))
    fold_norms(network)
    assert sum(isinstance(m, BatchNorm | Scaler) for m in network.modules()) == 6
