"""Studies: tables whose rows are those of `wildflower sweep`, and the figures of runs that are kept.

results.json, beside the experiment file, holds what the table in README.md needs of every finished run. What it has is
not run again unless the settings of its row changed, so that a study goes on on another machine. Settings are those of
the experiment and of its methods: whoever changes a default, or what a method does, takes its figures out of
results.json. `--layout` is none of them: it changes how fast a run is and how its sums are rounded. The figures say it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import config_of, devices_of, digest_of, rounds_of, summary_of
from benchmarks.tables import markdown, write_between
from wildflower.launch.experiment_file import SettingsError, beside
from wildflower.launch.forked_server import ONE_THREAD
from wildflower.launch.superlink import stop_signals_interrupt
from wildflower.launch.sweeps import Row, SweepRequest, sweep
from wildflower.launch.terminal import terminal
from wildflower.launch.together import Planned
from wildflower.server_app.run_folder import JournalError
from wildflower.server_app.whole_files import file_written_whole

KEYS = (
    "metric",
    "delivered_score",
    "worst_tier_score",
    "final_score",
    "best_score",
    "score_by_tier",
    "personal_score",
    *("bytes_down", "bytes_up"),
    *("training_bytes_down", "training_bytes_up", "scoring_bytes_down"),
    "devices_by_outcome",
)
# Means over the trainings of a run: head of the column, figure, its unit.
COSTS = (
    ("MFLOP per example", "device_flops_per_example", 1e6),
    ("training, MB", "device_memory_bytes", 1e6),
    ("device's s per round", "device_seconds", 1),
)
Figures = dict[str, dict]  # of one method: seed -> figures


def figures(folder: Path) -> dict:
    """What `table` needs of one run."""
    summary, rounds = summary_of(folder), rounds_of(folder)
    devices = [d for d in devices_of(folder) if d["outcome"] == "trained"]
    scored = [r for r in rounds if r["score"] is not None]

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.mean(known) if known else None

    return {key: summary.get(key) for key in KEYS} | {
        "personal_score_by_tier": summary.get("personal_score_by_tier") or {},
        "simulated_hours": summary["simulated_seconds"] / 3600,
        "curve": {r["round"]: r["score"] for r in scored},
        "hours": {r["round"]: r["simulated_seconds"] / 3600 for r in scored},
        "device_flops_per_example": mean([d.get("training_flops") for d in devices]),
        "device_memory_bytes": mean([d["predicted_memory_bytes"] for d in devices]),
        "device_seconds": mean([d["simulated_seconds"] for d in devices]),
        "memory_utilisation": mean([r["memory_utilisation"] for r in rounds]),
        "bandwidth_utilisation": mean([r["bandwidth_utilisation"] for r in rounds]),
        "server_seconds_per_round": {
            part: statistics.mean(r["server_seconds"].get(part, 0.0) for r in rounds)
            for part in sorted({part for r in rounds for part in r["server_seconds"]})
        },
        # The first round also starts the workers.
        "assign_and_finish_share": mean(
            [
                sum(seconds for part, seconds in r["server_seconds"].items() if part not in ("payload", "evaluate"))
                / (r["wall_seconds"] - r["server_seconds"].get("evaluate", 0))
                for r in rounds[1:]
            ]
        ),
    }


def failed_rounds(folder: Path) -> dict[int, str]:
    """Rounds of a run in which all devices that were asked failed, with the reason of one.

    Where training has diverged on all of them, that is what the method came to, and such rounds are not among them.
    """
    outcomes: dict[int, list[str]] = {}
    for device in devices_of(folder):
        if not device["outcome"].startswith("skipped: "):
            outcomes.setdefault(device["round"], []).append(device["outcome"])
    failed = {n: found for n, found in outcomes.items() if all(one.startswith("failed: ") for one in found)}
    faults = {number: [one for one in found if "finite" not in one] for number, found in failed.items()}
    return {number: found[0] for number, found in faults.items() if found}


def accuracy(values: list[float]) -> str:
    """Percent, as mean ± standard deviation."""
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{spread}"


def table(study: Study, results: dict[str, Figures]) -> str:
    """The results in Markdown, accuracies in percent as mean ± standard deviation over seeds."""
    tiers = sorted({t for seeds in results.values() for f in seeds.values() for t in f["score_by_tier"]})
    tiers.sort(key=in_order)
    tiers = tiers if len(tiers) > 1 and study.general and study.tiers else []
    level = None
    if study.target in results:
        level = statistics.mean(f["final_score"] for f in results[study.target].values())
    # Older figures have no personal ones.
    by_tier = [f.get("personal_score_by_tier", {}) for seeds in results.values() for f in seeds.values()]
    personal = sorted({tier for tiers_of_run in by_tier for tier in tiers_of_run})
    mean_of_personal = any(f.get("personal_score") is not None for seeds in results.values() for f in seeds.values())
    # Nor are there delivered ones in those of runs of earlier versions.
    delivered = any(f.get("delivered_score") is not None for seeds in results.values() for f in seeds.values())
    heads = ["method", "seeds", *(("delivered", "worst tier") if delivered else ())]
    heads += [*(("final accuracy", "best") if study.general else ())]
    heads += [
        *tiers,
        *(["personal"] if mean_of_personal else []),
        *(f"{t}, personal" for t in personal),
        "MB down",
        "MB up",
    ]
    if study.costs:
        heads += [head for head, _, _ in COSTS]
    if study.part:
        heads.append(f"server's s per round: {study.part}")
    if level is not None:
        reach = f"to {100 * level:.1f} %"
        heads += [f"rounds {reach}", f"simulated hours {reach}", "memory used", "link used", "server share"]
    rows = []
    for method, seeds in results.items():
        runs = list(seeds.values())
        cells = [method, str(len(runs))]
        for key in ("delivered_score", "worst_tier_score") if delivered else ():
            values = [f[key] for f in runs if f.get(key) is not None]
            cells.append(accuracy(values) if values else "")
        if study.general:
            cells += [accuracy([f[key] for f in runs]) for key in ("final_score", "best_score")]
        for tier in tiers:
            values = [f["score_by_tier"][tier] for f in runs if tier in f["score_by_tier"]]
            cells.append(accuracy(values) if values else "")
        if mean_of_personal:
            values = [f["personal_score"] for f in runs if f.get("personal_score") is not None]
            cells.append(accuracy(values) if values else "")
        for tier in personal:
            values = [f["personal_score_by_tier"][tier] for f in runs if tier in f["personal_score_by_tier"]]
            cells.append(accuracy(values) if values else "")
        cells += [f"{statistics.mean(f[key] for f in runs) / 1e6:.1f}" for key in ("bytes_down", "bytes_up")]
        for _, key, unit in COSTS if study.costs else ():
            values = [f[key] for f in runs if f.get(key) is not None]
            cells.append(f"{statistics.mean(values) / unit:.1f}" if values else "")
        if study.part:
            known = sorted(s for f in runs if (s := f["server_seconds_per_round"].get(study.part)))
            cells.append(" to ".join(dict.fromkeys(f"{s:.2f}" for s in (known[0], known[-1]))) if known else "")
        if level is not None:
            cells += times_to(level, runs)
            for key in ("memory_utilisation", "bandwidth_utilisation", "assign_and_finish_share"):
                known = [f[key] for f in runs if f[key] is not None]
                cells.append(f"{100 * statistics.mean(known):.0f} %" if known else "")
        rows.append(cells)
    return markdown(heads, rows)


def times_to(level: float, runs: list[dict]) -> list[str]:
    """Mean rounds and simulated hours until a run first scored `level`; "never" unless all did."""
    firsts = [next((int(r) for r, value in f["curve"].items() if value >= level), None) for f in runs]
    if None in firsts:
        return [f"never ({sum(first is None for first in firsts)} of {len(runs)})", ""]
    hours = [{int(r): h for r, h in f["hours"].items()}[first] for f, first in zip(runs, firsts, strict=True) if first]
    return [f"{statistics.mean(first for first in firsts if first):.0f}", f"{statistics.mean(hours):.2f}"]


def in_order(tier: str) -> tuple[float, list[tuple[int, str]]]:
    """For sorting: by the width that a tier of the five-widths fleet is named after, then by name, numbers by value."""
    top, _, bottom = tier.removeprefix("width-").partition("/")
    width = -int(top) / int(bottom or 1) if top.isdigit() else 0
    return width, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", tier)]


@dataclass(frozen=True)
class Study:
    """A table.

    experiment: the experiment file that all methods share; results.json, README.md and the table lie beside it.
    methods: name -> the settings beside those of the experiment.
    once: beginnings of the names of methods that run with the first seed only.
    target: the method whose final accuracy the others are timed to reach.
    general: whether accuracies on the task's test set are shown; they are not comparable where a method has no model
        for all devices.
    tiers: whether every tier of the fleet has a column.
    part: of the server's work whose seconds per round have a column.
    costs: whether what training costs a device has columns.
    places: what stands in settings for something that lies elsewhere on each machine -> what finds or makes it for a
        seed. The digest, and so what is recorded, has what stands for it.
    figures: what is kept of a finished run's folder. None of its keys is "settings", which holds the digest, or
        "layout".
    table: makes the results' table in Markdown. The fields from `target` to `costs` are for the default one.
    """

    experiment: Path
    methods: dict[str, list[str]]
    once: tuple[str, ...] = ()
    target: str = ""
    general: bool = True
    tiers: bool = True
    part: str = ""
    costs: bool = False
    places: Mapping[str, Callable[[int], str]] = field(default_factory=dict)
    figures: Callable[[Path], dict] = figures
    table: Callable[[Study, dict[str, Figures]], str] = table

    @property
    def name(self) -> str:
        """Of the folder of its runs, and of its table where a README holds several."""
        return f"{self.experiment.parent.name}_{self.experiment.stem}".removesuffix("_table")

    @property
    def runs(self) -> Path:
        """Where its runs lie."""
        return self.experiment.parents[2] / "runs" / self.name

    @property
    def results(self) -> Path:
        """The file of figures."""
        name = "results" if self.experiment.stem == "table" else f"results-{self.experiment.stem}"
        return self.experiment.parent / f"{name}.json"

    def digest(self, method: str) -> str:
        """Of a method's settings, with the contents of the TOML files that they name.

        Defaults are not in it, and of what comes with the project, such as a fleet that is set by its name, only names.
        """
        settings: dict[str, Any] = {"": tomllib.loads(self.experiment.read_text())}
        for key, _, value in (setting.partition("=") for setting in self.methods[method]):
            settings[key] = tomllib.loads(Path(value).read_text()) if value.endswith(".toml") else {"": value}
        return digest_of(settings)

    def lacking(self, methods: Sequence[str], seeds: Sequence[int]) -> list[Row]:
        """What is to be run: the methods with the seeds of which results.json has no figures.

        A row's name ends with the digest of its settings: where they changed, its runs are other ones.
        """
        rows = []
        found: dict[tuple[str, int], str] = {}
        for method, figures in self.known().items():
            of = seeds
            if method.startswith(self.once):
                of = [] if figures else seeds[:1]
            for seed in of if method in methods else []:
                if str(seed) not in figures:
                    rows.append(Row(f"{method}.{self.digest(method)}", self._here(method, seed, found), (seed,)))
        return rows

    def _here(self, method: str, seed: int, found: dict[tuple[str, int], str]) -> tuple[str, ...]:
        """A method's settings, with the places of this machine, of which some are `found` already."""
        settings = tuple(self.methods[method])
        for place, find in self.places.items():
            if any(place in setting for setting in settings):
                if (place, seed) not in found:
                    found[place, seed] = find(seed)
                settings = tuple(setting.replace(place, found[place, seed]) for setting in settings)
        return settings

    def known(self) -> dict[str, Figures]:
        """The figures in results.json that are of today's settings: method -> seed -> figures."""
        written = json.loads(self.results.read_text())["results"] if self.results.exists() else {}
        return {
            method: {seed: f for seed, f in written.get(method, {}).items() if f["settings"] == self.digest(method)}
            for method in self.methods
        }


def main(studies: Sequence[Study], description: str) -> None:
    """Run what a study lacks, then write its results.json and its table; of several studies the command names one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = {study.experiment.stem: study for study in studies}
    if len(studies) > 1:
        parser.add_argument("study", choices=by_name)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="of rows; * stands for any letters")
    parser.add_argument("--layout", choices=("contiguous", "channels-last"), help="of images in training")
    arguments = parser.parse_args()
    study = by_name[arguments.study] if len(studies) > 1 else studies[0]
    methods: list[str] = []
    for pattern in arguments.methods or ["*"]:
        found = [method for method in study.methods if fnmatchcase(method, pattern)]
        if not found:
            parser.error(f"no method is called {pattern}; there are: {'; '.join(study.methods)}")
        methods += found
    os.environ |= dict.fromkeys(ONE_THREAD, "1")  # of what a place makes, and of the runs
    torch.set_num_threads(1)
    planned: list[Planned] = []
    finished: list[Planned] = []
    failed: dict[str, dict[int, str]] = {}
    if rows := study.lacking(methods, arguments.seeds):
        sets = ["workers=1"]  # as the experiment files say, and not as many as the machine has cores for
        if arguments.layout:
            sets.append(f"compute.layout={arguments.layout}")
            # A run that began in another layout cannot go on in this one: it has a folder of its own.
            rows = [replace(row, name=f"{row.name}.{arguments.layout}") for row in rows]
        try:
            with stop_signals_interrupt():
                asked = SweepRequest(study.experiment, sets, study.runs, arguments.seeds, rows, jobs=arguments.jobs)
                outcome = sweep(asked, terminal())
        except (SettingsError, JournalError) as error:
            sys.exit(str(error))
        planned = outcome.planned
        failed = {run.name: rounds for run in outcome.finished if (rounds := failed_rounds(run.run_dir))}
        finished = [run for run in outcome.finished if run.name not in failed]
    print(write(study, finished))
    if failed:
        told = "; ".join(f"{name} in round {min(rounds)}: {rounds[min(rounds)]}" for name, rounds in failed.items())
        sys.exit(
            f"Not recorded, because every device of a round failed: {told}. Mend the cause, delete the folders of "
            f"these runs in {study.runs}, and run them again"
        )
    if lacking := [run.name for run in planned if run not in finished]:
        sys.exit(f"Not finished: {'; '.join(lacking)}. The same command goes on with them")


def write(study: Study, finished: Sequence[Planned]) -> str:
    """Write the figures of finished runs into results.json, and the table of all into README.md; returns the table."""
    results = study.known()
    for run in finished:
        with beside(study.experiment):
            layout = config_of(run.run_dir).compute.layout
        method, _, digest = run.row.removesuffix(f".{layout}").rpartition(".")
        results[method][str(run.seed)] = study.figures(run.run_dir) | {"layout": layout, "settings": digest}
    results = {method: dict(sorted(seeds.items())) for method, seeds in results.items() if seeds}
    content = {"machine": f"{platform.machine()}, one torch thread per run", "results": results}
    with file_written_whole(study.results) as file:  # on a full disk the earlier figures stay
        file.write((json.dumps(content, indent=1) + "\n").encode())
    return write_between(study.experiment.parent / "README.md", study.name, study.table(study, results))
