"""The newest complete state of a run: safetensors and JSON in one folder, written beside and then renamed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from strategies.method import State


@dataclass(frozen=True)
class Checkpoint:
    """The state after a round, and the clock at its end."""

    round: int
    now_seconds: float
    state: State


class CheckpointError(RuntimeError):
    """A checkpoint that is missing or not whole; the text says where and what can be done."""


def save(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Write `run_dir`/checkpoint. A crash at any moment leaves the old or the new one whole."""
    new, final, old = run_dir / "checkpoint.new", run_dir / "checkpoint", run_dir / "checkpoint.old"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.state.tensors.items()}
    safetensors.torch.save_file(tensors, new / "state.safetensors")
    meta = {"round": checkpoint.round, "now_seconds": checkpoint.now_seconds, "values": checkpoint.state.values}
    (new / "state.json").write_text(json.dumps(meta))
    for path in (new / "state.safetensors", new / "state.json"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if final.exists():  # where a crash left only the old one, it stays until the new one is in place
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def exists(run_dir: Path) -> bool:
    """Whether a checkpoint was ever finished."""
    return any((run_dir / name).exists() for name in ("checkpoint", "checkpoint.old"))


def load(run_dir: Path) -> Checkpoint:
    """Read the newest whole checkpoint of a run. Raises CheckpointError where there is none."""
    for folder in (run_dir / "checkpoint", run_dir / "checkpoint.old"):
        if not folder.exists():
            continue
        try:
            meta: dict[str, Any] = json.loads((folder / "state.json").read_text())
            tensors = safetensors.torch.load_file(folder / "state.safetensors")
            return Checkpoint(int(meta["round"]), float(meta["now_seconds"]), State(tensors, dict(meta["values"])))
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{folder} is not a whole checkpoint ({error}); start the run anew") from error
    raise CheckpointError(f"{run_dir} has no checkpoint to resume from; no round was finished")
