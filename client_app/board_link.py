"""The connection to a board's GPU trainer (deploy/jetson/gpu_trainer.py). Nothing here needs torch."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wildflower.client_app.frames import receive, send

SILENCE_SECONDS = 600.0  # the longest that one step may take


class BoardError(RuntimeError):
    """The board's trainer cannot be reached, or could not do what it was asked; the text says why."""


@contextmanager
def connection(path: Path) -> Iterator[socket.socket]:
    """A connection to the trainer that listens at `path`. Raises BoardError."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(SILENCE_SECONDS)
        with as_board_error(f" at {path}"):
            link.connect(str(path))
        yield link


@contextmanager
def as_board_error(where: str = "") -> Iterator[None]:
    """Turn what goes wrong with the connection into a BoardError."""
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        raise BoardError(
            f"the board's GPU trainer{where} does not answer ({error}): is it running? systemctl status wildflower-gpu"
        ) from error


def take(link: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Return the trainer's answer and its arrays; BoardError, or MemoryError, where it says that it failed."""
    with as_board_error():
        answer, arrays = receive(link)
    if "error" not in answer:
        return answer, arrays
    if answer["out_of_memory"]:
        raise MemoryError(answer["error"])
    raise BoardError(f"the board's GPU trainer failed: {answer['error']}")


def about(path: Path) -> dict[str, Any]:
    """Return what the trainer says of itself: `device`, `memory_total_bytes`, `torch`, `python`. Raises BoardError."""
    with connection(path) as link:
        with as_board_error():
            send(link, {"do": "hello", "tensors": []}, [])
        return take(link)[0]
