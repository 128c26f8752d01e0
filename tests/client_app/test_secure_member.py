"""The device's side of secure aggregation, against servers that lie."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.client_app.work_orders import batch, payload, work_order
from wildflower.client_app import policy
from wildflower.client_app.policy import Ledger, Policy
from wildflower.client_app.secure_member import SecureDevice
from wildflower.messages.error import MessageError
from wildflower.messages.masks import Secrets, digests_of, joined_seed, own_mask, with_keys_of_others, wrong_keys
from wildflower.messages.orders import KeyOrder, LocalTraining, Member
from wildflower.rounds.secure_aggregation import Sum
from wildflower.strategies.fedprox import ProximalTraining
from wildflower.strategies.method import Training

WEIGHTS, OTHERS, WORK = "1" * 64, "2" * 64, "3" * 64
ZEROS = torch.zeros(2, dtype=torch.int64)


def devices_in(folder, count=4, run="a run", number=1, minimum=0) -> list[SecureDevice]:
    """Devices, each with a state folder of its own, as a node of hardware has."""
    return [
        SecureDevice(d, run, number, home / run, Policy(minimum, Ledger(home / ".sums" / "device.json")))
        for d, home in ((d, folder / str(d)) for d in range(count))
    ]


def make_keys(devices: Sequence[SecureDevice], weights=WEIGHTS) -> list[Member]:
    answers = [device.do_step(KeyOrder(device=device.device, weights=weights)) for device in devices]
    return [answer.member for answer in answers if answer.member is not None]


def shared(devices: Sequence[SecureDevice], weights=WEIGHTS, threshold=3, minimum=3) -> Sum:
    """What an honest server knows once all have shared their seeds."""
    found = Sum({}, threshold, minimum, members=make_keys(devices, weights))
    for device in devices:
        found.sealed[device.device] = device.do_step(found.sharing(device.device)).sealed
    return found


def mask(devices: Sequence[SecureDevice], found: Sum, weights=WEIGHTS, work=WORK) -> None:
    for device in devices:
        device.masked(ZEROS, sorted(found.sealed), weights, work)


def confirm(devices: Sequence[SecureDevice], found: Sum, survivors: Sequence[int]) -> None:
    found.arrived, found.blocks = list(survivors), [list(survivors)]
    for device in devices:
        if device.device in survivors:
            found.confirmed[device.device] = device.do_step(found.confirming(device.device)).confirmed


def reveal(devices: Sequence[SecureDevice], found: Sum) -> dict[int, list[str]]:
    return {d.device: d.do_step(found.revealing(d.device)).shares for d in devices if d.device in found.arrived}


def a_sum(devices: Sequence[SecureDevice], survivors: Sequence[int], weights=WEIGHTS) -> dict[int, list[str]]:
    """All steps; the shares that were revealed."""
    found = shared(devices, weights)
    mask(devices, found, weights)
    confirm(devices, found, survivors)
    return reveal(devices, found)


def secrets_of(device: SecureDevice) -> Secrets:
    return Secrets(bytes.fromhex(json.loads((device.folder / "secure.json").read_text())["root"]))


def test_masks_cancel_in_the_sum(tmp_path):
    """By hand: the masked vectors less the four own masks are the sum modulo 2^64."""
    devices = devices_in(tmp_path)
    shared(devices)
    values = [torch.tensor([d, -d, 2**61]) for d in range(4)]
    words = [
        np.frombuffer(device.masked(v, [0, 1, 2, 3], WEIGHTS, WORK), dtype=np.uint64)
        for device, v in zip(devices, values, strict=True)
    ]
    masks = [own_mask(secrets_of(device).own_seed, 3) for device in devices]
    total = sum(words[1:], words[0]) - sum(masks[1:], masks[0])
    assert total.view(np.int64).tolist() == [6, -6, -(2**63)]  # four times 2^61 is 2^63, which wraps


def test_a_device_reveals_one_of_two_seeds_of_each_other(tmp_path):
    devices = devices_in(tmp_path)
    revealed = a_sum(devices, [0, 1, 2])
    secrets = [secrets_of(device) for device in devices]
    seeds = [joined_seed({d: bytes.fromhex(revealed[d][other]) for d in range(3)}) for other in range(4)]
    assert seeds == [secrets[0].own_seed, secrets[1].own_seed, secrets[2].own_seed, secrets[3].mask_seed]


def test_a_device_masks_once_confirms_one_list_and_reveals_once(tmp_path):
    devices = devices_in(tmp_path)
    found, device = shared(devices), devices[0]
    with pytest.raises(MessageError, match="confirms survivors after it has masked"):
        device.do_step(KeyOrder(device=0, blocks=[[0, 1, 2]]))
    with pytest.raises(MessageError, match="masked with 3 or more of"):
        device.masked(ZEROS, [0, 1], WEIGHTS, WORK)
    mask(devices, found)
    with pytest.raises(MessageError, match="has masked an update"):
        device.masked(ZEROS, [0, 1, 2, 3], WEIGHTS, WORK)
    for survivors in ([0, 1], [1, 2, 3], [0, 1, 9]):
        with pytest.raises(MessageError, match="a sum has 3 or more of"):
            device.do_step(KeyOrder(device=0, blocks=[survivors]))
    confirm(devices, found, [0, 1, 2])
    with pytest.raises(MessageError, match=r"confirmed a sum of \[\[0, 1, 2\]\], and confirms none of"):
        device.do_step(KeyOrder(device=0, blocks=[[0, 1, 2, 3]]))
    asked = found.revealing(0)
    with pytest.raises(MessageError, match=r"confirmed a sum of \[\[0, 1, 2\]\], not of"):
        device.do_step(asked.model_copy(update={"blocks": [[0, 1, 2, 3]]}))  # for the other seed of device 3
    assert len(device.do_step(asked).shares) == 4
    with pytest.raises(MessageError, match="reveals shares once"):
        device.do_step(asked)
    with pytest.raises(MessageError, match="keys are of round 1, not of round 2"):
        replace(device, round=2).do_step(asked)


def test_only_its_user_sees_what_a_device_keeps(tmp_path):
    """Whatever the umask; a process that was killed while it wrote keys leaves none of them behind."""
    home, before = tmp_path / "state", os.umask(0o022)
    try:
        [device] = devices_in(home, 1)
        make_keys([device])
        left = device.folder / "secure.99999.part"
        left.write_text("keys")
        make_keys([device])
        assert device.policy.ledger is not None
        seed_of(device.policy.ledger, 1, 1)
    finally:
        os.umask(before)
    assert not left.exists()
    found = [path for path in home.rglob("*") if path.parent != home]  # `home` is a node's, in it is the device's
    assert {path.name for path in found} >= {"secure.json", "lock", ".sums", "device.json"}
    assert [path for path in found if path.stat().st_mode & 0o077] == []


def test_a_device_shares_with_enough_others_only(tmp_path):
    devices = devices_in(tmp_path)
    own, *others = make_keys(devices)
    zero = others[0].model_copy(update={"channel_key": "00" * 32})
    low = others[0].model_copy(update={"mask_key": "01" + "00" * 31})
    copied = others[0].model_copy(update={"mask_key": others[1].mask_key})
    for members, threshold, why in (
        ([own, others[0]], 2, "3 or more different devices"),
        ([own, others[0], others[0]], 3, "3 or more different devices"),
        (others, 3, "its own keys are not among"),
        ([own, *others], 2, "more than 2/3 must"),
        ([own, *others], 5, "more than 2/3 must"),
        ([own, zero, others[1]], 3, "nothing can be agreed with device 1: its channel key is a point of low order"),
        ([own, low, others[1]], 3, "nothing can be agreed with device 1: its mask key is a point of low order"),
        ([own, copied, others[1]], 3, r"devices \[1, 2\] have the same keys"),
    ):
        with pytest.raises(MessageError, match=why):
            devices[0].do_step(KeyOrder(device=0, members=members, threshold=threshold, minimum=3))
    with pytest.raises(MessageError, match="a block is of 3 or more devices, not of 2"):
        devices[0].do_step(KeyOrder(device=0, members=[own, *others], threshold=3, minimum=2))
    assert (devices[0].folder / "secure.json").stat().st_mode & 0o777 == 0o600


# All points whose order divides 8, as bytes of 32, the least first, and two that are written in another way.
LOW_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ec" + "ff" * 30 + "7f",
    "ed" + "ff" * 30 + "7f",
    "ee" + "ff" * 30 + "7f",
]


@pytest.mark.parametrize("key", [*LOW_ORDER, "ff" * 32, LOW_ORDER[2][:-2] + "80"])
@pytest.mark.parametrize("name", ["channel_key", "mask_key"])
def test_keys_that_nobody_can_agree_with_are_found(key, name, tmp_path):
    [right] = make_keys(devices_in(tmp_path, 1))
    assert wrong_keys(right) == ""
    assert name.partition("_")[0] in wrong_keys(right.model_copy(update={name: key}))
    assert "the same" in wrong_keys(right.model_copy(update={"mask_key": right.channel_key}))


def test_keys_of_two_devices_are_found(tmp_path):
    members = make_keys(devices_in(tmp_path, 4))
    assert with_keys_of_others(members) == set()
    copy = members[2].model_copy(update={"own_seed_hash": members[0].own_seed_hash})
    assert with_keys_of_others([*members[:2], copy, members[3]]) == {0, 2}


# A round that is done twice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "number"), [("a run", 1), ("a run", 7), ("another run", 1)])
def test_from_the_same_weights_a_device_is_in_sums_of_its_block_only(run, number, tmp_path):
    """As where a server has crashed, or lies about the round or the run: the device has nothing but its folder."""
    a_sum(devices_in(tmp_path), [0, 1, 2, 3])
    again = devices_in(tmp_path, run=run, number=number)
    told = again[0].do_step(KeyOrder(device=0, weights=WEIGHTS))
    assert told.only_with == [0, 1, 2, 3]
    found = shared(again)
    mask(again, found)
    for survivors in ([0, 1, 2], [0, 2, 3]):
        with pytest.raises(MessageError, match=r"been in a sum together with \[0, 1, 2, 3\]: the difference to a sum"):
            again[0].do_step(KeyOrder(device=0, blocks=[survivors]))
    confirm(again, found, [0, 1, 2, 3])
    assert all(len(shares) == 4 for shares in reveal(again, found).values())


def test_nothing_is_trained_for_another_sum_of_the_same_weights(tmp_path):
    a_sum(devices_in(tmp_path), [0, 1, 2, 3])
    fewer = devices_in(tmp_path, 3, number=2)
    shared(fewer)
    with pytest.raises(MessageError, match="from these very weights this device has been in a sum"):
        fewer[0].check_work([0, 1, 2], WEIGHTS)


def test_the_weights_that_come_are_those_that_keys_were_made_for(tmp_path):
    devices = devices_in(tmp_path)
    a_sum(devices, [0, 1, 2, 3])
    again = devices_in(tmp_path, number=2)
    shared(again, OTHERS)
    with pytest.raises(MessageError, match="not those that this device has made keys for"):
        again[0].masked(ZEROS, [0, 1, 2, 3], WEIGHTS, WORK)
    assert len(a_sum(again, [0, 1, 2], OTHERS)) == 3


def test_a_round_is_done_again_from_the_same_weights_only(tmp_path):
    a_sum(devices_in(tmp_path), [0, 1, 2, 3])
    with pytest.raises(MessageError, match="a sum of round 1 of the run already, from other weights"):
        make_keys(devices_in(tmp_path), OTHERS)
    make_keys(devices_in(tmp_path, run="a new run"), OTHERS)


def test_a_session_that_was_not_confirmed_never_will_be(tmp_path):
    """So a server that crashes before the end may begin the round anew, with other devices too."""
    devices = devices_in(tmp_path)
    mask(devices, shared(devices))
    lost = secrets_of(devices[0]).root.hex()
    found = shared(devices)
    assert lost not in "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    mask(devices, found)
    confirm(devices, found, [0, 1, 2])
    assert len(reveal(devices, found)) == 3


def test_who_has_confirmed_a_sum_is_bound_to_its_block_if_it_reveals_nothing_itself(tmp_path):
    """The shares of the others may be enough, and a block of such devices would be parted anew the next time."""
    devices = devices_in(tmp_path)
    found = shared(devices)
    mask(devices, found)
    confirm(devices, found, [0, 1, 2, 3])
    again = devices_in(tmp_path, number=2)
    mask(again, shared(again))
    assert "difference to a sum" in refusal(again[3], KeyOrder(device=3, blocks=[[0, 1, 3]]))


def test_from_the_same_weights_one_device_cannot_be_had(tmp_path):
    """A server unmasks a first sum with as few shares as it can, and would unmask a second one without a device.

    Those that have confirmed it take part in no other sum, and the rest is less than the threshold of any second one.
    """
    devices = devices_in(tmp_path, 10)
    found = shared(devices, threshold=7)
    mask(devices, found)
    confirm(devices[:7], found, list(range(10)))
    assert len(reveal(devices[:7], found)) == 7  # enough for the sum of all ten
    again = devices_in(tmp_path, 10, number=2)
    second = shared(again, threshold=7)
    mask(again, second)
    nine = [list(range(1, 10))]
    said = {device.device: refusal(device, KeyOrder(device=device.device, blocks=nine)) for device in again[1:]}
    assert all("difference to a sum" in said[device] for device in range(1, 7))
    willing = [device for device, why in said.items() if not why]
    assert willing == [7, 8, 9]
    assert len(willing) < second.threshold


def seed_of(ledger: Ledger, weights: int, seed: int) -> int:
    """The seed with which a device trains from some weights, where the server wants another one."""
    order = work_order(masked_with=[0, 1, 2], seed=seed)
    return ledger.as_first(batch(order), order, [payload()], f"{weights}" * 64)[1].seed


def test_what_was_unmasked_is_remembered_in_bounds_and_no_damage_frees_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "MAX_REMEMBERED", 3)
    ledger = Ledger(tmp_path / "sums" / "device.json")
    for number in range(5):
        ledger.add("a run", number, f"{number}" * 64, [0, 1, number])
    assert ledger.path.stat().st_mode & 0o777 == 0o600
    assert [ledger.block("b", 9, f"{number}" * 64) for number in range(5)] == [
        [],
        [],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 4],
    ]
    with pytest.raises(MessageError, match="difference"):
        ledger.add("b", 9, "4" * 64, [0, 1, 2])
    assert [seed_of(ledger, number, number) for number in range(5)] == [0, 1, 2, 3, 4]
    assert [seed_of(ledger, number, 9) for number in (4, 3, 0)] == [4, 3, 9]  # the oldest is forgotten
    for damage in ("", "[]", ledger.path.read_text()[:-1], '{"sums": [{"round": "x"}]}'):
        ledger.path.write_text(damage)
        with pytest.raises(MessageError, match="cannot be read: while it is so, the device is in no other"):
            ledger.block("b", 9, OTHERS)


# A server that tells its devices different stories --------------------------------------------------------------------


def refused_reveals(devices: Sequence[SecureDevice], found: Sum) -> list[int]:
    """Who reveals nothing because too few were told the same."""
    said = {device.device: refusal(device, found.revealing(device.device)) for device in devices}
    assert all("have confirmed that they were told the same as this device" in why for why in said.values() if why)
    return [device for device, why in said.items() if why]


def refusal(device: SecureDevice, order: KeyOrder) -> str:
    """Why a device refuses a step; "" where it does it."""
    try:
        device.do_step(order)
    except MessageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("number_told", [1, 2, 3])
def test_no_two_lists_of_survivors_are_revealed_for(number_told, tmp_path):
    """Some would reveal shares of device 3's own seed, and the others of its key's: at most one of the two comes."""
    devices = devices_in(tmp_path)
    found = shared(devices)
    mask(devices, found)
    told = [(devices[:number_told], [0, 1, 2]), (devices[number_told:], [0, 1, 2, 3])]
    for some, survivors in told:
        confirm(some, found, survivors)
    revealing = []
    for some, survivors in told:
        found.blocks = [survivors]
        refused = refused_reveals(some, found)
        revealing.append(len(some) - len(refused))
    # Three of the four agree, as many as the threshold, or nobody reveals anything.
    assert revealing == {1: [0, 3], 2: [0, 0], 3: [3, 0]}[number_told]


@pytest.mark.parametrize("what", ["weights", "work"])
def test_who_is_asked_something_else_than_the_others_reveals_nothing(what, tmp_path):
    """Two devices get another model, or train with another learning rate: what they add would be known."""
    devices = devices_in(tmp_path)
    members, told = [], {}
    for device in devices:
        told[device.device] = OTHERS if what == "weights" and device.device < 2 else WEIGHTS
        members += make_keys([device], told[device.device])
    found = Sum({}, 3, 3, members=members)
    for device in devices:
        found.sealed[device.device] = device.do_step(found.sharing(device.device)).sealed
    for device in devices:
        mask([device], found, told[device.device], OTHERS if what == "work" and device.device < 2 else WORK)
    confirm(devices, found, [0, 1, 2, 3])
    assert refused_reveals(devices, found) == [0, 1, 2, 3]


@pytest.mark.parametrize("what", ["members", "threshold", "minimum"])
def test_who_is_told_of_other_members_or_bounds_reveals_nothing(what, tmp_path):
    devices = devices_in(tmp_path, 5)
    members = make_keys(devices)
    of_four = members[:4]
    views = [Sum({}, 4, 3, members=members), Sum({}, 4, 3, members=of_four)]
    if what == "threshold":
        views = [Sum({}, 3, 3, members=of_four), Sum({}, 4, 3, members=of_four)]
    if what == "minimum":
        views = [Sum({}, 3, 3, members=of_four), Sum({}, 3, 4, members=of_four)]
    sides = devices[:2], devices[2:4]
    sealed, confirmed = {}, {}
    for view, side in zip(views, sides, strict=True):
        sealed |= {d.device: d.do_step(view.sharing(d.device)).sealed for d in side}
    for view, side in zip(views, sides, strict=True):
        view.sealed = sealed
        mask(side, view)
        confirm(side, view, [0, 1, 2, 3])
        confirmed |= view.confirmed
    for view, side in zip(views, sides, strict=True):
        view.confirmed = confirmed
        view.sealed = {d: (shares * 2)[: len(view.members)] for d, shares in sealed.items()}
        assert refused_reveals(side, view) == [device.device for device in side]


def test_a_server_cannot_confirm_for_a_device(tmp_path):
    devices = devices_in(tmp_path)
    found = shared(devices)
    mask(devices, found)
    confirm(devices, found, [0, 1, 2, 3])
    for sender in (1, 2):
        found.confirmed[sender] = found.confirmed[3]  # what another has confirmed, and what nobody has
    assert refused_reveals(devices[:1], found) == [0]
    found.confirmed[1] = ["ab" * 32] * 4
    assert refused_reveals(devices[:1], found) == [0]


def test_more_than_two_thirds_of_every_block_have_to_confirm(tmp_path):
    """Else a whole block would be of devices that have noted nothing, and be parted in another way the next time."""
    devices = devices_in(tmp_path, 16)
    found = shared(devices, threshold=11)
    mask(devices, found)
    blocks = [list(range(12)), list(range(12, 16))]
    found.arrived, found.blocks = list(range(16)), blocks
    for device in devices[:14]:
        found.confirmed[device.device] = device.do_step(found.confirming(device.device)).confirmed
    assert refused_reveals(devices[:12], found) == list(range(12))  # 14 of 16, but 2 of the second block's 4
    found.confirmed[14] = devices[14].do_step(found.confirming(14)).confirmed
    assert refused_reveals(devices[:15], found) == []


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([[0, 1, 2, 3], [4, 5]], "blocks are of 3 or more devices"),
        ([[0, 1, 2, 3, 4, 5], []], "blocks are of 3 or more devices"),
        ([[0, 1, 2], [2, 3, 4, 5]], "a sum has 5 or more of"),
        ([[1, 2, 3], [4, 5, 6]], "a sum has 5 or more of"),
    ],
)
def test_blocks_are_of_several_devices_each_in_one(blocks, why, tmp_path):
    devices = devices_in(tmp_path, 7)
    found = shared(devices, threshold=5)
    mask(devices, found)
    with pytest.raises(MessageError, match=why):
        devices[0].do_step(KeyOrder(device=0, blocks=blocks))


def test_the_owner_bounds_the_sum_and_its_blocks(tmp_path):
    devices = devices_in(tmp_path, 10, minimum=5)
    wants = "a sum may be of 4 devices, and this device's owner wants 5 at least"
    with pytest.raises(MessageError, match=wants):
        shared(devices[:5], threshold=4, minimum=5)
    with pytest.raises(MessageError, match=wants):
        shared(devices, threshold=7, minimum=4)
    found = shared(devices, threshold=7, minimum=5)
    mask(devices, found)
    for blocks, why in (
        ([[0, 1, 2, 3], [4, 5, 6]], "blocks are of 5 or more"),
        ([[0, 1, 2, 3, 4]], "a sum has 7 or more"),
    ):
        with pytest.raises(MessageError, match=why):
            devices[0].do_step(KeyOrder(device=0, blocks=blocks))


def test_what_all_are_asked_is_told_apart_from_the_weights():
    """The same weights are known again whatever comes with them; what is asked differs in anything that all share."""
    order, arrays = work_order(masked_with=[0, 1, 2]), [payload()]
    content = batch(order)
    weights, asked = digests_of(content, order, arrays)
    assert digests_of(batch(work_order(1, memory_bytes=7)), work_order(1, memory_bytes=7), arrays) == (weights, asked)
    for other_batch, other in (
        (batch(order, training=LocalTraining(learning_rate=0.0)), order),
        (batch(order, norm_bound=1.0), order),
        (batch(order, wire="int8"), order),
        (content, work_order(local=Training(weighting="uniform"))),
        (content, work_order(local=ProximalTraining(mu=0.1))),
    ):
        found = digests_of(other_batch, other, arrays)
        assert found[0] == weights
        assert found[1] != asked
    beside = order.model_copy(update={"payloads": {"weights": 0, "control": 1}})
    first, second = (digests_of(content, beside, [*arrays, data]) for data in (b"1", b"2"))
    assert first[0] == second[0] == weights
    assert first[1] != second[1]
    changed = bytes([arrays[0][0] ^ 1]) + arrays[0][1:]
    assert digests_of(content, order, [changed])[0] != weights
