import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout, MessageError
from wildflower.messages.sums import (
    SCALE,
    UNIT,
    WeightedSum,
    device_weight,
    flatten,
    magnitude,
    present_mask,
    split,
    vectors,
)

LAYOUT = Layout.of({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
# Magnitudes seven decades apart: a sum of float32 or float64 numbers depends on the order of these.
VALUES = st.lists(st.floats(-1e4, 1e4, width=32), min_size=6, max_size=6).map(torch.tensor)
UPDATES = st.lists(st.tuples(VALUES, st.integers(1, 5000)), min_size=1, max_size=6)


def summed(updates) -> WeightedSum:
    total = WeightedSum.zeros(LAYOUT)
    for flat, weight in updates:
        total.add(flat, weight)
    return total


def test_a_sum_is_this():
    # 2 x 0.5 + 3 x -0.25 = 0.25 and 2 x 1 + 3 x 2 = 8, in multiples of 2^-28.
    total = WeightedSum.zeros(Layout.of({"w": torch.zeros(2)}))
    total.add(torch.tensor([0.5, 1.0]), 2)
    total.add(torch.tensor([-0.25, 2.0]), 3)
    assert total.total.tolist() == [2**26, 2**31]
    assert total.weight == 5
    assert SCALE == 2**28


def test_a_sum_from_another_start_is_this():
    """Two devices, of weights 2 and 3; the second lacks class 1, whose row is the last two values."""
    layout = Layout.of({"w": torch.zeros(1), "c": torch.zeros(2, 2)})
    total = WeightedSum.zeros(layout, classes=2)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    total.add(values, 2, torch.tensor([True, True]), ((1, 5, 2),))
    total.add(values, 3, torch.tensor([True, False]), ((1, 5, 2),))
    moved = total.moved(torch.tensor([10.0, -1.0, 0.0, 0.5, 0.0], dtype=torch.float64), 7, ((1, 5, 2),))
    assert [value / SCALE for value in moved.total.tolist()] == [7 * v for v in (5 * 11.0, 5 * 1.0, 5 * 3.0, 9.0, 10.0)]
    assert (moved.weight, moved.class_weight.tolist()) == (35, [35, 14])
    assert moved.largest >= magnitude(moved.total)
    assert total.weight == 5
    with pytest.raises(MessageError, match="small enough to add exactly"):
        total.moved(torch.full((5,), 1e9, dtype=torch.float64), 64)


def test_what_is_smaller_than_the_unit_is_rounded_to_even():
    total = WeightedSum.zeros(Layout.of({"w": torch.zeros(4)}))
    total.add(torch.tensor([0.5, 1.5, -0.75, 2.25], dtype=torch.float64) / SCALE, 1)
    assert total.total.tolist() == [0, 2, -1, 2]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.sampled_from([1, 3, 600, UNIT, 2**29, 2**29 + 1, 2**31 + 1]),
)
@example([2.0**23, -(2.0**23), 1e-30], 1)  # 2^51 units, where shifting ends
@example([0.5 / SCALE, 1.5 / SCALE, -0.5 / SCALE, -2.5 / SCALE], 1)
def test_values_are_rounded_as_whole_fractions_are(values, weight):
    exact = [round(Fraction(value) * weight * SCALE) for value in values]  # Python rounds halves to even
    total = WeightedSum(torch.zeros(len(values), dtype=torch.int64))
    if max(map(abs, exact)) >= 2**62:
        with pytest.raises(MessageError):
            total.add(torch.tensor(values), weight)
        return
    total.add(torch.tensor(values), weight)
    if weight <= 2**29:  # of larger ones the product with 24 bits is not exact in float64
        assert total.total.tolist() == exact
    else:
        assert total.total.tolist() == pytest.approx(exact, rel=2**-52)


@given(UPDATES, st.randoms())
def test_the_order_of_additions_does_not_matter(updates, random):
    shuffled = updates.copy()
    random.shuffle(shuffled)
    assert torch.equal(summed(updates).total, summed(shuffled).total)


@given(UPDATES, st.integers(0, 6))
def test_the_grouping_of_additions_does_not_matter(updates, cut):
    grouped = summed(updates[:cut])
    grouped.include(summed(updates[cut:]))
    whole = summed(updates)
    assert torch.equal(grouped.total, whole.total)
    assert grouped.weight == whole.weight == sum(weight for _, weight in updates)


def test_float_addition_would_have_depended_on_the_order():
    updates = [(torch.full((6,), value), 3) for value in (1e4, 1e-4, -1e4, 0.1)]
    floats = {float(sum(flat[0] * weight for flat, weight in order)) for order in itertools.permutations(updates)}
    assert len(floats) > 1
    assert len({int(summed(order).total[0]) for order in itertools.permutations(updates)}) == 1


def test_rows_of_absent_classes_do_not_count():
    # Layout: w is (classes = 2, 2), b is (classes,): elements 0..3 and 4..5 of the flat vector.
    spans = ((0, 4, 2), (4, 6, 1))
    total = WeightedSum.zeros(LAYOUT, classes=2)
    total.add(torch.tensor([1.0, 1, 1, 1, 1, 1]), 2, torch.tensor([True, True]), spans)
    total.add(torch.tensor([10.0, 10, 10, 10, 10, 10]), 3, torch.tensor([False, True]), spans)
    assert (total.total / SCALE).tolist() == [2, 2, 32, 32, 2, 32]
    assert total.class_weight.tolist() == [2, 5]
    assert total.weight == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30, -(2.0**35)], ids=str)
def test_a_value_that_cannot_be_added_is_refused_and_changes_nothing(bad):
    total = WeightedSum.zeros(LAYOUT, classes=2)
    everything = torch.tensor([True, True])
    total.add(torch.ones(6), 1, everything, ((0, 4, 2),))
    before = total.total.clone()
    flat = torch.ones(6)
    flat[3] = bad
    with pytest.raises(MessageError, match="finite and small enough"):
        total.add(flat, 1, everything, ((0, 4, 2),))
    assert torch.equal(total.total, before)
    assert total.weight == 1
    assert total.class_weight.tolist() == [1, 1]
    total.add(torch.ones(6), 1, everything, ((0, 4, 2),))  # and it goes on
    assert total.total.tolist() == [2 * SCALE] * 6


def test_many_large_values_are_refused_before_they_overflow():
    total = WeightedSum.zeros(LAYOUT)
    for _ in range(4):
        total.add(torch.full((6,), 2.0**31), 1)
    total.add(torch.full((6,), -(2.0**31)), 1)  # smaller again, but the bound only grows
    for _ in range(2):
        total.add(torch.full((6,), 2.0**31), 1)
    with pytest.raises(MessageError):  # the eighth times 2^31 x 2^28 could reach 2^62
        total.add(torch.full((6,), 2.0**31), 1)
    assert total.total.tolist() == [5 * 2**59] * 6


def test_a_sum_that_is_too_large_to_include_is_refused_and_changes_nothing():
    one, other = WeightedSum.zeros(LAYOUT), WeightedSum.zeros(LAYOUT)
    one.add(torch.full((6,), 2.0**33), 1)
    other.add(torch.full((6,), 2.0**33), 1)
    before = one.total.clone()
    with pytest.raises(MessageError):
        one.include(other)
    assert torch.equal(one.total, before)
    assert one.weight == 1


@pytest.mark.parametrize("weight", [0, -1])
def test_a_weight_is_positive(weight):
    with pytest.raises(MessageError, match="positive"):
        WeightedSum.zeros(LAYOUT).add(torch.zeros(6), weight)


def test_weights_of_devices():
    assert device_weight(Merge(weighting="examples"), 240) == 240
    assert device_weight(Merge(weighting="uniform"), 240) == UNIT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_flatten_and_split_are_inverse(dtype):
    state = {"w": torch.arange(4.0).view(2, 2).to(dtype), "b": torch.tensor([0.5, -1.5]).to(dtype)}
    layout = Layout.of(state)
    flat = flatten(state, layout)
    assert flat.tolist() == [0, 1, 2, 3, 0.5, -1.5]
    back = split(flat, layout)
    assert all(torch.equal(back[name].double(), state[name].double()) for name in state)


def test_large_tensors_are_added_where_they_lie_and_small_ones_together():
    generator = torch.Generator().manual_seed(0)
    shapes = {"small": (3,), "smaller": (2, 2), "large": (5, 2**14), "bias": (5,)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    layout = Layout.of(state)
    found = vectors(state, layout)
    assert [len(vector) for vector in found] == [7, 5 * 2**14, 5]
    assert found[1].data_ptr() == state["large"].data_ptr()
    assert torch.equal(torch.cat(found), flatten(state, layout))

    # The classes are the five rows of the large one and the five of the bias.
    large = (layout.numel - 5 - 5 * 2**14, layout.numel - 5, 2**14)
    bias = (layout.numel - 5, layout.numel, 1)
    present = torch.tensor([True, False, True, True, False])
    by_vectors, by_one = (WeightedSum.zeros(layout, classes=5) for _ in range(2))
    by_vectors.add(found, 3, present, (large, bias))
    by_one.add(flatten(state, layout), 3, present, (large, bias))
    assert torch.equal(by_vectors.total, by_one.total)
    assert by_vectors.largest == by_one.largest
    assert not split(by_vectors.total, layout)["large"][1].any()
    assert state["large"][1].all()  # what the device trained is as it was


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_the_magnitude_is_the_largest_absolute_value(dtype):
    assert magnitude(torch.tensor([0.5, -4.0, 2.0]).to(dtype)) == 4.0
    assert math.isinf(magnitude(torch.tensor([-math.inf, 2.0]).to(dtype)))
    assert math.isnan(magnitude(torch.tensor([8.0, math.nan, -1.0]).to(dtype)))
    assert magnitude(torch.zeros(0, 3).to(dtype)) == 0.0


def test_the_magnitude_of_the_least_whole_number_is_positive():
    assert magnitude(torch.tensor([-(2**63), 5])) == 2.0**63


def test_present_classes_are_a_mask():
    assert present_mask([2, 0, 2], 4, "device 1").tolist() == [True, False, True, False]


@pytest.mark.parametrize("present", [None, [], [4]])
def test_classes_that_do_not_exist_are_refused(present):
    with pytest.raises(MessageError, match="device 1"):
        present_mask(present, 4, "device 1")


@pytest.mark.parametrize("count", [3, 6])
def test_values_of_another_length_are_refused_and_change_nothing(count):
    found = WeightedSum(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="the values are not 5"):
        found.add(torch.ones(count), 1)
    assert not found.total.any()
    assert found.weight == 0
