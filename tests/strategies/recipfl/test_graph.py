import pytest
import torch

from models.densenet import DenseNet121
from models.family import make_family
from models.lenet import LeNet5
from models.resnet import ResNet18
from models.vgg import Vgg
from models.vit import VitTiny
from strategies.recipfl.graph import Graph, GraphError, Node, graph_of

# input -> a -> b -> sum, and a -> sum; the sum goes to the output.
DIAMOND = Graph(tuple(map(Node, ("input", "a", "b", "sum", "output"))), ((0, 1), (1, 2), (2, 3), (1, 3), (3, 4)))


def test_levels_are_the_longest_paths():
    assert DIAMOND.forward_levels == (0, 1, 2, 3, 4)
    assert DIAMOND.backward_levels == (4, 3, 2, 1, 0)


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


def test_an_operator_that_is_not_known_is_named():
    family = VitTiny(input_shape=(3, 8, 8), depth=1)
    with pytest.raises(
        GraphError, match=r"vit-tiny: its block '.*' has the operator Patches; those that are known are"
    ):
        graph_of(family, family.full())


def test_graphs_of_equal_architectures_are_one():
    torch.manual_seed(0)
    family = LeNet5()
    assert graph_of(family, family.width(0.5)) is graph_of(LeNet5(), LeNet5().width(0.5))
