import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.client_app.work_orders import context_of, cut, do, work_order
from tests.encoders import encoder
from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.by_hand import Devices, TwoExits, engine_of, filled, loss_of, no_scores, setup, task_with
from wildflower.client_app.kept_state import DeviceState
from wildflower.devices.budget import Budget
from wildflower.messages.orders import LocalTraining
from wildflower.models.cnn import Cnn3
from wildflower.models.family import make_family
from wildflower.models.network import MeanOfExits
from wildflower.models.vgg import Vgg
from wildflower.strategies.depthfl import DepthFL, DepthFLParams, MutualLearningOfExits, ramp
from wildflower.strategies.method import Model, Order, client_step_of
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.losses import token_cross_entropy
from wildflower.tasks.task import TaskSpec, load_task

VGG = Vgg(input_shape=(1, 8, 8), classes=3, block_channels=(2, 3, 4), exits=(0, 1, 2))


def after_a_round(folder, params=DepthFLParams(alpha=0.0), silent=(), family=VGG):
    """Devices 0, 1 and 2 have exits 3, 2 and 1 and answer 1, 4 and 10; they hold 1, 2 and 3 examples."""
    strategy = DepthFL(setup(folder, family), params)
    strategy.weights = filled(strategy.weights, -7.0)
    strategy.assign = lambda device, budget: None if device in silent else strategy.candidates[device]
    values = {0: 1.0, 1: 4.0, 2: 10.0}
    devices = Devices(family, lambda order, w: filled(w, values[order.device]), examples={0: 1, 1: 2, 2: 3})
    engine_of(strategy, folder).run_round(devices.grid, 1, no_scores)
    return {name: value.unique().tolist() for name, value in strategy.weights.items()}, devices


def test_every_layer_is_the_mean_over_the_devices_that_have_it_whatever_they_hold(tmp_path):
    # (1 + 4 + 10) / 3 = 5; (1 + 4) / 2 = 2.5; 1. By examples they would be 6.5, 3 and 1.
    weights, devices = after_a_round(tmp_path)
    assert weights["block0.conv1.weight"] == weights["exit0.classifier.weight"] == [5.0]
    assert weights["block0.norm1.running_var"] == [5.0]
    assert weights["block1.conv2.weight"] == weights["exit1.classifier.bias"] == [2.5]
    assert weights["block2.conv1.weight"] == weights["head.classifier.weight"] == [1.0]
    assert {device: max(w) for device, w in devices.received.items()} == {
        0: "head.classifier.weight",
        1: "exit1.classifier.weight",
        2: "exit0.classifier.weight",
    }


@pytest.mark.thorough
def test_layers_of_an_encoder_are_averaged_with_the_heads_behind_them(tmp_path):
    weights, devices = after_a_round(tmp_path, family=make_family(encoder(early_exits=True)))
    assert weights["embeddings.word_embeddings.weight"] == weights["encoder.layer.0.output.dense.weight"] == [5.0]
    assert weights["exit1.weight"] == [5.0]
    assert weights["encoder.layer.1.attention.self.key.bias"] == weights["exit2.bias"] == [2.5]
    assert weights["encoder.layer.2.output.dense.weight"] == weights["classifier.out_proj.weight"] == [1.0]
    heads = {device: {name.partition(".")[0] for name in w} for device, w in devices.received.items()}
    assert heads[2] == {"embeddings", "encoder", "exit1"}
    assert heads[0] - heads[2] == {"exit2", "classifier"}


def test_what_nobody_has_keeps_its_value(tmp_path):
    weights, _ = after_a_round(tmp_path, silent=[0])
    assert weights["block0.conv1.weight"] == [7.0]
    assert weights["block1.conv1.weight"] == [4.0]
    assert weights["block2.conv1.weight"] == weights["head.classifier.bias"] == [-7.0]


def feddyn(folder, **changes):
    strategy = DepthFL(setup(folder, VGG, task={"devices": 4}, **changes), DepthFLParams(alpha=0.5))
    strategy.assign = lambda device, budget: strategy.candidates[device]
    strategy.weights = filled(strategy.weights, 2.0)
    return strategy


def test_feddyn_by_hand(tmp_path):
    """Of 4 devices 3 answer, 1, 4 and 10, all from 2; alpha is 0.5.

    Block 0: mean 5, h = -0.5 x 3/4 x (5 - 2) = -1.125, w = 5 + 2.25. Block 1: mean 2.5, h = -0.5 x 2/4 x 0.5 = -0.125,
    w = 2.75. Block 2: mean 1, h = -0.5 x 1/4 x -1 = 0.125, w = 0.75.
    """
    strategy = feddyn(tmp_path)
    values = {0: 1.0, 1: 4.0, 2: 10.0}
    devices = Devices(VGG, lambda order, w: filled(w, values[order.device]))
    engine = engine_of(strategy, tmp_path)
    engine.run_round(devices.grid, 1, no_scores)
    assert {order.client_step.settings["alpha"] for order in devices.orders.values()} == {0.5}
    expected = {"block0.conv1.weight": 7.25, "block1.norm1.bias": 2.75, "head.classifier.weight": 0.75}
    for name, value in expected.items():
        assert strategy.weights[name].unique().tolist() == [pytest.approx(value)]
    assert strategy.weights["block0.norm1.running_var"].unique().tolist() == [5.0]
    # The second round, in which the first device is silent: block 2 and its h stay; h of block 0 goes on from -1.125.
    strategy.assign = lambda device, budget: strategy.candidates[device] if device else None
    engine.run_round(devices.grid, 2, no_scores)
    # Mean 7, h = -1.125 - 0.5 x 2/4 x (7 - 7.25) = -1.0625, w = 7 + 2.125.
    assert strategy.weights["block0.conv1.weight"].unique().tolist() == [pytest.approx(9.125)]
    assert strategy.weights["head.classifier.weight"].unique().tolist() == [pytest.approx(0.75)]


def test_h_comes_back_after_a_restart(tmp_path):
    first = feddyn(tmp_path)
    devices = Devices(VGG, lambda order, w: filled(w, 1.0))
    engine_of(first, tmp_path).run_round(devices.grid, 1, no_scores)
    second = feddyn(tmp_path)
    second.load(first.state())
    for strategy in (first, second):
        engine_of(strategy, tmp_path).run_round(devices.grid, 2, no_scores)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert any(h.any() for h in first.h.values())
    plain = DepthFL(setup(tmp_path, VGG), DepthFLParams(alpha=0.0))
    assert not [name for name in plain.state().tensors if name.startswith("h/")]
    with pytest.raises(ValueError, match=r"the checkpoint holds no h of .*: its run had other settings"):
        second.load(plain.state())


def test_a_device_pays_for_what_feddyn_keeps(tmp_path):
    """12 bytes per parameter."""
    plain, corrected = (DepthFL(setup(tmp_path, VGG), DepthFLParams(alpha=a)).cost(VGG.full()) for a in (0.0, 0.1))
    more = corrected.peak_training_memory_bytes - plain.peak_training_memory_bytes
    assert more == 12 * plain.parameters
    assert corrected.payload_bytes == plain.payload_bytes


def test_the_weight_of_mutual_learning_grows_to_1():
    # exp(-5 (1 - 1/2)^2) = exp(-1.25)
    assert ramp(150, 300) == pytest.approx(math.exp(-1.25))
    assert ramp(1, 300) == pytest.approx(math.exp(-5 * (299 / 300) ** 2))
    assert ramp(300, 300) == ramp(301, 300) == ramp(10**6, 300) == ramp(1, 0) == 1.0


def test_all_devices_of_a_round_learn_with_its_weight(tmp_path):
    _, devices = after_a_round(tmp_path, DepthFLParams(ramp_rounds=2, alpha=0.0))
    halves = [client_step_of(order.client_step) for order in devices.orders.values()]
    assert {type(local) for local in halves} == {MutualLearningOfExits}
    assert [local.weight for local in halves] == [pytest.approx(math.exp(-1.25))] * 3
    assert {local.weighting for local in halves} == {"uniform"}


def test_a_device_gets_the_deepest_exit_that_fits(tmp_path):
    strategy = DepthFL(setup(tmp_path, VGG), DepthFLParams())
    for exit in (3, 2, 1):
        price = strategy.cost(VGG.up_to(exit))
        exact = Budget(price.peak_training_memory_bytes, price.payload_bytes, price.payload_bytes)
        assert strategy.assign(0, exact) == VGG.up_to(exit)
    below = Budget(strategy.cost(VGG.up_to(1)).peak_training_memory_bytes - 1)
    assert strategy.assign(0, below) is None


def test_a_family_of_one_exit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="depthfl needs a family with several exits, vgg has one: set family-argum"):
        DepthFL(setup(tmp_path, Vgg(input_shape=(1, 8, 8), block_channels=(2, 3))), DepthFLParams())


# The client step


def learning(weight=1.0, alpha=0.0, ensemble=True):
    return MutualLearningOfExits(weight=weight, alpha=alpha, ensemble=ensemble)


def test_in_mutual_learning_every_exit_learns_what_the_other_says():
    # p = (2, 1, 1) / 4 and q = (8, 1, 1) / 10, as above. The first exit learns KL(q || p) = .8 ln(8/5) + .2 ln(2/5),
    # the second KL(p || q) = .5 ln(5/8) + .5 ln(5/2), each from a constant.
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0])
    value = loss_of(learning(0.5), model)(torch.zeros(2, 1), torch.tensor([0, 1]))
    own = (math.log(2) + math.log(4)) / 2 + (math.log(10 / 8) + math.log(10)) / 2
    first = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    second = 0.5 * math.log(5 / 8) + 0.5 * math.log(5 / 2)
    assert float(value.detach()) == pytest.approx(own + 0.5 * (first + second))
    # Gradients: the mean of p - onehot, and 0.5 (p - q); of the other exit with p and q the other way round.
    value.backward()
    assert model.shallow.grad.tolist() == pytest.approx([0.0 - 0.15, -0.25 + 0.075, 0.25 + 0.075])
    assert model.deep.grad.tolist() == pytest.approx([0.3 + 0.15, -0.4 - 0.075, 0.1 - 0.075])


def test_mutual_learning_of_tokens_is_the_mean_over_those_that_have_a_label():
    """A token's own loss and divergences are those of the example above; what padding says plays no part."""
    shallow, deep = [[math.log(2), 9.0], [0.0, 0.0], [0.0, 5.0]], [[math.log(8), 0.0], [0.0, 3.0], [0.0, 1.0]]
    tokens = task_with(token_cross_entropy, "classes of tokens", sums_examples=False)
    first = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    second = 0.5 * math.log(5 / 8) + 0.5 * math.log(5 / 2)
    model = TwoExits(shallow, deep)
    loss = loss_of(learning(0.5), model, task=tokens)
    value = loss(torch.zeros(2, 1), torch.tensor([[0, NO_LABEL], [0, NO_LABEL]]))
    assert float(value.detach()) == pytest.approx(math.log(2) + math.log(10 / 8) + 0.5 * (first + second))
    value.backward()
    assert not model.shallow.grad[:, 1].any()
    assert not model.deep.grad[:, 1].any()
    # An example without a labeled token counts with 0.
    both = loss(torch.zeros(2, 1), torch.tensor([[0, NO_LABEL], [NO_LABEL, NO_LABEL]]))
    assert float(both.detach()) == pytest.approx(float(value.detach()) / 2)


def test_in_mutual_learning_a_loss_of_the_tasks_own_is_minimized():
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0])
    smoothed = partial(F.cross_entropy, label_smoothing=0.3)
    loss = loss_of(learning(0.0), model, task=task_with(smoothed, sums_examples=False))
    own = -0.8 * math.log(2 / 4) - 0.2 * math.log(1 / 4) - 0.8 * math.log(8 / 10) - 0.2 * math.log(1 / 10)
    assert float(loss(torch.zeros(1, 1), torch.tensor([0])).detach()) == pytest.approx(own)


def test_in_mutual_learning_an_exit_learns_the_mean_over_the_others():
    # The first exit says p = (2, 1, 1) / 4, the two others q = (8, 1, 1) / 10 both: KL(q || p) once for the first, and
    # for each of the others half of KL(p || q) and half of nothing.
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0], between=[[math.log(8), 0.0, 0.0]])
    value = loss_of(learning(1.0), model)(torch.zeros(1, 1), torch.tensor([0]))
    first = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    second = 0.5 * math.log(5 / 8) + 0.5 * math.log(5 / 2)
    own = math.log(2) + 2 * math.log(10 / 8)
    assert float(value.detach()) == pytest.approx(own + first + 2 * second / 2)


FAMILY = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
ALPHA = 0.5


def trained(state, exit, round_number, **changes):
    """What device 0 makes of the first weights of an exit, and its context."""
    order = work_order(local=learning(alpha=ALPHA), family=FAMILY, of=FAMILY.up_to(exit), seed=3)
    how = LocalTraining(steps=2, batch_size=10, learning_rate=0.1)
    done = do(order, how, family=FAMILY, state=state, round_number=round_number, **changes)
    return done.answer.tensor_sets["weights"]


def test_a_device_keeps_its_correction_from_round_to_round(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    received = cut(FAMILY, FAMILY.full())
    first = trained(state, 3, 1)
    parameters = {name for name, _ in FAMILY.build(FAMILY.full()).named_parameters()}
    kept = state.load("correction", 2)
    assert set(kept) == parameters  # no running statistics
    for name in parameters:
        torch.testing.assert_close(kept[name], -ALPHA * (first[name] - received[name]))
    # Personal evaluation trains, and keeps nothing.
    trained(state, 3, 2, evaluated_round=1)
    assert state.load("correction", 3).keys() == kept.keys()
    assert all(torch.equal(state.load("correction", 3)[name], kept[name]) for name in kept)
    # With the correction the second training ends elsewhere; it adds to what it kept of the layers that it has.
    second = trained(state, 1, 2)
    assert not torch.equal(second["block1.conv.weight"], first["block1.conv.weight"])
    now = state.load("correction", 3)
    moved = second["block1.conv.weight"] - received["block1.conv.weight"]
    torch.testing.assert_close(now["block1.conv.weight"], kept["block1.conv.weight"] - ALPHA * moved)
    assert torch.equal(now["block3.conv.weight"], kept["block3.conv.weight"])


def test_without_alpha_a_device_keeps_nothing(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    order = work_order(local=learning(), family=FAMILY, of=FAMILY.full())
    assert not do(order, family=FAMILY, state=state).state_kept
    assert state.is_empty(99)


def test_a_correction_moves_every_step_of_a_device(tmp_path):
    """One step of plain SGD with rate 0.1 ends 0.1 c further than without c; its loss is reported without either."""
    ends, losses = [], []
    for value in (0.0, 0.5):
        state = DeviceState(str(tmp_path / str(value)), "a run", 0)
        state.save("correction", 1, {n: torch.full_like(v, value) for n, v in cut(FAMILY, FAMILY.full()).items()})
        order = work_order(local=learning(alpha=ALPHA), family=FAMILY, of=FAMILY.full(), seed=3)
        how = LocalTraining(steps=1, batch_size=10, learning_rate=0.1)
        done = do(order, how, family=FAMILY, state=state, round_number=2)
        ends.append(done.answer.tensor_sets["weights"])
        losses.append(done.answer.loss)
    for name, _ in FAMILY.build(FAMILY.full()).named_parameters():
        torch.testing.assert_close(
            ends[1][name] - ends[0][name], torch.full_like(ends[0][name], 0.05), rtol=0, atol=1e-6
        )
    assert losses[0] == losses[1]


# What is scored


def test_the_mean_of_exits_is_that_of_their_logits():
    # Of (0, 4, 0), (2, 0, 0) and (2, 0, 1) it is (4, 4, 1) / 3.
    model = TwoExits([0.0, 4.0, 0.0], [2.0, 0.0, 1.0], between=([2.0, 0.0, 0.0],))
    said = MeanOfExits(model)(torch.zeros(2, 1))
    torch.testing.assert_close(said, torch.tensor([[4.0, 4.0, 1.0]] * 2) / 3)


@pytest.mark.parametrize(("scored", "ensemble"), [("ensemble", True), ("deepest", False)])
def test_on_devices_the_same_is_scored_as_on_the_server(scored, ensemble, tmp_path):
    strategy = DepthFL(setup(tmp_path, VGG), DepthFLParams(scored=scored))
    local = strategy.client_step(Order(0, VGG.up_to(2)))
    assert local.ensemble == ensemble
    model = TwoExits([0.0, 4.0, 0.0], [2.0, 0.0, 0.0])
    module = local.scored(context_of(work_order()), model)
    assert module is model if scored == "deepest" else module(torch.zeros(1, 1)).tolist() == [[1.0, 2.0, 0.0]]
    found = strategy.models([VGG.full(), VGG.up_to(1)])
    assert {model.exits for model in found.values()} == {"mean" if ensemble else "deepest"}


def with_exits_that_say(family, *logits):
    """Weights of a network with exits whose heads say the same of every input."""
    weights = cut(family, family.full())
    for (head, _), values in zip(family.segments.items(), logits, strict=True):
        weights[f"{head}.classifier.weight"] = torch.zeros_like(weights[f"{head}.classifier.weight"])
        weights[f"{head}.classifier.bias"] = torch.tensor(values)
    return weights


def test_the_server_scores_the_mean_of_exits_or_the_deepest(tmp_path):
    """Exits 1 to 3 say class 0, 0 and 2, and together class 3, which is the second choice of all of them."""
    config = small_config(tmp_path, strategy="depthfl", family="cnn3", **{"family-arguments": "exits = [1, 2, 3]"})
    engine, scorer = started(config)
    family, rest = engine.method.family, [0.0] * 6
    logits = [[3.0, 0.0, 0.0, 2.5, *rest], [3.0, 0.0, 0.0, 2.5, *rest], [0.0, 0.0, 3.0, 2.5, *rest]]
    weights = with_exits_that_say(family, *logits)
    labels = load_task(TaskSpec.from_json(engine.settings.task)).test.labels
    share = [float((labels == label).double().mean()) for label in range(10)]
    assert len({share[0], share[2], share[3]}) == 3
    mean = torch.tensor(logits).mean(dim=0).expand(len(labels), -1)
    for exits, label, said in (("mean", 3, mean), ("deepest", 2, torch.tensor(logits[2]).expand(len(labels), -1))):
        found = scorer(Model(family, family.full(), weights, exits=exits))
        assert found.score == pytest.approx(share[label])
        assert found.loss == pytest.approx(float(F.cross_entropy(said, labels)))
        assert found.by_exit == pytest.approx((share[0], share[0], share[2]))


@pytest.mark.parametrize("scored", ["ensemble", "deepest"])
def test_a_round_is_scored_as_the_method_says(scored, tmp_path):
    """Also the tiers: those of fewer exits are not the accuracy of their deepest where the mean of exits is scored."""
    changes = METHODS["depthfl"] | {"evaluate-every": 1, "devices-per-round": 6, "depthfl.scored": scored}
    engine, scorer = started(small_config(tmp_path, **changes))
    scores = []

    def noted(model):
        scores.append((model.architecture, model.exits, scorer(model)))
        return scores[-1][-1]

    record = engine.run_round(simulated_grid(), 1, noted).record
    family = engine.method.family
    by_architecture = {architecture: found for architecture, _, found in scores}
    assert {exits for _, exits, _ in scores} == {"mean" if scored == "ensemble" else "deepest"}
    assert record["score"] == by_architecture[family.full()].score
    assert record["score_by_exit"] == list(by_architecture[family.full()].by_exit)
    tiers = engine.asking.tier_architectures
    assert {family.exit_of(a) for a in tiers.values()} == {1, 2, 3}
    if scored == "ensemble":
        assert by_architecture.keys() == set(tiers.values())
        assert record["score_by_tier"] == {tier: by_architecture[a].score for tier, a in tiers.items()}
    else:
        assert record["score_by_tier"] == {
            tier: record["score_by_exit"][family.exit_of(a) - 1] for tier, a in tiers.items()
        }
