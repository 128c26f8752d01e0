import pytest
import torch

from wildflower.models.mlp import Mlp


def test_parameters_of_the_papers_2nn():
    # McMahan et al. 2017, section 3: "2-hidden layers with 200 units each" over MNIST, "199,210 total parameters".
    assert sum(parameter.numel() for parameter in Mlp().build(Mlp().full()).parameters()) == 199_210


def test_rows_of_a_table():
    family = Mlp(input_shape=(6, 1), classes=3, hidden=(8,))
    network = family.build(family.width(0.5))
    assert network(torch.zeros(4, 6, 1)).shape == (4, 3)
    assert family.tensors(family.width(0.5))["head.fc1.weight"].shape == (4, 6)


@pytest.mark.parametrize("sizes", [(), (6, 0), [6], ("6",)])
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="mlp: hidden must be a list of numbers >= 1"):
        Mlp(hidden=sizes)
