import json
from copy import copy

import pytest
from fake_runs import a_device, a_round, three_rounds
from page_figures import charts_of

from wildflower.server_app import label_spread as module
from wildflower.server_app.label_spread import FILE, Labels, class_names, read_labels, write_labels
from wildflower.server_app.report import write_report
from wildflower.server_app.run_folder import JournalError
from wildflower.tasks.task import TaskSpec, load_task

SPEC = {"name": "digits", "devices": 4, "seed": 1, "partition": "dirichlet", "alpha": 0.1}


def test_every_training_example_is_counted_once(tmp_path):
    task = load_task(TaskSpec(**SPEC))
    write_labels(tmp_path, task, "abcd".__getitem__)
    labels = read_labels(tmp_path)
    assert (labels.tiers, labels.devices) == (["a", "b", "c", "d"], 4)
    assert labels.classes == list("0123456789")
    assert sum(map(sum, labels.counts)) == len(task.train) == 1438
    numbers = task.train.labels[task.shard(2).train].tolist()
    assert labels.counts[2] == [numbers.count(digit) for digit in range(10)]


def test_of_very_many_devices_the_first_ones_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_DEVICES", 3)
    task = load_task(TaskSpec(**SPEC))
    write_labels(tmp_path, task, str)
    labels = read_labels(tmp_path)
    assert [sum(row) for row in labels.counts] == [len(task.shard(device).train) for device in range(3)]
    assert (labels.tiers, labels.devices) == (["0", "1", "2"], 4)


def test_of_many_devices_the_page_shows_some(tmp_path):
    three_rounds(tmp_path)
    labels = Labels(classes=["cat"], counts=[[number] for number in range(1, 251)], tiers=["pi"] * 250, devices=400)
    (tmp_path / FILE).write_text(labels.model_dump_json())
    page = write_report(tmp_path).read_text()
    shown = charts_of(page)["Labels of the training examples: class by device"]
    assert len(shown.traces[0]["x"]) == 200
    assert "The first 200 of 400 devices" in page
    assert "examples by device and class (The first 250 of 400 devices)" in page


def test_devices_that_no_round_has_asked_have_their_tiers_too(tmp_path):
    three_rounds(tmp_path).finish("finished")
    labels = Labels(classes=["cat"], counts=[[1]] * 90, tiers=["pi"] * 90, devices=90)
    (tmp_path / FILE).write_text(labels.model_dump_json())
    (trace,) = charts_of(write_report(tmp_path).read_text())["Labels of the training examples: class by device"].traces
    assert trace["text"][0][89] == "device 89 (pi): 1 of 1 examples are cat"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"classes": ["a"], "counts": [[1]], "devices": 1}',
        '{"classes": ["a"], "counts": [[1, 2]], "tiers": ["x"], "devices": 1}',
        '{"classes": ["a"], "counts": [[-1]], "tiers": ["x"], "devices": 1}',
        '{"classes": ["a"], "counts": [[1]], "tiers": ["x", "y"], "devices": 1}',
    ],
)
def test_another_file_is_told(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(JournalError, match=r"labels\.json"):
        read_labels(tmp_path)


def test_the_report_shows_them(tmp_path):
    journal = three_rounds(tmp_path)
    journal.write_round(a_round(4), [a_device(4, 0)])
    labels = Labels(classes=["<cat>", "dog"], counts=[[3, 0], [0, 5]], tiers=["small", "small"], devices=2)
    (tmp_path / FILE).write_text(json.dumps(labels.model_dump()))
    shown = charts_of(write_report(tmp_path).read_text())["Labels of the training examples: class by device"]
    (trace,) = shown.traces
    assert trace["z"] == [[0, None], [None, 1]]
    assert trace["text"][1][1] == "device 1 (small): 5 of 5 examples are dog"
    assert trace["y"][0] == "&lt;cat>"


def test_classes_of_one_name_are_called_by_their_numbers():
    task = copy(load_task(TaskSpec(**SPEC)))
    task.label_names = ("a",) * 10
    assert class_names(task) == list("0123456789")
