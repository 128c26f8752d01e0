from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wildflower.models.operators import Operator, operators


def found(module, shape=(4,), dtype=torch.float32):
    return [(o.name, o.reads, o.tensors) for o in operators(lambda: module(), shape, dtype)]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.gain = nn.Parameter(torch.ones(4))
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        a = torch.relu(self.left(x)).view(2, 2, 2).transpose(1, 2).reshape(2, 4)
        b = self.right(x)
        torch.sigmoid(b)  # which nobody reads
        return a + b * self.gain.unsqueeze(0) + torch.arange(4)


class ByOverloads(nn.Module):
    """As the graph of a module that was cut by itself computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.ops.aten.linear.default(x, self.layer.weight, self.layer.bias)
        return torch.ops.aten.mean.dim(torch.ops.aten.relu_.default(y), [1], True)


def test_overloads_are_called_as_their_functions():
    assert found(ByOverloads) == [
        ("input", (), ()),
        ("linear", (0,), ("layer.weight", "layer.bias")),
        ("relu", (1,), ()),
        ("mean", (2,), ()),
        ("output", (3,), ()),
    ]


def test_operators_and_what_flows_between_them():
    assert found(Branches) == [
        ("input", (), ()),
        ("linear", (0,), ("left.weight", "left.bias")),
        ("relu", (1,), ()),
        ("linear", (0,), ("right.weight",)),
        ("mul", (3,), ("gain",)),
        ("add", (2, 4), ()),
        ("add", (5,), ()),
        ("output", (6,), ()),
    ]


class InPlace(nn.Module):
    def forward(self, x):
        y = x * 2
        y[:, 0] = x.sum(1)  # written through a view
        z = torch.empty_like(x)
        z.copy_(x)
        y.mul_(z)
        return y


def test_what_is_written_in_place_changes_all_views():
    assert found(InPlace) == [
        ("input", (), ()),
        ("mul", (0,), ()),
        ("sum", (0,), ()),
        ("setitem", (1, 2), ()),
        ("copy", (0,), ()),
        ("mul", (3, 4), ()),
        ("output", (5,), ()),
    ]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


class Own(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


class ByValue(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.value * 2


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (ByValue, "it cannot be run on tensors without memory: "),
        (Constant, "what it returns does not follow from its input by functions of PyTorch"),
    ],
)
def test_what_cannot_be_followed_is_said(module, words):
    with pytest.raises(ValueError, match=words):
        operators(module, (4,), torch.float32)


def test_functions_inside_of_a_function_of_autograd_are_followed():
    assert [name for name, _, _ in found(Own)] == ["input", "mul", "output"]


def test_a_call_of_a_library_is_one_operator():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return F.normalize(self.inside(x, x, x)[0])

    operator = operators(Attention, (3, 4), torch.float32)[1]
    assert operator == Operator(
        "multi_head_attention_forward",
        (0,),
        tuple(f"inside.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")),
    )


def after_a_linear_layer(layer, inplace):
    return nn.Sequential(nn.Linear(4, 4), layer(inplace=inplace))


def test_layers_that_write_in_place_are_operators():
    for layer in (nn.ReLU, nn.Hardswish, nn.Dropout):
        kept, written = (found(partial(after_a_linear_layer, layer, inplace)) for inplace in (False, True))
        assert len(kept) == 4
        assert written == kept


def test_a_module_that_converts_its_own_parameters_is_followed():
    def module():
        return nn.Sequential(nn.Linear(4, 4).to(torch.float64).to(torch.float32), nn.ReLU())

    assert [name for name, _, _ in found(module)] == ["input", "linear", "relu", "output"]
