"""SPATL: what is salient, the average by index, and predictors that stay."""

from dataclasses import replace

import pytest
import torch

from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.halves import FAMILY, setup
from wildflower.messages.error import MessageError
from wildflower.models.family import make_family
from wildflower.strategies.channels import encoder_groups, encoder_of
from wildflower.strategies.method import Contribution, Group, Order, Trained
from wildflower.strategies.spatl import Spatl, SpatlParams

WHOLE = FAMILY.full()
CONV = "block1.conv.weight"


def spatl(**params):
    return Spatl(setup(), SpatlParams(**({"sparsity": 0.5} | params)))


def answer(method, value, control, first, device=0, examples=10, **wrong):
    """One device that returned half of the channels from `first` on, all of one value."""
    family, whole = method.family, method.architecture
    local = method.client_step(Order(device, whole))
    returned = local.returned(family, whole)
    group = Group(whole, method.selection(device, whole), {}, returned, family.place(whole))
    filled = {
        name: {e.name: torch.full(e.shape, number) for e in returned[name].layout.entries}
        for name, number in (("weights", value), ("control_change", control))
    }
    channels = {
        e.name: torch.arange(first, first + e.shape[0], dtype=torch.int32) for e in returned["channels"].layout.entries
    }
    filled["channels"] = channels | wrong
    method.absorb(Contribution(group, [device], [device], examples, {}, filled))


def finish(method, count):
    order = Order(0, WHOLE)
    return method.finish_round([Trained(replace(order, device=d), "tier", 10, None, {}) for d in range(count)])


def test_the_predictor_is_the_last_block():
    names = encoder_of(FAMILY, WHOLE)
    assert {name.partition(".")[0] for name in names} == {"block1", "block2"}
    groups = encoder_groups(FAMILY, FAMILY.width(0.5))
    assert {group: channels.kept for group, channels in groups.items()} == {"conv1": 3, "conv2": 8}
    assert spatl().weights.keys() == names.keys()


def test_coordinates_are_averaged_over_those_who_returned_them():
    """Device 0 returns channels 0 to 2 of six, device 1 channels 2 to 4: channel 2 is of both, 5 of nobody.

    30 examples say 0.6 and 10 say 1.0: 0.7 where both are. c changes by 1/4 of the sum of what they say, of four
    devices in all: 0.4 and 0.8.
    """
    method = spatl()
    method.weights = {name: torch.full_like(value, 0.2) for name, value in method.weights.items()}
    answer(method, 0.6, 0.4, first=0, device=0, examples=30)
    answer(method, 1.0, 0.8, first=2, device=1, examples=10)
    finish(method, 2)
    assert method.weights[CONV][:, 0, 0, 0].tolist() == pytest.approx([0.6, 0.6, 0.7, 1.0, 1.0, 0.2], abs=1e-6)
    assert method.control[CONV][:, 0, 0, 0].tolist() == pytest.approx([0.1, 0.1, 0.3, 0.2, 0.2, 0.0], abs=1e-6)


@pytest.mark.parametrize("channels", [[0, 0, 1], [2, 1, 0], [-1, 0, 1], [3, 4, 6]])
def test_channels_that_cannot_be_are_refused_and_change_nothing(channels):
    method = spatl()
    before = {name: value.clone() for name, value in method.weights.items()}
    with pytest.raises(MessageError, match="channels of conv1 must ascend within 0 to 5"):
        answer(method, 0.6, 0.4, first=0, conv1=torch.tensor(channels, dtype=torch.int32))
    finish(method, 1)
    assert all((method.weights[name] == value).all() for name, value in before.items())


def test_half_of_the_channels_are_about_a_quarter_of_the_bytes_up():
    """Of the second convolution, whose both sides are cut."""
    method = spatl()
    local = method.client_step(Order(0, WHOLE))
    shapes = {e.name: e.shape for e in local.returned(FAMILY, WHOLE)["weights"].layout.entries}
    assert shapes["block2.conv.weight"] == (8, 3, 5, 5)
    assert [e.name for e in local.sent(FAMILY, WHOLE)["weights"].layout.entries] == list(encoder_of(FAMILY, WHOLE))


def test_whole_rounds_train_encoder_and_predictors(tmp_path):
    keys = METHODS["spatl"] | {"evaluate-every": 1, "local-steps": 20}
    engine, scorer = started(small_config(tmp_path, **keys))
    first = {name: value.clone() for name, value in engine.method.weights.items()}
    grid = simulated_grid()
    records = [engine.run_round(grid, number, scorer).record for number in (1, 2)]
    assert records[1]["score"] is not None
    assert 0 < records[0]["metrics"]["untouched_share"] < 1
    assert records[0]["training_bytes_up"] < records[0]["training_bytes_down"]
    assert any((engine.method.weights[name] != value).any() for name, value in first.items())
    kept = [file.name for file in (tmp_path / "runs").rglob("predictor*.safetensors")]
    assert kept


def test_channels_of_a_squeeze_are_averaged_where_they_came_from():
    """A half of 72 channels inside is 36, and a quarter of that, in multiples of 8, is a squeeze of 16 of 24.

    The device names channels 5 to 20 of the squeeze, and of all other groups the first half.
    """
    family = make_family(
        {"name": "mobilenet-v3", "input_shape": [1, 28, 28], "kernel_sizes": [3], "depths": [2], "expand_ratios": [3]}
    )
    method = Spatl(replace(setup(), family=family), SpatlParams(sparsity=0.5))
    method.weights = {name: torch.full_like(value, 0.2) for name, value in method.weights.items()}
    answer(method, 0.6, 0.0, first=0, **{"stage2_0.squeeze": torch.arange(5, 21, dtype=torch.int32)})
    order = Order(0, method.architecture)
    method.finish_round([Trained(order, "tier", 10, None, {})])
    moved = {name: value > 0.4 for name, value in method.weights.items()}
    squeeze = torch.zeros(24, dtype=torch.bool)
    squeeze[5:21] = True
    inside = torch.arange(72) < 36
    assert torch.equal(moved["stage2_0.gate.fc1.bias"], squeeze)
    assert torch.equal(moved["stage2_0.gate.fc1.weight"][:, :, 0, 0], squeeze[:, None] & inside)
    assert torch.equal(moved["stage2_0.gate.fc2.weight"][:, :, 0, 0], inside[:, None] & squeeze)
    assert torch.equal(moved["stage2_0.gate.fc2.bias"], inside)


@pytest.mark.thorough
def test_gated_blocks_return_channels_of_their_squeezes_too(tmp_path):
    """Their number follows from that of the block's inside."""
    keys = METHODS["spatl"] | {
        "family": "mobilenet-v3",
        "family-arguments": "kernel_sizes = [3], depths = [2], expand_ratios = [3]",
    }
    engine, scorer = started(small_config(tmp_path, **keys))
    record = engine.run_round(simulated_grid(), 1, scorer).record
    assert record["devices_failed"] == 0
    assert 0 < record["metrics"]["untouched_share"] < 1


def test_a_share_below_what_a_device_keeps_is_read_as_one():
    with pytest.raises(ValueError, match="less than 1"):
        SpatlParams(sparsity=1.0)


def test_a_frozen_predictor_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"head.* is of the predictor, which is the device's own: freeze the encoder"):
        started(small_config(tmp_path, **METHODS["spatl"] | {"freeze": "head"}))
