"""The explorations of RecipFL: every run has a fleet that agrees with its settings."""

import tomllib

import pytest

from benchmarks.recipfl.explorations import STUDY
from wildflower.devices.fleet import Fleet
from wildflower.server_app.inline_tables import flat


@pytest.mark.parametrize("method", STUDY.methods)
def test_fleets_and_settings_agree(method):
    settings = tomllib.loads(STUDY.experiment.read_text())
    settings = flat(settings) | dict(setting.split("=", 1) for setting in STUDY.methods[method])
    counts = Fleet(settings["fleet"]).counts
    assert counts["strong"] == int(settings["strong.devices"])
    assert sum(counts.values()) == int(settings["devices"])
    assert method.startswith(STUDY.once)
