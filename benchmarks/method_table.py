"""Tables of methods: every method with every seed, as runs of `wildflower run`. What the studies in the folders share.

A row is a named set of settings, such as a method with its use, a fleet and a number of rounds. The grid of `wildflower
sweep` takes every value of one key with every value of another: most of what that runs would be no row of a table.

Resumable: what results.json has is not run again unless its settings changed, nor is a run whose summary says finished;
an unfinished one goes on from its checkpoint. Writes results.json and the table in README.md beside the study from all
of them, so that a study can go on on another machine. Settings are those of the experiment and of its methods: whoever
changes a default, or what a method does, takes its figures out of results.json.
"""

import argparse
import hashlib
import json
import platform
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs import devices_of, rounds_of, summary_of
from benchmarks.tables import markdown, write_between
from server_app.journal import todays_names

KEYS = (
    "metric",
    "delivered_score",
    "worst_tier_score",
    "final_score",
    "best_score",
    "score_by_tier",
    "personal_score",
    "bytes_down",
    "bytes_up",
    "devices_by_outcome",
)
# Means over the trainings of a run: head of the column, figure, its unit.
COSTS = (
    ("MFLOP per example", "device_flops_per_example", 1e6),
    ("training, MB", "device_memory_bytes", 1e6),
    ("device's s per round", "device_seconds", 1),
)
Figures = dict[str, dict]  # of one method: seed -> figures


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
    """

    experiment: Path
    methods: dict[str, list[str]]
    once: tuple[str, ...] = ()
    target: str = ""
    general: bool = True
    tiers: bool = True
    part: str = ""
    costs: bool = False

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
        """Of a method's settings, with the contents of the files that they name; not of defaults."""
        settings = {"": tomllib.loads(self.experiment.read_text())}
        for setting in self.methods[method]:
            key, _, value = setting.partition("=")
            settings[key] = tomllib.loads(Path(value).read_text()) if value.endswith(".toml") else {"": value}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def command(self, method: str, seed: int, resume: bool) -> list[str]:
        """The command line of one run."""
        settings = [*self.methods[method], f"seed={seed}", f"run-name={method}-{seed}", f"output-dir={self.runs}"]
        if resume:
            settings.append("resume=true")
        sets = [part for setting in settings for part in ("--set", setting)]
        return [sys.executable, "-m", "wildflower", "run", str(self.experiment), *sets]

    def run_one(self, method: str, seed: int) -> str:
        """Run, or go on with, one experiment; returns a line about how it ended."""
        folder = self.runs / f"{method}-{seed}"
        if str(seed) in self.known().get(method, {}):
            return f"{folder.name}: was finished"
        if folder.exists() and not self._is_of_today(method, folder):
            return f"{folder.name}: has other settings than today's; move {folder} away to run it again"
        if finished(folder):
            return f"{folder.name}: was finished"
        self.runs.mkdir(parents=True, exist_ok=True)
        _settings_of(folder).write_text(self.digest(method))
        with (self.runs / f"{folder.name}.log").open("a") as log:
            command = self.command(method, seed, resume=(folder / "config.json").exists())
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        return f"{folder.name}: exit code {code}"

    def known(self) -> dict[str, Figures]:
        """The figures in results.json that are of today's settings, under today's names: method -> seed -> figures."""
        written = json.loads(self.results.read_text())["results"] if self.results.exists() else {}
        return {
            method: {
                seed: todays_names(f)
                for seed, f in written.get(method, {}).items()
                if f["settings"] == self.digest(method)
            }
            for method in self.methods
        }

    def collect(self) -> dict[str, Figures]:
        """The known figures and those of all finished runs: method -> seed -> figures."""
        found = self.known()
        for method, seeds in found.items():
            for folder in self.runs.glob(f"{method}-[0-9]*"):
                seed = folder.name.removeprefix(f"{method}-")
                if seed.isdigit() and finished(folder) and self._is_of_today(method, folder):
                    seeds[seed] = figures(folder) | {"settings": self.digest(method)}
        return {method: dict(sorted(seeds.items())) for method, seeds in found.items() if seeds}

    def _is_of_today(self, method: str, folder: Path) -> bool:
        file = _settings_of(folder)
        return file.exists() and file.read_text() == self.digest(method)


def _settings_of(run: Path) -> Path:
    """The file that holds the digest of the settings that a run began with."""
    return run.with_name(f"{run.name}.settings")


def finished(folder: Path) -> bool:
    """Whether a run has ended well."""
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "finished"


def figures(folder: Path) -> dict:
    """What the table needs of one run."""
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
    # Nor are there delivered ones in those of runs of earlier versions.
    delivered = any(f.get("delivered_score") is not None for seeds in results.values() for f in seeds.values())
    heads = ["method", "seeds", *(("delivered", "worst tier") if delivered else ())]
    heads += [*(("final accuracy", "best") if study.general else ())]
    heads += [*tiers, *(["personal"] if personal else []), *(f"{t}, personal" for t in personal), "MB down", "MB up"]
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
        if personal:
            found = [f["personal_score"] for f in runs if f["personal_score"] is not None]
            cells.append(accuracy(found) if found else "")
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


def main(study: Study, description: str) -> None:
    """Run what is missing, then write results.json and the table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=list(study.methods), choices=list(study.methods))
    arguments = parser.parse_args()
    # All methods with one seed before the next seed: a sweep that is cut short still has a whole column.
    todo = [(method, seed) for seed in arguments.seeds for method in arguments.methods]
    known = study.known()
    todo = [(m, s) for m, s in todo if not m.startswith(study.once) or (s == arguments.seeds[0] and not known[m])]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(lambda job: study.run_one(*job), todo):
            print(line, flush=True)
    lacking = write(study, todo)
    if lacking:
        sys.exit(f"Not finished: {', '.join(lacking)}; see the logs in {study.runs}")


def write(study: Study, wanted: Sequence[tuple[str, int]]) -> list[str]:
    """Write results.json, and the table between its marks in README.md; returns which of the runs have no figures."""
    results = study.collect()
    content = {"machine": f"{platform.machine()}, one torch thread per run", "results": results}
    study.results.write_text(json.dumps(content, indent=1) + "\n")
    print(write_between(study.experiment.parent / "README.md", study.name, table(study, results)))
    return [f"{method}-{seed}" for method, seed in wanted if str(seed) not in results.get(method, {})]
