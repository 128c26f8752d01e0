"""Secure aggregation: the server sees sums only, and the model has the same bits as without."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Context, Message

from tests.grid import InProcessGrid
from tests.small_run import METHODS, connected_grid, same_bits, simulated_grid, small_config, started
from wildflower.cli.plan import make_plan
from wildflower.client_app import work, worker
from wildflower.client_app.app import app as client
from wildflower.messages.error import MessageError
from wildflower.messages.masks import joined_seed, split_seed, threshold_of
from wildflower.messages.orders import KeyBatch, KeyReply, Reply
from wildflower.messages.sums import WeightedSum, disjoined, joined
from wildflower.messages.wire import from_records, to_records
from wildflower.rounds.flower_strategy import FlowerStrategy
from wildflower.rounds.secure_aggregation import parts_of
from wildflower.server_app.app import run
from wildflower.server_app.config import ConfigError
from wildflower.server_app.no_progress import NoProgressError, more_of_each

SECURE = {"secure-aggregation.minimum": 3}
FAST = {"rounds": 2, "evaluate-every": 2, "devices-per-round": 6}
VIT = {
    "family": "vit-tiny",
    "family-arguments": "hidden = 12, depth = 3, heads = 2, mlp = 16",
    "below-smallest": "smallest",
}


def trained(folder, grid: InProcessGrid, number: int = 2, /, **keys):
    """The state after some rounds, and the records of the rounds."""
    folder.mkdir(exist_ok=True)
    engine, scorer = started(
        small_config(folder, **{key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()})
    )
    engine.start()
    results = [engine.run_round(grid, n, scorer) for n in range(1, number + 1)]
    return engine.state().tensors, results


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["all-large", "fedadam", "heterofl", "fedrolex"])
def test_the_model_has_the_same_bits_as_without(name, tmp_path):
    """Two devices of every width are one group: with six of a kind for one model, and with two groups of three."""
    fleet = {} if name in ("all-large", "fedadam") else {"fleet": two_kinds(tmp_path)}
    keys = METHODS[name] | FAST | fleet | ({} if name == "all-large" else VIT)
    plain, before = trained(tmp_path / "plain", simulated_grid(), **keys)
    secure, after = trained(tmp_path / "secure", simulated_grid(), **keys | SECURE)
    assert same_bits(plain, secure)
    assert [r.record["devices_replied"] for r in after] == [r.record["devices_replied"] for r in before] == [6, 6]
    # Sums of 64-bit integers in place of 32-bit floats, and the keys.
    ups = [r[0].record["training_bytes_up"] for r in (before, after)]
    assert 2 * ups[0] < ups[1] < 2 * ups[0] + 6 * 6000
    assert all(line["loss"] is None and line["examples"] > 0 for line in after[0].devices)


def two_kinds(folder) -> str:
    path = folder / "two.toml"
    path.write_text(
        '[[group]]\nname = "whole"\ncount = 3\nfits_width = 1.0\nlink = "1 Gbit/s"\nspeed = 1.0\n'
        '[[group]]\nname = "half"\ncount = 3\nfits_width = 0.5\nlink = "1 Gbit/s"\nspeed = 1.0\n'
    )
    return str(path)


class Lossy:
    """A ClientApp whose nodes fail at some kinds of messages."""

    def __init__(self, fails: Callable[[Message], bool]) -> None:
        self.fails, self.masked = fails, []

    def __call__(self, message: Message, context: Context) -> Message:
        if self.fails(message):
            raise RuntimeError("this node is lost")
        reply = client(message, context)
        if kind_of(message) == "train":
            self.masked.append(from_records(Reply, reply.content)[1])
        return reply


def kind_of(message: Message) -> str:
    """ "report", "keys", "shares", "train", "confirm" or "reveal"."""
    if message.metadata.message_type != "query":
        return message.metadata.message_type
    if not len(message.content):
        return "report"
    batch, _ = from_records(KeyBatch, message.content)
    order = batch.orders[0]
    return "reveal" if order.sealed else "confirm" if order.blocks else "shares" if order.members else "keys"


def lossy_grid(fails: Callable[[Message], bool], folder) -> tuple[InProcessGrid, Lossy]:
    app, grid = Lossy(fails), connected_grid(6, folder)
    grid.app = app
    return grid, app


ASK = worker.ask


@pytest.fixture(autouse=True)
def _work_is_done_in_this_process(monkeypatch):
    """Which is faster than in workers of the devices' own."""
    monkeypatch.setattr(worker, "ask", work.do)


@pytest.mark.thorough
@pytest.mark.worker
def test_workers_of_the_devices_do_it_too(tmp_path, monkeypatch, forked):
    few = HARDWARE | {"devices": 3, "devices-per-round": 3}
    plain, _ = trained(tmp_path / "b", connected_grid(3, tmp_path / "b"), 1, **few)
    monkeypatch.setattr(worker, "ask", ASK)
    secure, [result] = trained(tmp_path / "a", connected_grid(3, tmp_path / "a"), 1, **few | SECURE)
    assert same_bits(plain, secure)
    assert result.record["devices_replied"] == 3
    assert len(forked) == 3


HARDWARE = {"strategy": "fedavg", "fleet": "", "devices": 6, "devices-per-round": 6}


LATE = ("confirm", "reveal")  # when a device's update is in the sum already


@pytest.mark.parametrize(
    ("lost", "at"),
    [([], ""), ([2], "train"), ([6], "train"), ([4], "keys"), ([4], "shares"), ([5], "confirm"), ([5], "reveal")],
)
def test_devices_may_be_lost_at_any_step(lost, at, tmp_path):
    """Over real nodes: the model is that of a run without masks in which the same devices are lost at the training."""

    def fails(message):
        return message.metadata.dst_node_id in lost and kind_of(message) == at

    def fails_plainly(message):
        return message.metadata.dst_node_id in lost and at not in LATE and kind_of(message) == "train"

    keys = HARDWARE
    grid, _app = lossy_grid(fails, tmp_path / "a")
    secure, [result] = trained(tmp_path / "a", grid, 1, **keys | SECURE)
    plain, [_expected] = trained(tmp_path / "b", lossy_grid(fails_plainly, tmp_path / "b")[0], 1, **keys)
    assert same_bits(plain, secure)
    for line in result.devices:
        if line["device"] + 1 in lost and at not in LATE:
            assert line["outcome"].startswith("failed: ")


def test_the_server_sees_nothing_of_one_device(tmp_path):
    """What a device sends is uniform noise; what it sends twice of the same weights has nothing in common."""
    sent = []
    for attempt in ("a", "b"):
        grid, app = lossy_grid(lambda message: False, tmp_path / attempt)
        trained(tmp_path / attempt, grid, 1, **HARDWARE | SECURE | {"learning-rate": 1e-12})
        assert len(app.masked) == 6
        sent.append(np.frombuffer(app.masked[0][0], dtype=np.uint64))
    for words in (*sent, sent[0] - sent[1]):
        bits = np.unpackbits(words.view(np.uint8).reshape(-1, 8), axis=1)
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02
    assert not (sent[0] == sent[1]).any()


def test_too_many_that_are_lost_cost_the_round_and_no_more(tmp_path):
    grid, _ = lossy_grid(lambda m: m.metadata.dst_node_id in (1, 2) and kind_of(m) == "train", tmp_path)
    (tmp_path / "before").mkdir()
    before = started(small_config(tmp_path / "before", **HARDWARE))[0].state().tensors
    after, [result] = trained(tmp_path, grid, 1, **HARDWARE | SECURE | {"secure-aggregation.minimum": 5})
    assert same_bits(before, after)
    outcomes = [line["outcome"] for line in result.devices]
    assert sum("could not be unmasked: 4 updates arrived, 5 are needed" in outcome for outcome in outcomes) == 4


def test_groups_that_are_too_small_are_left_out(tmp_path):
    """Two of each width: nobody could hide among two."""
    keys = METHODS["heterofl"] | FAST | VIT | {"fleet": two_kinds(tmp_path), "evaluate-tiers": False}
    grid = simulated_grid()
    _, [result] = trained(tmp_path / "a", grid, 1, **keys | SECURE | {"secure-aggregation.minimum": 4})
    outcomes = {line["outcome"] for line in result.devices}
    assert outcomes == {"skipped: the sum of its group would be of 3 devices, and secure-aggregation.minimum is 4"}
    (tmp_path / "b").mkdir()
    plan = make_plan(small_config(tmp_path / "b", **keys | SECURE | {"secure-aggregation.minimum": 4}))
    [warning] = [text for text in plan.warnings if "secure-aggregation.minimum" in text]
    assert warning.endswith("Try fewer widths than widths = '1, 0.5, 0.25'.")  # all devices are asked already
    (tmp_path / "c").mkdir()
    with pytest.raises(NoProgressError, match="times the sum of its group would be of 3 devices, and") as error:
        run(grid, small_config(tmp_path / "c", **keys | SECURE | {"secure-aggregation.minimum": 4, "rounds": 1}))
    assert "memory" not in str(error.value)  # which is not what is missing
    assert "try fewer widths than widths = '1, 0.5, 0.25', or a strategy" in str(error.value)


def test_where_no_two_devices_have_the_same_channels_another_strategy_is_advised(tmp_path):
    plan = make_plan(small_config(tmp_path, **METHODS["federated-dropout"] | FAST | VIT | SECURE))
    [warning] = [text for text in plan.warnings if "secure-aggregation.minimum" in text]
    assert warning.endswith("Try a strategy that does not cut other channels for every device.")


def test_where_widths_play_no_part_no_fewer_of_them_are_advised(tmp_path):
    for name, advice in (
        ("heterofl", "fewer widths than widths = '1, 0.5, 0.25', or more devices-per-round than 4"),
        ("depthfl", "fewer different models among the candidates, or more devices-per-round than 4"),
    ):
        config = small_config(tmp_path, **METHODS[name])
        engine, _ = started(config)
        assert more_of_each(config, engine.method) == advice


def with_reply(grid: InProcessGrid, change: Callable[[dict], None], step: str) -> None:
    def tamper(reply: Message) -> Message:
        if not len(reply.content) or reply.has_error():
            return reply
        text = reply.content["wildflower"]["json"]
        value = json.loads(text)
        if "answers" not in value or not value["answers"][0].get(step):
            return reply
        for answer in value["answers"]:
            change(answer)
        reply.content = to_records(KeyReply.model_validate_json(json.dumps(value)))
        return reply

    grid.tamper = tamper


def test_answers_of_a_wrong_form_cost_their_device_its_round(tmp_path):
    def change(answer):
        if answer["device"] == 1:
            answer["sealed"] = answer["sealed"][:2]

    grid = connected_grid(6, tmp_path)
    with_reply(grid, change, "sealed")
    _, [result] = trained(tmp_path, grid, 1, **HARDWARE | SECURE)
    outcomes = {line["device"]: line["outcome"] for line in result.devices}
    assert outcomes[1].startswith("failed: it did not share its seeds: shares for 6 members were to come")
    assert [outcomes[d] for d in (0, 2, 3, 4, 5)] == ["trained"] * 5


def test_what_devices_say_is_one_printable_line(tmp_path, caplog):
    def change(answer):
        answer.update(member=None, error="two\nlines \x1b[2J of a device")

    grid = connected_grid(6, tmp_path)
    with_reply(grid, change, "member")
    _, [result] = trained(tmp_path, grid, 1, **HARDWARE | SECURE)
    assert all("made no keys: two lines" in line["outcome"] for line in result.devices)
    assert all(line["outcome"].isprintable() for line in result.devices)
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_fewer_shares_than_the_threshold_give_nothing():
    seed = bytes(range(16))
    shares = dict(enumerate(split_seed(seed, 3, 5)))
    assert joined_seed({place: shares[place] for place in (4, 0, 2)}) == seed
    assert joined_seed({place: shares[place] for place in (4, 0)}) != seed


def test_sums_go_together_in_one_vector():
    def a_sum(values, weight, counts=None):
        return WeightedSum(torch.tensor(values), weight, None if counts is None else torch.tensor(counts))

    vector = joined({"b": a_sum([5, -6], 7), "a": a_sum([1], 4, [4, 0])})
    assert vector.tolist() == [1, 4, 0, 5, -6]
    like = {"a": a_sum([0], 0, [0, 0]), "b": a_sum([0, 0], 0)}
    found = disjoined(vector, like, {"a": 4, "b": 7})
    assert found["a"].class_weight.tolist() == [4, 0]
    assert (found["b"].total.tolist(), found["b"].weight, found["b"].largest) == ([5, -6], 7, 6.0)
    with pytest.raises(MessageError, match="weights of classes"):
        disjoined(vector, like, {"a": 3, "b": 7})


def test_many_devices_are_several_sums():
    assert [len(part) for part in parts_of(10, 3)] == [10]
    assert [len(part) for part in parts_of(100, 3)] == [25, 25, 25, 25]
    assert [len(part) for part in parts_of(70, 40)] == [70]
    assert [(n, threshold_of(n, 3)) for n in (3, 4, 6, 10)] == [(3, 3), (4, 3), (6, 5), (10, 7)]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"aggregation.rule": "median"}, "aggregation.rule = 'median': does not go with secure-aggregation"),
        ({"both-models": True, "fedavg.use": "affordable"}, "both-models = True"),
        ({"secure-aggregation.minimum": 5}, "secure-aggregation.minimum = 5: with devices-per-round = 4"),
        (
            {"dp.epsilon": 1.0, "family-arguments": "norm = 'static'"},
            "secure-aggregation.minimum = 3: does not go with",
        ),
        ({"personal.every": 1, "test-fraction": 0.2}, "personal.every = 1"),
    ],
)
def test_what_needs_single_updates_is_refused(keys, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        small_config(tmp_path, **{"strategy": "fedavg"} | SECURE | keys)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fednova", "every device returns the fact 'effective_steps'"),
        ("hypemefed", "every device returns the tensor set 'weights' by itself"),
        ("heterofl", "batch norm's statistics"),
        ("local", "scores of models of their own"),
    ],
)
def test_methods_that_learn_more_than_sums_are_refused(name, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        started(small_config(tmp_path, **METHODS[name] | SECURE))


def test_flowers_own_loop_takes_the_masks_off_too(tmp_path):
    states = []
    for name, keys in (("plain", {}), ("secure", SECURE)):
        (folder := tmp_path / name).mkdir()
        engine, scorer = started(small_config(folder, **METHODS["all-large"] | FAST | keys))
        strategy = FlowerStrategy(engine, scorer)
        strategy.start(simulated_grid(), strategy.arrays, num_rounds=2)
        assert [result.record["devices_replied"] for result in strategy.results] == [6, 6]
        states.append(engine.state().tensors)
    assert same_bits(*states)
