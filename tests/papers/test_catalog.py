"""The papers' experiments: all can be configured, planned and tried, and hold what the papers print."""

import re
from pathlib import Path

import pytest

from tests.small_run import simulated_grid
from wildflower.cli.papers import configured
from wildflower.devices.fleet import FLEETS_DIR, Fleet
from wildflower.launch.experiment_file import SettingsError
from wildflower.launch.sweeps import Row
from wildflower.papers.catalog import Entry, entries, entry, papers, tiny
from wildflower.server_app.app import run
from wildflower.server_app.run_folder import read_summary

ALL = entries()


def test_all_five_papers_have_experiments_with_names_of_their_own():
    assert [folder.name for folder in papers()] == ["hypemefed", "inclusivefl", "model_search", "rafl", "recipfl"]
    assert len({one.name for one in ALL}) == len(ALL)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_every_row_can_be_configured_at_full_size(one):
    for row in one.methods():
        config = configured(one, row, [])
        fleet = FLEETS_DIR / f"{config.fleet}.toml" if not config.fleet.endswith(".toml") else Path(config.fleet)
        found = Fleet(fleet, devices=config.devices, seed=1, requirement=lambda width: (int(width * 1e9), 10**9))
        assert found.size == config.devices


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_figures_are_printed_for_rows_that_there_are(one):
    assert one.printed
    assert set(one.printed) <= {row.name for row in one.methods()}


def test_no_file_is_left_that_no_experiment_uses():
    used: set[Path] = set()
    for one in ALL:
        settings = [*one.settings(), *(text for row in one.methods() for text in row.overrides)]
        used |= {Path(text.partition("=")[2]) for text in settings if text.startswith("fleet=")}
        used |= {one.experiment_file, one.folder / one.rows, one.folder / "index.toml"}
    assert {file for folder in papers() for file in folder.glob("*.toml")} <= used


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(SettingsError, match=r"recipfl/table-3-mnist'"):
        entry("recipfl/table-3-mnst")
    with pytest.raises(SettingsError, match="but 6 that begin so: recipfl/table-3-cifar10-depth"):
        entry("recipfl/table-3")


def own_method(one: Entry) -> Row:
    """The row of the paper's own method, which stands last or is called after it."""
    folder = one.name.partition("/")[0].replace("_", "-")
    rows = one.methods()
    return next((row for row in rows if f"strategy={folder}" in row.overrides), rows[-1])


# By what is run: several tables have the same experiment and the same row.
TRIED = {(one.experiment_file, own_method(one).overrides): one for one in reversed(ALL)}
SHORT = ("hypemefed/figure-14", "inclusivefl/figure-6")


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=() if one.name in SHORT else pytest.mark.thorough) for one in reversed(TRIED.values())],
    ids=lambda one: one.name,
)
def test_the_papers_method_runs_on_made_data(one, tmp_path):
    row = own_method(one)
    output = [f"output-dir={tmp_path / 'runs'}", "run-name=tiny"]
    config = configured(one, row, [*tiny(one, row, tmp_path), *output])
    found = read_summary(run(simulated_grid(1), config))
    assert (found.status, found.rounds) == ("finished", 2)


PAPERS = Path(__file__).parents[3] / "shared" / "papers"
TEXTS = {folder.name: PAPERS / f"{folder.name.replace('_', '-')}.txt" for folder in papers()}


@pytest.mark.thorough  # which CI runs where the papers' texts lie beside the project's folder
@pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers' texts lie beside the project's folder")
@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_printed_figures_stand_in_the_papers_text(one):
    folder = one.name.partition("/")[0]
    # Signs and blanks differ by how a table was read: 85.28{\pm}0.22, 85.28 ± 0.22, 90*.*04.
    text = re.sub(r"[^\d.]+", " ", TEXTS[folder].read_text().replace("*", ""))
    for row, printed in one.printed.items():
        for figure in re.findall(r"\d+\.\d+", printed):
            shorter = figure.rstrip("0").rstrip(".")
            assert figure in text or shorter in text, (row, figure)
