"""TensorSets as int8 and float16: how many bytes, how far off, and what becomes of other bytes."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import changed_bytes
from wildflower.messages.encoding import (
    LEAST_BLOCK,
    Wire,
    decode,
    decode_entry,
    encode,
    encode_entry,
    encoded_bytes,
    restored,
)
from wildflower.messages.error import MessageError
from wildflower.messages.packing import Layout
from wildflower.models.cnn import Cnn3
from wildflower.models.lenet import LeNet5
from wildflower.models.vit import VitTiny

WIRES: tuple[Wire, ...] = ("float32", "float16", "int8", "qsgd")


def tensors_of(shapes, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {f"t{n}": scale * torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}


SHAPES = [(), (1,), (7,), (0,), (3, 0), (1, 1), (5, 3), (300,), (6, 1, 5, 5), (130, 129), (2, 1000), (64, 64, 3)]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_values_come_back_within_half_a_step(wire, scale):
    tensors = tensors_of(SHAPES, scale=scale)
    layout = Layout.of(tensors)
    data = encode(tensors, layout, wire)
    assert len(data) == encoded_bytes(layout, wire)
    found = decode(data, layout, wire)
    for name, value in tensors.items():
        assert found[name].shape == value.shape
        error = (found[name].double() - value.double()).abs()
        if wire == "float32":
            assert torch.equal(found[name], value)
        elif value.numel() and (wire == "float16" or value.numel() < 16):
            # 11 bits of each value, or 2^-24 of the smallest 16-bit float where the largest is 2^14.
            largest = float(value.double().abs().max())
            assert bool((error <= value.double().abs() * 2**-11 + largest * 2**-38 + 2e-45).all())
        elif value.numel():
            channel = value.numel() // value.shape[0]
            block = channel * max(1, math.ceil(LEAST_BLOCK / channel))
            for part, off in zip(value.flatten().split(block), error.flatten().split(block), strict=True):
                largest = float(part.double().abs().max())
                assert float(off.max()) <= largest / 127 / 2 * (1 + 2**-7) + 1e-40


def test_qsgd_has_64_levels_of_a_norm_and_is_right_in_the_mean():
    """256 ones have the norm 16, and so steps of a quarter: all are level 4."""
    ones = torch.ones(1, 256)
    [entry] = Layout.of({"w": ones}).entries
    assert torch.equal(decode_entry(encode_entry(ones, entry, "qsgd", change=True), entry, "qsgd"), ones)
    values = torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    [entry] = Layout.of({"w": values}).entries
    found = decode_entry(encode_entry(values, entry, "qsgd", change=True), entry, "qsgd")
    steps = values.norm(dim=1, keepdim=True) / 64
    assert bool(((found - values).abs() <= steps * (1 + 2**-7)).all())
    # A uniform chance has a standard deviation of at most half a step, over the root of 19,200 elements.
    assert abs(float(((found - values) / steps).mean())) < 4 * 0.5 / 19_200**0.5
    assert float((found - values).abs().max()) > 0.5 * float(steps.min())  # it is no rounding to the nearest
    again = decode_entry(encode_entry(values, entry, "qsgd", change=True), entry, "qsgd")
    assert torch.equal(found, again)
    as_value = decode_entry(encode_entry(values, entry, "qsgd"), entry, "qsgd")
    assert torch.equal(as_value, decode_entry(encode_entry(values, entry, "int8"), entry, "int8"))


def test_zeros_and_masks_travel_as_they_are():
    tensors = {
        "zeros": torch.zeros(4, 200),
        "bias": torch.zeros(3),
        "mask": torch.tensor([1, 255, 0], dtype=torch.uint8),
        "channels": torch.tensor([5, -1], dtype=torch.int32),
        "wide": torch.tensor([[1e-300]], dtype=torch.float64),
    }
    layout = Layout.of(tensors)
    for wire in WIRES:
        found = decode(encode(tensors, layout, wire), layout, wire)
        assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_statistics_of_very_different_channels_keep_eleven_bits():
    variances = {"norm.running_var": torch.tensor([1e-4, 1.0, 1e4] * 100)}
    layout = Layout.of(variances)
    found = decode(encode(variances, layout, "int8"), layout, "int8")["norm.running_var"]
    torch.testing.assert_close(found, variances["norm.running_var"], rtol=2**-11, atol=0.0)


def test_the_largest_and_smallest_numbers():
    largest = float(np.finfo(np.float32).max)
    tensors = {"b": torch.tensor([largest / 2, 1.0]), "w": torch.tensor([[largest, -largest / 3]] * 8)}
    layout = Layout.of(tensors)
    found = decode(encode(tensors, layout, "int8"), layout, "int8")
    assert float(found["b"][0]) == pytest.approx(largest / 2, rel=1e-3)
    assert float(found["w"][7, 1]) == pytest.approx(-largest / 3, rel=0.02)


@pytest.mark.parametrize(
    ("family", "least"),
    [(LeNet5(), 3.9), (Cnn3(), 3.9), (VitTiny((1, 28, 28), hidden=48, depth=6, heads=3, mlp=96), 3.9)],
    ids=["lenet5", "cnn3", "vit"],
)
def test_how_many_times_fewer_bytes(family, least):
    layout = Layout.of(family.tensors(family.full()))
    assert layout.nbytes / encoded_bytes(layout, "int8") >= least
    assert layout.nbytes / encoded_bytes(layout, "float16") >= 1.99


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(4,), (2, 9)])
def test_what_is_not_finite_is_not_encoded(bad, shape):
    tensors = {"w": torch.full(shape, bad)}
    with pytest.raises(MessageError, match="tensor 'w' holds values that are not finite"):
        encode(tensors, Layout.of(tensors), "int8")


def test_other_tensors_are_not_encoded():
    with pytest.raises(MessageError, match="cannot encode weights: missing tensor 'w'"):
        encode({}, Layout.of({"w": torch.zeros(2)}), "int8")


@pytest.mark.parametrize("wire", ["int8", "float16"])
def test_any_bytes_of_the_right_length_are_as_many_values_and_others_are_refused(wire):
    tensors = tensors_of(SHAPES)
    layout = Layout.of(tensors)
    honest = encode(tensors, layout, wire)

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def change(data):
        changed = changed_bytes(data.draw, honest)
        if len(changed) != len(honest):
            with pytest.raises(MessageError, match=f"weights encoded as {wire} have {len(changed)} bytes instead of"):
                decode(changed, layout, wire)
        else:
            assert not layout.difference(Layout.of(decode(changed, layout, wire)))

    change()
    noise = random.Random(1).randbytes(len(honest))
    assert not layout.difference(Layout.of(decode(noise, layout, wire)))


def test_a_change_is_added_to_what_the_server_had():
    sent = {"same": torch.tensor([1.0, 2.0]), "other form": torch.zeros(3)}
    changes = {"same": torch.tensor([0.5, 0.0]), "other form": torch.ones(2), "new": torch.ones(1)}
    found = restored(changes, sent, Layout.of(changes))
    assert {name: value.tolist() for name, value in found.items()} == {
        "same": [1.5, 2.0],
        "other form": [1.0, 1.0],
        "new": [1.0],
    }


@pytest.mark.parametrize("wire", ["int8", "float16"])
def test_a_variance_that_shrinks_to_zero_does_not_become_negative(wire):
    """0.29 travels down as 0.2900390625: as a change the 0.0 that was trained would come back as -0.0000390625."""
    full = {"norm.running_var": torch.tensor([0.29, 1.0]), "norm.running_mean": torch.tensor([-0.29, 1.0])}
    layout = Layout.of(full)
    received = decode(encode(full, layout, wire), layout, wire)
    assert float(received["norm.running_var"][0]) == 0.2900390625
    trained = {"norm.running_var": torch.tensor([0.0, 1.0]), "norm.running_mean": torch.tensor([-0.5, 0.0])}
    found = restored(decode(encode(trained, layout, wire), layout, wire), full, layout)
    assert {name: value.tolist() for name, value in found.items()} == {
        "norm.running_var": [0.0, 1.0],
        "norm.running_mean": [-0.5, 0.0],
    }
