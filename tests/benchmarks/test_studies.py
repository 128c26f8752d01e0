"""Every run of every table: its settings are ones that a run takes, its fleet has its devices, its family is one."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.fashion_mnist import run as fashion_mnist
from benchmarks.hypemefed import run as hypemefed
from benchmarks.model_search import run as model_search
from benchmarks.recipfl import run as recipfl
from devices.fleet import Fleet
from models.family import FAMILIES
from server_app.config import parse_arguments
from wildflower.settings import resolve

STUDIES = {
    recipfl.HERE / "table.toml": (recipfl.METHODS, recipfl.HERE / "fleet.toml"),
    fashion_mnist.HERE / "table.toml": (fashion_mnist.METHODS, None),
    **{
        hypemefed.HERE / f"{name}.toml": (methods, hypemefed.HERE / f"{name}-fleet.toml")
        for name, methods in hypemefed.STUDIES.items()
    },
    **{
        model_search.HERE / f"{twin}.toml": (
            model_search.METHODS | (model_search.LONG if twin == "vit" else {}),
            None,  # of traces that are not part of the project
        )
        for twin in model_search.TWINS
    },
}


@pytest.mark.parametrize("experiment", STUDIES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_method_of_a_table_can_be_run(experiment):
    methods, fleet = STUDIES[experiment]
    for sets in methods.values():
        config = resolve(experiment, [*([f"fleet={fleet}"] if fleet else []), *sets]).config
        if config.family != "choice":
            fields = {field.name for field in dataclasses.fields(FAMILIES[config.family])}
            assert set(parse_arguments(config.family_arguments)) <= fields
        if fleet and Path(config.fleet).exists():
            assert Fleet.load(config.fleet, devices=config.devices, seed=1, requirement=None).size == config.devices
