import json
from dataclasses import replace

import pytest

from benchmarks.method_table import KEYS, Study, figures, in_order, table, write


def study_in(folder, methods):
    """A study with an experiment file in `folder`/benchmarks/some; its runs lie in `folder`/runs."""
    experiment = folder / "benchmarks" / "some" / "table.toml"
    experiment.parent.mkdir(parents=True, exist_ok=True)
    experiment.write_text("rounds = 2\n")
    return Study(experiment, methods)


def finish_run(folder):
    """What a finished run leaves for a table."""
    folder.mkdir(parents=True)
    summary = dict.fromkeys(KEYS) | {"simulated_seconds": 1.0, "status": "finished"}
    (folder / "summary.json").write_text(json.dumps(summary))
    first = {"round": 1, "score": 0.5, "simulated_seconds": 1.0, "wall_seconds": 1.0, "server_seconds": {}}
    (folder / "rounds.jsonl").write_text(
        json.dumps(first | {"memory_utilisation": None, "bandwidth_utilisation": None}) + "\n"
    )
    (folder / "devices.jsonl").write_text("")


def test_what_results_json_has_is_kept_without_its_run_and_is_not_run_again(tmp_path):
    study = study_in(tmp_path, {"a": ["strategy=fedavg"], "b": ["strategy=heterofl"]})
    figure = {"final_score": 0.25, "settings": study.digest("a")}
    study.results.write_text(json.dumps({"results": {"a": {"1": figure}}}))
    finish_run(study.runs / "a-2")
    (study.runs / "a-2.settings").write_text(study.digest("a"))
    found = study.collect()
    assert list(found) == ["a"]
    assert found["a"]["1"] == figure
    assert found["a"]["2"]["curve"] == {1: 0.5}
    assert study.run_one("a", 1) == "a-1: was finished"
    assert not (study.runs / "a-1.log").exists()


def test_figures_of_earlier_versions_with_accuracies_are_read(tmp_path):
    """Recorded ones, and those of a finished run."""
    study = study_in(tmp_path, {"a": ["strategy=fedavg"]})
    figure = {"final_accuracy": 0.25, "accuracy_by_tier": {"small": 0.5}, "settings": study.digest("a")}
    study.results.write_text(json.dumps({"results": {"a": {"1": figure}}}))
    finish_run(study.runs / "a-2")
    for name, was, key in (("summary.json", "score", "final_score"), ("rounds.jsonl", "score", "score")):
        file = study.runs / "a-2" / name
        record = json.loads(file.read_text()) | {key: 0.75}
        record.pop("metric", None)
        file.write_text(json.dumps({k.replace(was, "accuracy"): value for k, value in record.items()}) + "\n")
        assert "accuracy" in file.read_text()
    (study.runs / "a-2.settings").write_text(study.digest("a"))
    found = study.collect()["a"]
    assert (found["1"]["final_score"], found["1"]["score_by_tier"]) == (0.25, {"small": 0.5})
    assert (found["2"]["final_score"], found["2"]["curve"], found["2"]["metric"]) == (0.75, {1: 0.75}, "accuracy")


def test_figures_of_other_settings_are_dropped(tmp_path):
    before = study_in(tmp_path, {"a": ["strategy=fedavg"], "b": ["strategy=heterofl"]})
    figures_of = {method: {"1": {"settings": before.digest(method)}} for method in before.methods}
    before.results.write_text(json.dumps({"results": figures_of}))
    after = study_in(tmp_path, {"a": ["strategy=fedavg"], "b": ["strategy=heterofl", "rounds=3"]})
    assert after.collect() == {"a": figures_of["a"]}


def test_a_run_of_other_settings_is_neither_counted_nor_gone_on_with(tmp_path):
    study = study_in(tmp_path, {"a": ["strategy=fedavg"]})
    finish_run(study.runs / "a-1")
    (study.runs / "a-1.settings").write_text("other")
    assert study.collect() == {}
    assert "move" in study.run_one("a", 1)
    assert not (study.runs / "a-1.log").exists()


def figure(curve, **values):
    """Figures of one run that is scored in the rounds of `curve`, an hour each."""
    return {
        "final_score": list(curve.values())[-1],
        "best_score": max(curve.values()),
        "score_by_tier": {"small": 0.5, "large": 0.25},
        "personal_score": None,
        "personal_score_by_tier": {},
        "bytes_down": 3e6,
        "bytes_up": 1e6,
        "curve": curve,
        "hours": {number: float(number) for number in curve},
        "memory_utilisation": 0.5,
        "bandwidth_utilisation": None,
        "assign_and_finish_share": 0.125,
        "server_seconds_per_round": {"guess": 0.0},
    } | values


def test_a_row_is_of_all_seeds_and_says_when_they_reached_the_target(tmp_path):
    study = replace(study_in(tmp_path, {}), target="low", part="guess", tiers=False)
    seconds = [{"server_seconds_per_round": {"guess": value}} for value in (0.5, 2.0)]
    results = {
        "low": {"1": figure({"5": 0.2, "10": 0.4})},
        "high": {"1": figure({"5": 0.4, "10": 0.5}, **seconds[0]), "2": figure({"5": 0.3, "10": 0.6}, **seconds[1])},
        "never": {"1": figure({"5": 0.2, "10": 0.3}), "2": figure({"5": 0.1, "10": 0.5})},
    }
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(study, results).splitlines()]
    assert lines[0] == [
        *("method", "seeds", "final accuracy", "best", "MB down", "MB up", "server's s per round: guess"),
        *("rounds to 40.0 %", "simulated hours to 40.0 %", "memory used", "link used", "server share"),
    ]
    assert lines[2] == ["low", "1", "40.00", "40.00", "3.0", "1.0", "", "10", "10.00", "50 %", "", "12 %"]
    # The mean of 0.5 and 0.6 is 0.55, their standard deviation 0.1 / sqrt(2); 40 % in rounds 5 and 10.
    spread = "55.00 ± 7.07"
    assert lines[3] == ["high", "2", spread, spread, "3.0", "1.0", "0.50 to 2.00", "8", "7.50", "50 %", "", "12 %"]
    assert lines[4][7:9] == ["never (1 of 2)", ""]


def test_columns_of_tiers_stand_in_their_order(tmp_path):
    lines = table(study_in(tmp_path, {}), {"a": {"1": figure({"1": 0.4})}}).splitlines()
    assert lines[0] == "| method | seeds | final accuracy | best | large | small | MB down | MB up |"
    assert lines[2] == "| a | 1 | 40.00 | 40.00 | 25.00 | 50.00 | 3.0 | 1.0 |"


def test_a_command_names_the_settings_the_seed_and_where_to_go_on(tmp_path):
    study = study_in(tmp_path, {"a": ["strategy=fedavg"]})
    command = study.command("a", 3, resume=True)
    assert command[1:4] == ["-m", "wildflower", "run"]
    assert command[5:] == [
        *("--set", "strategy=fedavg", "--set", "seed=3", "--set", "run-name=a-3"),
        *("--set", f"output-dir={study.runs}", "--set", "resume=true"),
    ]
    assert "resume=true" not in study.command("a", 3, resume=False)


def test_a_run_without_figures_is_named(tmp_path):
    study = study_in(tmp_path, {"a": ["strategy=fedavg"]})
    (study.experiment.parent / "README.md").write_text(f"<!-- {study.name} -->\n<!-- end of {study.name} -->\n")
    finish_run(study.runs / "a-1")
    assert write(study, [("a", 1)]) == ["a-1"]  # nobody knows its settings
    assert "move" in study.run_one("a", 1)


def test_a_digest_is_of_what_files_say_and_not_of_their_comments_or_places(tmp_path):
    digests = []
    for place, text in (("one", "x = 1"), ("two", "x = 1  # why"), ("three", "x = 2")):
        study = study_in(tmp_path / place, {"a": [f"fleet={tmp_path / place / 'fleet.toml'}"]})
        (tmp_path / place / "fleet.toml").write_text(text)
        digests.append(study.digest("a"))
    assert digests[0] == digests[1] != digests[2]


def test_the_servers_share_of_a_round_is_without_its_evaluation(tmp_path):
    summary = dict.fromkeys(KEYS) | {"simulated_seconds": 7200.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    known = {"score": None, "simulated_seconds": 0.0, "memory_utilisation": None, "bandwidth_utilisation": None}
    rounds = [
        known | {"round": 1, "wall_seconds": 100.0, "server_seconds": {"finish": 90.0}},  # starts the workers: left out
        known | {"round": 2, "wall_seconds": 10.0, "server_seconds": {"assign": 1.0, "finish": 1.0, "payload": 3.0}},
        known | {"round": 3, "wall_seconds": 30.0, "server_seconds": {"assign": 4.0, "evaluate": 20.0}},
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    trained = {"outcome": "trained", "training_flops": 10**6, "predicted_memory_bytes": 10, "simulated_seconds": 2.0}
    earlier = {"outcome": "trained", "predicted_memory_bytes": 30, "simulated_seconds": 4.0}  # versions without FLOPs
    late = {"outcome": "late", "training_flops": 10**9, "predicted_memory_bytes": 10**9, "simulated_seconds": 99.0}
    devices = [trained, trained | {"training_flops": 3 * 10**6}, earlier, late]
    (tmp_path / "devices.jsonl").write_text("".join(json.dumps(d) + "\n" for d in devices))
    found = figures(tmp_path)
    assert found["device_flops_per_example"] == 2 * 10**6
    assert found["device_memory_bytes"] == pytest.approx(50 / 3)
    assert found["device_seconds"] == pytest.approx(8 / 3)
    assert found["assign_and_finish_share"] == pytest.approx((2 / 10 + 4 / 10) / 2)
    assert found["simulated_hours"] == 2


def test_tiers_are_in_order_of_width_then_of_name_with_numbers_as_numbers():
    names = ["width-1/8", "exit 10", "exit 2", "width-1", "width-1/2", "big"]
    assert sorted(names, key=in_order) == ["width-1", "width-1/2", "width-1/8", "big", "exit 2", "exit 10"]
