"""The device's side of secure aggregation: keys, shares, masks, and what it reveals at the end, each once per round.

A device trusts the server to pass on keys, and tells it nothing that shows a single update: it masks one vector per
round, and reveals shares for one list of survivors, whatever it is asked later (Bonawitz et al., CCS 2017, Figure 4).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from client_app.undo import will_write
from messages.error import MessageError
from messages.masks import (
    MIN_MEMBERS,
    ROOT_BYTES,
    Secrets,
    add_common_masks,
    mask_key,
    own_mask,
    seal,
    split_seed,
    threshold_of,
    unseal,
)
from messages.orders import Hex64, KeyAnswer, KeyOrder, Member


class Session(BaseModel):
    """What a device remembers of the newest round in which it made keys.

    Attributes:
        members: those that it has sealed shares for.
        masked_with: the devices with whose masks it has masked its update.
        revealed: it has revealed shares.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    round: int
    root: Hex64
    members: list[Member] = []
    threshold: int = 0
    masked_with: list[int] = []
    revealed: bool = False

    @property
    def secrets(self) -> Secrets:
        """Its secrets of the round."""
        return Secrets(bytes.fromhex(self.root))


def do_step(order: KeyOrder, folder: Path, round_number: int) -> KeyAnswer:
    """Do one step for a device that keeps its session in a folder. Raises MessageError where it may not."""
    if order.sealed:
        return _reveal(order, _session(folder, round_number), folder)
    if order.members:
        return _share(order, _session(folder, round_number), folder)
    session = Session(round=round_number, root=secrets.token_hex(ROOT_BYTES))
    _write(folder, session)
    return KeyAnswer(device=order.device, member=session.secrets.member(order.device))


def _share(order: KeyOrder, session: Session, folder: Path) -> KeyAnswer:
    """Seal shares of both seeds for every member."""
    if session.members:
        raise MessageError("it has shared its seeds in this round already")
    devices = [member.device for member in order.members]
    if len(set(devices)) != len(devices) or len(devices) < MIN_MEMBERS:
        raise MessageError(f"a sum is of {MIN_MEMBERS} or more different devices, not of {devices}")
    own = session.secrets
    if own.member(order.device) not in order.members:
        raise MessageError("its own keys are not among the members'")
    if not threshold_of(len(devices), 0) <= order.threshold <= len(devices):
        raise MessageError(f"{order.threshold} of {len(devices)} shares are to give a seed: more than two thirds must")
    shares = [split_seed(seed, order.threshold, len(devices)) for seed in (own.own_seed, own.mask_seed)]
    sealed = [
        seal(own.channel, order.device, member, first, second)
        for member, first, second in zip(order.members, *shares, strict=True)
    ]
    _write(folder, session.model_copy(update={"members": order.members, "threshold": order.threshold}))
    return KeyAnswer(device=order.device, sealed=[data.hex() for data in sealed])


def masked(values: Tensor, device: int, masked_with: list[int], folder: Path, round_number: int) -> bytes:
    """An int64 vector under all masks of a device, as it travels. Raises MessageError where it may not be masked."""
    session = _session(folder, round_number)
    if session.masked_with:
        raise MessageError("it has masked an update in this round already")
    members = {member.device: member for member in session.members}
    if device not in masked_with or not set(masked_with) <= members.keys() or len(masked_with) < session.threshold:
        raise MessageError(f"an update is masked with {session.threshold} or more of {sorted(members)}: {masked_with}")
    words = values.numpy().view(np.uint64).copy()
    words += own_mask(session.secrets.own_seed, len(words))
    others = {other: members[other] for other in masked_with}
    add_common_masks(words, device, mask_key(session.secrets.mask_seed), others)
    # Before anything leaves the device: what was masked once is never masked again.
    _write(folder, session.model_copy(update={"masked_with": sorted(masked_with)}))
    return words.astype("<u8", copy=False).tobytes()


def _reveal(order: KeyOrder, session: Session, folder: Path) -> KeyAnswer:
    """Of every device in the sum a share of its own seed, of every one that was lost a share of its mask key's."""
    if not session.masked_with or session.revealed:
        raise MessageError("it reveals shares once, after it has masked its update")
    survivors = set(order.survivors)
    if (
        order.device not in survivors
        or not survivors <= set(session.masked_with)
        or len(survivors) < session.threshold
        or len(order.sealed) != len(session.members)
    ):
        raise MessageError(f"a sum has {session.threshold} or more of {session.masked_with}, not {sorted(survivors)}")
    _write(folder, session.model_copy(update={"revealed": True}))
    shares = []
    for member, sealed in zip(session.members, order.sealed, strict=True):
        if member.device not in session.masked_with:
            continue
        own, mask = unseal(session.secrets.channel, order.device, member, bytes.fromhex(sealed))
        shares.append((own if member.device in survivors else mask).hex())
    return KeyAnswer(device=order.device, shares=shares)


def _session(folder: Path, round_number: int) -> Session:
    try:
        session = Session.model_validate_json((folder / "secure.json").read_bytes())
    except (OSError, ValidationError):
        raise MessageError("this device has made no keys, or lost them") from None
    if session.round != round_number:
        raise MessageError(f"this device's keys are of round {session.round}, not of round {round_number}")
    return session


def _write(folder: Path, session: Session) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"secure.{os.getpid()}.part"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(session.model_dump_json())
    will_write(folder / "secure.json", restore=True)
    os.replace(beside, folder / "secure.json")
