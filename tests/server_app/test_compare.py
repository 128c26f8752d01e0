from pathlib import Path

import pytest
from fake_runs import CONFIG, a_round

from server_app.compare import compare
from server_app.journal import Journal, JournalError


def a_run(run_dir: Path, accuracies: list[float | None], **config) -> Path:
    config = CONFIG | {"run-name": run_dir.name} | config
    journal = Journal.open(run_dir, config, resume=False)
    for number, accuracy in enumerate(accuracies, start=1):
        tiers = None if accuracy is None else {"small": accuracy / 2}
        journal.write_round(a_round(number, score=accuracy, score_by_tier=tiers), [])
    journal.finish("finished")
    return run_dir


def rows_of(comparison, title: str) -> list[dict[str, str]]:
    (table,) = [table for table in comparison.tables if table.title == title]
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def test_two_experiments_side_by_side(tmp_path):
    # A round takes 60 simulated seconds and 1,000 bytes down and 900 up.
    slow = a_run(tmp_path / "slow", [0.1, None, 0.4])
    fast = a_run(tmp_path / "fast", [0.5, 0.8, 0.7], strategy="fedrolex", alpha=0.3)
    comparison = compare([slow, fast])
    assert comparison.target == pytest.approx(0.4)
    accuracy = rows_of(comparison, "Accuracy")
    assert [row["run"] for row in accuracy] == ["slow", "fast"]
    assert [row["final accuracy"] for row in accuracy] == ["40 %", "70 %"]
    assert [row["best accuracy"] for row in accuracy] == ["40 %", "80 %"]
    cost = rows_of(comparison, "What it took")
    assert [row["rounds to reach 40 %"] for row in cost] == ["3", "1"]
    assert [row["simulated time"] for row in cost] == ["3 min", "1 min"]
    assert [row["bytes"] for row in cost] == ["5.7 kB", "1.9 kB"]
    assert [row["small"] for row in rows_of(comparison, "Final accuracy by tier")] == ["20 %", "35 %"]
    assert rows_of(comparison, "Settings that differ") == [
        {"key": "alpha", "slow": "", "fast": "0.3"},
        {"key": "strategy", "slow": "heterofl", "fast": "fedrolex"},
    ]


def test_seeds_of_one_experiment_are_one_row_with_mean_and_spread(tmp_path):
    finals = {1: 0.5, 2: 0.6, 3: 0.7}
    runs = [a_run(tmp_path / f"s{seed}", [0.1, final], seed=seed) for seed, final in finals.items()]
    comparison = compare(runs, target=0.55)
    (row,) = rows_of(comparison, "Accuracy")
    assert (row["run"], row["runs"]) == ("s1 (+2 seeds)", "3")
    # Standard deviation of a sample: sqrt((0.01 + 0 + 0.01) / 2) = 0.1
    assert row["final accuracy"] == "60 % ± 10 %"
    (cost,) = rows_of(comparison, "What it took")
    assert cost["rounds to reach 55 %"] == "2 ± 0 (2 of 3)"
    assert comparison.html.count("line c0 faint") == 3 * 5  # plots, the one of bandwidth being empty


def test_what_a_method_does_not_read_makes_no_other_experiment(tmp_path):
    plain = {"fedprox.mu": 0.01, "distillation.steps": 0, "distillation.batch-size": 64}
    one = a_run(tmp_path / "one", [0.4], **plain)
    two = a_run(tmp_path / "two", [0.5], **plain | {"fedprox.mu": 1.5, "distillation.batch-size": 8}, seed=8)
    (row,) = rows_of(compare([one, two]), "Accuracy")
    assert (row["run"], row["runs"]) == ("one (+1 seeds)", "2")
    three = a_run(tmp_path / "three", [0.5], **plain | {"distillation.steps": 1, "distillation.batch-size": 8})
    four = a_run(tmp_path / "four", [0.5], **plain | {"fedprox.mu": 1.5, "strategy": "fedprox"})
    assert rows_of(compare([two, three, four]), "Settings that differ") == [
        {"key": "distillation.batch-size", "two": "", "three": "8", "four": ""},
        {"key": "distillation.steps", "two": "", "three": "1", "four": ""},
        {"key": "fedprox.mu", "two": "", "three": "", "four": "1.5"},
        {"key": "strategy", "two": "heterofl", "three": "heterofl", "four": "fedprox"},
    ]


@pytest.mark.parametrize(("task", "experiments"), [("digits", 1), ("idx", 2), ("npz", 2)])
def test_runs_on_two_folders_are_two_experiments_where_the_folder_is_the_data_set(task, experiments, tmp_path):
    runs = [a_run(tmp_path / name, [0.4], **{"task": task, "data-dir": name}) for name in ("here", "there")]
    assert len(rows_of(compare(runs), "Accuracy")) == experiments


def test_exits_and_personal_accuracies_side_by_side(tmp_path):
    for name, exits, tiers in (("a", [0.2, 0.4], {"weak": 0.5}), ("b", None, {"weak": 0.7, "strong": 0.9})):
        journal = Journal.open(tmp_path / name, CONFIG | {"strategy": name}, resume=False)
        personal = {"personal_score": 0.6, "personal_score_by_tier": tiers, "personal_devices": 4}
        journal.write_round(a_round(1, score_by_exit=exits, personal_failed=1, **personal), [])
        journal.finish("finished")
    comparison = compare([tmp_path / "a", tmp_path / "b"])
    assert rows_of(comparison, "Final accuracy by exit") == [
        {"run": "a", "exit 1": "20 %", "exit 2": "40 %"},
        {"run": "b", "exit 1": "none", "exit 2": "none"},
    ]
    assert rows_of(comparison, "Personal accuracy, mean over the last fifth of the rounds") == [
        {"run": "a", "all devices": "60 %", "weak": "50 %", "strong": "none"},
        {"run": "b", "all devices": "60 %", "weak": "70 %", "strong": "90 %"},
    ]


def test_a_target_that_none_reached(tmp_path):
    (cost,) = rows_of(compare([a_run(tmp_path / "one", [0.2])], target=0.9), "What it took")
    assert cost["rounds to reach 90 %"] == "never"
    assert cost["bytes"] == "never"


def test_a_run_that_ends_in_nan_sets_no_target(tmp_path):
    runs = [a_run(tmp_path / "lost", [0.2, float("nan")]), a_run(tmp_path / "good", [0.4, 0.7], rounds=2)]
    comparison = compare(runs)
    assert comparison.target == 0.7
    assert [row["rounds to reach 70 %"] for row in rows_of(comparison, "What it took")] == ["never", "2"]


@pytest.mark.parametrize("target", [-0.1, 90])
def test_a_target_that_is_no_accuracy_is_refused(target, tmp_path):
    with pytest.raises(JournalError, match=f"a target of {target} is no accuracy, which is between 0 and 1"):
        compare([a_run(tmp_path / "run", [0.4])], target)


def test_runs_without_any_accuracy(tmp_path):
    comparison = compare([a_run(tmp_path / "one", [None]), a_run(tmp_path / "two", [], alpha=1.0)])
    assert comparison.target is None
    assert [row["final accuracy"] for row in rows_of(comparison, "Accuracy")] == ["none", "none"]


def test_the_page_escapes_names(tmp_path):
    comparison = compare([a_run(tmp_path / "<b>&", [0.2], note="<i>"), a_run(tmp_path / "two", [0.3], note="x")])
    assert "<b>&" not in comparison.html
    assert "&lt;b&gt;&amp;" in comparison.html
    assert "&lt;i&gt;" in comparison.html
    assert "<i>" not in comparison.html


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(JournalError, match="nothing"):
        compare([a_run(tmp_path / "one", [0.2]), tmp_path / "nothing"])
