"""Networks of the layer language as modules that are cut by themselves: nothing differs but what is named here."""

from functools import lru_cache

import numpy as np
import pytest
import torch

from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.placement import Axis, leading, rolling
from wildflower.models.weights import with_weights

IMAGE, TEXT = (1, 12, 12), (6,)
NETWORKS = {
    "lenet5": ({}, IMAGE),
    "mlp": ({"hidden": [9, 7]}, IMAGE),
    "cnn3": ({}, IMAGE),
    "cnn10": ({}, IMAGE),
    "pfl-cnn": ({}, IMAGE),
    "vgg": ({"block_channels": [6, 8, 10]}, IMAGE),
    "resnet18": ({"first_channels": 4}, IMAGE),
    "resnet34": ({"first_channels": 4, "preactivation": True, "activation": "relu6"}, IMAGE),
    "resnet152": ({"first_channels": 4, "depth": 2}, IMAGE),  # all kinds of blocks are in its first two stages
    "densenet121": ({"growth": 2}, IMAGE),
    "vit-tiny": ({"hidden": 12, "heads": 3, "mlp": 10, "depth": 3}, IMAGE),
    "bert-tiny": ({"hidden": 8, "heads": 2, "mlp": 6, "depth": 2}, TEXT),
}
QUICK = ("lenet5", "mlp")
# How many blocks may be left out. Of ResNets tracing finds the blocks, and of transformers none: their blocks are two
# residual parts, of which each would be left out for itself.
REMOVABLE = {"resnet18": 4, "resnet34": 12, "resnet152": 9}
NETS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in NETWORKS]


@lru_cache
def both(name):
    """Return a family of the layer language, and that of its network, traced."""
    arguments, shape = NETWORKS[name]
    # Tracing divides also what a ViT's patches become, because it knows no embedding but tables.
    same = {"input_shape": list(shape), "classes": 5, "norm": "static", "scaler": name != "vit-tiny"}
    spec = {"name": name, **arguments}
    described = make_family(spec | same)
    # What passes between the layers of a DenseNet is never cut there.
    keep = [n.rpartition(".")[0] for n in described.tensor_names() if n.endswith(("stem.conv.weight", "conv2.weight"))]
    keep += [n.rpartition(".")[0] for n in described.tensor_names() if n.startswith("transition") and ".conv." in n]
    traced = make_family(
        same
        | {"name": "own_traced:described", "arguments": {"spec": spec}, "tokens": shape == TEXT}
        | {"keep": keep if name == "densenet121" else []}
    )
    return described, traced


def ties(family):
    """Return what each group ties: dimensions of tensors, and the entries that a channel has there; and its size."""
    found = {}
    for name, spec in family.tensors(family.full()).items():
        for dimension, axis in enumerate(spec.axes):
            if isinstance(axis, Axis) and axis.group in family.groups:
                found.setdefault(axis.group, set()).add((name, dimension, axis.repeat))
    return {(frozenset(tied), family.groups[group]): group for group, tied in found.items()}


def alike(described, traced, arch):
    """Return the traced family's architecture of the same widths."""
    theirs, kept = ties(traced), dict(zip(described.groups, arch.widths, strict=True))
    widths = {theirs[tied]: kept[group] for tied, group in ties(described).items()}
    return Architecture(tuple(widths[group] for group in traced.groups))


def architectures(described):
    """Return widths of all kinds, and without blocks."""
    rng = np.random.default_rng(0)
    random = {group: int(rng.integers(1, full + 1)) for group, full in described.groups.items()}
    found = [described.width(0.3), described.full(), described.architecture(random)]
    if described.name in REMOVABLE:
        found.append(described.architecture(random, list(described.removable)[::2]))
    return found


@pytest.mark.parametrize("name", NETS)
def test_groups_and_blocks_are_the_same(name):
    described, traced = both(name)
    assert ties(described).keys() == ties(traced).keys()
    assert list(described.tensors(described.full())) == list(traced.tensors(traced.full()))
    of_classes = [[n for n, spec in f.tensors(f.full()).items() if spec.of_classes] for f in both(name)]
    assert of_classes[0] == of_classes[1]
    assert len(traced.removable) == REMOVABLE.get(name, 0)
    if name in REMOVABLE:
        names = {group: tied for tied, group in ties(traced).items()}
        blocks = {frozenset(names[group] for group in groups) for groups in traced.removable.values()}
        names = {group: tied for tied, group in ties(described).items()}
        assert blocks == {frozenset(names[group] for group in groups) for groups in described.removable.values()}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("select", [leading, rolling(3)], ids=["leading", "rolling"])
def test_placements_and_means_are_the_same(name, select):
    described, traced = both(name)
    torch.manual_seed(0)
    weights = described.initial()
    results = []
    for family in (described, traced):
        sums = {n: torch.zeros_like(value) for n, value in weights.items()}
        counts = {n: torch.zeros_like(value) for n, value in weights.items()}
        for number, arch in enumerate(architectures(described), start=1):
            placement = family.place(arch if family is described else alike(described, traced, arch), select)
            placement.add_to(sums, {n: number * v for n, v in placement.gather(weights).items()})
            placement.add_weight(counts, number, torch.arange(5))
        results.append((sums, counts))
    for mine, theirs in zip(*results, strict=True):
        assert all(torch.equal(mine[n], theirs[n]) for n in weights)


@pytest.mark.parametrize("name", NETS)
def test_sub_models_are_the_same_functions_at_the_same_price(name):
    """But for memory, which is of the operators' order in one and of the layers' in the other; within 2 %."""
    described, traced = both(name)
    torch.manual_seed(0)
    weights = described.initial()
    inputs = torch.randn(4, *IMAGE) if described.input_shape == IMAGE else torch.randint(0, 5, (4, *TEXT))
    for arch in architectures(described):
        answers, costs = [], []
        for family, own in ((described, arch), (traced, alike(described, traced, arch))):
            network = with_weights(family, own, family.place(own).gather(weights)).train()
            torch.manual_seed(1)  # of dropout
            answers.append(network(inputs))
            costs.append(cost(family, own, batch_size=8, optimizer="sgd-momentum"))
        assert torch.allclose(*answers, atol=1e-5)
        mine, theirs = costs
        assert (mine.parameters, mine.payload_bytes) == (theirs.parameters, theirs.payload_bytes)
        assert theirs.training_flops == pytest.approx(mine.training_flops, rel=0.05)
        assert theirs.peak_training_memory_bytes == pytest.approx(mine.peak_training_memory_bytes, rel=0.02)
