"""The search network of DARTS, and the network of a genotype."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from wildflower.models.darts import ALPHAS, OPERATIONS, edges_of, genotype_of
from wildflower.models.family import make_family

# DARTS_V2 of the authors: of each node two edges.
PUBLISHED = {
    "normal": [
        [["sep_conv_3x3", 0], ["sep_conv_3x3", 1]],
        [["sep_conv_3x3", 0], ["sep_conv_3x3", 1]],
        [["sep_conv_3x3", 1], ["skip_connect", 0]],
        [["skip_connect", 0], ["dil_conv_3x3", 2]],
    ],
    "reduce": [
        [["max_pool_3x3", 0], ["max_pool_3x3", 1]],
        [["skip_connect", 2], ["max_pool_3x3", 1]],
        [["max_pool_3x3", 0], ["skip_connect", 2]],
        [["skip_connect", 2], ["max_pool_3x3", 1]],
    ],
}
SMALL = {"name": "darts", "input_shape": [1, 8, 8], "channels": 2, "cells": 3, "nodes": 2}


def parameters(family):
    tensors = family.tensors(family.full())
    return sum(math.prod(s.shape) for n, s in tensors.items() if not n.endswith(("running_mean", "running_var")))


@pytest.mark.thorough
def test_published_numbers_of_parameters():
    """The authors print 1.930618 and 3.349342 million, the latter without its auxiliary classifier."""
    images = {"name": "darts", "input_shape": [3, 32, 32]}
    assert parameters(make_family(images)) == 1_930_618 + 2 * 14 * 8
    found = make_family({**images, "channels": 36, "cells": 20, "genotype": json.dumps(PUBLISHED)})
    assert parameters(found) == 3_349_342


@pytest.mark.parametrize("genotype", ["", "found"])
@pytest.mark.parametrize("side", [8, 9, 14])
def test_every_size_goes_through_and_everything_learns(genotype, side):
    torch.manual_seed(0)
    two = {kind: cell[:2] for kind, cell in PUBLISHED.items()}
    family = make_family({**SMALL, "input_shape": [1, side, side], "genotype": json.dumps(two) if genotype else ""})
    model = family.build(family.full())
    outputs = model(torch.randn(3, 1, side, side))
    assert outputs.shape == (3, 10)
    outputs.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_an_edge_is_the_mixture_of_its_operations():
    """Where one alpha is far above the others, what the search network says is that operation's."""
    torch.manual_seed(0)
    family = make_family({**SMALL, "nodes": 1})
    model = family.build(family.full()).eval()
    inputs = torch.randn(2, 1, 8, 8)
    state = model.state_dict()
    with torch.no_grad():
        for kind in ("normal", "reduce"):
            state[f"{ALPHAS}{kind}"].fill_(-40.0)[:, list(OPERATIONS).index("none")] = 40.0
        nothing = model(inputs)
    torch.testing.assert_close(nothing, model.classifier.bias.expand(2, 10))


def test_a_genotype_has_the_two_strongest_edges_and_never_none():
    alphas = torch.zeros(len(edges_of(2)), len(OPERATIONS))  # node 0 reads 0 and 1, node 1 reads 0, 1 and 2
    names = list(OPERATIONS)
    alphas[:, names.index("none")] = 9.0
    alphas[0, names.index("skip_connect")] = 10.0
    alphas[1, names.index("max_pool_3x3")] = 5.0
    alphas[2, names.index("sep_conv_5x5")] = 1.0
    alphas[3, names.index("dil_conv_3x3")] = 12.0
    alphas[4, names.index("avg_pool_3x3")] = 11.0
    found = genotype_of({"alphas.normal": alphas, "alphas.reduce": alphas})
    assert found["normal"] == found["reduce"]
    assert found["normal"] == [[["skip_connect", 0], ["max_pool_3x3", 1]], [["dil_conv_3x3", 1], ["avg_pool_3x3", 2]]]


def test_the_network_that_was_found_is_made_from_the_searchs_file(tmp_path):
    family = make_family(SMALL)
    weights = family.initial()
    save_file(weights, tmp_path / "found.safetensors")
    second = make_family({**SMALL, "searched": str(tmp_path / "found.safetensors")})
    assert json.loads(second.genotype) == genotype_of(weights)
    assert make_family(second.spec()) == second  # nodes need no file
    assert not any(name.startswith(ALPHAS) for name in second.tensors(second.full()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"searched": "nowhere.safetensors"}, "there is no file nowhere.safetensors"),
        ({"channels": 3}, "an even number of channels"),
        ({"cells": 2}, "at least 3 cells"),
        ({"input_shape": [1, 3, 8]}, "from 4x4"),
        ({"genotype": "x"}, "must be JSON such as genotype_of returns, not 'x'"),
        ({"genotype": json.dumps(PUBLISHED)}, "normal must have 2 nodes"),
        ({"nodes": 1, "genotype": json.dumps({"normal": [[["conv", 0]]], "reduce": [[]]})}, "operations are max_pool"),
        ({"nodes": 1, "genotype": json.dumps({"normal": [[["skip_connect", 2]]], "reduce": [[]]})}, "has no input 2"),
    ],
)
def test_what_is_no_network_is_told(changes, words):
    with pytest.raises(ValueError, match=words):
        make_family({**SMALL, **changes})


def test_weights_of_something_else_are_told(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="are they those of a search"):
        make_family({**SMALL, "searched": str(tmp_path / "other.safetensors")})
    (tmp_path / "no.safetensors").write_text("no")
    with pytest.raises(ValueError, match="is no safetensors file"):
        make_family({**SMALL, "searched": str(tmp_path / "no.safetensors")})
