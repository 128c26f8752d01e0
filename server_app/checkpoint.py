"""The newest complete state of a run: safetensors and JSON in one folder, written beside and then renamed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from server_app.folders import newest_whole, written_whole
from strategies.method import State

FOLDER = "checkpoint"


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
    with written_whole(run_dir / FOLDER) as folder:
        tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.state.tensors.items()}
        safetensors.torch.save_file(tensors, folder / "state.safetensors")
        meta = {"round": checkpoint.round, "now_seconds": checkpoint.now_seconds, "values": checkpoint.state.values}
        (folder / "state.json").write_text(json.dumps(meta))


def exists(run_dir: Path) -> bool:
    """Whether a checkpoint was ever finished."""
    return newest_whole(run_dir / FOLDER) is not None


def load(run_dir: Path) -> Checkpoint:
    """Read the newest whole checkpoint of a run. Raises CheckpointError where there is none."""
    folder = newest_whole(run_dir / FOLDER)
    if folder is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to resume from; no round was finished")
    try:
        meta: dict[str, Any] = json.loads((folder / "state.json").read_text())
        tensors = safetensors.torch.load_file(folder / "state.safetensors")
        return Checkpoint(int(meta["round"]), float(meta["now_seconds"]), State(tensors, dict(meta["values"])))
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint ({error}); start the run anew") from error
