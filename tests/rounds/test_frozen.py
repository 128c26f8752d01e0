"""Frozen tensors are known one by one: what a device holds of one sub-model is not sent again for another."""

import json
import math

import pytest
import torch

from tests.encoders import encoder
from wildflower.client_app.kept_state import DeviceState
from wildflower.messages.error import MessageError
from wildflower.messages.frozen_parts import read_part
from wildflower.messages.tensor_sets import frozen_layout
from wildflower.models.family import make_family
from wildflower.models.placement import chosen
from wildflower.rounds import frozen as rounds_frozen
from wildflower.rounds.frozen import MAX_HELD, Frozen, Owed
from wildflower.strategies.method import LEADING, Selection

SPEC = encoder(classes=2, depths=[1, 2, 3], freeze=["embeddings", "encoder"])
FAMILY = make_family(SPEC)
ONE, TWO, THREE = reversed(FAMILY.candidates([1]))


# A family whose sub-models are cuts: each selection of channels has frozen tensors of its own.
CUT = make_family({"name": "lenet5", "freeze": ["block1", "block2.conv"]})
[HALF] = CUT.candidates([0.5])


def drawn(family=FAMILY):
    """Frozen weights of which no two tensors are equal."""
    generator = torch.Generator().manual_seed(4)
    full = family.tensors(family.full())
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


def send(frozen, state, device, arch, selection=LEADING):
    """What a server does for an order, and a device with its message."""
    owed, layout = frozen.owed(device, arch, selection), frozen_layout(frozen.family, arch)
    if owed.nbytes:
        data = frozen.packed(arch, selection, owed.places)
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


@pytest.mark.parametrize(
    ("known", "asked", "failures"),
    [
        (None, THREE, 0),  # the message brings all of it
        (ONE, ONE, 1),  # the message brings a name alone
        (ONE, THREE, 1),  # the message brings layers, and the damage is in others
    ],
)
def test_three_damaged_tensors_cost_one_round_at_most(tmp_path, known, asked, failures):
    weights = drawn()
    frozen, state = Frozen(FAMILY, weights), DeviceState(str(tmp_path), "run", 0)
    send(frozen, state, 0, ONE)
    [listed] = [path for path in (tmp_path / "run" / "frozen").iterdir() if path.stem == frozen.name(ONE, LEADING)]
    tensors = sorted(path for path in listed.parent.iterdir() if path != listed)
    for path in tensors[:3]:
        path.write_bytes(bytes([7]) * path.stat().st_size)
    if known is None:
        frozen.lost(0)
    for _ in range(failures):
        assert send(frozen, state, 0, asked) is None
        assert not any(path.exists() for path in tensors[:3])
        frozen.lost(0)
    found = send(frozen, state, 0, asked)
    assert list(found) == list(frozen_specs(asked))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


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


def test_selections_that_change_every_round_leave_few_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds_frozen, "MAX_NAMED", 5)
    frozen, devices, sizes = Frozen(CUT, drawn(CUT)), range(3), []
    for number in range(50):
        # All are asked before the first of them has answered.
        asked = {d: frozen.owed(d, HALF, Selection(chosen, 3 * number + d)) for d in devices}
        assert all(owed.nbytes for owed in asked.values())
        for device, owed in asked.items():
            frozen.has(device, owed.name)
            assert owed.name in frozen.held[device]
        del asked, owed
        sizes.append(len(json.dumps(frozen.state())))
    assert [len(held) for held in frozen.held.values()] == [MAX_HELD] * 3
    assert len(frozen.state()["parts"]) == len(devices) * MAX_HELD
    assert max(sizes) < 1.5 * sizes[MAX_HELD]  # some selections share small tensors
    assert len(frozen._parts) <= len(devices) * MAX_HELD + 5
    assert len(frozen._names) <= 5
    for device in devices:
        frozen.lost(device)
    assert len(frozen._parts) <= 5


def test_a_device_that_comes_back_to_a_part_of_long_ago_is_sent_it_again(tmp_path):
    weights = drawn(CUT)
    frozen, state = Frozen(CUT, weights), DeviceState(str(tmp_path), "run", 0)
    selections = [Selection(chosen, number) for number in range(MAX_HELD + 1)]
    for selection in selections:
        send(frozen, state, 0, HALF, selection)
    assert frozen.owed(0, HALF, selections[1]).places == ()
    # One that is used again is not the oldest any more, here and after a restart.
    send(frozen, state, 0, HALF, selections[1])
    again = Frozen(CUT, weights)
    again.load(json.loads(json.dumps(frozen.state())))
    for each in (frozen, again):
        assert each.owed(0, HALF, selections[0]).nbytes > 0
        found = send(each, state, 0, HALF, selections[0])
        wanted = CUT.place(HALF, selections[0].select).of(list(found)).gather(weights)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
        assert not each.owed(0, HALF, selections[1]).nbytes
        assert each.owed(0, HALF, selections[2]).nbytes > 0
    assert again.state() == frozen.state()


def test_a_checkpoint_with_more_parts_than_are_remembered_is_read():
    frozen = Frozen(CUT, drawn(CUT))
    names = [frozen.name(HALF, Selection(chosen, number)) for number in range(MAX_HELD + 2)]
    tensors = [tensor for name in names for tensor in frozen._parts[name].tensors]
    size = len(tensors) // len(names)
    parts = {name: list(range(size * at, size * (at + 1))) for at, name in enumerate(names)}
    again = Frozen(CUT, drawn(CUT))
    again.load({"held": {"3": names}, "parts": parts, "tensors": tensors})
    assert list(again.held[3]) == names[2:]
    assert len(again._parts) == MAX_HELD
