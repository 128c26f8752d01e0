import math

import pytest

from models.vgg import Vgg

SVHN = Vgg()
STL10 = Vgg(input_shape=(3, 96, 96), block_channels=(64, 128, 256, 512))
UNIMIB = Vgg(input_shape=(1, 18, 25), block_channels=(64, 128, 256, 512), classes=8)


def parameters(family, prefix=""):
    model = family.build(family.full())
    return sum(tensor.numel() for name, tensor in model.named_parameters() if name.startswith(prefix))


@pytest.mark.parametrize(
    # Features in front of the heads behind blocks 1 and 2, as channels x height x width; HypeMeFed's cumulative counts
    # at exits 1 to 3, each of which includes the heads in front of it.
    ("family", "heads", "cumulative"),
    [
        (SVHN, [(64, 8, 8), (128, 4, 4)], [106_922, 349_364, 1_245_886]),
        (STL10, [(128, 24, 24), (256, 12, 12)], [998_218, 2_253_140, 5_979_486]),
        (UNIMIB, [(128, 4, 6), (256, 2, 3)], [284_360, 1_182_928, 4_729_048]),
    ],
)
def test_parameters_with_the_early_heads_are_those_of_the_three_exit_model(family, heads, cumulative):
    first, second = ((math.prod(features) + 1) * family.classes for features in heads)
    exit_1 = parameters(family, "block0.") + parameters(family, "block1.") + first
    exit_2 = exit_1 + parameters(family, "block2.") + second
    exit_3 = exit_2 + parameters(family, "block3.") + parameters(family, "head.")
    assert [exit_1, exit_2, exit_3] == cumulative
    assert parameters(family) == exit_3 - first - second


def test_bad_block_channels_are_refused():
    with pytest.raises(ValueError, match=r"block_channels must hold sizes >= 1, not \(32, 0\)"):
        Vgg(block_channels=(32, 0))
    with pytest.raises(ValueError, match="does not fit"):
        Vgg(input_shape=(1, 8, 8))
