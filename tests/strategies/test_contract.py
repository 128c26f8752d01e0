"""What holds for every method, whatever it learns.

Bad replies, dead nodes and devices on nodes of their own meet the engine, and not the method: some stand for all.
One sums with present classes, one is plain, one has tensor sets that are not merged, and one keeps models on devices;
where devices have nodes of their own, there are also one with two networks and one that asks before it trains.
"""

import math
import random
import sys
from functools import lru_cache

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from tests.small_run import (
    METHODS,
    FakeTime,
    by_method,
    changed_reply,
    connected_grid,
    same_bits,
    simulated_grid,
    small_config,
    started,
)
from wildflower.messages.packing import Layout
from wildflower.models.lenet import LeNet5
from wildflower.strategies import METHODS as KINDS
from wildflower.strategies.method import ClientStep, Order

SUMMING = ["heterofl", "all-large"]  # a node adds up its devices' tensor sets; the first with present classes
REPRESENTATIVES = [*SUMMING, "hypemefed", "local"]
ON_HARDWARE = [*REPRESENTATIVES, "rafl", "recipfl"]
every_method = by_method()


def run_rounds(folder, method, grid, number=2, **changes):
    """The engine and the journal lines after some rounds."""
    folder.mkdir(exist_ok=True)
    engine, scorer = started(small_config(folder, **METHODS[method] | {"evaluate-every": 2} | changes))
    results = [engine.run_round(grid, n, scorer) for n in range(1, number + 1)]
    return engine, results


def outcomes(results):
    return {(d["round"], d["device"]): d["outcome"] for r in results for d in r.devices}


def scores(results):
    return [(r.record["score"], r.record["loss"], r.record["score_by_tier"]) for r in results]


def test_all_methods_are_here_under_the_names_of_their_files():
    assert {keys["strategy"] for keys in METHODS.values()} == set(KINDS)
    # The journal names a method after its file.
    assert {name: kind.name() for name, kind in KINDS.items()} == {name: name for name in KINDS}


@every_method
def test_a_methods_device_half_states_the_loss_that_it_minimizes(method, tmp_path):
    chosen = started(small_config(tmp_path, **METHODS[method]))[0].method
    local = chosen.client_step(Order(0, chosen.scored_architecture))
    kind = type(local)
    assert isinstance(local, ClientStep)
    assert kind.__module__.startswith("wildflower.strategies.")
    assert getattr(sys.modules[kind.__module__], kind.__name__) is kind  # where a device finds it
    told = kind.__dict__["__doc__"]
    assert "L =" in told or "minimize" in told


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Method -> its state and journal lines after two rounds on one node; each is run once."""

    @lru_cache
    def of(method):
        engine, results = run_rounds(tmp_path_factory.mktemp("one"), method, simulated_grid(1), workers=1)
        return engine.state(), results

    return of


@every_method
def test_neither_the_order_of_replies_nor_the_number_of_nodes_matters(method, alone, tmp_path):
    state, results = alone(method)
    assert results[1].record["score"] is not None
    grid = simulated_grid(3)
    grid.turn = lambda messages: messages[::-1]
    other, others = run_rounds(tmp_path / "three", method, grid, workers=3)
    assert same_bits(state.tensors, other.state().tensors)
    assert state.values == other.state().values
    assert scores(results) == scores(others)
    assert outcomes(results) == outcomes(others)
    if method != "exclusive":  # of which few devices can be part
        assert len({m.metadata.dst_node_id for m in grid.sent}) == 3


@pytest.mark.parametrize("method", ON_HARDWARE)
def test_devices_on_nodes_of_their_own_answer_in_any_order(method, tmp_path):
    states = []
    for seed in (1, 2):
        shuffle = random.Random(seed).shuffle
        grid = connected_grid(6, tmp_path / f"{seed}")
        grid.turn = lambda messages, shuffle=shuffle: shuffle(messages) or messages
        engine, results = run_rounds(tmp_path / f"run-{seed}", method, grid, fleet="")
        assert set(outcomes(results).values()) == {"trained"}
        states.append(engine.state())
    assert same_bits(states[0].tensors, states[1].tensors)


@every_method
def test_training_changes_the_model_and_another_seed_changes_it_otherwise(method, alone, tmp_path):
    before = started(small_config(tmp_path, **METHODS[method]))[0].state()
    state, results = alone(method)
    assert "trained" in outcomes(results).values()
    changed = not same_bits(before.tensors, state.tensors)
    assert changed == (method != "local")
    other, others = run_rounds(tmp_path / "other", method, simulated_grid(), seed=4)
    if method == "local":  # whose server holds no tensor
        assert scores(results) != scores(others)
    else:
        assert not same_bits(state.tensors, other.state().tensors)


# A reply that cannot be used leaves everything as if its node had died, and the replies of the other nodes count.


def wrong_round(reply, arrays):
    reply["round"] += 1


def wrong_run(reply, arrays):
    reply["run"] = "another"


def twice_the_same_device(reply, arrays):
    reply["updates"].append(reply["updates"][0])


def device_never_asked(reply, arrays):
    reply["updates"].append({**reply["updates"][0], "device": 999})


def an_order_never_given(reply, arrays):
    reply["updates"].append({**reply["updates"][0], "order": 999})


def an_outcome_of_its_own(reply, arrays):
    reply["updates"][0]["outcome"] = "done"


def trained_on_nothing(reply, arrays):
    reply["updates"][0]["examples"] = 0


def trained_but_sent_nothing(reply, arrays):
    reply["sums"] = []


def more_weight_in_the_sum(reply, arrays):
    reply["sums"][0]["weight"] += 1


def an_order_counted_twice(reply, arrays):
    reply["sums"][0]["orders"] *= 2


def the_same_sum_twice(reply, arrays):
    reply["sums"].append(reply["sums"][0])


def a_foreign_order_in_the_sum(reply, arrays):
    reply["sums"][0]["orders"].append(999)


def a_group_that_is_not_there(reply, arrays):
    reply["sums"][0]["group"] = 77


def a_sum_of_another_tensor_set(reply, arrays):
    reply["sums"][0]["tensor_set"] = "statistics"


def a_sum_too_short(reply, arrays):
    arrays[0] = arrays[0][8:]


def a_sum_that_is_not_there(reply, arrays):
    reply["sums"][0]["payload"] = len(arrays)


def a_negative_weight(reply, arrays):
    reply["sums"][0]["weight"] *= -1


def more_examples_than_its_shard(reply, arrays):
    reply["updates"][0]["examples"] = 25


def examples_beyond_all_bounds(reply, arrays):
    reply["updates"][0]["examples"] = 10**30


def no_device(reply, arrays):
    reply["updates"], reply["sums"] = [], []


WHOLE = [wrong_round, wrong_run, twice_the_same_device, device_never_asked, an_order_never_given, an_outcome_of_its_own]
WHOLE += [trained_on_nothing, more_examples_than_its_shard, examples_beyond_all_bounds, no_device]
SUMS = [trained_but_sent_nothing, more_weight_in_the_sum, an_order_counted_twice, the_same_sum_twice]
SUMS += [a_foreign_order_in_the_sum, a_group_that_is_not_there, a_sum_of_another_tensor_set, a_sum_too_short]
SUMS += [a_sum_that_is_not_there, a_negative_weight]


def one_round(folder, method, grid, **changes):
    """The state after a round, and node and outcome of every device."""
    engine, [result] = run_rounds(folder, method, grid, number=1, **changes)
    state = engine.state()
    return state.tensors, state.values.get("trained"), {d["device"]: (d["node"], d["outcome"]) for d in result.devices}


@lru_cache
def round_with_a_dead_node(folder, method, on_hardware):
    grid = connected_grid(4, folder / "states") if on_hardware else simulated_grid(2)

    def die_in_training(messages):  # but answer what a device is asked before
        grid.broken = {1: 8} if messages[0].metadata.message_type == "train" else {}
        return messages

    grid.seen = die_in_training
    return one_round(folder, method, grid, **HARDWARE if on_hardware else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dead")


HARDWARE = {"fleet": "", "devices": 4}


def check_refusal(folder, tmp_path, method, tamper, on_hardware=False):
    """A round in which node 1 answers badly ends like one in which it dies; returns what became of its devices."""
    tensors, trained, deaths = round_with_a_dead_node(folder / method, method, on_hardware)
    grid = connected_grid(4, tmp_path) if on_hardware else simulated_grid(2)

    def tamper_one(message):
        is_training = message.metadata.message_type == "train"
        return tamper(message) if is_training and message.metadata.src_node_id == 1 else message

    grid.tamper = tamper_one
    found, who, refusals = one_round(tmp_path, method, grid, **HARDWARE if on_hardware else {})
    assert same_bits(tensors, found)
    assert trained == who
    mine = [device for device, (node, _) in refusals.items() if node == 1]
    assert mine
    for device, (node, outcome) in refusals.items():
        assert deaths[device][0] == node
        if node == 1:
            assert deaths[device][1].startswith("failed: the client process died: as the test asked")
        else:
            assert outcome == deaths[device][1]
    return {refusals[device][1] for device in mine}


@pytest.mark.parametrize("method", REPRESENTATIVES)
@pytest.mark.parametrize("change", WHOLE, ids=lambda change: change.__name__)
def test_a_bad_reply_changes_nothing(method, change, tmp_path, folder):
    [why] = check_refusal(folder, tmp_path, method, changed_reply(change))
    assert why.startswith("failed: the node's reply says nothing" if change is no_device else "refused: ")


def test_on_hardware_too_nobody_has_trained_on_more_than_its_shard(tmp_path, folder):
    tamper = changed_reply(more_examples_than_its_shard)
    [why] = check_refusal(folder, tmp_path, "heterofl", tamper, on_hardware=True)
    assert why == "refused: device 0 says that it trained on 25 examples, its shard holds 24"


def failed_with_an_essay(reply, arrays):
    reply["updates"][0]["outcome"] = "failed: \x1b[2J\n" + "x" * 987


def test_what_a_device_says_of_its_failure_is_one_short_line(tmp_path, folder):
    whys = check_refusal(folder, tmp_path, "heterofl", changed_reply(failed_with_an_essay), on_hardware=True)
    [why] = whys
    assert why == f"failed:  [2J {'x' * 987}"
    assert len(why) == 1000


@pytest.mark.parametrize("method", SUMMING)
@pytest.mark.parametrize("change", SUMS, ids=lambda change: change.__name__)
def test_a_bad_sum_changes_nothing(method, change, tmp_path, folder):
    [why] = check_refusal(folder, tmp_path, method, changed_reply(change))
    assert why.startswith("refused: ")


def garbage(message):
    message.content = RecordDict({"wildflower": ConfigRecord({"json": "{]"})})
    return message


def nothing(message):
    message.content = RecordDict()
    return message


def another_models_weights(message):
    message.content = RecordDict({"arrays": ArrayRecord({"conv.weight": Array(torch.zeros(3, 3).numpy())})})
    return message


def unnumbered_arrays(message):
    record = message.content.array_records.get("weights")
    data = record["0"] if record else Array("uint8", (1,), "wildflower.packed", b"a")
    message.content["weights"] = ArrayRecord({"conv.weight": data})
    return message


@pytest.mark.parametrize("method", REPRESENTATIVES)
@pytest.mark.parametrize("tamper", [garbage, nothing, another_models_weights, unnumbered_arrays])
def test_a_message_that_is_none_of_ours_changes_nothing(method, tamper, tmp_path, folder):
    [why] = check_refusal(folder, tmp_path, method, tamper)
    assert why.startswith("refused: Reply: ")


@pytest.mark.parametrize("method", REPRESENTATIVES)
def test_a_reply_that_comes_twice_counts_once(method, tmp_path):
    grid = simulated_grid(2)
    grid.duplicate = True
    once = one_round(tmp_path / "once", method, simulated_grid(2))
    twice = one_round(tmp_path / "twice", method, grid)
    assert same_bits(once[0], twice[0])
    assert once[1:] == twice[1:]


# On hardware a device's weights come by themselves. Node 1 carries device 0.


LENET = LeNet5(input_shape=(1, 8, 8))


def of_values(value):
    def change(reply, arrays):
        weights = torch.frombuffer(bytearray(arrays[0]), dtype=torch.float32)
        weights[7] = value
        arrays[0] = weights.numpy().tobytes()

    return change


def an_index_of_its_own(reply, arrays):
    reply["updates"][0]["index"] = [["head.temperature", [1], "float32"]]


def a_payload_cut_short(reply, arrays):
    arrays[0] = arrays[0][:-4]


def a_payload_that_is_not_there(reply, arrays):
    reply["updates"][0]["payloads"]["weights"] = 5


def a_tensor_set_of_another_name(reply, arrays):
    reply["updates"][0]["payloads"] = {"biases": 0}


def a_tensor_set_more(reply, arrays):
    reply["updates"][0]["payloads"]["biases"] = 0


def a_report_of_impossible_memory(reply, arrays):
    reply["updates"][0]["report"]["memory_available_bytes"] = -1


BAD_WEIGHTS = {
    "other tensors": (an_index_of_its_own, "updates.0.index: Extra inputs are not permitted"),
    "wrong length": (a_payload_cut_short, "packed weights have"),
    "nan": (of_values(float("nan")), "holds values that are not finite"),
    "inf": (of_values(float("inf")), "holds values that are not finite"),
    "overflow": (of_values(1e30), "finite and small enough"),
    "no payload": (a_payload_that_is_not_there, "points to array 5"),
    "unknown tensor set": (a_tensor_set_of_another_name, "tensor sets ['biases'] came, not ['weights']"),
    "extra tensor set": (a_tensor_set_more, "tensor sets ['biases', 'weights'] came, not ['weights']"),
    "bad report": (a_report_of_impossible_memory, "memory_available_bytes"),
}


@pytest.mark.parametrize(
    "method", [method for method in REPRESENTATIVES if method != "local"]
)  # which sends no weights
@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_bad_weights_of_one_device_change_nothing(method, kind, tmp_path, folder):
    change, words = BAD_WEIGHTS[kind]
    [why] = check_refusal(folder, tmp_path, method, changed_reply(change), on_hardware=True)
    assert why.startswith("refused: ")
    assert words in why


# A bound on the norm of updates.


def far_away(reply, arrays):
    for place, data in enumerate(arrays):
        weights = torch.frombuffer(bytearray(data), dtype=torch.float32) + 50.0
        arrays[place] = weights.numpy().tobytes()


def distance(before, after):
    names = [name for name in before if before[name].is_floating_point()]
    return math.sqrt(sum(float((after[name].double() - before[name].double()).square().sum()) for name in names))


@pytest.mark.parametrize("method", ["all-large", "heterofl"])
def test_one_device_moves_the_model_no_further_than_the_bound(method, tmp_path):
    """On hardware, where the server sees every update; one device trains alone, so that the mean is its own."""
    moved, records = {}, {}
    for bound in (0.0, 0.5):
        grid = connected_grid(1, tmp_path / f"states-{bound}")
        grid.tamper = lambda message: (
            changed_reply(far_away)(message) if message.metadata.message_type == "train" else message
        )
        changes = {
            "fleet": "",
            "devices": 1,
            "devices-per-round": 1,
            "aggregation.norm-bound": bound,
            "evaluate-every": 2,
        }
        folder = tmp_path / f"{method}-{bound}"
        folder.mkdir()
        engine, scorer = started(small_config(folder, **METHODS[method] | changes))
        before = {name: value.clone() for name, value in engine.state().tensors.items()}
        result = engine.run_round(grid, 1, scorer)
        records[bound] = result.record
        assert [line["bounded"] for line in result.devices] == [bound > 0]
        moved[bound] = distance(before, engine.state().tensors)
    assert moved[0.0] > 1000
    assert 0 < moved[0.5] <= 0.5 * (1 + 1e-5)
    assert [records[bound]["devices_bounded"] for bound in (0.0, 0.5)] == [0, 1]


def test_a_node_of_many_devices_bounds_each_before_it_adds(tmp_path):
    """Honest devices, and a bound that they all exceed: the mean of eight is within it."""
    changes = METHODS["all-large"] | {"evaluate-every": 2, "aggregation.norm-bound": 1e-3, "learning-rate": 0.5}
    engine, scorer = started(small_config(tmp_path, **changes))
    before = {name: value.clone() for name, value in engine.state().tensors.items()}
    result = engine.run_round(simulated_grid(2), 1, scorer)
    assert result.record["devices_bounded"] == result.record["devices_replied"] > 1
    assert 0 < distance(before, engine.state().tensors) <= 1e-3 * (1 + 1e-5)


def test_a_method_that_wants_every_update_by_itself_gets_it_bounded(tmp_path):
    changes = METHODS["hypemefed"] | {"evaluate-every": 2, "aggregation.norm-bound": 1e-3, "learning-rate": 0.5}
    engine, scorer = started(small_config(tmp_path, **changes))
    seen = []
    honest = engine.method.absorb

    def absorb(contribution):
        sent, found = engine.method.payload(contribution.group)["weights"], contribution.own("weights")
        seen.append(distance(found, {name: sent[name] for name in found}))
        honest(contribution)

    engine.method.absorb = absorb
    result = engine.run_round(simulated_grid(2), 1, scorer)
    assert result.record["devices_bounded"] == len(seen) > 1
    assert max(seen) <= 1e-3 * (1 + 1e-3)


def uninvited_weights(reply, arrays):
    reply["updates"][0]["payloads"] = {"weights": 0}
    arrays.append(bytes(Layout.of(LENET.tensors(LENET.full())).nbytes))


def an_uninvited_tensor_set(reply, arrays):
    reply["updates"][0]["payloads"] = {"weights": 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (uninvited_weights, "1 arrays, at most 0 are expected"),
        (an_uninvited_tensor_set, "tensor sets ['weights'] came, not []"),
    ],
)
def test_weights_that_nobody_asked_for_change_nothing(change, words, tmp_path, folder):
    [why] = check_refusal(folder, tmp_path, "local", changed_reply(change), on_hardware=True)
    assert words in why


def test_devices_that_diverge_together_are_refused_before_the_sum_overflows(tmp_path):
    """Each can be added by itself: 2^62 is half the range of the sum's integers."""
    grid = connected_grid(4, tmp_path)
    # examples x 2^28 x value just below 2^62; all-large weighs by examples, 22 of each device's 24.
    grid.tamper = lambda message: (
        changed_reply(of_values(2.0**34 / 22 * 0.9))(message) if message.metadata.message_type == "train" else message
    )
    state, _, found = one_round(tmp_path, "all-large", grid, **HARDWARE)
    whys = [outcome for _, outcome in found.values()]
    assert whys.count("trained") == 1
    assert sum("finite and small enough" in why for why in whys) == 3
    assert all(torch.isfinite(value).all() for value in state.values())
    assert max(float(value.max()) for value in state.values()) == pytest.approx(2.0**34 / 22 * 0.9, rel=1e-6)


# Nodes that die, and nodes that never answer.


@pytest.mark.parametrize("method", ON_HARDWARE)
@pytest.mark.parametrize("code", [2, 3, 5, 8])
def test_error_replies_count_as_failed_or_late_devices(method, code, tmp_path):
    grid = simulated_grid(2)
    grid.broken = {1: code, 2: code}
    engine, [result] = run_rounds(tmp_path, method, grid, number=1)
    assert same_bits(engine.state().tensors, started(small_config(tmp_path, **METHODS[method]))[0].state().tensors)
    assert result.record["devices_replied"] == 0
    assert result.record["devices_failed"] == 4
    assert all(d["outcome"].startswith("late" if code == 3 else "failed: ") for d in result.devices)
    assert result.record["training_bytes_up"] == 0
    assert "trained" not in engine.state().values or not engine.state().values["trained"]


@pytest.mark.parametrize("method", ON_HARDWARE)
def test_a_silent_node_is_late_at_the_deadline_and_left_out_while_it_is_busy(method, tmp_path, monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr("wildflower.rounds.exchange.time", clock)
    for module in ("population", "connected_devices"):
        monkeypatch.setattr(f"wildflower.rounds.{module}.time", clock)
    grid = connected_grid(4, tmp_path)
    config = small_config(tmp_path, **METHODS[method] | HARDWARE | {"deadline-seconds": 30.0, "evaluate-every": 4})
    engine, scorer = started(config)
    muted = []

    def mute(messages):
        muted.extend(m for m in messages if m.metadata.dst_node_id == 1 and m.metadata.message_type == "train")
        return [m for m in messages if m.metadata.dst_node_id != 1 or m.metadata.message_type != "train"]

    grid.seen = mute
    first = engine.run_round(grid, 1, scorer)
    assert {d["device"]: d["outcome"] for d in first.devices} == {0: "late", 1: "trained", 2: "trained", 3: "trained"}
    assert first.record["devices_failed"] == 1
    assert sum(clock.slept) == pytest.approx(30.0, abs=0.3)
    assert muted

    grid.silent = {1}  # it still works, and does not answer a question either
    second = engine.run_round(grid, 2, scorer)
    assert {d["device"] for d in second.devices} == {1, 2, 3}
    assert {d["outcome"] for d in second.devices} == {"trained"}

    grid.silent, grid.seen = set(), lambda messages: messages  # it is done, and takes part again
    third = engine.run_round(grid, 3, scorer)
    assert {d["device"] for d in third.devices} == {0, 1, 2, 3}
    assert {d["outcome"] for d in third.devices} == {"trained"}


@pytest.mark.parametrize("method", ON_HARDWARE)
def test_a_node_that_dies_between_rounds_is_missed_by_nobody(method, tmp_path):
    grid = connected_grid(4, tmp_path)
    engine, scorer = started(small_config(tmp_path, **METHODS[method] | HARDWARE | {"evaluate-every": 1}))
    engine.run_round(grid, 1, scorer)
    del grid.contexts[2]
    second = engine.run_round(grid, 2, scorer)
    assert {d["device"]: d["outcome"] for d in second.devices} == {0: "trained", 2: "trained", 3: "trained"}
    assert second.record["score"] is not None
    grid.broken = {3: 5}  # and one that Flower still lists, but that is offline
    third = engine.run_round(grid, 3, scorer)
    assert {d["device"]: d["outcome"] for d in third.devices}.get(2) != "trained"
    assert third.record["devices_replied"] >= 1
