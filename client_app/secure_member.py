"""The device's side of secure aggregation: keys, shares, masks, and what it reveals at the end, each once per round.

A device trusts the server to pass on keys, and tells it nothing that shows a single update: it masks one vector per
round, and reveals shares for one list of survivors, whatever it is asked later. It reveals only once enough others have
confirmed to it that they were told the same as itself (Bonawitz et al., CCS 2017, Figure 4 with its consistency check),
and only where its own policy allows the sum (`wildflower.client_app.policy`).
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from wildflower.client_app.policy import Policy, alone, check_same, write_whole
from wildflower.client_app.undo import will_write
from wildflower.devices.node_config import MIN_MEMBERS
from wildflower.devices.private import private_folder
from wildflower.messages.error import MessageError
from wildflower.messages.masks import (
    ROOT_BYTES,
    Secrets,
    add_common_masks,
    confirmation,
    digest_of,
    digest_of_asked,
    digest_of_members,
    enough_of,
    hash_of_share,
    mask_key,
    own_mask,
    seal,
    split_seed,
    threshold_of,
    unseal,
    with_keys_of_others,
    wrong_keys,
)
from wildflower.messages.orders import Hex64, KeyAnswer, KeyOrder, Member


class Session(BaseModel):
    """A device's memory of the newest round in which it made keys.

    Attributes:
        weights: the digest of the weights that it makes keys for.
        members, threshold, minimum: those that it has sealed shares for, and what it was told of their sum.
        masked_with: the devices with whose masks it has masked its update.
        work: the digest of what all members are asked (`wildflower.messages.masks.digests_of`).
        blocks: the devices that it has confirmed as those of the sum.
        revealed: it has revealed shares.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    round: int
    root: Hex64
    weights: Hex64
    members: list[Member] = []
    threshold: int = 0
    minimum: int = 0
    masked_with: list[int] = []
    work: str = ""
    blocks: list[list[int]] = []
    revealed: bool = False

    @property
    def secrets(self) -> Secrets:
        """Its secrets of the round."""
        return Secrets(bytes.fromhex(self.root))

    @property
    def said(self) -> str:
        """Return the digest of what it has been told until it reveals, in which all members must agree."""
        return digest_of(self.asked, self.blocks)

    @property
    def asked(self) -> str:
        """Return the digest of what it has been told until it masks."""
        return digest_of_asked(self.members_digest, self.masked_with, self.weights, self.work)

    @property
    def members_digest(self) -> str:
        """Return the digest of what it was told before it shared its seeds."""
        return digest_of_members(self.members, self.threshold, self.minimum)


@dataclass(frozen=True)
class SecureDevice:
    """One device in one run: where it keeps its session, and what it allows."""

    device: int
    run: str
    round: int
    folder: Path
    policy: Policy

    def do_step(self, order: KeyOrder) -> KeyAnswer:
        """Do one step. Raises MessageError where the device may not."""
        private_folder(self.folder.parent.parent)  # of all runs
        with alone(self.folder):
            if order.sealed:
                return self._reveal(order)
            if order.blocks:
                return self._confirm(order)
            if order.members:
                return self._share(order)
            return self._make_keys(order)

    def _make_keys(self, order: KeyOrder) -> KeyAnswer:
        """Begin a session; one of before that was not revealed never will be."""
        if order.weights is None:
            raise MessageError("a device makes keys for weights, and is told of none")
        only = self._block(order.weights)
        session = Session(round=self.round, root=secrets.token_hex(ROOT_BYTES), weights=order.weights)
        self._write(session)
        return KeyAnswer(device=self.device, member=session.secrets.member(self.device), only_with=only)

    def _share(self, order: KeyOrder) -> KeyAnswer:
        """Seal shares of both seeds for every member."""
        session = self._session()
        if session.members:
            raise MessageError("it has shared its seeds in this round already")
        devices = [member.device for member in order.members]
        if len(set(devices)) != len(devices) or len(devices) < MIN_MEMBERS:
            raise MessageError(f"a sum is of {MIN_MEMBERS} or more different devices, not of {devices}")
        own = session.secrets
        if own.member(self.device) not in order.members:
            raise MessageError("its own keys are not among the members'")
        for member in order.members:
            if why := wrong_keys(member):
                raise MessageError(f"nothing can be agreed with device {member.device}: {why}")
        if copied := with_keys_of_others(order.members):
            raise MessageError(f"devices {sorted(copied)} have the same keys")
        if not threshold_of(len(devices), 0) <= order.threshold <= len(devices):
            raise MessageError(f"{order.threshold} of {len(devices)} shares are to give a seed: more than 2/3 must")
        if order.minimum < MIN_MEMBERS:
            raise MessageError(f"a block is of {MIN_MEMBERS} or more devices, not of {order.minimum}")
        self.policy.check_sum(min(order.minimum, order.threshold))
        told = {"members": order.members, "threshold": order.threshold, "minimum": order.minimum}
        session = session.model_copy(update=told)
        shares = [split_seed(seed, order.threshold, len(devices)) for seed in (own.own_seed, own.mask_seed)]
        sealed = [
            seal(own.channel, self.device, member, first, second, session.members_digest)
            for member, first, second in zip(order.members, *shares, strict=True)
        ]
        self._write(session)
        hashes = [hash_of_share(share) for of_seed in shares for share in of_seed]
        return KeyAnswer(device=self.device, sealed=[data.hex() for data in sealed], share_hashes=hashes)

    def check_work(self, masked_with: list[int], weights: str) -> Session:
        """Return the session, where an update may be masked in it; MessageError if it may not. Nothing is changed.

        Args:
            masked_with: the devices whose masks are added.
            weights: the digest of the weights that came.
        """
        session = self._session()
        if session.masked_with:
            raise MessageError("it has masked an update in this round already")
        members = {member.device for member in session.members}
        enough = len(set(masked_with)) == len(masked_with) >= session.threshold > 0
        if self.device not in masked_with or not members.issuperset(masked_with) or not enough:
            raise MessageError(
                f"an update is masked with {session.threshold} or more of {sorted(members)}: {masked_with}"
            )
        if weights != session.weights:
            raise MessageError("the weights that came are not those that this device has made keys for")
        before = self._block(weights)
        if not set(before) <= set(masked_with):
            check_same(before, masked_with)
        return session

    def masked(self, values: Tensor, masked_with: list[int], weights: str, work: str) -> bytes:
        """Return an int64 vector under all masks of the device, as it travels. Raises MessageError if it may not."""
        with alone(self.folder):
            session = self.check_work(masked_with, weights)
            members = {member.device: member for member in session.members}
            session = session.model_copy(update={"masked_with": sorted(masked_with), "work": work})
            words = values.numpy().view(np.uint64).copy()
            words += own_mask(session.secrets.own_seed, len(words))
            others = {other: members[other] for other in masked_with}
            add_common_masks(words, self.device, mask_key(session.secrets.mask_seed), others, session.asked)
            # Before anything leaves the device: what was masked once is never masked again.
            self._write(session)
            return words.astype("<u8", copy=False).tobytes()

    def _confirm(self, order: KeyOrder) -> KeyAnswer:
        """Tell every member, in a way that the server cannot, which survivors this device has been told of."""
        session = self._session()
        if not session.masked_with or session.revealed:
            raise MessageError("it confirms survivors after it has masked its update, and before it reveals shares")
        survivors = sorted(device for block in order.blocks for device in block)
        if session.blocks and session.blocks != order.blocks:
            raise MessageError(f"it has confirmed a sum of {session.blocks}, and confirms none of {order.blocks}")
        if (
            len(set(survivors)) != len(survivors)
            or self.device not in survivors
            or not set(survivors) <= set(session.masked_with)
            or len(survivors) < session.threshold
        ):
            raise MessageError(f"a sum has {session.threshold} or more of {session.masked_with}, not {survivors}")
        if min(map(len, order.blocks)) < session.minimum:
            raise MessageError(f"blocks are of {session.minimum} or more devices, and one of {order.blocks} is smaller")
        # Before anything leaves the device: what others reveal for this sum may be enough without it.
        if self.policy.ledger is not None:
            own = next(block for block in order.blocks if self.device in block)
            self.policy.ledger.add(self.run, self.round, session.weights, own)
        session = session.model_copy(update={"blocks": order.blocks})
        self._write(session)
        key = session.secrets.channel
        told = [confirmation(key, self.device, other.device, other, session.said) for other in session.members]
        return KeyAnswer(device=self.device, confirmed=told)

    def _reveal(self, order: KeyOrder) -> KeyAnswer:
        """Reveal a share of the own seed of every device in the sum, and of every lost device's mask key."""
        session = self._session()
        if not session.blocks or session.revealed:
            raise MessageError("it reveals shares once, after it has confirmed the devices of the sum")
        if order.blocks != session.blocks:
            raise MessageError(f"it has confirmed a sum of {session.blocks}, not of {order.blocks}")
        if not len(order.sealed) == len(order.confirmed) == len(session.members):
            raise MessageError(f"it needs what each of {len(session.members)} members has sealed and confirmed")
        key, said = session.secrets.channel, session.said
        survivors = {device for block in session.blocks for device in block}
        agreeing = {
            member.device
            for member, proof in zip(session.members, order.confirmed, strict=True)
            if member.device in survivors
            and hmac.compare_digest(confirmation(key, member.device, self.device, member, said), proof)
        }
        few = any(len(agreeing.intersection(block)) < enough_of(len(block)) for block in session.blocks)
        if few or len(agreeing) < session.threshold:
            raise MessageError(
                f"only {sorted(agreeing)} have confirmed that they were told the same as this device: more than 2/3 of "
                f"each of {session.blocks} must, and {session.threshold} in all"
            )
        # Before anything leaves the device.
        self._write(session.model_copy(update={"revealed": True}))
        shares = []
        for member, sealed in zip(session.members, order.sealed, strict=True):
            if member.device not in session.masked_with:
                continue
            try:
                own, mask = unseal(key, self.device, member, bytes.fromhex(sealed), session.members_digest)
            except MessageError:
                shares.append("")  # that one has sealed nothing for it: a fault that must not cost the others
                continue
            shares.append((own if member.device in survivors else mask).hex())
        return KeyAnswer(device=self.device, shares=shares)

    def _block(self, weights: str) -> list[int]:
        return [] if self.policy.ledger is None else self.policy.ledger.block(self.run, self.round, weights)

    def _session(self) -> Session:
        try:
            session = Session.model_validate_json((self.folder / "secure.json").read_bytes())
        except (OSError, ValidationError):
            raise MessageError("this device has made no keys, or lost them") from None
        if session.round != self.round:
            raise MessageError(f"this device's keys are of round {session.round}, not of round {self.round}")
        return session

    def _write(self, session: Session) -> None:
        will_write(self.folder / "secure.json", restore=True)
        # In a simulation, whose server has all data, nothing is lost with a session.
        write_whole(self.folder / "secure.json", session.model_dump_json(), durable=self.policy.ledger is not None)
