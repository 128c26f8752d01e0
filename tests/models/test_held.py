"""Tensors that modules hold outside of their parameters and buffers."""

import own_constants
import pytest
import torch

from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.weights import with_weights

torch.set_num_threads(1)
IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def family_of(name, **more):
    spec = {"name": f"own_constants:{name}", "input_shape": [1, 8, 8], "classes": 10, "levels": [{}]}
    return make_family(spec | more)


def weights_of(family, seed=1):
    torch.manual_seed(seed)
    return family.initial()


EVERYWHERE = (
    *("Attribute", "InPlace", "Index", "Nested", "InSet", "Objects", "Partial", "Closure", "Hook", "Builtin"),
    *("Cached", "MadeLate", "LikeAWeight", "Rates", "Marked", "ActivationInList", "Twice", "Normalized"),
)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_network_says_what_the_users_own_module_says_with_the_same_weights(name):
    """Before and after a step of training, whose loss and price come too."""
    family = family_of(name)
    weights = weights_of(family)
    own = getattr(own_constants, name)()
    own.load_state_dict(weights)
    network = with_weights(family, family.full(), {n: tensor.clone() for n, tensor in weights.items()})
    for _ in range(2):
        for module in (own.eval(), network.eval()):
            module.requires_grad_(True)
        assert torch.equal(network(IMAGES), own(IMAGES))
        for module in (own.train(), network.train()):
            module(IMAGES).square().sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    assert torch.equal(network.state_dict()["stem.weight"], own.state_dict()["stem.weight"])
    assert cost(family, family.full(), batch_size=2, optimizer="sgd").parameters == sum(
        parameter.numel() for parameter in own.parameters()
    )


@pytest.mark.parametrize("name", ["DrawnByTorch", "DrawnByOthers"])
def test_constants_that_are_drawn_are_the_same_on_every_device_and_nothing_else_is_drawn_for_it(name):
    family = family_of(name)
    weights = weights_of(family)
    said = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        network = with_weights(family, family.full(), weights).eval()
        said.append(network(IMAGES))
        after = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(after, torch.rand(1))
    assert torch.equal(*said)
    plain = own_constants.Plain()
    plain.load_state_dict(weights)
    assert not torch.allclose(said[0], plain(IMAGES))  # the constants are read


def test_what_is_held_moves_with_the_network():
    """By type, as to a GPU: what stayed behind could not be computed with."""
    for name in ("Nested", "Closure", "Twice", "Objects"):
        family = family_of(name)
        network = with_weights(family, family.full(), weights_of(family)).eval()
        before = network(IMAGES)
        moved = network.to(torch.float64)(IMAGES.double())
        assert moved.dtype == torch.float64
        assert torch.allclose(moved, before.double(), atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WithParameters", r"weights\['scale'\] is a parameter of shape \(16,\) .* nn\.ParameterList"),
        ("WithAPartialOfAParameter", r"linear\.keywords\['weight'\] is a parameter"),
        ("WithModules", r"blocks\[0\] is a module \(Linear\) .* nn\.ModuleList"),
        ("WithAModuleInAFunction", r"norm\.layer is a module \(BatchNorm1d\)"),
        ("WithALearnedTensor", r"scale has requires_grad = True and is no parameter"),
        ("WithAParameterOfItsClass", r"scale has weights and is an attribute of a class.*__init__"),
        ("WithAModuleOfItsClass", r"layer has weights and is an attribute of a class"),
        ("WithAGradientHook", r"stem\.weight has a hook of its gradient"),
        ("Orthogonal", r"parametrizations\.orthogonal reads the values of weights .*matrix_exp"),
        ("WideOrthogonal", r"layer\.parametrizations\.weight\.0: .*matrix_exp"),
        ("Scripted", r"layer \(RecursiveScriptModule\) is compiled by torch\.jit"),
        ("Traced", r"leave torch\.jit\.script and torch\.jit\.trace out"),
        ("Sparse", r"words \(Embedding\) has sparse gradients"),
        ("ExtraState", r"ExtraState has extra state .*register_buffer"),
    ],
)
def test_what_could_not_be_sent_trained_or_exported_is_named(name, words):
    with pytest.raises(ValueError, match=words):
        family_of(name)


def test_parameters_that_are_held_twice_do_not_go_with_several_levels():
    """Levels may be trained in one step, each as slices of the largest one's parameters."""
    with pytest.raises(ValueError, match=r"all\[0\] holds scale a second time"):
        family_of("Twice", levels=[{}, {}])
    family_of("Nested", levels=[{}, {}])
