"""Costs of what a client step holds beside the training."""

import pytest

from wildflower.models.cost import Cost
from wildflower.strategies.pricing import with_parameter_copies


@pytest.mark.parametrize("entry_bytes", [2, 4, 8])
def test_copies_of_all_parameters_have_entries_of_their_type(entry_bytes):
    price = Cost(100, 0, 0, 1000, 0, entry_bytes=entry_bytes)
    assert with_parameter_copies(price, 3).peak_training_memory_bytes == 1000 + 3 * 100 * entry_bytes
