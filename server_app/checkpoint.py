"""Checkpoints of a run: the states after its last rounds, each whole, with SHA-256, and of finite values.

`checkpoint/round-12/` holds state.safetensors, state.json and SHA256SUMS, which `sha256sum -c` checks too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from wildflower.devices.validation import one_line
from wildflower.messages.sums import not_finite
from wildflower.plugins.flower_log import log
from wildflower.server_app.whole_files import newest_whole, written_whole
from wildflower.strategies.method import State

FOLDER = "checkpoint"
TENSORS, VALUES, SUMS = "state.safetensors", "state.json", "SHA256SUMS"
_ROUND = re.compile(r"round-([1-9]\d{0,9})", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """The state after a round, and the clock at its end."""

    round: int
    now_seconds: float
    state: State


class CheckpointError(RuntimeError):
    """A checkpoint that is missing or not whole; the text says where and what can be done."""


def save(run_dir: Path, checkpoint: Checkpoint, keep: int = 1) -> None:
    """Write the checkpoint of a round, and leave the newest `keep`. A crash at any moment leaves every other one whole.

    A state that holds a value that is not finite is told and not written: a run goes on from the one before.
    """
    if found := not_finite(checkpoint.state.tensors):
        text = "Round %s: the state holds values that are not finite (%s), so it is not kept as a checkpoint"
        log.warning(text, checkpoint.round, found)
        return
    with written_whole(run_dir / FOLDER / f"round-{checkpoint.round}") as folder:
        tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.state.tensors.items()}
        safetensors.torch.save_file(tensors, folder / TENSORS)
        meta = {"round": checkpoint.round, "now_seconds": checkpoint.now_seconds, "values": checkpoint.state.values}
        (folder / VALUES).write_text(json.dumps(meta, sort_keys=True))  # the same bytes for a run that was resumed
        (folder / SUMS).write_text("".join(f"{_sha256(folder / name)}  {name}\n" for name in (TENSORS, VALUES)))
    for number in rounds(run_dir)[keep:]:
        _remove(run_dir, number)


def rounds(run_dir: Path) -> list[int]:
    """The rounds that have a checkpoint, the newest first; whether they are good is not looked at."""
    found = (_ROUND.fullmatch(path.name.removesuffix(".old")) for path in (run_dir / FOLDER).glob("round-*"))
    return sorted({int(match[1]) for match in found if match}, reverse=True)


def exists(run_dir: Path) -> bool:
    """Return whether a checkpoint was ever finished."""
    return bool(rounds(run_dir))


def check_there(run_dir: Path, round: int) -> None:
    """Raise CheckpointError unless there is a checkpoint of a round; whether it is good is not looked at."""
    numbers = rounds(run_dir)
    if round not in numbers:
        there = f"there are those of rounds {', '.join(map(str, sorted(numbers)))}" if numbers else "there are none"
        raise CheckpointError(f"checkpoints.resume-from = {round}: {run_dir} has no checkpoint of that round; {there}")


def load(run_dir: Path, round: int = 0, at_most: int | None = None) -> Checkpoint:
    """The newest good checkpoint of a run, or that of a `round`. Those that are passed over are told.

    Args:
        run_dir: of the run.
        round: which one; 0: the newest.
        at_most: how many rounds the journal has; a checkpoint of a later one is passed over. None: any number.

    Raises CheckpointError where there is none such.
    """
    numbers = rounds(run_dir)
    if round:
        check_there(run_dir, round)
        return _read(_folder(run_dir, round))
    if not numbers:
        raise CheckpointError(f"{run_dir} has no checkpoint to resume from; no round was finished")
    problems: list[str] = []
    for number in numbers:
        try:
            if at_most is not None and number > at_most:
                raise CheckpointError(
                    f"{_folder(run_dir, number)} goes beyond the journal (rounds.jsonl and devices.jsonl), which is "
                    f"torn and whole up to round {at_most}"
                )
            found = _read(_folder(run_dir, number))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            log.warning("%s: going back to the checkpoint of round %s", problem, number)
        return found
    raise CheckpointError(f"{run_dir} has no good checkpoint: {'; '.join(problems)}; start the run anew")


def drop_after(run_dir: Path, round: int) -> None:
    """Remove the checkpoints of later rounds, which a run that goes on from `round` does again."""
    for number in rounds(run_dir):
        if number > round:
            _remove(run_dir, number)


def _folder(run_dir: Path, round: int) -> Path:
    final = run_dir / FOLDER / f"round-{round}"
    return newest_whole(final) or final


def _remove(run_dir: Path, round: int) -> None:
    for end in ("", ".old", ".new"):
        shutil.rmtree(run_dir / FOLDER / f"round-{round}{end}", ignore_errors=True)


def _read(folder: Path) -> Checkpoint:
    try:
        _check_sums(folder)
        meta: dict[str, Any] = json.loads((folder / VALUES).read_text())
        tensors = safetensors.torch.load_file(folder / TENSORS)
        now_seconds = float(meta["now_seconds"])
        if not (type(meta["round"]) is int and meta["round"] >= 1 and math.isfinite(now_seconds) and now_seconds >= 0):
            raise ValueError("its round or its clock is none")
        if found := not_finite(tensors):
            raise ValueError(f"values that are not finite: {found}")
        return Checkpoint(meta["round"], now_seconds, State(tensors, dict(meta["values"])))
    except (OSError, KeyError, TypeError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint ({one_line(str(error))})") from error


def _check_sums(folder: Path) -> None:
    """ValueError unless both files have the sums that were written with them."""
    wanted = (folder / SUMS).read_text().splitlines()
    for name in (TENSORS, VALUES):
        if f"{_sha256(folder / name)}  {name}" not in wanted:
            raise ValueError(f"{name} has not the SHA-256 that it was written with")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
