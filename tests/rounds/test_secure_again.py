"""Rounds under secure aggregation that a server does again, because it has crashed or because it lies."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import Context, Message

from tests.client_app.work_orders import Apart
from tests.grid import InProcessGrid
from tests.rounds.test_hostile_secure import run
from tests.rounds.test_secure_aggregation import kind_of
from tests.small_run import connected_grid, same_bits
from wildflower.client_app import work, worker
from wildflower.client_app.app import app as client
from wildflower.client_app.prepared import family_of
from wildflower.messages.orders import Batch, Reply
from wildflower.messages.tensor_sets import digest
from wildflower.messages.wire import from_records, to_records
from wildflower.models.architecture import Architecture

ALL, HALF = list(range(10)), [5, 6, 7, 8, 9]
# What a device says that has been in a sum from the same weights.
BEFORE = "failed: from these weights it has been in a sum together with devices [0, 1, 2, 3, 4], and not all are there"


@pytest.fixture(autouse=True)
def _work_is_done_in_this_process(monkeypatch):
    monkeypatch.setattr(worker, "ask", work.do)


def without(grid: InProcessGrid, *lost: tuple[int, str]) -> InProcessGrid:
    """Devices are lost at a step of every round, device -1 being all of them."""

    def app(message: Message, context: Context) -> Message:
        device = message.metadata.dst_node_id - 1
        if {(device, kind_of(message)), (-1, kind_of(message))} & set(lost):
            raise RuntimeError("this node is lost")
        return client(message, context)

    grid.app = app
    return grid


def test_rounds_that_were_unmasked_give_the_same_bits_again(tmp_path):
    """A server that has lost its newest checkpoints, and goes on from one of two rounds before."""
    before = run(tmp_path / "a", connected_grid(10, tmp_path), 2)
    again = run(tmp_path / "b", connected_grid(10, tmp_path), 3)
    assert all(same_bits(before.models[number], again.models[number]) for number in (1, 2))
    assert [again.trained(number) for number in (1, 2, 3)] == [ALL] * 3


@pytest.mark.parametrize(("crash", "trained"), [("confirm", ALL), ("reveal", [d for d in ALL if d != 3])])
def test_a_round_that_was_not_unmasked_is_begun_anew(crash, trained, tmp_path):
    """With whoever is there, or with those that have confirmed the sum, which could have been unmasked."""
    crashed = run(tmp_path / "a", without(connected_grid(10, tmp_path), (3, "train"), (-1, crash)), 1)
    assert crashed.trained(1) == []
    again = run(tmp_path / "b", connected_grid(10, tmp_path), 2)
    assert again.trained(1) == trained
    assert again.trained(2) == ALL
    lost = () if 3 in trained else ((3, "train"),)
    fresh = run(tmp_path / "c", without(connected_grid(10, tmp_path / "elsewhere"), *lost), 1)
    assert same_bits(fresh.models[1], again.models[1])


def test_where_a_device_has_left_since_its_block_waits_for_the_next_round(tmp_path):
    run(tmp_path / "a", connected_grid(10, tmp_path), 1)
    again = run(tmp_path / "b", without(connected_grid(10, tmp_path), (2, "keys")), 2)
    assert again.trained(1) == HALF
    assert [again.outcomes(1)[device] for device in (0, 1, 3, 4)] == [BEFORE] * 4
    assert again.trained(2) == [device for device in ALL if device != 2]


@pytest.mark.parametrize("step", ["confirm", "reveal"])
def test_a_round_that_was_unmasked_in_part_is_finished_with_the_same_devices(step, tmp_path):
    """Some have noted the sum, and some were lost before they did."""
    crashed = run(tmp_path / "a", without(connected_grid(10, tmp_path), (3, step), (8, step)), 1)
    assert crashed.trained(1) == ALL
    again = run(tmp_path / "b", connected_grid(10, tmp_path), 1)
    assert again.trained(1) == ALL
    assert same_bits(crashed.models[1], again.models[1])


@pytest.mark.parametrize("name", ["small", "another-run"])
def test_no_other_sum_of_the_same_weights_is_had_under_any_name_of_the_run(name, tmp_path):
    """The difference of the two sums would be what the device adds that is left out."""
    run(tmp_path / "a", connected_grid(10, tmp_path), 1)
    hostile = run(tmp_path / "b", without(connected_grid(10, tmp_path), (7, "train")), 1, run_name=name)
    assert hostile.trained(1) == [0, 1, 2, 3, 4]  # a block of the first sum; the rest is the other block
    lost = {device: outcome for device, outcome in hostile.outcomes(1).items() if device > 4 and device != 7}
    assert all("4 updates arrived, 5 are needed" in outcome for outcome in lost.values())


def test_owners_who_want_larger_sums_are_in_no_smaller_ones(tmp_path):
    grid = connected_grid(10, tmp_path)
    for node in (1, 2, 3):
        grid.contexts[node].node_config["secure-minimum"] = 8
    ran = run(tmp_path, grid, 1)
    assert ran.trained(1) == list(range(3, 10))
    assert "this device's owner wants 8 at least" in ran.outcomes(1)[0]
    assert ran.engine.population.state_dict()["refusals"] == {}  # which is no fault
    plain = run(tmp_path / "b", grid, 1, secure_aggregation__minimum=0)
    assert plain.trained(1) == list(range(3, 10))
    assert "the run needs secure-aggregation.minimum = 5" in plain.outcomes(1)[0]


@pytest.mark.parametrize("asked_otherwise", [1, 5, 9])
def test_a_server_that_lets_some_train_in_another_way_unmasks_nothing(asked_otherwise, tmp_path):
    """With a learning rate of 0 nine return what they were sent, and the rest of the sum would be that of the tenth."""
    grid = connected_grid(10, tmp_path)

    def app(message: Message, context: Context) -> Message:
        if kind_of(message) == "train" and message.metadata.dst_node_id <= asked_otherwise:
            batch, arrays = from_records(Batch, message.content)
            still = batch.training.model_copy(update={"learning_rate": 0.0})
            message.content = to_records(batch.model_copy(update={"training": still}), arrays)
        return client(message, context)

    grid.app = app
    ran = run(tmp_path, grid, 1)
    assert ran.trained(1) == []
    assert same_bits(ran.models[0], ran.models[1])

    # Five of ten are too few to reveal anything. Nine do, but the masks that they share with the tenth do not cancel.
    told = "can be of no honest updates" if asked_otherwise != 5 else "were told the same as this device"
    assert all(told in text for text in ran.outcomes(1).values())


def asking(grid: InProcessGrid, devices: Sequence[int], training: dict[str, Any], **order: Any) -> InProcessGrid:
    """A server that lies about how some devices are to train, and in their orders."""

    def app(message: Message, context: Context) -> Message:
        if kind_of(message) == "train" and message.metadata.dst_node_id - 1 in devices:
            batch, arrays = from_records(Batch, message.content)
            orders = [batch.orders[0].model_copy(update=order)]
            how = batch.training.model_copy(update=training)
            message.content = to_records(batch.model_copy(update={"orders": orders, "training": how}), arrays)
        return client(message, context)

    grid.app = app
    return grid


@pytest.mark.parametrize("crash", ["", "confirm"])
def test_no_device_trains_with_another_seed_from_the_same_weights(crash, tmp_path):
    """Of one batch per device, the difference of the two sums would be that of two gradients of device 7."""
    first = connected_grid(10, tmp_path)
    if crash:  # the others confirm and reveal, so that device 7 is in the sum and has not noted it
        first = without(first, (7, crash))
    before = run(tmp_path / "a", first, 1, local_steps=1, batch_size=1)
    hostile = asking(connected_grid(10, tmp_path), [7], {}, seed=12345)
    again = run(tmp_path / "b", hostile, 1, local_steps=1, batch_size=1)
    assert before.trained(1) == again.trained(1) == ALL
    assert same_bits(before.models[1], again.models[1])


@pytest.mark.parametrize("name", ["small", "another-run"])
def test_from_the_same_weights_a_device_trains_as_before(name, tmp_path):
    """Most devices have 12 examples: with batches of 11 in place of 12 nothing changes for those that have fewer."""
    before = run(tmp_path / "a", connected_grid(10, tmp_path), 1)
    hostile = asking(connected_grid(10, tmp_path), ALL, {"batch_size": 11})
    again = run(tmp_path / "b", hostile, 1, run_name=name)
    assert again.engine.population.state_dict()["refusals"] == {}
    if name == "small":  # in the same run it does again what it did
        assert same_bits(before.models[1], again.models[1])
    else:
        told = "from these very weights this device has trained for a sum with other settings"
        assert all(told in outcome for outcome in again.outcomes(1).values())
        assert same_bits(before.models[0], again.models[1])


def test_a_lost_round_is_done_again_as_it_was_though_the_learning_rate_has_fallen(tmp_path):
    """The next round begins from the same weights, with which devices have trained at the earlier rate."""
    whole = run(tmp_path / "a", connected_grid(10, tmp_path / "elsewhere"), 1, schedule__kind="cosine")
    grid = connected_grid(10, tmp_path)

    def lost_once(message: Message, context: Context) -> Message:
        if kind_of(message) == "reveal" and '"round":1,' in str(message.content["wildflower"]["json"]):
            raise RuntimeError("this node is lost")
        return client(message, context)

    grid.app = lost_once
    ran = run(tmp_path / "b", grid, 3, schedule__kind="cosine")
    assert [ran.trained(number) for number in (1, 2, 3)] == [[], ALL, ALL]
    assert same_bits(ran.models[2], whole.models[1])


def test_an_order_under_masks_returns_nothing_by_itself(tmp_path):
    """A server that names another client step, which returns the weights to it alone."""
    grid, sent = connected_grid(10, tmp_path), []
    half = Apart().reference()

    def app(message: Message, context: Context) -> Message:
        if kind_of(message) == "train" and message.metadata.dst_node_id == 1:
            batch, arrays = from_records(Batch, message.content)
            [order] = batch.orders
            sent_tensor_sets, returned = (
                of(family_of(json.dumps(batch.family)), Architecture.from_json(order.architecture))
                for of in (Apart().sent, Apart().returned)
            )
            asked = order.model_copy(update={"client_step": half, "digest": digest(sent_tensor_sets, returned)})
            message.content = to_records(batch.model_copy(update={"orders": [asked]}), arrays)
            reply = client(message, context)
            sent.append(from_records(Reply, reply.content))
            return reply
        return client(message, context)

    grid.app = app
    ran = run(tmp_path, grid, 1)
    [(reply, arrays)] = sent
    assert arrays == []
    assert "is under masks, and its client step" in reply.updates[0].outcome
    assert ran.trained(1) == list(range(1, 10))
