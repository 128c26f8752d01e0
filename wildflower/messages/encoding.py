"""TensorSets in fewer bytes: int8 and float16 on the wire, rounded to the nearest value.

Under "int8" tensors travel as 8-bit integers with one scale per output channel, or per several where these are small.
Batch norm's statistics, whose channels are of very different sizes, and tensors of a few elements travel as 16-bit
floats with one exponent, as all tensors do under "float16". Tensors of other types than float32, such as masks, travel
as they are.

What is lost by rounding is not lost for good. A device returns how it has changed what it received, and keeps what was
rounded away, which it adds in the next round (error feedback: Seide et al. 2014, Karimireddy et al. 2019). The server
adds the change to the weights that it holds in full, so that what it rounded on the way down never enters the model.
Under "qsgd" changes travel as in QSGD (Alistarh et al., NeurIPS 2017) with 64 levels, and all else as under "int8": the
scale is a 64th of the channels' L2 norm, and an element becomes one of the two levels beside it, by a chance that makes
the mean the element itself. Nothing is kept of what that loses.

Batch norm's statistics travel as values both ways: a change from a rounded variance, added to the variance in full,
could make it negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor

from wildflower.messages.error import MessageError
from wildflower.messages.packing import Entry, Layout, pack, unpack
from wildflower.models.base import STATISTICS

Wire = Literal["float32", "float16", "int8", "qsgd"]

LEAST_BLOCK = 128  # elements that share a scale, at least: a scale of 2 bytes then adds 1.6 % at most
LEAST_NUMEL = 16  # elements of a tensor that travels in 8 bits
_LARGEST = 127
_LEVELS = 64  # of QSGD: as in the paper of dynamic model search, appendix G.4
_HALF_BITS = 14  # a tensor of 16-bit floats is scaled so that its largest element lies between 2^14 and 2^15
_EXPONENTS = (-126, 113)  # of these scales; both powers and their inverses are 32-bit floats


def encoded_bytes(layout: Layout, wire: Wire) -> int:
    """Return the bytes that the tensors of a layout take on the wire."""
    return layout.nbytes if wire == "float32" else sum(_nbytes(entry, wire) for entry in layout.entries)


def encode(tensors: Mapping[str, Tensor], layout: Layout, wire: Wire) -> bytes:
    """Return the tensors of a layout as they travel. MessageError if they are not those, or a value is not finite."""
    if wire == "float32":
        return pack(tensors, layout)
    if difference := layout.difference(Layout.of(tensors)):
        raise MessageError(f"cannot encode weights: {difference}")
    return b"".join(encode_entry(tensors[entry.name], entry, wire) for entry in layout.entries)


def decode(data: bytes, layout: Layout, wire: Wire) -> dict[str, Tensor]:
    """Return the tensors of bytes of the wire, in memory of their own; MessageError if the length is wrong.

    Whatever the bytes are, as many values come of them as the layout says. They need not be finite.
    """
    if wire == "float32":
        return unpack(data, layout)
    return {entry.name: decode_entry(part, entry, wire) for entry, part in parts_of(data, layout, wire)}


def parts_of(data: bytes, layout: Layout, wire: Wire) -> list[tuple[Entry, memoryview]]:
    """Return the bytes of every tensor, under another wire than "float32"; MessageError where the length is wrong."""
    wanted = encoded_bytes(layout, wire)
    if len(data) != wanted:
        raise MessageError(f"weights encoded as {wire} have {len(data)} bytes instead of {wanted}")
    found, start, view = [], 0, memoryview(data)
    for entry in layout.entries:
        end = start + _nbytes(entry, wire)
        found.append((entry, view[start:end]))
        start = end
    return found


def encode_entry(tensor: Tensor, entry: Entry, wire: Wire, *, change: bool = False) -> bytes:
    """Return one tensor as it travels in fewer bits, a change or a value. MessageError where a value is not finite."""
    tensor = tensor.detach().to("cpu").contiguous()
    if not entry.numel or entry.dtype != torch.float32:
        return _bytes_of(tensor)
    if not bool(torch.isfinite(tensor).all()):
        raise MessageError(f"tensor {entry.name!r} holds values that are not finite")
    flat = tensor.reshape(-1)
    if not _in_int8(entry, wire):
        exponent = torch.frexp(flat.abs().max()).exponent.int().sub(1 + _HALF_BITS).clamp(*_EXPONENTS)
        half = flat.mul(2.0 ** -int(exponent)).to(torch.float16)
        return _bytes_of(exponent.to(torch.int8).reshape(1)) + _bytes_of(half)
    blocks = _blocked(flat, entry)
    by_chance = change and wire == "qsgd"
    levels = _LEVELS if by_chance else _LARGEST
    largest = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64) if by_chance else blocks.abs().amax(dim=1)
    scales = (largest / levels).to(torch.bfloat16)
    # Rounded up, so that the largest element is not cut: bits of positive floats are in the order of their values.
    low = scales.float() * levels < largest
    scales = torch.where(low, (scales.view(torch.int16) + 1).view(torch.bfloat16), scales)
    divisors = scales.float().masked_fill(scales == 0, 1.0)
    whole = blocks / divisors[:, None]
    if by_chance:  # which follows from the values, so that a run's bits do
        chance = torch.rand(whole.shape, generator=torch.Generator().manual_seed(crc32(_bytes_of(flat))))
        whole = whole.sign() * (whole.abs() + chance).floor_()
    whole = whole.round_().clamp_(-levels, levels).to(torch.int8)
    return _bytes_of(scales) + _bytes_of(whole.reshape(-1)[: entry.numel])


def decode_entry(data: bytes | memoryview, entry: Entry, wire: Wire) -> Tensor:
    """Return the tensor that `encode_entry` has encoded, in memory of its own."""
    if not entry.numel:
        return torch.empty(entry.shape, dtype=entry.dtype)
    if entry.dtype != torch.float32:
        return _vector(data, entry.dtype).view(entry.shape)
    if not _in_int8(entry, wire):
        exponent = int(_vector(data[:1], torch.int8))
        return _vector(data[1:], torch.float16).float().mul_(2.0**exponent).view(entry.shape)
    count = _block_count(entry)
    scales = _vector(data[: 2 * count], torch.bfloat16).float()
    blocks = _blocked(_vector(data[2 * count :], torch.int8).float(), entry)
    return (blocks * scales[:, None]).reshape(-1)[: entry.numel].view(entry.shape)


def may_be_a_change(entry: Entry) -> bool:
    """Return whether a tensor that a device was sent comes back as its change, and what rounding loses is kept."""
    return entry.dtype == torch.float32 and not entry.name.endswith(STATISTICS)


def start_of(sent: Mapping[str, Tensor], entry: Entry) -> Tensor | None:
    """Return the tensor that a device was sent, of which the returned one is the change; None if it is a value."""
    tensor = sent.get(entry.name)
    return tensor if tensor is not None and may_be_a_change(entry) and tensor.shape == entry.shape else None


def restored(changes: Mapping[str, Tensor], sent: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return what a device returns, from what it says of its change and from what the server had for it.

    Tensors that it was not sent in that form, and batch norm's statistics, have travelled as values.
    """
    found = {}
    for entry in layout.entries:
        start = start_of(sent, entry)
        found[entry.name] = changes[entry.name] if start is None else start + changes[entry.name]
    return found


def _in_int8(entry: Entry, wire: Wire) -> bool:
    return wire in ("int8", "qsgd") and entry.numel >= LEAST_NUMEL and not entry.name.endswith(STATISTICS)


def _block(entry: Entry) -> int:
    """Consecutive elements that share a scale: whole output channels, at least LEAST_BLOCK elements."""
    channel = entry.numel // entry.shape[0]
    return channel * max(1, -(-LEAST_BLOCK // channel))


def _block_count(entry: Entry) -> int:
    return -(-entry.numel // _block(entry))


def _blocked(flat: Tensor, entry: Entry) -> Tensor:
    """(blocks, elements) of a flat tensor, the last block filled up with zeros."""
    count, block = _block_count(entry), _block(entry)
    return torch.nn.functional.pad(flat, (0, count * block - len(flat))).view(count, block)


def _nbytes(entry: Entry, wire: Wire) -> int:
    if not entry.numel or entry.dtype != torch.float32:
        return entry.nbytes
    return 2 * _block_count(entry) + entry.numel if _in_int8(entry, wire) else 1 + 2 * entry.numel


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _vector(data: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)
