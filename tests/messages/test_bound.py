"""messages/bound.py."""

import math

import pytest
import torch

from messages.bound import bounded

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
