"""The figures in docs/images are those that `make figures` draws from the recorded results."""

import json
import re
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import pytest

from benchmarks import figures
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


def of_silos(counts):
    return lambda seed: (
        sum(
            count * (mean(tail) if (tail := [v for v in seed[f"{layers} layers"][-2:] if v is not None]) else 0)
            for layers, count in zip((2, 4, 6), counts, strict=True)
        )
        / sum(counts)
    )


def of_widths(seed):
    return seed["delivered_score"] if "delivered_score" in seed else mean(seed["score_by_tier"].values())


def last(seed):
    return seed["final_score"] if "final_score" in seed else seed["final_accuracy"]


# Figure -> its page, and for each panel the recorded file, what follows or precedes a method's name, and its score.
STUDIES = {
    "fashion-mnist": ("fashion_mnist", {"five widths of a CNN": ("results", "{}", of_widths)}),
    "hypemefed": (
        "hypemefed",
        {
            "even data": ("results-preliminary", "{}", last),
            "few classes per device": ("results-preliminary", "{}-few-classes", last),
        },
    ),
    "inclusivefl": (
        "inclusivefl",
        {
            "7 classes": ("results", "coarse | 40/40/20 | {}", of_silos((12, 12, 6))),
            "47 classes": ("results", "fine | 40/40/20 | {}", of_silos((12, 12, 6))),
        },
    ),
    "model-search": (
        "model_search",
        {name: (f"results-{name.lower()}", "{}", last) for name in ("ResNet", "ViT", "BERT")},
    ),
    "rafl": (
        "rafl",
        {f"Dirichlet({alpha})": ("results", f"{{}} {alpha}", lambda s: max(s["rounds"])[1]) for alpha in (0.5, 0.1)},
    ),
    "recipfl": (
        "recipfl",
        {
            "strong devices": ("results", "{}", lambda seed: seed["personal_score_by_tier"]["strong"]),
            "weak devices": ("results", "{}", lambda seed: seed["personal_score_by_tier"]["weak"]),
        },
    ),
}
SVG = "{http://www.w3.org/2000/svg}"


def below(group, start):
    return [inner for inner in group.iter(f"{SVG}g") if inner.get("id", "").startswith(start)]


def ticks(axes, axis):
    """The labels of an axis and where they stand: [(text or None, place)]."""
    return [
        (next((text.text for text in tick.iter(f"{SVG}text")), None), float(next(tick.iter(f"{SVG}use")).get(axis)))
        for tick in below(axes, f"{axis}tick_")
    ]


def marks(path):
    """What a figure of dots shows, read from its SVG: panel -> method -> the values of all its marks, in order."""
    shown, methods = {}, {}
    for axes in below(ElementTree.parse(path).getroot(), "axes_"):
        *_, title = (text.text for group in below(axes, "text_") for text in group.iter(f"{SVG}text"))
        (low, left), *_, (high, right) = ticks(axes, "x")
        methods = methods or {round(place): method for method, place in ticks(axes, "y")}
        of_axes = {use for tick in below(axes, "matplotlib.axis_") for use in tick.iter(f"{SVG}use")}
        for use in set(axes.iter(f"{SVG}use")) - of_axes:
            value = float(low) + (float(use.get("x")) - left) / (right - left) * (float(high) - float(low))
            method = methods[min(methods, key=lambda place: abs(place - float(use.get("y"))))]
            shown.setdefault(title, {}).setdefault(method, []).append(value)
    return {title: {method: sorted(values) for method, values in of.items()} for title, of in shown.items()}


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("kind", figures.THEMES)
def test_a_studys_marks_are_its_recorded_seeds_and_their_mean(drawn, name, kind):
    page, panels = STUDIES[name]
    shown = marks(drawn[f"{name}-{kind}.svg"])
    assert list(shown) == list(panels)
    assert 5 <= len({method for of in shown.values() for method in of}) <= 12
    for title, (file, row, score) in panels.items():
        results = json.loads((ROOT / f"benchmarks/{page}/{file}.json").read_text())["results"]
        for method, values in shown[title].items():
            seeds = [100 * score(seed) for seed in results[row.format(method)].values()]
            assert values == pytest.approx(sorted([*seeds, mean(seeds)]), abs=0.01), (title, method)


@pytest.mark.parametrize("name", STUDIES)
def test_a_studys_page_begins_with_its_figure_and_three_sentences(name):
    _, picture, told, *_ = (ROOT / "benchmarks" / STUDIES[name][0] / "README.md").read_text().split("\n\n")
    assert f'srcset="../../docs/images/{name}-dark.svg"' in picture
    assert re.search(rf'<img alt="[^"]{{30,}}" src="../../docs/images/{name}-light.svg">', picture)
    assert len(re.findall(r"[.](?= [A-Z]|$)", re.sub(r" *\[[^]]*\]\([^)]*\)[.]", "", told))) == 3


def test_every_study_of_dots_is_compared_with_its_data():
    assert set(STUDIES) == set(figures.STUDIES)


def test_the_demos_plan_is_recorded_as_it_is_made():
    said = invoke("plan", str(ROOT / "benchmarks/demo/digits.toml"), "--json")
    assert json.loads(said.stdout) == json.loads((ROOT / "benchmarks/demo/plan.json").read_text())
