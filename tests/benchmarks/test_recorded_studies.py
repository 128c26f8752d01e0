"""Every run of every table: its settings are ones that a run takes, its fleet has its devices, its family is one. And
what is recorded of them is of these settings, and in the tables."""

import dataclasses
import json
import statistics

import pytest

from benchmarks.any_model import mobilenet
from benchmarks.asynchronous import run as asynchronous
from benchmarks.fashion_mnist import run as fashion_mnist
from benchmarks.hypemefed import run as hypemefed
from benchmarks.inclusivefl import momentum, silos
from benchmarks.inclusivefl import run as inclusivefl
from benchmarks.label_skew import run as label_skew
from benchmarks.methods_that_win import run as methods_that_win
from benchmarks.model_search import run as model_search
from benchmarks.rafl import proportions
from benchmarks.rafl import run as rafl
from benchmarks.recipfl import digits, encoders, explorations, transfer
from benchmarks.recipfl import run as recipfl
from benchmarks.time_budget import run as time_budget
from benchmarks.wire import run as wire
from wildflower.devices.fleet import Fleet
from wildflower.launch.experiment_file import beside, resolve
from wildflower.models.cost import cost
from wildflower.models.family import family_class, make_family
from wildflower.server_app.inline_tables import parse_arguments

STUDIES = [
    *(fashion_mnist.STUDY, recipfl.STUDY, explorations.STUDY, transfer.STUDY, digits.STUDY, encoders.STUDY),
    *(*hypemefed.STUDIES, *methods_that_win.STUDIES, *model_search.STUDIES),
    *(
        inclusivefl.STUDY,
        silos.STUDY,
        momentum.STUDY,
        rafl.STUDY,
        proportions.STUDY,
        label_skew.STUDY,
        wire.STUDY,
        time_budget.STUDY,
        asynchronous.STUDY,
    ),
]
RECORDED = [study for study in (*STUDIES, mobilenet.STUDY) if study.results.exists()]
# The exit that a device of each group of the fleet can train up to.
EXITS = {
    "preliminary": {"small": 1, "medium": 2, "large": 3},
    "ten-exits": {f"exit {number}": number for number in range(1, 11)},
    "hapt": {"small": 1, "medium": 2, "large": 3},
    "fills": {"small": 1, "medium": 2, "large": 3},
    "by-user": {"small": 1, "medium": 2, "large": 3},
    "ranks": {"small": 1, "medium": 2, "large": 3},
}


@pytest.mark.parametrize("study", EXITS)
def test_the_groups_of_a_fleet_reach_the_exits_that_they_are_there_for(study):
    config = resolve(hypemefed.HERE / f"{study}.toml", [f"fleet={hypemefed.HERE / f'{study}-fleet.toml'}"]).config
    shapes = {"fashion-mnist": ((1, 28, 28), 10), "hapt": ((6, 128), 12)}
    shape, classes = shapes[config.task]
    spec = {"name": config.family, "input_shape": list(shape), "classes": classes}
    family = make_family(spec | parse_arguments(config.family_arguments))
    assert config.optimizer == "adam"
    exits = [family.up_to(exit) for exit in range(1, len(family.segments) + 1)]
    kinds = {"batch_size": config.batch_size, "optimizer": config.optimizer}
    needs = [cost(family, architecture, **kinds).peak_training_memory_bytes for architecture in exits]
    fleet = Fleet(config.fleet, devices=config.devices, seed=1, requirement=None)
    found = {}
    for device in range(fleet.size):
        limit_bytes = fleet.report(device, 0.0).memory_limit_bytes
        found.setdefault(fleet.tier(device), set()).add(sum(need <= limit_bytes for need in needs))
    assert found == {group: {exit} for group, exit in EXITS[study].items()}


@pytest.mark.parametrize("study", RECORDED, ids=lambda study: study.name)
def test_recorded_figures_are_of_the_settings_that_are_run(study):
    """Else they would be taken out of the table when it is written anew. Defaults are no part of this: a study states
    the values on which its figures depend and which are not the defaults any more.
    """
    written = json.loads(study.results.read_text())["results"]
    assert {method: list(seeds) for method, seeds in study.known().items() if seeds} == {
        method: list(seeds) for method, seeds in written.items()
    }


@pytest.mark.parametrize("study", RECORDED, ids=lambda study: study.name)
def test_the_table_on_the_page_is_of_the_recorded_figures(study):
    details = study.experiment.with_name("details.md")
    page = (details if details.is_file() else study.experiment.with_name("README.md")).read_text()
    shown = page.partition(f"<!-- {study.name} -->\n\n")[2].partition(f"\n\n<!-- end of {study.name} -->")[0]
    assert shown == study.table(study, {method: seeds for method, seeds in study.known().items() if seeds})


@pytest.mark.parametrize(
    ("strategy", "old"),
    [
        ("hypemefed", {"guess": "change", "epochs": 5}),
        ("depthfl", {"alpha": 0.0, "scored": "deepest"}),
        ("scalefl", {"gamma": 0.0}),
        ("fjord", {"distillation": False}),
    ],
)
def test_figures_that_were_recorded_under_earlier_defaults_name_them(strategy, old):
    """Rows that are about such a setting itself name another value of it."""
    found = 0
    for study in STUDIES:
        # Some are younger than today's defaults.
        if study in (transfer.STUDY, digits.STUDY, encoders.STUDY, inclusivefl.STUDY):
            continue
        for sets in study.methods.values():
            with beside(study.experiment):
                config = resolve(study.experiment, sets).config
            if config.strategy == strategy:
                named = {setting.partition("=")[0] for setting in sets}
                assert {f"{strategy}.{name.replace('_', '-')}" for name in old} <= named
                found += all(getattr(config.params, name) == value for name, value in old.items())
    assert found


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_method_of_a_table_can_be_run(study):
    for sets in study.methods.values():
        with beside(study.experiment):
            config = resolve(study.experiment, sets).config
        if config.family != "choice":
            fields = {field.name for field in dataclasses.fields(family_class(config.family))}
            assert set(parse_arguments(config.family_arguments)) <= fields
        if (
            config.fleet.endswith(".toml") and study not in model_search.STUDIES
        ):  # whose fleets name traces that are not part of the project
            fleet = Fleet(config.fleet, devices=config.devices, seed=1, requirement=lambda _: (10**6, 10**6))
            assert fleet.size == config.devices


FIRST_ROWS = {
    "wildflower, balanced levels, momentum 0.5, micro-batches of 8": ["wildflower-balanced"],
    "wildflower, momentum 0.5, micro-batches of 8": ["wildflower-momentum"],
    "one model that all can train, momentum 0.5, micro-batches of 8": ["all-widest-momentum"],
    "fedavg of one model that all can train, micro-batches of 8": ["all-common", "all-widest"],
    "heterofl, micro-batches of 8": ["heterofl"],
    "wildflower, balanced levels, momentum 0.5": ["wildflower-balanced"],
    "wildflower, momentum 0.5": ["wildflower-momentum"],
    "wildflower": ["wildflower"],
    "model search, four nested architectures": ["search-four-nested"],
    "one model that all can train, momentum 0.5": ["all-small-momentum"],
    "heterofl": ["heterofl"],
    "all-small": ["all-small"],
    "all-large": ["all-large"],
}


def test_the_first_table_of_the_page_has_the_best_recorded_rate_of_each_method():
    study = {found.name.removeprefix("methods_that_win_"): found.known() for found in methods_that_win.STUDIES}
    text = (methods_that_win.HERE / "README.md").read_text()
    lines = text.partition("| delivered accuracy, mean of three seeds |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0].partition(":")[0].partition(", beyond")[0] for row in cells] == list(FIRST_ROWS)
    for row, (label, names) in zip(cells, FIRST_ROWS.items(), strict=True):
        in_parts = "micro-batches" in label
        for twin, figure in zip(("cnn3", "resnet6", "vit", "bert", "hapt"), row[1:], strict=True):
            rates = [f"{name}-120-rounds" if twin == "bert" else name for name in names]
            rates += [method for name in names for method in study[twin] if method.startswith(f"{name}-rate-")]
            rates = [method for method in rates if method.endswith("-micro-8") == in_parts]
            recorded = [study[twin][method] for method in rates if len(study[twin].get(method, {})) >= 3]
            means = [100 * statistics.mean(run["delivered_score"] for run in seeds.values()) for seeds in recorded]
            assert figure == (f"{max(means):.1f}" if means else "not run"), (label, twin)
