import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wildflower.models.composition import Frame, total
from wildflower.models.convolutions import Conv
from wildflower.models.cost import OPTIMIZERS, cost
from wildflower.models.family import FAMILIES, make_family
from wildflower.models.layers import Block, Channels, Flatten, Linear, Relu
from wildflower.models.profile import Piece, pieces, profile

torch.set_num_threads(1)

SPECS = [
    *({"name": name} for name in FAMILIES if name not in ("resnet152", "bert", "choice", "darts")),
    {"name": "cnn3", "norm": "static", "scaler": True},
    {"name": "cnn3", "kernel": 5},
    {"name": "resnet18", "activation": "relu6", "scaler": True},
    {"name": "resnet18", "preactivation": True},
]


def composed(family, arch, batch_size, optimizer):
    frame = Frame.of(family, batch_size, optimizer)
    profiles = [profile(piece, batch_size, piling=frame.piling) for piece in pieces(family, arch)]
    return total(profiles, frame)


def asked(family, arch, batch_size, optimizer):
    return cost(family, arch, batch_size=batch_size, optimizer=optimizer)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", SPECS, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch_size=st.sampled_from([1, 2, 7, 16, 64, 500]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_the_cost_of_a_network_is_composed_of_its_blocks(spec, seed, batch_size, optimizer):
    family = make_family(spec)
    arch = family.sample(np.random.default_rng(seed))
    assert composed(family, arch, batch_size, optimizer) == asked(family, arch, batch_size, optimizer)


@pytest.mark.parametrize("name", ["resnet152", "bert"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_also_of_a_deep_network(name, batch_size):
    family = make_family({"name": name})
    for arch in (family.full(), family.smallest(), family.sample(np.random.default_rng(0))):
        for optimizer in OPTIMIZERS:
            assert composed(family, arch, batch_size, optimizer) == asked(family, arch, batch_size, optimizer)


def test_one_block_by_hand():
    # Two examples of 4 features, 3 outputs: input 32 bytes, result 24, weight and bias 12 + 3 entries.
    block = Block("only", (Linear("one", Channels("a", 4, 4), Channels("b", 3, 3)), Relu()))
    found = profile(Piece(block, (4,), first=False, held=False), 2)
    assert (found.parameters, found.buffers, found.largest_parameter) == (15, 0, 12)
    assert found.forward_peak_bytes == found.added_bytes == 24  # the input stays, for the linear layer saves it
    assert found.keeps_result  # the ReLU's
    # Backward: the result and its gradient (24 + 24), then a second one of the ReLU (72); then only one gradient and
    # gradients of input and parameters: 24 + 32 + 60 = 116.
    assert found.backward_peak_bytes == 116
    # Without a gradient of the input: 24 + 60 = 84.
    assert profile(Piece(block, (4,), first=True, held=True), 2).backward_peak_bytes == 84


def test_an_input_that_nobody_needs_is_let_go():
    # The head begins with a pooling, which saves nothing: its input, 2 x 512 x 4 x 4 floats, is another's or goes.
    family = make_family({"name": "resnet18"})
    head = pieces(family, family.full())[-1]
    held = profile(head, 2)
    alone = profile(Piece(head.block, head.shape, head.first, held=False), 2)
    assert head.held
    assert held.added_bytes - alone.added_bytes == 4 * 2 * 512 * 4 * 4
    assert held.backward_peak_bytes - alone.backward_peak_bytes == 4 * 2 * 512 * 4 * 4


def test_pieces_know_their_surroundings():
    family = make_family({"name": "resnet18"})
    found = pieces(family, family.architecture(without=["stage1_1"]))
    assert [piece.block.name for piece in found][:3] == ["stem", "stage1_0", "stage2_0"]
    assert [piece.first for piece in found] == [True] + [False] * (len(found) - 1)
    assert all(piece.held for piece in found)  # every block ends in an activation
    assert found[2].shape == (64, 32, 32)
    # Average pooling ends a block of this one, and needs its input only.
    assert [
        piece.held for piece in pieces(make_family({"name": "lenet5"}), make_family({"name": "lenet5"}).full())
    ] == [
        True,
        False,
        False,
    ]


def test_a_block_without_a_result_of_its_own_is_refused():
    with pytest.raises(ValueError, match="block flat has no result of its own"):
        profile(Piece(Block("flat", (Flatten(),)), (4, 2, 2), first=True, held=True), 1)


def test_convolutions_are_named_by_what_they_compute():
    one, two = Channels("a", 4, 4), Channels("b", 8, 8)
    layers = (Conv("x", one, two, 3, padding=1), Conv("y", two, one, 1), Conv("z", one, two, 3, padding=1))
    found = profile(Piece(Block("three", layers), (4, 6, 6), first=False, held=True), 1)
    assert found.convolutions == {((4, 6, 6), (8, 6, 6), 3), ((8, 6, 6), (4, 6, 6), 1)}
