"""The folder of a run: which folders are runs, who writes to one, and what its files say."""

import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel, ValidationError

from wildflower.devices.private import private_folder, private_open
from wildflower.plugins.invalid import in_words
from wildflower.plugins.user_error import UserError
from wildflower.server_app.run_records import DeviceRecord, RoundRecord, RunFile, Summary

LOCK, LOCK_SECONDS = "lock", 0.2
COMMAND_LOCK = "command.lock"  # of the command that runs it, which begins before its server and follows it to the end
SWEEP_LOGS = "logs"  # what the runs of a sweep have said lies beside their folders


class JournalError(UserError, RuntimeError):
    """A run folder that cannot be written to, or that does not hold what a run leaves behind."""


AnyRecord = TypeVar("AnyRecord", RoundRecord, DeviceRecord)
Content = TypeVar("Content", bound=BaseModel)


@contextmanager
def alone_in(run_dir: Path, lock: str = LOCK) -> Iterator[None]:
    """Hold the run's folder: two processes that write one journal would ruin it. JournalError where another holds it.

    The lock goes with the process that holds it, so that a killed run leaves none behind.
    """
    private_folder(run_dir)
    path = run_dir / lock
    with private_open(path, "a") as file:
        # Who held it may have taken it away while it was waited for: then it is nobody's, and another one may be there.
        if not _locked(file, seconds=LOCK_SECONDS) or not _is_at(file, path):
            raise JournalError(
                f"another process writes the run in {run_dir}: wait for its end, or stop it, or choose another run-name"
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that a path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_run(run_dir: Path) -> bool:
    """Return whether a folder holds a run, finished or not."""
    return (run_dir / "config.json").exists() or (run_dir / "rounds.jsonl").exists()


def runs_of(folders: Iterable[Path]) -> list[Path]:
    """The folders of the runs that these folders are or hold, each once: a sweep's folder holds its runs.

    The logs of a sweep are passed over, so that all that lies in its folder may be given. Raises JournalError for a
    folder that neither is a run nor holds one.
    """
    found: list[Path] = []
    for folder in folders:
        if is_run(folder):
            found.append(folder)
        elif inside := sorted(path for path in folder.glob("*/") if is_run(path)):
            found += inside
        elif not (folder.name == SWEEP_LOGS and any(is_run(path) for path in folder.absolute().parent.glob("*/"))):
            raise JournalError(
                f"{folder} is neither the folder of a run, which has a config.json, nor one that holds such folders, "
                "as that of a sweep does: give folders like runs/NAME"
            )
    return list({path.resolve(): path for path in found}.values())


def _locked(file: IO[str], seconds: float) -> bool:
    """Lock an open file; a process that only looks whether it is locked holds it for a moment."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)


def is_held(run_dir: Path) -> bool | None:
    """Return whether a process writes the run; None where none has begun, or the last one has ended in order.

    False: the one that did was killed, and could not take its lock away.
    """
    path = run_dir / LOCK
    try:
        with path.open("r") as file:
            if not _locked(file, seconds=0.0):
                return True
            fcntl.flock(file, fcntl.LOCK_UN)
    except FileNotFoundError:
        return None
    return False if path.exists() else None  # it may have been taken away in between


def read_config(run_dir: Path) -> RunFile:
    """Return the content of config.json. Raises JournalError when there is no run."""
    path = run_dir / "config.json"
    try:
        return RunFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise JournalError(f"{run_dir} is not the folder of a run: it has no config.json") from None
    except ValidationError as error:
        raise JournalError(
            f"{path}: {in_words(error)}. Without the configuration that it began with a run does not go on: put the "
            "file back from a copy, or start another run"
        ) from None


def has_virtual_clock(run_dir: Path) -> bool:
    """Return whether a run's devices are those of a fleet, whose time is simulated. Raises JournalError without a
    run."""
    return bool(read_config(run_dir).config["fleet"])


def read_summary(run_dir: Path) -> Summary | None:
    """The content of summary.json, or None while the run has not ended."""
    return read_if_there(run_dir / "summary.json", Summary)


def read_if_there(path: Path, kind: type[Content]) -> Content | None:
    """Return what a JSON file of a run holds; None where there is none. Raises JournalError for another kind of
    file."""
    if not path.exists():
        return None
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise JournalError(f"{path} cannot be read: {in_words(error)}") from None


def read_rounds(run_dir: Path) -> list[RoundRecord]:
    """The finished rounds, 1, 2, ... without gaps. A torn last line, as a crash leaves it, is not a finished round."""
    rounds = list(_read_lines(run_dir / "rounds.jsonl", RoundRecord))
    for expected, record in enumerate(rounds, start=1):
        if record.round != expected:
            raise JournalError(
                f"{run_dir / 'rounds.jsonl'}, line {expected}: round {record.round} instead of {expected}"
            )
    return rounds


def read_devices(run_dir: Path) -> Iterator[DeviceRecord]:
    """The devices of every round, one after the other, also those of a round that a crash kept from finishing."""
    return _read_lines(run_dir / "devices.jsonl", DeviceRecord)


def whole_rounds(run_dir: Path) -> int:
    """Return how many rounds both files of the journal have in full: a damaged disk may have taken the end of either.

    What devices.jsonl has beyond the last round is of a round that a crash kept from finishing, and does not matter.
    """
    rounds = read_rounds(run_dir)
    lines = Counter(device.round for device in read_devices(run_dir))
    torn = (record.round for record in rounds if lines[record.round] < record.device_lines)
    return next(torn, len(rounds) + 1) - 1


def _read_lines(path: Path, kind: type[AnyRecord]) -> Iterator[AnyRecord]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a crash: only the last line can lack its end
            try:
                yield kind.model_validate_json(line)
            except ValidationError as error:
                raise JournalError(f"{path}, line {number}: {in_words(error)}") from None
