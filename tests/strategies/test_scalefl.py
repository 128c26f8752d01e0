import math
from copy import copy

import pytest
import torch

from tests.strategies.by_hand import Devices, TwoExits, engine_of, filled, loss_of, no_scores, setup, task_with
from wildflower.devices.budget import Budget
from wildflower.models.cnn import Cnn10
from wildflower.models.vgg import Vgg
from wildflower.strategies.method import client_step_of
from wildflower.strategies.scalefl import ScaleFL, ScaleFLParams, WeightedExits, levels
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.losses import token_cross_entropy
from wildflower.tasks.task import TaskSpec, load_task

VGG = Vgg(input_shape=(1, 8, 8), classes=3, block_channels=(4, 4, 4), exits=(0, 1, 2))
HALVES = ScaleFLParams(widths=(0.5, 0.5, 1.0))


def after_a_round(folder, params=HALVES, number=1, silent=()):
    """Devices 0, 1 and 2 have levels 3, 2 and 1 and answer 1, 4 and 10; they hold 1, 2 and 3 examples."""
    strategy = ScaleFL(setup(folder, VGG), params)
    strategy.weights = filled(strategy.weights, -7.0)
    strategy.assign = lambda device, budget: None if device in silent else strategy.candidates[device]
    values = {0: 1.0, 1: 4.0, 2: 10.0}
    devices = Devices(VGG, lambda order, w: filled(w, values[order.device]), examples={0: 1, 1: 2, 2: 3})
    engine_of(strategy, folder).run_round(devices.grid, number, no_scores)
    return strategy.weights, devices


def test_every_coordinate_is_the_mean_over_its_owners_by_examples(tmp_path):
    weights, devices = after_a_round(tmp_path)
    # Two of four channels are everybody's: (1 + 2 * 4 + 3 * 10) / 6 = 6.5. The others are the whole network's: 1.
    assert weights["block0.norm1.weight"].tolist() == weights["block0.norm1.running_var"].tolist() == [6.5, 6.5, 1, 1]
    assert weights["block0.conv2.weight"][:, :, 0, 0].tolist() == [[6.5, 6.5, 1, 1]] * 2 + [[1, 1, 1, 1]] * 2
    assert weights["exit0.classifier.bias"].tolist() == [6.5] * 3
    # Behind exit 1 there are two devices: (1 + 2 * 4) / 3 = 3. Behind exit 2 one.
    assert weights["block1.norm2.bias"].tolist() == [3, 3, 1, 1]
    assert weights["exit1.classifier.bias"].tolist() == [3] * 3
    assert weights["head.classifier.weight"].unique().tolist() == [1]
    assert {device: len(w["block0.norm1.weight"]) for device, w in devices.received.items()} == {0: 4, 1: 2, 2: 2}


def test_what_nobody_has_keeps_its_value(tmp_path):
    weights, _ = after_a_round(tmp_path, silent=[0])
    assert weights["block0.norm1.weight"].tolist() == [pytest.approx(38 / 5)] * 2 + [-7, -7]
    assert weights["block2.norm1.weight"].tolist() == [-7] * 4


def test_early_exits_learn_from_the_last_one_after_a_quarter_of_the_rounds(tmp_path):
    params = ScaleFLParams(widths=(0.5, 0.5, 1.0), gamma=0.3, temperature=2.0)
    gammas = {}
    for number in (1, 3, 4, 9):  # of 10 rounds, of which 2.5 are a quarter
        _, devices = after_a_round(tmp_path, params, number)
        [local] = {client_step_of(order.client_step) for order in devices.orders.values()}
        gammas[number] = local.gamma
        assert local == WeightedExits(gamma=gammas[number], temperature=2.0, weighting="examples")
    assert gammas == {1: 0.0, 3: 0.0, 4: 0.3, 9: 0.3}


def test_levels_are_cut_in_width_and_depth():
    # ceil(0.7 * 4) = 3, ceil(0.75 * 4) = 3; half of 4 is 2.
    assert [a.widths for a in levels(VGG)] == [(3, 3, 0, 0, 0, 0), (3, 3, 3, 3, 0, 0), (4, 4, 4, 4, 4, 4)]
    assert [a.widths for a in levels(VGG, (0.25, 0.5, 0.5))] == [
        (1, 1, 0, 0, 0, 0),
        (2, 2, 2, 2, 0, 0),
        (2, 2, 2, 2, 2, 2),
    ]


def test_without_widths_a_family_takes_the_last_of_the_papers():
    four = Vgg(input_shape=(1, 16, 16), block_channels=(20, 20, 20, 20), exits=(0, 1, 2, 3))
    assert [a.widths[0] for a in levels(four)] == [14, 14, 15, 20]
    three = Vgg(input_shape=(1, 16, 16), block_channels=(20, 20, 20), exits=(0, 1, 2))
    assert [a.widths[0] for a in levels(three)] == [14, 15, 20]


@pytest.mark.parametrize(
    ("widths", "words"),
    [
        ((0.5, 1.0), r"scalefl.widths = '0.5, 1' are 2, but vgg has 3 exits \(exit0, exit1, head\): one per exit"),
        ((0.7, 0.7, 0.75, 1.0), r"are 4, but vgg has 3 exits"),
        ((0.5, 0.25, 1.0), r"scalefl.widths = '0.5, 0.25, 1': a deeper level must not be narrower than the one before"),
    ],
)
def test_widths_that_do_not_go_with_the_exits_are_refused(widths, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        ScaleFL(setup(tmp_path, VGG), ScaleFLParams(widths=widths))


def test_a_family_of_more_exits_than_the_paper_needs_widths():
    ten = Cnn10(exits=tuple(range(1, 11)))
    with pytest.raises(
        ValueError, match=r"cnn10 has 10 exits, but the paper's widths are of 4: set scalefl.widths to 10"
    ):
        levels(ten)
    assert len(levels(ten, (1.0,) * 10)) == 10


def test_a_device_gets_the_deepest_level_that_fits(tmp_path):
    strategy = ScaleFL(setup(tmp_path, VGG), HALVES)
    for level in levels(VGG, HALVES.widths):
        price = strategy.cost(level)
        assert (
            strategy.assign(0, Budget(price.peak_training_memory_bytes, price.payload_bytes, price.payload_bytes))
            == level
        )


def test_a_family_of_one_exit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="scalefl needs a family with several exits, vgg has one: set family-argum"):
        ScaleFL(setup(tmp_path, Vgg(input_shape=(1, 8, 8), block_channels=(2, 3))), ScaleFLParams())


# The client step


def test_weighted_exits_count_by_their_number():
    # (1 ln 2 + 2 ln(10/8)) / 3, with gradients 1/3 and 2/3 of p - onehot.
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0])
    value = loss_of(WeightedExits(gamma=0.0, temperature=3.0), model)(torch.zeros(1, 1), torch.tensor([0]))
    assert float(value.detach()) == pytest.approx((math.log(2) + 2 * math.log(10 / 8)) / 3)
    value.backward()
    assert model.shallow.grad.tolist() == pytest.approx([-0.5 / 3, 0.25 / 3, 0.25 / 3])
    assert model.deep.grad.tolist() == pytest.approx([-0.4 / 3, 0.2 / 3, 0.2 / 3])


def test_early_weighted_exits_learn_from_the_last_one_which_learns_from_that():
    # At T = 3 logits (3 ln 2, 0, 0) and (3 ln 8, 0, 0) are p = (2, 1, 1) / 4 and q = (8, 1, 1) / 10, without it
    # (8, 1, 1) / 10 and (512, 1, 1) / 514. The first exit learns gamma 9 KL(q || p).
    model = TwoExits([3 * math.log(2), 0.0, 0.0], [3 * math.log(8), 0.0, 0.0])
    value = loss_of(WeightedExits(gamma=2.0, temperature=3.0), model)(torch.zeros(1, 1), torch.tensor([0]))
    divergence = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    expected = (math.log(10 / 8) + 18 * divergence + 2 * math.log(514 / 512)) / 3
    assert float(value.detach()) == pytest.approx(expected)
    # d KL / d first logits = (p - q) / T, d KL / d last logits = q (ln(q / p) - KL) / T.
    value.backward()
    first = [(-0.2 + 6 * -0.3) / 3, (0.1 + 6 * 0.15) / 3, (0.1 + 6 * 0.15) / 3]
    assert model.shallow.grad.tolist() == pytest.approx(first)
    pulls = [0.8 * (math.log(8 / 5) - divergence), 0.1 * (math.log(2 / 5) - divergence)]
    own = [-4 / 514, 2 / 514]
    last = [(6 * pulls[0] + own[0]) / 3, (6 * pulls[1] + own[1]) / 3]
    assert model.deep.grad.tolist() == pytest.approx([last[0], last[1], last[1]], rel=1e-5)


def test_early_weighted_exits_learn_of_tokens_that_have_a_label():
    """The example above in the second of two tokens, of which the first has no label."""
    shallow, deep = [[7.0, 3 * math.log(2)], [0.0, 0.0], [1.0, 0.0]], [[0.0, 3 * math.log(8)], [0.0, 0.0], [2.0, 0.0]]
    model = TwoExits(shallow, deep)
    tokens = task_with(token_cross_entropy, "classes of tokens", sums_examples=False)
    loss = loss_of(WeightedExits(gamma=2.0, temperature=3.0), model, task=tokens)
    value = loss(torch.zeros(1, 1), torch.tensor([[NO_LABEL, 0]]))
    divergence = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    expected = (math.log(10 / 8) + 18 * divergence + 2 * math.log(514 / 512)) / 3
    assert float(value.detach()) == pytest.approx(expected)
    value.backward()
    assert not model.shallow.grad[:, 0].any()
    assert not model.deep.grad[:, 0].any()


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_answers_that_a_device_lacks_are_out_of_reach_at_any_temperature(temperature):
    """Of four classes the device has two; the first exit says (1, 1) / 2 of them, the last one (4, 1) / 5."""
    own = copy(load_task(TaskSpec(name="digits", devices=1, seed=0)))
    own._only = torch.tensor([True, False, True, False])
    shallow, deep = [0.0, 9.0, 0.0, 9.0], [temperature * math.log(4), 9.0, 0.0, 9.0]
    model = TwoExits(shallow, deep)
    loss = loss_of(WeightedExits(gamma=1.0, temperature=temperature), model, task=own)
    value = loss(torch.zeros(1, 1), torch.tensor([0]))
    divergence = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    expected = math.log(2) + temperature**2 * divergence + 2 * math.log(1 + 4**-temperature)
    assert float(value.detach()) == pytest.approx(expected / 3)
    value.backward()
    assert torch.isfinite(model.shallow.grad).all()
    assert not model.shallow.grad[1::2].any()
