"""Figures of dots: a row for each method or setting, a panel for each figure of it, read from a benchmark's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter

from benchmarks.fashion_mnist.run import delivered as delivered_by_width
from benchmarks.inclusivefl.run import delivered as delivered_by_depth
from benchmarks.time_budget.run import at

HERE = Path(__file__).parent
DELIVERED = "accuracy of the model that a device gets, mean over devices (%)"
Theme = Mapping[str, Any]
Rows = Mapping[str, Sequence[float]]


def read(path: str) -> Any:
    """Return what a recorded JSON file below benchmarks/ holds."""
    return json.loads((HERE / path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Panel:
    """A panel of recorded results: `rows` reads the dots of each row from what the file holds."""

    title: str
    file: str
    rows: Callable[[Any], Rows]
    log: bool = False


@dataclass(frozen=True)
class Dots:
    """The panels of a figure. Rows that begin with `lead`, which the page is about, have another color."""

    label: str
    lead: str
    panels: tuple[Panel, ...]
    means: bool = True  # if a line marks the mean of a row's dots, which are seeds then


def seeds(names: str, score: Callable[[Mapping[str, Any]], float], row: str = "{}", factor: float = 100) -> Any:
    """Return what reads a score of each seed of results; `row` makes a result's name of a row's."""

    def rows(content: Any) -> Rows:
        results = content["results"]
        return {
            name: [factor * score(seed) for seed in results[row.format(name)].values()] for name in names.split("; ")
        }

    return rows


def grouped(items: Sequence[Mapping[str, Any]], name: str, value: Callable[[Mapping[str, Any]], float]) -> Rows:
    """Return a value of each item, by a name that is made of the item's fields."""
    found: dict[str, list[float]] = {}
    for item in items:
        found.setdefault(name.format(**item), []).append(value(item))
    return found


def final(seed: Mapping[str, Any]) -> float:
    """Return the score of the whole model after the last round."""
    return seed["final_score"]


def last_fifth(seed: Mapping[str, Any]) -> float:
    """Return the mean of the last fifth of a seed's evaluations."""
    scores = [*seed["curve"].values()]
    return mean(scores[-(len(scores) // 5) :])


def attacked(content: Any, task: str) -> Rows:
    """Return the accuracies under each attack with the plain and with the trimmed mean."""
    return {
        f"{attack}, {rule}": [100 * content[f"{task} {attack} {rule} {seed}"]["accuracy"] for seed in (1, 2, 3)]
        for attack in ("none", "scaled", "sign-flipped", "label-flipped")
        for rule in ("mean", "trimmed-mean")
    }


def searched(content: Any, value: Callable[[Mapping[str, Any]], float]) -> Rows:
    """Return a value of each searcher, by space and budgets."""
    return {
        f"{searcher}: {space['space']}, {space['budgets']}": [value(space[searcher])]
        for searcher in ("exact", "pool")
        for space in content["resnet152"]
    }


def held(content: Any) -> Rows:
    """Return the MB that a node of the deployment holds, before and between messages, and at most by model."""
    measured = content["deployment"]
    peaks = {
        f"node, at most, training {model['payload_bytes'] / 1e6:.3g} MB": [model["node_peak_bytes"] / 1e6]
        for model in measured["models"]
    }
    return {
        f"{what}, {when}": [value / 1e6 for name, value in measured[key].items() if name.startswith(what)]
        for what in ("superlink", "node")
        for when, key in {"before the first work": "idle_bytes", "between messages": "bytes_between_messages"}.items()
    } | peaks


METHODS_OF_HYPEMEFED = (
    "all-large; all-small; exclusive; exits; exits-and-hypernetworks; exits-and-hypernetworks-all; exits-stale-layers"
)
METHODS_OF_INCLUSIVEFL = "all-large; all-small; heterofl; flexifed, max; depthfl; inclusivefl, no momentum; inclusivefl"
METHODS_OF_SEARCH = (
    "largest; smallest; search; search-distilled; anycostfl; heterofl; federated-dropout; fedrolex; fjord"
)
METHODS_OF_RAFL = (
    "scaffold; fedprox; fednova; fedavg; fedavg, pretrained; rafl c; rafl a, drawn; rafl a; feddf; rafl b; spatl"
)
METHODS_OF_RECIPFL = (
    "all-small; exclusive; exclusive-both; flexifed; heterofl; depthfl; depthfl-narrow; depthfl-feddyn; "
    "depthfl-narrow-feddyn; recipfl; recipfl-printed; recipfl-no-transfer"
)
WIDTHS = (
    "all-large; fedprox; fedadam; all-small; heterofl; search; search-distilled; fjord; anycostfl; "
    "federated-dropout; fedrolex"
)
WAYS_TO_WAIT = "waits for all; deadline-seconds = 3; round-seconds = 3"
ROUNDED = (
    "lenet5 float32; lenet5 float16; lenet5 int8; vit twin float32; vit twin int8; "
    "digits float32; digits float16; digits int8"
)

STUDIES = {
    "any-model": Dots(
        "",
        "",
        (
            Panel(
                "predicted memory, error (%)",
                "any_model/prices.json",
                lambda found: {
                    name: [100 * size["relative_error"] for size in network["sizes"].values()]
                    for name, network in found["networks"].items()
                },
            ),
            Panel(
                "a step of the graph / of the module",
                "any_model/overhead.json",
                lambda found: {name: [step["ratio"]] for name, step in found["steps"].items()},
            ),
        ),
        means=False,
    ),
    "bytes": Dots(
        "bytes beside the weights (%), for five widths",
        "",
        tuple(
            Panel(
                way,
                "bytes/results.json",
                lambda found, way=way: grouped(found["rows"], "{family}", lambda row: 100 * (row[way]["ratio"] - 1)),
                log=True,
            )
            for way in ("down", "up")
        ),
        means=False,
    ),
    "deployment": Dots(
        "memory that a container holds (MB)", "node", (Panel("", "deployment/results.json", held),), means=False
    ),
    "fashion-mnist": Dots(
        DELIVERED,
        "heterofl",
        (
            Panel(
                "five widths of a CNN",
                "fashion_mnist/results.json",
                seeds(WIDTHS, lambda seed: delivered_by_width(seed, tiers=5)),
            ),
        ),
    ),
    "hypemefed": Dots(
        "accuracy of the final exit (%)",
        "exits",
        tuple(
            Panel(title, "hypemefed/results-preliminary.json", seeds(METHODS_OF_HYPEMEFED, final, row))
            for title, row in {"even data": "{}", "few classes per device": "{}-few-classes"}.items()
        ),
    ),
    "inclusivefl": Dots(
        DELIVERED,
        "inclusivefl",
        tuple(
            Panel(
                title,
                "inclusivefl/results.json",
                seeds(
                    METHODS_OF_INCLUSIVEFL,
                    lambda seed: delivered_by_depth("40/40/20", seed),
                    f"{task} | 40/40/20 | {{}}",
                    factor=1,
                ),
            )
            for title, task in {"7 classes": "coarse", "47 classes": "fine"}.items()
        ),
    ),
    "label-skew": Dots(
        "accuracy, mean of the last fifth of the evaluations (%)",
        "",
        tuple(
            Panel(setting, "label_skew/results.json", seeds(f"fedavg; {method}", last_fifth, f"{setting} {{}}"))
            for setting, method in {"drift": "scaffold", "steps": "fednova"}.items()
        ),
    ),
    "latency": Dots(
        "",
        "",
        (
            Panel(
                "seconds of a round beside training",
                "latency/results.json",
                lambda found: {
                    "first round": found["worker"]["seconds_per_round"][:1],
                    "rounds after it": found["worker"]["seconds_per_round"][1:],
                },
            ),
            Panel(
                "CPU seconds of a message",
                "latency/messages.json",
                lambda found: {
                    "process of its own": [found["own_process"]["cpu_seconds"]],
                    "worker, messenger and child": [
                        found["worker"]["cpu_seconds_of_the_messenger"] + found["worker"]["cpu_seconds_of_the_child"]
                    ],
                },
            ),
        ),
        means=False,
    ),
    "model-search": Dots(
        "accuracy of the whole model (%)",
        "search",
        tuple(
            Panel(title, f"model_search/results-{title.lower()}.json", seeds(METHODS_OF_SEARCH, final))
            for title in ("ResNet", "ViT", "BERT")
        ),
    ),
    "rafl": Dots(
        "accuracy of the model that travels, after round 40 (%)",
        "rafl",
        tuple(
            Panel(
                f"Dirichlet({alpha})",
                "rafl/results.json",
                seeds(METHODS_OF_RAFL, lambda seed: seed["rounds"][-1][1], f"{{}} {alpha}"),
            )
            for alpha in (0.5, 0.1)
        ),
    ),
    "rafl-utilisation": Dots(
        "part of the devices' budgets that is used (%)",
        "searched",
        (
            Panel(
                "",
                "rafl/utilisation.json",
                lambda found: {
                    f"{kind}, {case['family']}": [100 * case[key]]
                    for kind, key in {"searched": "utilisation", "one model for all": "uniform_utilisation"}.items()
                    for case in found
                },
            ),
        ),
        means=False,
    ),
    "recipfl": Dots(
        "personal accuracy (%)",
        "recipfl",
        tuple(
            Panel(
                f"{tier} devices",
                "recipfl/results.json",
                seeds(METHODS_OF_RECIPFL, lambda seed, of=tier: seed["personal_score_by_tier"][of]),
            )
            for tier in ("strong", "weak")
        ),
    ),
    "scale": Dots(
        "",
        "",
        (
            Panel(
                "server's peak memory (MB)",
                "scale/results.json",
                lambda found: grouped(
                    found["memory"],
                    "{strategy}, {devices_per_round} a round",
                    lambda run: run["server_peak_rss_bytes"] / 1e6,
                ),
            ),
            Panel(
                "server's seconds of a round",
                "scale/results.json",
                lambda found: grouped(
                    found["sampling"], "{devices_per_round} of {devices:,}", lambda line: line["server_seconds"]
                ),
            ),
        ),
        means=False,
    ),
    "search": Dots(
        "",
        "exact",
        (
            Panel(
                "parameters, of the optimum's (%)",
                "search/results.json",
                lambda found: searched(found, lambda of: 100 * of["share_of_optimum"]["mean"]),
            ),
            Panel(
                "mean time of a search (ms)",
                "search/results.json",
                lambda found: searched(found, lambda of: of["find_ms"]["mean"]),
            ),
        ),
        means=False,
    ),
    "time-budget": Dots(
        "accuracy (%)",
        "round-seconds",
        (
            Panel(
                "after 60 simulated seconds",
                "time_budget/results.json",
                seeds(WAYS_TO_WAIT, lambda seed: at(seed["curve"], 60) or 0),
            ),
            Panel(
                "after 30 rounds",
                "time_budget/results.json",
                seeds(WAYS_TO_WAIT, lambda seed: mean(score for _, score in seed["curve"][-3:])),
            ),
        ),
    ),
    "trust": Dots(
        "accuracy with one hostile device of ten (%)",
        "",
        tuple(
            Panel(title, "trust/attack.json", lambda found, task=task: attacked(found, task))
            for title, task in {"Fashion-MNIST": "fashion-mnist", "digits": "digits"}.items()
        ),
    ),
    "wire": Dots(
        "",
        "",
        (
            Panel("accuracy (%)", "wire/results.json", seeds(ROUNDED, final)),
            Panel(
                "MB that travel",
                "wire/results.json",
                seeds(ROUNDED, lambda seed: seed["bytes_down"] + seed["bytes_up"], factor=1e-6),
            ),
        ),
    ),
}


def draw_dots(figure: Figure, theme: Theme, study: Dots) -> None:
    """Draw the panels of a study: a row for each method or setting, seeds as dots, their mean as a line."""
    found = [panel.rows(read(panel.file)) for panel in study.panels]
    same = all(list(rows) == list(found[0]) for rows in found)
    lines = max(len(rows) for rows in found)
    figure.set_size_inches(3.5 + (2.5 if same else 3.7) * len(found), 0.9 + 0.2 * max(lines, 3))
    figure.set_layout_engine("constrained", w_pad=0.1)  # fonts of readers may be wider than the one that was measured
    panels = figure.subplots(1, len(found), sharey=same, squeeze=False).flat
    for axes, panel, rows in zip(panels, study.panels, found, strict=True):
        for row, (name, values) in enumerate(rows.items()):
            color = theme["colors"][not name.startswith(study.lead)]
            axes.plot(values, [row] * len(values), "o", color=color, markersize=5, alpha=0.75)
            if study.means:
                axes.plot([mean(values)], [row], "|", color=color, markersize=11, markeredgewidth=2)
        if panel.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.set_title(panel.title, fontsize=10)
        axes.set_yticks(range(len(rows)), [*rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
    figure.supxlabel(study.label, fontsize=10)
