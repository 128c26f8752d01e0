import csv
import io
import json
import re
from pathlib import Path

import pytest
from fake_runs import CONFIG, a_round
from page_figures import charts_of

from tests.small_run import simulated_grid, small_config
from wildflower.server_app.app import run
from wildflower.server_app.compare import compare
from wildflower.server_app.journal import Journal
from wildflower.server_app.run_folder import JournalError, read_config, read_devices


def a_run(run_dir: Path, scores: list[float | None], *, finished: bool = True, **config) -> Path:
    """A run that delivers these scores; the whole model has half of them, the worst tier a quarter."""
    of_rounds = ("devices_without_model", "devices_beyond_budget", "scoring_bytes_down", "statistics_bytes_down")
    more = {key: config.pop(key) for key in of_rounds if key in config}
    held = {key: config.pop(key) for key in ("plugins", "initial", "data", "budgets") if key in config}
    config = CONFIG | {"run-name": run_dir.name} | config
    journal = Journal.open(run_dir, config, resume=False, **held)
    for number, score in enumerate(scores, start=1):
        given = {"score": None, "score_by_tier": None, "delivered_score": None, "delivered_score_by_tier": None}
        if score is not None:
            tiers = {"large": score, "small": score / 4}
            given = {"score": score / 2, "delivered_score": score, "delivered_score_by_tier": tiers}
        journal.write_round(a_round(number, **given | more), [])
    if finished:
        journal.finish("finished")
    return run_dir


def rows_of(comparison, title: str) -> list[dict[str, str]]:
    (table,) = [table for table in comparison.tables if table.title.partition(" (")[0] == title]
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


ACCURACY = "Accuracy, mean of the last fifth of the evaluations"


def test_methods_side_by_side_with_what_they_deliver_first(tmp_path):
    # A round takes 60 simulated seconds and 1,000 bytes down and 900 up.
    slow = a_run(tmp_path / "slow", [0.1, None, 0.4])
    fast = a_run(tmp_path / "fast", [0.5, 0.8, 0.7], strategy="fedrolex")
    comparison = compare([slow, fast])
    assert comparison.target == pytest.approx(0.4)
    assert comparison.tables[0].title == ACCURACY
    assert rows_of(comparison, ACCURACY) == [
        {
            "method": "fedrolex",
            "seeds": "7",
            "delivered, %": "70.0",
            "worst tier, %": "17.5",
            "whole model, %": "35.0",
        },
        {
            "method": "heterofl",
            "seeds": "7",
            "delivered, %": "40.0",
            "worst tier, %": "10.0",
            "whole model, %": "20.0",
        },
    ]
    last = rows_of(comparison, "Accuracy of the last evaluation")
    assert [row["its best, %"] for row in last] == ["40.0", "20.0"]
    cost = rows_of(comparison, "What it took")
    assert [row["rounds to 40 %"] for row in cost] == ["1", "3"]
    assert [row["simulated time"] for row in cost] == ["1 min", "3 min"]
    assert [row["training bytes"] for row in cost] == ["1.9 kB", "5.7 kB"]
    in_all = [(row["down in all"], row["up in all"], row["statistics in all"], row["scoring in all"]) for row in cost]
    assert in_all == [("3 kB", "2.7 kB", "960 B", "15 kB")] * 2
    assert [row["small"] for row in rows_of(comparison, "Accuracy by tier, %")] == ["17.5", "10.0"]


def test_the_figure_is_the_mean_of_the_last_fifth_and_the_last_stands_beside(tmp_path):
    """Of ten evaluations the last two count: (0.6 + 0.2) / 2 = 0.4."""
    comparison = compare([a_run(tmp_path / "one", [0.1] * 8 + [0.6, 0.2])])
    assert rows_of(comparison, ACCURACY)[0]["delivered, %"] == "40.0"
    assert rows_of(comparison, "Accuracy of the last evaluation")[0]["delivered, %"] == "20.0"


def test_seeds_of_one_experiment_are_one_row_with_mean_and_spread(tmp_path):
    finals = {1: 0.5, 2: 0.6, 3: 0.7}
    runs = [a_run(tmp_path / f"s{seed}", [0.1, final], seed=seed) for seed, final in finals.items()]
    comparison = compare(runs, target=0.55)
    (row,) = rows_of(comparison, ACCURACY)
    # Standard deviation of a sample: sqrt((0.01 + 0 + 0.01) / 2) = 0.1
    assert (row["method"], row["seeds"], row["delivered, %"]) == ("heterofl", "1-3", "60.0 ± 10.0")
    (cost,) = rows_of(comparison, "What it took")
    assert cost["rounds to 55 %"] == "2 (2 of 3)"
    assert comparison.advice == []  # there is nothing to choose
    charts = charts_of(comparison.html)
    seeds, mean = charts["Delivered accuracy"].traces
    assert seeds["x"] == [0.5, 0.6, 0.7]
    # 4.303 x 0.1 / sqrt(3)
    assert mean["error_x"]["array"] == [pytest.approx(0.2484, abs=1e-4)]
    band, line = charts["Delivered accuracy over rounds"].traces
    assert line["y"] == [pytest.approx(0.1), pytest.approx(0.6)]
    assert band["y"] == [pytest.approx(y, abs=1e-4) for y in (0.1, 0.3516, 0.8484, 0.1)]
    assert "Memory budget used" not in charts  # it never changes


def test_what_is_not_finished_or_there_twice_is_left_out_and_said(tmp_path):
    runs = [
        a_run(tmp_path / "one", [0.2, 0.4], seed=1),
        a_run(tmp_path / "again", [0.8, 0.8], seed=1),
        a_run(tmp_path / "stopped", [0.9], seed=2, finished=False),
    ]
    comparison = compare(runs)
    (row,) = rows_of(comparison, ACCURACY)
    assert (row["seeds"], row["delivered, %"]) == ("1", "40.0")
    assert rows_of(comparison, "Left out") == [
        {"run": "again", "why": "of the same settings and seed as one"},
        {"run": "stopped", "why": "unfinished after 1 rounds"},
    ]
    with pytest.raises(JournalError, match="none of the runs is finished: stopped is unfinished after 1 rounds"):
        compare([tmp_path / "stopped"])


def test_a_finished_run_that_lost_rounds_is_left_out(tmp_path):
    whole, cut = a_run(tmp_path / "whole", [0.2, 0.4], seed=1), a_run(tmp_path / "cut", [0.6, 0.8], seed=2)
    journal = tmp_path / "cut" / "rounds.jsonl"
    journal.write_text(journal.read_text().splitlines(keepends=True)[0])
    comparison = compare([whole, cut])
    assert rows_of(comparison, "Left out") == [{"run": "cut", "why": "short of rounds: rounds.jsonl has 1 of 2"}]
    journal.write_text("")
    with pytest.raises(JournalError, match=r"finished: cut is short of rounds: rounds\.jsonl has 0 of 2"):
        compare([cut])


def test_rows_are_called_after_the_method_and_what_differs_in_it(tmp_path):
    fedavg = {"strategy": "fedavg"}
    runs = [
        a_run(tmp_path / "a", [0.4], **fedavg, **{"fedavg.use": "all-small", "batch-size": 8}),
        a_run(tmp_path / "b", [0.3], **fedavg, **{"fedavg.use": "all-large", "batch-size": 8}),
        a_run(tmp_path / "c", [0.2], **{"batch-size": 16}),
    ]
    comparison = compare(runs)
    names = ["fedavg use=all-small", "fedavg use=all-large", "heterofl"]
    assert [row["method"] for row in rows_of(comparison, ACCURACY)] == names
    assert [row["settings"] for row in rows_of(comparison, "Settings that differ")] == [
        "batch-size = 8, fedavg.use = all-small",
        "batch-size = 8, fedavg.use = all-large",
        "batch-size = 16",
    ]


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ({"plugins": {"anchor": "0" * 64}}, {"plugins": {"anchor": "1" * 64}}, "module anchor-sha256"),
        ({"plugins": {"data": "0" * 64}}, {"plugins": {"data": "1" * 64}}, "module data-sha256"),
        ({"plugins": {"fleet": "0" * 64}}, {"plugins": {"fleet": "1" * 64}}, "module fleet-sha256"),
        ({"initial": "0" * 64}, {"initial": "1" * 64}, "initial-weights-sha256"),
        ({"data": {"sha256": "0" * 64}}, {"data": {"sha256": "1" * 64}}, "data-sha256"),
    ],
)
def test_runs_of_another_version_of_a_method_or_of_files_are_no_replicates(before, after, name, tmp_path):
    runs = [a_run(tmp_path / str(seed), [0.5], seed=seed, **(before if seed < 3 else after)) for seed in (1, 2, 3)]
    found = {row["method"]: row["seeds"] for row in rows_of(compare(runs), ACCURACY)}
    assert found == {f"heterofl {name}={'0' * 12}": "1-2", f"heterofl {name}={'1' * 12}": "3"}


def test_what_a_method_does_not_read_makes_no_other_experiment(tmp_path):
    plain = {"fedprox.mu": 0.01, "distillation.steps": 0, "distillation.batch-size": 64}
    one = a_run(tmp_path / "one", [0.4], **plain)
    two = a_run(tmp_path / "two", [0.5], **plain | {"fedprox.mu": 1.5, "distillation.batch-size": 8}, seed=8)
    (row,) = rows_of(compare([one, two]), ACCURACY)
    assert (row["method"], row["seeds"]) == ("heterofl", "7-8")
    three = a_run(tmp_path / "three", [0.3], **plain | {"distillation.steps": 1, "distillation.batch-size": 8})
    four = a_run(tmp_path / "four", [0.2], **plain | {"fedprox.mu": 1.5, "strategy": "fedprox"})
    assert rows_of(compare([two, three, four]), "Settings that differ") == [
        {"method": "heterofl", "settings": ""},
        {
            "method": "heterofl distillation.batch-size=8 distillation.steps=1",
            "settings": "distillation.batch-size = 8, distillation.steps = 1",
        },
        {"method": "fedprox", "settings": "fedprox.mu = 1.5"},
    ]


def test_keys_that_another_key_rules_out_name_no_row_and_are_no_difference(tmp_path):
    sgd = [a_run(tmp_path / f"sgd{m}", [m], optimizer="sgd", momentum=m) for m in (0.5, 0.9)]
    adam = a_run(tmp_path / "adam", [0.1], optimizer="adam", momentum=0.9)
    names = ["heterofl momentum=0.9 optimizer=sgd", "heterofl momentum=0.5 optimizer=sgd", "heterofl optimizer=adam"]
    assert [row["method"] for row in rows_of(compare([*sgd, adam]), ACCURACY)] == names
    names = ["heterofl optimizer=sgd", "heterofl optimizer=adam"]
    assert [row["method"] for row in rows_of(compare([sgd[0], adam]), ACCURACY)] == names
    iid = a_run(tmp_path / "iid", [0.4], partition="iid", alpha=0.1)
    skewed = a_run(tmp_path / "skewed", [0.4], partition="dirichlet", alpha=0.1)
    [told] = compare([iid, skewed]).advice
    assert told.startswith('The runs differ in partition ("iid", "dirichlet"), so that none of the methods is')


def test_a_key_of_a_method_keeps_its_name_where_the_run_has_one_that_is_called_alike(tmp_path):
    keys = {"strategy": "wildflower", "momentum": 0.9}
    runs = [a_run(tmp_path / str(m), [m], **keys, **{"wildflower.momentum": m}) for m in (0.5, 0.1)]
    names = ["wildflower wildflower.momentum=0.5", "wildflower wildflower.momentum=0.1"]
    assert [row["method"] for row in rows_of(compare(runs), ACCURACY)] == names
    adam = a_run(tmp_path / "adam", [0.05], **keys, **{"wildflower.momentum": 0.1, "optimizer": "adam"})
    names[1:] = [
        "wildflower optimizer=sgd wildflower.momentum=0.1",
        "wildflower optimizer=adam wildflower.momentum=0.1",
    ]
    names[0] = "wildflower optimizer=sgd wildflower.momentum=0.5"
    runs = [
        a_run(tmp_path / f"sgd{m}", [m], **keys, **{"wildflower.momentum": m, "optimizer": "sgd"}) for m in (0.5, 0.1)
    ]
    assert [row["method"] for row in rows_of(compare([*runs, adam]), ACCURACY)] == names


# Which method to take ---------------------------------------------------------------------------------------------


def seeds_of(folder: Path, strategy: str, finals: list[float], first: int = 1, **more) -> list[Path]:
    return [
        a_run(folder / f"{strategy}{seed}", [final], strategy=strategy, seed=seed, **more)
        for seed, final in enumerate(finals, start=first)
    ]


def test_a_method_that_is_ahead_with_every_seed_is_surely_better(tmp_path):
    """Gaps 0.10, 0.11, 0.12: mean 0.11, deviation 0.01; 4.303 x 0.01 / sqrt(3) = 0.0248."""
    better = seeds_of(tmp_path, "heterofl", [0.7, 0.81, 0.62])
    comparison = compare([*seeds_of(tmp_path, "fedrolex", [0.6, 0.7, 0.5]), *better])
    assert comparison.advice == [
        "Take heterofl: over all devices of this fleet it delivers 71 %.",
        "That it is better than fedrolex is sure: by 11.0 points on average, and better with 3 of 3 seeds (95 % "
        "interval 8.5 points to 13.5 points).",
    ]
    assert "Take heterofl" in comparison.html


def test_a_method_that_is_ahead_by_chance_is_not(tmp_path):
    """Gaps 0.1, -0.05: mean 0.025, and two seeds tell nearly nothing."""
    better = seeds_of(tmp_path, "heterofl", [0.7, 0.55])
    told = compare([*better, *seeds_of(tmp_path, "fedrolex", [0.6, 0.6])]).advice
    assert told[1].startswith("That it is better than fedrolex is not sure, and more seeds would tell: by 2.5 points")
    assert "better with 1 of 2 seeds" in told[1]


def test_settings_beside_the_method_are_told(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7, 0.8]) + seeds_of(
        tmp_path, "fedprox", [0.6, 0.6], **{"learning-rate": 0.5, "fedprox.mu": 3.0}
    )
    assert compare(runs).advice[-1] == (
        "The two differ in learning-rate as well, so that the methods alone need not be the reason."
    )
    runs = seeds_of(tmp_path / "a", "heterofl", [0.7], **{"distillation.steps": 1}) + seeds_of(
        tmp_path / "b", "fedrolex", [0.6], **{"distillation.steps": 5}
    )
    assert "The two differ in distillation.steps as well" in compare(runs).advice[-1]


def test_settings_of_one_method_are_what_is_compared(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7, 0.8])
    more = seeds_of(tmp_path / "more", "heterofl", [0.5, 0.5], **{"learning-rate": 0.2})
    assert "differ" not in " ".join(compare([*runs, *more]).advice)


def test_printed_it_has_its_tables(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7, 0.8]) + seeds_of(tmp_path, "fedrolex", [0.6, 0.6])
    lines = str(compare(runs)).splitlines()
    assert lines[0].startswith("Take heterofl")
    at = lines.index("Accuracy, mean of the last fifth of the evaluations")
    assert lines[at + 1 : at + 4] == [
        "method    seeds  delivered, %  worst tier, %  whole model, %",
        "heterofl  1-2      75.0 ± 7.1     18.8 ± 1.8      37.5 ± 3.5",
        "fedrolex  1-2      60.0 ± 0.0     15.0 ± 0.0      30.0 ± 0.0",
    ]


def test_every_other_method_that_may_be_as_good_is_named(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7, 0.7, 0.7]) + seeds_of(tmp_path, "fedrolex", [0.6, 0.61, 0.6])
    runs += seeds_of(tmp_path, "fjord", [0.1, 0.7, 0.7]) + seeds_of(tmp_path, "depthfl", [0.1, 0.11, 0.1])
    told = compare(runs).advice
    assert told[1].startswith("That it is better than fedrolex is sure")
    assert told[2:] == ["Nor is it sure that it is better than fjord."]


def test_with_one_seed_in_common_it_is_a_guess(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7]) + seeds_of(tmp_path, "fedrolex", [0.6])
    assert "is a guess: they have one seed in common" in compare(runs).advice[1]


def test_without_seeds_in_common_nothing_is_recommended(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7, 0.7]) + seeds_of(tmp_path, "fedrolex", [0.6], first=5)
    assert compare(runs).advice == [
        "The runs have no seed in common (heterofl has 1-2; fedrolex has 5), so that none of the methods is "
        "recommended."
    ]


def test_only_seeds_in_common_count(tmp_path):
    """Over all its seeds heterofl delivers 60 %, with those of fedrolex 50 %: the seeds that it has alone are easy."""
    runs = seeds_of(tmp_path, "heterofl", [0.5, 0.5, 0.8]) + seeds_of(tmp_path, "fedrolex", [0.55, 0.56])
    told = compare(runs).advice
    assert told[0] == "Take fedrolex: over all devices of this fleet it delivers 55.5 %."
    assert "better with 2 of 2 seeds" in told[1]
    assert told[-1] == "Only the seeds that all of them have are counted: 1-2."


# Unequal conditions -----------------------------------------------------------------------------------------------


def differ(what: str) -> str:
    """What is said of runs that differ in a condition."""
    why = "so that none of the methods is recommended: compare runs that have this in common."
    return f"The runs differ in {what}, {why}"


def with_budgets(folder: Path, strategy: str, **budgets: tuple[int, int | None]) -> list[Path]:
    told = {tier: dict(zip(("memory_bytes", "payload_bytes"), of, strict=True)) for tier, of in budgets.items()}
    return seeds_of(folder, strategy, [0.5, 0.6], fleet="five.toml", budgets=told)


def test_methods_that_had_unequal_memory_under_one_fleet_are_not_recommended(tmp_path):
    runs = with_budgets(tmp_path, "heterofl", full=(2_847_896, 377_640), half=(1_544_984, 96_680))
    runs += with_budgets(tmp_path, "wildflower", full=(7_346_920, 377_640), half=(4_415_392, 96_680))
    comparison = compare(runs)
    assert comparison.advice == [
        "The fleet five.toml gives devices of half 1.54 MB (1,544,984 bytes) of training memory under heterofl and "
        "4.42 MB (4,415,392 bytes) under wildflower, so that none of the methods is recommended: its fits_width means "
        "what each method needs for a width. Give its groups training_memory, and where it should bind payload, in "
        "bytes (docs/fleets.md), and run the methods again."
    ]
    assert len(rows_of(comparison, ACCURACY)) == 2


def test_runs_keep_what_a_fleet_of_widths_gives_their_methods(tmp_path):
    """The fleet of small runs says fits_width: FjORD's devices get what several widths in one step take."""
    runs = []
    for strategy in ("heterofl", "fjord"):
        changes = {"run_name": strategy, "strategy": strategy, "rounds": 1, "family": "cnn3", "evaluate_every": 1}
        runs.append(run(simulated_grid(), small_config(tmp_path, **changes)))
    first, second = (read_config(run_dir).budgets for run_dir in runs)
    assert first.keys() == second.keys() == {"whole", "half", "quarter"}
    assert first["whole"].payload_bytes == second["whole"].payload_bytes > 0
    assert second["whole"].memory_bytes > 1.5 * first["whole"].memory_bytes
    line = next(line for line in read_devices(runs[1]) if line.tier == "whole")
    assert line.budget.memory_bytes == second["whole"].memory_bytes
    [told] = compare(runs).advice
    figures = (f"{of['whole'].memory_bytes:,} bytes" for of in (first, second))
    assert re.search(".* of whole .*{}.* under heterofl and .*{}.* under fjord, so that none".format(*figures), told)


def test_methods_that_had_unequal_payload_are_not_recommended(tmp_path):
    runs = with_budgets(tmp_path, "heterofl", full=(3_000_000, 377_640))
    runs += with_budgets(tmp_path, "scaffold", full=(3_000_000, 757_072))
    [told] = compare(runs).advice
    assert "of full 378 kB (377,640 bytes) of payload under heterofl and 757 kB (757,072 bytes) under scaffold" in told


def test_methods_that_had_the_same_are_recommended(tmp_path):
    same = {"full": (3_000_000, None), "half": (2_000_000, 100_000)}
    runs = [run for strategy in ("heterofl", "wildflower") for run in with_budgets(tmp_path, strategy, **same)]
    assert compare(runs).advice[0].startswith("Take ")


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("task-arguments", "", "size = [8, 8]"),
        ("partition", "iid", "natural"),
        ("test-fraction", 0.0, 0.5),
        ("examples-per-device", 0, 200),
        ("devices", 20, 10),
        ("devices-per-round", 10, 5),
        ("aggregation.over-selection", 0.0, 0.3),
        ("buffer", 0, 5),
        ("budget.memory-fraction", 0.85, 0.5),
        ("budget.transfer-seconds", 0.0, 2.0),
        ("deadline-seconds", 0.0, 60.0),
        ("budget.round-seconds", 0.0, 60.0),
        ("rounds", 1, 100),
        ("dp.epsilon", 0.0, 8.0),
        ("dp.noise-multiplier", 0.0, 1.0),
        ("secure-aggregation.minimum", 0, 5),
        ("evaluate-every", 1, 50),
        ("deliver", "largest", "best"),
        ("statistics.devices", 0, 3),
        ("statistics.examples", 64, 0),
    ],
)
@pytest.mark.parametrize("second", ["heterofl", "fedrolex"])
def test_of_unequal_conditions_none_is_recommended(key, one, other, second, tmp_path):
    runs = seeds_of(tmp_path / "one", "heterofl", [0.7, 0.7], **{key: one})
    runs += seeds_of(tmp_path / "other", second, [0.6, 0.6], **{key: other})
    assert compare(runs).advice == [differ(f"{key} ({json.dumps(one)}, {json.dumps(other)})")]


def test_of_other_fleets_none_is_recommended(tmp_path):
    """The fleet files of such runs differ by their hash, whatever they are called."""
    [one] = seeds_of(tmp_path, "heterofl", [0.7], fleet="demo")
    [other] = seeds_of(tmp_path, "fedrolex", [0.6], fleet="demo")
    of_another = json.loads((other / "config.json").read_text()) | {"fleet-sha256": "1" * 64}
    (other / "config.json").write_text(json.dumps(of_another))
    assert compare([one, other]).advice == [differ("what the fleet's files hold")]
    of_another["config"]["fleet"] = "boards.toml"
    (other / "config.json").write_text(json.dumps(of_another))
    assert compare([one, other]).advice == [differ('fleet ("demo", "boards.toml")')]


def test_values_that_look_alike_where_they_are_cut_are_not_shown(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7, 0.7], **{"task-arguments": f"tokenizer = '{'m' * 90}', max_tokens = 8"})
    runs += seeds_of(tmp_path, "fedrolex", [0.6, 0.6], **{"task-arguments": f"tokenizer = '{'m' * 90}'"})
    assert compare(runs).advice == [differ("task-arguments")]


@pytest.mark.parametrize("other", [{"data": {"sha256": "1" * 64}}, {}])
def test_of_other_data_none_is_recommended(other, tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7, 0.7], data={"sha256": "0" * 64})
    runs += seeds_of(tmp_path, "fedrolex", [0.6, 0.6], **other)
    assert compare(runs).advice == [differ("the data themselves")]


def test_of_another_version_of_a_task_of_ones_own_none_is_recommended(tmp_path):
    runs = []
    for strategy, digit in (("heterofl", "0"), ("fedrolex", "1")):
        plugins = {"mine": digit * 64, "another": "2" * 64}
        runs += seeds_of(tmp_path, strategy, [0.7, 0.7], task="mine.data:Birds", plugins=plugins)
    assert compare(runs).advice == [differ("the code of the module mine")]


def test_of_other_kinds_of_real_devices_none_is_recommended(tmp_path):
    runs = []
    for strategy, tiers in (("heterofl", {"jetson": 0.9}), ("fedrolex", {"jetson": 0.8, "pi": 0.6})):
        journal = Journal.open(tmp_path / strategy, CONFIG | {"strategy": strategy, "fleet": ""}, resume=False)
        journal.write_round(a_round(1, delivered_score_by_tier=tiers), [])
        journal.finish("finished")
        runs.append(tmp_path / strategy)
    assert compare(runs).advice == [differ("the kinds of devices")]


def test_how_often_one_evaluates_is_no_part_of_the_bytes_to_a_target(tmp_path):
    seldom = a_run(tmp_path / "seldom", [None, 0.6], statistics_bytes_down=0, scoring_bytes_down=0)
    often = a_run(tmp_path / "often", [0.1, 0.6], strategy="fedrolex", scoring_bytes_down=10**9)
    comparison = compare([seldom, often])
    assert [row["training bytes"] for row in rows_of(comparison, "What it took")] == ["3.8 kB", "3.8 kB"]
    (chart,) = [chart for title, chart in charts_of(comparison.html).items() if title.endswith("over traffic")]
    assert {trace["x"][-1] for trace in chart.traces} == {3800}


def test_who_does_not_keep_to_the_budgets_is_not_recommended(tmp_path):
    runs = seeds_of(tmp_path, "fedavg", [0.9, 0.9], devices_beyond_budget=3)
    runs += seeds_of(tmp_path, "heterofl", [0.7, 0.7]) + seeds_of(
        tmp_path, "fedrolex", [0.6, 0.6], devices_without_model=2
    )
    told = compare(runs).advice
    assert told[0].startswith("Take heterofl")
    assert told[-2:] == [
        "Under fedrolex 2 of 5 devices get no model.",
        "Not counted, since it gives devices more than they afford: fedavg.",
    ]


def test_who_does_not_count_is_marked_and_comes_last(tmp_path):
    runs = seeds_of(tmp_path, "fedrolex", [0.9, 0.9], devices_beyond_budget=3)
    runs += seeds_of(tmp_path, "heterofl", [0.7, 0.8])
    comparison = compare(runs)
    for table in comparison.tables:
        assert [row[0] for row in table.rows] == ["heterofl", "fedrolex (does not count)"]
    assert '<tr class="muted"><td>fedrolex (does not count)' in comparison.html
    symbols = [trace["marker"]["symbol"] for trace in charts_of(comparison.html)["Delivered accuracy"].traces]
    assert symbols == ["line-ns", "circle", "line-ns", "circle-open"]


def test_one_model_for_all_is_the_baseline(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7, 0.8]) + seeds_of(tmp_path, "fedrolex", [0.5, 0.5])
    assert "There is no baseline among the runs" in compare(runs).html
    runs += seeds_of(tmp_path, "fedavg", [0.6, 0.6], **{"fedavg.use": "all-small"})
    comparison = compare(runs)
    assert "There is no baseline" not in comparison.html
    against = {row["method"]: row["against the baseline"] for row in rows_of(comparison, ACCURACY)}
    assert against == {"heterofl": "+15.0 points", "fedavg": "", "fedrolex": "-10.0 points"}
    assert charts_of(comparison.html)["Delivered accuracy"].traces[-1]["x"] == [0.6] * 3


def test_methods_without_a_whole_model_show_none(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7]) + seeds_of(tmp_path, "local", [0.6])
    comparison = compare(runs)
    whole = {row["method"]: row["whole model, %"] for row in rows_of(comparison, ACCURACY)}
    assert whole == {"heterofl": "35.0", "local": "none"}


def test_tables_go_into_a_paper(tmp_path):
    table = compare(seeds_of(tmp_path, "heterofl", [0.7, 0.8])).tables[0]
    assert table.csv().splitlines() == [
        'method,seeds,"delivered, %","worst tier, %","whole model, %"',
        "heterofl,1-2,75.0 ± 7.1,18.8 ± 1.8,37.5 ± 3.5",
    ]
    assert r"method & seeds & delivered, \% & worst tier, \% & whole model, \% \\" in table.latex()
    assert r"heterofl & 1-2 & 75.0 $\pm$ 7.1 & 18.8 $\pm$ 1.8 & 37.5 $\pm$ 3.5 \\" in table.latex()
    assert table.markdown().splitlines()[1:] == [
        "| --- | --- | --- | --- | --- |",
        "| heterofl | 1-2 | 75.0 ± 7.1 | 18.8 ± 1.8 | 37.5 ± 3.5 |",
    ]


def test_hooks_make_no_other_experiment_and_are_told(tmp_path):
    hooks = {"hooks": "mine:EarlyStop(patience = 5)", "plugins": {"mine": "0" * 64}}
    runs = [a_run(tmp_path / "one", [0.5], seed=1), a_run(tmp_path / "two", [0.6], seed=2, **hooks)]
    comparison = compare(runs)
    assert [(row["method"], row["seeds"]) for row in rows_of(comparison, ACCURACY)] == [("heterofl", "1-2")]
    assert comparison.advice == [
        "Some runs had hooks, which are not counted among the settings (two: mine:EarlyStop(patience = 5))."
    ]
    # A module that is also the task's is part of the experiment.
    runs.append(a_run(tmp_path / "three", [0.6], seed=3, **hooks | {"task": "mine:Birds"}))
    assert len(rows_of(compare(runs), ACCURACY)) == 2


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("config.json", '{"config"', r"config\.json: it is not JSON"),
        (
            "config.json",
            '{"config": 3, "versions": {}, "seed": 1, "fleet-sha256": ""}',
            r"config = 3: must be a table of keys and values",
        ),
        (
            "config.json",
            '{"config": {}, "versions": {}, "seed": 1, "fleet-sha256": ""}',
            r"config = {}: must name the run's strategy",
        ),
        (
            "config.json",
            '{"config": {"strategy": "fedavg"}, "versions": {}, "seed": 1, "fleet-sha256": "", "data": 3}',
            r"data = 3: must be a table of keys and values",
        ),
        (
            "config.json",
            '{"config": {"strategy": "fedavg"}, "versions": {}, "seed": 1, "fleet-sha256": "", '
            '"plugins-sha256": {"mine": 1}}',
            r"plugins-sha256\.mine = 1: must be a text",
        ),
        (
            "config.json",
            '{"config": {"strategy": "fedavg"}, "versions": {}, "seed": 1, "fleet-sha256": "", '
            '"budgets": {"small": {"memory_bytes": "1 MB", "payload_bytes": null}}}',
            r"budgets\.small\.memory_bytes = .* must be a whole number",
        ),
        ("rounds.jsonl", '{"round": 1}\n', r"rounds\.jsonl, line 1: the key 'strategy' is missing \(and \d+ more\)$"),
        ("summary.json", "{}", r"summary\.json cannot be read: the key 'status' is missing \(and"),
        (
            "summary.json",
            "",
            r"summary\.json cannot be read: it is not JSON: EOF while parsing a value at line 1 column 0$",
        ),
    ],
)
def test_a_broken_run_is_named_and_left_out(file, text, why, tmp_path):
    runs = [a_run(tmp_path / "good", [0.5]), a_run(tmp_path / "bad", [0.6], strategy="fedrolex")]
    (tmp_path / "bad" / file).write_text(text)
    comparison = compare(runs)
    (row,) = rows_of(comparison, "Left out")
    assert row["run"] == "bad"
    assert re.search(why, row["why"])
    assert row["why"].startswith("broken: ")
    assert [row["method"] for row in rows_of(comparison, ACCURACY)] == ["heterofl"]
    with pytest.raises(JournalError, match=r"none of the runs is finished: bad is broken: "):
        compare(runs[1:])


def test_of_different_questions_there_is_no_answer(tmp_path):
    runs = seeds_of(tmp_path, "heterofl", [0.7], alpha=0.1) + seeds_of(tmp_path, "fedrolex", [0.6], alpha=0.5)
    assert compare(runs).advice == [differ("alpha (0.1, 0.5)")]


def test_runs_without_delivery_are_compared_by_their_whole_models(tmp_path):
    for name, score in (("fedrolex", 0.5), ("heterofl", 0.6)):
        journal = Journal.open(tmp_path / name, CONFIG | {"strategy": name}, resume=False)
        gone = {"delivered_score": None, "delivered_score_by_tier": None, "devices_beyond_budget": None}
        journal.write_round(a_round(1, score=score, **gone), [])
        journal.finish("finished")
    comparison = compare([tmp_path / "fedrolex", tmp_path / "heterofl"])
    rows = rows_of(comparison, ACCURACY)
    assert [(r["method"], r["delivered, %"], r["whole model, %"]) for r in rows] == [
        ("heterofl", "none", "60.0"),
        ("fedrolex", "none", "50.0"),
    ]
    assert "no method is recommended" in comparison.advice[0]
    assert comparison.target == 0.5


def test_every_evaluation_is_a_line_of_the_data(tmp_path):
    runs = [a_run(tmp_path / "a", [0.2, None, 0.4], seed=1), a_run(tmp_path / "b", [0.1], seed=2)]
    lines = list(csv.DictReader(io.StringIO(compare(runs).csv)))
    assert [(line["run"], line["method"], line["seed"], line["round"]) for line in lines] == [
        ("a", "heterofl", "1", "1"),
        ("a", "heterofl", "1", "3"),
        ("b", "heterofl", "2", "1"),
    ]
    assert [float(line["delivered_score"]) for line in lines] == [0.2, 0.4, 0.1]
    assert [float(line["score"]) for line in lines] == [0.1, 0.2, 0.05]
    assert [float(line["delivered_score small"]) for line in lines] == [0.05, 0.1, 0.025]
    assert [int(line["training_bytes_down"]) for line in lines] == [1000, 3000, 1000]
    assert [int(line["statistics_bytes_up"]) for line in lines] == [20, 60, 20]
    assert [int(line["scoring_bytes_down"]) for line in lines] == [5000, 15000, 5000]


# Figures that may be missing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "experiments"), [("digits", 1), ("idx", 2), ("npz", 2)])
def test_runs_on_two_folders_are_two_experiments_where_the_folder_is_the_data_set(task, experiments, tmp_path):
    runs = [a_run(tmp_path / name, [0.4], **{"task": task, "data-dir": name}) for name in ("here", "there")]
    assert len(rows_of(compare(runs), ACCURACY)) == experiments


def test_exits_and_personal_accuracies_side_by_side(tmp_path):
    for name, exits, tiers in (("a", [0.2, 0.4], {"weak": 0.5}), ("b", None, {"weak": 0.7, "strong": 0.9})):
        journal = Journal.open(tmp_path / name, CONFIG | {"strategy": "heterofl" if name == "a" else "fedrolex"}, False)
        personal = {"personal_score": 0.6, "personal_score_by_tier": tiers, "personal_devices": 4}
        if name == "a":
            personal["personal_score_by_network"] = {"second network": 0.3}
        journal.write_round(a_round(1, score_by_exit=exits, personal_failed=1, **personal), [])
        journal.finish("finished")
    comparison = compare([tmp_path / "a", tmp_path / "b"])
    assert rows_of(comparison, "Accuracy of the whole model by exit, %") == [
        {"method": "heterofl", "exit 1": "20.0", "exit 2": "40.0"},
        {"method": "fedrolex", "exit 1": "none", "exit 2": "none"},
    ]
    assert rows_of(comparison, "Personal accuracy, mean over the last fifth of the rounds, %") == [
        {"method": "heterofl", "all devices": "60.0", "weak": "50.0", "strong": "none"},
        {"method": "fedrolex", "all devices": "60.0", "weak": "70.0", "strong": "90.0"},
    ]
    assert rows_of(comparison, "Personal accuracy of devices' other networks, %") == [
        {"method": "heterofl", "second network": "30.0"},
        {"method": "fedrolex", "second network": "none"},
    ]


def test_a_target_that_none_reached(tmp_path):
    (cost,) = rows_of(compare([a_run(tmp_path / "one", [0.2])], target=0.9), "What it took")
    assert cost["rounds to 90 %"] == "never"
    assert cost["training bytes"] == "never"


def test_a_run_that_ends_in_nan_sets_no_target_and_comes_last(tmp_path):
    runs = [a_run(tmp_path / "lost", [0.2, float("nan")]), a_run(tmp_path / "good", [0.4, 0.7], strategy="fedrolex")]
    comparison = compare(runs)
    assert comparison.target == 0.7
    cost = rows_of(comparison, "What it took")
    assert [(row["method"], row["rounds to 70 %"]) for row in cost] == [("fedrolex", "2"), ("heterofl", "never")]
    assert comparison.advice == []


@pytest.mark.parametrize("target", [-0.1, 90])
def test_a_target_that_is_no_accuracy_is_refused(target, tmp_path):
    with pytest.raises(JournalError, match=f"a target of {target} is no accuracy, which is between 0 and 1"):
        compare([a_run(tmp_path / "run", [0.4])], target)


def test_runs_without_any_accuracy(tmp_path):
    comparison = compare([a_run(tmp_path / "one", [None]), a_run(tmp_path / "two", [], alpha=1.0)])
    assert comparison.target is None
    assert [row["delivered, %"] for row in rows_of(comparison, ACCURACY)] == ["none", "none"]
    assert comparison.csv.count("\n") == 1


def test_the_page_escapes_names(tmp_path):
    runs = [a_run(tmp_path / "one", [0.2], note="<i>"), a_run(tmp_path / "two", [0.3], note="x")]
    comparison = compare([*runs, a_run(tmp_path / "<b>&", [0.3], finished=False)])
    assert "<b>&" not in comparison.html
    assert "&lt;b&gt;&amp;" in comparison.html
    assert "&lt;i&gt;" in comparison.html
    assert "<i>" not in comparison.html


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(JournalError, match="nothing"):
        compare([a_run(tmp_path / "one", [0.2]), tmp_path / "nothing"])
