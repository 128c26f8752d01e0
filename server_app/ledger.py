"""The ledger of a private run: every noised model that it has released, written before anything of it is given out.

`ledger.jsonl` has a line for every release, also of rounds that were done again after the run went back to an earlier
checkpoint. What it counts is what the run costs (docs/privacy.md). It is only appended to. Each line has a hash of its
own content and of all lines before it, so that a line that is changed or missing shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from wildflower.devices.private import private_folder, private_open, sync
from wildflower.plugins.flower_log import log
from wildflower.plugins.invalid import in_words
from wildflower.server_app.run_folder import JournalError, read_rounds
from wildflower.server_app.run_records import Record, RoundRecord

if TYPE_CHECKING:
    from wildflower.strategies.privacy import Privacy, Release

FILE = "ledger.jsonl"
START = "0" * 64  # what stands in place of the hash of the lines before the first one


class _Begun(Record):
    """The file in which the lines from here on were written, by its inode: a copy has another one."""

    file: Annotated[int, Field(ge=0)]


class _Released(Record):
    """A release, and what the run has cost when it was made."""

    round: Annotated[int, Field(ge=1)]
    place: Annotated[int, Field(ge=1)]
    noise_multiplier: Annotated[float, Field(gt=0)]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    sha256: str
    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]

    def release(self) -> Release:
        from wildflower.strategies.privacy import Release  # imports torch, which a report does not need

        return Release(self.round, self.place, self.noise_multiplier, self.sampling_rate, self.sha256)


_ANY_LINE: TypeAdapter[_Begun | _Released] = TypeAdapter(_Begun | _Released)


class Spent(NamedTuple):
    """The privacy that a run has spent by its ledger."""

    epsilon: float
    delta: float
    releases: int


@dataclass
class _Content:
    """What a ledger holds.

    Attributes:
        file: the inode that it was written under last.
        released: its releases.
        check: the hash of its last line.
        whole_bytes: of its whole lines.
        torn: whether there is a part of a line behind them, as a power cut leaves it.
    """

    file: int = -1
    released: list[_Released] = field(default_factory=list)
    check: str = START
    whole_bytes: int = 0
    torn: bool = False


def begin(run_dir: Path) -> None:
    """Make the ledger of a new run, before anything else in its folder says that there is a run.

    Where a run of this name has released something and lost the rest of its folder, its ledger goes on.
    """
    path = run_dir / FILE
    if path.exists() and _read(path).file >= 0:
        return
    private_folder(run_dir)
    beside = path.with_suffix(".part")
    beside.unlink(missing_ok=True)
    with private_open(beside, "xb") as file:
        text, _ = _text(_Begun(file=os.fstat(file.fileno()).st_ino), START)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)  # which keeps the inode
    sync(run_dir)


def check(run_dir: Path, *, seeded: bool, copied: bool = False) -> None:
    """Raise JournalError unless the ledger of a private run says what the run in its folder has released.

    Args:
        seeded: noise follows from the seed: copies of the run then release the same.
        copied: somebody has said that this copy of the folder is the one that goes on.
    """
    content = _content(run_dir, read_rounds(run_dir))
    inode = (run_dir / FILE).stat().st_ino
    if not seeded and not copied and content.file != inode:
        raise JournalError(
            f"{run_dir / FILE} is not the file that the run has written: the folder was copied, moved to another disk "
            "or restored. Where two copies go on, or an old one, more is released than the ledger counts. If this is "
            "the newest copy and no other goes on, say so by dp.resume-copy=true"
        )


def keep(privacy: Privacy, run_dir: Path) -> None:
    """Let a run's account go on where its ledger ends, and write every release there before it is given out.

    Raises JournalError where the ledger is missing or damaged.
    """
    path = run_dir / FILE
    rounds = read_rounds(run_dir)
    content = _content(run_dir, rounds)
    account = privacy.account
    account.releases = [line.release() for line in content.released]
    if content.torn:
        os.truncate(path, content.whole_bytes)
    written = _Written(path, content.check)
    inode = path.stat().st_ino
    if content.file != inode:
        written.append(_Begun(file=inode))
    account.record = lambda release, epsilon: written.append(
        _Released(**asdict(release), epsilon=epsilon, delta=privacy.delta)
    )
    if content.torn and not privacy.seeded:
        # Its model was to be made when the line was on the disk. That the disk has lost the line later is the other
        # way in which this can be, and the model may then be known.
        log.warning("%s ends within a line: it counts as a noised model", path)
        lost = privacy.release(len(rounds) + 1)
        account.record(lost, account.epsilon(lost))
        account.releases.append(lost)


def spent(run_dir: Path, rounds: Sequence[RoundRecord]) -> Spent | None:
    """Return what a run has cost so far by its ledger; None for a run without differential privacy.

    Raises JournalError where its rounds say that there was a ledger, and that is missing or damaged.
    """
    if not (run_dir / FILE).exists() and (not rounds or rounds[-1].noised_releases is None):
        return None
    released = _content(run_dir, rounds).released
    return Spent(released[-1].epsilon, released[-1].delta, len(released)) if released else None


def has_releases(run_dir: Path) -> bool:
    """Return whether a private run has released anything. Raises JournalError for a ledger that is damaged."""
    return (run_dir / FILE).exists() and bool(_read(run_dir / FILE).released)


@dataclass
class _Written:
    """The end of a ledger, where lines are added."""

    path: Path
    check: str

    def append(self, line: Record) -> None:
        """Add a line, which is on the disk when this returns."""
        text, self.check = _text(line, self.check)
        with self.path.open("ab", buffering=0) as file:
            if file.write(text) != len(text):
                raise OSError(f"{self.path}: no room for a line of the ledger")
            os.fsync(file.fileno())


def _text(line: Record, before: str) -> tuple[bytes, str]:
    """A line with its hash, and that hash."""
    content = line.model_dump(mode="json")
    found = _check_of(content, before)
    return json.dumps({**content, "check": found}).encode() + b"\n", found


def _check_of(content: Mapping[str, Any], before: str) -> str:
    return sha256((before + json.dumps(content, sort_keys=True)).encode()).hexdigest()


def _content(run_dir: Path, rounds: Sequence[RoundRecord]) -> _Content:
    """The ledger of a private run with these rounds; JournalError where it is missing, damaged or short of releases."""
    path = run_dir / FILE
    if not path.exists():
        raise JournalError(
            f"{path} is missing: without it nobody knows what the run has released. Put it back from the same moment "
            "as the rest of the folder, or start another run"
        )
    content = _read(path)
    if content.file < 0:
        raise _damaged(path, 1, "it has no first line")
    told = max((record.noised_releases or 0 for record in rounds), default=0)
    if len(content.released) < told:
        why = f"rounds.jsonl tells of {told} noised models, and the ledger of {len(content.released)}"
        raise _damaged(path, len(content.released) + 1, why)
    return content


def _read(path: Path) -> _Content:
    content = _Content()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                content.torn = True
                break
            try:
                values = json.loads(line)
                told = values.pop("check") if isinstance(values, dict) else None
                if told != _check_of(values, content.check):
                    raise ValueError("its hash is not that of its content and of the lines before it")
                found = _ANY_LINE.validate_python(values)
            except ValidationError as error:
                raise _damaged(path, number, in_words(error)) from None
            except (ValueError, KeyError, RecursionError) as error:
                raise _damaged(path, number, "it has no hash" if isinstance(error, KeyError) else str(error)) from None
            if isinstance(found, _Begun):
                content.file = found.file
            else:
                content.released.append(found)
            content.check, content.whole_bytes = told, content.whole_bytes + len(line)
    return content


def _damaged(path: Path, number: int, why: str) -> JournalError:
    return JournalError(
        f"{path}, line {number}: {why}. The ledger counts what the run has released, and is damaged: put it back from "
        "the same moment as the rest of the folder, or start another run"
    )
