"""Networks of described layers: what is folded where a network is only scored."""

import pytest
import torch
from torch import nn

from wildflower.models.cnn import Cnn3, Cnn10
from wildflower.models.family import make_family
from wildflower.models.layers import BatchNorm, Block, Halve, Pool, Relu, Scaler
from wildflower.models.lenet import LeNet5
from wildflower.models.max_pool import LEAST_BY_SLICES, HalvingMaxPool, MaxOfFour
from wildflower.models.mobilenet import MobileNetV2
from wildflower.models.network import BlockModule, fold_norms, pool_by_slices
from wildflower.strategies.supernet_training import calibrated

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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "pools"),
    [
        (Cnn3(input_shape=SHAPE, norm="static"), 3),
        (Cnn3(input_shape=(2, 31, 13)), 3),  # with a rest at the border
        (make_family({"name": "vgg", "block_channels": [4, 8], "input_shape": (3, 32, 32), "exits": [0, 1]}), 2),
        (make_family({"name": "pfl-cnn", "input_shape": (3, 32, 32)}), 1),
        (make_family({"name": "vgg", "block_channels": [4, 8], "input_shape": [6, 128], "classes": 6}), 0),  # signals
        (make_family({"name": "ofa-resnet50", "input_shape": (3, 64, 64)}), 0),
    ],
    ids=["cnn3", "odd sides", "vgg", "pfl-cnn", "signals", "overlapping windows"],
)
@pytest.mark.parametrize("training", [False, True])
def test_pooling_by_slices_keeps_every_bit(family, pools, training):
    network = trained(family, family.full()).train(training)
    for dropout in (m for m in network.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0
    state = {name: value.clone() for name, value in network.state_dict().items()}
    x = torch.randn(4, *family.input_shape)
    with torch.no_grad():
        before = network.exits(x)
        statistics = {name: value.clone() for name, value in network.state_dict().items()}
        network.load_state_dict(state)
        pool_by_slices(network)
        now = network.exits(x)
    assert sum(isinstance(m, MaxOfFour) for m in network.modules()) == pools
    assert [torch.equal(*pair) for pair in zip(before, now, strict=True)] == [True] * len(before)
    assert all(torch.equal(value, statistics[name]) for name, value in network.state_dict().items())


def test_calibrating_a_network_leaves_its_layers():
    """It may be trained afterwards, and the maxima of slices share the gradient of a tie."""
    network = Cnn3(input_shape=SHAPE).build(Cnn3(input_shape=SHAPE).width(0.5))
    before = repr(network)
    calibrated(network, [(torch.randn(8, *SHAPE), torch.zeros(8))])
    assert repr(network) == before


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


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("shape", "layout", "by_slices"),
    [
        ((4, 16, 46, 46), torch.contiguous_format, True),
        ((2, 8, 128, 66), torch.contiguous_format, True),
        ((4, 16, 46, 46), torch.channels_last, False),
        ((4, 16, 47, 46), torch.contiguous_format, False),
        ((4, 16, 46, 47), torch.contiguous_format, False),
        ((2, 16, 44, 46), torch.contiguous_format, False),  # 64,768 values
        ((1, 3, 100, 254), torch.contiguous_format, True),
        ((1, 3, 100, 256), torch.contiguous_format, False),
    ],
)
def test_a_pool_that_trains_has_pytorchs_bits(shape, layout, by_slices, ties):
    """Also where values of a window are equal, and in the places of the gradient."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator).contiguous(memory_format=layout)
    if ties:
        values = values.round().relu()  # 0, 1, 2 and 3, mostly 0
    assert (values.numel() >= LEAST_BY_SLICES) == (shape != (2, 16, 44, 46))
    results = []
    for pool in (nn.MaxPool2d(2), HalvingMaxPool()):
        x = values.clone(memory_format=torch.preserve_format).requires_grad_()
        maxima = pool(x)
        assert (type(maxima.grad_fn).__name__ == "_MaxOfFourToTrainBackward") == (
            by_slices and isinstance(pool, HalvingMaxPool)
        )
        maxima.backward(torch.randn(maxima.shape, generator=torch.Generator().manual_seed(2)))
        results.append((maxima.detach(), x.grad))
    for ours, pytorchs in zip(*results, strict=True):
        assert torch.equal(ours, pytorchs)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("pool", "pytorchs", "shape", "layout"),
    [
        (Pool("max"), nn.MaxPool2d(2), (4, 16, 46, 46), torch.contiguous_format),
        (Pool("max"), nn.MaxPool2d(2), (4, 16, 46, 46), torch.channels_last),
        (Pool("max"), nn.MaxPool2d(2), (4, 16, 9, 7), torch.contiguous_format),
        (Pool("max", window=3), nn.MaxPool2d(3), (4, 16, 9, 7), torch.contiguous_format),
        (Halve("max"), nn.MaxPool2d(3, stride=2, padding=1), (4, 16, 12, 9), torch.contiguous_format),  # they overlap
    ],
)
def test_a_block_pools_before_its_relu_and_keeps_pytorchs_bits_in_training(pool, pytorchs, shape, layout, ties):
    """The results and the gradients, also where all of a window are negative and where some are equal."""
    block = BlockModule(Block("block", (Relu(), pool)))
    assert [type(block.get_submodule(name)) for name in block.order] == [type(pool.build()), nn.ReLU]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=layout)
    if ties:
        values = values.round()  # from -3 to 3
    results = []
    for network in (nn.Sequential(nn.ReLU(), pytorchs), block):
        x = values.clone(memory_format=torch.preserve_format).requires_grad_()
        maxima = network(x * 1)  # a ReLU works in place, which a leaf does not allow
        maxima.backward(torch.randn(maxima.shape, generator=torch.Generator().manual_seed(2)))
        results.append((maxima.detach(), x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pool", [Pool("average"), Pool("max", dimensions=1)])
def test_a_relu_stays_before_a_mean_and_before_a_pool_over_signals(pool):
    """The mean of some ReLUs is not the ReLU of their mean."""
    block = BlockModule(Block("block", (Relu(), pool)))
    assert [type(block.get_submodule(name)) for name in block.order] == [nn.ReLU, type(pool.build())]


def test_a_pool_gives_back_a_gradient_that_lies_as_its_input():
    """PyTorch's way back is slow for a gradient that lies otherwise, as that of a flattened output does."""
    x = torch.randn(4, 16, 46, 46).contiguous(memory_format=torch.channels_last).requires_grad_()
    maxima = HalvingMaxPool()(x)
    seen = []
    maxima.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0]))
    maxima.flatten(1).square().sum().backward()
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()


def test_a_pool_whose_input_takes_no_gradient_is_pytorchs():
    x = torch.randn(4, 16, 46, 46)
    assert torch.equal(HalvingMaxPool()(x), nn.functional.max_pool2d(x, 2))
    with torch.no_grad():
        assert torch.equal(HalvingMaxPool()(x.requires_grad_()), nn.functional.max_pool2d(x, 2))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_layer_behind_the_pool_may_work_in_place(layout):
    x = torch.randn(4, 16, 46, 46).contiguous(memory_format=layout).requires_grad_()
    nn.Sequential(HalvingMaxPool(), nn.ReLU(inplace=True))(x).sum().backward()
    y = x.detach().clone().requires_grad_()
    nn.functional.max_pool2d(y, 2).relu().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_pools_are_exported_for_batches_of_any_size():
    batch = torch.export.Dim("batch", min=1, max=4096)  # with more than 64 examples the pool trains by slices
    program = torch.export.export(HalvingMaxPool().eval(), (torch.rand(2, 4, 16, 16),), dynamic_shapes=({0: batch},))
    x = torch.rand(70, 4, 16, 16)
    assert torch.equal(program.module()(x), nn.functional.max_pool2d(x, 2))
