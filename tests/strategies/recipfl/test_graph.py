from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.encoders import encoder
from wildflower.models.densenet import DenseNet121
from wildflower.models.family import make_family
from wildflower.models.lenet import LeNet5
from wildflower.models.operators import Operator
from wildflower.models.resnet import ResNet18
from wildflower.models.vgg import Vgg
from wildflower.models.vit import VitTiny
from wildflower.strategies.recipfl.graph import Graph, Node
from wildflower.strategies.recipfl.network_graph import GraphError, _scale, graph_of

# input -> a -> b -> sum, and a -> sum; the sum goes to the output.
DIAMOND = Graph(tuple(map(Node, ("input", "a", "b", "sum", "output"))), ((0, 1), (1, 2), (2, 3), (1, 3), (3, 4)))


def test_levels_are_the_longest_paths():
    assert DIAMOND.levels(backward=False) == (0, 1, 2, 3, 4)
    assert DIAMOND.levels(backward=True) == (4, 3, 2, 1, 0)


def test_distances_are_the_shortest_paths():
    assert DIAMOND.distances(2) == {
        **{(0, 1): 1, (0, 2): 2, (0, 3): 2, (1, 2): 1},
        **{(1, 3): 1, (1, 4): 2, (2, 3): 1, (2, 4): 2, (3, 4): 1},
    }
    assert DIAMOND.distances(50)[0, 4] == 3


def test_lenet():
    family = LeNet5()
    graph = graph_of(family, family.full())
    convolution = ["conv weight", "conv bias", "norm weight", "relu", "average pool"]
    hidden = ["linear weight", "linear bias", "relu"]
    classifier = ["classifier weight", "classifier bias"]
    expected = ["input", *convolution, *convolution, "flatten", *hidden, *hidden, *classifier, "output"]
    assert [node.operator for node in graph.nodes] == expected
    assert graph.edges == tuple((n, n + 1) for n in range(len(expected) - 1))
    assert graph.nodes[6] == Node("conv weight", "block2.conv.weight", (16, 6, 5, 5))


def test_residual_blocks_add_up_both_paths():
    family = ResNet18(input_shape=(3, 8, 8), first_channels=2)
    graph = graph_of(family, family.full())
    names = [node.tensor or node.operator for node in graph.nodes]
    first_sum, third_sum = [n for n, name in enumerate(names) if name == "sum"][0:3:2]
    before = [names[start] for start, end in graph.edges if end == first_sum]
    assert before == ["stage1_0.norm2.weight", "relu"]  # the identity is the stem's result
    before = [names[start] for start, end in graph.edges if end == third_sum]
    assert before == ["stage2_0.norm2.weight", "stage2_0.shortcut.norm.weight"]
    assert names.count("sum") == 8


@pytest.mark.parametrize(
    "family",
    [
        LeNet5(exits=(1, 2)),
        Vgg(input_shape=(1, 8, 8), block_channels=(2, 3)),
        Vgg(input_shape=(1, 8), block_channels=(2, 3), exits=(0, 1)),
        ResNet18(input_shape=(3, 8, 8), first_channels=2, norm="static", scaler=True, activation="relu6"),
        ResNet18(input_shape=(3, 8, 8), first_channels=2, depth=1),
        ResNet18(input_shape=(3, 8, 8), first_channels=2, preactivation=True),
        DenseNet121(input_shape=(3, 8, 8), growth=2),
        make_family(
            {
                "name": "choice",
                "input_shape": [1, 8, 8],
                "members": {"large": {"name": "cnn3"}, "small": {"name": "lenet5"}},
            }
        ),
    ],
    ids=lambda family: family.name,
)
def test_nodes_hold_every_tensor_but_the_norms_biases_and_statistics(family):
    graph = graph_of(family, family.full())
    tensors = {node.tensor: node.shape for node in graph.tensors}
    specs = {name: spec.shape for name, spec in family.tensors(family.full()).items()}
    norms = [
        f"{name}." for name, module in family.build(family.full()).named_modules() if "Norm" in type(module).__name__
    ]
    kept = {name for name in specs if name.startswith(tuple(norms)) and not name.endswith(".weight")}
    assert tensors == {name: shape for name, shape in specs.items() if name not in kept}
    # Every node follows from the input, and leads to an output.
    ends = {end for _, end in graph.edges}
    assert ends == set(range(1, len(graph.nodes)))
    starts = {start for start, _ in graph.edges}
    assert {graph.nodes[n].operator for n in range(len(graph.nodes)) if n not in starts} == {"output"}
    assert all(start < end for start, end in graph.edges)


# An encoder of two layers with adapters, of which the smaller one has the first.
SIZES = {"adapter": 2, "depth": 2, "depths": [1, 2], "pad_id": 0, "freeze": ["embeddings", "encoder"]}
ENCODER = encoder(**SIZES)
OUT, MLP = "encoder.layer.0.attention.output.dense.adapter", "encoder.layer.0.output.dense.adapter"
# Every node of the smaller one, with those before it.
BY_HAND = [
    ("input", []),
    ("ne", [0]),  # which tokens are no padding
    ("embedding", [0]),  # of words; those of types and positions are frozen and follow from nothing
    ("add", [2]),
    ("add", [3]),
    ("norm", [4]),
    ("index", [1]),  # the mask of every pair of tokens
    ("and", [6]),
    ("linear", [5]),  # query, key and value
    ("linear", [5]),
    ("linear", [5]),
    ("scaled_dot_product_attention", [7, 8, 9, 10]),
    ("linear", [11]),
    (("linear weight", f"{OUT}.down.weight", (2, 16)), [12]),
    (("linear bias", f"{OUT}.down.bias", (2,)), [13]),
    ("gelu", [14]),
    (("linear weight", f"{OUT}.up.weight", (16, 2)), [15]),
    (("linear bias", f"{OUT}.up.bias", (16,)), [16]),
    ("add", [12, 17]),
    ("add", [5, 18]),
    ("norm", [19]),
    ("linear", [20]),
    ("gelu", [21]),
    ("linear", [22]),
    (("linear weight", f"{MLP}.down.weight", (2, 16)), [23]),
    (("linear bias", f"{MLP}.down.bias", (2,)), [24]),
    ("gelu", [25]),
    (("linear weight", f"{MLP}.up.weight", (16, 2)), [26]),
    (("linear bias", f"{MLP}.up.bias", (16,)), [27]),
    ("add", [23, 28]),
    ("add", [20, 29]),
    ("norm", [30]),
    ("ne", [0]),
    ("mul", [31, 32]),  # the mean over tokens
    ("sum", [33]),
    ("sum", [32]),
    ("clamp", [35]),
    ("div", [34, 36]),
    (("classifier weight", "classifier.out_proj.weight", (3, 16)), [37]),
    (("classifier bias", "classifier.out_proj.bias", (3,)), [38]),
    ("output", [39]),
]


@pytest.mark.thorough
def test_an_encoder_with_adapters_by_hand():
    family = make_family(ENCODER)
    graph = graph_of(family, family.smallest())
    assert [replace(node, scale=1.0) for node in graph.nodes] == [
        Node(what) if isinstance(what, str) else Node(*what) for what, _ in BY_HAND
    ]
    assert set(graph.edges) == {(before, end) for end, (_, befores) in enumerate(BY_HAND) for before in befores}
    # The larger one has the second layer between the first and the mean.
    larger = graph_of(family, family.full())
    assert [node.tensor or node.operator for node in larger.nodes[:32]] == [
        n.tensor or n.operator for n in graph.nodes[:32]
    ]
    assert [node.operator for node in larger.nodes[32:56]] == [node.operator for node in graph.nodes[8:32]]
    assert [node.operator for node in larger.nodes[56:]] == [node.operator for node in graph.nodes[32:]]
    # What travels is what has a node.
    travels = {name for name, spec in family.tensors(family.full()).items() if not spec.frozen}
    assert {node.tensor for node in larger.tensors} == travels


def test_values_of_a_module_begin_as_widely_spread_as_it_draws_them():
    family = make_family(encoder(**SIZES | {"hidden": 384, "adapter": 32, "heads": 12}))
    scales = {node.tensor: node.scale for node in graph_of(family, family.smallest()).tensors}
    # Adapters have a standard deviation of 0.01, heads one of 0.02, Kaiming's is sqrt(2 / fan in).
    assert scales[f"{OUT}.down.weight"] == scales[f"{OUT}.down.bias"] == pytest.approx(0.01 * 192**0.5, rel=0.05)
    assert scales[f"{OUT}.up.weight"] == scales[f"{OUT}.up.bias"] == pytest.approx(0.01 * 16**0.5, rel=0.05)
    assert scales["classifier.out_proj.weight"] == pytest.approx(0.02 * 192**0.5, rel=0.1)


def test_the_spread_of_a_single_weight_is_1():
    weights = {"one.weight": torch.ones(1, 1), "zero.weight": torch.zeros(3, 2)}
    assert [_scale(Operator("linear", (0,), (name,)), weights) for name in weights] == [1.0, 1.0]


def test_layers_that_are_not_known_are_followed_by_the_functions_that_they_call():
    family = VitTiny(input_shape=(3, 8, 8), depth=1)
    graph = graph_of(family, family.full())
    norms = {"block0_attention.norm.bias", "block0_mlp.norm.bias", "head.norm.bias"}
    assert {node.tensor for node in graph.tensors} == set(family.tensors(family.full())) - norms
    assert graph.nodes[3] == Node("add weight of 2", "embedding.positions.weight", (4, 192), scale=graph.nodes[3].scale)


def test_what_is_frozen_has_no_tensor():
    family = make_family({"name": "lenet5", "freeze": ["block1", "head.fc1"]})
    whole, frozen = graph_of(LeNet5(), family.full()), graph_of(family, family.full())
    assert [n.tensor for n in frozen.tensors] == [n.tensor for n in whole.tensors if not family.is_frozen(n.tensor)]
    assert [node.operator for node in frozen.nodes][:5] == ["input", "conv", "norm", "relu", "average pool"]
    assert all((n, n + 1) in frozen.edges for n in range(len(frozen.nodes) - 1))


class ByValue(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(4, classes)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def by_value(classes):
    return ByValue(classes)


class Unusual(nn.Module):
    """Norms of one and of two dimensions, a layer that is called twice, and a gain."""

    def __init__(self, classes):
        super().__init__()
        self.wide, self.norm = nn.LayerNorm((2, 4)), nn.LayerNorm(4)
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        x = self.layer(self.layer(self.norm(self.wide(x)))) * self.gain
        return self.head(x.mean(1))


def unusual(classes):
    return Unusual(classes)


def test_tensors_of_one_operator_have_one_number_of_dimensions_and_a_shared_one_is_one_node():
    family = make_family({"name": f"{__name__}:unusual", "input_shape": [2, 4], "classes": 3, "levels": [{}]})
    graph = graph_of(family, family.full())
    assert [(node.operator, node.tensor) for node in graph.nodes] == [
        ("input", ""),
        ("norm weight of 2", "wide.weight"),
        ("norm weight", "norm.weight"),
        ("linear weight", "layer.weight"),
        ("linear bias", "layer.bias"),
        ("linear", ""),
        ("mul gain of 1", "gain"),
        ("mean", ""),
        ("classifier weight", "head.weight"),
        ("classifier bias", "head.bias"),
        ("output", ""),
    ]
    assert graph.edges == tuple((n, n + 1) for n in range(10))


def test_why_there_is_no_graph_is_said():
    family = make_family({"name": f"{__name__}:by_value", "input_shape": [4], "classes": 3, "levels": [{}]})
    with pytest.raises(GraphError, match=r"no graph can be made of .*: it cannot be run on tensors without memory: "):
        graph_of(family, family.full())
    frozen = make_family({**ENCODER, "freeze": ["embeddings", "encoder", "classifier", f"{OUT}", f"{MLP}"]})
    with pytest.raises(GraphError, match="nothing is left that could be generated; freeze = embeddings, encoder"):
        graph_of(frozen, frozen.smallest())


def test_graphs_of_equal_architectures_are_one():
    torch.manual_seed(0)
    family = LeNet5()
    assert graph_of(family, family.width(0.5)) is graph_of(LeNet5(), LeNet5().width(0.5))
