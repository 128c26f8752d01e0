"""Several work orders of one device in one round: one message, one turn of the clock, one device in the figures."""

from dataclasses import replace

import pytest
import torch

from tests.small_run import METHODS, changed_reply, connected_grid, same_bits, simulated_grid, small_config, started
from tests.strategies.by_hand import FC, Devices, OneHidden, engine_of, filled, no_scores, setup
from wildflower.client_app import context
from wildflower.devices.budget import Budget
from wildflower.messages.orders import Batch
from wildflower.messages.tensor_sets import TensorSet
from wildflower.messages.wire import from_records
from wildflower.rounds import requests
from wildflower.strategies.fedavg import FedAvg, FedAvgParams
from wildflower.strategies.heterofl import HeteroFL, HeteroFLParams
from wildflower.strategies.method import Training

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


# HypeMeFed itself counts a device once; its control without hypernetworks takes two models.
OWNERS = {key.replace("hypemefed.", "hypemefed-controls."): value for key, value in METHODS["hypemefed"].items()}
METHODS_OF_TWO_MODELS = METHODS | {
    "hypemefed": OWNERS | {"strategy": "benchmarks.hypemefed.hypemefed_controls:Owners"},
}


def both(folder, method="heterofl", **changes):
    """A run in which devices 0 to 3 of six train both the whole model and its quarter."""
    keys = {"both-models": True, "devices-per-round": 6, "depthfl.alpha": 0.0}
    config = small_config(folder, **METHODS_OF_TWO_MODELS[method] | keys | changes)
    if config.fleet:
        (folder / "six.toml").write_text(ROOM)
    return started(config)


def batches(grid):
    return [from_records(Batch, m.content)[0] for m in grid.sent if m.metadata.message_type == "train"]


def costs(method):
    return [method.cost(a) for a in (method.candidates[0], method.candidates[-1])]


def by_hand(folder, answer):
    """A round of three devices that can afford both models."""
    made = replace(setup(folder, OneHidden()), both_models=True)
    engine = engine_of(FedAvg(made, FedAvgParams(use="exclusive")), folder)
    engine.asking.budget = lambda device, wanted: Budget(10**9)
    devices = Devices(made.family, answer)
    return engine, engine.run_round(devices.grid, 1, no_scores)


def test_both_models_of_every_device_count_in_the_mean(tmp_path):
    # Devices 0, 1, 2 answer 1, 2, 6 for the whole model and 3 more for its first channel: (1+2+6+4+5+9)/6 = 4.5 and 3.
    values = {0: 1.0, 1: 2.0, 2: 6.0}
    engine, result = by_hand(
        tmp_path,
        lambda order, w: filled(w, values[order.device] + (3.0 if order.architecture["widths"] == [1] else 0.0)),
    )
    assert engine.method.weights[FC].flatten().tolist() == [4.5, 3, 3, 3]
    lines = [(d["device"], d["architecture"]["widths"], d["outcome"]) for d in result.devices]
    assert sorted(lines) == [(d, [w], "trained") for d in (0, 1, 2) for w in (1, 4)]
    assert engine.asking.tier_architectures == {tier: OneHidden().full() for tier in ("whole", "half", "quarter")}


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["all-large", "exclusive", "heterofl", "fedrolex", "fjord", "depthfl", "hypemefed"])
def test_orders_of_a_device_go_together_whatever_the_nodes_and_the_size_of_messages(method, tmp_path, monkeypatch):
    states = []
    for nodes, nbytes in ((1, 2**25), (3, 2**25), (2, 100)):
        monkeypatch.setattr(requests, "MESSAGE_BYTES", nbytes)
        (tmp_path / f"{nodes}").mkdir()
        engine, scorer = both(tmp_path / f"{nodes}", method, workers=nodes)
        grid = simulated_grid(nodes)
        grid.turn = lambda messages: messages[::-1]
        results = [engine.run_round(grid, number, scorer) for number in (1, 2)]
        states.append(engine.state())
        large, small = (engine.method.candidates[place].to_json() for place in (0, -1))
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
    engine, scorer = both(tmp_path)
    result = engine.run_round(simulated_grid(2), 1, scorer)
    record = result.record
    assert (record["devices_sampled"], record["devices_replied"], record["devices_failed"]) == (6, 6, 0)
    assert len(result.devices) == 4 * 2 + 2
    large, small = (
        engine.method.cost(a) for a in (engine.method.scored_architecture, engine.method.smallest_architecture)
    )
    assert (
        record["training_bytes_down"]
        == record["training_bytes_up"]
        == 4 * large.payload_bytes + 6 * small.payload_bytes
    )
    assert record["distinct_architectures"] == 2
    [roomy] = {d["budget"]["memory_bytes"] for d in result.devices if d["device"] == 0}
    share = (4 * large.peak_training_memory_bytes / roomy + 2) / 6  # the larger of the two, not their sum
    assert record["memory_utilisation"] == pytest.approx(share)


def test_the_clock_lets_a_device_do_one_after_the_other(tmp_path):
    engine, scorer = both(tmp_path)
    result = engine.run_round(simulated_grid(2), 1, scorer)
    large, small = (
        engine.method.cost(a) for a in (engine.method.scored_architecture, engine.method.smallest_architecture)
    )
    nbytes, flops = large.payload_bytes + small.payload_bytes, large.training_flops + small.training_flops
    population = engine.population
    population.now_seconds = 0.0
    whole = population.timing(0, bytes_down=nbytes, flops=16.0 * flops, bytes_up=nbytes).total_seconds
    assert [d["simulated_seconds"] for d in result.devices if d["device"] == 0] == [whole, whole]
    assert result.record["simulated_seconds"] == whole


def test_over_selection_counts_devices(tmp_path):
    engine, scorer = both(tmp_path, **{"devices-per-round": 3, "aggregation.over-selection": 1.0})
    result = engine.run_round(simulated_grid(2), 1, scorer)
    trained = {d["device"] for d in result.devices if d["outcome"] == "trained"}
    assert trained == {0, 4, 5}  # the narrow ones have half the work; of equals, the first
    assert [d["outcome"] for d in result.devices].count("trained") == 4
    assert result.record["devices_replied"] == result.record["devices_failed"] == 3


def test_on_hardware_enough_devices_are_enough(tmp_path):
    keys = {
        "fleet": "",
        "devices": 3,
        "devices-per-round": 2,
        "aggregation.over-selection": 0.5,
        "deadline-seconds": 60.0,
    }
    engine, scorer = both(tmp_path, "all-large", **keys)
    grid = connected_grid(3, tmp_path)
    grid.seen = lambda messages: [
        m for m in messages if m.metadata.message_type == "query" or m.metadata.dst_node_id != 3
    ]
    result = engine.run_round(grid, 1, scorer)
    found = sorted((d["device"], d["outcome"]) for d in result.devices)
    assert found == [(d, outcome) for d, outcome in ((0, "trained"), (1, "trained"), (2, "late")) for _ in range(2)]


def test_a_device_keeps_the_first_update_when_its_second_order_fails(tmp_path):
    def answer(order, weights):
        return filled(weights, float("nan") if order.architecture["widths"] == [1] and order.device == 0 else 2.0)

    engine, result = by_hand(tmp_path, answer)
    lines = {(d["device"], d["architecture"]["widths"][0]): d["outcome"] for d in result.devices}
    assert lines.pop((0, 1)).startswith("refused: weights must be finite")
    assert set(lines.values()) == {"trained"}
    assert engine.method.weights[FC].flatten().tolist() == [2.0] * 4
    record = result.record
    assert (record["devices_replied"], record["devices_failed"], record["devices_refused"]) == (3, 0, 0)


def test_on_hardware_too_a_device_keeps_the_first_update_when_its_second_is_refused(tmp_path):
    def diverge(reply, arrays):
        if reply["updates"][0]["device"] == 0:
            second = reply["updates"][1]["payloads"]["weights"]
            arrays[second] = b"\x00\x00\xc0\x7f" * (len(arrays[second]) // 4)  # NaN

    engine, scorer = both(tmp_path, "heterofl", fleet="", devices=2, devices_per_round=2)
    grid = connected_grid(2, tmp_path)
    grid.tamper = lambda reply: changed_reply(diverge)(reply) if reply.metadata.message_type == "train" else reply
    result = engine.run_round(grid, 1, scorer)
    found = {(d["device"], place): d["outcome"] for place, d in enumerate(result.devices)}
    [refused] = [outcome for outcome in found.values() if outcome != "trained"]
    assert refused.startswith("refused: device 0: tensor")
    assert len(found) == 4
    assert result.record["devices_replied"] == 2
    assert all(bool(value.isfinite().all()) for value in engine.method.weights.values())


def test_a_device_of_which_every_order_fails_counts_once(tmp_path):
    _, result = by_hand(tmp_path, lambda order, w: filled(w, float("nan") if order.device == 1 else 2.0))
    assert (result.record["devices_replied"], result.record["devices_refused"]) == (2, 1)


@pytest.mark.parametrize(("memory", "payload", "orders"), [(0, 0, 2), (-1, 0, 1), (0, -1, 1)])
def test_both_models_need_the_larger_memory_and_the_sum_of_the_payloads(memory, payload, orders, tmp_path):
    family = OneHidden()
    method = HeteroFL(replace(setup(tmp_path, family), both_models=True), HeteroFLParams())
    large, small = (method.cost(a) for a in (method.candidates[0], method.smallest_architecture))
    payload_bytes = large.payload_bytes + small.payload_bytes + payload
    budget = Budget(large.peak_training_memory_bytes + memory, payload_bytes, payload_bytes)
    first = method.assign(0, budget)
    assert len([first, *method.extra_architectures(0, budget, first)]) == (2 if first != family.full() else orders)
    only = Budget(small.peak_training_memory_bytes, 10**9, 10**9)
    assert method.extra_architectures(0, only, method.assign(0, only)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: u[0].update(device=u[-1]["device"]), "is device"),
        (lambda u: u[0].update(order=77), "order 77 was not in the batch"),
        (lambda u: u[1].update(order=u[0]["order"], device=u[0]["device"]), "twice"),
    ],
)
def test_an_update_under_anothers_number_is_refused(change, words, tmp_path):
    engine, scorer = both(tmp_path, workers=1)
    grid = simulated_grid(1)
    grid.tamper = changed_reply(lambda reply, arrays: change(reply["updates"]))
    before = engine.state().tensors
    result = engine.run_round(grid, 1, scorer)
    assert all(words in d["outcome"] and d["outcome"].startswith("refused: ") for d in result.devices)
    assert same_bits(before, engine.state().tensors)


SEEN = []  # what a client step of this file found as the earlier model of its orders


class ByItself(Training):
    """Plain training whose weights come by themselves, and which notes the earlier model that it may read."""

    def returned(self, family, architecture):
        return {"weights": TensorSet.of(family.tensors(architecture))}

    def train(self, context):
        SEEN.append((context.order, context.earlier))
        return super().train(context)


def reading(folder):
    """A run in which the small model of a device reads the large one."""
    engine, scorer = both(folder, "all-large", workers=1)
    engine.method.after = lambda device, place: 0 if place else None
    return engine, scorer


def test_an_order_reads_the_model_that_its_device_has_just_trained(tmp_path):
    SEEN.clear()
    engine, scorer = reading(tmp_path)
    engine.method.client_step = lambda order: ByItself()
    received = []
    engine.method.absorb = received.append
    grid = simulated_grid(1)
    engine.run_round(grid, 1, scorer)
    orders = [order for batch in batches(grid) for order in batch.orders]
    assert [order.after is not None for order in orders] == [earlier is not None for _, earlier in SEEN]
    by_number = {contribution.orders[0]: contribution.own("weights") for contribution in received}
    readers = [(order, earlier) for order, earlier in SEEN if earlier is not None]
    assert len(readers) == 4
    for order, earlier in readers:
        assert {o.order: o.device for o in orders}[order.after] == order.device
        assert same_bits(by_number[order.after], dict(earlier.state_dict()))
        assert not earlier.training
        assert not any(p.requires_grad for p in earlier.parameters())


def test_an_order_is_refused_when_the_one_that_it_reads_failed(tmp_path, monkeypatch):
    engine, scorer = reading(tmp_path)
    fit = context.DeviceContext.fit

    def diverge(self, model, *arguments, **settings):
        mean = fit(self, model, *arguments, **settings)
        if sum(p.numel() for p in model.parameters()) > 10_000:
            torch.nn.init.constant_(next(model.parameters()), float("inf"))
        return mean

    monkeypatch.setattr(context.DeviceContext, "fit", diverge)
    result = engine.run_round(simulated_grid(1), 1, scorer)
    outcomes = [d["outcome"] for d in result.devices if d["device"] == 0]
    assert "finite" in outcomes[0]
    assert "is none that this device has done before" in outcomes[1]
