import json
import math
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from benchmarks.recipfl.recipfl_controls import AblatedTraining, ByExamples, FirstUpload
from tests.beside import own_traced
from tests.encoders import encoder
from tests.small_run import METHODS, changed_reply, same_bits, simulated_grid, small_config, started
from tests.strategies.by_hand import loss_of, setup
from wildflower.client_app.context import DeviceContext
from wildflower.messages.orders import StepReference
from wildflower.messages.packing import MessageError
from wildflower.models.family import make_family
from wildflower.models.weights import with_weights
from wildflower.strategies.method import Contribution, Group, Order, Trained, client_step_of
from wildflower.strategies.recipfl import RecipFL, RecipFLParams
from wildflower.strategies.recipfl.device import TaughtTraining
from wildflower.strategies.recipfl.hypernetwork_step import MAX_GRADIENT
from wildflower.strategies.training_steps import ClassCounts

torch.set_num_threads(1)

CHOICE = make_family(
    {
        "name": "choice",
        "input_shape": [1, 8, 8],
        "classes": 3,
        "members": {
            "large": {"name": "lenet5", "conv_channels": [3, 4], "hidden": [8, 6]},
            "small": {"name": "lenet5", "conv_channels": [3, 2], "hidden": [6]},
        },
    }
)
LARGE, SMALL = CHOICE.candidates(())


@pytest.fixture
def recipfl(tmp_path):
    def make(kind=RecipFL, **params):
        settings = {"hidden": 8, "decoder_hidden": 8, "tile": 4} | params
        made = kind(setup(tmp_path, CHOICE, task={"devices": 3}), kind.params_type(**settings))
        made.round = 1
        return made

    return make


def group(strategy, device, architecture):
    local = strategy.client_step(Order(device, architecture))
    return Group(
        architecture,
        strategy.selection(device, architecture),
        local.sent(CHOICE, architecture),
        local.returned(CHOICE, architecture),
        CHOICE.place(architecture),
    )


def written(strategy, device, architecture):
    """What a device is sent."""
    return strategy.payload(group(strategy, device, architecture))["weights"]


def contribution(strategy, device, architecture, weights, examples=4):
    """What a device returns."""
    return Contribution(group(strategy, device, architecture), [device], [device], examples, {}, {"weights": weights})


def reply(strategy, device, architecture, change, examples=4):
    """What a device returns that makes `change` of every tensor it was sent."""
    weights = {name: change(value) for name, value in written(strategy, device, architecture).items()}
    return contribution(strategy, device, architecture, weights, examples)


def test_what_is_sent_are_all_tensors_in_their_order(recipfl):
    strategy = recipfl()
    for architecture in (LARGE, SMALL):
        sent = written(strategy, 0, architecture)
        assert {n: v.shape for n, v in sent.items()} == {n: s.shape for n, s in CHOICE.tensors(architecture).items()}
        assert list(sent) == list(CHOICE.tensors(architecture))
        assert all(bool(torch.isfinite(value).all()) for value in sent.values())


def test_every_device_is_sent_weights_of_its_own(recipfl):
    strategy = recipfl()
    first, second = (written(strategy, device, SMALL) for device in (0, 1))
    assert not torch.equal(first["small.block1.conv.weight"], second["small.block1.conv.weight"])


@pytest.mark.parametrize(
    ("hypernetwork", "hidden", "third"),
    [("printed", 16, "parameter.value.bias"), ("published", 8, "descriptor.2.bias")],
)
def test_the_gradient_is_the_vector_jacobian_product(hypernetwork, hidden, third, recipfl):
    """Against finite differences: a parameter of a decoder, the messages or what is read moves what is sent."""
    strategy = recipfl(hypernetwork=hypernetwork, hidden=hidden)
    strategy.absorb(reply(strategy, 0, SMALL, lambda value: value - 0.01))
    for name in ("decoders.conv weight.layers.2.bias", "message.2.bias", third):
        found = strategy.step.gradient[name] / 2**30
        parameter = strategy.step.parameters[name]
        for entry in (0, 5):
            # sent - returned is 0.01 everywhere.
            products = []
            for step in (1e-3, -1e-3):
                with torch.no_grad():
                    parameter[entry] += step
                    moved = strategy.generate([(0, SMALL)])[0, SMALL]
                    parameter[entry] -= step
                products.append(sum(0.01 * float(value.double().sum()) for value in moved.values()))
            expected = (products[0] - products[1]) / 2e-3
            assert float(found[entry]) == pytest.approx(expected, rel=0.02, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("hypernetwork", ["printed", "published"])
def test_steps_lead_towards_what_devices_return(hypernetwork, recipfl):
    """Eq. 4 as printed leads away."""
    torch.manual_seed(0)
    strategy = recipfl(hypernetwork=hypernetwork, eta=3e-3)
    goals = {device: written(strategy, device, SMALL) for device in (0, 1)}
    goals = {device: {n: v + 0.05 * torch.randn_like(v) for n, v in goal.items()} for device, goal in goals.items()}

    def distance():
        total = 0.0
        for device, goal in goals.items():
            sent = strategy.generate([(device, SMALL)])[device, SMALL]
            total += sum(float((sent[n] - goal[n]).square().sum()) for n in sent if n.endswith("weight"))
        return total

    before = distance()
    for _ in range(40):
        for device, goal in goals.items():
            strategy.absorb(contribution(strategy, device, SMALL, goal))
        strategy.finish_round([])
    assert distance() < 0.8 * before


def test_strong_and_weak_devices_change_one_hypernetwork(recipfl):
    """What a strong device returns of its large model changes what a weak device is sent of the small one."""
    strategy = recipfl()
    before = written(strategy, 1, SMALL)
    strategy.absorb(reply(strategy, 0, LARGE, lambda value: value + 0.1))
    strategy.finish_round([])
    after = written(strategy, 1, SMALL)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"small.block1.conv.weight", "small.head.classifier.bias"} <= changed


def test_the_order_of_replies_does_not_matter(recipfl):
    states = []
    for order in ((0, 1, 2), (2, 0, 1)):
        strategy = recipfl()
        for device in order:
            strategy.absorb(reply(strategy, device, SMALL, lambda value, device=device: value * (1 + 0.1 * device)))
        strategy.finish_round([])
        states.append(strategy.state().tensors)
    assert same_bits(*states)


def test_gradients_are_summed_or_averaged_by_examples(recipfl):
    found = {}
    for weighting, kind in (("sum", RecipFL), ("examples", ByExamples)):
        strategy = recipfl(kind)
        for device, examples in ((0, 100), (1, 300)):
            strategy.absorb(reply(strategy, device, SMALL, lambda value, d=device: value + 0.01 * (d + 1), examples))
        share = strategy.step.weight if weighting == "examples" else 1.0
        found[weighting] = strategy.step.gradient["decoders.conv bias.layers.2.bias"].double() / share
    alone = []
    for device in (0, 1):
        strategy = recipfl()
        strategy.absorb(reply(strategy, device, SMALL, lambda value, d=device: value + 0.01 * (d + 1)))
        alone.append(strategy.step.gradient["decoders.conv bias.layers.2.bias"].double())
    assert torch.equal(found["sum"], alone[0] + alone[1])
    torch.testing.assert_close(found["examples"], (alone[0] + 3 * alone[1]) / 4, rtol=1e-5, atol=2.0)


def test_a_round_without_replies_changes_nothing(recipfl):
    strategy = recipfl()
    before = {n: v.clone() for n, v in strategy.state().tensors.items()}
    strategy.finish_round([])
    assert same_bits(before, strategy.state().tensors)


def test_biases_of_norms_are_those_that_the_device_uploaded(recipfl):
    strategy = recipfl()
    name = "small.block1.norm.bias"
    assert written(strategy, 0, SMALL)[name].eq(0).all()
    strategy.absorb(reply(strategy, 0, SMALL, lambda value: value + 0.25))
    assert written(strategy, 0, SMALL)[name].eq(0).all()  # not before the round has ended
    strategy.finish_round([])
    assert written(strategy, 0, SMALL)[name].eq(0.25).all()
    assert written(strategy, 1, SMALL)[name].eq(0).all()
    statistics = written(strategy, 0, SMALL)
    assert statistics["small.block1.norm.running_mean"].eq(0).all()
    assert statistics["small.block1.norm.running_var"].eq(1).all()


def test_a_device_gets_its_first_weights_once(recipfl, monkeypatch):
    strategy, built = recipfl(), []
    build = type(CHOICE).build
    monkeypatch.setattr(type(CHOICE), "build", lambda family, arch: built.append(arch) or build(family, arch))
    strategy.absorb(reply(strategy, 0, SMALL, lambda value: value + 0.25))
    written(strategy, 0, SMALL)
    assert built == [SMALL]
    strategy.finish_round([])
    assert not strategy.uploads.initial
    written(strategy, 0, SMALL)
    assert built == [SMALL]


def test_what_is_kept_of_an_upload_does_not_grow_with_the_model(recipfl):
    strategy = recipfl()
    strategy.absorb(reply(strategy, 0, LARGE, lambda value: value))
    strategy.finish_round([])
    [current] = strategy.uploads.current.values()
    assert current.digests.shape == (len(strategy.graphs[LARGE].tensors), 128)
    assert set(current.kept) == {"large.block1.norm.bias", "large.block2.norm.bias"}


def test_a_clipped_step_is_counted(recipfl, caplog, monkeypatch):
    strategy = recipfl()
    strategy.step.clip_norm = 1e-3
    strategy.absorb(reply(strategy, 0, SMALL, lambda value: value + 1.0))
    norms = []

    def step():
        gradients = [p.grad for p in strategy.step.parameters.values() if p.grad is not None]
        norms.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))

    monkeypatch.setattr(strategy.step.adam, "step", step)
    with caplog.at_level("WARNING", "flwr"):
        strategy.finish_round([])
    assert strategy.step.clipped_rounds == 1
    assert norms == pytest.approx([1e-3], rel=1e-3)
    assert "is clipped to 0.001 (1 rounds so far)" in caplog.text


@pytest.mark.parametrize("value", [1e6, 1e30])
def test_weights_that_explode_are_refused_and_change_nothing(recipfl, value):
    strategy = recipfl()
    exploded = reply(strategy, 0, SMALL, lambda tensor: torch.full_like(tensor, value))
    with pytest.raises(MessageError, match="device 0: its weights went too far from what it was sent"):
        strategy.absorb(exploded)
    assert not strategy.step.gradient
    assert not strategy.uploads.fresh
    assert MAX_GRADIENT * 2**30 * 2**13 == 2**53


def test_an_operator_never_seen_is_kept_from_the_devices_upload(recipfl):
    strategy = recipfl()
    del strategy.hypernetwork.decoders["linear weight"]
    sent = written(strategy, 0, SMALL)["small.head.fc1.weight"]
    assert torch.equal(sent, written(strategy, 0, SMALL)["small.head.fc1.weight"])
    strategy.absorb(reply(strategy, 0, SMALL, lambda value: value + 0.5))
    strategy.finish_round([])
    assert torch.equal(written(strategy, 0, SMALL)["small.head.fc1.weight"], sent + 0.5)


def test_what_is_not_generated_is_logged(recipfl, caplog):
    with caplog.at_level("INFO", "flwr"):
        recipfl().start()
    assert "Not generated, but kept from each device's last upload: large.block1.norm.bias, " in caplog.text


# What is frozen

ENCODER = make_family(encoder(adapter=2, depth=2, depths=[1, 2], pad_id=0, freeze=["embeddings", "encoder"]))
DEEP, SHALLOW = ENCODER.candidates(())


def over_encoder(folder, **changes):
    made = replace(setup(folder, ENCODER, task={"devices": 3}), **changes)
    return RecipFL(made, RecipFLParams(hidden=8, decoder_hidden=8))


def test_what_is_frozen_is_neither_generated_nor_sent(tmp_path):
    strategy = over_encoder(tmp_path)
    assert set(strategy.hypernetwork.decoders) == {
        *("linear weight", "linear bias", "classifier weight", "classifier bias"),
    }
    for architecture in (DEEP, SHALLOW):
        sent = strategy.generate([(0, architecture)])[0, architecture]
        assert list(sent) == [
            name for name in ENCODER.tensors(architecture) if ".adapter." in name or "out_proj" in name
        ]
        for name, value in sent.items():
            assert value.shape == ENCODER.tensors(architecture)[name].shape
            assert value.abs().max() > 0
    assert set(strategy.frozen_weights()) == {n for n, s in ENCODER.tensors(DEEP).items() if s.frozen}
    assert strategy.state().tensors.keys().isdisjoint(strategy.frozen_weights())


def test_the_larger_and_the_smaller_encoder_share_decoders(tmp_path):
    """What a strong device learns moves what a weak one is sent."""
    strategy = over_encoder(tmp_path)
    before = strategy.generate([(1, SHALLOW)])[1, SHALLOW]
    weights = {name: value + 0.1 for name, value in strategy.generate([(0, DEEP)])[0, DEEP].items()}
    local = strategy.client_step(Order(0, DEEP))
    tensor_sets = local.sent(ENCODER, DEEP), local.returned(ENCODER, DEEP)
    mine = Group(DEEP, strategy.selection(0, DEEP), *tensor_sets, ENCODER.place(DEEP))
    strategy.absorb(Contribution(mine, [0], [0], 4, {}, {"weights": weights}))
    strategy.finish_round([])
    after = strategy.generate([(1, SHALLOW)])[1, SHALLOW]
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_given_weights_are_what_is_frozen(tmp_path):
    given = {"embeddings.LayerNorm.weight": torch.full((16,), 2.0), "classifier.out_proj.bias": torch.full((3,), 3.0)}
    strategy = over_encoder(tmp_path, initial=given)
    assert strategy.frozen_weights()["embeddings.LayerNorm.weight"].eq(2).all()
    # What is generated has no first weights, but the hypernetwork reads them as the device's current ones.
    place = [node.tensor for node in strategy.graphs[DEEP].tensors].index("classifier.out_proj.bias")
    assert strategy.uploads.of((0, DEEP)).digests[place, :3].eq(3).all()
    with pytest.raises(
        ValueError, match="recipfl writes all weights itself, and takes of given ones only what `freeze`"
    ):
        over_encoder(tmp_path, family=replace(ENCODER, freeze=()), initial=given)


def test_a_hypernetwork_that_no_memory_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=50_000))
    words = (
        r"recipfl\.tile = 0: the hypernetwork would have [\d,]+ parameters, [\d,]+ of them to make the tensor "
        r"'linear weight', and take 0 GB of this machine's 0: freeze what need not be trained, or take smaller tiles"
    )
    with pytest.raises(ValueError, match=words):
        over_encoder(tmp_path)


# Whole rounds with real devices: 0 and 1 are strong.


FLEET = """
[[group]]
name = "strong"
count = 2
training_memory = "1 GB"
link = "1 Gbit/s"

[[group]]
name = "weak"
count = 4
training_memory = "1 GB"
link = "0.4 Mbit/s"
"""


def control(kind):
    """Keys of a control, which is a plug-in of the benchmark."""
    keys = {name.replace("recipfl.", "recipfl-controls."): value for name, value in METHODS["recipfl"].items()}
    return keys | {"strategy": f"benchmarks.recipfl.recipfl_controls:{kind}"}


def of_transfer(transfer):
    return control(transfer) if transfer == "LargeOnly" else {"recipfl.transfer": transfer}


def config(folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "strong.toml").write_text(FLEET)
    fleet = {"fleet": str(folder / "strong.toml"), "budget.transfer-seconds": 1.0, "evaluate-every": 2}
    keys = {} if "strategy" in changes else METHODS["recipfl"]
    return small_config(folder, **keys | fleet | changes)


def run(folder, rounds=2, **changes):
    engine, scorer = started(config(folder, **changes))
    grid = simulated_grid()
    return engine, [engine.run_round(grid, n, scorer) for n in range(1, rounds + 1)], grid


def orders(grid):
    """What devices were asked to train."""
    found = []
    for message in grid.sent:
        if message.metadata.message_type == "train":
            found += json.loads(message.content["wildflower"]["json"])["orders"]
    return [order for order in found if order["client_step"] != ClassCounts().reference().model_dump()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("transfer", "taught"), [("teacher", [False, True]), ("both", [False, False]), ("LargeOnly", [False])]
)
def test_what_strong_and_weak_devices_train(transfer, taught, tmp_path):
    engine, results, grid = run(tmp_path, 1, **of_transfer(transfer), **{"devices-per-round": 6})
    by_device = {}
    for order in sorted(orders(grid), key=lambda order: order["order"]):
        by_device.setdefault(order["device"], []).append(order)
    for device, mine in by_device.items():
        found = [client_step_of(StepReference.model_validate(order["client_step"])) for order in mine]
        assert all(isinstance(one, TaughtTraining) for one in found)
        assert [one.taught for one in found] == (taught if device < 2 else taught[:1])
        teachers = [order["after"] for order in mine]
        expected = [None, mine[0]["order"]] if transfer == "teacher" and device < 2 else [None] * len(mine)
        assert teachers == expected
    assert {line["outcome"] for line in results[0].devices} == {"trained"}
    # Both models of a strong device reached the hypernetwork's state.
    assert len(engine.method.uploads.current) == (6 if transfer == "LargeOnly" else 8)


@pytest.mark.thorough
def test_a_resumed_run_has_the_same_bits(tmp_path):
    """The strong devices are in every round, and scored after each."""
    changes = {"recipfl.hidden": 32, "devices-per-round": 6, "evaluate-every": 1, "recipfl.tile": 0}
    whole, results, _ = run(tmp_path / "whole", 3, **changes)
    first, _, grid = run(tmp_path / "half", 2, **changes)
    second, scorer = started(config(tmp_path / "half", **changes))
    state = first.state()
    state.values = json.loads(json.dumps(state.values))
    second.load(state)
    second.population.now_seconds = first.population.now_seconds
    resumed = second.run_round(grid, 3, scorer)
    assert same_bits(whole.state().tensors, second.state().tensors)
    assert whole.state().values == second.state().values
    assert results[2].record["loss"] == resumed.record["loss"]


def test_nothing_generated_is_left_for_the_next_round(tmp_path):
    """A strong device is evaluated with its large model; its small one must not wait for the next round."""
    engine, scorer = started(config(tmp_path, **{"devices-per-round": 6, "evaluate-every": 1}))
    engine.run_round(simulated_grid(), 1, scorer)
    assert {a.device for a in engine.assignments if a.earlier is not None} == {0, 1}
    assert not engine.method.generated


def test_what_a_round_did_not_send_is_not_sent_in_the_next(tmp_path):
    engine, _ = started(config(tmp_path, **{"devices-per-round": 6}))
    grid, strategy = simulated_grid(), engine.method
    engine.begin(grid, 1)
    a = engine.assignments[0]
    strategy.payload(Group(a.task.architecture, a.task.selection, {}, {}, None))
    assert strategy.generated  # for the others of the round, whose messages never leave
    engine.begin(grid, 2)
    assert not strategy.generated


def test_only_an_order_with_a_teacher_is_taught(tmp_path):
    """Also where, after its round, a strong device's budget falls and it is scored with its small model."""
    engine, scorer = started(config(tmp_path, **{"devices-per-round": 6, "test-fraction": 0.5}))
    grid, strategy = simulated_grid(), engine.method
    engine.run_round(grid, 1, scorer)
    assert any(a.device == 0 and a.earlier is not None for a in engine.assignments)
    order = Order(0, strategy.candidates[-1])
    asked = engine.asking.ask_whatever_fits(order, strategy.selection(0, order.architecture))
    assert not asked.task.client_step.taught
    assert engine.evaluation._scores(grid, [asked], "shard", strategy.settings.personal_training_in(1)).keys() == {0}


def test_the_clock_counts_what_the_teacher_computes(tmp_path):
    seconds = {}
    for transfer in ("teacher", "both"):
        engine, _ = started(config(tmp_path, **of_transfer(transfer), **{"devices-per-round": 6}))
        engine.begin(simulated_grid(), 1)
        [large, small] = [a for a in engine.assignments if a.device == 0]
        taught = large.task.cost.training_flops / 3 if transfer == "teacher" else 0.0
        assert small.flops_per_example == small.task.cost.training_flops + taught
        assert large.flops_per_example == large.task.cost.training_flops
        seconds[transfer] = small.timing.total_seconds
    assert seconds["teacher"] > seconds["both"]


def test_personal_training_begins_with_statistics_of_this_round_or_new_ones(tmp_path, monkeypatch):
    begun, fit = [], DeviceContext.fit
    monkeypatch.setattr(
        DeviceContext, "fit", lambda *a, **more: begun.append(more["new_statistics"]) or fit(*a, **more)
    )
    changes = {"devices-per-round": 2, "personal.every": 2, "personal.first-round": 2, "test-fraction": 0.5}
    engine, scorer = started(config(tmp_path, **changes))
    sampled = []
    for number in (1, 2):
        begun.clear()
        engine.run_round(simulated_grid(2), number, scorer)
        sampled.append({a.device for a in engine.assignments if a.outcome == "trained"})
    assert len(sampled[0] - sampled[1]) == 1  # trained before, but not in the round that is scored
    scored = begun[len(engine.assignments) :]
    assert (scored.count(False), scored.count(True)) == (2, 4)


def test_a_checkpoint_of_another_hypernetwork_is_refused(recipfl):
    state = recipfl().state()
    with pytest.raises(ValueError, match="the checkpoint's hypernetwork is another"):
        recipfl(hidden=16).load(state)


def test_devices_say_their_classes_and_get_weights_for_them(tmp_path):
    strategy = run(tmp_path, 1, **{"devices-per-round": 6})[0].method
    assert set(strategy.class_counts) == set(range(6))
    assert {sum(counts) for counts in strategy.class_counts.values()} == {24}
    owner = (3, strategy.candidates[-1])
    before = strategy.generate([owner])[owner]
    strategy.class_counts[3] = [0] * 9 + [5]
    after = strategy.generate([owner])[owner]
    name = next(name for name in before if name.endswith("classifier.weight"))
    assert not torch.equal(before[name], after[name])


def of_other_shapes(reply, arrays):
    arrays[0] = bytes(20)


def cut_short(reply, arrays):
    arrays[0] = arrays[0][:-4]


def filled_with(value):
    def change(reply, arrays):
        arrays[0] = torch.full((len(arrays[0]) // 4,), value).numpy().tobytes()

    return change


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_other_shapes, "packed weights have 20 bytes"),
        (cut_short, "packed weights have"),
        (filled_with(math.nan), "holds values that are not finite"),
        (filled_with(math.inf), "holds values that are not finite"),
        (filled_with(1e30), "its weights went too far from what it was sent"),
    ],
)
def test_bad_weights_of_a_device_are_refused_and_teach_nothing(change, words, tmp_path):
    """In a whole round: of other shapes than sent, not finite, exploded. The other devices count."""
    engine, scorer = started(config(tmp_path, **control("LargeOnly"), **{"devices-per-round": 6}))
    grid, strategy = simulated_grid(2), engine.method
    tampered = []

    def tamper(message):
        brings_weights = "weights" in message.content
        if message.metadata.message_type != "train" or message.metadata.src_node_id != 1 or not brings_weights:
            return message
        tampered.append(1)
        return changed_reply(change)(message)

    grid.tamper = tamper
    result = engine.run_round(grid, 1, scorer)
    refused = [line for line in result.devices if line["outcome"] != "trained"]
    assert tampered
    assert len(refused) >= 1
    assert all(line["outcome"].startswith("refused: ") and words in line["outcome"] for line in refused)
    assert {owner[0] for owner in strategy.uploads.current} == {
        a.device for a in engine.assignments if a.outcome == "trained"
    }
    assert len(strategy.uploads.current) == 6 - len(refused)
    assert all(bool(torch.isfinite(value).all()) for value in strategy.step.parameters.values())


@pytest.mark.parametrize("when", ["registration", "FirstUpload"])
@pytest.mark.parametrize("counts", [[0] * 10, [24] * 9, [-1] + [3] * 9, [1.5] * 10, [2**31] * 10, None])
def test_classes_that_cannot_be_are_refused_and_change_nothing(counts, when, tmp_path):
    def tampered(reply, arrays):
        for update in reply["updates"]:
            update["facts"]["class_counts"] = counts

    engine, scorer = started(config(tmp_path, **({} if when == "registration" else control(when))))
    before = {n: v.clone() for n, v in engine.state().tensors.items()}
    grid = simulated_grid()
    grid.tamper = changed_reply(tampered)
    result = engine.run_round(grid, 1, scorer)
    assert len({line["device"] for line in result.devices}) == 4
    assert all(line["outcome"].startswith("refused: ") for line in result.devices)
    assert all("class_counts" in line["outcome"] for line in result.devices)
    assert not engine.method.class_counts
    assert same_bits(before, engine.state().tensors)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["registration", "FirstUpload"])
def test_what_a_device_says_of_its_classes_once_holds(when, tmp_path):
    """What later uploads say counts where the counts are those of uploads."""

    def tampered(reply, arrays):
        for update in reply["updates"]:
            update["facts"]["class_counts"] = [1] * 10

    engine, scorer = started(
        config(tmp_path, **({} if when == "registration" else control(when)), **{"devices-per-round": 6})
    )
    grid = simulated_grid()
    engine.run_round(grid, 1, scorer)
    first = dict(engine.method.class_counts)
    assert set(first) == set(range(6))
    grid.tamper = changed_reply(tampered)
    engine.run_round(grid, 2, scorer)
    assert engine.method.class_counts == (first if when == "registration" else dict.fromkeys(range(6), [1] * 10))


def test_before_a_device_has_said_its_classes_they_count_as_equal(recipfl):
    strategy = recipfl()
    request = strategy._request((1, SMALL))
    assert request.distribution.tolist() == pytest.approx([1 / 3] * 3)
    assert math.isclose(float(request.distribution.sum()), 1.0, rel_tol=1e-6)


# The client step, by hand


class Reader(nn.Module):
    """What its classifier reads is the same for every example; its logits are that, three times over."""

    def __init__(self, *reads, times=1.0):
        super().__init__()
        self.reads = nn.Parameter(torch.tensor(reads))
        self.classifier = nn.Linear(len(reads), 3, bias=False)
        self.classifier.weight = nn.Parameter(times * torch.eye(3, len(reads)), requires_grad=False)

    def forward(self, inputs):
        return self.classifier(self.reads.expand(len(inputs), -1))


def taught(student, teacher, **ablated):
    local = TaughtTraining(taught=True)
    if ablated:
        local = AblatedTraining(taught=True, **{"divergence": "student || teacher", "feature_weight": 1.0} | ablated)
    return loss_of(local, student, earlier=teacher)(torch.zeros(2, 1), torch.tensor([0, 0]))


def test_what_a_taught_model_minimizes_by_hand():
    """Student: read and logits (ln 2, 0, 0), p = (1/2, 1/4, 1/4). Teacher: reads (0, 0, 0), uniform, in both."""
    student, teacher = Reader(math.log(2), 0.0, 0.0), Reader(0.0, 0.0, 0.0)
    own, soft = math.log(2), (math.log(2) + 2 * math.log(4)) / 3
    printed = math.log(3 / 2) / 2 + math.log(3 / 4) / 2  # sum of p log(p / (1/3))
    other = (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3  # sum of (1/3) log((1/3) / p)
    assert float(taught(student, teacher).detach()) == pytest.approx(own + soft + printed, rel=1e-5)
    for weight in (0.0, 0.1):
        value = taught(student, teacher, feature_weight=weight)
        assert float(value.detach()) == pytest.approx(own + soft + weight * printed, rel=1e-5)
    value = taught(student, teacher, divergence="teacher || student")
    assert float(value.detach()) == pytest.approx(own + soft + other, rel=1e-5)
    value.backward()
    assert student.reads.grad.abs().sum() > 0
    assert teacher.reads.grad is None


def test_what_classifiers_read_is_compared_only_where_it_has_the_same_size():
    student, teacher = Reader(math.log(2), 0.0, 0.0), Reader(0.0, 0.0, 0.0, 0.0)
    expected = math.log(2) + (math.log(2) + 2 * math.log(4)) / 3
    for divergence in ("student || teacher", "teacher || student"):
        assert float(taught(student, teacher, divergence=divergence).detach()) == pytest.approx(expected, rel=1e-5)


class WithoutLinear(Reader):
    def __init__(self, *reads):
        super().__init__(*reads)
        self.classifier = nn.Identity()


def test_networks_without_a_linear_layer_compare_what_they_say_alone():
    student, teacher = WithoutLinear(math.log(2), 0.0, 0.0), Reader(0.0, 0.0, 0.0)
    expected = math.log(2) + (math.log(2) + 2 * math.log(4)) / 3
    assert float(taught(student, teacher).detach()) == pytest.approx(expected, rel=1e-5)


def test_a_graph_compares_what_its_classifier_reads_as_the_module_does():
    family = make_family({"name": "own_traced:Dense", "keep": [], "input_shape": [1, 8, 8], "classes": 7})
    inputs, labels = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3])
    modules = [own_traced.Dense(7).eval() for _ in range(2)]
    graphs = [with_weights(family, family.full(), dict(module.state_dict())).eval() for module in modules]
    assert not any(isinstance(part, nn.Linear) for part in graphs[0].modules())

    def loss(student, teacher, **ablated):
        local = AblatedTraining(taught=True, divergence="student || teacher", **ablated)
        return float(loss_of(local, student, earlier=teacher)(inputs, labels).detach())

    as_printed, without = loss(*modules, feature_weight=1.0), loss(*modules, feature_weight=0.0)
    assert as_printed > without + 1e-3
    assert loss(*graphs, feature_weight=1.0) == pytest.approx(as_printed, rel=1e-6)


def test_a_taught_model_needs_a_teacher():
    with pytest.raises(MessageError, match="needs a teacher, and the work order names none"):
        taught(Reader(0.0, 0.0, 0.0), None)


def test_who_is_not_taught_minimizes_the_tasks_loss():
    local = TaughtTraining(taught=False)
    value = loss_of(local, Reader(math.log(2), 0.0, 0.0))(torch.zeros(2, 1), torch.tensor([0, 0]))
    assert float(value.detach()) == pytest.approx(math.log(2))


# What is scored


def test_the_devices_of_the_round_score_what_they_would_be_sent(recipfl):
    strategy = recipfl()
    assert strategy.scored_on_devices() == []
    orders = [Order(2, LARGE), Order(2, SMALL, 1, after=0), Order(0, SMALL)]
    strategy.finish_round([Trained(order, "a tier", 4, 1.0, {}) for order in sorted(orders, key=lambda o: o.device)])
    assert strategy.scored_on_devices() == [
        (0, SMALL, strategy.selection(0, SMALL)),
        (2, LARGE, strategy.selection(2, LARGE)),
    ]
    assert strategy.models([LARGE, SMALL]) == {}


def test_devices_are_asked_for_their_classes_before_they_train_or_never(recipfl):
    assert recipfl().first_question == ClassCounts()
    assert recipfl(FirstUpload).first_question is None
