import math
from dataclasses import replace

import pytest
import torch

from benchmarks.recipfl.recipfl_controls import ClassifierConditioned, OfClients
from wildflower.models.lenet import LeNet5
from wildflower.models.resnet import ResNet18
from wildflower.strategies.recipfl.graph import Node
from wildflower.strategies.recipfl.graph_hypernetwork import Hypernetwork, Request, ShapeParams
from wildflower.strategies.recipfl.network_graph import graph_of
from wildflower.strategies.recipfl.tensor_coders import (
    DIGEST,
    Decoder,
    ParameterEncoder,
    digest,
    digests,
    normalized,
    tiled,
    tiles_of,
)

torch.set_num_threads(1)

LENET = LeNet5(input_shape=(1, 8, 8), classes=4)
GRAPHS = [graph_of(LENET, LENET.width(rate)) for rate in (1.0, 0.5)]
SMALL = ShapeParams(hidden=16, decoder_hidden=12, tile=8)


def small(**changes):
    return ShapeParams(**SMALL.model_dump() | changes)


PUBLISHED = small(hypernetwork="published")


class OfThree(OfClients):
    clients = 3


def hypernetwork(shape=SMALL, graphs=GRAPHS, kind=Hypernetwork):
    torch.manual_seed(0)
    return kind(graphs, shape, classes=4)


def request(graph, client=0, mix=(0.25, 0.25, 0.25, 0.25), scale=1.0):
    generator = torch.Generator().manual_seed(client)
    weights = {node.tensor: scale * torch.randn(node.shape, generator=generator) for node in graph.tensors}
    return Request(graph, digests(graph, weights), client, torch.tensor(mix))


@pytest.mark.thorough
def test_it_generates_every_tensor_in_its_shape():
    found = hypernetwork()([request(graph) for graph in GRAPHS])
    for graph, tensors in zip(GRAPHS, found, strict=True):
        assert {name: tuple(value.shape) for name, value in tensors.items()} == {
            n.tensor: n.shape for n in graph.tensors
        }


@pytest.mark.parametrize(("shape", "kind"), [(SMALL, Hypernetwork), (PUBLISHED, Hypernetwork), (SMALL, OfThree)])
def test_many_clients_in_one_pass_get_what_each_gets_alone(shape, kind):
    network = hypernetwork(shape, kind=kind)
    requests = [
        request(GRAPHS[client % 2], client, (0.1 * client, 0.5, 0.1, 0.4 - 0.1 * client)) for client in range(3)
    ]
    together = network(requests)
    for one, found in zip(requests, together, strict=True):
        [alone] = network([one])
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [SMALL, PUBLISHED])
def test_a_sweep_by_levels_is_a_sweep_node_by_node(shape):
    """Against the definition: states change one node after another, in the order of computation and in reverse."""
    resnet = ResNet18(input_shape=(3, 8, 8), first_channels=2, classes=4)
    graph = graph_of(resnet, resnet.full())
    network = hypernetwork(shape, [graph])
    one = request(graph)
    states = network.operator(torch.tensor([network.operators.index(node.operator) for node in graph.nodes]))
    data = network._data(graph)
    rows = data.counts > 0
    read = torch.zeros_like(states)
    read[rows] = network.parameter(one.digests, data.counts[rows])
    if shape is PUBLISHED:
        sizes = torch.cat([table(data.sizes[:, i]) for i, table in enumerate(network.sizes)], dim=1)
        states = list(states + sizes + read)
    else:
        states = list(torch.cat([states, read], dim=1))
    far = graph.distances(50)
    for turned in (False, True) * shape.propagation_steps:
        edges = {(b, a) if turned else (a, b) for a, b in graph.edges}
        pairs = {((b, a) if turned else (a, b)): steps for (a, b), steps in far.items()}
        for node in sorted(range(len(graph.nodes)), reverse=turned):
            said = [network.message(states[start]) for start, end in edges if end == node]
            if shape is PUBLISHED:
                said += [network.far_message(states[s]) / steps for (s, end), steps in pairs.items() if end == node]
            received = torch.stack([torch.zeros_like(states[node]), *said]).sum(0)
            states[node] = network.gate(received[None], states[node][None])[0]
    expected = network.norm(torch.stack(states))
    torch.testing.assert_close(network._nodes([one]), expected, rtol=1e-4, atol=1e-5)


def test_every_node_goes_through_the_gated_unit_by_hand():
    """Eq. 7 for all nodes: a unit of zeros keeps half of a state (z = 1/2, n = 0), in each of the two sweeps.

    States begin with 1: what the operator is says 1, its shape 0, and its weight 0, for the encoder's norm comes last.
    """
    network = hypernetwork(PUBLISHED)
    with torch.no_grad():
        network.operator.weight.fill_(1.0)
        zeros = (network.sizes, network.gate, network.parameter.norm)
        for parameter in (parameter for part in zeros for parameter in part.parameters()):
            parameter.zero_()
    network.norm = torch.nn.Identity()
    states = network._nodes([request(GRAPHS[0])])
    assert torch.equal(states, torch.full_like(states, 0.25))
    network.shape = small(hypernetwork="published", propagation_steps=3)
    assert torch.equal(network._nodes([request(GRAPHS[0])]), torch.full_like(states, 0.25**3))


def test_messages_are_never_negative():
    network = hypernetwork(PUBLISHED)
    with torch.no_grad():
        for message in (network.message, network.far_message):
            message[0].weight.fill_(1.0)
            message[0].bias.fill_(1.0)
            message[2].weight[:] = torch.tensor([1.0, -1.0] * 8)[:, None]
            message[2].bias.zero_()
            # Of 16 ones each of the 8 hidden units makes 17; each output adds them up or takes them away.
            assert message(torch.ones(1, 16)).tolist() == [[8 * 17.0, 0.0] * 8]


def test_what_is_read_of_a_weight_is_normalized_last():
    torch.manual_seed(0)
    encoder = ParameterEncoder(16)
    with torch.no_grad():
        encoder.norm.weight.fill_(2.0)
        encoder.norm.bias.fill_(3.0)
    # One value each, so that the mean over values is the value's own vector: of mean 3 and standard deviation 2.
    found = encoder(torch.randn(2, DIGEST), torch.tensor([1, 1]))
    assert found.mean(1).tolist() == pytest.approx([3.0, 3.0], abs=1e-5)
    assert found.std(1, unbiased=False).tolist() == pytest.approx([2.0, 2.0], rel=1e-3)


def test_as_printed_a_state_begins_with_what_a_node_is_beside_its_weight():
    """By hand: what a node is says 1 in each of 8 numbers, its weight 2 in the other 8, and a step without weight 0.

    A unit of zeros keeps half of a state in each of the two sweeps, and no norm comes before the decoders.
    """
    network, graph = hypernetwork(), GRAPHS[0]
    with torch.no_grad():
        network.operator.weight.fill_(1.0)
        for parameter in (*network.gate.parameters(), *network.parameter.norm.parameters()):
            parameter.zero_()
        network.parameter.norm.bias.fill_(2.0)
    states = network._nodes([request(graph)])
    assert torch.equal(states[:, :8], torch.full_like(states[:, :8], 0.25))
    expected = [0.5 if node.tensor else 0.0 for node in graph.nodes]
    assert states[:, 8:].tolist() == [[value] * 8 for value in expected]


def test_as_printed_a_decoder_reads_the_distribution_itself():
    """Eq. 8: decoders read [h, a], of which h is 0 here, and a the shares of the four classes."""
    network = hypernetwork()
    decoder = network.decoders["conv bias"]
    assert decoder.layers[0].in_features == 16 + 4
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        decoder.layers[0].weight[0, 16:] = torch.tensor([1.0, 10.0, 100.0, 1000.0])
        decoder.layers[2].weight[:, 0] = 1.0
    [found] = network([request(GRAPHS[0], mix=(0.125, 0.25, 0.5, 0.125))])
    expected = math.tanh((0.125 + 2.5 + 50 + 125) / 5)
    name = next(node.tensor for node in GRAPHS[0].nodes if node.operator == "conv bias")
    assert found[name].tolist() == pytest.approx([expected] * len(found[name]))


def differing(network, first, second):
    [one], [other] = network([first]), network([second])
    return {name for name in one if not torch.equal(one[name], other[name])}


def test_what_the_descriptor_reaches():
    graph = GRAPHS[0]
    first, second = request(graph), request(graph, mix=(1.0, 0.0, 0.0, 0.0))
    everything = {node.tensor for node in graph.tensors}
    classifier = {"head.classifier.weight", "head.classifier.bias"}
    assert differing(hypernetwork(), first, second) == everything
    assert differing(hypernetwork(kind=ClassifierConditioned), first, second) == classifier
    # A learned vector per client reads no distribution, and knows its client.
    learned = hypernetwork(kind=OfThree)
    assert differing(learned, first, second) == set()
    assert differing(learned, first, replace(first, client=2)) == everything


def test_current_parameters_reach_everything():
    graph = GRAPHS[0]
    assert differing(hypernetwork(), request(graph), request(graph, scale=2.0)) == {n.tensor for n in graph.tensors}


def test_an_operator_without_decoder_is_left_out():
    resnet = ResNet18(input_shape=(3, 8, 8), first_channels=2, classes=4)
    graph = graph_of(resnet, resnet.full())
    [found] = hypernetwork(graphs=[graph])([request(GRAPHS[0])])
    # ResNets have no linear layer but the classifier, and no biases of convolutions.
    assert set(found) == {
        *{f"block{n}.{what}" for n in (1, 2) for what in ("conv.weight", "norm.weight")},
        *{"head.classifier.weight", "head.classifier.bias"},
    }


def test_a_digest_keeps_short_tensors_and_averages_long_ones():
    short = torch.arange(1.0, 7.0).reshape(2, 3)
    assert digest(short)[:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert digest(short)[6:].eq(0).all()
    long = torch.arange(float(2 * DIGEST + 5))  # stretches of 2, the last 5 dropped
    assert digest(long).tolist() == [2 * n + 0.5 for n in range(DIGEST)]


def test_padding_plays_no_part():
    torch.manual_seed(0)
    encoder = ParameterEncoder(16)
    values = torch.randn(2, DIGEST)
    changed = values.clone()
    changed[0, 3:] = 9.0
    counts = torch.tensor([3, DIGEST])
    torch.testing.assert_close(encoder(values, counts), encoder(changed, counts))
    alone = encoder(values[:1], counts[:1])
    torch.testing.assert_close(encoder(values, counts)[:1], alone)


def test_tiles_are_cut_or_repeated():
    tile = torch.arange(6.0).reshape(2, 3)
    assert tiled(tile, (1, 2)).tolist() == [[0, 1]]
    assert tiled(tile, (3, 4)).tolist() == [[0, 1, 2, 0], [3, 4, 5, 3], [0, 1, 2, 0]]
    assert tiled(torch.tensor(2.0), ()).tolist() == 2  # of a learned temperature


def test_behind_a_flatten_whole_channels_repeat():
    """Two channels of three positions fit a tile of eight inputs; its rest belongs to no whole channel."""
    tile = torch.arange(8.0)[None]
    assert tiled(tile, (1, 15), 3).tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2]]
    assert tiled(tile, (1, 6), 3).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_tile_counts_channels_and_not_their_positions():
    """LeNet's 16 channels of 16 positions: a tile of 4 channels repeats four times, one of 16 not at all."""
    lenet = LeNet5()
    graph = graph_of(lenet, lenet.full())
    assert {node.tensor: node.positions for node in graph.tensors if node.positions > 1} == {"head.fc1.weight": 16}
    network = hypernetwork(small(tile=4), [graph])
    assert network.decoders["linear weight"].tile == (4, 64)
    [found] = network([request(graph)])
    weight = found["head.fc1.weight"].reshape(120, 16, 16)
    assert torch.equal(weight[:, :4], weight[:, 4:8])
    assert torch.equal(weight[:4], weight[4:8])
    assert not torch.equal(weight[:, :, :4], weight[:, :, 4:8])
    assert hypernetwork(small(tile=16), [graph]).decoders["linear weight"].tile == (16, 256)


def test_tiles_are_bounded_but_for_classes():
    network = hypernetwork()
    assert network.decoders["linear weight"].tile == (8, 32)  # four positions of each channel behind the flatten
    assert network.decoders["conv weight"].tile == (8, 6, 5, 5)
    assert network.decoders["classifier weight"].tile == (4, 8)
    assert network.decoders["linear bias"].tile == (120,)
    full = hypernetwork(small(tile=0))
    assert full.decoders["linear weight"].tile == (120, 120)  # the largest sides of (120, 64) and (84, 120)


def test_normalization_by_hand():
    ones = torch.ones(8, 4, 3, 3)
    assert normalized(ones, "conv weight").flatten()[0].item() == pytest.approx(math.sqrt(2 / 36))
    assert normalized(ones[:, :1], "conv weight").flatten()[0].item() == pytest.approx(math.sqrt(1 / 9))
    assert normalized(torch.ones(5, 10), "linear weight")[0, 0].item() == pytest.approx(math.sqrt(0.2))
    assert normalized(torch.zeros(3), "norm weight").tolist() == [1.0] * 3
    assert normalized(torch.ones(3), "conv bias").tolist() == pytest.approx([math.tanh(0.2)] * 3)


@pytest.mark.parametrize("kind", [Hypernetwork, OfThree])
@pytest.mark.parametrize("version", ["printed", "published"])
@pytest.mark.parametrize("steps", [1, 3])
def test_first_weights_are_as_large_as_those_of_a_usual_initialization(steps, version, kind):
    network = hypernetwork(ShapeParams(hypernetwork=version, propagation_steps=steps), kind=kind)
    [found] = network([request(GRAPHS[0])])
    for name in ("block2.conv.weight", "head.fc1.weight", "head.classifier.weight"):
        he = math.sqrt(2 / found[name][0].numel())
        assert 0.4 * he < found[name].std() < 2 * he


def test_a_decoder_makes_only_what_some_tensor_has_of_it():
    torch.manual_seed(0)
    decoder = Decoder(3, 4, {(2, 6), (6, 2)})
    assert decoder.layers[2].out_features == 2 * 6 + 6 * 2 - 2 * 2
    states = torch.rand(5, 3)
    tile = decoder(states)
    assert tile.shape == (5, 6, 6)
    assert torch.equal(torch.cat([tile[:, :2].flatten(1), tile[:, 2:, :2].flatten(1)], dim=1), decoder.layers(states))
    assert tile[:, 2:, 2:].eq(0).all()
    assert Decoder(3, 4, {(2, 6), (6, 6)}).layers[2].out_features == 36


def test_what_a_tensor_has_of_a_tile_is_not_0():
    """Also where channels are bounded, and tensors behind a flatten have more inputs."""
    nodes = [Node("linear weight", "a", (4, 32), positions=8), Node("linear weight", "b", (16, 20))]
    decoder = Decoder(3, 4, tiles_of("linear weight", nodes, 4))
    assert decoder.tile == (4, 32)
    nodes.append(Node("linear weight", "c", (3, 64), positions=16))
    nodes[0] = Node("linear weight", "a", (2, 32), positions=8)
    decoder = Decoder(3, 4, tiles_of("linear weight", nodes, 4))
    tile = decoder(torch.rand(1, 3))[0]
    for node in nodes:
        assert tiled(tile, node.shape, node.positions).ne(0).all()
