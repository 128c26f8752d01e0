import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.by_hand import (
    CLASSIFIER,
    CLASSIFIER_BIAS,
    FC,
    FC_BIAS,
    Devices,
    OneHidden,
    a_context,
    engine_of,
    filled,
    loss_of,
    no_scores,
    setup,
)
from wildflower.devices.budget import Budget
from wildflower.messages.error import MessageError
from wildflower.messages.orders import LocalTraining
from wildflower.models.cost import ACCUMULATED, CONVOLUTION_KERNEL_BYTES, OPTIMIZERS, Cost, cost
from wildflower.models.family import make_family
from wildflower.models.lenet import LeNet5
from wildflower.models.resnet import ResNet18
from wildflower.models.trace import Storages
from wildflower.models.vit import VitTiny
from wildflower.strategies.fitted_levels import below, fitted_levels, level_cost
from wildflower.strategies.level_options import sizes_between
from wildflower.strategies.method import Order, client_step_of
from wildflower.strategies.nested import is_cut, step_bytes, training_cost
from wildflower.strategies.pricing import Means
from wildflower.strategies.wildflower import LevelTraining, Wildflower, WildflowerParams

LN2 = math.log(2)

# The client step, by hand: one input of 1, four hidden channels of value 1, three classes. The logits of the first
# class add ln 2 for each of channels 0, 1 and 3; the other classes' are 0. Of width 1/4 the softmax is (2, 1, 1) / 4,
# of width 1/2 (4, 1, 1) / 6, and of width 1 (8, 1, 1) / 10.


def one_hidden():
    family = OneHidden()
    model = family.build(family.full())
    weights = {FC: torch.ones(4, 1), FC_BIAS: torch.zeros(4), CLASSIFIER_BIAS: torch.zeros(3)}
    weights[CLASSIFIER] = torch.tensor([[LN2, LN2, 0.0, LN2], [0.0] * 4, [0.0] * 4])
    model.load_state_dict(weights)
    return family, model.train()


def learn(local, model, family, inputs, labels, **changes):
    """Leave the gradients with which a device steps in `.grad`, and return the loss."""

    def fit(model, loss, factors):
        value = loss(inputs, labels)
        value.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factors[name])
        return float(value.detach())

    here = {"received": {"weights": {}}, "build": lambda _: model, "fit": fit}
    return local.train(a_context(family, **here, **changes)).loss


def test_one_step_of_gradient_descent_trains_all_levels_by_the_labels():
    family, model = one_hidden()
    local = LevelTraining(lower=(family.width(0.5), family.width(0.25)), masked=False)
    loss = learn(local, model, family, torch.ones(2, 1, 1, 1), torch.tensor([0, 0]))
    mean = (math.log(10 / 8) + math.log(6 / 4) + math.log(4 / 2)) / 3
    assert loss == pytest.approx(mean, abs=1e-6)
    after = {name: value.detach() - 0.5 * value.grad for name, value in model.named_parameters()}
    # p - onehot is (-2, 1, 1) / 10 of the whole, (-2, 1, 1) / 6 of the half and (-2, 1, 1) / 4 of the quarter. Channel
    # 0 is in all levels, channel 1 in two, the others in one: each gets the mean of these. A channel's own weight gets
    # its weight in the classifier times the mean. Half of each goes off.
    first, second, others = (1 / 10 + 1 / 6 + 1 / 4) / 3, (1 / 10 + 1 / 6) / 2, 1 / 10
    assert after[CLASSIFIER][0].tolist() == pytest.approx([LN2 + first, LN2 + second, others, LN2 + others], abs=1e-6)
    assert after[CLASSIFIER][1].tolist() == pytest.approx([-first / 2, -second / 2, -others / 2, -others / 2], abs=1e-6)
    assert after[CLASSIFIER_BIAS].tolist() == pytest.approx([first, -first / 2, -first / 2], abs=1e-6)
    grown = [1 + LN2 * first, 1 + LN2 * second, 1.0, 1 + LN2 * others]
    assert after[FC].flatten().tolist() == pytest.approx(grown, abs=1e-6)


def test_frozen_tensors_have_no_gradients():
    family, model = one_hidden()
    frozen = dict(model.named_parameters())[FC].requires_grad_(False)
    local = LevelTraining(lower=(family.width(0.5),), masked=False)
    learn(local, model, family, torch.ones(2, 1, 1, 1), torch.tensor([0, 0]))
    assert frozen.grad is None
    # (-2, 1, 1) / 10 of the whole and (-2, 1, 1) / 6 of the half, whose mean the first two channels get.
    second = (1 / 10 + 1 / 6) / 2
    gradient = dict(model.named_parameters())[CLASSIFIER].grad
    assert gradient[1].tolist() == pytest.approx([second, second, 1 / 10, 1 / 10], abs=1e-6)


def test_logits_of_classes_that_a_device_does_not_hold_are_0_in_all_levels():
    """The device holds classes 1 and 2 alone: the first class's logit is 0 then, and so all three are alike."""
    family, model = one_hidden()
    local = LevelTraining(lower=(family.width(0.5),))
    held = torch.tensor([0, 3, 1])
    loss = learn(local, model, family, torch.ones(2, 1, 1, 1), torch.tensor([1, 2]), class_counts=held)
    assert loss == pytest.approx(math.log(3), abs=1e-6)
    gradient = dict(model.named_parameters())[CLASSIFIER].grad
    assert not gradient[0].any()
    # p - onehot is (1/3 - 1) / 2 + 1/3 / 2 = -1/6 of either class, in both levels alike.
    assert gradient[1].tolist() == pytest.approx([-1 / 6, -1 / 6, -1 / 6, -1 / 6], abs=1e-6)
    merge = local.returned(family, family.full())["weights"].merge
    assert merge is not None
    assert merge.present_classes


CUTTABLE = [
    {"name": "lenet5", "input_shape": [1, 8, 8], "norm": "static"},
    {"name": "cnn3", "input_shape": [1, 8, 8], "exits": [1, 3], "norm": "static"},
    {"name": "resnet18", "input_shape": [3, 8, 8], "first_channels": 4, "depth": 1, "norm": "static"},
    {"name": "vit-tiny", "input_shape": [1, 8, 8], "hidden": 12, "depth": 2, "heads": 2, "mlp": 8},
    {"name": "bert", "input_shape": [6], "classes": 8, "hidden": 12, "depth": 2, "heads": 2, "mlp": 8},
]


@pytest.mark.parametrize("spec", CUTTABLE, ids=lambda spec: spec["name"])
def test_gradients_are_means_of_those_of_models_of_their_own(spec):
    family = make_family(spec)
    levels = family.candidates([1.0, 0.5])
    torch.manual_seed(0)
    model = family.build(levels[0]).train()
    inputs = torch.rand(4, *family.input_shape)
    if family.input_dtype == torch.int64:
        inputs = torch.randint(family.classes, (4, *family.input_shape))
    labels = torch.arange(4)
    wanted, owners = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
    total = 0.0
    for level in levels:
        placement = family.place(level)
        own = family.build(level).train()
        own.load_state_dict(placement.gather(model.state_dict()))
        value = F.cross_entropy(own(inputs), labels)
        value.backward()
        total += float(value.detach()) / len(levels)
        got = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.named_parameters()}
        placement.of(got).add_to({name: wanted[name] for name in got}, got)
        placement.of(got).add_to({name: owners[name] for name in got}, {n: torch.ones_like(g) for n, g in got.items()})
    local = LevelTraining(lower=(levels[1],), masked=False)
    assert learn(local, model, family, inputs, labels) == pytest.approx(total, rel=1e-5)
    for name, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.allclose(found, wanted[name] / owners[name], atol=1e-5), name


def test_a_device_refuses_levels_that_are_none():
    family, model = one_hidden()
    for lower, why in (
        ((family.full(),), "levels: each must be a cut of the one above it"),
        ((family.width(0.25), family.width(0.5)), "levels: each must be a cut of the one above it"),
        (
            (type(family.full())((9,)),),
            "levels: one is no sub-model: one-hidden: width of hidden must be 1 to 4",
        ),
    ):
        with pytest.raises(MessageError, match=why):
            loss_of(LevelTraining(lower=lower), model, family=family)


def test_a_device_refuses_to_mix_the_statistics_of_levels():
    family = LeNet5(input_shape=(1, 8, 8), norm="batch")
    model = family.build(family.full())
    loss_of(LevelTraining(lower=()), model, family=family)  # one level alone has its own
    with pytest.raises(MessageError, match="mix their batch norm statistics: use norm = 'static'"):
        loss_of(LevelTraining(lower=(family.width(0.5),)), model, family=family)


MEMBERS = {"large": {"name": "cnn3"}, "small": {"name": "lenet5", "conv_channels": [6, 3], "hidden": [84]}}
CHOICE = make_family({"name": "choice", "input_shape": [1, 12, 12], "norm": "static", "members": MEMBERS})

# The server half -----------------------------------------------------------------------------------------------------


def after_a_round(folder, silent=()):
    """Devices 0, 1 and 2 of width 1, 1/2 and 1/4 answer 1, 3 and 8; they hold 1, 1 and 2 examples."""
    strategy = Wildflower(setup(folder, OneHidden()), WildflowerParams(levels=0))
    strategy.weights = filled(strategy.weights, -7.0)
    strategy.assign = lambda device, budget: None if device in silent else strategy.candidates[device]
    values = {0: 1.0, 1: 3.0, 2: 8.0}
    devices = Devices(OneHidden(), lambda order, w: filled(w, values[order.device]), examples={0: 1, 1: 1, 2: 2})
    engine_of(strategy, folder).run_round(devices.grid, 1, no_scores)
    return strategy, devices


def test_every_coordinate_is_the_mean_over_its_owners_who_count_alike(tmp_path):
    # Channel 0: (1 + 3 + 8) / 3. Channel 1: (1 + 3) / 2. Channels 2 and 3: 1.
    strategy, _ = after_a_round(tmp_path)
    assert strategy.weights[FC].flatten().tolist() == [4, 2, 1, 1]
    assert strategy.weights[CLASSIFIER].tolist() == [[4, 2, 1, 1]] * 3
    strategy, _ = after_a_round(tmp_path, silent=[0])
    assert strategy.weights[FC].flatten().tolist() == [5.5, 3, -7, -7]


def test_the_server_keeps_a_share_of_its_steps_where_somebody_trained(tmp_path):
    """The same devices, of which the first is silent in the second of three rounds; half of a step is kept."""
    strategy = Wildflower(setup(tmp_path, OneHidden()), WildflowerParams(levels=0, momentum=0.5))
    strategy.weights = filled(strategy.weights, -7.0)
    silent: set[int] = set()
    strategy.assign = lambda device, budget: None if device in silent else strategy.candidates[device]
    values = {0: 1.0, 1: 3.0, 2: 8.0}
    devices = Devices(OneHidden(), lambda order, w: filled(w, values[order.device]), examples={0: 1, 1: 1, 2: 2})
    engine = engine_of(strategy, tmp_path)
    engine.run_round(devices.grid, 1, no_scores)
    # The first steps are 11, 9 and twice 8.
    assert strategy.weights[FC].flatten().tolist() == [4, 2, 1, 1]
    silent.add(0)
    engine.run_round(devices.grid, 2, no_scores)
    # The means are 5.5 and 3: steps of 11/2 + 1.5 and 9/2 + 1. Nobody has the other channels, which do not move.
    assert strategy.weights[FC].flatten().tolist() == [11, 7.5, 1, 1]
    resumed = Wildflower(setup(tmp_path, OneHidden()), WildflowerParams(levels=0, momentum=0.5))
    resumed.load(strategy.state())
    silent.clear()
    for method in (strategy, resumed):
        method.assign = strategy.assign
        engine_of(method, tmp_path).run_round(devices.grid, 3, no_scores)
        # The means are 4, 2 and 1: steps of 7/2 - 7, 5.5/2 - 5.5 and 8/2 + 0.
        assert method.weights[FC].flatten().tolist() == [7.5, 4.75, 5, 5]


def test_a_device_is_told_of_all_levels_below_its_own(tmp_path):
    strategy, devices = after_a_round(tmp_path)
    _, half, quarter = strategy.candidates
    lower = {device: client_step_of(order.client_step).lower for device, order in devices.orders.items()}
    assert lower == {0: (half, quarter), 1: (quarter,), 2: ()}


def test_levels_that_are_no_cuts_of_one_another_are_trained_alone():
    large, small = CHOICE.candidates([1.0])
    assert below(CHOICE, large, [large, small]) == ()
    assert is_cut(OneHidden(), OneHidden().width(0.5), OneHidden().full())
    assert not is_cut(OneHidden(), OneHidden().full(), OneHidden().full())


# What it costs -------------------------------------------------------------------------------------------------------


def test_a_device_is_charged_for_the_dearest_part_of_a_step():
    """One hidden layer, SGD without momentum, two examples. Entries: 23 in all of the whole, 8 of the quarter.

    The quarter's part holds its own peak, 2 * (23 - 8) entries more of weights and gradients, 8 that its own would have
    let pile up, and twice the largest tensor, 12 entries: 62 entries.
    """
    family = OneHidden()
    quarter = family.width(0.25)
    alone = cost(family, quarter, batch_size=2, optimizer="sgd")
    whole = cost(family, family.full(), batch_size=2, optimizer="sgd")
    charged = training_cost(family, family.full(), (quarter,), 2, "sgd")
    assert charged.peak_training_memory_bytes == alone.peak_training_memory_bytes + 4 * 62
    assert charged.peak_training_memory_bytes > whole.peak_training_memory_bytes
    assert charged.training_flops == whole.training_flops + alone.training_flops
    assert (charged.parameters, charged.payload_bytes) == (whole.parameters, whole.payload_bytes)
    assert training_cost(family, quarter, (), 2, "sgd") == alone
    # Wildflower's levels have a factor for each entry beside, and a copy of the largest tensor's 12.
    dearer = level_cost(family, family.full(), (quarter,), 2, "sgd")
    assert dearer.peak_training_memory_bytes == charged.peak_training_memory_bytes + 4 * (23 + 12)
    assert level_cost(family, quarter, (), 2, "sgd") == alone


def traced_bytes(family, levels, batch_size, optimizer, micro_batches):
    """What a step of the client step holds at most, by following its tensors; with compiled code, weights and state."""
    with FakeTensorMode():
        model = family.build(levels[0]).train()
        storages = Storages(list(model.parameters()))
        inputs = torch.zeros(batch_size, *family.input_shape)
        local = LevelTraining(lower=tuple(levels[1:]))
        with storages:
            loss = loss_of(local, model, family=family, architecture=levels[0])
            storages.hold(inputs)
            for _ in range(micro_batches):
                loss(inputs, torch.zeros(batch_size, dtype=torch.int64)).backward()
        weights = sum(4 * p.numel() for p in model.parameters())
    kernels = CONVOLUTION_KERNEL_BYTES * len(storages.convolutions)
    return storages.peak_bytes + kernels + weights * (1 + OPTIMIZERS[optimizer].state)


@pytest.mark.thorough
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        (VitTiny(input_shape=(1, 28, 28), hidden=48, depth=1, heads=3, mlp=96), "adamw"),
        (ResNet18(input_shape=(1, 16, 16), first_channels=16, depth=1, norm="static"), "sgd-momentum"),
    ],
    ids=["vit", "resnet"],
)
def test_the_price_holds_for_what_a_step_is_seen_to_hold(family, optimizer, micro_batches):
    levels = family.candidates([1.0, 0.5, 0.25])
    named = optimizer + ACCUMULATED if micro_batches > 1 else optimizer
    predicted = level_cost(family, levels[0], tuple(levels[1:]), 16, named).peak_training_memory_bytes
    seen = traced_bytes(family, levels, 16, optimizer, micro_batches)
    assert 0.97 * seen <= predicted <= 1.1 * seen


def test_lower_levels_cost_hardly_more_memory_than_the_own_level_where_activations_are_most_of_it():
    family = ResNet18(norm="static")
    half = family.width(0.5)
    plain = cost(family, family.full(), batch_size=256, optimizer="sgd").peak_training_memory_bytes
    charged = training_cost(family, family.full(), (half,), 256, "sgd").peak_training_memory_bytes
    assert charged - plain == 300_000 * len(family.convolutions(half))  # the half's compiled convolutions
    assert charged < 1.02 * plain
    held = step_bytes(family, family.full(), half, batch_size=256, optimizer="sgd", gradients_held=True)
    free = step_bytes(family, family.full(), half, batch_size=256, optimizer="sgd", gradients_held=False)
    assert held - free == 4 * cost(family, half, batch_size=256, optimizer="sgd").parameters


# The levels of a fleet -----------------------------------------------------------------------------------------------

# A hidden layer of 1 to 4 channels, of 8, 13, 18 and 23 parameters.
ONE, TWO, THREE, FOUR = (OneHidden().width(width) for width in (0.25, 0.5, 0.75, 1.0))


def fitted(memory, count, each_lower=0):
    """Levels for devices with this much memory, where a channel takes 100 bytes and each lower level some more."""

    def price(level, lower):
        return Cost(5 * level.widths[0] + 3, 1, 1, 100 * level.widths[0] + each_lower * len(lower), 1)

    fleet = [Means(Budget(amount)) for amount in memory]
    return fitted_levels(OneHidden(), [THREE, ONE, FOUR, TWO, ONE], fleet, count, price)


@pytest.mark.parametrize(
    ("memory", "count", "each_lower", "levels"),
    [
        # All afford ONE. With TWO beside it 2 ln(13/8) = 0.97 is won, with THREE ln(18/8) = 0.81, with FOUR 1.06.
        ([100, 150, 250, 400], 2, 0, [FOUR, ONE]),
        # With TWO it is 3 ln(13/8) = 1.46 now, with FOUR still 1.06.
        ([100, 150, 200, 250, 400], 2, 0, [TWO, ONE]),
        # 430 bytes for FOUR with ONE below it are too many; TWO with ONE takes 230.
        ([100, 150, 250, 400], 2, 30, [TWO, ONE]),
        # Of three levels the largest takes 360 or 460 bytes: TWO and THREE.
        ([100, 150, 250, 400], 3, 30, [THREE, TWO, ONE]),
        # Nobody is left out for more parameters elsewhere: 3 ln 23 would be more than 4 ln 8.
        ([100, 400, 400, 400], 1, 0, [ONE]),
        # What everybody affords is the smallest level, and a level that nobody needs is none.
        ([200, 250, 290], 4, 0, [TWO]),
        # Who affords nothing has no say.
        ([0, 50, 400], 2, 0, [FOUR]),
        ([0, 50], 2, 0, []),
        ([], 2, 0, []),
    ],
)
def test_the_levels_serve_the_fleet_best(memory, count, each_lower, levels):
    assert fitted(memory, count, each_lower) == levels


@pytest.mark.parametrize(
    ("below_smallest", "sizes"),
    [("smallest", {"whole": (6, 16, 120, 84), "quarter": (3, 8, 60, 42)}), ("skip", {"whole": (6, 16, 120, 84)})],
)
def test_below_smallest_gives_the_smallest_width_and_not_the_smallest_level_of_the_others(
    below_smallest, sizes, tmp_path
):
    fleet = tmp_path / "fleet.toml"
    groups = [("whole", 2, 1.0), ("quarter", 4, 0.25)]
    fleet.write_text(
        "".join(f'[[group]]\nname = "{name}"\ncount = {n}\nfits_width = {width}\n' for name, n, width in groups)
    )
    keys = {"widths": "1, 0.5", "below-smallest": below_smallest, "fleet": str(fleet), "devices-per-round": 6}
    engine, scorer = started(small_config(tmp_path, **METHODS["wildflower"] | keys))
    trained = [d for d in engine.run_round(simulated_grid(), 1, scorer).devices if d["outcome"] == "trained"]
    assert {d["tier"]: tuple(d["architecture"]["widths"]) for d in trained} == sizes
    # It is no level, so that whoever affords the whole trains what it would train without such devices.
    assert engine.method.candidates == [engine.method.family.full()]


def test_members_of_a_choice_are_levels_as_they_are(tmp_path):
    """None of them lies inside another: a device trains the largest that it affords, alone."""
    members = "members = { large = { name = 'cnn3' }, small = { name = 'mlp', hidden = [4] } }"
    keys = {"family": "choice", "family-arguments": members, "below-smallest": "smallest"}
    engine, scorer = started(small_config(tmp_path, **METHODS["wildflower"] | keys))
    result = engine.run_round(simulated_grid(), 1, scorer)
    large, small = engine.method.family.candidates([1.0])
    trained = {d["tier"]: d["architecture"] for d in result.devices}
    assert trained == {"whole": large.to_json(), "half": small.to_json(), "quarter": small.to_json()}
    assert engine.method.client_step(Order(0, large)).lower == ()


def test_levels_are_cuts_in_width_and_in_depth():
    # 2 and 3 channels between a half and all of 4; of 4 blocks alike also the first one, two and three.
    family = VitTiny(input_shape=(1, 8, 8), hidden=4, depth=4, heads=2, mlp=4)
    found = sizes_between(family, (1.0, 0.5))
    assert {sum(width > 0 for width in a.widths[2::2]) for a in found} == {1, 2, 3, 4}
    assert {a.widths[0] for a in found} == {2, 3, 4}
    assert {family.width(1.0), family.width(0.5), family.first_layers(3)} <= set(found)
    # The families' own: depths, and models that are no cuts of one another.
    depths = VitTiny(input_shape=(1, 8, 8), hidden=4, depth=4, heads=2, mlp=4, depths=(1, 4))
    assert sizes_between(depths, (1.0, 0.5)) == [depths.full(), depths.first_layers(1)]
    assert sizes_between(CHOICE, (1.0, 0.5)) == CHOICE.candidates((1.0, 0.5))


def test_no_level_is_smaller_than_the_smallest_width(tmp_path):
    vit = VitTiny(input_shape=(1, 8, 8), hidden=8, depth=4, heads=2, mlp=8)
    method = Wildflower(setup(tmp_path, vit), WildflowerParams(levels=3))
    quarter = method.cost(vit.width(0.25))
    memory = quarter.peak_training_memory_bytes
    method.survey(Means(Budget(amount)) for amount in (memory, 2 * memory, 2**40))
    sizes = [method.cost(level).parameters for level in method.candidates]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= quarter.parameters
    # One block of more channels takes less memory than four of a quarter of them.
    assert method.candidates[-1].widths[0] > vit.width(0.25).widths[0]
    assert method.cost(method.candidates[-1]).peak_training_memory_bytes <= memory
    assert method.cost(method.candidates[-2]).peak_training_memory_bytes <= 2 * memory


def test_the_first_round_fits_the_levels_and_a_resumed_run_keeps_them(tmp_path):
    # Two devices each that afford the whole, the half and the quarter; a fourth level would make the whole too dear.
    engine, scorer = started(small_config(tmp_path, strategy="wildflower"))
    family = engine.method.family
    engine.method.candidates = family.candidates([0.7])
    result = engine.run_round(simulated_grid(), 1, scorer)
    wanted = family.candidates([1.0, 0.5, 0.25])
    assert engine.method.candidates == wanted
    by_tier = dict(zip(("whole", "half", "quarter"), wanted, strict=True))
    for device in result.devices:
        assert device["outcome"] == "trained"
        assert device["architecture"] == by_tier[device["tier"]].to_json()
        assert device["predicted_memory_bytes"] <= device["budget"]["memory_bytes"]

    resumed, scorer = started(small_config(tmp_path, strategy="wildflower"))
    resumed.method.candidates = family.candidates([0.7])
    resumed.load(engine.state())
    resumed.run_round(simulated_grid(), 2, scorer)
    assert resumed.method.candidates == wanted


def test_levels_may_be_given_and_stay_where_no_device_affords_any(tmp_path):
    given = Wildflower(setup(tmp_path, OneHidden()), WildflowerParams(levels=0))
    fitted = Wildflower(setup(tmp_path, OneHidden()), WildflowerParams(levels=4))
    widths = OneHidden().candidates((1.0, 0.5, 0.25))
    given.survey([Means(Budget(2**40))])
    fitted.survey([Means(Budget(1))])
    assert given.candidates == fitted.candidates == widths
    fitted.survey([Means(Budget(2**40))])
    assert fitted.candidates == widths[:1]


def test_levels_may_keep_another_share_of_each_layer(tmp_path):
    """Links that allow a half and a fifth of all parameters."""
    lenet = LeNet5(input_shape=(1, 28, 28), norm="static")
    searched, uniform = (
        Wildflower(setup(tmp_path, lenet), WildflowerParams(levels=2, **shares)) for shares in ({}, {"shares": ()})
    )
    assert uniform.space is None
    payload_bytes = searched.cost(lenet.full()).payload_bytes
    fleet = [Means(Budget(2**40, payload_bytes // parts, payload_bytes // parts)) for parts in (2, 5)]
    searched.survey(fleet)
    uniform.survey(fleet)
    between = set(sizes_between(lenet, uniform.widths))
    assert set(uniform.candidates) <= between
    assert not set(searched.candidates) <= between
    larger, smaller = searched.candidates
    assert is_cut(lenet, smaller, larger)

    def worth(method):
        """The product of the parameters that the devices get, all of which get some."""
        return math.prod(method.cost(method.assign(0, means.budget)).parameters for means in fleet)

    assert worth(searched) > worth(uniform)
    # No layer is wider than the largest of `widths`.
    narrow = Wildflower(replace(setup(tmp_path, lenet), widths=(0.5, 0.25)), WildflowerParams())
    assert max(share for choice in narrow.space.choices for share in choice.shares) == 0.5


def test_the_balanced_criterion_leaves_no_layer_narrow_for_another(tmp_path):
    """Memory goes to activations in the first layer, and parameters lie in the last: most parameters starve the first.

    Every device affords two fifths of the width, and two of six the whole.
    """
    cnn = make_family({"name": "cnn3", "input_shape": [1, 28, 28], "norm": "static"})
    shares, levels = {}, {}
    for criterion in ("parameters", "balanced"):
        params = WildflowerParams(levels=2, criterion=criterion)
        batches = setup(tmp_path, cnn, training=LocalTraining(batch_size=32))
        method = Wildflower(replace(batches, widths=(1.0, 0.0625)), params)
        fleet = [
            Means(Budget(method.price(cnn.width(rate), lower).peak_training_memory_bytes))
            for rate, lower in [(0.4, [])] * 4 + [(1.0, [cnn.width(0.4)])] * 2
        ]
        method.survey(fleet)
        levels[criterion] = method.candidates
        assert all(method.assign(0, means.budget) is not None for means in fleet)
        smallest = method.candidates[-1]
        shares[criterion] = [width / whole for width, whole in zip(smallest.widths, cnn.full().widths, strict=True)]
    assert len(levels["balanced"]) == 2
    assert max(shares["parameters"]) >= 4 * min(shares["parameters"])
    assert max(shares["balanced"]) <= 2 * min(shares["balanced"])


def test_balanced_levels_keep_every_block(tmp_path):
    """A third of the memory: with most parameters a level lacks blocks, for they take memory and have few of them."""
    vit = VitTiny(input_shape=(1, 8, 8), hidden=8, depth=4, heads=2, mlp=8)
    memory_bytes = Wildflower(setup(tmp_path, vit), WildflowerParams()).cost(vit.full()).peak_training_memory_bytes
    fleet = [Means(Budget(2 * memory_bytes // parts)) for parts in (6, 2, 1)]
    levels = {}
    for criterion in ("parameters", "balanced"):
        method = Wildflower(setup(tmp_path, vit), WildflowerParams(levels=3, criterion=criterion))
        method.survey(fleet)
        levels[criterion] = method.candidates
    assert not all(all(level.widths) for level in levels["parameters"])
    assert all(all(level.widths) for level in levels["balanced"])


@pytest.mark.parametrize("off", [{"levels": 0}, {"shares": ()}])
def test_a_criterion_needs_a_search(off):
    with pytest.raises(ValueError, match="criterion = 'balanced' is for levels that are searched"):
        WildflowerParams(criterion="balanced", **off)


def test_a_single_level_is_not_priced_with_another(tmp_path):
    """A device with the time to train the whole: beside a smaller level there is none left for that."""
    lenet = LeNet5(input_shape=(1, 28, 28), norm="static")
    for levels in (1, 2):
        method = Wildflower(setup(tmp_path, lenet), WildflowerParams(levels=levels))
        flops = method.price(lenet.full(), []).training_flops
        found = method.searched([Means(Budget(2**40, round_seconds=1.001, seconds_per_flop=1 / flops))])
        assert (lenet.full() in found) == (levels == 1)


def test_levels_are_not_searched_layer_by_layer_where_a_family_has_no_layers_to_choose(tmp_path, caplog):
    family = make_family({"name": "cnn3", "input_shape": [1, 12, 12], "norm": "static", "exits": [1, 3]})
    method = Wildflower(setup(tmp_path, family), WildflowerParams(masked_loss=False))
    with caplog.at_level("INFO", "flwr"):
        method.survey([Means(Budget(2**40))])
    assert "levels are not searched layer by layer: space: " in caplog.text
    assert method.candidates == [family.full()]


def test_other_methods_do_not_have_budgets_worked_out_for_them(tmp_path, monkeypatch):
    engine, _ = started(small_config(tmp_path, strategy="heterofl"))
    monkeypatch.setattr("wildflower.rounds.asking.budget_in_round", lambda *_: pytest.fail("nobody asked"))
    engine.asking.survey(range(6))
    assert engine.method.needs_classes  # masked losses need them
    assert not Wildflower(setup(tmp_path, OneHidden()), WildflowerParams(masked_loss=False)).needs_classes
    order = Order(0, OneHidden().full())
    assert engine.method.client_step(order).weighting == "uniform"


def test_momentum_looks_at_who_owns_a_coordinate_which_privacy_forbids():
    assert Wildflower.traits(WildflowerParams(momentum=0.0)).tells_means_only
    assert not Wildflower.traits(WildflowerParams()).tells_means_only
