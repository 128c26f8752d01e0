import math
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from tests.strategies.by_hand import Devices, TwoExits, engine_of, filled, loss_of, no_scores, setup
from wildflower.messages.error import MessageError
from wildflower.messages.sums import WeightedSum
from wildflower.models.block_family import ExitFamily
from wildflower.models.cnn import Cnn3, Cnn10
from wildflower.models.layers import Block, Flatten, Linear, Relu
from wildflower.models.vgg import Vgg
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.hypemefed import HypeMeFed, HypeMeFedParams
from wildflower.strategies.hypemefed import guesses as guesses_module
from wildflower.strategies.hypemefed.hypemefed import SumOfExits
from wildflower.strategies.hypemefed.layer_hypernetwork import LowRankHypernetwork
from wildflower.strategies.hypemefed.pairs_of_layers import follow
from wildflower.strategies.method import LEADING, Contribution, Group, client_step_of

VGG = Vgg(input_shape=(1, 8, 8), classes=3, block_channels=(2, 3, 4), exits=(0, 1, 2))


@dataclass(frozen=True)
class Mlp(ExitFamily):
    """Three linear layers of 3, 4 and 5 features, an exit behind each; with `in_head` the last layer is in its head."""

    name: ClassVar[str] = "mlp"
    input_shape: tuple[int, ...] = (1, 1, 2)
    in_head: bool = False

    @cached_property
    def groups(self):
        return {"fc1": 3, "fc2": 4, "fc3": 5}

    @cached_property
    def parts(self):
        return {number: (group,) for number, group in enumerate(self.groups, start=1)}

    def blocks(self, arch):
        blocks, inputs, positions = [], self.inputs, 2
        for number, outputs in enumerate(self.channels(arch).values(), start=1):
            if not outputs.kept:
                break
            layers = [Flatten(), Linear("fc", inputs, outputs, positions), Relu()]
            head = [Linear("classifier", outputs, self.outputs)]
            inputs, positions = outputs, 1
            if self.in_head and number == 3:
                layers, head = [Flatten()], layers + head
            blocks += [Block(f"block{number}", tuple(layers)), *self.head(number, tuple(head))]
        return blocks


def group(family, arch):
    local = SumOfExits()
    return Group(arch, LEADING, local.sent(family, arch), local.returned(family, arch), family.place(arch))


def update(family, exit, value, examples=1, device=0):
    """One device's update of the network up to an exit: `value` everywhere."""
    arch = family.up_to(exit)
    weights = {name: torch.full(spec.shape, value) for name, spec in family.tensors(arch).items()}
    return Contribution(group(family, arch), [0], [device], examples, {}, {"weights": weights})


def hypemefed(folder, family=VGG, kind=HypeMeFed, **params):
    """Global weights of -7; what is guessed are weights, where nothing else is said."""
    strategy = kind(
        setup(folder, family),
        kind.params_type(**{"hidden": 8, "epochs": 40, "learning_rate": 5e-3, "guess": "weight"} | params),
    )
    strategy.weights = {name: torch.full_like(value, -7.0) for name, value in strategy.weights.items()}
    return strategy


def as_weight_value(factors):
    """The value of a weight that has it everywhere."""
    return round((factors[0].T @ factors[1])[0, 0].item(), 4)


def after(strategy, *updates):
    for contribution in updates:
        strategy.absorb(contribution)
    strategy.finish_round([])
    return {name: value.unique().tolist() for name, value in strategy.weights.items()}


def test_every_convolution_behind_the_first_exit_follows_its_like_in_the_segment_before():
    assert follow(VGG) == {
        2: {"block1.conv1.weight": "block0.conv1.weight", "block1.conv2.weight": "block0.conv2.weight"},
        3: {"block2.conv1.weight": "block1.conv1.weight", "block2.conv2.weight": "block1.conv2.weight"},
    }


def test_a_segment_of_other_names_follows_the_last_convolution():
    from wildflower.models.resnet import ResNet18

    family = ResNet18(input_shape=(1, 8, 8), first_channels=2, exits=(1, 2, 3, 4))
    sources = follow(family)
    assert sources[2]["stage2_0.conv1.weight"] == "stage1_0.conv1.weight"
    assert sources[2]["stage2_1.conv2.weight"] == "stage1_1.conv2.weight"
    # Stage 1 has no projection.
    assert sources[2]["stage2_0.shortcut.conv.weight"] == "stage1_1.conv2.weight"
    assert sources[3]["stage3_0.shortcut.conv.weight"] == "stage2_0.shortcut.conv.weight"


def test_blocks_nearest_to_the_exits_go_together():
    """HypeMeFed's VGG for UniMiB SHAR: blocks 0 and 1 lie before its first exit, and block 2 follows block 1."""
    family = Vgg(input_shape=(1, 18, 25), classes=8, block_channels=(64, 128, 256, 512), exits=(1, 2, 3))
    assert follow(family) == {
        exit: {f"block{exit}.conv{n}.weight": f"block{exit - 1}.conv{n}.weight" for n in (1, 2)} for exit in (2, 3)
    }
    pairs = [pair for exit in follow(family).values() for pair in exit.items()]
    shapes = {name: spec.shape for name, spec in family.tensors(family.full()).items()}
    networks = [LowRankHypernetwork(shapes[source], shapes[target], 100, 512) for target, source in pairs]
    assert sum(p.numel() for network in networks for p in network.parameters()) == 6_205_312  # of the published code


def test_a_longer_segment_goes_on_with_the_first_of_the_one_before():
    """Convolutions 7 to 10 behind 4 to 6: the last three follow one each, the first one what 8 follows."""
    sources = follow(Cnn10(exits=(3, 6, 10)))
    assert sources[2] == {f"block{n}.conv.weight": f"block{n - 3}.conv.weight" for n in (4, 5, 6)}
    assert list(sources[3].items()) == [
        (f"block{target}.conv.weight", f"block{source}.conv.weight")
        for target, source in ((7, 4), (8, 4), (9, 5), (10, 6))
    ]
    assert follow(Cnn3(exits=(1, 2, 3))) == {
        2: {"block2.conv.weight": "block1.conv.weight"},
        3: {"block3.conv.weight": "block2.conv.weight"},
    }
    assert follow(Cnn3(exits=(2, 3))) == {2: {"block3.conv.weight": "block2.conv.weight"}}


def test_linear_layers_are_layers_too_and_those_of_heads_are_not():
    assert follow(Mlp(exits=(1, 2, 3))) == {
        2: {"block2.fc.weight": "block1.fc.weight"},
        3: {"block3.fc.weight": "block2.fc.weight"},
    }


def test_all_that_may_be_guessed():
    """Biases, norms' scales and shifts and heads as well, each from its like; running statistics never."""
    assert follow(VGG, "all")[3] == {
        f"{head}{name}": f"{before}{name}"
        for before, head, names in (
            (
                "block1.",
                "block2.",
                [f"{layer}{n}.{t}" for n in (1, 2) for layer in ("conv", "norm") for t in ("weight", "bias")],
            ),
            ("exit1.", "head.", ["classifier.weight", "classifier.bias"]),
        )
        for name in names
    }
    from wildflower.models.resnet import ResNet18

    family = ResNet18(input_shape=(1, 8, 8), first_channels=2, exits=(1, 2, 3, 4))
    assert follow(family)[2]["stage2_0.shortcut.conv.weight"] == "stage1_1.conv2.weight"
    # Stage 1 has no projection: a norm's scale follows the last scale, and its shift the last shift.
    assert follow(family, "all")[2]["stage2_0.shortcut.norm.weight"] == "stage1_1.norm2.weight"
    assert follow(family, "all")[2]["stage2_0.shortcut.norm.bias"] == "stage1_1.norm2.bias"
    assert follow(family, "all")[2]["stage2_0.shortcut.conv.weight"] == "stage1_1.conv2.weight"


def test_a_segment_without_a_layer_is_refused_at_the_start(tmp_path):
    family = Mlp(exits=(1, 2, 3), in_head=True)
    said = "nothing to guess in front of head: mlp has no convolution and no linear layer between this exit and the one"
    with pytest.raises(ValueError, match=said):
        HypeMeFed(setup(tmp_path, family), HypeMeFedParams())
    assert list(follow(Mlp(exits=(1, 3), in_head=True))) == [2]


def test_guessed_layers_by_hand(tmp_path, monkeypatch):
    """A hypernetwork that doubles: exit 2's device gets 8 in block 2, exit 1's 20 in block 1 and, from that, 40."""
    strategy = hypemefed(tmp_path)
    trained = []
    monkeypatch.setattr(
        "wildflower.strategies.hypemefed.guesses.fit",
        lambda network, pairs, **settings: trained.append((network, pairs)) or 0.0,
    )
    monkeypatch.setattr(
        "wildflower.strategies.hypemefed.guesses.generate",
        lambda network, factors: torch.full(network.target, 2 * as_weight_value(factors)),
    )
    weights = after(strategy, update(VGG, 3, 1.0), update(VGG, 2, 4.0, 2), update(VGG, 1, 10.0, 3))
    assert weights["block0.conv1.weight"] == [6.5]
    assert weights["block1.conv1.weight"] == [11.5]  # (1 + 8 + 60) / 6
    assert weights["block2.conv1.weight"] == pytest.approx([137 / 6])  # (1 + 16 + 120) / 6
    assert weights["block2.norm1.weight"] == weights["head.classifier.weight"] == [1.0]
    # Those of exit 2 learn from the two devices that have both sides, those of exit 3 from one.
    pairs = {network.target: [p[1].flatten()[0].item() for p in pairs] for network, pairs in trained}
    assert pairs[(3, 2, 3, 3)] == [1.0, 4.0]
    assert pairs[(4, 3, 3, 3)] == [1.0]


def test_before_their_first_training_hypernetworks_guess_nothing(tmp_path):
    strategy = hypemefed(tmp_path)
    weights = after(strategy, update(VGG, 2, 1.0), update(VGG, 1, 0.5))
    assert len(weights["block1.conv1.weight"]) > 1  # one real, one guessed
    assert weights["block2.conv1.weight"] == [-7.0]
    again = hypemefed(tmp_path)
    again.load(strategy.state())
    assert again.guesses.trained == {"block1.conv1.weight", "block1.conv2.weight"}


CHANGED = {
    1: 1.0,
    2: 3.0,
    3: -5.0,
}  # what device 3 adds to everything in the segment up to an exit; device 1 half of it


def changed(family, exit, share, device, examples=1):
    """A device's update that adds `share` of CHANGED to the global -7 of every segment that it has."""
    contribution = update(family, exit, -7.0, examples, device)
    for name, value in contribution.own("weights").items():
        value += share * CHANGED[1 + ("block1" in name) + 2 * ("block2" in name)]
    return contribution


def test_changes_are_guessed_by_hand(tmp_path, monkeypatch):
    """Deep devices add 1 and 0.5 times the same: hypernetworks learn that in units of its root mean square.

    Block 1's changes are 3 and 1.5, their unit is ((9 + 2.25) / 2)^1/2 = 2.3717, so that they are 1.2649 and 0.6325;
    block 2's are -5 and -2.5, in their unit of 3.9528 -1.2649 and -0.6325. 2 and 1 are guessed for these devices, which
    have 3 examples and 1: guesses lack (3 * -0.7351 - 0.3675) / 4 = -0.6432 in block 1, and
    (3 * -3.2649 - 1.6325) / 4 = -2.8568 in block 2. For exit 1's device 4 is guessed, and so much more.
    """
    samples = {}
    monkeypatch.setattr(
        "wildflower.strategies.hypemefed.guesses.fit",
        lambda network, pairs, **settings: (
            samples.update({network.target: [p[1].unique().item() for p in pairs]}) or 0.0
        ),
    )
    monkeypatch.setattr(guesses_module.Guesses, "_inputs", lambda self, upload, network, source: upload.device)
    guesses = {0: 2.0, 1: 1.0, 2: 4.0}
    for module in ("guesses", "layer_hypernetwork"):
        monkeypatch.setattr(
            f"wildflower.strategies.hypemefed.{module}.generate",
            lambda network, device: torch.full(network.target, guesses[device]),
        )
    strategy = hypemefed(tmp_path, guess="change")
    updates = [changed(VGG, 3, 1.0, 0, examples=3), changed(VGG, 3, 0.5, 1), changed(VGG, 1, 1.0, 2, examples=2)]
    weights = after(strategy, *updates)
    assert samples[(3, 2, 3, 3)] == pytest.approx([1.2649, 0.6325], abs=1e-4)
    assert samples[(4, 3, 3, 3)] == pytest.approx([-1.2649, -0.6325], abs=1e-4)
    first, second = -7 + 2.3717 * (4 - 0.6432), -7 + 3.9528 * (4 - 2.8568)
    assert weights["block1.conv1.weight"] == pytest.approx([(3 * -4 - 5.5 + 2 * first) / 6], abs=1e-3)
    assert weights["block2.conv1.weight"] == pytest.approx([(3 * -12 - 9.5 + 2 * second) / 6], abs=1e-3)
    assert weights["block2.norm1.weight"] == [(3 * -12 - 9.5) / 4]


def test_what_is_read_of_a_change_is_as_large_as_the_weight(tmp_path, monkeypatch):
    """Block 0 is -7 + 1 and -7 + 0.5, the unit ((1 + 0.25) / 2)^1/2 = 0.7906: read as -7 + 7 / 0.7906, and half."""
    read = []
    monkeypatch.setattr(
        "wildflower.strategies.hypemefed.guesses.fit",
        lambda network, pairs, **settings: read.append([as_weight_value(p[0]) for p in pairs]) or 0.0,
    )
    after(hypemefed(tmp_path, guess="change"), changed(VGG, 3, 1.0, 0), changed(VGG, 3, 0.5, 1))
    # `as_weight_value` multiplies both sides, each of which is that of -7 times g / -7: g^2 / -7.
    gained = [-7 + share * 7 / 0.790569 for share in (1.0, 0.5)]
    assert read[0] == pytest.approx([g * g / -7 for g in gained], abs=1e-3)


def test_before_a_step_all_devices_are_guessed_to_change_as_the_mean_of_the_owners(tmp_path):
    strategy = hypemefed(tmp_path, guess="change", learning_rate=1e-30)
    weights = after(strategy, changed(VGG, 3, 1.0, 0), changed(VGG, 3, 0.5, 1), changed(VGG, 1, 1.0, 2))
    assert weights["block1.conv1.weight"] == pytest.approx([-4.75])  # -7 + (3 + 1.5) / 2
    assert weights["block2.conv1.weight"] == pytest.approx([-10.75])


def test_without_an_owner_in_a_round_guesses_are_not_shifted(tmp_path):
    strategy = hypemefed(tmp_path, guess="change", learning_rate=1e-30)
    after(strategy, changed(VGG, 3, 1.0, 0), changed(VGG, 1, 1.0, 2))
    weights = after(strategy, changed(VGG, 1, 0.5, 2))
    assert weights["block1.conv1.weight"] == pytest.approx([-4.0])  # as after the first round, where 0 was guessed


@pytest.mark.thorough
def test_hypernetworks_learn_how_the_change_of_one_layer_follows_from_anothers(tmp_path):
    """Devices change block 1 by three times as much as block 0: so much is guessed of one that stops before it.

    The owners' mean share is 0.6, which is what a hypernetwork that learns nothing comes to.
    """
    for own_share in (0.2, 1.0):
        strategy = hypemefed(tmp_path, guess="change", hidden=32, epochs=40, learning_rate=5e-3)
        for _ in range(2):
            strategy.weights = {name: torch.full_like(value, -7.0) for name, value in strategy.weights.items()}
            updates = [changed(VGG, 3, share, device) for device, share in enumerate((1.0, 0.2, 0.8, 0.4))]
            # With a million times the examples its part is all of the mean.
            weights = after(strategy, *updates, changed(VGG, 1, own_share, 9, examples=10**6))
        expected = [-7 + own_share * 3] * len(weights["block1.conv1.weight"])
        assert weights["block1.conv1.weight"] == pytest.approx(expected, abs=0.3)


@pytest.mark.thorough
def test_devices_that_change_nothing_teach_nothing(tmp_path):
    strategy = hypemefed(tmp_path, guess="change", generate="all")
    weights = after(
        strategy, *(update(VGG, 3, -7.0, device=device) for device in range(2)), update(VGG, 1, -7.0, device=2)
    )
    assert {name: value for name, value in weights.items() if value != [-7.0]} == {}


def test_units_of_the_last_round_with_a_deep_device_hold_also_after_a_restart(tmp_path):
    first, second = (hypemefed(tmp_path, guess="change") for _ in range(2))
    after(first, changed(VGG, 3, 1.0, 0), changed(VGG, 3, 0.5, 1))
    second.load(first.state())
    states = []
    for strategy in (first, second):
        states.append(after(strategy, changed(VGG, 1, 0.25, 2)))
        assert strategy.guesses.units["block2.conv1.weight"] == pytest.approx(3.9528, abs=1e-4)
    assert states[0] == states[1]


def test_a_hypernetwork_that_diverges_is_as_before(tmp_path, caplog):
    strategy = hypemefed(tmp_path, learning_rate=1e30)
    before = strategy.guesses.networks["block1.conv1.weight"].state_dict()
    before = {name: value.clone() for name, value in before.items()}
    with caplog.at_level("WARNING", "flwr"):
        after(strategy, update(VGG, 3, 0.5), update(VGG, 1, 0.25))
    assert "the hypernetwork of block1.conv1.weight diverged and is as before" in caplog.text
    assert strategy.guesses.trained == set()
    now = strategy.guesses.networks["block1.conv1.weight"].state_dict()
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert all(bool(torch.isfinite(value).all()) for value in strategy.weights.values())


def test_a_hypernetwork_that_errs_more_than_no_guess_is_not_asked(tmp_path, caplog):
    strategy = hypemefed(tmp_path, guess="change", learning_rate=10.0)
    with caplog.at_level("WARNING", "flwr"):
        weights = after(strategy, changed(VGG, 3, 0.5, 0), changed(VGG, 3, 1.0, 1), changed(VGG, 1, 0.25, 2))
    assert "times as much as zeros would, and is not asked" in caplog.text
    assert strategy.guesses.trained == set()
    # So layers behind exit 1 are the mean over those that have them: -7 + 3 (0.5 + 1) / 2.
    assert weights["block1.conv1.weight"] == pytest.approx([-7 + 3 * 0.75])


def test_what_is_kept_of_an_update_is_no_more_than_what_is_read(tmp_path):
    strategy = hypemefed(tmp_path)
    contribution = update(VGG, 1, 0.5)
    # As a message brings them: views of one vector.
    weights = contribution.own("weights")
    flat = torch.cat([value.flatten() for value in weights.values()])
    parts = flat.split([value.numel() for value in weights.values()])
    views = {n: part.view_as(v) for (n, v), part in zip(weights.items(), parts, strict=True)}
    strategy.absorb(replace(contribution, each={"weights": views}))
    [upload] = strategy.uploads
    assert set(upload.tensors) == set(strategy.guesses.sources[2].values()) < set(views)
    for value in upload.tensors.values():
        assert value.untyped_storage().nbytes() == value.numel() * 4


def test_without_a_deep_device_the_hypernetworks_stay_and_go_on_guessing(tmp_path):
    strategy = hypemefed(tmp_path)
    after(strategy, update(VGG, 3, 0.25))
    strategy.weights = {name: torch.full_like(value, -7.0) for name, value in strategy.weights.items()}
    before = {k: v.clone() for k, v in strategy.state().tensors.items() if k.startswith("hypernetwork/")}
    weights = after(strategy, update(VGG, 1, 0.5))
    now = strategy.state().tensors
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert weights["block1.conv1.weight"] != [-7.0]
    assert weights["block1.norm1.weight"] == [-7.0]


def test_a_family_of_one_exit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hypemefed needs a family with several exits, vgg has one: set family-argum"):
        HypeMeFed(setup(tmp_path, Vgg(input_shape=(1, 8, 8), block_channels=(2, 3))), HypeMeFedParams())


def test_the_hypernetworks_come_back(tmp_path):
    first, second = hypemefed(tmp_path), hypemefed(tmp_path)
    after(first, update(VGG, 3, 0.5), update(VGG, 1, 0.25))
    second.load(first.state())
    name = "block1.conv1.weight"
    states = [s.guesses.networks[name].state_dict() for s in (first, second)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    other = hypemefed(tmp_path, hidden=9)
    with pytest.raises(ValueError, match=f"the checkpoint's hypernetwork of {name} is another one"):
        other.load(first.state())


def test_linear_layers_are_guessed_by_hand(tmp_path, monkeypatch):
    """As for convolutions: exit 1's device gets 2 x 10 in layer 2 and 4 x 10 in layer 3."""
    family = Mlp(exits=(1, 2, 3))
    strategy = hypemefed(tmp_path, family)
    monkeypatch.setattr("wildflower.strategies.hypemefed.guesses.fit", lambda *arguments, **settings: 0.0)
    monkeypatch.setattr(
        "wildflower.strategies.hypemefed.guesses.generate",
        lambda network, factors: torch.full(network.target, 2 * as_weight_value(factors)),
    )
    weights = after(strategy, update(family, 3, 1.0), update(family, 1, 10.0, 3))
    assert weights["block1.fc.weight"] == [7.75]  # (1 + 30) / 4
    assert weights["block2.fc.weight"] == [15.25]  # (1 + 60) / 4
    assert weights["block3.fc.weight"] == [30.25]  # (1 + 120) / 4
    assert weights["block3.fc.bias"] == weights["head.classifier.weight"] == [1.0]


def test_all_is_guessed_by_hand(tmp_path, monkeypatch):
    strategy = hypemefed(tmp_path, generate="all")
    monkeypatch.setattr("wildflower.strategies.hypemefed.guesses.fit", lambda *arguments, **settings: 0.0)
    monkeypatch.setattr(
        "wildflower.strategies.hypemefed.guesses.generate",
        lambda network, factors: torch.full(network.target, 2 * as_weight_value(factors)),
    )
    weights = after(strategy, update(VGG, 3, 1.0), update(VGG, 1, 10.0, 3))
    for name in ("conv1.weight", "conv2.bias", "norm1.weight", "norm2.bias"):
        assert weights[f"block1.{name}"] == [15.25]  # (1 + 60) / 4
        assert weights[f"block2.{name}"] == [30.25]  # (1 + 120) / 4
    assert weights["exit1.classifier.weight"] == weights["exit1.classifier.bias"] == [15.25]
    assert weights["head.classifier.weight"] == weights["head.classifier.bias"] == [30.25]
    assert weights["block2.norm1.running_var"] == weights["block2.norm1.running_mean"] == [1.0]


def test_one_deep_upload_is_enough_to_learn_from(tmp_path):
    strategy = hypemefed(tmp_path)
    weights = after(strategy, update(VGG, 3, 0.25))
    assert strategy.guesses.trained == set(strategy.guesses.networks)
    assert {name: value for name, value in weights.items() if value != [0.25]} == {}  # nobody lacks anything


def test_one_shallow_upload_leaves_the_deep_layers_alone(tmp_path):
    strategy = hypemefed(tmp_path)
    weights = after(strategy, update(VGG, 1, 0.25))
    assert strategy.guesses.trained == set()
    assert weights["block0.conv1.weight"] == [0.25]
    assert weights["block1.conv1.weight"] == weights["block2.conv2.weight"] == [-7.0]


def test_a_rank_above_the_matrix_takes_all_of_it(tmp_path):
    """The matrices are 2 * 3 x 1 * 3 and 2 * 3 x 2 * 3 of exit 1, 3 * 3 x 2 * 3 and 3 * 3 x 3 * 3 of exit 2."""
    networks = hypemefed(tmp_path, rank=10**6).guesses.networks
    assert [network.rank for network in networks.values()] == [3, 6, 6, 9]
    strategy = hypemefed(tmp_path, rank=10**6)
    after(strategy, update(VGG, 3, 0.25), update(VGG, 1, 0.5))
    assert all(bool(torch.isfinite(value).all()) for value in strategy.weights.values())


def test_an_upload_with_nan_is_refused_and_nothing_learns_from_it(tmp_path):
    strategy = hypemefed(tmp_path)
    strategy.assign = lambda device, budget: strategy.candidates[0]
    values = {0: 0.25, 1: math.nan, 2: 0.25}
    devices = Devices(VGG, lambda order, w: filled(w, values[order.device]))
    result = engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    outcomes = {d["device"]: d["outcome"] for d in result.devices}
    assert outcomes[0] == outcomes[2] == "trained"
    assert outcomes[1].startswith("refused: ")
    assert outcomes[1].endswith("values that are not finite")
    assert {name: v.unique().tolist() for name, v in strategy.weights.items() if v.unique().tolist() != [0.25]} == {}
    assert all(
        bool(torch.isfinite(v).all()) for n in strategy.guesses.networks.values() for v in n.state_dict().values()
    )


def test_a_guess_too_large_to_be_added_up_is_left_out(tmp_path, monkeypatch, caplog):
    strategy = hypemefed(tmp_path)
    monkeypatch.setattr(
        "wildflower.strategies.hypemefed.guesses.generate", lambda network, factors: torch.full(network.target, 1e20)
    )
    with caplog.at_level("WARNING", "flwr"):
        weights = after(strategy, update(VGG, 3, 1.0), update(VGG, 1, 10.0, 3, device=4))
    assert "what stands for the layers that device 4 lacks is left out" in caplog.text
    assert weights["block0.conv1.weight"] == [7.75]
    assert weights["block1.conv1.weight"] == [1.0]


def test_a_source_is_factorized_once(tmp_path, monkeypatch):
    """Exit 2's device: its block 0 to learn from and its block 1 to guess from, two convolutions each."""
    from wildflower.strategies.hypemefed import layer_hypernetwork

    made = []
    whole = layer_hypernetwork.factorize
    monkeypatch.setattr(layer_hypernetwork, "factorize", lambda weight, rank: made.append(rank) or whole(weight, rank))
    strategy = hypemefed(tmp_path)
    after(strategy, update(VGG, 3, 0.25, device=1), update(VGG, 2, 0.25))
    assert len(made) == 8  # the deepest device's blocks 0 and 1 as well


def test_the_seconds_of_hypernetworks_are_their_own(tmp_path, monkeypatch):
    """A clock that only goes on while hypernetworks learn, 5 s each time, guess, 3 s, and while means are made, 2 s."""
    clock = [0.0]

    def spending(seconds, function):
        def spend(*arguments, **settings):
            clock[0] += seconds
            return function(*arguments, **settings)

        return spend

    monkeypatch.setattr("wildflower.strategies.contract_values.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(guesses_module, "fit", spending(5.0, guesses_module.fit))
    monkeypatch.setattr(guesses_module, "generate", spending(3.0, guesses_module.generate))
    monkeypatch.setattr(CoordinateMean, "mean", spending(2.0, CoordinateMean.mean))
    strategy = hypemefed(tmp_path)
    strategy.assign = lambda device, budget: strategy.candidates[device]
    devices = Devices(VGG, lambda order, w: filled(w, 0.25))
    seconds = engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores).record["server_seconds"]
    assert (seconds["hypernetworks"], seconds["finish"]) == (4 * 5.0 + (2 + 4) * 3.0, 2.0)


# The client step


def test_the_sum_of_exits_adds_the_cross_entropies_of_all_exits():
    # softmax(ln 2, 0, 0) = (1/2, 1/4, 1/4) and softmax(ln 8, 0, 0) = (8, 1, 1) / 10. Labels 0 and 1 cost ln 2 and ln 4
    # at the first exit, ln(10/8) and ln 10 at the second.
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0])
    value = loss_of(SumOfExits(), model)(torch.zeros(2, 1), torch.tensor([0, 1]))
    shallow, deep = (math.log(2) + math.log(4)) / 2, (math.log(10 / 8) + math.log(10)) / 2
    assert float(value.detach()) == pytest.approx(shallow + deep)
    # Each exit's gradient is its own mean of p - onehot, with weight 1.
    value.backward()
    assert model.shallow.grad.tolist() == pytest.approx([0.5 - 0.5, 0.25 - 0.5, 0.25])
    assert model.deep.grad.tolist() == pytest.approx([0.8 - 0.5, 0.1 - 0.5, 0.1])


def test_devices_train_all_exits_and_their_weights_are_not_added_up(tmp_path):
    strategy = hypemefed(tmp_path)
    strategy.assign = lambda device, budget: strategy.candidates[device]
    devices = Devices(VGG, lambda order, w: w)
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    assert {client_step_of(order.client_step) for order in devices.orders.values()} == {SumOfExits()}
    assert all(p.merge is None for p in SumOfExits().returned(VGG, VGG.full()).values())


def test_a_sum_in_place_of_a_devices_weights_is_refused(tmp_path):
    strategy = hypemefed(tmp_path)
    mine = group(VGG, VGG.full())
    total = WeightedSum.zeros(mine.returned["weights"].layout)
    with pytest.raises(MessageError, match="the update holds a sum, and not one device's 'weights'"):
        strategy.absorb(Contribution(mine, [0, 1], [0, 1], 8, {"weights": total}, {}))
    assert strategy.uploads == []


@pytest.mark.parametrize("part", ["block1", "block2"])
def test_frozen_layers_are_neither_guessed_nor_moved(part, tmp_path):
    """The first is what a hypernetwork reads, the second what one would guess, and what another one reads."""
    keys = {"family": "cnn3", "family-arguments": "exits = [1, 2, 3]", "freeze": part}
    engine, scorer = started(small_config(tmp_path, **METHODS["hypemefed"] | keys))
    method = engine.method
    frozen = {name: value.clone() for name, value in method.weights.items() if method.family.is_frozen(name)}
    result = [engine.run_round(simulated_grid(), number, scorer) for number in (1, 2)][-1]
    assert {device["outcome"] for device in result.devices} == {"trained"}
    guessed = {"block2.conv.weight", "block3.conv.weight"} - frozen.keys()
    assert method.guesses.networks.keys() == method.guesses.trained == guessed
    assert same_bits({name: method.weights[name] for name in frozen}, frozen)
