import pytest
import torch

from wildflower.models.cost import cost
from wildflower.models.vit import VitTiny


def parameters(family, arch):
    return cost(family, arch, batch_size=1, optimizer="sgd").parameters


def test_parameters_are_those_of_the_sizes():
    family = VitTiny()
    # Two layer norms, four projections, an MLP of 768.
    block = 2 * 2 * 192 + 4 * (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192)
    outside = (48 * 192 + 192) + 64 * 192 + 2 * 192 + (192 * 10 + 10)
    assert parameters(family, family.full()) == 12 * block + outside == 5_362_378
    assert parameters(family, family.architecture(without=family.removable)) == block + outside == 468_874
    assert list(family.groups)[:3] == ["stream", "block0.heads", "block0.mlp"]


def test_half_the_width_keeps_heads_whole():
    family = VitTiny()
    model = family.build(family.width(0.5))
    # Of 3 heads, 2 are kept; each has 64 channels as before.
    assert model.get_submodule("block0_attention.attention.query").weight.shape == (2 * 64, 96)
    assert model.get_submodule("block0_attention.attention.out").weight.shape == (96, 2 * 64)


@pytest.mark.parametrize(("shape", "positions"), [((1, 28, 28), 49), ((3, 32, 16), 32)])
def test_other_images(shape, positions):
    family = VitTiny(input_shape=shape, hidden=12, depth=1, heads=2, mlp=8)
    model = family.build(family.full())
    assert model.get_submodule("embedding.positions").weight.shape == (positions, 12)
    assert model(torch.randn(2, *shape)).shape == (2, 10)


def test_the_order_of_patches_counts():
    torch.manual_seed(0)
    family = VitTiny(input_shape=(1, 8, 8), hidden=12, depth=1, heads=2, mlp=8)
    model = family.build(family.full()).eval()
    image = torch.randn(1, 1, 8, 8)
    assert not torch.allclose(model(image), model(image.roll(4, 3)), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (3, 30, 32)}, "30x32 images cannot be cut into patches of 4x4"),
        ({"input_shape": (80,)}, r"vit-tiny: input_shape must be \(channels, height, width\), not \(80,\)"),
        ({"patch": 0}, "patch must be a number >= 1, not 0"),
    ],
)
def test_images_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VitTiny(**arguments)
