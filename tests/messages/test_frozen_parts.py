"""What is frozen of a sub-model as it travels, and what a device takes of it."""

import hashlib
import math

import pytest
import torch

from wildflower.messages.error import MessageError
from wildflower.messages.frozen_parts import Part, frozen_nbytes, packed_part, read_part
from wildflower.messages.packing import Layout
from wildflower.models.family import make_family

LAYOUT = Layout.of({"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(2)})
BYTES = [b"a" * 8, b"b" * 4, b"c" * 8]
HASHES = [hashlib.sha256(data).digest() for data in BYTES]
NAME = hashlib.sha256(b"".join(HASHES)).hexdigest()
PART = Part(tuple(digest.hex() for digest in HASHES))


def test_a_part_is_its_hashes_flags_and_the_tensors_that_are_sent():
    data = packed_part(PART, {2: BYTES[2], 0: BYTES[0]})
    assert data == b"".join(HASHES) + bytes([1, 0, 1]) + b"aaaaaaaacccccccc"
    part, contents = read_part(data, NAME, LAYOUT)
    assert (part, part.name) == (PART, NAME)
    assert {name: bytes(content) for name, content in contents.items()} == {
        HASHES[0].hex(): BYTES[0],
        HASHES[2].hex(): BYTES[2],
    }
    assert read_part(packed_part(PART, {}), NAME, LAYOUT) == (PART, {})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "in 0 bytes, too few for 3 tensors"),
        (b"".join(HASHES) + bytes([1, 0]), "in 98 bytes, too few"),
        (b"".join(HASHES) + bytes([1, 0, 0]) + BYTES[0] + b"x", "other tensors than it says"),
        (b"".join(HASHES) + bytes([1, 0, 1]) + BYTES[0], "other tensors than it says"),
        (b"".join(HASHES) + bytes([2, 0, 0]) + BYTES[0], "other tensors than it says"),
        (b"".join([HASHES[1], *HASHES[1:]]) + bytes([0, 1, 0]) + BYTES[1], "a hash that is not its own"),
        (b"".join(HASHES) + bytes([1, 0, 0]) + BYTES[2], "a, which is frozen, came with a hash that is not its own"),
    ],
)
def test_what_is_not_as_it_says_is_refused(data, words):
    with pytest.raises(MessageError, match=words):
        read_part(data, NAME, LAYOUT)


def test_the_price_is_that_of_a_device_that_has_nothing():
    family = make_family({"name": "lenet5", "freeze": ["block1", "block2.conv"]})
    frozen = [spec for spec in family.tensors(family.full()).values() if spec.frozen]
    assert frozen_nbytes(family, family.full()) == sum(4 * math.prod(spec.shape) + 33 for spec in frozen)
    assert frozen_nbytes(make_family({"name": "lenet5"}), family.full()) == 0
