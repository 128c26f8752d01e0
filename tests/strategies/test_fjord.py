import math
import random

import pytest
import torch
import torch.nn.functional as F

from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.by_hand import (
    CLASSIFIER,
    CLASSIFIER_BIAS,
    FC,
    FC_BIAS,
    Devices,
    OneHidden,
    engine_of,
    filled,
    loss_of,
    no_scores,
    setup,
)
from wildflower.messages.error import MessageError
from wildflower.models.cnn import Cnn3
from wildflower.models.cost import cost
from wildflower.models.lenet import LeNet5
from wildflower.models.resnet import ResNet18
from wildflower.models.training_step import Step
from wildflower.strategies.fjord import FjORD, FjORDParams, OrderedDropout, training_cost
from wildflower.strategies.method import Order, client_step_of

WIDTHS = (1.0, 0.5, 0.25)


def after_a_round(folder, params=FjORDParams(), silent=()):
    """Devices 0, 1 and 2 of width 1, 1/2 and 1/4 answer 1, 3 and 8; they hold 1, 1 and 2 examples."""
    strategy = FjORD(setup(folder, OneHidden()), params)
    strategy.weights = filled(strategy.weights, -7.0)
    strategy.assign = lambda device, budget: None if device in silent else strategy.candidates[device]
    values = {0: 1.0, 1: 3.0, 2: 8.0}
    devices = Devices(OneHidden(), lambda order, w: filled(w, values[order.device]), examples={0: 1, 1: 1, 2: 2})
    engine_of(strategy, folder).run_round(devices.grid, 1, no_scores)
    return strategy, devices


@pytest.mark.parametrize("distillation", [False, True])
def test_a_device_draws_among_the_widths_up_to_its_own(distillation, tmp_path):
    _, devices = after_a_round(tmp_path, FjORDParams(distillation=distillation))
    halves = {device: client_step_of(order.client_step) for device, order in devices.orders.items()}
    assert {type(local) for local in halves.values()} == {OrderedDropout}
    assert {local.distillation for local in halves.values()} == {distillation}
    assert {local.weighting for local in halves.values()} == {"examples"}
    half, quarter = (OneHidden().width(width) for width in WIDTHS[1:])
    assert {device: local.lower for device, local in halves.items()} == {0: (half, quarter), 1: (quarter,), 2: ()}
    assert {device: len(w[FC]) for device, w in devices.received.items()} == {0: 4, 1: 2, 2: 1}


def test_every_coordinate_is_the_mean_over_its_owners_by_examples(tmp_path):
    # Channel 0: (1 + 3 + 2 * 8) / 4 = 5. Channel 1: (1 + 3) / 2 = 2. Channels 2 and 3: 1.
    strategy, _ = after_a_round(tmp_path)
    assert strategy.weights[FC].flatten().tolist() == [5, 2, 1, 1]
    assert strategy.weights[CLASSIFIER].tolist() == [[5, 2, 1, 1]] * 3
    assert strategy.weights[CLASSIFIER_BIAS].tolist() == [5, 5, 5]


def test_what_nobody_trained_keeps_its_value(tmp_path):
    strategy, _ = after_a_round(tmp_path, silent=[0])
    # Channel 0: (3 + 2 * 8) / 3.
    assert strategy.weights[FC].flatten().tolist() == [pytest.approx(19 / 3), 3, -7, -7]


def test_a_device_is_charged_for_the_dearest_of_its_steps():
    """One hidden layer, SGD without momentum, two examples. Entries: 23 in all of the whole, 8 of the quarter.

    The quarter's step holds its own peak, 2 * (23 - 8) entries more of weights and gradients, and twice the largest
    tensor, 12 entries: 54 entries. With distillation 8 more of gradients, and the target of 2 * 3.
    """
    family = OneHidden()
    whole, quarter = (cost(family, family.width(w), batch_size=2, optimizer="sgd") for w in (1.0, 0.25))
    assert (whole.parameters, quarter.parameters) == (23, 8)

    def charged(distillation):
        return training_cost(family, family.full(), (family.width(0.25),), distillation, 2, "sgd")

    peak = quarter.peak_training_memory_bytes
    assert charged(False).peak_training_memory_bytes == max(whole.peak_training_memory_bytes, peak + 4 * 54)
    assert charged(True).peak_training_memory_bytes == max(whole.peak_training_memory_bytes, peak + 4 * 68)
    assert peak + 4 * 54 > whole.peak_training_memory_bytes  # it is the gradients that make the difference here
    # Half of the batches are the quarter's; with distillation all are the whole one's, and half of them both.
    assert charged(False).training_flops == (whole.training_flops + quarter.training_flops) // 2
    assert charged(True).training_flops == whole.training_flops + quarter.training_flops // 2
    assert charged(True).payload_bytes == whole.payload_bytes


def test_one_width_alone_costs_what_it_costs_without_ordered_dropout():
    family = OneHidden()
    for distillation in (False, True):
        charged = training_cost(family, family.width(0.25), (), distillation, 2, "sgd-momentum")
        assert charged == cost(family, family.width(0.25), batch_size=2, optimizer="sgd-momentum")


def test_the_compiled_convolutions_of_all_widths_are_charged():
    family = ResNet18(norm="static")
    whole, half = family.full(), family.width(0.5)
    counted = {}
    for architecture in (whole, half):
        step = Step(1)
        step.run(family.blocks(architecture), family.input_shape, family.classes)
        counted[architecture] = step.convolutions
        assert family.convolutions(architecture) == step.convolutions
    assert not counted[whole] & counted[half]
    large_batch = training_cost(family, whole, (half,), False, 256, "sgd")  # its activations hide all else
    plain = cost(family, whole, batch_size=256, optimizer="sgd")
    more = large_batch.peak_training_memory_bytes - plain.peak_training_memory_bytes
    assert more == 300_000 * len(counted[half])


@pytest.mark.parametrize("method", ["fjord", "fjord without distillation"])
def test_devices_of_a_width_afford_what_the_method_needs_for_it(method, tmp_path):
    engine, scorer = started(small_config(tmp_path, **METHODS[method]))
    strategy = engine.method
    result = engine.run_round(simulated_grid(), 1, scorer)
    widths = dict(zip(("whole", "half", "quarter"), strategy.candidates, strict=True))
    trained = [d for d in result.devices if d["outcome"] == "trained"]
    assert len(trained) == 4
    for device in trained:
        assert device["architecture"] == widths[device["tier"]].to_json()
        assert device["predicted_memory_bytes"] == strategy.cost(widths[device["tier"]]).peak_training_memory_bytes
        assert device["predicted_memory_bytes"] <= device["budget"]["memory_bytes"]


def test_convolutions_behind_an_early_exit_are_found():
    family = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
    conv1 = ((1, 8, 8), (32, 8, 8), 3)
    conv2 = ((32, 4, 4), (64, 4, 4), 3)
    assert family.convolutions(family.up_to(2)) == {conv1, conv2}
    assert family.convolutions(family.full()) == {conv1, conv2, ((64, 2, 2), (128, 2, 2), 3)}


# The client step, by hand: one input of 1, four hidden channels of value 1, three classes. The logits of the first
# class add ln 2 for each of channels 0, 1 and 3; the other classes' are 0. Of width 1/4 the softmax is (2, 1, 1) / 4,
# of width 1 it is (8, 1, 1) / 10.
LN2 = math.log(2)


def one_hidden(width=1.0):
    family = OneHidden()
    model = family.build(family.width(width))
    kept = round(4 * width)
    model.load_state_dict(
        {
            FC: torch.ones(kept, 1),
            FC_BIAS: torch.zeros(kept),
            CLASSIFIER: torch.tensor([[LN2, LN2, 0.0, LN2], [0.0] * 4, [0.0] * 4])[:, :kept],
            CLASSIFIER_BIAS: torch.zeros(3),
        }
    )
    return family, model.train()


def ordered_step(distillation, wanted):
    """Gradients and loss of the first seed that draws the wanted width; label 0."""
    for seed in range(20):
        family, model = one_hidden()
        local = OrderedDropout(lower=(family.width(0.25),), distillation=distillation)
        loss = loss_of(local, model, family=family, chance=random.Random(seed))
        value = loss(torch.ones(2, 1, 1, 1), torch.tensor([0, 0]))
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        drawn_narrow = not bool(torch.equal(gradients[CLASSIFIER][:, 0], gradients[CLASSIFIER][:, 1]))
        if drawn_narrow == (wanted < 1):
            return float(value.detach()), gradients
    raise AssertionError("no seed draws it")


def columns(*values):
    return [pytest.approx([column[row] for column in values], abs=1e-6) for row in range(3)]


def test_a_cut_of_ordered_dropout_trains_the_leading_channels_alone():
    # p - onehot = (-1/2, 1/4, 1/4) in the first column and the bias; channel 0's own weight gets ln 2 * -1/2.
    value, gradients = ordered_step(False, 0.25)
    assert value == pytest.approx(math.log(2))
    nothing = (0.0, 0.0, 0.0)
    assert gradients[CLASSIFIER].tolist() == columns((-0.5, 0.25, 0.25), nothing, nothing, nothing)
    assert gradients[CLASSIFIER_BIAS].tolist() == pytest.approx([-0.5, 0.25, 0.25])
    assert gradients[FC].flatten().tolist() == pytest.approx([-0.5 * math.log(2), 0, 0, 0])
    assert gradients[FC].flatten()[1:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("distillation", [False, True])
def test_the_whole_of_ordered_dropout_trains_everything_and_has_nothing_to_learn_from_itself(distillation):
    value, gradients = ordered_step(distillation, 1.0)
    assert value == pytest.approx(math.log(10 / 8))
    assert gradients[CLASSIFIER].tolist() == columns(*[(-0.2, 0.1, 0.1)] * 4)
    assert gradients[FC].flatten().tolist() == pytest.approx([-0.2 * math.log(2)] * 2 + [0, -0.2 * math.log(2)])


def test_with_distillation_the_cut_learns_what_the_whole_says():
    # ln(10/8) of the whole, and -(8 ln(1/2) + 2 ln(1/4)) / 10 = 1.2 ln 2 of the cut to the whole's softmax q.
    # Gradients: (-0.2, 0.1, 0.1) everywhere, and p - q = (-0.3, 0.15, 0.15) in the cut; q itself is constant.
    value, gradients = ordered_step(True, 0.25)
    assert value == pytest.approx(math.log(10 / 8) + 1.2 * math.log(2))
    beyond = (-0.2, 0.1, 0.1)
    assert gradients[CLASSIFIER].tolist() == columns((-0.5, 0.25, 0.25), beyond, beyond, beyond)
    assert gradients[CLASSIFIER_BIAS].tolist() == pytest.approx([-0.5, 0.25, 0.25])
    expected = [-0.5 * math.log(2), -0.2 * math.log(2), 0, -0.2 * math.log(2)]
    assert gradients[FC].flatten().tolist() == pytest.approx(expected)


def drawn_losses(seed, batches):
    family, model = one_hidden()
    local = OrderedDropout(lower=(family.width(0.5), family.width(0.25)), distillation=False)
    loss = loss_of(local, model, family=family, chance=random.Random(seed))
    return [round(float(loss(torch.ones(1, 1, 1, 1), torch.tensor([0])).detach()), 4) for _ in range(batches)]


def test_widths_are_drawn_alike_for_every_batch_and_follow_from_the_seed():
    losses = drawn_losses(3, 600)
    # Softmaxes (2, 1, 1) / 4, (4, 1, 1) / 6 and (8, 1, 1) / 10.
    counts = [losses.count(round(math.log(x), 4)) for x in (2, 6 / 4, 10 / 8)]
    assert sum(counts) == 600
    assert all(150 < count < 250 for count in counts)
    assert drawn_losses(3, 600) == losses
    assert drawn_losses(4, 600) != losses


def test_a_cut_computes_what_a_sub_model_of_its_own_does():
    family = LeNet5(input_shape=(1, 8, 8), norm="static")
    half = family.width(0.5)
    torch.manual_seed(0)
    model = family.build(family.full()).train()
    own = family.build(half).train()
    own.load_state_dict(family.place(half).gather(model.state_dict()))
    inputs, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    wanted = F.cross_entropy(own(inputs), labels)
    wanted.backward()
    for seed in range(20):
        model.zero_grad()
        local = OrderedDropout(lower=(half,), distillation=False)
        loss = loss_of(local, model, family=family, chance=random.Random(seed))(inputs, labels)
        if torch.equal(loss.detach(), wanted.detach()):
            break
    else:
        raise AssertionError("no seed draws the half")
    loss.backward()
    gradients = family.place(half).gather({name: p.grad for name, p in model.named_parameters()})
    for name, parameter in own.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-6), name
    inside = sum(float(g.abs().sum()) for g in gradients.values())
    assert sum(float(p.grad.abs().sum()) for p in model.parameters()) == pytest.approx(inside)


def test_ordered_dropout_of_another_architecture_is_refused():
    family, model = one_hidden(0.5)
    local = OrderedDropout(lower=(family.width(0.5),), distillation=False)
    with pytest.raises(MessageError, match="widths of ordered dropout: each must be a cut of the one above it"):
        loss_of(local, model, family=family, architecture=family.width(0.5))


def test_running_statistics_are_not_mixed_by_ordered_dropout():
    family = LeNet5(input_shape=(1, 8, 8))
    local = OrderedDropout(lower=(family.width(0.5),), distillation=False)
    with pytest.raises(MessageError, match="use norm = 'static'"):
        loss_of(local, family.build(family.full()), family=family)


DEPTHS = {"family": "vit-tiny", "family-arguments": "hidden = 8, heads = 2, mlp = 8, depth = 3, depths = [1, 2, 3]"}
MEMBERS = "members = { large = { name = 'cnn3', norm = 'static' }, small = { name = 'mlp', hidden = [4] } }"


@pytest.mark.parametrize(
    ("keys", "below"),
    [
        (DEPTHS, [2, 1, 0]),
        # No member of a choice is a cut of another, so that each is trained as a whole.
        ({"family": "choice", "family-arguments": MEMBERS, "below-smallest": "smallest"}, [0, 0]),
    ],
)
def test_candidates_of_the_familys_own_take_the_place_of_widths(keys, below, tmp_path):
    """`widths` play no part there; draws are among the candidates that lie inside the device's own."""
    engine, scorer = started(small_config(tmp_path, **METHODS["fjord"] | {"widths": "1, 0.5"} | keys))
    strategy = engine.method
    lower = [strategy.client_step(Order(0, candidate)).lower for candidate in strategy.candidates]
    assert [len(levels) for levels in lower] == below
    assert lower[0] == tuple(strategy.candidates[1 : 1 + below[0]])
    result = engine.run_round(simulated_grid(), 1, scorer)
    assert {device["outcome"] for device in result.devices} == {"trained"}
