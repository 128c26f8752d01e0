import pytest

from models.lenet import LeNet5


def parameters(family, arch):
    return sum(parameter.numel() for parameter in family.build(arch).parameters())


def test_parameters():
    # conv 156 + 2,416, batch norm 12 + 32, fully connected 30,840 + 10,164 + 850
    assert parameters(LeNet5(), LeNet5().full()) == 44_470


@pytest.mark.parametrize(
    ("shape", "features"), [((1, 28, 28), 256), ((3, 32, 32), 400), ((1, 8, 8), 64), ((1, 16, 16), 16)]
)
def test_other_inputs_change_the_features_behind_the_flatten(shape, features):
    family = LeNet5(input_shape=shape)
    assert family.tensors(family.full())["head.fc1.weight"].shape == (120, features)
