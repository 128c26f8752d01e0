"""The files that a simulation's devices write while their worker answers a message; of a killed worker none stays.

The worker tells its server of every file before it puts the file in place. If the worker is killed before it answers,
the server undoes that, and another worker does the same orders from the same state. On hardware nobody is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Written:
    """A file that a message writes, and what it held before; None where it was not there, or what it held is void."""

    path: Path
    before: bytes | None

    def undo(self) -> None:
        """Leave what was there before the message."""
        if self.before is None:
            self.path.unlink(missing_ok=True)
            return
        beside = self.path.with_suffix(".undone.part")
        beside.touch(mode=0o600)  # it may hold keys
        beside.write_bytes(self.before)
        beside.replace(self.path)


_tell: Callable[[Written], None] | None = None


def tell_with(tell: Callable[[Written], None]) -> None:
    """From now on this process, a worker of a simulation, says what it writes."""
    global _tell
    _tell = tell


def will_write(path: Path, *, restore: bool = False) -> None:
    """Say that a file is about to be put in place.

    restore: undoing brings back what the file holds now; else it removes the file.
    """
    if _tell is not None:
        _tell(Written(path, path.read_bytes() if restore and path.exists() else None))
