import torch

from tests.strategies.by_hand import CLASSIFIER, FC, Devices, OneHidden, engine_of, no_scores, setup
from wildflower.models.resnet import ResNet18
from wildflower.strategies.federated_dropout import FederatedDropout
from wildflower.strategies.params import Params


def received_channels(folder, rounds, seed=1):
    family = OneHidden()
    strategy = FederatedDropout(setup(folder, family, seed=seed), Params())
    seen = {}
    for number in rounds:
        strategy.weights[FC] = torch.arange(4.0).view(4, 1)
        strategy.weights[CLASSIFIER] = torch.arange(12.0).view(3, 4)
        devices = Devices(family, lambda order, w: w)
        engine_of(strategy, folder).run_round(devices.grid, number, no_scores)
        for device, weights in devices.received.items():
            channels = [int(value) for value in weights[FC].flatten()]
            assert weights[CLASSIFIER].tolist() == [[row * 4 + c for c in channels] for row in range(3)]
            seen[number, device] = channels
    return seen


def test_channels_follow_from_seed_round_and_device(tmp_path):
    first = received_channels(tmp_path, range(1, 9))
    assert first == received_channels(tmp_path, range(1, 9))
    assert {k: first[k] for k in [(7, 1), (7, 2)]} == {
        k: v
        for k, v in received_channels(tmp_path, [7]).items()
        if k[1]  # whatever rounds came before
    }
    assert received_channels(tmp_path, range(1, 9), seed=2) != first
    assert len({tuple(first[n, 1]) for n in range(1, 9)}) > 1  # another choice in another round
    assert any(first[n, 2][0] not in first[n, 1] for n in range(1, 9))  # and for another device
    assert all(first[n, 0] == [0, 1, 2, 3] for n in range(1, 9))
    assert all(channels == sorted(set(channels)) for channels in first.values())


def test_residuals_and_adjacent_layers_name_the_same_channels(tmp_path):
    strategy = FederatedDropout(setup(tmp_path, OneHidden()), Params())
    strategy.round = 5
    resnet = ResNet18(norm="static")
    half = resnet.width(0.5)
    placed = resnet.place(half, strategy.selection(1, half).select).coordinates
    stream = placed["stem.conv.weight"][0]
    assert len(stream) == 32
    assert sorted(stream.tolist()) != list(range(32))
    for name, dimension in {  # what is added to the stream of stage 1, normalizes it or reads it
        "stem.norm.weight": 0,
        "stage1_0.conv1.weight": 1,
        "stage1_0.conv2.weight": 0,
        "stage1_0.norm2.bias": 0,
        "stage1_1.conv1.weight": 1,
        "stage1_1.conv2.weight": 0,
        "stage2_0.conv1.weight": 1,
        "stage2_0.shortcut.conv.weight": 1,
    }.items():
        assert torch.equal(placed[name][dimension], stream), name
    inner = placed["stage1_0.conv1.weight"][0]
    assert torch.equal(placed["stage1_0.conv2.weight"][1], inner)
    assert torch.equal(placed["stage1_0.norm1.weight"][0], inner)
    assert not torch.equal(inner, stream)  # a group of its own
    assert torch.equal(placed["stage2_0.conv2.weight"][0], placed["stage2_0.shortcut.conv.weight"][0])
    assert torch.equal(placed["head.classifier.weight"][1], placed["stage4_1.conv2.weight"][0])
    assert placed["head.classifier.weight"][0] == slice(None)
