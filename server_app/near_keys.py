"""Keys by other names than theirs: what they are called elsewhere, and what is near."""

from __future__ import annotations

from wildflower.plugins.nearest import did_you_mean, near
from wildflower.strategies import METHODS

# What keys are called elsewhere, too far from their names here to be found by likeness.
OTHER_NAMES = {
    "lr": "learning-rate",
    "eta": "learning-rate",
    "epochs": "local-epochs",
    "num-epochs": "local-epochs",
    "steps": "local-steps",
    "bs": "batch-size",
    "wd": "weight-decay",
    "scheduler": "schedule.kind",
    "clients": "devices",
    "num-clients": "devices",
    "num-devices": "devices",
    "num-supernodes": "workers",
    "processes": "workers",
    "clients-per-round": "devices-per-round",
    "fraction-fit": "devices-per-round",
    "fraction-train": "devices-per-round",
    "num-rounds": "rounds",
    "num-server-rounds": "rounds",
    "communication-rounds": "rounds",
    "timeout": "deadline-seconds",
    "dataset": "task",
    "data": "task",
    "data-path": "data-dir",
    "split": "partition",
    "model": "family",
    "model-name": "family",
    "architecture": "family",
    "arch": "family",
    "network": "family",
    "method": "strategy",
    "algorithm": "strategy",
    "rates": "widths",
    "ratios": "widths",
    "name": "run-name",
    "output": "output-dir",
    "out": "output-dir",
    "betas": "adam.betas",
    "fused-optimizer": "adam.fused",
    "keep-checkpoints": "checkpoints.keep",
}


def meant(key: str, keys: list[str]) -> str:
    """Return what may be meant by a `key` that is none of all `keys`, and else where to look."""
    plain = key.lower().replace("_", "-")
    if in_table := [name for name in keys if name.startswith(f"{plain}.")]:
        return f"it is a table, of {', '.join(in_table)}"
    written_otherwise = [name for name in keys if name.endswith(f".{plain}") or name.replace(".", "-") == plain]
    if other := OTHER_NAMES.get(plain) or (written_otherwise[0] if len(written_otherwise) == 1 else None):
        return f"did you mean {other!r}?"
    method, dot, rest = plain.partition(".")
    shared = METHODS[method].shared_params if method in METHODS else {}
    if of_part := [name for name in keys if name in {f"{part}.{rest}" for part in shared}]:
        return f"did you mean {of_part[0]!r}?"
    if of_run := [name for name in keys if name.replace(".", "-") == rest]:  # which no method has for itself
        return f"did you mean {of_run[0]!r}?"
    own = [name for name in keys if name.startswith(f"{method}.")]
    if dot and own:
        # All of a method's keys are alike by its name: only what follows tells them apart.
        close = near(rest, [name.partition(".")[2] for name in own], most=2)
        if close:
            return f"did you mean {' or '.join(repr(f'{method}.{name}') for name in close)}?"
        return f"{method} has {', '.join(own)}"
    return did_you_mean(key, keys) or f"'wildflower config --all' lists all {len(keys)}"
