"""Keys by other names than theirs: what they were called, what they are called elsewhere, and what is near."""

from __future__ import annotations

from wildflower.plugins.nearest import did_you_mean, near

_PLUG_INS = "leave it out, or take as strategy the plug-in that does it, in benchmarks/"
_BETAS = "write both in one, such as fedadam.betas = [0.9, 0.99]"

# Keys that are called otherwise now, or are no keys any more -> their new name, or a sentence.
# A value with a blank is a sentence, which says what to do.
MOVED: dict[str, str] = {
    "dp-epsilon": "dp.epsilon",
    "dp-noise-multiplier": "dp.noise-multiplier",
    "dp-clip": "dp.clip",
    "dp-delta": "dp.delta",
    "resume-copy": "dp.resume-copy",
    "resume-from": "checkpoints.resume-from",
    "keep-checkpoints": "checkpoints.keep",
    "secure-aggregation": "set secure-aggregation.minimum = 5, the fewest devices whose sum the server may see",
    "secure-minimum": "secure-aggregation.minimum",
    "public-task": "public.task",
    "public-data-dir": "public.data-dir",
    "public-examples": "public.examples",
    "personal-every": "personal.every",
    "personal-epochs": "personal.epochs",
    "personal-from": "personal.first-round",
    "statistics-devices": "statistics.devices",
    "statistics-examples": "statistics.examples",
    "schedule": "schedule.kind",
    "decay-rounds": "schedule.decay-rounds",
    "decay-factor": "schedule.decay-factor",
    "aggregation": "aggregation.rule",
    "aggregation-trim": "aggregation.trim",
    "over-selection": "aggregation.over-selection",
    "norm-bound": "aggregation.norm-bound",
    "initial-weights": "initial.weights",
    "initial-names": "initial.names",
    "strong-devices": "strong.devices",
    "strong-share": "strong.share",
    "strong-test": "strong.test",
    "betas": "adam.betas",
    "fused-optimizer": "adam.fused",
    "layout": "compute.layout",
    "memory-fraction": "budget.memory-fraction",
    "transfer-seconds": "budget.transfer-seconds",
    "round-seconds": "budget.round-seconds",
    "hypemefed.fill": f"{_PLUG_INS}hypemefed/hypemefed_controls.py: Owners, Stale, MovingAverage",
    "hypemefed.ema-decay": f"{_PLUG_INS}hypemefed/hypemefed_controls.py: MovingAverage",
    "hypemefed.exits": f"{_PLUG_INS}hypemefed/hypemefed_controls.py: DeepestExit",
    "hypemefed.sent-bases": f"{_PLUG_INS}hypemefed/hypemefed_controls.py: SentBases",
    "hypemefed.shift": f"{_PLUG_INS}hypemefed/hypemefed_controls.py: Shifted",
    "recipfl.weighting": f"{_PLUG_INS}recipfl/recipfl_controls.py: ByExamples",
    "recipfl.class-counts": f"{_PLUG_INS}recipfl/recipfl_controls.py: FirstUpload",
    "recipfl.descriptor": f"{_PLUG_INS}recipfl/recipfl_controls.py: Clients",
    "recipfl.conditioned": f"{_PLUG_INS}recipfl/recipfl_controls.py: Classifier",
    "inclusivefl.momentum-of": "leave it out: the momentum is the mean of updates with what was injected, as printed",
    "inclusivefl.eta": "fedadam.eta",
    "inclusivefl.beta-1": _BETAS,
    "inclusivefl.beta-2": _BETAS,
    "inclusivefl.tau": "fedadam.tau",
    "fedadam.beta-1": _BETAS,
    "fedadam.beta-2": _BETAS,
    "fedadam.use": f"{_PLUG_INS}inclusivefl/inclusivefl_controls.py: ExclusiveAdam, SmallestAdam",
    "fedavgm.eta": "leave it out: the server's learning rate is 1, as in the paper",
    "anycostfl.aggregation": "leave it out: devices weigh by examples / (1 + squared error of the compression)",
    "ensemble.held-out": "leave it out: a tenth of the public examples says when to stop",
    "model-search.architectures": f"{_PLUG_INS}methods_that_win/nested_search.py: NestedSearch",
    "model-search.sandwich": f"{_PLUG_INS}methods_that_win/nested_search.py: NestedSearch",
    "model-search.weighting": f"{_PLUG_INS}model_search/model_search_controls.py: ByExamples",
    "rafl.search-again": "leave it out: a device keeps its personal model while it fits, as in the paper",
    "rafl.search-after": "leave it out: a device keeps its personal model while it fits, as in the paper",
    "rafl.knowledge-arguments": "write them behind the name in rafl.knowledge-family, such as 'lenet5, hidden = [8]'",
    "fednas.alpha-rate": "leave it out: it is that of DARTS",
    "fednas.alpha-decay": "leave it out: it is that of DARTS",
    "spatl.eta": "leave it out: the server's learning rate is 1",
    "recipfl.clip-norm": "leave it out: it is 50, as in the published code",
    "rafl.min-blocks": "leave it out: one block stays of each stage; rafl.shares without 0 leaves out none",
    "inclusivefl.rates": f"{_PLUG_INS}inclusivefl/inclusivefl_controls.py: RatesByType",
    "recipfl.divergence": f"{_PLUG_INS}recipfl/recipfl_controls.py: Ablated",
    "recipfl.feature-weight": f"{_PLUG_INS}recipfl/recipfl_controls.py: Ablated",
    "state-dir": "leave it out: simulated devices keep what stays on them in the run's folder",
    "report-max-age-seconds": "leave it out: a real node is asked anew where its last report is ten minutes old",
}
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
}


def moved_to(key: str) -> str:
    """Return what a key that was renamed or dropped is now, in words; "" for others."""
    new = MOVED.get(key.replace("_", "-"), "")
    return f"it is called {new!r} now" if new and " " not in new else new


def meant(key: str, keys: list[str]) -> str:
    """Return what may be meant by a `key` that is none of all `keys`, and else where to look."""
    plain = key.lower().replace("_", "-")
    of_methods = [name for name in keys if name.endswith(f".{plain}")]
    other = OTHER_NAMES.get(plain) or (of_methods[0] if len(of_methods) == 1 else None)
    if other is not None:
        return f"did you mean {other!r}?"
    if in_table := [name for name in keys if name.startswith(f"{plain}.")]:
        return f"it is a table, of {', '.join(in_table)}"
    method, dot, rest = key.partition(".")
    rest = MOVED.get(rest, rest)
    if rest in keys:  # a key of the run, which no method has for itself
        return f"did you mean {rest!r}?"
    own = [name for name in keys if name.startswith(f"{method}.")]
    if dot and own:
        # All of a method's keys are alike by its name: only what follows tells them apart.
        close = near(rest, [name.partition(".")[2] for name in own], most=2)
        if close:
            return f"did you mean {' or '.join(repr(f'{method}.{name}') for name in close)}?"
        return f"{method} has {', '.join(own)}"
    return did_you_mean(key, keys) or f"'wildflower config --all' lists all {len(keys)}"
