"""Files and folders that are whole or not there: written beside, and then renamed. Only their user can read them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from wildflower.devices.private import FOLDER_MODE, close_to_others, private_folder, private_open


@contextmanager
def written_whole(final: Path) -> Iterator[Path]:
    """Gives an empty folder to write files to, which takes the place of `final` at the end.

    A crash at any moment leaves the old folder or the new one whole, and `newest_whole` finds it.
    """
    new, old = (final.with_name(f"{final.name}.{which}") for which in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    private_folder(new.parent)
    new.mkdir(mode=FOLDER_MODE)
    yield new
    for path in new.iterdir():
        close_to_others(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if final.exists():  # where a crash left only the old one, it stays until the new one is in place
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def file_written_whole(final: Path, *, private: bool = True) -> Iterator[BinaryIO]:
    """Gives an open file, which takes the place of `final` at the end: at every moment one of the two is there.

    Only its user can read it, unless it is not `private`: then the umask says who can.
    """
    new = final.with_name(final.name + ".new")
    new.unlink(missing_ok=True)  # which a crash has left, with whatever mode
    with private_open(new, "wb") if private else new.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    new.replace(final)


def write_whole(final: Path, text: str) -> None:
    """Write a file as `file_written_whole` does."""
    with file_written_whole(final) as file:
        file.write(text.encode())


def newest_whole(final: Path) -> Path | None:
    """The newest folder that `written_whole` finished; None where there was never one."""
    return next((folder for folder in (final, final.with_name(f"{final.name}.old")) if folder.exists()), None)
