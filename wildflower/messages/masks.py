"""The cryptography of secure aggregation, which devices and server share (Bonawitz et al., CCS 2017, section 4).

Masks are streams of ChaCha20 that are added modulo 2^64. Keys are agreed by X25519, shares of seeds are Shamir's and
travel under ChaCha20-Poly1305. All keys of a device and a round follow from one root of chance. Before devices reveal
shares, they confirm to each other by HMAC-SHA256 what they have been told.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from wildflower.messages.error import MessageError
from wildflower.messages.orders import Batch, Member, WorkOrder
from wildflower.plugins.raised_as import raised_as

ROOT_BYTES, SEED_BYTES = 32, 16
SEALED_BYTES = 2 * SEED_BYTES + 16  # two shares, and a tag
MAX_MEMBERS = 32  # of one sum: a device's work grows with the number of members, the server's with its square
_NONCE = bytes(12)  # every key seals one message only
_PRIME = 2**255 - 19  # of X25519's field

Words = NDArray[np.uint64]


def threshold_of(members: int, minimum: int) -> int:
    """Return how many members must answer to the end: more than two thirds, and as many as a sum must have at least.

    With more than two thirds no server can gather both seeds of a device by telling its members different stories.
    """
    return max(2 * members // 3 + 1, minimum)


def enough_of(block: int) -> int:
    """Return how many devices of a block must have confirmed it, before others reveal shares for its sum."""
    return threshold_of(block, 0)


@dataclass(frozen=True)
class Secrets:
    """The secrets of a device in one round; all of them follow from `root`."""

    root: bytes

    @cached_property
    def channel(self) -> X25519PrivateKey:
        """Return the key under which other devices send it shares."""
        return X25519PrivateKey.from_private_bytes(_derived(self.root, "channel"))

    @cached_property
    def mask_seed(self) -> bytes:
        """Return the seed of the key that makes the masks it has in common with others; shared among all members."""
        return _derived(self.root, "mask", SEED_BYTES)

    @cached_property
    def own_seed(self) -> bytes:
        """Return the seed of its own mask; shared among all members."""
        return _derived(self.root, "own", SEED_BYTES)

    def member(self, device: int) -> Member:
        """Return what the others and the server know of it."""
        return Member(
            device=device,
            channel_key=_public(self.channel),
            mask_key=_public(mask_key(self.mask_seed)),
            own_seed_hash=hash_of(self.own_seed),
        )


def mask_key(seed: bytes) -> X25519PrivateKey:
    """Return the key that stands behind `Member.mask_key`."""
    return X25519PrivateKey.from_private_bytes(_derived(seed, "mask key"))


def is_seed_of_key(seed: bytes, member: Member) -> bool:
    """Return whether a seed is that of a member's mask key."""
    return _public(mask_key(seed)) == member.mask_key


def is_own_seed(seed: bytes, member: Member) -> bool:
    """Return whether a seed is a member's own."""
    return hash_of(seed) == member.own_seed_hash


def hash_of(own_seed: bytes) -> str:
    """Return what a device tells of its own seed, so that another is found out."""
    return hashlib.sha256(b"wildflower own seed" + own_seed).hexdigest()


def _public(key: X25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _derived(secret: bytes, purpose: str, length: int = 32) -> bytes:
    info = f"wildflower secure aggregation: {purpose}".encode()
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=None, info=info).derive(secret)


def _agreed(own: X25519PrivateKey, other: str, purpose: str) -> bytes:
    with raised_as(MessageError, "a public key that nothing can be agreed with: "):
        return _derived(own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other))), purpose)


# Keys ----------------------------------------------------------------------------------------------------------------


def wrong_keys(member: Member) -> str:
    """Return why nobody can agree on anything with a member's keys; "" where they are right.

    With a point of low order every agreement gives zero, which X25519 refuses with any private key.
    """
    if member.channel_key == member.mask_key:
        return "its two public keys are the same"
    for name, key in (("channel", member.channel_key), ("mask", member.mask_key)):
        if int.from_bytes(bytes.fromhex(key), "little") >= _PRIME:
            return f"its {name} key is not written as X25519 writes keys"
        try:
            _agreed(X25519PrivateKey.from_private_bytes(bytes(32)), key, "test")
        except MessageError:
            return f"its {name} key is a point of low order"
    return ""


def with_keys_of_others(members: Iterable[Member]) -> set[int]:
    """Return the devices that share a key or a hash with another device: each may be the one that copied."""
    devices: defaultdict[str, set[int]] = defaultdict(set)
    for member in members:
        for value in (member.channel_key, member.mask_key, member.own_seed_hash):
            devices[value].add(member.device)
    return set().union(*(found for found in devices.values() if len(found) > 1))


def digest_of(*what: object) -> str:
    """Return the SHA-256 of values that JSON can write."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def digest_of_members(members: Sequence[Member], threshold: int, minimum: int) -> str:
    """Return what a device has been told of a sum before it shares its seeds."""
    return digest_of([member.model_dump() for member in members], threshold, minimum)


def digest_of_weights(tensor_sets: Mapping[str, bytes | memoryview], frozen: str) -> str:
    """Return what tells weights that devices are sent from others, whatever else comes with them.

    Args:
        tensor sets: all that devices are sent, packed. Of tensor sets with weights only these count: a method's other
        tensor sets
            may differ where the weights are the same.
        frozen: the name of what is frozen of the model.
    """
    digest = hashlib.sha256(frozen.encode())
    for name in ["weights"] if "weights" in tensor_sets else sorted(tensor_sets):
        digest.update(len(tensor_sets[name]).to_bytes(8, "little"))
        digest.update(tensor_sets[name])
    return digest.hexdigest()


def digests_of(batch: Batch, order: WorkOrder, arrays: Sequence[bytes]) -> tuple[str, str]:
    """Return the digests of the weights that an order brings, and of all that every device of its sum is asked alike.

    Who is asked something else adds something else: a server that lets the others train with a learning rate of 0, or
    from other weights, would know what they add (Pasquini et al., CCS 2022).
    """
    tensor_sets = {name: arrays[place] for name, place in order.payloads.items() if place < len(arrays)}
    contents = {name: hashlib.sha256(data).hexdigest() for name, data in tensor_sets.items()}
    training, half = batch.training.model_dump(mode="json"), order.client_step.model_dump(mode="json")
    model = batch.family, order.architecture, order.digest, order.frozen
    work = digest_of(contents, training, half, batch.task, *model, batch.norm_bound, batch.clip, batch.wire)
    return digest_of_weights(tensor_sets, order.frozen), work


def digest_of_asked(members: str, masked_with: Iterable[int], weights: str, work: str) -> str:
    """Return the digest of what a device is told before it masks its update; the masks of two devices follow from it.

    So masks cancel only between devices that were told the same: the update of who was told otherwise is never seen.
    """
    return digest_of(members, sorted(masked_with), weights, work)


# Masks ---------------------------------------------------------------------------------------------------------------


def stream(key: bytes, count: int) -> Words:
    """(count,), the words of a mask."""
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8")


def own_mask(own_seed: bytes, count: int) -> Words:
    """Return the mask of a device alone, which survivors help to take away."""
    return stream(_derived(own_seed, "own mask"), count)


def add_common_masks(into: Words, device: int, key: X25519PrivateKey, others: Mapping[int, Member], asked: str) -> None:
    """Add the masks that a device has in common with others: of two devices the lower adds it, the other takes it away.

    Args:
        into: changed in place, modulo 2^64.
        key: of the device.
        others: by device; itself is passed over.
        asked: the digest of what both have been told.
    """
    for other, member in others.items():
        if other == device:
            continue
        mask = stream(_agreed(key, member.mask_key, f"common mask of {asked}"), len(into))
        if device < other:
            into += mask
        else:
            into -= mask


# Shares --------------------------------------------------------------------------------------------------------------


def split_seed(seed: bytes, threshold: int, count: int) -> list[bytes]:
    """Return shares of a seed, any `threshold` of which give it."""
    from Crypto.Protocol.SecretSharing import Shamir

    return [share for _, share in Shamir.split(threshold, count, seed, ssss=False)]


def joined_seed(shares: Mapping[int, bytes]) -> bytes:
    """Return the seed of shares, by their places from 0 in `split_seed`; as many as its threshold."""
    from Crypto.Protocol.SecretSharing import Shamir

    return bytes(Shamir.combine([(place + 1, share) for place, share in shares.items()], ssss=False))


def hash_of_share(share: bytes) -> str:
    """Return what a device tells of a share, so that it is known who has lied where one is wrong."""
    return hashlib.sha256(b"wildflower share" + share).hexdigest()


def seal(key: X25519PrivateKey, sender: int, to: Member, own_share: bytes, mask_share: bytes, members: str) -> bytes:
    """Return a device's shares of both seeds for another device, which nobody else can read.

    members: the digest of all members; who has been told of others cannot unseal.
    """
    secret = _agreed(key, to.channel_key, f"shares of {sender} for {to.device}")
    return ChaCha20Poly1305(secret).encrypt(_NONCE, own_share + mask_share, members.encode())


def unseal(key: X25519PrivateKey, device: int, sender: Member, sealed: bytes, members: str) -> tuple[bytes, bytes]:
    """Return another device's shares of its own seed and of its mask key's seed. MessageError if they are not those."""
    secret = _agreed(key, sender.channel_key, f"shares of {sender.device} for {device}")
    try:
        both = ChaCha20Poly1305(secret).decrypt(_NONCE, sealed, members.encode())
    except InvalidTag:
        raise MessageError(f"the shares of device {sender.device} for device {device} are not as they were") from None
    return both[:SEED_BYTES], both[SEED_BYTES:]


def confirmation(key: X25519PrivateKey, sender: int, to: int, other: Member, said: str) -> str:
    """Return what proves to a device that another has been told the same.

    Args:
        key: of the one of the two that computes it.
        other: what that one knows of the other.
        said: the digest of what they have been told.
    """
    secret = _agreed(key, other.channel_key, f"confirmation of {sender} for {to}")
    return hmac.new(secret, said.encode(), hashlib.sha256).hexdigest()
