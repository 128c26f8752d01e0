"""Records digests of what every method computes, or compares them with those of an earlier commit.

A refactoring must not change any trained bit. Every variant below is a small run of three rounds whose keys are all
written out, so that a default that changes later does not change what is compared. README.md has the commands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]

FLEET = """
[[group]]
name = "whole"
count = 2
fits_width = 1.0
link = "100 Mbit/s"
speed = 3.0

[[group]]
name = "half"
count = 2
fits_width = 0.5
link = "20 Mbit/s"
speed = 2.0

[[group]]
name = "quarter"
count = 2
fits_width = 0.25
link = "5 Mbit/s"
speed = { uniform = [0.5, 1.0] }
"""

# Under FLEET every device has exactly what its width needs. Here strong ones have room for two models, and what the
# others have changes from round to round: memory in one group, links in the other.
ROOMY = """
[[group]]
name = "strong"
count = 2
training_memory = "100 MB"
link = "100 Mbit/s"

[[group]]
name = "short of memory"
count = 2
training_memory = { uniform = ["690 kB", "930 kB"], every = "round" }
link = "100 Mbit/s"

[[group]]
name = "slow"
count = 2
training_memory = "100 MB"
link = { uniform = ["0.02 Mbit/s", "0.6 Mbit/s"], every = "round" }
"""

# What all variants share, unless they say something else.
BASE: dict[str, Any] = {
    "task": "digits",
    "data-dir": "",
    "family": "lenet5",
    "family-arguments": "",
    "partition": "dirichlet",
    "alpha": 0.5,
    "test-fraction": 0.0,
    "examples-per-device": 24,  # few enough that devices lack classes
    "devices": 6,
    "workers": 2,
    "devices-per-round": 4,
    "aggregation.over-selection": 0.0,
    "budget.memory-fraction": 0.85,
    "budget.transfer-seconds": 0.0,
    "deadline-seconds": 0.0,
    "below-smallest": "skip",
    "both-models": False,
    "widths": "1, 0.5, 0.25",
    "rounds": 3,
    "local-epochs": 1,
    "local-steps": 0,
    "batch-size": 8,
    "optimizer": "sgd",
    "learning-rate": 0.05,
    "momentum": 0.9,
    "adam.betas": "0.9, 0.999",
    "weight-decay": 0.0005,
    "clip-norm": 0.0,
    "aggregation.norm-bound": 0.0,
    "schedule.kind": "steps",
    "schedule.decay-rounds": "",
    "schedule.decay-factor": 0.1,
    "augment": True,
    "seed": 3,
    "evaluate-every": 1,
    "evaluate-tiers": True,
    "deliver": "largest",
    "statistics.devices": 4,  # as many as a round has
    "statistics.examples": 0,
    "personal.every": 0,
    "personal.epochs": 1,
    "personal.first-round": 1,
}
# Every method's own keys.
DISTILLATION = {
    "distillation.steps": 0,
    "distillation.batch-size": 64,
    "distillation.learning-rate": 0.001,
    "distillation.schedule": "as-training",
    "distillation.students": "with-smallest",
}
ENSEMBLE = {
    "ensemble.steps": 3,
    "ensemble.batch-size": 8,
    "ensemble.learning-rate": 0.001,
    "ensemble.patience": 1000,
}
OWN: dict[str, dict[str, Any]] = {
    "fedavg": {"fedavg.use": "all-large"},
    "local": {},
    "fedprox": {"fedprox.mu": 0.1},
    "fedavgm": {"fedavgm.beta": 0.9},
    "fednova": {},
    "scaffold": {"scaffold.eta": 1.0},
    "q-fedavg": {"q-fedavg.q": 1.0},
    "feddf": ENSEMBLE,
    "rafl": {"rafl.shares": "0.25, 0.5, 0.75, 1"} | ENSEMBLE,
    "inclusivefl": {"fedadam.eta": 0.01, "fedadam.tau": 0.001, "inclusivefl.momentum": 0.2},
    "flexifed": {"flexifed.sharing": "clustered"},
    "lotteryfl": {"lotteryfl.pruned": 0.1, "lotteryfl.threshold": 0.0, "lotteryfl.target": 0.5},
    "spatl": {"spatl.sparsity": 0.3},
    "fednas": {"fednas.validation-weight": 1.0},
    "wildflower": {"wildflower.levels": 4, "wildflower.masked-loss": True, "wildflower.momentum": 0.5},
    "fedadam": {"fedadam.eta": 0.01, "fedadam.betas": "0.9, 0.99", "fedadam.tau": 0.001},
    "heterofl": {"heterofl.dynamic": False} | DISTILLATION,
    "fedrolex": DISTILLATION,
    "federated-dropout": DISTILLATION,
    "fjord": {"fjord.distillation": False} | DISTILLATION,
    "anycostfl": DISTILLATION,
    "model-search": {
        "model-search.searcher": "exact",
        "model-search.shares": "0.25, 0.5, 1",
        "model-search.layer-shares": "",
        "model-search.min-blocks": 1,
        "model-search.tolerance": 0.02,
        "model-search.epsilon": 0.8,
        "model-search.max-draws": 5,
        "model-search.masked-loss": True,
        "model-search.norm": "static",
    }
    | DISTILLATION,
    "hypemefed": {
        "hypemefed.rank": 100,
        "hypemefed.hidden": 8,
        "hypemefed.epochs": 2,
        "hypemefed.learning-rate": 0.0005,
        "hypemefed.guess": "change",
        "hypemefed.generate": "layers",
    },
    "depthfl": {"depthfl.ramp-rounds": 4, "depthfl.alpha": 0.0, "depthfl.scored": "deepest"},
    "scalefl": {"scalefl.widths": "", "scalefl.gamma": 1.0, "scalefl.temperature": 3.0},
    "recipfl": {
        "recipfl.eta": 0.001,
        "recipfl.hidden": 8,
        "recipfl.decoder-hidden": 8,
        "recipfl.tile": 8,
        "recipfl.hypernetwork": "published",
    },
}
EXITS = {"family": "vgg", "family-arguments": "block_channels = [2, 4, 32], exits = [0, 1, 2]"}
CHOICE = {
    "family": "choice",
    "family-arguments": "members = {large = {name = 'lenet5'}, small = {name = 'lenet5', conv_channels = [6, 3], "
    "hidden = [84]}}",
    "below-smallest": "smallest",  # which is larger than a quarter of the large one
}
VGG = {"family": "vgg", "family-arguments": "block_channels = [4, 8, 16]"}
RESNET = {"family": "resnet18", "family-arguments": "first_channels = 4"}
VIT = {"family": "vit-tiny", "family-arguments": "hidden = 16, depth = 2, heads = 4, mlp = 32"}
LAYERS = {
    "family": "vit-tiny",
    "family-arguments": "hidden = 12, depth = 3, heads = 2, mlp = 16",
    "below-smallest": "smallest",  # one layer of the full width is more than a quarter of all layers
}
FAMILY: dict[str, dict[str, Any]] = {
    "hypemefed": EXITS,
    "depthfl": EXITS,
    "scalefl": EXITS,
    "recipfl": CHOICE,
    "inclusivefl": LAYERS,
    "flexifed": LAYERS,
    "fednas": {
        "family": "darts",
        "family-arguments": "channels = 2, cells = 3, nodes = 1",
        "below-smallest": "smallest",
    },
}
PUBLIC = {"public.task": "digits", "public.examples": 32}
PERSONAL = {"personal.every": 1, "test-fraction": 0.2}


@dataclass(frozen=True)
class Variant:
    """One small run.

    values: its keys, but for where it lies.
    fleet: the text of its fleet.
    connected: payload limits of devices that have a node each, as on hardware (None: no limit); empty under a fleet.
    """

    values: Mapping[str, Any]
    fleet: str = FLEET
    connected: tuple[int | None, ...] = ()


def simulated(strategy: str, **changes: Any) -> Variant:
    """A variant under the fleet; `changes` are keys with _ for -, and __ for the dot."""
    own = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return Variant(BASE | {"strategy": strategy} | OWN[strategy] | FAMILY.get(strategy, {}) | own)


def control(kind: str, variant: Variant) -> Variant:
    """The variant with a control of its method, which is a plug-in of the method's benchmark."""
    strategy = variant.values["strategy"]
    keys = {key.replace(f"{strategy}.", f"{strategy}-controls."): value for key, value in variant.values.items()}
    module = strategy.replace("-", "_")
    return replace(variant, values={**keys, "strategy": f"benchmarks.{module}.{module}_controls:{kind}"})


def roomy(strategy: str, **changes: Any) -> Variant:
    """A variant under the other fleet."""
    return Variant(simulated(strategy, **{"budget__transfer_seconds": 1.0, **changes}).values, ROOMY)


def connected(limits: tuple[int | None, ...], strategy: str, **changes: Any) -> Variant:
    """A variant in which every device has a node of its own."""
    values = simulated(strategy, **changes).values
    return Variant({**values, "devices": len(limits), "devices-per-round": len(limits) - 1}, connected=limits)


def of(family: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as `simulated` takes them."""
    return {key.replace("-", "_").replace(".", "__"): value for key, value in family.items()}


# Bytes of weights: between those of the widths, of the exits, and of the members.
LENET_LIMITS = (None, 30_000, 10_000, None)
EXIT_LIMITS = (None, 5_000, 2_500, None)
CHOICE_LIMITS = (None, 60_000, None, 60_000)

VARIANTS: dict[str, Variant] = {
    # As in tests/small_run.py.
    "all-large": simulated("fedavg"),
    "all-small": simulated("fedavg", fedavg__use="all-small"),
    "exclusive": simulated("fedavg", fedavg__use="exclusive"),
    "affordable": simulated("fedavg", fedavg__use="affordable"),
    "local": simulated("local"),
    "fedprox": simulated("fedprox"),
    "fedadam": simulated("fedadam"),
    "heterofl": simulated("heterofl"),
    "heterofl dynamic": simulated("heterofl", heterofl__dynamic=True),
    "fedrolex": simulated("fedrolex"),
    "federated-dropout": simulated("federated-dropout"),
    "fjord": simulated("fjord"),
    "fjord with distillation": simulated("fjord", fjord__distillation=True),
    "anycostfl": simulated("anycostfl"),
    "model-search": simulated("model-search"),
    "model-search pool": simulated("model-search", model_search__searcher="pool", distillation__steps=1),
    "hypemefed": simulated("hypemefed"),
    "depthfl": simulated("depthfl"),
    "scalefl": simulated("scalefl"),
    "recipfl": control("FirstUpload", simulated("recipfl")),
    # What a device does.
    "fedavg adam": simulated("fedavg", optimizer="adam", learning_rate=0.002, clip_norm=0.5, local_epochs=2),
    "fedavg adamw": simulated("fedavg", optimizer="adamw", learning_rate=0.002, local_steps=2),
    "fedavg decay": simulated("fedavg", schedule__decay_rounds="1, 2", local_steps=4),
    "heterofl cosine": simulated("heterofl", schedule__kind="cosine", momentum=0.0),
    "all-large bound": simulated("fedavg", aggregation__norm_bound=0.8),
    "hypemefed bound": simulated("hypemefed", aggregation__norm_bound=0.8),
    # HeteroFL and its like.
    "heterofl both models": simulated("heterofl", widths="0.5, 0.25", both_models=True),
    "affordable both models": simulated("fedavg", fedavg__use="affordable", widths="0.5, 0.25", both_models=True),
    "heterofl vgg": simulated("heterofl", **of(VGG)),
    "heterofl resnet18": simulated("heterofl", **of(RESNET), statistics__devices=3),
    "heterofl vit": simulated("heterofl", **of(VIT)),
    "fedrolex vit": simulated("fedrolex", **of(VIT)),
    "federated-dropout resnet18": simulated("federated-dropout", **of(RESNET)),
    "anycostfl resnet18": simulated("anycostfl", **of(RESNET)),
    "heterofl distilled": simulated("heterofl", distillation__steps=1),
    "heterofl personal": simulated("heterofl", **of(PERSONAL)),
    "local personal": simulated("local", **of(PERSONAL)),
    "heterofl late": simulated(
        "heterofl", aggregation__over_selection=0.5, deadline_seconds=60.0, budget__transfer_seconds=1.0
    ),
    "heterofl deadline": simulated("heterofl", deadline_seconds=0.02),
    "heterofl below smallest": simulated("heterofl", widths="1, 0.5", below_smallest="smallest"),
    "heterofl untiered": simulated("heterofl", evaluate_tiers=False),
    "heterofl strong and weak": simulated(
        "heterofl", partition="strong-and-weak", strong__devices=2, examples_per_device=0, local_steps=3
    ),
    # Dynamic model search.
    "model-search plain": control("ByExamples", simulated("model-search", model_search__masked_loss=False)),
    "model-search resnet18": simulated(
        "model-search",
        **of(RESNET),
        model_search__shares="0, 0.5, 1",
        model_search__layer_shares="stage4_1 = [0, 0.25]",
        budget__transfer_seconds=0.05,
    ),
    "model-search vit": simulated(
        "model-search", **of(VIT), model_search__shares="0, 0.25, 0.5, 1", distillation__steps=1
    ),
    "model-search roomy": roomy("model-search", model_search__tolerance=0.1),
    "heterofl roomy": roomy("heterofl"),
    "heterofl roomy both models": roomy("heterofl", both_models=True),
    "heterofl roomy dynamic": roomy("heterofl", heterofl__dynamic=True),
    # Exits.
    "hypemefed weight": simulated("hypemefed", hypemefed__guess="weight"),
    "hypemefed owners": control("Owners", simulated("hypemefed")),
    "hypemefed stale": control("Stale", simulated("hypemefed")),
    "hypemefed all": simulated("hypemefed", hypemefed__generate="all"),
    "hypemefed weight all": simulated("hypemefed", hypemefed__generate="all", hypemefed__guess="weight"),
    "hypemefed deepest": control("DeepestExit", simulated("hypemefed")),
    "hypemefed both models": control("Owners", simulated("hypemefed", both_models=True)),
    "hypemefed personal": simulated("hypemefed", **of(PERSONAL)),
    "depthfl corrected": simulated("depthfl", depthfl__alpha=0.1),
    "depthfl at once": simulated("depthfl", depthfl__ramp_rounds=0),
    "scalefl labels": simulated("scalefl", scalefl__gamma=0.0, scalefl__widths="0.5, 0.75, 1"),
    # RecipFL.
    "recipfl teacher": control("FirstUpload", roomy("recipfl")),
    "recipfl both": control("FirstUpload", roomy("recipfl", recipfl__transfer="both")),
    "recipfl none": control("LargeOnly", roomy("recipfl")),
    "recipfl reverse": control("FirstUpload", roomy("recipfl", recipfl__divergence="teacher || student")),
    "recipfl examples": control("ByExamplesFirstUpload", roomy("recipfl")),
    "recipfl client": control("Clients", roomy("recipfl")),
    "recipfl printed": control("FirstUpload", roomy("recipfl", recipfl__hypernetwork="printed")),
    "recipfl classifier": control("Classifier", roomy("recipfl")),
    "recipfl untiled": control("FirstUpload", roomy("recipfl", recipfl__tile=0, recipfl__hidden=16)),
    "recipfl personal": control("FirstUpload", roomy("recipfl", **of(PERSONAL))),
    # The others.
    "fedavgm": simulated("fedavgm"),
    "fednova": simulated("fednova"),
    "scaffold": simulated("scaffold"),
    "q-fedavg": simulated("q-fedavg"),
    "feddf": simulated("feddf", **of(PUBLIC)),
    "rafl": simulated("rafl"),
    "rafl ensemble": simulated("rafl", rafl__fusion="ensemble", **of(PUBLIC)),
    "rafl pool": simulated("rafl", rafl__searcher="pool", rafl__first="drawn"),
    "inclusivefl": simulated("inclusivefl"),
    "inclusivefl alone": simulated("inclusivefl", inclusivefl__head="own", inclusivefl__server="mean"),
    "flexifed": simulated("flexifed"),
    "flexifed max": simulated("flexifed", flexifed__sharing="max"),
    "lotteryfl": simulated("lotteryfl"),
    "spatl": simulated("spatl"),
    "fednas": simulated("fednas"),
    "wildflower": simulated("wildflower"),
    "wildflower resnet18": simulated("wildflower", **of(RESNET), wildflower__levels=3),
    # What goes with any of several methods.
    "heterofl int8": simulated("heterofl", wire="int8"),
    "heterofl median": simulated("heterofl", aggregation__rule="median"),
    "heterofl frozen": simulated("heterofl", freeze="block1"),
    "fedavg private": simulated("fedavg", **of(VIT), dp__noise_multiplier=1.0, dp__clip=1.0, dp__delta=0.001),
    "heterofl best": simulated("heterofl", deliver="best"),
    "fedavg secure": connected((None,) * 6, "fedavg", secure_aggregation__minimum=3),
    # One device per node.
    "connected all-large": connected(LENET_LIMITS, "fedavg"),
    "connected local": connected(LENET_LIMITS, "local"),
    "connected fedprox": connected(LENET_LIMITS, "fedprox"),
    "connected heterofl": connected(LENET_LIMITS, "heterofl", statistics__devices=3),
    "connected heterofl personal": connected(LENET_LIMITS, "heterofl", statistics__devices=3, **of(PERSONAL)),
    "connected hypemefed": connected(EXIT_LIMITS, "hypemefed"),
    "connected depthfl corrected": connected(EXIT_LIMITS, "depthfl", depthfl__alpha=0.1),
    "connected recipfl": control("FirstUpload", connected(CHOICE_LIMITS, "recipfl")),
    "connected recipfl personal": control("FirstUpload", connected(CHOICE_LIMITS, "recipfl", **of(PERSONAL))),
}

# As recordings name them; journals call accuracies scores since the metric is the task's, and have the bytes of
# training and of batch norm statistics apart.
ROUND_KEYS = (
    "accuracy",
    "loss",
    "accuracy_by_tier",
    "accuracy_by_exit",
    "personal_accuracy",
    "personal_accuracy_by_tier",
    "bytes_down",
    "bytes_up",
    "simulated_seconds",
)
DEVICE_KEYS = ("round", "device", "outcome", "loss", "examples")


# Running -------------------------------------------------------------------------------------------------------------


def settings(variant: Variant, folder: Path) -> dict[str, Any]:
    """All keys of a run in a folder of its own."""
    fleet = folder / "fleet.toml"
    fleet.write_text(variant.fleet, encoding="utf-8")
    return {
        **variant.values,
        "fleet": "" if variant.connected else str(fleet),
        "output-dir": str(folder / "runs"),
        "run-name": "small",
    }


def run_in_process(variant: Variant, folder: Path) -> Path:
    """Run a variant with nodes in this process; returns the run's folder."""
    import wildflower.server_app.app
    from tests.grid import InProcessGrid
    from wildflower.client_app.app import app as client
    from wildflower.server_app.config import RunConfig

    if not Path(wildflower.server_app.app.__file__).is_relative_to(ROOT):
        sys.exit(f"server_app is not imported from {ROOT}: start this in that folder, with PYTHONPATH set to it")
    _work_in_this_process()

    def node(number: int) -> dict[str, Any]:
        limit = variant.connected[number - 1]
        config = {
            "partition-id": number - 1,
            "num-partitions": len(variant.connected),
            "state-dir": str(folder / f"node-{number}"),
        }
        return config if limit is None else config | {"payload-limit-bytes": limit}

    grid = InProcessGrid(client, len(variant.connected), node) if variant.connected else InProcessGrid(client, 2)
    config = RunConfig.from_run_config(settings(variant, folder))
    return Path(wildflower.server_app.app.run(grid, config))


def _work_in_this_process() -> None:
    """As the tests do: devices with a node each start no worker. Where there is none any more, nothing is lost."""
    try:
        from wildflower.client_app import work, worker
    except ImportError:
        return
    if hasattr(worker, "ask") and hasattr(work, "do"):
        worker.ask = work.do


def run_under_flower(variant: Variant, folder: Path) -> Path:
    """Run a variant with `wildflower run`; returns the run's folder."""
    experiment = folder / "experiment.toml"
    values = settings(variant, folder)
    # JSON's texts, numbers and truth values are TOML's.
    experiment.write_text(
        "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in values.items()), encoding="utf-8"
    )
    command = [sys.executable, "-m", "wildflower", "run", str(experiment), "--set", f"workers={values['workers']}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"wildflower run ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return folder / "runs" / "small"


def record_of(mode: str, variant: Variant) -> Record:
    """Run a variant and digest what it leaves."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        folder = Path(name)
        run_dir = run_under_flower(variant, folder) if mode == "flower" else run_in_process(variant, folder)
        return {"settings": dict(variant.values)} | digest(run_dir, clock=not variant.connected)


# Digests -------------------------------------------------------------------------------------------------------------


def digest(run_dir: Path, clock: bool) -> Record:
    """What a run left: one digest of its state, one of every tensor, and what the journal says of rounds and devices.

    Without `clock`, time is the wall's and is left out.
    """
    import safetensors.torch

    files = (run_dir / "checkpoint").glob("**/state.safetensors")  # versions differ in how many they keep
    tensors = safetensors.torch.load_file(max(files, key=lambda path: path.stat().st_mtime_ns))
    state, by_name = hashlib.sha256(), {}
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        described = f"{value.dtype} {tuple(value.shape)}\n".encode()
        content = value.reshape(-1).numpy().tobytes()
        state.update(name.encode() + b"\n" + described + content)
        by_name[name] = hashlib.sha256(described + content).hexdigest()[:16]
    keys = ROUND_KEYS if clock else tuple(key for key in ROUND_KEYS if key != "simulated_seconds")
    rounds = [{key: _either(line, key) for key in keys} for line in _lines(run_dir / "rounds.jsonl")]
    devices = [[line.get(key) for key in DEVICE_KEYS] for line in _lines(run_dir / "devices.jsonl")]
    return {
        "state": state.hexdigest(),
        "tensors": by_name,
        "rounds": rounds,
        "devices": sorted(devices, key=lambda row: (row[0], row[1], json.dumps(row))),
    }


def _either(line: dict[str, Any], key: str) -> Any:
    if f"training_{key}" in line:
        return line[f"training_{key}"] + line[f"statistics_{key}"]
    return line.get(key, line.get(key.replace("accuracy", "score")))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def differences(before: Record, now: Record) -> tuple[list[str], list[str]]:
    """In what two records differ, and what is only worth a note: names and settings."""
    found, notes = [], []
    old, new = Counter(before["tensors"].values()), Counter(now["tensors"].values())
    if old != new:
        names = sorted(n for n, v in now["tensors"].items() if before["tensors"].get(n) != v)
        names += sorted(f"{n} (gone)" for n in before["tensors"] if n not in now["tensors"])
        gone, added = sum((old - new).values()), sum((new - old).values())
        found.append(f"{gone} of {old.total()} tensors are gone, {added} new: {_some(names)}")
    elif before["state"] != now["state"]:
        names = sorted(set(before["tensors"]) ^ set(now["tensors"]))
        notes.append(f"the same tensors under other names: {_some(names)}")
    for number, (a, b) in enumerate(zip(before["rounds"], now["rounds"], strict=False), start=1):
        found += [f"round {number}: {key} {a[key]!r} -> {b.get(key)!r}" for key in a if not _same(a[key], b.get(key))]
    if len(before["rounds"]) != len(now["rounds"]):
        found.append(f"{len(before['rounds'])} rounds -> {len(now['rounds'])}")
    for a, b in zip(before["devices"], now["devices"], strict=False):
        if not _same(a, b):
            found.append(f"{dict(zip(DEVICE_KEYS, a, strict=True))} -> {dict(zip(DEVICE_KEYS, b, strict=True))}")
    if len(before["devices"]) != len(now["devices"]):
        found.append(f"{len(before['devices'])} device rows -> {len(now['devices'])}")
    a, b = before["settings"], now["settings"]
    if a != b:
        notes.append(f"other settings: {_some(sorted(key for key in {*a, *b} if a.get(key) != b.get(key)))}")
    return found, notes


def _same(a: object, b: object) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or a == b


def _some(names: list[str], maximum: int = 6) -> str:
    return ", ".join(names[:maximum]) + (f" and {len(names) - maximum} more" if len(names) > maximum else "")


# The command ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What the bits depend on beside the code."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def commit() -> str:
    """The commit of this working tree."""
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def chosen(mode: str, names: list[str] | None) -> dict[str, Variant]:
    """The variants of a mode, or those of them that are named."""
    able = {name: v for name, v in VARIANTS.items() if mode == "grid" or not v.connected}
    if unknown := sorted(set(names or []) - set(able)):
        sys.exit(f"no such variant in mode {mode}: {', '.join(unknown)}; there are {', '.join(able)}")
    return {name: able[name] for name in names} if names else able


def write(path: Path, recorded: Record) -> None:
    """Write a recording beside the old one, and put it in its place; one line per variant."""
    parts = [f'"{key}": {json.dumps(value)}' for key, value in recorded.items() if key not in ("grid", "flower")]
    for mode in ("grid", "flower"):
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in recorded.get(mode, {}).items())
        parts.append(f'"{mode}": {{\n{rows}\n}}')
    beside = path.with_suffix(".new")
    beside.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    beside.replace(path)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("grid", "flower"), required=True)
    parser.add_argument("--out", type=Path, help="record into this JSON file; variants that it has are skipped")
    parser.add_argument("--against", type=Path, help="compare with this recording; exit code 1 where bits differ")
    parser.add_argument("--variant", action="append", metavar="NAME", help="only this one; may be given often")
    parser.add_argument("--reverse", action="store_true", help="the last variant first: no run may depend on another")
    arguments = parser.parse_args()
    if arguments.out is None and arguments.against is None:
        parser.error("--out FILE or --against FILE says what it is for")
    return arguments


def main() -> None:
    """Run the variants; record or compare them."""
    arguments = parse_arguments()
    logging.disable(logging.WARNING)
    recorded: Record = {"commit": commit(), "machine": machine(), "grid": {}, "flower": {}}
    if arguments.out is not None and arguments.out.exists():
        recorded = json.loads(arguments.out.read_text(encoding="utf-8"))
        if (recorded["commit"], recorded["machine"]) != (commit(), machine()):
            sys.exit(f"{arguments.out} was recorded elsewhere ({recorded['commit']}, {recorded['machine']})")
    against: Record = json.loads(arguments.against.read_text(encoding="utf-8")) if arguments.against else {}
    if against and against["machine"] != machine():
        print(f"Warning: recorded with {against['machine']}, this is {machine()}: bits may differ for that alone")
    variants = list(chosen(arguments.mode, arguments.variant).items())
    bad = []
    for name, variant in reversed(variants) if arguments.reverse else variants:
        old = against.get(arguments.mode, {}).get(name)
        if against and old is None:
            print(f"{name}: not in {arguments.against}, not compared", flush=True)
        now = recorded[arguments.mode].get(name)
        if now is None and (arguments.out is not None or old is not None):
            try:
                now = record_of(arguments.mode, variant)
            except Exception:
                bad.append(name)
                print(f"{name}: COULD NOT RUN\n{traceback.format_exc()}", flush=True)
                continue
            recorded[arguments.mode][name] = now
            if arguments.out is not None:
                write(arguments.out, recorded)
                print(f"{name}: recorded", flush=True)
        if old is None or now is None:
            continue
        found, notes = differences(old, now)
        bad += [name] if found else []
        print(f"{name}: {'DIFFERS' if found else 'same bits'}", flush=True)
        for line in [*found, *(f"(note: {note})" for note in notes)]:
            print(f"    {line}", flush=True)
    if (
        gone := set(against.get(arguments.mode, {})) - {name for name, _ in variants}
        if not arguments.variant
        else set()
    ):
        print(f"In {arguments.against} and not in the table, not compared: {', '.join(sorted(gone))}")
    print(f"{len(variants) - len(bad)} of {len(variants)} variants are well{'; not: ' if bad else ''}{', '.join(bad)}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
