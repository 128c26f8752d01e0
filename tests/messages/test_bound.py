"""wildflower/messages/bound.py."""

import math
import re

import pytest
import torch

from wildflower.messages.bound import bounded, check_sum
from wildflower.messages.error import MessageError
from wildflower.messages.packing import Layout
from wildflower.messages.sums import SCALE, WeightedSum

SENT = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[0.0]])}


def test_what_is_within_the_bound_stays_as_it_is():
    returned = {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([[4.0]])}  # a change of norm 5
    kept, far = bounded(returned, SENT, 5.0)
    assert not far
    assert all(torch.equal(kept[name], returned[name]) for name in returned)


def test_what_is_beyond_keeps_its_direction():
    returned = {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([[4.0]])}
    kept, far = bounded(returned, SENT, 2.5)
    assert far
    assert kept["a"].tolist() == [1.0, 3.5]
    assert kept["b"].tolist() == [[2.0]]
    assert kept["a"].dtype == torch.float32


def test_huge_values_are_bounded_too():
    kept, far = bounded({"a": torch.tensor([1e30, 2.0])}, SENT, 1.0)
    assert far
    assert kept["a"].tolist() == [2.0, 2.0]


def test_a_tensor_that_was_not_sent_counts_from_zero():
    kept, far = bounded({"new": torch.tensor([3.0, 4.0])}, SENT, 1.0)
    assert far
    assert kept["new"].tolist() == pytest.approx([0.6, 0.8])
    assert math.isclose(float(kept["new"].norm()), 1.0, rel_tol=1e-6)


def test_nothing_is_within_every_bound():
    assert bounded({}, SENT, 1.0) == ({}, False)


# Sums that nobody has seen by themselves


LAYOUT = Layout.of({"norm.running_var": torch.zeros(2), "weight": torch.zeros(3)})
BEGUN = {"weight": torch.tensor([0.5, -4.0, 0.0]), "norm.running_var": torch.tensor([1.0, 1.0])}


def a_sum(*updates, weight=100):
    """The sum of devices' updates, each a variance and three weights, of equal weights."""
    found = WeightedSum.zeros(LAYOUT)
    for variance, *weights in updates:
        found.add(torch.tensor([variance, 1.0, *weights]), weight)
    return found


@pytest.mark.parametrize(
    ("updates", "why"),
    [
        ([(1.0, 0.5, -4.0, 0.0), (2.0, 1.0, -3.0, 9.0)], ""),
        ([(1.0, 0.5, -4.0, 0.0), (2.0, 1.0, -3.0, 70.0)], ""),  # by 35 in the mean: 10 times 4 is the most
        ([(1.0, 0.5, -4.0, 0.0), (2.0, 1.0, -3.0, 90.0)], "a coordinate of 'weight' has moved by 45, and 40 is"),
        ([(1.0, -39.0, 36.0, -39.0)], ""),
        ([(1.0, -40.0, 36.0, -39.0)], "has moved by 40.5"),
        ([(5e4, 0.5, -4.0, 0.0)], ""),  # statistics follow the data
        ([(1.0, 0.5, -4.0, 0.0), (-2.0, 0.5, -4.0, 0.0)], "'norm.running_var' holds a variance below 0"),
    ],
)
def test_a_sum_is_held_to_what_its_devices_began_from(updates, why):
    if not why:
        check_sum(a_sum(*updates), LAYOUT, BEGUN)
        return
    with pytest.raises(MessageError, match=re.escape(why)):
        check_sum(a_sum(*updates), LAYOUT, BEGUN)


def test_a_sum_leaves_honest_devices_room_to_add_up():
    """Their own bound is 2^62: a mean that is nearer to it would have them refused in later rounds."""
    found = a_sum((1.0, 0.5, -4.0, 0.0))
    found.total[0] = 2**58 + 2**40
    with pytest.raises(MessageError, match=r"'norm\.running_var' holds a mean of 1"):
        check_sum(found, LAYOUT, BEGUN)


def test_rows_of_classes_that_few_devices_hold_count_as_much_as_those():
    layout = Layout.of({"head": torch.zeros(2, 1)})
    found = WeightedSum.zeros(layout, classes=2)
    spans = ((0, 2, 1),)
    sent = {"head": torch.tensor([[3.0], [-3.0]])}
    found.add(torch.tensor([3.0, -3.0]), 10, torch.tensor([True, False]), spans)
    found.add(torch.tensor([3.0, -3.0]), 10, torch.tensor([True, True]), spans)
    check_sum(found, layout, sent, spans, norm_bound=1e-3)  # nothing has moved, whoever holds the second class
    found.total[1] += int(2 * 20 * SCALE)  # by 2 of the whole weight
    check_sum(found, layout, sent, spans)
    with pytest.raises(MessageError, match=r"moved by 2, and aggregation.norm-bound is 1\.9"):
        check_sum(found, layout, sent, spans, norm_bound=1.9)


def test_what_devices_have_scaled_down_is_within_the_norm_bound():
    generator = torch.Generator().manual_seed(5)
    layout = Layout.of({"weight": torch.zeros(5000)})
    sent = {"weight": torch.randn(5000, generator=generator) * 30}
    for bound in (1e-3, 1.0, 50.0):
        found, far = WeightedSum.zeros(layout), torch.randn(5000, generator=generator)
        for weight in (1, 7, 4000):
            kept, moved = bounded({"weight": sent["weight"] + 10 * far}, sent, bound)
            assert moved
            found.add(kept["weight"], weight)
        check_sum(found, layout, sent, norm_bound=bound)
        with pytest.raises(MessageError, match=r"aggregation\.norm-bound is"):
            check_sum(found, layout, sent, norm_bound=bound * 0.8)
