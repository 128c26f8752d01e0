"""Messages over a socket between processes of one machine: a JSON header, and arrays."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

MAX_HEADER_BYTES = 2**26
MAX_ARRAYS_BYTES = 2**33
LENGTH = struct.Struct("<Q")


def send(link: socket.socket, header: Mapping[str, Any], arrays: list[bytes]) -> None:
    """Send a message: the length of a JSON header, the header with the arrays' lengths, the arrays."""
    text = json.dumps({**header, "sizes": [len(array) for array in arrays]}).encode()
    link.sendall(LENGTH.pack(len(text)) + text)
    for array in arrays:
        link.sendall(array)


def receive(link: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Read a message. Raises EOFError where it breaks off, ValueError where it is none of ours."""
    (length,) = LENGTH.unpack(_read(link, LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes: at most {MAX_HEADER_BYTES}")
    header = json.loads(_read(link, length))
    sizes = header.pop("sizes", None) if isinstance(header, dict) else None
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("the header is not a JSON object with the sizes of the arrays")
    if sum(sizes) > MAX_ARRAYS_BYTES:
        raise ValueError(f"arrays of {sum(sizes)} bytes: at most {MAX_ARRAYS_BYTES}")
    return header, [_read(link, size) for size in sizes]


def _read(link: socket.socket, nbytes: int) -> bytes:
    # On a link that blocks, one call reads all bytes, so that a large array is not held twice. After a signal, or on a
    # link with a timeout, as that of a board's GPU trainer, it returns with what is there.
    parts, left = list[bytes](), nbytes
    while left:
        parts.append(link.recv(left, socket.MSG_WAITALL))
        if not parts[-1]:
            raise EOFError(f"the connection ended after {nbytes - left} of {nbytes} bytes")
        left -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)
