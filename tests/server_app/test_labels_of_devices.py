import json
from copy import copy

import pytest
from fake_runs import a_device, a_round, three_rounds
from page_figures import charts_of

from server_app.journal import JournalError
from server_app.labels import FILE, Labels, class_names, read_labels, write_labels
from server_app.report import write_report
from tasks.task import TaskSpec, load_task

SPEC = {"name": "digits", "devices": 4, "seed": 1, "partition": "dirichlet", "alpha": 0.1}


def test_every_training_example_is_counted_once(tmp_path):
    task = load_task(TaskSpec(**SPEC))
    write_labels(tmp_path, task)
    labels = read_labels(tmp_path)
    assert labels.classes == list("0123456789")
    assert sum(map(sum, labels.counts)) == len(task.train) == 1438
    numbers = task.train.labels[task.shard(2).train].tolist()
    assert labels.counts[2] == [numbers.count(digit) for digit in range(10)]


def test_a_picture_that_nobody_could_read_is_not_made(tmp_path):
    write_labels(tmp_path, load_task(TaskSpec(**SPEC | {"devices": 201, "partition": "iid"})))
    assert read_labels(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["{", '{"classes": ["a"], "counts": [[1, 2]]}', '{"classes": ["a"], "counts": [[-1]]}']
)
def test_another_file_is_told(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(JournalError, match=r"labels\.json"):
        read_labels(tmp_path)


def test_the_report_shows_them(tmp_path):
    journal = three_rounds(tmp_path)
    journal.write_round(a_round(4), [a_device(4, 0)])
    labels = Labels(classes=["<cat>", "dog"], counts=[[3, 0], [0, 5]])
    (tmp_path / FILE).write_text(json.dumps(labels.model_dump()))
    shown = charts_of(write_report(tmp_path).read_text())["Labels of the training examples: class by device"]
    (trace,) = shown.traces
    assert trace["z"] == [[0, None], [None, 1]]
    assert trace["text"][1][1] == "device 1 (small): 5 of 5 examples are dog"
    assert trace["y"][0] == "&lt;cat>"
    assert (tmp_path / "labels.csv").read_text() == "device,<cat>,dog\n0,3,0\n1,0,5\n"


def test_classes_of_one_name_are_called_by_their_numbers():
    task = copy(load_task(TaskSpec(**SPEC)))
    task.label_names = ("a",) * 10
    assert class_names(task) == list("0123456789")
