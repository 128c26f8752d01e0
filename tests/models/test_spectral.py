"""Spectral norms keep what they promise where weights are averaged and cut."""

import pytest
import torch

from wildflower.models.architecture import Architecture
from wildflower.models.family import make_family
from wildflower.models.weights import with_weights
from wildflower.strategies.nested import LeadingCut

pytestmark = pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated")
IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def family():
    levels = [{"width": 8}, {"width": 16}]
    return make_family({"name": "own_constants:Spectral", "input_shape": [1, 8, 8], "classes": 10, "levels": levels})


def drawn(family, seed):
    torch.manual_seed(seed)
    return family.initial()


def largest(network):
    """The largest singular values of the weights that the network computes with, of both layers."""
    network(IMAGES)
    return [float(torch.linalg.matrix_norm(layer.weight.flatten(1), 2)) for layer in (network.new, network.old)]


def test_the_largest_singular_value_of_a_mean_is_one(family):
    """In evaluation mode, in which nothing is iterated; before, it was as far from 1 as the devices were apart."""
    first, second = drawn(family, 1), drawn(family, 2)
    assert not [name for name in first if name.endswith(("_u", "_v"))]
    mean = {name: (tensor + second[name]) / 2 for name, tensor in first.items()}
    for level in (1, 2):
        weights = family.place(Architecture((level,))).gather(mean)
        network = with_weights(family, Architecture((level,)), weights).eval()
        assert largest(network) == pytest.approx([1, 1], abs=1e-3)


def test_training_goes_on_from_there(family):
    network = with_weights(family, family.full(), drawn(family, 1)).train()
    before = [part.n_power_iterations for part in network.modules() if hasattr(part, "n_power_iterations")]
    assert before == [1]
    network(IMAGES).sum().backward()
    assert largest(network.eval()) == pytest.approx([1, 1], abs=1e-2)
    assert network.get_parameter("new.parametrizations.weight.original").grad is not None


def test_a_level_that_is_trained_as_slices_has_vectors_of_its_own(family):
    weights = drawn(family, 1)
    small = Architecture((1,))
    network = with_weights(family, family.full(), weights).eval()
    alone = with_weights(family, small, family.place(small).gather(weights)).train()
    cut = LeadingCut(network, family, family.full(), small)
    assert torch.allclose(cut(IMAGES), alone(IMAGES), atol=1e-5)
