"""Several work orders of one device in one round: one message, one turn of the clock, one device in the figures."""

from dataclasses import replace

import pytest
import torch

from client_app import training
from devices.budget import Budget
from messages.orders import Batch, Reply
from messages.wire import from_records
from strategies import work
from strategies.fedavg import FedAvg, FedAvgParams
from strategies.heterofl import HeteroFL, HeteroFLParams
from tests.small_run import METHODS, changed_reply, connected_grid, same_bits, simulated_grid, small_config, started
from tests.strategies.by_hand import FC, Devices, OneHidden, filled, no_scores, setup

ROOM = """
[[group]]
name = "roomy"
count = 4
memory = "1 GB"
link = "10 Mbit/s"
speed = 1.0

[[group]]
name = "narrow"
count = 2
fits_width = 0.25
link = "10 Mbit/s"
speed = 1.0
"""


def both(folder, method="heterofl", **changes):
    """A run in which devices 0 to 3 of six train both the whole model and its quarter."""
    keys = {"both-models": True, "devices-per-round": 6, "hypemefed.fill": "owners"}
    config = small_config(folder, **METHODS[method] | keys | changes)
    if config.fleet:
        (folder / "six.toml").write_text(ROOM)
    return started(config)


def batches(grid):
    return [from_records(Batch, m.content)[0] for m in grid.sent if m.metadata.message_type == "train"]


def by_hand(folder, answer, strategy_of=FedAvg, params=None, budget=None):
    """A round of three devices, all under `budget`, with both models."""
    made = replace(setup(folder, OneHidden()), both_models=True)
    strategy = strategy_of(made, params or FedAvgParams(use="exclusive"))
    strategy.budget = lambda device, wanted: budget or Budget(10**9, None, None)
    devices = Devices(made.family, answer)
    return strategy, devices, strategy.run_round(devices.grid, 1, no_scores)


def test_both_models_of_every_device_count_in_the_mean(tmp_path):
    # Devices 0, 1, 2 answer 1, 2, 6 for the whole model and 3 more for its first channel: (1+2+6+4+5+9)/6 = 4.5 and 3.
    values = {0: 1.0, 1: 2.0, 2: 6.0}
    strategy, _, result = by_hand(
        tmp_path,
        lambda order, w: filled(w, values[order.device] + (3.0 if order.architecture["widths"] == [1] else 0.0)),
    )
    assert strategy.weights[FC].flatten().tolist() == [4.5, 3, 3, 3]
    lines = [(d["device"], d["architecture"]["widths"], d["outcome"]) for d in result.devices]
    assert sorted(lines) == [(d, [w], "trained") for d in (0, 1, 2) for w in (1, 4)]
    assert strategy.tier_architectures == {tier: OneHidden().full() for tier in ("whole", "half", "quarter")}


@pytest.mark.parametrize("method", ["all-large", "exclusive", "heterofl", "fedrolex", "fjord", "depthfl", "hypemefed"])
def test_orders_of_a_device_go_together_whatever_the_nodes_and_the_size_of_messages(method, tmp_path, monkeypatch):
    states = []
    for nodes, nbytes in ((1, 2**25), (3, 2**25), (2, 100)):
        monkeypatch.setattr(work, "MESSAGE_BYTES", nbytes)
        (tmp_path / f"{nodes}").mkdir()
        strategy, scorer = both(tmp_path / f"{nodes}", method, workers=nodes)
        grid = simulated_grid(nodes)
        grid.turn = lambda messages: messages[::-1]
        results = [strategy.run_round(grid, number, scorer) for number in (1, 2)]
        states.append(strategy.state_dict())
        large, small = strategy.scored_architecture.to_json(), strategy.smallest.to_json()
        for batch in batches(grid):
            orders = [(o.device, o.architecture) for o in batch.orders]
            for device in {device for device, _ in orders}:
                wanted = [large, small] if device < 4 else [large] if method == "all-large" else [small]
                assert [architecture for d, architecture in orders if d == device] == wanted
                places = [place for place, (d, _) in enumerate(orders) if d == device]
                assert places == list(range(places[0], places[0] + len(places)))
            numbers = [o.order for o in batch.orders]
            assert len(set(numbers)) == len(numbers)
            assert len({o.seed for o in batch.orders}) == len(numbers)
        assert results[1].record["devices_replied"] == (4 if method == "exclusive" else 6)
        waves = nbytes == 100 and method != "exclusive"  # of which all devices share one payload
        assert (len(batches(grid)) > 2 * nodes) == waves
    assert all(same_bits(states[0].tensors, state.tensors) for state in states)


def test_figures_count_devices_and_lines_count_orders(tmp_path):
    strategy, scorer = both(tmp_path)
    result = strategy.run_round(simulated_grid(2), 1, scorer)
    record = result.record
    assert (record["devices_sampled"], record["devices_replied"], record["devices_failed"]) == (6, 6, 0)
    assert len(result.devices) == 4 * 2 + 2
    large, small = (strategy.cost(a) for a in (strategy.scored_architecture, strategy.smallest))
    assert record["bytes_down"] == record["bytes_up"] == 4 * large.payload_bytes + 6 * small.payload_bytes
    assert record["distinct_architectures"] == 2
    roomy = strategy.budget(0).memory_bytes
    share = (4 * large.peak_training_memory_bytes / roomy + 2) / 6  # the larger of the two, not their sum
    assert record["memory_utilisation"] == pytest.approx(share)


def test_the_clock_lets_a_device_do_one_after_the_other(tmp_path):
    strategy, scorer = both(tmp_path)
    result = strategy.run_round(simulated_grid(2), 1, scorer)
    large, small = (strategy.cost(a) for a in (strategy.scored_architecture, strategy.smallest))
    nbytes, flops = large.payload_bytes + small.payload_bytes, large.training_flops + small.training_flops
    population = strategy.population
    population.now_seconds = 0.0
    whole = population.timing(0, bytes_down=nbytes, flops=16.0 * flops, bytes_up=nbytes).total_seconds
    assert [d["simulated_seconds"] for d in result.devices if d["device"] == 0] == [whole, whole]
    assert result.record["simulated_seconds"] == whole


def test_over_selection_counts_devices(tmp_path):
    strategy, scorer = both(tmp_path, **{"devices-per-round": 3, "over-selection": 1.0})
    result = strategy.run_round(simulated_grid(2), 1, scorer)
    trained = {d["device"] for d in result.devices if d["outcome"] == "trained"}
    assert trained == {0, 4, 5}  # the narrow ones have half the work; of equals, the first
    assert [d["outcome"] for d in result.devices].count("trained") == 4
    assert result.record["devices_replied"] == result.record["devices_failed"] == 3


def test_on_hardware_enough_devices_are_enough(tmp_path):
    keys = {"fleet": "", "devices": 3, "devices-per-round": 2, "over-selection": 0.5, "deadline-seconds": 60.0}
    strategy, scorer = both(tmp_path, "all-large", **keys)
    grid = connected_grid(3, tmp_path)
    grid.seen = lambda messages: [
        m for m in messages if m.metadata.message_type == "query" or m.metadata.dst_node_id != 3
    ]
    result = strategy.run_round(grid, 1, scorer)
    found = sorted((d["device"], d["outcome"]) for d in result.devices)
    assert found == [(d, outcome) for d, outcome in ((0, "trained"), (1, "trained"), (2, "late")) for _ in range(2)]


def test_a_device_keeps_the_first_update_when_its_second_order_fails(tmp_path):
    def answer(order, weights):
        return filled(weights, float("nan") if order.architecture["widths"] == [1] and order.device == 0 else 2.0)

    strategy, _, result = by_hand(tmp_path, answer)
    lines = {(d["device"], d["architecture"]["widths"][0]): d["outcome"] for d in result.devices}
    assert lines.pop((0, 1)).startswith("refused: device 0: tensor")
    assert set(lines.values()) == {"trained"}
    assert strategy.weights[FC].flatten().tolist() == [2.0] * 4
    record = result.record
    assert (record["devices_replied"], record["devices_failed"], record["devices_refused"]) == (3, 0, 0)


def test_a_device_of_which_every_order_fails_counts_once(tmp_path):
    _, _, result = by_hand(tmp_path, lambda order, w: filled(w, float("nan") if order.device == 1 else 2.0))
    assert (result.record["devices_replied"], result.record["devices_refused"]) == (2, 1)


@pytest.mark.parametrize(("memory", "payload", "orders"), [(0, 0, 2), (-1, 0, 1), (0, -1, 1)])
def test_both_models_need_the_larger_memory_and_the_sum_of_the_payloads(memory, payload, orders, tmp_path):
    family = OneHidden()
    strategy = HeteroFL(replace(setup(tmp_path, family), both_models=True), HeteroFLParams())
    large, small = (strategy.cost(a) for a in (strategy.candidates[0], strategy.smallest))
    budget = Budget(
        large.peak_training_memory_bytes + memory, large.payload_bytes + small.payload_bytes + payload, None
    )
    first = strategy.assign(0, budget)
    assert len([first, *strategy.further(0, budget, first)]) == (2 if first != family.full() else orders)
    only = Budget(small.peak_training_memory_bytes, 10**9, None)
    assert strategy.further(0, only, strategy.assign(0, only)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: u[0].update(device=u[-1]["device"]), "is device"),
        (lambda u: u[0].update(order=77), "order 77 was not in the batch"),
        (lambda u: u[1].update(order=u[0]["order"], device=u[0]["device"]), "twice"),
    ],
)
def test_an_update_under_anothers_number_is_refused(change, words, tmp_path):
    strategy, scorer = both(tmp_path, workers=1)
    grid = simulated_grid(1)
    grid.tamper = changed_reply(lambda reply, arrays: change(reply["updates"]))
    before = strategy.state_dict().tensors
    result = strategy.run_round(grid, 1, scorer)
    assert all(words in d["outcome"] and d["outcome"].startswith("refused: ") for d in result.devices)
    assert same_bits(before, strategy.state_dict().tensors)


def test_the_model_that_a_device_has_just_trained_teaches(tmp_path, monkeypatch):
    strategy, scorer = both(tmp_path, "all-large", workers=1)
    strategy.teacher = lambda device, place: 0 if place else None
    taught, made = [], training.local_loss

    def local_loss(*arguments):
        taught.append(arguments[-1])
        return made(*arguments)

    monkeypatch.setattr(training, "local_loss", local_loss)
    grid, replies = simulated_grid(1), []
    grid.tamper = lambda reply: replies.append(from_records(Reply, reply.content)[0]) or reply
    strategy.merge = None  # so that every device's weights come by themselves
    received = []
    strategy.absorb = received.append
    strategy.run_round(grid, 1, scorer)
    orders = [order for batch in batches(grid) for order in batch.orders]
    assert [order.teacher is not None for order in orders] == [teacher is not None for teacher in taught]
    by_number = {contribution.orders[0]: contribution.weights for contribution in received}
    students = [(order, teacher) for order, teacher in zip(orders, taught, strict=True) if teacher is not None]
    assert len(students) == 4
    for order, teacher in students:
        assert {o.order: o.device for o in orders}[order.teacher] == order.device
        assert same_bits(by_number[order.teacher], dict(teacher.state_dict()))
        assert not teacher.training
        assert not any(p.requires_grad for p in teacher.parameters())


def test_a_student_is_refused_when_its_teacher_failed(tmp_path, monkeypatch):
    strategy, scorer = both(tmp_path, "all-large", workers=1)
    strategy.teacher = lambda device, place: 0 if place else None
    fit = training._fit

    def diverge(model, *arguments, **settings):
        mean = fit(model, *arguments, **settings)
        if sum(p.numel() for p in model.parameters()) > 10_000:
            torch.nn.init.constant_(next(model.parameters()), float("inf"))
        return mean

    monkeypatch.setattr(training, "_fit", diverge)
    result = strategy.run_round(simulated_grid(1), 1, scorer)
    outcomes = [d["outcome"] for d in result.devices if d["device"] == 0]
    assert "finite" in outcomes[0]
    assert "is none that this device has done before" in outcomes[1]
