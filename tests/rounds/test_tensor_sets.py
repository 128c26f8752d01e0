"""Tensor sets of a method's own: what comes of several, of what a client step does wrong, and of their bytes."""

import pytest

from tests.rounds.methods import FAULTS, HalfUp, Several, started_with
from tests.small_run import changed_reply, connected_grid, same_bits, simulated_grid
from wildflower.messages.orders import Batch, Reply, SumHeader
from wildflower.messages.wire import from_records, to_records
from wildflower.strategies.method import Order
from wildflower.strategies.pricing import tensor_set_bytes

ALL = {"devices_per_round": 6}
HARDWARE = {"fleet": "", "devices": 4, "devices_per_round": 4}


def of_node_1(tamper):
    """The tamper, for what node 1 answers to work."""
    return lambda message: (
        tamper(message) if (message.metadata.message_type, message.metadata.src_node_id) == ("train", 1) else message
    )


def outcomes(result):
    return {d["device"]: d["outcome"] for d in result.devices}


def test_several_tensor_sets_come_to_the_same_on_workers_and_on_devices_of_their_own(tmp_path):
    found = {}
    for name, grid, keys in (
        ("one worker", simulated_grid(1), {"workers": 1}),
        ("three workers", simulated_grid(3), {"workers": 3}),
        ("hardware", connected_grid(6, tmp_path / "nodes"), {"fleet": ""}),
    ):
        engine, scorer = started_with(Several, tmp_path / name, **ALL | keys)
        for number in (1, 2):
            result = engine.run_round(grid, number, scorer)
            assert set(outcomes(result).values()) == {"trained"}
        found[name] = engine
    assert all(same_bits(found["one worker"].state().tensors, e.state().tensors) for e in found.values())
    method = found["hardware"].method
    assert method.means.keys() == set(range(6))
    facts = {done.device: done.facts for done in method.trained}
    assert facts == {device: {"steps": [1.0], "ends": [0.5, 1.5]} for device in range(6)}
    # A worker's sums are of all its devices, and the rest comes by itself; a device's own tensor sets come together.
    together = [(devices, sums) for devices, sums, each in found["one worker"].method.contributions if not each]
    assert [(sorted(devices), sums) for devices, sums in together] == [(list(range(6)), {"weights", "biases"})] * 2
    alone = [(len(devices), sums, each) for devices, sums, each in method.contributions]
    assert alone == [(1, {"weights", "biases"}, {"means"})] * 12


def test_tensor_sets_have_weights_of_their_own(tmp_path):
    """Of the biases one mean is by examples and one uniform."""
    shards = {"partition": "strong-and-weak", "strong.devices": 2, "examples-per-device": 0}
    engine, scorer = started_with(Several, tmp_path, **ALL | shards)
    engine.run_round(simulated_grid(2), 1, scorer)
    method = engine.method
    examples = {done.device: done.examples for done in method.trained}
    assert len(set(examples.values())) > 1
    for name, value in method.biases.items():
        uniform = sum(means[name] for means in method.means.values()) / 6
        by_examples = sum(examples[d] * means[name] for d, means in method.means.items()) / sum(examples.values())
        assert float(value.mean()) == pytest.approx(float(uniform), abs=1e-6)
        assert float(method.weights[name].mean()) == pytest.approx(float(by_examples), abs=1e-6)


def test_a_methods_own_figures_are_in_the_journal(tmp_path):
    engine, scorer = started_with(Several, tmp_path, **ALL, local_steps=2)
    assert engine.run_round(simulated_grid(2), 1, scorer).record["metrics"] == {"max_steps": 2.0}


@pytest.mark.thorough
@pytest.mark.parametrize("hardware", [False, True], ids=["workers", "hardware"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "none at all"])
def test_what_a_device_half_does_wrong_costs_that_device(fault, hardware, tmp_path):
    """The others count as they do where it fails altogether."""
    states, told = [], []
    for name in ("none at all", fault):
        engine, scorer = started_with(Several, tmp_path / name, **HARDWARE if hardware else ALL)
        engine.method.faults = {1: name}
        grid = connected_grid(4, tmp_path / f"nodes of {name}") if hardware else simulated_grid(2)
        result = engine.run_round(grid, 1, scorer)
        found = outcomes(result)
        told.append(found.pop(1))
        assert set(found.values()) == {"trained"}
        states.append(engine.state().tensors)
    assert same_bits(*states)
    assert told[0] == "failed: RuntimeError: as the test asked"
    assert told[1].startswith("refused: ")


# What a node may send in place of what it was asked.


def without_a_tensor_set(update):
    update["payloads"].pop("biases")


def with_an_unknown_tensor_set(update):
    update["payloads"]["more"] = 0


def with_another_name(update):
    update["payloads"]["bias"] = update["payloads"].pop("biases")


def without_a_fact(update):
    update["facts"].pop("steps")


def with_an_unknown_fact(update):
    update["facts"]["more"] = [1.0]


def with_a_longer_fact(update):
    update["facts"]["ends"] += [1.0]


def with_a_fact_of_nan(update):
    update["facts"]["steps"] = [float("nan")]


def with_a_fact_of_infinity(update):
    update["facts"]["ends"] = [float("-inf"), 1.0]


WRONG = {
    without_a_tensor_set: "tensor sets ['means', 'weights'] came, not ['biases', 'means', 'weights']",
    with_an_unknown_tensor_set: "tensor sets ['biases', 'means', 'more', 'weights'] came",
    with_another_name: "tensor sets ['bias', 'means', 'weights'] came",
    without_a_fact: "facts {'ends': 2} came, not {'steps': 1, 'ends': 2}",
    with_an_unknown_fact: "facts {'ends': 2, 'more': 1, 'steps': 1} came, not",
    with_a_longer_fact: "facts {'ends': 3, 'steps': 1} came, not",
    with_a_fact_of_nan: "the fact 'steps' holds numbers that are not finite",
    with_a_fact_of_infinity: "the fact 'ends' holds numbers that are not finite",
}


@pytest.mark.thorough
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_wrong_tensor_sets_and_facts_of_a_reply_are_refused_and_change_nothing(change, tmp_path):
    states, told = [], []
    for name in ("dead", "wrong"):
        engine, scorer = started_with(Several, tmp_path / name, **HARDWARE)
        grid = connected_grid(4, tmp_path / f"nodes of {name}")

        def die(message):
            raise RuntimeError("as the test asked")

        grid.tamper = of_node_1(die if name == "dead" else changed_reply(lambda reply, _: change(reply["updates"][0])))
        result = engine.run_round(grid, 1, scorer)
        found = outcomes(result)
        told.append(found.pop(0))
        assert set(found.values()) == {"trained"}
        states.append(engine.state().tensors)
    assert same_bits(*states)
    assert told[1].startswith("refused: ")
    assert WRONG[change] in told[1]


# Sums of several tensor sets.


def a_tensor_set_by_itself_as_a_sum(reply):
    """Of a tensor set that is not to be added up."""
    reply["sums"][0]["tensor_set"] = "means"


def an_unknown_tensor_set(reply):
    reply["sums"][0]["tensor_set"] = "more"


def the_sum_of_one_tensor_set_only(reply):
    reply["sums"].pop()


def one_tensor_set_twice(reply):
    reply["sums"][1] = reply["sums"][0]


def a_sum_beside_its_own_tensor_set(reply):
    """A device that is in a sum sends the same tensor set by itself too."""
    reply["updates"][0]["payloads"]["biases"] = reply["updates"][0]["payloads"]["means"]


@pytest.mark.parametrize(
    "change",
    [
        a_tensor_set_by_itself_as_a_sum,
        an_unknown_tensor_set,
        the_sum_of_one_tensor_set_only,
        one_tensor_set_twice,
        a_sum_beside_its_own_tensor_set,
    ],
    ids=lambda change: change.__name__,
)
def test_wrong_sums_of_several_tensor_sets_change_nothing(change, tmp_path):
    engine, scorer = started_with(Several, tmp_path, **ALL, workers=1)
    before = engine.state().tensors
    grid = simulated_grid(1)
    grid.tamper = changed_reply(lambda reply, arrays: change(reply))
    result = engine.run_round(grid, 1, scorer)
    assert all(outcome.startswith("refused: ") for outcome in outcomes(result).values())
    assert same_bits(before, engine.state().tensors)


def test_all_tensor_sets_are_summed_over_the_same_orders(tmp_path):
    """Or a method would absorb a sum of one tensor set without the others."""

    def split(message):
        reply, arrays = from_records(Reply, message.content)
        [weights, biases] = sorted(reply.sums, key=lambda header: header.tensor_set == "biases")
        half, rest = biases.orders[:3], biases.orders[3:]
        parts = [
            SumHeader(**biases.model_dump() | {"orders": orders, "weight": 1024 * len(orders)})
            for orders in (half, rest)
        ]
        message.content = to_records(reply.model_copy(update={"sums": [weights, *parts]}), arrays)
        return message

    engine, scorer = started_with(Several, tmp_path, **ALL, workers=1)
    grid = simulated_grid(1)
    grid.tamper = split
    result = engine.run_round(grid, 1, scorer)
    [why] = set(outcomes(result).values())
    assert why.startswith("refused: the sum over orders")
    assert "is not summed over the same orders" in why
    assert engine.method.contributions == []


def test_a_worker_bounds_each_tensor_set_that_it_adds_up_and_says_so(tmp_path):
    """Biases are not sent, so that their distance is from zero; the means that come by themselves are near it."""
    engine, scorer = started_with(Several, tmp_path, **ALL, aggregation__norm_bound=0.5, learning_rate=1.0)
    before = dict(engine.method.weights)
    result = engine.run_round(simulated_grid(2), 1, scorer)
    assert result.record["devices_bounded"] == 6
    after = engine.method.weights
    moved = sum(float((after[name].double() - before[name].double()).square().sum()) for name in before)
    biases = sum(float(value.double().square().sum()) for value in engine.method.biases.values())
    assert 0 < moved**0.5 <= 0.5 * (1 + 1e-5)
    assert 0 < biases**0.5 <= 0.5 * (1 + 1e-5)


# Bytes.


@pytest.mark.parametrize("hardware", [False, True], ids=["workers", "hardware"])
def test_bytes_follow_from_the_tensor_sets_each_way(hardware, tmp_path):
    engine, scorer = started_with(HalfUp, tmp_path, **HARDWARE if hardware else ALL)
    grid = connected_grid(4, tmp_path) if hardware else simulated_grid(2)
    result = engine.run_round(grid, 1, scorer)
    method = engine.method
    whole = method.family.full()
    down, up = tensor_set_bytes(method.client_step(Order(0, whole)), method.family, whole)
    assert 2 * up == down == 4 * sum(value.numel() for value in method.weights.values())
    devices = 4 if hardware else 6
    assert (result.record["training_bytes_down"], result.record["training_bytes_up"]) == (devices * down, devices * up)
    cost = method.cost(whole)
    assert (cost.download_bytes, cost.upload_bytes, cost.payload_bytes) == (down, up, down)


@pytest.mark.parametrize(("down", "up", "beyond"), [(1.25, 2, 0), (2, 1.25, 0), (0.8, 2, 6), (2, 0.8, 6)])
def test_each_way_of_a_payload_must_fit_its_own_link(down, up, beyond, tmp_path):
    price = started_with(HalfUp, tmp_path / "price", **ALL)[0].method
    cost = price.cost(price.family.full())
    links = f'down = "{down * cost.download_bytes * 8e-6} Mbit/s"\nup = "{up * cost.upload_bytes * 8e-6} Mbit/s"'
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(f'transfer = "1 s"\n[[group]]\nname = "all"\ncount = 6\nmemory = "1 GB"\n{links}\n')
    engine, scorer = started_with(HalfUp, tmp_path, **ALL | {"fleet": str(fleet)})
    record = engine.run_round(simulated_grid(2), 1, scorer).record
    assert record["devices_below_smallest"] == beyond
    assert record["bandwidth_utilisation"] == pytest.approx(1 / min(down, up), rel=1e-3)  # of the fuller link


def test_the_clock_reads_the_tensor_sets_each_way(tmp_path):
    engine, scorer = started_with(HalfUp, tmp_path, **ALL)
    result = engine.run_round(simulated_grid(2), 1, scorer)
    method, population = engine.method, engine.population
    whole = method.family.full()
    down, up = tensor_set_bytes(method.client_step(Order(0, whole)), method.family, whole)
    population.now_seconds = 0.0
    flops = 16.0 * method.cost(whole).training_flops
    for line in result.devices:
        timing = population.timing(line["device"], bytes_down=down, flops=flops, bytes_up=up)
        assert line["simulated_seconds"] == timing.total_seconds
    assert timing.upload_seconds < timing.download_seconds


def test_a_message_is_bounded_with_what_its_reply_brings_of_every_device(tmp_path, monkeypatch):
    engine, scorer = started_with(Several, tmp_path, **ALL, workers=1)
    method, grid = engine.method, simulated_grid(1)
    whole = method.family.full()
    tensor_sets = method.client_step(Order(0, whole)).returned(method.family, whole)
    merged = sum(tensor_set.layout.nbytes for tensor_set in tensor_sets.values() if tensor_set.merge)
    monkeypatch.setattr("wildflower.rounds.requests.MESSAGE_BYTES", merged + 2 * tensor_sets["means"].layout.nbytes)
    result = engine.run_round(grid, 1, scorer)
    assert [len(from_records(Batch, message.content)[0].orders) for message in grid.sent] == [2, 2, 2]
    assert set(outcomes(result).values()) == {"trained"}
