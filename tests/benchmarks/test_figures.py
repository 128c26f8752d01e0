"""The figures in docs/images are those that `make figures` draws from the recorded results."""

import json
import math
import re
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import pytest

from benchmarks import figures
from benchmarks.dots import STUDIES, read
from tests.cli.test_command import invoke

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return {path.name: path for path in figures.write(tmp_path_factory.mktemp("figures"))}


@pytest.mark.parametrize("name", [f"{name}-{kind}.svg" for name in figures.FIGURES for kind in figures.THEMES])
def test_a_figure_is_what_its_data_say(drawn, name):
    assert drawn[name].read_text() == (figures.IMAGES / name).read_text(), "run `make figures`"
    assert ElementTree.parse(drawn[name]).getroot().tag.endswith("svg")


def test_dots_are_seeds_and_a_method_has_the_best_of_its_rates():
    results = json.loads((ROOT / "benchmarks/methods_that_win/results-resnet6.json").read_text())["results"]
    scores = figures.delivered("ResNet, images", "heterofl")
    assert scores == [100 * seed["delivered_score"] for seed in results["heterofl-rate-0.2"].values()]
    for other in ("heterofl", "heterofl-rate-0.1"):
        assert mean(scores) > mean(100 * seed["delivered_score"] for seed in results[other].values())
    assert figures.delivered("BERT, characters", "heterofl") == [
        100 * seed["delivered_score"]
        for seed in json.loads((ROOT / "benchmarks/methods_that_win/results-bert.json").read_text())["results"][
            "heterofl-120-rounds"
        ].values()
    ]


def test_every_seed_of_every_method_is_a_dot(drawn):
    text = drawn["delivered-light.svg"].read_text()
    uses = len(re.findall(r"<use ", text))
    ran = [figures.delivered(network, method) for network in figures.NETWORKS for method in figures.METHODS.values()]
    assert all(len(scores) == 3 for scores in ran)
    assert uses >= sum(len(scores) + 1 for scores in ran)  # and a dash each, and ticks


# Of each figure: a panel, a row, and the mean of its dots or one of them as a page of the benchmark prints it.
PRINTED = {
    "any-model": ("any_model/README", "predicted memory, error (%)", "efficientnet_b0", "11.9"),
    "bytes": ("bytes/README", "down", "lenet5", "87"),
    "deployment": ("deployment/README", "", "node, between messages", "492"),
    "fashion-mnist": ("fashion_mnist/README", "five widths of a CNN", "heterofl", "83.17"),
    "hypemefed": ("hypemefed/details", "few classes per device", "exits-and-hypernetworks-all", "56.66"),
    "inclusivefl": ("inclusivefl/details", "47 classes", "inclusivefl", "70.5"),
    "label-skew": ("label_skew/README", "drift", "scaffold", "74.7"),
    "latency": ("latency/README", "CPU seconds of a message", "process of its own", "4.57"),
    "model-search": ("model_search/details", "ResNet", "search", "82.86"),
    "rafl": ("rafl/details", "Dirichlet(0.5)", "rafl a", "72.6"),
    "rafl-utilisation": ("rafl/utilisation", "", "one model for all, ofa-resnet50", "21.7"),
    "recipfl": ("recipfl/details", "weak devices", "recipfl", "91.22"),
    "scale": ("scale/README", "server's peak memory (MB)", "fedavg, 10 a round", "1046"),
    "search": ("search/README", "mean time of a search (ms)", "exact: setting 1, fleet", "0.49"),
    "time-budget": ("time_budget/README", "after 60 simulated seconds", "round-seconds = 3", "94.7"),
    "trust": ("trust/README", "digits", "scaled, mean", "79.9"),
    "wire": ("wire/README", "accuracy (%)", "lenet5 int8", "80.01"),
}
SVG = "{http://www.w3.org/2000/svg}"


def below(group, start):
    return [inner for inner in group.iter(f"{SVG}g") if inner.get("id", "").startswith(start)]


def ticks(axes, axis):
    """The labels of an axis and where they stand: [(text, place)]."""
    found = [
        (next((text.text for text in tick.iter(f"{SVG}text")), None), float(next(tick.iter(f"{SVG}use")).get(axis)))
        for tick in below(axes, f"{axis}tick_")
    ]
    return [(text, place) for text, place in found if text]


def marks(path):
    """What a figure of dots shows, read from its SVG: panel -> row -> the values of all its marks, in order."""
    shown, rows = {}, {}
    for axes in below(ElementTree.parse(path).getroot(), "axes_"):
        title = (
            "".join(text.text for text in list(axes)[-1].iter(f"{SVG}text")) if axes[-1].get("id")[:4] == "text" else ""
        )
        (low, left), *_, (high, right) = [
            (float(text.replace("\N{MINUS SIGN}", "-")), x) for text, x in ticks(axes, "x")
        ]
        log = low > 0 and high / low > 1000
        low, high = (math.log10(low), math.log10(high)) if log else (low, high)
        rows = {round(place): row for row, place in ticks(axes, "y")} or rows
        of_axes = {use for tick in below(axes, "matplotlib.axis_") for use in tick.iter(f"{SVG}use")}
        for use in set(axes.iter(f"{SVG}use")) - of_axes:
            value = low + (float(use.get("x")) - left) / (right - left) * (high - low)
            row = rows[min(rows, key=lambda place: abs(place - float(use.get("y"))))]
            shown.setdefault(title, {}).setdefault(row, []).append(10**value if log else value)
    return {title: {row: sorted(values) for row, values in of.items()} for title, of in shown.items()}


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("kind", figures.THEMES)
def test_dots_are_what_is_recorded_and_lines_their_mean(drawn, name, kind):
    study = STUDIES[name]
    shown = marks(drawn[f"{name}-{kind}.svg"])
    assert list(shown) == [panel.title for panel in study.panels]
    for panel in study.panels:
        recorded = panel.rows(read(panel.file))
        assert 2 <= len(recorded) <= 16  # what an eye still reads from one panel
        assert shown[panel.title].keys() == recorded.keys()
        for row, values in recorded.items():
            dots = sorted([*values, mean(values)] if study.means else values)
            assert shown[panel.title][row] == pytest.approx(dots, rel=1e-3, abs=0.01), (panel.title, row)


@pytest.mark.parametrize("name", STUDIES)
def test_dots_are_what_the_page_prints(name):
    page, title, row, printed = PRINTED[name]
    [panel] = [panel for panel in STUDIES[name].panels if panel.title == title]
    values = panel.rows(read(panel.file))[row]
    digits = len(printed.partition(".")[2])
    assert printed in {f"{value:.{digits}f}" for value in [mean(values), *values]}
    assert printed in (ROOT / f"benchmarks/{page}.md").read_text()


# What is no README of a benchmark: the papers' figures beside ours, which are tables, and tables of memory.
PAGES = sorted({*(ROOT / "benchmarks").glob("*/README.md"), ROOT / "benchmarks/rafl/utilisation.md"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_benchmarks_page_begins_with_its_figure_and_at_most_three_sentences(page):
    _, picture, told, *_ = page.read_text().split("\n\n")
    if page.parent.name == "same_bits":
        assert "This page has no plot: " in picture
        return
    [name] = re.findall(r'srcset="../../docs/images/([a-z-]+)-dark.svg"', picture)
    assert name in figures.FIGURES
    assert re.search(rf'<img alt="[^"]{{30,}}" src="../../docs/images/{name}-light.svg">', picture)
    told = re.sub(r" *\[[^]]*\]\([^)]*\)[.]", "", told)
    assert 2 <= len(re.findall(r"[.?](?=\s+[A-Z`]|$)", told)) <= 3


def test_every_figure_is_shown_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert [name for name in figures.FIGURES if f"/{name}-light.svg" not in text] == []


def test_the_demos_plan_is_recorded_as_it_is_made():
    said = invoke("plan", str(ROOT / "benchmarks/demo/digits.toml"), "--json")
    assert json.loads(said.stdout) == json.loads((ROOT / "benchmarks/demo/plan.json").read_text())
