"""Keys by other names than theirs: what they are called elsewhere, and what is near."""

from __future__ import annotations

from wildflower.plugins.nearest import did_you_mean, near
from wildflower.strategies import METHODS

# What keys are called elsewhere, too far from their names here to be found by likeness.
_ELSEWHERE = {
    "learning-rate": "lr eta",
    "local-epochs": "epochs num-epochs",
    "local-steps": "steps",
    "batch-size": "bs",
    "weight-decay": "wd",
    "schedule.kind": "scheduler",
    "devices": "clients num-clients num-devices",
    "workers": "num-supernodes processes",
    "devices-per-round": "clients-per-round fraction-fit fraction-train",
    "rounds": "num-rounds num-server-rounds communication-rounds",
    "deadline-seconds": "timeout",
    "task": "dataset data",
    "data-dir": "data-path",
    "partition": "split",
    "family": "model model-name architecture arch network",
    "strategy": "method algorithm",
    "widths": "rates ratios",
    "run-name": "name",
    "output-dir": "output out",
    "adam.betas": "betas",
    "adam.fused": "fused-optimizer",
    "checkpoints.keep": "keep-checkpoints",
}
OTHER_NAMES = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}


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
