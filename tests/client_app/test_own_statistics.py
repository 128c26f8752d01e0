"""RecipFL's client step: batch norm statistics stay on their device, and a device says which classes it holds."""

import pytest
import torch

from tests.client_app.work_orders import LENET, Apart, answers, batch, digits, weights_of, work_order
from wildflower.client_app.kept_state import DeviceState
from wildflower.messages.orders import LocalTraining
from wildflower.messages.packing import unpack
from wildflower.strategies.recipfl.device import TaughtTraining
from wildflower.strategies.training_steps import ClassCounts

HALF = LENET.width(0.5)
OWN = TaughtTraining(taught=False)


@pytest.fixture
def ask(tmp_path):
    """Train device 0 for some steps in a round; what it returns."""

    def train(round_number=1, steps=2, local=OWN, run="a run"):
        order = work_order(local=local, seed=round_number)
        training = LocalTraining(batch_size=10, steps=steps, learning_rate=0.0001)
        content = batch(order, round=round_number, training=training, state_dir=str(tmp_path), run=run)
        reply, arrays = answers(content)
        return reply.updates[0], unpack(arrays[0], weights_of(LENET, HALF).layout) if arrays else {}

    return train


def means(weights):
    return weights["block1.norm.running_mean"]


def test_statistics_begin_as_those_of_the_first_batches(ask):
    """With learning rate next to 0, weights stay: one step's statistics are the batch's, and not a tenth of them."""
    tenth, own = ask(steps=1, local=Apart())[1], ask(steps=1)[1]
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


def test_statistics_are_kept_only_where_the_device_half_keeps_them(ask, tmp_path):
    assert not ask(local=Apart())[0].state_kept
    state = DeviceState(str(tmp_path), "a run", 0)
    key = f"statistics-{weights_of(LENET, HALF).layout.digest}"
    assert state.load(key, 2) is None
    update, kept = ask()
    assert update.state_kept
    found = state.load(key, 2)
    assert set(found) == {f"block{n}.norm.running_{what}" for n in (1, 2) for what in ("mean", "var")}
    assert torch.equal(found["block1.norm.running_mean"], means(kept))


def test_a_device_says_its_classes_where_the_device_half_does(ask):
    update, _ = ask(local=ClassCounts())
    labels = digits().train.labels[digits().shard(0).train]
    assert update.facts == {"class_counts": labels.bincount(minlength=10).tolist()}
    assert ask(local=Apart())[0].facts == {}
