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


def test_the_demos_plan_is_recorded_as_it_is_made():
    said = invoke("plan", str(ROOT / "benchmarks/demo/digits.toml"), "--json")
    assert json.loads(said.stdout) == json.loads((ROOT / "benchmarks/demo/plan.json").read_text())
