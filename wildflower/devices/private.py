"""Files and folders that no other user of the machine can read, whatever the umask, and that are on the disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def private_folder(folder: Path) -> None:
    """Make a folder that only its user can enter. One that is there stays as it is, and so do the folders above."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=FOLDER_MODE)


def private_open(path: Path, mode: str, **keywords: Any) -> Any:
    """`open`, but a file that is made only its user can read. One that is there keeps its mode."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, FILE_MODE), **keywords)


def close_to_others(path: Path) -> None:
    """Take the reading of a file from other users, which a library has made; where the file system has no modes: no."""
    with suppress(PermissionError):
        path.chmod(FILE_MODE)


def sync(path: Path) -> None:
    """Write a file's contents, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
