"""HypeMeFed's controls by hand."""

import math

import pytest
import torch

from benchmarks.hypemefed import hypemefed_controls as controls
from benchmarks.hypemefed.hypemefed_controls import (
    DeepestExit,
    DeepestExitOwners,
    MeasuredGuesses,
    MovingAverage,
    Owners,
    ReadingInSentBases,
    SentBases,
    Shifted,
    Stale,
    UnmergedTraining,
)
from tests.strategies.by_hand import TwoExits, loss_of
from tests.strategies.hypemefed.test_hypemefed import VGG, after, hypemefed, update
from wildflower.strategies.hypemefed import guesses as guesses_module
from wildflower.strategies.hypemefed.layer_hypernetwork import LowRankHypernetwork, as_weight
from wildflower.strategies.method import Order


def control(kind, folder, **params):
    return hypemefed(folder, kind=kind, **params)


def test_owners_only_by_hand(tmp_path):
    """Exit 3 answers 1 with 1 example, exit 2 answers 4 with 2, exit 1 answers 10 with 3; weighted by examples."""
    strategy = control(Owners, tmp_path)
    weights = after(strategy, update(VGG, 3, 1.0), update(VGG, 2, 4.0, 2), update(VGG, 1, 10.0, 3))
    # (1 + 8 + 30) / 6 = 6.5; (1 + 8) / 3 = 3; 1.
    assert weights["block0.conv1.weight"] == [6.5]
    assert weights["block0.norm1.running_var"] == [6.5]
    assert weights["exit0.classifier.weight"] == [6.5]
    assert weights["block1.conv2.weight"] == weights["exit1.classifier.bias"] == [3.0]
    assert (
        weights["block2.conv1.weight"] == weights["block2.norm1.weight"] == weights["head.classifier.weight"] == [1.0]
    )


def test_stale_layers_by_hand(tmp_path):
    """The same, and shallow devices add the global -7 to all that they lack."""
    strategy = control(Stale, tmp_path)
    weights = after(strategy, update(VGG, 3, 1.0), update(VGG, 2, 4.0, 2), update(VGG, 1, 10.0, 3))
    assert weights["block1.conv2.weight"] == [-2.0]  # (1 + 8 - 21) / 6
    assert weights["block2.conv1.weight"] == pytest.approx([-34 / 6])  # (1 - 14 - 21) / 6
    for name in ("block2.norm1.weight", "head.classifier.weight"):
        assert weights[name] == pytest.approx([-34 / 6])
    assert weights["exit1.classifier.weight"] == [-2.0]


def test_a_moving_average_of_owners_by_hand(tmp_path):
    """Averages begin at -7 and keep 3/4: A = 3/4 (-7) + 1/4 (1 * 2 + 3 * 6) / 4 = -4 in the last block."""
    strategy = control(MovingAverage, tmp_path, ema_decay=0.75)
    strategy.averages_of_owners = {n: torch.full_like(v, -7.0) for n, v in strategy.averages_of_owners.items()}
    found = after(
        strategy,
        update(VGG, 3, 2.0, examples=1),
        update(VGG, 3, 6.0, examples=3, device=1),
        update(VGG, 2, 4.0, examples=4, device=2),
    )
    # What device 2 lacks counts with A: (1 * 2 + 3 * 6 + 4 * -4) / 8 = 0.5. Heads, biases and norms are the owners'.
    assert found["block2.conv1.weight"] == found["block2.conv2.weight"] == [0.5]
    assert found["block2.norm1.weight"] == [5.0]
    # All own block 1: A of it moves too, and stands for nobody.
    assert found["block1.conv1.weight"] == [(2 + 18 + 16) / 8]
    again = control(MovingAverage, tmp_path, ema_decay=0.75)
    again.load(strategy.state())
    # Without an owner the average stays, and stands for both.
    found = after(again, update(VGG, 2, 1.0), update(VGG, 2, 1.0, device=1))
    assert found["block2.conv1.weight"] == [-4.0]
    assert found["block2.norm1.weight"] == [5.0]


def test_weights_may_be_read_in_the_bases_of_what_was_sent():
    """Devices whose weights are nearly equal look nearly equal there, and may differ in sign in bases of their own."""
    shape = (4, 3, 3, 3)
    sent = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, vt = torch.linalg.svd(sent.permute(0, 2, 1, 3).reshape(12, 9), full_matrices=False)
    network = LowRankHypernetwork(shape, shape, 100, 4)
    noise = 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    reading = ReadingInSentBases("weight", {"w": sent}, {"w": 1.0})
    left, right = reading.inputs(network, "w", sent + noise)
    matrix = (sent + noise).permute(0, 2, 1, 3).reshape(12, 9)
    # By hand: S^-1/2 V^T W^T and S^-1/2 U^T W, whose product over S^-1 gives W back, up to signs of pairs.
    root = s.sqrt().unsqueeze(1)
    assert torch.allclose(left.abs(), (vt @ matrix.T / root).abs(), atol=1e-4)
    assert torch.allclose(right.abs(), (u.T @ matrix / root).abs(), atol=1e-4)
    begun = reading.inputs(network, "w", sent)
    assert torch.allclose(begun[0], left, atol=0.2)
    assert torch.allclose(begun[1], right, atol=0.2)


def test_guesses_of_weights_may_be_shifted_to_the_owners_mean(tmp_path, monkeypatch):
    """Hypernetworks say 10 of everybody; owners have 2 and 6, by 1 and 3 examples, so that guesses lack -5."""
    monkeypatch.setattr(guesses_module, "fit", lambda *args, **kwargs: 0.0)
    ten = lambda network, inputs: torch.full(network.target, 10.0)  # noqa: E731
    monkeypatch.setattr(guesses_module, "generate", ten)
    monkeypatch.setattr("wildflower.strategies.hypemefed.layer_hypernetwork.generate", ten)
    for kind, wanted in ((Shifted, 5.0), (SentBases, (2 + 18 + 4 * 10) / 8)):
        strategy = control(kind, tmp_path)
        deep = update(VGG, 3, 2.0, examples=1), update(VGG, 3, 6.0, examples=3, device=1)
        found = after(strategy, *deep, update(VGG, 2, 4.0, examples=4, device=2))
        assert found["block2.conv1.weight"] == [wanted]


def test_errors_of_guesses_are_relative_to_zeros_and_not_below_those_of_their_rank(tmp_path, monkeypatch):
    """An owner has nine ones on the diagonal of a layer, of which rank 1 can say one; all were sent -7."""
    monkeypatch.setattr(controls, "generate", lambda network, inputs: torch.full(network.target, 0.5))
    strategy = control(MeasuredGuesses, tmp_path, rank=1, epochs=1)
    owner = update(VGG, 3, 1.0)
    owner.each["weights"]["block2.conv1.weight"] = as_weight(torch.eye(12, 9), (4, 3, 3, 3))
    strategy.absorb(owner)
    strategy.absorb(update(VGG, 1, 1.0, device=1))
    found = strategy.finish_round([])
    layer = "block2.conv1.weight"
    assert found[f"{layer} rank_floor"] == pytest.approx(8 / 9)
    assert found[f"{layer} guess_error"] == pytest.approx(108 * 0.25 / 9)
    assert found[f"{layer} stale_error"] == pytest.approx((9 * 64 + 99 * 49) / 9)
    assert found["block1.conv1.weight rank_floor"] == pytest.approx(0, abs=1e-6)
    assert not control(MeasuredGuesses, tmp_path).finish_round([])  # nobody owns a layer


def test_without_exits_early_heads_are_those_of_the_devices_that_stop_there(tmp_path):
    strategy = control(DeepestExitOwners, tmp_path)
    assert strategy.client_step(Order(0, VGG.full())) == UnmergedTraining()
    weights = after(strategy, update(VGG, 3, 1.0), update(VGG, 1, 10.0, 3))
    assert weights["exit0.classifier.weight"] == [10.0]
    assert weights["exit1.classifier.weight"] == [-7.0]
    assert weights["head.classifier.weight"] == [1.0]


def test_heads_are_not_guessed_where_early_ones_are_not_trained(tmp_path):
    with pytest.raises(ValueError, match="generate = 'all' guesses a head from the one before it"):
        control(DeepestExit, tmp_path, generate="all")


def test_without_hypernetworks_none_are_kept(tmp_path):
    strategy = control(Owners, tmp_path)
    assert not [name for name in strategy.state().tensors if name.startswith("hypernetwork/")]


class OnlyDeepest(TwoExits):
    def forward(self, inputs):
        return self.exits(inputs)[-1]


def test_without_exits_the_deepest_is_trained_alone():
    model = OnlyDeepest([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0])
    value = loss_of(UnmergedTraining(), model)(torch.zeros(2, 1), torch.tensor([0, 1]))
    assert float(value.detach()) == pytest.approx((math.log(10 / 8) + math.log(10)) / 2)
    value.backward()
    assert model.shallow.grad is None
