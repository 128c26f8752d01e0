"""Figures of README and of pages, from what benchmarks recorded: `make figures` writes them into docs/images.

python -m benchmarks.figures [--folder docs/images]

Each figure is two SVG files, for light and for dark pages. The same data and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from benchmarks.asynchronous import run as asynchronous
from benchmarks.dots import STUDIES, Theme, draw_dots, read

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
# Told apart also by people who do not see red and green as different, on white and on GitHub's dark gray.
THEMES = {
    "light": {"text": "#24292f", "grid": "#d0d7de", "colors": ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#6e7781")},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "colors": ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#8b949e")},
}


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


def draw_memory(figure: Figure, theme: Theme, file: str) -> None:
    """Draw the measured peak of training over the predicted one, both logarithmic, with a band of 12 %."""
    figure.set_size_inches(5.5, 4)
    panel = figure.subplots()
    cases = [(case["predicted_bytes"] / 1e6, case["measured_bytes"] / 1e6) for case in read(file)["cases"]]
    ends = min(min(pair) for pair in cases), max(max(pair) for pair in cases)
    panel.plot(ends, ends, color=theme["colors"][4], linewidth=1)
    lower, upper = [0.88 * end for end in ends], [1.12 * end for end in ends]
    panel.fill_between(ends, lower, upper, color=theme["colors"][4], alpha=0.25, linewidth=0, label="within 12 %")
    panel.plot(*zip(*cases, strict=True), "o", color=theme["colors"][0], markersize=4, alpha=0.75)
    panel.set(xscale="log", yscale="log", xlabel="predicted peak (MB)", ylabel="measured peak (MB)")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())
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


FIGURES: dict[str, Callable[[Figure, Theme], None]] = {
    "delivered": draw_delivered,
    "time-and-bytes": draw_time_and_bytes,
    "memory": partial(draw_memory, file="memory/results.json"),
    "memory-gpu": partial(draw_memory, file="memory/results-gpu.json"),
    "memory-default-allocator": partial(draw_memory, file="memory/results-default-allocator.json"),
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
