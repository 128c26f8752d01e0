"""The attacks are attacks: what a device learns from under them is not what it holds."""

import torch.nn.functional as F

from benchmarks.trust.attack import flipped_labels
from tests.client_app.work_orders import context_of, work_order


def taught():
    """The labels that a device learns from in a round, and their order."""
    made, seen = context_of(work_order(2)), []
    model = made.build(made.received["weights"])
    made.fit(model, lambda inputs, labels: seen.extend(labels.tolist()) or F.cross_entropy(model(inputs), labels))
    return seen


def test_flipped_labels_are_taught():
    honest = taught()
    with flipped_labels():
        assert taught() == [9 - label for label in honest]
    assert taught() == honest
