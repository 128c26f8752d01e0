"""The report's picture of how devices' models cut the network."""

import json

import pytest
from fake_runs import CONFIG, a_device, a_round
from page_figures import charts_of

from tests.small_run import simulated_grid, small_config
from wildflower.models.family import make_family
from wildflower.server_app.app import run
from wildflower.server_app.journal import Journal
from wildflower.server_app.model_map import FILE, MOST_MODELS, write_groups
from wildflower.server_app.report import write_report
from wildflower.server_app.run_folder import JournalError, read_devices

TITLE = "Models of round {}: channel group by model"


def map_of(run_dir, number):
    """The rows of the picture of a round, and for each row the texts of its cells."""
    page = (run_dir / "report.html").read_text()
    (trace,) = charts_of(page)[TITLE.format(number)].traces
    return trace["y"], trace["text"], trace["z"]


def written(run_dir, devices, groups):
    journal = Journal.open(run_dir, CONFIG, resume=False)
    (run_dir / FILE).write_text(json.dumps({"groups": groups}))
    for number, of_round in enumerate(devices, 1):
        journal.write_round(a_round(number), of_round)
    journal.finish("finished")
    return run_dir


def trained(round, device, widths, parameters, **changes):
    return a_device(round, device, architecture={"widths": widths}, parameters=parameters, **changes)


def test_a_cell_is_the_share_that_a_model_of_the_newest_round_has_of_a_group(tmp_path):
    first = [trained(1, 0, [4, 8], 1000)]
    second = [
        trained(2, 0, [4, 8], 1000, tier="large"),
        trained(2, 1, [1, 0], 10, tier="small"),
        trained(2, 2, [1, 0], 10, tier="tiny"),
        trained(2, 3, [2, 8], 500, outcome="failed: it died"),
    ]
    rows, texts, colors = map_of(written(tmp_path, [first, second], {"stem": 4, "inner": 8}), 2)
    assert rows == ["stem (4)", "inner (8)"]
    assert texts[0] == [
        "stem: 1 of 4 channels; 10 parameters, 2 devices of small, tiny",
        "stem: 4 of 4 channels; 1,000 parameters, 1 device of large",
    ]
    assert texts[1] == ["", "inner: 8 of 8 channels; 1,000 parameters, 1 device of large"]
    assert colors[1][0] is None
    assert colors[0][1] == colors[1][1] != colors[0][0]
    assert "A blank cell is a layer that is left out." in (tmp_path / "report.html").read_text()


def test_of_many_models_the_most_frequent_are_shown(tmp_path):
    devices = [trained(1, n, [n + 1], 100 + n) for n in range(30)] + [trained(1, 30, [30], 129)]
    _rows, [texts], _ = map_of(written(tmp_path, [devices], {"only": 30}), 1)
    assert len(texts) == MOST_MODELS
    assert texts[-1] == "only: 30 of 30 channels; 129 parameters, 2 devices of small"
    assert f"The {MOST_MODELS} most frequent of 30 models are shown." in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("groups", [{"a": 0}, {"a": "many"}, ["a"]])
def test_a_file_that_is_none_of_ours_is_named(groups, tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1), [trained(1, 0, [1], 10)])
    (tmp_path / FILE).write_text(json.dumps({"groups": groups}))
    with pytest.raises(JournalError, match=FILE):
        write_report(tmp_path)


def test_a_family_without_channel_groups_has_no_file(tmp_path):
    write_groups(tmp_path, make_family({"name": "darts"}))
    assert not (tmp_path / FILE).exists()


def test_a_run_has_the_picture(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1, evaluate_every=1))
    family = make_family({"name": "lenet5"})
    rows, texts, _ = map_of(run_dir, 1)
    assert [row.partition(" ")[0] for row in rows] == list(family.groups)
    widths = {tuple(record.architecture["widths"]) for record in read_devices(run_dir)}
    assert len(texts[0]) == len(widths)
