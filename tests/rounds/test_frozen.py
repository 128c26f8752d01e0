"""Frozen tensors are known one by one: what a device holds of one sub-model is not sent again for another."""

import json
import math
from dataclasses import replace

import pytest
import torch

from client_app.state import DeviceState
from messages.error import MessageError
from messages.frozen import read_part
from messages.parcels import frozen_layout
from models.family import make_family
from rounds.frozen import Frozen, Owed
from strategies.method import LEADING

SPEC = {
    **{"name": "encoder", "input_shape": [9], "classes": 2, "vocabulary": 40, "hidden": 16, "depth": 3, "heads": 4},
    **{"mlp": 20, "positions": 16, "depths": [1, 2, 3], "freeze": ["embeddings", "encoder"]},
}
FAMILY = make_family(SPEC)
ONE, TWO, THREE = reversed(FAMILY.candidates([1]))


def drawn():
    """Frozen weights of which no two tensors are equal."""
    generator = torch.Generator().manual_seed(4)
    full = FAMILY.tensors(FAMILY.full())
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in full.items() if spec.frozen}


def frozen_specs(arch):
    return {name: spec for name, spec in FAMILY.tensors(arch).items() if spec.frozen}


def nbytes(specs):
    return sum(4 * math.prod(spec.shape) for spec in specs.values())


def test_a_device_is_sent_the_layers_that_it_lacks():
    frozen = Frozen(FAMILY, drawn())
    first = frozen_specs(ONE)
    assert frozen.owed(0, ONE, LEADING).nbytes == nbytes(first) + 33 * len(first)
    frozen.has(0, frozen.name(ONE, LEADING))
    assert frozen.owed(0, ONE, LEADING) == Owed(frozen.name(ONE, LEADING))
    every = frozen_specs(THREE)
    more = {name: spec for name, spec in every.items() if name.startswith(("encoder.layer.1.", "encoder.layer.2."))}
    assert len(every) == len(first) + len(more)
    owed = frozen.owed(0, THREE, LEADING)
    assert owed.nbytes == nbytes(more) + 33 * len(every)
    assert [list(every)[place] for place in owed.places] == list(more)
    # A cut of what it holds is a list of hashes alone; another device is sent all.
    frozen.has(0, owed.name)
    assert frozen.owed(0, TWO, LEADING).nbytes == 33 * len(frozen_specs(TWO))
    assert frozen.owed(1, THREE, LEADING).nbytes == nbytes(every) + 33 * len(every)
    frozen.lost(0)
    assert frozen.owed(0, ONE, LEADING).nbytes == nbytes(first) + 33 * len(first)


def test_equal_tensors_travel_once():
    weights = {name: torch.zeros_like(tensor) for name, tensor in drawn().items()}
    sizes = {tensor.numel() for name, tensor in weights.items() if name in frozen_specs(ONE)}
    frozen = Frozen(FAMILY, weights)
    assert frozen.owed(0, ONE, LEADING).nbytes == 4 * sum(sizes) + 33 * len(frozen_specs(ONE))
    assert frozen.owed(0, ONE, LEADING).places == tuple(sorted(frozen.owed(0, ONE, LEADING).places))


def send(frozen, state, device, arch):
    """What a server does for an order, and a device with its message."""
    owed, layout = frozen.owed(device, arch, LEADING), frozen_layout(FAMILY, arch)
    if owed.nbytes:
        data = frozen.packed(arch, LEADING, owed.places)
        assert len(data) == owed.nbytes
        state.keep_frozen(*read_part(data, owed.name, layout))
    found = state.frozen(owed.name, layout)
    if found is not None:
        frozen.has(device, owed.name)
    return found


@pytest.mark.parametrize("order", [(ONE, THREE, TWO), (THREE, ONE, TWO)])
def test_a_device_has_the_very_tensors_whatever_came_before(tmp_path, order):
    weights = drawn()
    frozen, state = Frozen(FAMILY, weights), DeviceState(str(tmp_path), "run", 0)
    for arch in order:
        found = send(frozen, state, 0, arch)
        assert list(found) == list(frozen_specs(arch))
        assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


@pytest.mark.parametrize("same_size", [True, False])
def test_a_device_that_lost_one_tensor_has_nothing_and_is_sent_all(tmp_path, same_size):
    frozen, state = Frozen(FAMILY, drawn()), DeviceState(str(tmp_path), "run", 0)
    send(frozen, state, 0, THREE)
    changed = max((tmp_path / "run" / "frozen").iterdir(), key=lambda path: path.stat().st_size)
    changed.write_bytes(bytes(changed.stat().st_size if same_size else 5))
    assert state.frozen(frozen.name(THREE, LEADING), frozen_layout(FAMILY, THREE)) is None
    assert send(frozen, state, 0, ONE) is None  # the words are what was torn, and every sub-model has them
    frozen.lost(0)
    assert send(frozen, state, 0, ONE) is not None


def test_what_is_kept_under_the_name_of_another_sub_model_is_refused(tmp_path):
    frozen, state = Frozen(FAMILY, drawn()), DeviceState(str(tmp_path), "run", 0)
    send(frozen, state, 0, ONE)
    with pytest.raises(MessageError, match="frozen tensors has"):
        state.frozen(frozen.name(ONE, LEADING), frozen_layout(FAMILY, TWO))


def test_the_state_is_small_json_and_restores_who_holds_what():
    frozen = Frozen(FAMILY, drawn())
    for device in range(100):
        frozen.has(device, frozen.name(THREE if device % 2 else ONE, LEADING))
    text = json.dumps(frozen.state())
    # A name of 64 letters per device, and two lists of some fifty tensors.
    assert len(text) < 100 * 90 + 60 * 80 + 2 * 60 * 5
    again = Frozen(FAMILY, drawn())
    again.load(json.loads(text))
    for device, arch in ((0, ONE), (0, TWO), (0, THREE), (1, ONE), (7, TWO), (200, ONE)):
        assert again.owed(device, arch, LEADING) == frozen.owed(device, arch, LEADING)
    assert again.state() == frozen.state()


def test_devices_of_a_checkpoint_of_an_earlier_version_are_sent_it_again():
    frozen = Frozen(FAMILY, drawn())
    frozen.load({"0": ["0" * 64]})
    assert frozen.held == {}
    assert frozen.owed(0, replace(ONE), LEADING).nbytes > 0
