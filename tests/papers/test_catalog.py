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


SIZES = ("rafl.macs=", "rafl.knowledge-width=")  # which test_as_printed.py has made


def run_of(one: Entry) -> object:
    """What is run of an experiment: several tables have the same file and the same row, up to sizes of networks."""
    return one.experiment_file, tuple(text for text in own_method(one).overrides if not text.startswith(SIZES))


TRIED = {run_of(one): one for one in reversed(ALL)}
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


# How many tables and figures each paper has.
PRINTED = {
    "hypemefed": {"Table": 1, "Figure": 16},
    "inclusivefl": {"Table": 5, "Figure": 6},
    "model_search": {"Table": 3, "Figure": 15},
    "rafl": {"Table": 4, "Figure": 7},
    "recipfl": {"Table": 3, "Figure": 7},
}
NAMES = {
    "HypeMeFed": "hypemefed",
    "InclusiveFL": "inclusivefl",
    "Dynamic model search": "model_search",
    "RaFL": "rafl",
    "RecipFL": "recipfl",
}
PAGE = Path("docs/paper-experiments.md").read_text(encoding="utf-8")
NOWHERE = [tuple(row.split(" | ", 2)) for row in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE)][1:]
# "Figures 3 (b, c), 4 and 6 to 8"
LISTS = re.compile(r"(Table|Figure)s? ((?:\d+(?: \([a-h](?:, [a-h])*\))?(?:, | and | to )?)+)")


def named(text: str) -> set[tuple[str, int, str]]:
    """The tables and figures that a text names: kind, number, and the letter of a panel or nothing."""
    found = set()
    for kind, numbers in LISTS.findall(text):
        for first, last in re.findall(r"(\d+) to (\d+)", numbers):
            found |= {(kind, number, "") for number in range(int(first), int(last) + 1)}
        for number, panels in re.findall(r"(\d+)(?: \(([a-h](?:, [a-h])*)\))?", numbers):
            found |= {(kind, int(number), panel) for panel in (panels.split(", ") if panels else [""])}
    return found


def known(paper: str) -> set[tuple[str, int, str]]:
    """The tables and figures of a paper that are experiments, or that the page names with a reason."""
    texts = [one.what for one in ALL if one.name.startswith(f"{paper}/")]
    return named("; ".join([*texts, *(what for name, what, _ in NOWHERE if NAMES[name] == paper)]))


@pytest.mark.parametrize("paper", PRINTED)
def test_every_table_and_figure_is_an_experiment_or_has_a_reason(paper):
    numbers = {(kind, number) for kind, number, _ in known(paper)}
    assert numbers == {(kind, n) for kind, count in PRINTED[paper].items() for n in range(1, count + 1)}


def test_what_has_no_experiment_is_said_once_and_with_a_reason():
    assert {NAMES[name] for name, *_ in NOWHERE} == set(PRINTED)
    for name, what, why in NOWHERE:
        experiments = named("; ".join(one.what for one in ALL if one.name.startswith(f"{NAMES[name]}/")))
        assert not named(what) & experiments, what
        assert len(why) > 5


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


@pytest.mark.thorough
@pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers' texts lie beside the project's folder")
@pytest.mark.parametrize("paper", PRINTED)
def test_no_table_figure_or_panel_of_the_papers_text_is_left_out(paper):
    """Texts say "Fig. 3a", "Figure 5(a)", "Table [3,](#page-8)"."""
    mentioned = re.compile(r"\b(Table|Fig)(?:ure|\.)?s? ?\[?(\d+)(?: ?\(([a-h])\)|([a-h])\b)?")
    found = {
        (kind.replace("Fig", "Figure"), int(number), panel or letter)
        for kind, number, panel, letter in mentioned.findall(TEXTS[paper].read_text())
    }
    for kind in ("Table", "Figure"):
        assert max(number for one, number, _ in found if one == kind) == PRINTED[paper][kind]
    there = known(paper)
    whole = {(kind, number) for kind, number, panel in there if not panel}
    assert [one for one in sorted(found) if one[2] and one not in there and one[:2] not in whole] == []
