"""Batch norm statistics that stay on their device, and the classes that a device is asked for."""

import pytest
import torch
from messages.layouts import sent_layout

from client_app.state import DeviceState
from messages.orders import LocalTraining
from messages.packing import unpack
from tests.client_app.work_orders import LENET, answers, batch, digits, work_order

HALF = LENET.width(0.5)


@pytest.fixture
def ask(tmp_path):
    """Train device 0 for some steps in a round; what it returns."""

    def train(round_number=1, steps=2, keeps=True, run="a run"):
        order = work_order(keeps_statistics=keeps, asks_class_counts=keeps, seed=round_number)
        training = LocalTraining(batch_size=10, steps=steps, learning_rate=0.0001)
        content = batch(order, round=round_number, training=training, merge=None, state_dir=str(tmp_path), run=run)
        reply, arrays = answers(content)
        return reply.updates[0], unpack(arrays[0], sent_layout(LENET, HALF))

    return train


def means(weights):
    return weights["block1.norm.running_mean"]


def test_statistics_begin_as_those_of_the_first_batches(ask):
    """With learning rate next to 0, weights stay: one step's statistics are the batch's, and not a tenth of them."""
    tenth, own = ask(steps=1, keeps=False)[1], ask(steps=1)[1]
    torch.testing.assert_close(means(own), 10 * means(tenth))


def test_the_next_training_goes_on_from_the_devices_own_statistics(ask):
    first = ask(steps=1)[1]
    second = ask(round_number=2, steps=1)[1]
    # One more batch with momentum 0.1, from what was kept and not from the zeros that were sent.
    assert not torch.equal(means(first), means(second))
    # A round that is done again begins where it began.
    assert torch.equal(means(ask(round_number=2, steps=1)[1]), means(second))
    # Another run knows nothing of it, and begins with what this one was sent.
    another = means(ask(round_number=2, steps=1, run="another")[1])
    torch.testing.assert_close(means(second), 0.9 * means(first) + 0.1 * another, rtol=1e-3, atol=1e-5)


def test_statistics_are_kept_only_where_that_is_asked(ask, tmp_path):
    ask(keeps=False)
    state = DeviceState(str(tmp_path), "a run", 0)
    key = f"statistics-of-model-{sent_layout(LENET, HALF).digest}"
    assert state.load(key, 2) is None
    kept = ask()[1]
    found = state.load(key, 2)
    assert set(found) == {f"block{n}.norm.running_{what}" for n in (1, 2) for what in ("mean", "var")}
    assert torch.equal(found["block1.norm.running_mean"], means(kept))


def test_a_device_says_its_classes_where_it_is_asked(ask):
    update, _ = ask()
    labels = digits().train.labels[digits().shard(0).train]
    assert update.class_counts == labels.bincount(minlength=10).tolist()
    assert ask(keeps=False)[0].class_counts is None
