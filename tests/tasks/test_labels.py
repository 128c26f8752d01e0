import json
from pathlib import Path
from typing import Any

import made_tasks
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.small_run import EXITS, simulated_grid, small_config
from wildflower.server_app.app import build, run
from wildflower.server_app.compare import compare
from wildflower.server_app.config import ConfigError
from wildflower.server_app.inputs import run_folder
from wildflower.server_app.no_progress import NoProgressError
from wildflower.server_app.run_folder import JournalError, read_devices, read_rounds, read_summary
from wildflower.strategies.heterofl import HeteroFL
from wildflower.tasks.data import Data, make_data_set
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.metrics import Accuracy
from wildflower.tasks.scoring import score
from wildflower.tasks.task import TASKS, Kind, Task, TaskSpec, load_task

CPU = torch.device("cpu")


def _config(folder: Path, **changes: Any) -> Any:
    settings = {"strategy": "fedavg", "task": "brightness", "rounds": 6, "evaluate_every": 2, "local_steps": 8}
    settings |= {
        "learning_rate": 0.05,
        "examples_per_device": 0,
        "test_fraction": 0.25,
        "personal__every": 6,
        "partition": "iid",
    }
    return small_config(folder, **settings | changes)


# What a data set and a task say of their labels -----------------------------------------------------------------------


def test_a_data_set_of_numbers_has_one_output() -> None:
    data = made_tasks.brightness("")
    assert (data.classes, data.train.label_kind) == (1, "numbers")


def test_classes_of_tokens_are_counted_without_those_that_have_no_label() -> None:
    images = torch.randint(0, 256, (4, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 2, NO_LABEL]] * 4)
    data = make_data_set(Data(images, labels), Data(images, labels))
    assert (data.classes, data.train.label_kind) == (3, "classes of tokens")


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (torch.tensor([0.5, float("nan")]), torch.tensor([0.5, 1.0]), "a label is no finite number"),
        (torch.tensor([[NO_LABEL]] * 2), torch.tensor([[NO_LABEL]] * 2), "no token has a label"),
        (torch.tensor([[-1]] * 2), torch.tensor([[1]] * 2), "labels count from 0, found -1"),
        (torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), "training labels are numbers, test labels classes"),
    ],
)
def test_labels_that_cannot_be_are_refused(train: Tensor, test: Tensor, message: str) -> None:
    images = torch.tensor([[[[0, 1]]], [[[2, 3]]]], dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        make_data_set(Data(images, train), Data(images, test))


@pytest.mark.parametrize("partition", ["iid", "natural"])
def test_numbers_are_dealt_out_without_their_classes(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    task = load_task(TaskSpec(name="brightness", devices=12, partition=partition))
    held = [task.shard(device).train for device in range(12)]
    assert sorted(torch.cat(held).tolist()) == list(range(480))
    if partition == "natural":
        assert all(len(set((shard % 12).tolist())) == 1 for shard in held)


@pytest.mark.parametrize("partition", ["dirichlet", "strong-and-weak"])
def test_a_partition_by_class_is_refused_with_the_reason(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    message = (
        f"partition '{partition}' deals .* the labels of the task 'brightness' are numbers: use 'iid' or 'natural'"
    )
    for examples in (None, 5) if partition == "dirichlet" else (None,):
        spec = TaskSpec(
            name="brightness", devices=4, partition=partition, strong_devices=1, examples_per_device=examples
        )
        with pytest.raises(ValueError, match=message):
            load_task(spec)


def test_devices_may_draw_examples_without_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    task = load_task(TaskSpec(name="brightness", devices=1000, examples_per_device=5))
    assert len(task.shard(999).train) == 5


def test_class_counts_are_of_all_classes_also_of_those_that_are_absent() -> None:
    task = load_task(TaskSpec(name="digits", devices=2))
    examples = torch.cat([(task.train.labels == label).nonzero().flatten()[: label + 1] for label in (0, 3, 7)])
    assert task.class_counts(examples).tolist() == [1, 0, 0, 4, 0, 0, 0, 8, 0, 0]


def test_there_are_no_class_counts_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    task = load_task(TaskSpec(name="brightness", devices=4))
    with pytest.raises(ValueError, match="'brightness' has numbers for labels, not one class per example"):
        task.class_counts(task.shard(0).train)


def test_a_metric_whose_name_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Accuracy):
        pass

    monkeypatch.setitem(TASKS, "brightness", Kind(made_tasks.brightness, "lenet5", metric=Other()))
    with pytest.raises(ValueError, match="the name 'accuracy' is that of another metric: give Other its own"):
        load_task(TaskSpec(name="brightness", devices=4))
    Other.name = "0-1 loss"
    with pytest.raises(ValueError, match="letters, digits and underscores, '0-1 loss' has others"):
        load_task(TaskSpec(name="brightness", devices=4))


# Tokens ---------------------------------------------------------------------------------------------------------------


class _Parity(nn.Module):
    """Per token, logits for even and odd; every seventh value is mistaken."""

    def forward(self, tokens: Tensor) -> Tensor:
        odd = (tokens % 2) ^ (tokens % 7 == 0)
        return torch.stack([1 - odd, odd], dim=1).float()


def test_a_task_of_tokens_is_scored_by_its_labeled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    task: Task = made_tasks.of_tokens(monkeypatch)
    assert task.label_kind == "classes of tokens"
    tokens, labels = task.test.inputs, task.test.labels
    labeled = labels != NO_LABEL
    right = labeled & (tokens % 7 != 0)
    per_example = torch.nn.functional.cross_entropy(_Parity()(tokens.long()), labels, reduction="none").sum(1)
    for batch_size in (7, 30):
        found = score(_Parity(), task, tokens, labels, batch_size=batch_size, device=CPU)
        assert found.sums == [int(right.sum()), int(labeled.sum())]
        assert found.loss_sum == pytest.approx(float((per_example / labeled.sum(1).clamp(min=1)).sum()))
        assert found.examples == 30
    assert 0 < task.metric.value(found.sums, 30) < 1


# A whole run of a regression ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_run_of_a_regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    folder = run(simulated_grid(), _config(tmp_path))
    rounds = read_rounds(folder)
    evaluated = [record for record in rounds if record.score is not None]
    assert {record.metric for record in rounds} == {"pearson"}
    assert evaluated[-1].score is not None
    assert evaluated[-1].score > 0.8
    assert all(record.loss is not None for record in evaluated)
    assert evaluated[-1].loss < evaluated[0].loss  # type: ignore[operator]
    assert set(evaluated[-1].score_by_tier or {}) == {"whole", "half", "quarter"}
    assert rounds[-1].personal_score is not None
    assert 0 < rounds[-1].personal_score <= 1
    assert (rounds[-1].personal_devices, rounds[-1].personal_failed) == (6, 0)
    summary = read_summary(folder)
    assert summary is not None
    assert (summary.metric, summary.final_score) == ("pearson", evaluated[-1].score)
    assert summary.best_score == max(record.score for record in evaluated)  # type: ignore[type-var]
    report = (folder / "report.html").read_text()
    assert "Delivered Pearson correlation" in report
    assert "Pearson correlation over rounds" in report
    assert f"{evaluated[-1].score:.4g}" in report
    assert "ccuracy" not in report.split("<h2>Configuration</h2>")[0]
    comparison = compare([folder])
    assert comparison.tables[0].title == "Pearson correlation, mean of the last fifth of the evaluations"
    assert comparison.tables[0].rows[0][4] == f"{evaluated[-1].score:.4g}"


@pytest.mark.thorough
def test_of_errors_the_lowest_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.absolute_regression(monkeypatch)
    folder = run(simulated_grid(), _config(tmp_path, run_name="error"))
    scores = [record.score for record in read_rounds(folder) if record.score is not None]
    summary = read_summary(folder)
    assert summary is not None
    assert summary.best_score == min(scores) < max(scores)
    assert (summary.metric, summary.higher_is_better) == ("mean_absolute_error", False)
    again = run(simulated_grid(), _config(tmp_path, run_name="shorter", rounds=2))
    comparison = compare([folder, again])
    finals = [s.delivered_score for s in (read_summary(folder), read_summary(again)) if s is not None]
    assert comparison.target == max(score for score in finals if score is not None)
    assert comparison.tables[2].rows[0][1] != "never"
    assert compare([folder], target=0.0).tables[2].rows[0][1] == "never"


@pytest.mark.thorough
def test_runs_of_different_metrics_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    first = run(simulated_grid(), _config(tmp_path, run_name="regression", rounds=1))
    second = run(simulated_grid(), _config(tmp_path, run_name="classes", task="digits", rounds=1))
    message = "cannot be compared: regression by Pearson correlation and classes by accuracy"
    with pytest.raises(JournalError, match=message):
        compare([first, second])


def test_what_a_model_says_of_numbers_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    task = load_task(TaskSpec(name="brightness", devices=4))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    said = model(task.prepare(task.test.inputs, augment=None)).detach()[:, 0].numpy()
    labels = task.test.labels.numpy()
    for batch_size in (7, 96):
        found = score(model, task, task.test.inputs, task.test.labels, batch_size=batch_size, device=CPU)
        assert task.metric.value(found.sums, 96) == pytest.approx(np.corrcoef(said, labels)[0, 1], rel=1e-5)
        assert found.loss_sum / 96 == pytest.approx(float(((said - labels) ** 2).mean()), rel=1e-5)


REFUSED = {
    "heterofl": {"strategy": "heterofl"},
    "federated-dropout": {"strategy": "federated-dropout"},
    "model-search": {
        "strategy": "model-search",
        "model-search.shares": "0.25, 0.5, 1",
        "model-search.masked-loss": True,
        "distillation.steps": 0,
    },
    "model-search that distills": {
        "strategy": "model-search",
        "model-search.shares": "0.25, 0.5, 1",
        "model-search.masked-loss": False,
    },
    "fjord": {"strategy": "fjord", "fjord.distillation": True},
    "depthfl": {"strategy": "depthfl"} | EXITS,
    "scalefl": {"strategy": "scalefl", "scalefl.gamma": 0.05} | EXITS,
}
ALLOWED = {
    "fedprox": {"strategy": "fedprox", "fedprox.mu": 0.1},
    "fedadam": {"strategy": "fedadam"},
    "local": {"strategy": "local"},
    "heterofl": {"strategy": "heterofl", "heterofl.masked-loss": False},
    "fjord": {"strategy": "fjord", "fjord.distillation": False},
    "scalefl": {"strategy": "scalefl", "scalefl.gamma": 0.0} | EXITS,
    "hypemefed": {"strategy": "hypemefed", "hypemefed.epochs": 1, "hypemefed.hidden": 8} | EXITS,
    "model-search": {
        "strategy": "model-search",
        "model-search.shares": "0.25, 0.5, 1",
        "model-search.masked-loss": False,
        "distillation.steps": 0,
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_need_classes_say_so_before_the_first_round(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_tasks.regression(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"it needs one class per example, and the labels of 'brightness' are numbers: .*'fedavg'$"
    ) as caught:
        build(_config(tmp_path, **REFUSED[name]))
    offered = f"{REFUSED[name]['strategy']}.masked-loss = false" in str(caught.value)
    assert offered is (name in ("heterofl", "model-search"))
    build(_config(tmp_path, **REFUSED[name] | {"task": "digits"}))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALLOWED)
def test_other_methods_train_on_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    settings = {"rounds": 2, "local_steps": 1, "evaluate_every": 1, "personal__every": 2} | ALLOWED[name]
    folder = run(simulated_grid(), _config(tmp_path, **settings))
    rounds = read_rounds(folder)
    assert all(record.score is not None and -1 <= record.score <= 1 for record in rounds)
    assert all(record.devices_replied == record.devices_sampled for record in rounds)
    line = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    assert line["metric"] == "pearson"


def test_a_device_says_that_it_has_no_classes_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_tasks.regression(monkeypatch)
    monkeypatch.setattr(HeteroFL, "needs_classes", False)
    config = _config(tmp_path, strategy="heterofl", rounds=1)
    with pytest.raises(NoProgressError, match="4 refused"):
        run(simulated_grid(), config)
    outcomes = {device.outcome for device in read_devices(run_folder(config))}
    assert outcomes == {"refused: the task 'brightness' has numbers for labels, not one class per example"}
