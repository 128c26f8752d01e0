import pytest

from wildflower.models.lenet import LeNet5


def parameters(family, arch):
    return sum(parameter.numel() for parameter in family.build(arch).parameters())


def test_parameters():
    # conv 156 + 2,416, batch norm 12 + 32, fully connected 30,840 + 10,164 + 850
    assert parameters(LeNet5(), LeNet5().full()) == 44_470


def test_parameters_of_recipfls_small_model():
    # conv 156 + 453, batch norm 12 + 6, fully connected 48-84-10: 4,116 + 850
    small = LeNet5(conv_channels=(6, 3), hidden=(84,))
    assert parameters(small, small.full()) == 5_593
    assert small.tensors(small.full())["head.fc1.weight"].shape == (84, 48)


def test_parameters_up_to_each_exit():
    family = LeNet5(exits=(1, 2))
    assert [parameters(family, family.up_to(exit)) for exit in (1, 2)] == [168 + 8_650, 44_470 + 8_650]


@pytest.mark.parametrize("sizes", [(), (6, 0), [6, 16], ("6",)])
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="lenet5: conv_channels must be a list of numbers >= 1"):
        LeNet5(conv_channels=sizes)
    with pytest.raises(ValueError, match="lenet5: hidden must be a list of numbers >= 1"):
        LeNet5(hidden=sizes)


@pytest.mark.parametrize(
    ("shape", "features"), [((1, 28, 28), 256), ((3, 32, 32), 400), ((1, 8, 8), 64), ((1, 16, 16), 16)]
)
def test_other_inputs_change_the_features_behind_the_flatten(shape, features):
    family = LeNet5(input_shape=shape)
    assert family.tensors(family.full())["head.fc1.weight"].shape == (120, features)
