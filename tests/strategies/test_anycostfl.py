"""AnycostFL: which channels devices train, and how they are averaged."""

import pytest
import torch

from tests.strategies.by_hand import (
    CLASSIFIER,
    CLASSIFIER_BIAS,
    FC,
    FC_BIAS,
    Devices,
    OneHidden,
    engine_of,
    filled,
    no_scores,
    setup,
)
from wildflower.models.family import make_family
from wildflower.models.resnet import ResNet18
from wildflower.models.vit import VitTiny
from wildflower.strategies.anycostfl import AnycostFL
from wildflower.strategies.channels import channel_norms, strongest
from wildflower.strategies.method import Training, client_step_of
from wildflower.strategies.params import Params
from wildflower.strategies.submodel import initial_weights


def make(folder):
    """Rows of norm 3, 1, 1/2 and 2: the order of strength is 0, 3, 1, 2, whatever biases and later layers hold."""
    strategy = AnycostFL(setup(folder, OneHidden()), Params())
    strategy.weights[FC] = torch.tensor([[3.0], [-1.0], [0.5], [-2.0]])
    strategy.weights[FC_BIAS] = torch.tensor([0.0, 0.0, 100.0, 0.0])
    strategy.weights[CLASSIFIER] = torch.tensor([[1.0, 2.0, 300.0, 4.0]] * 3)
    return strategy


def test_devices_get_the_channels_whose_filters_are_strongest(tmp_path):
    strategy = make(tmp_path)
    devices = Devices(OneHidden(), lambda order, w: w)
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    assert {d: w[FC].flatten().tolist() for d, w in devices.received.items()} == {
        0: [3.0, -1.0, 0.5, -2.0],
        1: [3.0, -2.0],
        2: [3.0],
    }
    assert devices.received[1][FC_BIAS].tolist() == [0, 0]
    assert devices.received[1][CLASSIFIER].tolist() == [[1, 4]] * 3
    assert {client_step_of(order.client_step) for order in devices.orders.values()} == {Training(weighting="examples")}


def test_every_coordinate_is_the_mean_over_its_owners_by_examples(tmp_path):
    # Answers 1, 3 and 8 of devices with 1, 1 and 2 examples. Channel 0 is everybody's: (1 + 3 + 16) / 4 = 5. Channel 3
    # is that of devices 0 and 1: 2. Channels 1 and 2 are device 0's.
    strategy = make(tmp_path)
    values = {0: 1.0, 1: 3.0, 2: 8.0}
    devices = Devices(OneHidden(), lambda order, w: filled(w, values[order.device]), examples={0: 1, 1: 1, 2: 2})
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    assert strategy.weights[FC].flatten().tolist() == [5, 1, 1, 2]
    assert strategy.weights[FC_BIAS].tolist() == [5, 1, 1, 2]
    assert strategy.weights[CLASSIFIER].tolist() == [[5, 1, 1, 2]] * 3
    assert strategy.weights[CLASSIFIER_BIAS].tolist() == [5, 5, 5]


def test_what_nobody_trained_keeps_its_value(tmp_path):
    strategy = make(tmp_path)
    strategy.assign = lambda device, budget, give=strategy.assign: give(device, budget) if device == 1 else None
    devices = Devices(OneHidden(), lambda order, w: filled(w, 9.0))
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    assert strategy.weights[FC].flatten().tolist() == [9, -1, 0.5, 9]
    assert strategy.weights[FC_BIAS].tolist() == [9, 0, 100, 9]


def test_the_next_round_and_the_score_follow_the_new_weights(tmp_path):
    strategy = make(tmp_path)
    half = strategy.candidates[1]
    strategy.assign = lambda device, budget: half if device == 1 else None
    # The two strongest, 0 and 3, come back as 0.1 each: now 1 and 2 are.
    devices = Devices(OneHidden(), lambda order, w: filled(w, 0.1))
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    scored = strategy.family.place(half, strategy.scored_selection(half).select).gather(strategy.weights)
    assert scored[FC].flatten().tolist() == [-1, 0.5]
    engine_of(strategy, tmp_path).run_round(devices.grid, 2, no_scores)
    assert devices.received[1][FC].flatten().tolist() == [-1, 0.5]


def test_all_devices_of_a_round_share_one_selection(tmp_path):
    strategy = make(tmp_path)
    half, quarter = strategy.candidates[1:]
    assert strategy.selection(0, half) == strategy.selection(1, half) == strategy.selection(2, quarter)
    assert hash(strategy.selection(0, half)) == hash(strategy.selection(1, half))


def test_restored_weights_bring_their_own_selection(tmp_path):
    strategy, other = make(tmp_path), make(tmp_path)
    other.weights[FC] = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert strategy.selection(0, strategy.candidates[1]).select("hidden", 4, 2).tolist() == [0, 3]
    strategy.load(other.state())
    assert strategy.selection(0, strategy.candidates[1]).select("hidden", 4, 2).tolist() == [2, 3]


def test_of_equal_channels_the_first_are_taken_in_ascending_order():
    select = strongest({"a": torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])})
    assert select("a", 5, 1).tolist() == [1]
    assert select("a", 5, 3).tolist() == [0, 1, 3]
    assert select("a", 5, 4).tolist() == [0, 1, 2, 3]
    assert select("a", 5, 5) == slice(0, 5)


def test_a_residual_stream_has_one_order_from_all_layers_that_add_to_it():
    family = ResNet18(norm="static")
    weights = initial_weights(family, 1)
    norms = channel_norms(family, weights)
    assert {group: len(norm) for group, norm in norms.items()} == dict(family.groups)
    writers = ["stem.conv", "stage1_0.conv2", "stage1_1.conv2"]
    squares = sum(weights[f"{name}.weight"].double().square().sum(dim=(1, 2, 3)) for name in writers)
    assert torch.allclose(norms["stage1.stream"], squares.sqrt())
    projected = ["stage2_0.conv2", "stage2_0.shortcut.conv", "stage2_1.conv2"]
    squares = sum(weights[f"{name}.weight"].double().square().sum(dim=(1, 2, 3)) for name in projected)
    assert torch.allclose(norms["stage2.stream"], squares.sqrt())

    placed = family.place(family.width(0.5), strongest(norms)).coordinates
    stream = placed["stem.conv.weight"][0]
    assert torch.equal(stream, norms["stage1.stream"].topk(32).indices.sort().values)
    for name, dimension in {
        "stem.norm.weight": 0,
        "stage1_0.conv1.weight": 1,
        "stage1_0.conv2.weight": 0,
        "stage1_1.norm2.bias": 0,
        "stage2_0.conv1.weight": 1,
        "stage2_0.shortcut.conv.weight": 1,
    }.items():
        assert torch.equal(placed[name][dimension], stream), name


def test_squeezes_have_a_norm_although_their_size_follows_from_the_block():
    """Of a block of MobileNetV3 that is cut to half of its inside a quarter of that half is squeezed."""
    family = make_family({"name": "mobilenet-v3", "input_shape": [1, 28, 28], "depths": [2], "kernel_sizes": [3]})
    weights = initial_weights(family, 1)
    norms = channel_norms(family, weights)
    filters = weights["stage2_0.gate.fc1.weight"].double()
    assert torch.allclose(norms["stage2_0.squeeze"], filters.flatten(1).norm(dim=1))

    half = family.width(0.5)
    placed = family.place(half, strongest(norms)).coordinates
    kept = family.tensors(half)["stage2_0.gate.fc1.weight"].shape[0]
    strong = norms["stage2_0.squeeze"].topk(kept).indices.sort().values
    assert torch.equal(placed["stage2_0.gate.fc1.weight"][0], strong)
    assert torch.equal(placed["stage2_0.gate.fc2.weight"][1], strong)


def test_a_heads_norm_is_that_of_all_rows_of_its_queries_keys_and_values():
    family = VitTiny(input_shape=(1, 8, 8), hidden=12, depth=1, heads=3, mlp=8)
    weights = initial_weights(family, 1)
    [group] = [group for group, size in family.groups.items() if size == 3]
    rows = torch.cat(
        [
            v.double().view(3, -1)
            for n, v in weights.items()
            if n.endswith(("query.weight", "key.weight", "value.weight"))
        ],
        dim=1,
    )
    assert rows.shape == (3, 3 * 4 * 12)
    assert torch.allclose(channel_norms(family, weights)[group], rows.norm(dim=1))


def test_channels_that_no_filters_make_have_no_norm():
    class Odd(OneHidden):
        @property
        def groups(self):
            return {"hidden": 4, "other": 2}

    family = Odd()
    with pytest.raises(ValueError, match="those of one-hidden that are called other are made by none"):
        channel_norms(family, initial_weights(family, 1))


def test_channels_of_several_networks_have_no_order():
    members = {"a": {"name": "cnn3"}, "b": {"name": "lenet5"}}
    family = make_family({"name": "choice", "input_shape": [1, 8, 8], "members": members})
    with pytest.raises(ValueError, match="choice is a choice among several: take one of its members"):
        channel_norms(family, initial_weights(family, 1))
