"""Figures of README and of pages, from what benchmarks recorded: `make figures` writes them into docs/images.

python -m benchmarks.figures [--folder docs/images]

Each figure is two SVG files, for light and for dark pages. The same data and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.asynchronous import run as asynchronous
from benchmarks.fashion_mnist.run import delivered as delivered_by_width
from benchmarks.inclusivefl.run import delivered as delivered_by_depth
from benchmarks.runs import todays_names

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
# Told apart also by people who do not see red and green as different, on white and on GitHub's dark gray.
THEMES = {
    "light": {"text": "#24292f", "grid": "#d0d7de", "colors": ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#6e7781")},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "colors": ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#8b949e")},
}
Theme = Mapping[str, Any]


def read(path: str) -> Any:
    """Return what a recorded JSON file below benchmarks/ holds."""
    return json.loads((HERE / path).read_text(encoding="utf-8"))


# Delivered accuracy ---------------------------------------------------------------------------------------------------

# Panel -> the file of its results, and the rows whose best mean counts: those of all learning rates that were tried.
NETWORKS = {
    "CNN, images": ("cnn3", ("", "-rate-0.1")),
    "ResNet, images": ("resnet6", ("", "-rate-0.1", "-rate-0.2")),
    "ViT, images": ("vit", ("", "-rate-0.003")),
    "BERT, characters": ("bert", ("-120-rounds",)),
    "CNN, phone sensors": ("hapt", ("", "-rate-0.1", "-rate-0.02", "-rate-0.01")),
}
METHODS = {
    "wildflower, momentum": "wildflower-momentum",
    "wildflower": "wildflower",
    "model search, four nested": "search-four-nested",
    "one model, momentum": "all-small-momentum",
    "HeteroFL": "heterofl",
}
LINES = {"all-small": "smallest model for all", "all-large": "whole model, beyond budgets"}


def delivered(network: str, method: str) -> list[float]:
    """Return the delivered accuracy in percent, by seed, of a method at its best learning rate; [] if it never ran."""
    name, rates = NETWORKS[network]
    results = read(f"methods_that_win/results-{name}.json")["results"]
    tried = [results[method + rate] for rate in rates if len(results.get(method + rate, {})) == 3]
    scores = [[100 * seed["delivered_score"] for seed in by_seed.values()] for by_seed in tried]
    return max(scores, key=sum, default=[])


def draw_delivered(figure: Figure, theme: Theme) -> None:
    """Draw a panel for each network: seeds as dots, their mean as a dash, and two baselines as lines."""
    figure.set_size_inches(11, 2.7)
    panels = figure.subplots(1, len(NETWORKS), sharey=True)
    for panel, network in zip(panels, NETWORKS, strict=True):
        for place, (baseline, label) in enumerate(LINES.items()):
            scores = delivered(network, baseline)
            style = {"color": theme["colors"][4], "linestyle": (":", "--")[place]}
            panel.axvline(sum(scores) / len(scores), label=label, **style)
        for row, method in enumerate(METHODS.values()):
            color = theme["colors"][0] if method.startswith("wildflower") else theme["colors"][1]
            scores = delivered(network, method)
            panel.plot(scores, [row] * len(scores), "o", color=color, markersize=5, alpha=0.75)
            if scores:
                panel.plot([sum(scores) / len(scores)], [row], "|", color=color, markersize=13, markeredgewidth=2)
        panel.set_title(network, fontsize=10)
        panel.set_yticks(range(len(METHODS)), list(METHODS))
        panel.set_ylim(len(METHODS) - 0.5, -0.5)
        panel.margins(x=0.12)
    figure.supxlabel("accuracy of the model that a device gets, mean over devices (%)", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)


# Time and bytes -------------------------------------------------------------------------------------------------------

ON_RESNET = {
    "wildflower, momentum": "wildflower-momentum-rate-0.2",
    "model search, four nested": "search-four-nested-rate-0.1",
    "one model, momentum": "all-small-momentum-rate-0.2",
    "HeteroFL": "heterofl-rate-0.2",
    "whole model, beyond budgets": "all-large-rate-0.2",
}


def on_resnet(method: str) -> list[Mapping[str, Any]]:
    """Return what was recorded of a method on the ResNet, by seed."""
    return list(read("methods_that_win/results-resnet6.json")["results"][ON_RESNET[method]].values())


def draw_time_and_bytes(figure: Figure, theme: Theme) -> None:
    """Draw accuracy over simulated time, and what is delivered at the end over the bytes of training."""
    figure.set_size_inches(9, 3.2)
    over_time, over_bytes = figure.subplots(1, 2)
    for color, method in zip(theme["colors"], ON_RESNET, strict=True):
        seeds = on_resnet(method)
        rounds = list(seeds[0]["curve"])
        seconds = [3600 * sum(seed["hours"][r] for seed in seeds) / len(seeds) for r in rounds]
        scores = [100 * sum(seed["curve"][r] for seed in seeds) / len(seeds) for r in rounds]
        over_time.plot(seconds, scores, "o-", color=color, label=method, markersize=4)
        gigabytes = [(seed["bytes_down"] + seed["bytes_up"]) / 1e9 for seed in seeds]
        over_bytes.plot(gigabytes, [100 * seed["delivered_score"] for seed in seeds], "o", color=color, markersize=5)
    over_time.set_xlabel("simulated seconds")
    over_time.set_ylabel("accuracy (%)")
    over_bytes.set_xlabel("GB that travelled in 60 rounds")
    over_bytes.set_ylabel("delivered accuracy (%)")
    over_bytes.set_xscale("log")
    figure.legend(*over_time.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)


# Memory ---------------------------------------------------------------------------------------------------------------


def memory() -> dict[str, list[tuple[float, float]]]:
    """Return the predicted and the measured peak in MB of every case, by family."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in read("memory/results.json")["cases"]:
        pair = case["predicted_bytes"] / 1e6, case["measured_bytes"] / 1e6
        found.setdefault(case["family"]["name"], []).append(pair)
    return found


def draw_memory(figure: Figure, theme: Theme) -> None:
    """Draw the measured peak of training over the predicted one, both logarithmic, with a band of 12 %."""
    figure.set_size_inches(5.5, 4)
    panel = figure.subplots()
    cases = [pair for pairs in memory().values() for pair in pairs]
    ends = min(min(pair) for pair in cases), max(max(pair) for pair in cases)
    panel.plot(ends, ends, color=theme["colors"][4], linewidth=1)
    lower, upper = [0.88 * end for end in ends], [1.12 * end for end in ends]
    panel.fill_between(ends, lower, upper, color=theme["colors"][4], alpha=0.25, linewidth=0, label="within 12 %")
    panel.plot(*zip(*cases, strict=True), "o", color=theme["colors"][0], markersize=4, alpha=0.75)
    panel.set(xscale="log", yscale="log", xlabel="predicted peak (MB)", ylabel="measured peak (MB)")
    panel.legend(frameon=False, loc="upper left")


# Cost of a round ------------------------------------------------------------------------------------------------------


def overhead() -> dict[str, list[float]]:
    """Return the CPU seconds per round of every contestant, one figure per turn, without each turn's first round."""
    found: dict[str, list[float]] = {}
    for turn in read("overhead/results.json")["turns"]:
        (_, first), *_, (_, last) = turn["rounds"]
        found.setdefault(turn["contestant"], []).append((last - first) / (len(turn["rounds"]) - 1))
    return found


def draw_overhead(figure: Figure, theme: Theme) -> None:
    """Draw the CPU seconds of a round of each contestant in multiples of the bare loop's median; turns are dots."""
    figure.set_size_inches(7, 3)
    panel = figure.subplots()
    contestants = overhead()
    bare = median(contestants["bare PyTorch loop"])
    for row, (name, seconds) in enumerate(contestants.items()):
        color = theme["colors"][0] if "Wildflower" in name else theme["colors"][4]
        panel.barh(row, median(seconds) / bare, color=color, alpha=0.35, height=0.6)
        panel.plot([value / bare for value in seconds], [row] * len(seconds), "o", color=color, markersize=4)
    panel.set_yticks(range(len(contestants)), list(contestants))
    panel.invert_yaxis()
    panel.axvline(1, color=theme["text"], linewidth=0.8)
    panel.set_xlabel("CPU time of a round (bare PyTorch loop = 1)")


# The demo's fleet -----------------------------------------------------------------------------------------------------


def draw_fleet(figure: Figure, theme: Theme) -> None:
    """Draw for every device of the demo its memory, and how much of it the model that it gets needs in training."""
    figure.set_size_inches(7, 3)
    panel = figure.subplots()
    devices = read("demo/plan.json")["devices"]
    places = [device["device"] for device in devices]
    panel.bar(places, [d["memory_bytes"] / 1e6 for d in devices], color=theme["colors"][4], alpha=0.35, label="has")
    needed = [d["needed_memory_bytes"] / 1e6 for d in devices]
    panel.bar(places, needed, color=theme["colors"][0], width=0.5, label="needs for its model")
    for device, height in zip(devices, needed, strict=True):
        text = f"{device['parameters'] / 1000:.0f}k" if device["parameters"] >= 10_000 else f"{device['parameters']:,}"
        panel.annotate(text, (device["device"], height), ha="center", va="bottom", fontsize=7, color=theme["text"])
    panel.set_xticks(places)
    panel.set_xlabel("device; above its bar, the parameters of its model")
    panel.set_ylabel("memory (MB)")
    panel.legend(frameon=False)


# Asynchronous rounds --------------------------------------------------------------------------------------------------

MOMENTS = 40  # of a run's simulated time at which its accuracy is drawn


def draw_asynchronous(figure: Figure, theme: Theme) -> None:
    """Draw accuracy over simulated time, a panel per fleet and method: mean and range of the seeds."""
    figure.set_size_inches(9, 5)
    results = read("asynchronous/results.json")["results"]
    for panel, (name, setting) in zip(
        figure.subplots(2, 2, sharey=True).flat, asynchronous.SETTINGS.items(), strict=True
    ):
        seconds = [setting.seconds * moment / MOMENTS for moment in range(1, MOMENTS + 1)]
        for color, way in zip(theme["colors"], asynchronous.WAYS, strict=False):
            curves = [seed["curve"] for seed in results[f"{name}, {way}"].values()]
            scores = [[100 * asynchronous.at(curve, second) for curve in curves] for second in seconds]
            panel.plot(seconds, [sum(of) / len(of) for of in scores], color=color, label=way)
            panel.fill_between(seconds, list(map(min, scores)), list(map(max, scores)), color=color, alpha=0.15, lw=0)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("simulated seconds")
    for panel in figure.axes[::2]:
        panel.set_ylabel("accuracy (%)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)


# Methods of a study ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A panel of recorded results: `row` makes a result's name of a method's, `score` reads a seed, 0 to 1."""

    title: str
    file: str
    score: Callable[[Mapping[str, Any]], float]
    row: str = "{}"


@dataclass(frozen=True)
class Dots:
    """A study's panels and methods. Those that begin with `lead`, which the page is about, have another color."""

    score: str
    lead: str
    panels: tuple[Panel, ...]
    rows: str  # the methods, from top to bottom, with semicolons between them


def final(seed: Mapping[str, Any]) -> float:
    """Return the score of the whole model after the last round."""
    return todays_names(seed)["final_score"]


def widths(seed: Mapping[str, Any]) -> float:
    """Return the mean over devices of five widths of what they would be given."""
    return delivered_by_width(seed, tiers=5)


STUDIES = {
    "fashion-mnist": Dots(
        "accuracy of the model that a device gets, mean over devices (%)",
        "heterofl",
        (Panel("five widths of a CNN", "fashion_mnist/results.json", widths),),
        "all-large; fedprox; fedadam; all-small; heterofl; search; search-distilled; fjord; anycostfl; "
        "federated-dropout; fedrolex",
    ),
    "hypemefed": Dots(
        "accuracy of the final exit (%)",
        "exits",
        tuple(
            Panel(title, "hypemefed/results-preliminary.json", final, row)
            for title, row in {"even data": "{}", "few classes per device": "{}-few-classes"}.items()
        ),
        "all-large; all-small; exclusive; exits; exits-and-hypernetworks; exits-and-hypernetworks-all; "
        "exits-stale-layers",
    ),
    "inclusivefl": Dots(
        "accuracy of the model that a device gets, mean over devices (%)",
        "inclusivefl",
        tuple(
            Panel(
                title,
                "inclusivefl/results.json",
                lambda seed: delivered_by_depth("40/40/20", seed) / 100,
                f"{task} | 40/40/20 | {{}}",
            )
            for title, task in {"7 classes": "coarse", "47 classes": "fine"}.items()
        ),
        "all-large; all-small; heterofl; flexifed, max; depthfl; inclusivefl, no momentum; inclusivefl",
    ),
    "model-search": Dots(
        "accuracy of the whole model (%)",
        "search",
        tuple(Panel(title, f"model_search/results-{title.lower()}.json", final) for title in ("ResNet", "ViT", "BERT")),
        "largest; smallest; search; search-distilled; anycostfl; heterofl; federated-dropout; fedrolex; fjord",
    ),
    "rafl": Dots(
        "accuracy of the model that travels, after round 40 (%)",
        "rafl",
        tuple(
            Panel(f"Dirichlet({alpha})", "rafl/results.json", lambda seed: seed["rounds"][-1][1], f"{{}} {alpha}")
            for alpha in (0.5, 0.1)
        ),
        "scaffold; fedprox; fednova; fedavg; fedavg, pretrained; rafl c; rafl a, drawn; rafl a; feddf; rafl b; spatl",
    ),
    "recipfl": Dots(
        "personal accuracy (%)",
        "recipfl",
        tuple(
            Panel(f"{tier} devices", "recipfl/results.json", lambda seed, of=tier: seed["personal_score_by_tier"][of])
            for tier in ("strong", "weak")
        ),
        "all-small; exclusive; exclusive-both; flexifed; heterofl; depthfl; depthfl-narrow; depthfl-feddyn; "
        "depthfl-narrow-feddyn; recipfl; recipfl-printed; recipfl-no-transfer",
    ),
}


def draw_dots(figure: Figure, theme: Theme, study: Dots) -> None:
    """Draw a panel for each setting of a study: a row for each method, seeds as dots and their mean as a line."""
    methods = study.rows.split("; ")
    figure.set_size_inches(3.5 + 2.5 * len(study.panels), 0.9 + 0.2 * len(methods))
    figure.set_layout_engine("constrained", w_pad=0.1)  # fonts of readers may be wider than the one that was measured
    panels = figure.subplots(1, len(study.panels), sharey=True, squeeze=False).flat
    for axes, panel in zip(panels, study.panels, strict=True):
        results = read(panel.file)["results"]
        for row, method in enumerate(methods):
            scores = [100 * panel.score(seed) for seed in results[panel.row.format(method)].values()]
            color = theme["colors"][not method.startswith(study.lead)]
            axes.plot(scores, [row] * len(scores), "o", color=color, markersize=5, alpha=0.75)
            axes.plot([mean(scores)], [row], "|", color=color, markersize=11, markeredgewidth=2)
        axes.set_title(panel.title, fontsize=10)
        axes.set_yticks(range(len(methods)), methods)
        axes.set_ylim(len(methods) - 0.5, -0.5)
    figure.supxlabel(study.score, fontsize=10)


FIGURES: dict[str, Callable[[Figure, Theme], None]] = {
    "delivered": draw_delivered,
    "time-and-bytes": draw_time_and_bytes,
    "memory": draw_memory,
    "overhead": draw_overhead,
    "fleet": draw_fleet,
    "asynchronous": draw_asynchronous,
    **{name: partial(draw_dots, study=study) for name, study in STUDIES.items()},
}


def _plain(panel: Axes, theme: Theme) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="both", color=theme["grid"], linewidth=0.5)
    panel.set_axisbelow(True)


def write(folder: Path) -> list[Path]:
    """Write all figures in both themes; return their files."""
    written = []
    for name, draw in FIGURES.items():
        for kind, theme in THEMES.items():
            colors = dict.fromkeys(
                ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), theme["text"]
            )
            # Letters stay letters: a page's reader finds and enlarges them. The salt makes identifiers the same again.
            style = {
                "svg.fonttype": "none",
                "svg.hashsalt": name,
                "font.family": "sans-serif",
                "font.size": 9,
                **colors,
            }
            with mpl.rc_context(style):
                figure = Figure(layout="constrained")
                draw(figure, theme)
                for panel in figure.axes:
                    _plain(panel, theme)
                path = folder / f"{name}-{kind}.svg"
                figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
            written.append(path)
    return written


def main() -> None:
    """Write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=IMAGES)
    for path in write(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    main()
