"""Tensors that are rounded on their way: bytes, the same bits everywhere, and what becomes of what rounding loses."""

import math

import pytest
import torch
from safetensors.torch import load_file

from tests.small_run import METHODS, changed_reply, connected_grid, same_bits, simulated_grid, small_config, started
from wildflower.client_app.context import DeviceContext
from wildflower.client_app.rounding import LOST_ON_THE_WIRE
from wildflower.devices.budget import Budget
from wildflower.messages.encoding import decode, encode, restored
from wildflower.messages.orders import Reply
from wildflower.messages.packing import Layout
from wildflower.messages.wire import from_records
from wildflower.rounds.requests import Work
from wildflower.server_app.app import build, run
from wildflower.server_app.checkpoint import load
from wildflower.server_app.config import ConfigError
from wildflower.server_app.run_folder import read_devices, read_rounds
from wildflower.strategies.recipfl.recipfl import RecipFL

HARDWARE = {"fleet": "", "devices": 4, "devices-per-round": 4}
FLEET_OF_TWO_LINKS = """
[[group]]
name = "fast"
count = 2
fits_width = 1.0
link = "100 Mbit/s"
speed = 3.0

[[group]]
name = "slow"
count = 1
fits_width = 1.0
link = "1 Mbit/s"
speed = 3.0
"""


def state_of(run_dir):
    return load(run_dir).state.tensors


def over_nodes(folder, grid, **changes):
    """Six devices on nodes of their own, all in every round."""
    keys = {"devices": 6, "devices-per-round": 6, "fleet": "", "rounds": 3, "strategy": "fedavg"} | changes
    return run(grid, small_config(folder, **keys))


def counted(message, into):
    """The message, when the bytes of its arrays are noted, which the engine lets go of."""
    if message.metadata.message_type == "train":
        into.append(sum(len(array.data) for array in message.content["weights"].values()))
    return message


def arrays_of(message):
    return from_records(Reply, message.content)[1]


@pytest.mark.thorough
@pytest.mark.parametrize(("wire", "least"), [("int8", 3.9), ("float16", 1.99)])
def test_fewer_bytes_travel_and_all_that_is_said_of_them_follows(tmp_path, wire, least):
    runs, travelled = {}, {}
    for name in ("float32", wire):
        grid = connected_grid(6, tmp_path / name)
        sent, came = [], []
        push = grid.push_messages
        grid.push_messages = lambda messages, push=push, sent=sent: push([counted(m, sent) for m in messages])
        grid.tamper = lambda message, came=came: (
            came.append(sum(map(len, arrays_of(message)))) if message.metadata.message_type == "train" else None,
            message,
        )[1]
        runs[name] = over_nodes(tmp_path, grid, **{"run-name": name, "wire": name})
        travelled[name] = sum(sent), sum(came)
        journal = read_rounds(runs[name])
        assert travelled[name] == (
            sum(r.training_bytes_down for r in journal),
            sum(r.training_bytes_up for r in journal),
        )
        assert {r.devices_replied for r in journal} == {6}
    for before, after in zip(travelled["float32"], travelled[wire], strict=True):
        assert before / after >= least
    payloads = [next(read_devices(runs[name])).download_bytes for name in ("float32", wire)]
    assert payloads[0] / payloads[1] >= least


@pytest.mark.thorough
def test_a_simulation_rounds_as_nodes_do_to_the_bit(tmp_path):
    nodes = over_nodes(tmp_path, connected_grid(6, tmp_path), **{"run-name": "nodes", "wire": "int8"})
    changes = {"devices-per-round": 6, "rounds": 3, "strategy": "fedavg", "fedavg.use": "all-large"}
    changes |= {"below-smallest": "smallest", "run-name": "simulated", "wire": "int8"}
    for workers in (1, 3):
        changes |= {"run-name": f"simulated-{workers}", "workers": workers}
        simulated = run(simulated_grid(workers), small_config(tmp_path, **changes))
        assert [r.devices_replied for r in read_rounds(simulated)] == [6] * 3
        assert same_bits(state_of(nodes), state_of(simulated))
    full = over_nodes(tmp_path, connected_grid(6, tmp_path / "full"), **{"run-name": "full"})
    assert not same_bits(state_of(nodes), state_of(full))


@pytest.mark.thorough
def test_a_resumed_run_has_the_same_bits(tmp_path):
    changes = {"strategy": "heterofl", "wire": "int8", "evaluate-every": 2, "rounds": 4}
    whole = run(simulated_grid(), small_config(tmp_path, **changes, run_name="whole"))
    broken = run(simulated_grid(), small_config(tmp_path, **{**changes, "rounds": 2}, run_name="broken"))
    again = run(simulated_grid(), small_config(tmp_path, **changes, run_name="broken", resume=True))
    assert again == broken
    assert same_bits(state_of(whole), state_of(broken))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scaffold", "lotteryfl", "spatl", "fedrolex", "rafl", "model-search"])
def test_methods_with_other_tensor_sets(tmp_path, name):
    assert name in METHODS
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=3, wire="int8", **METHODS[name]))
    rounds = read_rounds(run_dir)
    assert sum(r.devices_refused + r.devices_failed for r in rounds) == 0
    assert sum(r.devices_replied for r in rounds) == 12
    assert all(r.score is None or math.isfinite(r.loss) for r in rounds)


@pytest.mark.thorough
@pytest.mark.parametrize("aggregation", ["median", "trimmed-mean", "norm-bounded-mean"])
def test_robust_aggregation_and_norm_bounds_see_what_was_restored(tmp_path, aggregation):
    """In place of weights they would see changes, whose median is about 0, and the model would vanish."""
    settings = {
        "strategy": "fedavg",
        "aggregation.rule": aggregation,
        "aggregation.norm-bound": 5.0,
        "rounds": 2,
        "learning-rate": 1e-6,
    }
    run_dir = run(connected_grid(6, tmp_path), small_config(tmp_path, fleet="", devices_per_round=6, **settings))
    rounded = {**settings, "wire": "int8", "run-name": "rounded"}
    other = run(connected_grid(6, tmp_path / "2"), small_config(tmp_path, fleet="", devices_per_round=6, **rounded))
    for name, value in state_of(run_dir).items():
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(state_of(other)[name], value, rtol=0, atol=1e-3)


def test_what_rounding_lost_comes_in_later_rounds(tmp_path, monkeypatch):
    """What has travelled adds up to the changes of all rounds, but for what the last round has lost."""
    true, travelled = {}, {}
    encoded = DeviceContext.encoded

    def recorded(context, tensor_sets):
        found = encoded(context, tensor_sets)
        for name, data in found.items():
            layout = context.sent[name].layout
            received = decode(context._encoded[name], layout, "int8")  # `context.received` may be trained in place
            came = decode(data, layout, "int8")
            for tensor, start in received.items():
                change = tensor_sets[name][tensor].detach().double() - start.double()
                true[tensor] = true.get(tensor, 0) + change
                travelled[tensor] = travelled.get(tensor, 0) + came[tensor].double()
        return found

    monkeypatch.setattr(DeviceContext, "encoded", recorded)
    settings = {"strategy": "fedavg", "wire": "int8", "rounds": 6, "local_steps": 2}
    run(connected_grid(1, tmp_path), small_config(tmp_path, fleet="", devices=1, devices_per_round=1, **settings))
    [kept] = tmp_path.rglob(f"{LOST_ON_THE_WIRE}-weights-*.6.safetensors")
    lost = load_file(kept)
    assert lost.keys() == {name for name in true if "running" not in name}
    for name, value in lost.items():
        torch.testing.assert_close(true[name] - travelled[name], value.double(), rtol=0, atol=1e-6)
    assert 1e-5 < max(float(value.abs().max()) for value in lost.values()) < 0.01


def test_small_changes_are_not_lost_on_the_server():
    """Each round moves a weight by a tenth of the step in which it travels down: twenty rounds move it by two steps."""
    weights = {"w": torch.tensor([[1.0] + [0.5] * 31])}
    layout = Layout.of(weights)
    step = 1.0 / 127
    server, lost = {"w": weights["w"].clone()}, torch.zeros(1, 32)
    for _ in range(20):
        received = decode(encode(server, layout, "int8"), layout, "int8")
        trained = received["w"].clone()
        trained[0, 1] += step / 10
        value = trained - received["w"] + lost
        data = encode({"w": value}, layout, "int8")
        change = decode(data, layout, "int8")
        lost = value - change["w"]
        server = restored(change, server, layout)
    assert float(server["w"][0, 1]) == pytest.approx(0.5 + 2 * step, abs=step / 20)


def test_a_reply_of_another_length_is_refused(tmp_path):
    def shorter(reply, arrays):
        arrays[0] = arrays[0][:-1]

    grid = connected_grid(6, tmp_path)
    honest = changed_reply(shorter)
    grid.tamper = lambda message: (
        honest(message) if message.metadata.message_type == "train" and message.metadata.src_node_id == 2 else message
    )
    run_dir = over_nodes(tmp_path, grid, **{"wire": "int8", "rounds": 1})
    [refused] = [d for d in read_devices(run_dir) if d.outcome != "trained"]
    assert refused.device == 1
    assert "weights encoded as int8 have" in refused.outcome


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"secure-aggregation.minimum": 3},
            "does not go with secure-aggregation, whose masks hide integers of 64 bits",
        ),
        ({"dp.epsilon": 3.0, "strategy": "fedavg"}, "does not go with differential privacy"),
        ({"wire": "int4"}, "'float32', 'float16', 'int8' or 'qsgd'"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, changes, why):
    with pytest.raises(ConfigError, match=why):
        small_config(tmp_path, **{"wire": "int8"} | changes)


def test_budgets_go_by_what_travels(tmp_path):
    """With a quarter of the bytes a link of the same speed carries a wider model."""
    found = {}
    for wire in ("float32", "int8"):
        engine, _ = build(small_config(tmp_path, wire=wire, strategy="heterofl"))
        method = engine.method
        whole = method.family.full()
        found[wire] = method.cost(whole).payload_bytes
        budget = Budget(2**40, 50_000, 50_000)
        found[f"{wire} given"] = method.assign(0, budget)
    assert found["float32"] / found["int8"] >= 3.9
    assert found["int8 given"] == whole
    assert found["float32 given"] is None or found["float32 given"] != whole


@pytest.mark.parametrize(("wire", "secure"), [("float32", False), ("int8", False), ("float32", True)])
@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("sandwich", ["none", "labels"])
def test_what_a_search_finds_travels_over_each_link(tmp_path, wire, secure, down, sandwich):
    """Under masks twice as much travels up as down."""
    keys = {"strategy": "benchmarks.methods_that_win.nested_search:NestedSearch", "nested-search.searcher": "exact"}
    keys |= {"nested-search.shares": "0.25, 0.4, 0.55, 0.7, 0.85, 1", "nested-search.sandwich": sandwich}
    keys |= {"secure-aggregation.minimum": 3} if secure else {}
    keys |= {"nested-search.norm": "static", "family": "mlp"}
    method = build(small_config(tmp_path, wire=wire, **keys))[0].method
    small, large = method.cost(method.space.smallest()), method.cost(method.space.largest())
    assert large.upload_bytes == (2 if secure else 1) * large.download_bytes
    found = set()
    for share in (0.2, 0.5, 0.8):
        limits = [
            int(few + share * (many - few))
            for few, many in ((small.download_bytes, large.download_bytes), (small.upload_bytes, large.upload_bytes))
        ]
        budget = Budget(2**40, limits[0], None) if down else Budget(2**40, None, limits[1])
        architecture = method.assign(0, budget)
        price = method.cost(architecture)
        assert budget.can_travel(price.download_bytes, price.upload_bytes)
        assert max(price.download_bytes / limits[0], price.upload_bytes / limits[1]) > 0.7  # and the link is used
        found.add(architecture)
    assert len(found) == 3


def test_late_devices_go_by_what_travels(tmp_path):
    """21,474 parameters take 1.4 seconds both ways at 1 Mbit/s, and 0.35 seconds in a quarter of the bytes."""
    outcomes = {}
    for wire in ("float32", "int8"):
        changes = {"strategy": "fedavg", "deadline-seconds": 0.8, "devices": 3, "devices-per-round": 3}
        config = small_config(tmp_path, wire=wire, **changes)
        (tmp_path / "six.toml").write_text(FLEET_OF_TWO_LINKS)
        engine, _ = build(config)
        engine.start()
        work = engine.begin(simulated_grid(), 1).asked
        outcomes[wire] = {a.device: a.outcome for a in work.assignments}
    assert outcomes == {"float32": {0: "", 1: "", 2: "late"}, "int8": {0: "", 1: "", 2: ""}}


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{"wire": "int8"}, {"aggregation.norm-bound": 100.0}])
def test_what_is_made_for_one_device_is_made_once(tmp_path, monkeypatch, changes):
    """However little is kept of what is sent: a reply is read against what its device was sent, and that is let go."""
    monkeypatch.setattr("wildflower.rounds.requests.MESSAGE_BYTES", 1)
    made, works = [], []
    payload, init = RecipFL.payload, Work.__post_init__
    monkeypatch.setattr(RecipFL, "payload", lambda method, group: made.append(group) or payload(method, group))
    monkeypatch.setattr(Work, "__post_init__", lambda work: works.append(work) or init(work))
    engine, scorer = started(small_config(tmp_path, **METHODS["recipfl"] | HARDWARE | changes))
    made.clear()
    result = engine.run_round(connected_grid(4, tmp_path), 1, scorer)
    assert {line["outcome"] for line in result.devices} == {"trained"}
    assert len(made) == len({id(group) for group in made}) == len(result.devices) > 1
    assert not any(work._awaited for work in works)
