from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wildflower.models import frontier as module
from wildflower.models.cnn import Cnn3
from wildflower.models.cost import ACCUMULATED, cost
from wildflower.models.family import make_family
from wildflower.models.frontier import Chain, Frontier
from wildflower.models.layers import Block
from wildflower.models.profile import pieces
from wildflower.models.space import Space

torch.set_num_threads(1)

RESNET = make_family({"name": "resnet18", "input_shape": [3, 8, 8]})


def resnet_space():
    """1,296 architectures: streams and blocks of all stages, the insides of first blocks are whole."""
    return Space.of(RESNET, (0, 0.5, 1), {f"stage{stage}_0.inner1": [1] for stage in (1, 2, 3, 4)})


def test_links_know_the_decisions_of_their_blocks():
    space = resnet_space()
    chain = Chain(space)
    names = [choice.name for choice in space.choices]
    of = {link.name: {names[decision] for decision in link.decisions} for link in chain.links}
    assert of["stem"] == {"stage1.stream"}
    assert of["stage2_0"] == {"stage1.stream", "stage2.stream"}
    assert of["stage2_1"] == {"stage2.stream", "stage2_1"}
    assert of["head"] == {"stage4.stream"}
    rng = np.random.default_rng(1)
    for _ in range(5):
        picks = [int(rng.integers(count)) for count in chain.counts]
        assert chain.pieces(picks) == pieces(RESNET, space.architecture(picks))


@dataclass(frozen=True)
class Entangled(Cnn3):
    """A family whose first block looks different where the first two widths are `special`."""

    special: tuple[int, int] = (0, 0)

    def blocks(self, arch):
        first, *others = super().blocks(arch)
        if arch.widths[:2] == self.special:
            first = Block(first.name, first.layers[:-1], after=first.layers[-1:])
        return [first, *others]


def test_decisions_that_act_from_afar_are_found_or_refused():
    def link(special):
        return Chain(Space.of(Entangled(special=special), (0.25, 0.5, 1))).links[0]

    assert link((0, 0)).decisions == (0,)
    assert link((32, 32)).decisions == (0, 1)  # one step away from the largest
    with pytest.raises(ValueError, match="space of cnn3: which decisions a block depends on"):
        link((16, 32))  # two steps away from the largest and from the smallest


def test_too_many_open_decisions_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_TRANSITIONS", 3)
    with pytest.raises(ValueError, match="4 combinations of decisions meet at block block2, at most 3"):
        Frontier(Space.of(make_family({"name": "cnn3"}), (0.5, 1)), batch_size=1, optimizer="sgd")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_picks_and_figures_of_labels_are_those_of_their_architectures(seed):
    frontier = small_frontier()
    label = int(np.random.default_rng(seed).integers(len(frontier.parameters)))
    picks = frontier.picks(label)
    whole = cost(RESNET, frontier.space.architecture(picks), batch_size=16, optimizer="adam")
    found = frontier.total(picks)
    assert found.parameters == frontier.parameters[label] == whole.parameters
    assert found.payload_bytes == frontier.payload_bytes[label] == whole.payload_bytes
    assert found.peak_training_memory_bytes == frontier.memory_bytes[label] == whole.peak_training_memory_bytes


_KEPT = {}


def small_frontier(max_labels=10_000):
    if max_labels not in _KEPT:
        _KEPT[max_labels] = Frontier(
            resnet_space(), batch_size=16, optimizer="adam", max_labels=max_labels, thinned_labels=max_labels
        )
    return _KEPT[max_labels]


def test_a_small_space_is_exact_and_sorted():
    frontier = small_frontier()
    assert frontier.exact
    assert (np.diff(frontier.parameters) >= 0).all()
    assert frontier.parameters[-1] == cost(RESNET, RESNET.full(), batch_size=1, optimizer="sgd").parameters


def test_thinned_labels_are_real_and_both_ends_stay():
    frontier, whole = small_frontier(40), small_frontier()
    assert not frontier.exact
    assert len(frontier.parameters) <= 40 < len(whole.parameters)
    for label in (0, len(frontier.parameters) // 2, -1):
        label %= len(frontier.parameters)
        assert frontier.total(frontier.picks(label)).parameters == frontier.parameters[label]
    assert frontier.parameters[-1] == whole.parameters[-1]
    assert frontier.memory_bytes.min() <= 1.05 * whole.memory_bytes.min()


def test_labels_that_are_too_many_are_thinned_out_to_fewer():
    whole = small_frontier()
    arguments = {"batch_size": 16, "optimizer": "adam", "thinned_labels": 40}
    enough = Frontier(resnet_space(), max_labels=10_000, **arguments)
    assert enough.exact
    assert np.array_equal(enough.parameters, whole.parameters)
    few = Frontier(resnet_space(), max_labels=len(whole.parameters) // 2, **arguments)
    assert not few.exact
    assert len(few.parameters) <= 40


@pytest.mark.thorough
def test_an_ordinary_resnet_of_four_shares_is_exact():
    family = make_family({"name": "resnet18", "input_shape": [1, 28, 28], "first_channels": 16})
    assert Frontier(Space.of(family, (0, 0.25, 0.5, 1)), batch_size=32, optimizer="sgd-momentum").exact


def test_interchangeable_layers_have_equal_shares_and_surroundings():
    family = make_family({"name": "resnet34", "input_shape": [3, 8, 8]})
    whole = {f"stage{stage}_0.inner1": [1] for stage in (1, 2, 3, 4)} | {
        f"stage{stage}.stream": [1] for stage in (1, 2, 4)
    }
    space = Space.of(family, (0, 1), whole | {"stage3_4": [0, 0.5]} | {"stage4_1": [1], "stage4_2": [0.5]})
    names = [choice.name for choice in space.choices]
    frontier = Frontier(space, batch_size=1, optimizer="sgd")
    found = [[names[decision] for decision in decisions] for decisions in frontier.interchangeable]
    assert ["stage1_1", "stage1_2"] in found
    assert ["stage2_1", "stage2_2", "stage2_3"] in found
    assert ["stage3_1", "stage3_2", "stage3_3", "stage3_5"] in found
    # Nothing to exchange where there is one option.
    assert not any("stage4_1" in decisions for decisions in found)


def test_the_first_minimum_of_every_segment():
    values = np.array([3, 1, 1, 5, 4, 4, 0])
    assert module._first_min(values, np.array([0, 3, 6])).tolist() == [1, 4, 6]
    rows = np.array([[2, 1, 2, 1], [0, 5, 0, 4]])
    assert rows[:, module._order(rows)].tolist() == [[1, 1, 2, 2], [4, 5, 0, 0]]
    # Ranges that no single key can hold.
    far = np.array([[2**40, 0, 2**40, 0], [0, 2**40, 0, 7]])
    assert far[:, module._order(far)].tolist() == [[0, 0, 2**40, 2**40], [7, 2**40, 0, 0]]


@pytest.mark.parametrize("optimizer", ["sgd", "sgd" + ACCUMULATED])
def test_every_label_knows_its_operations_and_its_memory(optimizer):
    space = Space.of(make_family({"name": "cnn3"}), (0.1, 0.25, 0.5, 1))
    frontier = Frontier(space, batch_size=4, optimizer=optimizer)
    rng = np.random.default_rng(0)
    for label in rng.choice(len(frontier.parameters), size=20):
        picks = frontier.picks(label)
        price = cost(space.family, space.architecture(picks), batch_size=4, optimizer=optimizer)
        assert frontier.memory_bytes[label] == price.peak_training_memory_bytes
        assert frontier.training_flops[label] == price.training_flops == frontier.total(picks).training_flops
