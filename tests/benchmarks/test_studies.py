"""What benchmarks/studies.py adds to a sweep: figures that are kept, and tables. Processes of runs are stood in for."""

import json
from dataclasses import replace

import pytest

from benchmarks.studies import KEYS, Study, figures, in_order, main, table


def study_in(folder, methods, **more):
    """A study with an experiment file in `folder`/benchmarks/some; its runs lie in `folder`/runs."""
    experiment = folder / "benchmarks" / "some" / "table.toml"
    experiment.parent.mkdir(parents=True, exist_ok=True)
    experiment.write_text('task = "digits"\nrounds = 1\ndevices = 20\n')
    study = Study(experiment, methods, **more)
    (experiment.parent / "README.md").write_text(f"<!-- {study.name} -->\n<!-- end of {study.name} -->\n")
    return study


def done(study, monkeypatch, arguments):
    """Let the command of a study run."""
    words = arguments.split() if isinstance(arguments, str) else arguments
    monkeypatch.setattr("sys.argv", ["study", *words])
    main([study], "")


def written(study):
    """What results.json has: method -> seed -> figures."""
    return json.loads(study.results.read_text())["results"]


TWO = {"a": ["strategy=fedavg"], "b": ["strategy=heterofl"]}


def test_a_study_runs_what_results_json_lacks_and_writes_it_and_the_table(tmp_path, runs, monkeypatch):
    study = study_in(tmp_path, TWO)
    recorded = figure({"1": 0.25}, settings=study.digest("a"))
    study.results.write_text(json.dumps({"results": {"a": {"1": recorded}}}))
    done(study, monkeypatch, "--seeds 1 2 --jobs 1")
    asked = [(call["strategy"], call["seed"], call["workers"]) for call in runs.asked]
    assert asked == [("heterofl", "1", "1"), ("fedavg", "2", "1"), ("heterofl", "2", "1")]
    found = written(study)
    assert {method: list(seeds) for method, seeds in found.items()} == {"a": ["1", "2"], "b": ["1", "2"]}
    assert found["a"]["1"] == recorded
    assert (found["b"]["2"]["curve"], found["b"]["2"]["settings"]) == ({"1": 0.7}, study.digest("b"))
    assert "| b | 2 | 55.00 ± 7.07 |" in (study.experiment.parent / "README.md").read_text()
    # On a machine that has none of the runs as well, nothing is run again.
    study.runs.rename(tmp_path / "away")
    done(study, monkeypatch, "--seeds 1 2")
    assert len(runs.asked) == 3
    assert written(study) == found


def test_some_methods_are_run_with_the_first_seed_only(tmp_path, runs, monkeypatch):
    study = study_in(tmp_path, TWO, once=("b",))
    done(study, monkeypatch, "--seeds 3 1 --methods b")
    done(study, monkeypatch, "--seeds 1 2")
    assert [(call["strategy"], call["seed"]) for call in runs.asked] == [
        ("heterofl", "3"),
        ("fedavg", "1"),
        ("fedavg", "2"),
    ]


def test_other_settings_are_another_run_and_their_figures_replace_the_earlier(tmp_path, runs, monkeypatch):
    """Also where only the contents of a file changed, and where a setting is one that a resumed run may change."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[[group]]\nname = "all"\nshare = 1.0\nmemory = "1 GB"\n')
    before = study_in(tmp_path, TWO | {"c": [f"fleet={fleet}"]})
    done(before, monkeypatch, "--seeds 1")
    fleet.write_text(fleet.read_text().replace("1 GB", "2 GB"))
    after = study_in(tmp_path, before.methods | {"b": [*TWO["b"], "evaluate-every=2"]})
    assert [row.name for row in after.lacking(["a", "b", "c"], [1])] == [f"{m}.{after.digest(m)}" for m in "bc"]
    done(after, monkeypatch, "--seeds 1")
    assert [call["run-name"].partition(".")[0] for call in runs.asked] == ["a", "b", "c", "b", "c"]
    assert all("resume" not in call for call in runs.asked)
    assert written(after)["b"]["1"]["settings"] == after.digest("b") != before.digest("b")
    assert (before.runs / f"b.{before.digest('b')},seed=1" / "summary.json").exists()


def test_what_lies_elsewhere_on_each_machine_is_no_part_of_the_digest(tmp_path):
    study = study_in(
        tmp_path, {"a": ["strategy=fedavg", "initial.weights=<model>"], "b": []}, places={"<model>": lambda s: f"x{s}"}
    )
    *of_a, b = study.lacking(["a", "b"], [1, 2])[:3]
    assert [(row.overrides[1], row.seeds) for row in of_a] == [
        ("initial.weights=x1", (1,)),
        ("initial.weights=x2", (2,)),
    ]
    assert b.overrides == ()
    assert study.digest("a") == replace(study, places={"<model>": lambda _: "y"}).digest("a")


def test_a_study_may_keep_other_figures_and_show_them_in_another_table(tmp_path, runs, monkeypatch):
    study = study_in(
        tmp_path,
        TWO,
        figures=lambda folder: {"folder": folder.name},
        table=lambda study, results: f"{study.name}: {', '.join(results)}",
    )
    done(study, monkeypatch, "--seeds 1")
    found = written(study)
    folder = f"a.{study.digest('a')},seed=1"
    assert found["a"]["1"] == {"folder": folder, "layout": "contiguous", "settings": study.digest("a")}
    assert "\n\nsome: a, b\n\n" in (study.experiment.parent / "README.md").read_text()


def test_the_layout_of_images_is_for_all_rows_and_said_beside_the_figures(tmp_path, runs, monkeypatch):
    study = study_in(tmp_path, TWO)
    before = study.digest("a")
    done(study, monkeypatch, "--seeds 1 --layout channels-last")
    assert [call["compute.layout"] for call in runs.asked] == ["channels-last"] * 2
    found = written(study)["a"]["1"]
    assert (found["layout"], found["settings"]) == ("channels-last", before)
    done(study, monkeypatch, "--seeds 1")  # what was run in another layout is not run again
    assert len(runs.asked) == 2


def test_names_of_methods_may_have_stars(tmp_path, runs, monkeypatch):
    study = study_in(tmp_path, {"fine | a": [], "fine | b": [], "coarse | a": []})
    done(study, monkeypatch, ["--seeds", "1", "--methods", "fine | *"])
    assert [*written(study)] == ["fine | a", "fine | b"]


def test_what_is_stopped_is_named_and_goes_on_and_what_was_finished_is_kept(tmp_path, runs, monkeypatch):
    study = study_in(tmp_path, TWO | {"b": [*TWO["b"], "rounds=2"]})
    done(study, monkeypatch, "--seeds 1 --methods a")
    runs.waits = True
    name = f"b.{study.digest('b')},seed=1"
    with pytest.raises(SystemExit, match=f"Not finished: {name}"):
        done(study, monkeypatch, "--seeds 1")
    assert list(written(study)) == ["a"]
    runs.waits = False
    done(study, monkeypatch, "--seeds 1")
    assert [(call["strategy"], "resume" in call) for call in runs.asked] == [
        ("fedavg", False),
        ("heterofl", False),
        ("heterofl", True),
    ]
    assert list(written(study)) == ["a", "b"]


def test_a_run_that_fails_leaves_the_others_in_results_json(tmp_path, runs, monkeypatch):
    study = study_in(tmp_path, TWO)
    runs.fails = "a."
    with pytest.raises(SystemExit, match=r"Not finished: a\.\w+,seed=1\. The same command"):
        done(study, monkeypatch, "--seeds 1")
    assert list(written(study)) == ["b"]


@pytest.mark.parametrize(
    ("outcome", "other", "recorded"),
    [
        ("failed: KeyError: 'stage2'", "failed: KeyError: 'stage2'", False),
        ("failed: KeyError: 'stage2'", "skipped: no architecture fits the budget", False),
        ("failed: KeyError: 'stage2'", "failed: MessageError: training has diverged: 'w' is not finite", False),
        ("failed: KeyError: 'stage2'", "trained", True),
        ("failed: MessageError: 'w' is not finite", "failed: MessageError: 'w' is not finite", True),
        ("late", "failed: KeyError: 'stage2'", True),
    ],
)
def test_a_run_with_a_round_in_which_all_devices_failed_is_not_recorded(
    outcome, other, recorded, tmp_path, runs, monkeypatch
):
    """It may be a fault of a method that was mended before the run went on from its checkpoint."""
    study = study_in(tmp_path, {"a": ["strategy=fedavg", "rounds=3"]})
    runs.outcomes[2] = (outcome, other)
    if recorded:
        done(study, monkeypatch, "--seeds 1")
    else:
        with pytest.raises(SystemExit, match=rf"a\.\w+,seed=1 in round 2: {outcome}\. Mend the cause"):
            done(study, monkeypatch, "--seeds 1")
    assert ("a" in written(study)) == recorded


def test_settings_that_no_run_can_start_with_and_methods_that_are_none_are_said(tmp_path, runs, monkeypatch, capsys):
    study = study_in(tmp_path, TWO | {"c": ["no-such-key=1"]})
    with pytest.raises(SystemExit, match="unknown key 'no-such-key'"):
        done(study, monkeypatch, "--seeds 1")
    with pytest.raises(SystemExit, match="2"):
        done(study, monkeypatch, "--methods d")
    assert "no method is called d; there are: a; b; c" in capsys.readouterr().err
    assert runs.asked == []
    assert not study.results.exists()


def test_of_several_studies_the_command_names_one(tmp_path, runs, monkeypatch):
    one = study_in(tmp_path, TWO)
    other = replace(one, experiment=one.experiment.with_name("other.toml"))
    other.experiment.write_text(one.experiment.read_text())
    readme = one.experiment.parent / "README.md"
    readme.write_text(readme.read_text() + f"<!-- {other.name} -->\n<!-- end of {other.name} -->\n")
    monkeypatch.setattr("sys.argv", ["studies", "other", "--seeds", "1", "--methods", "a"])
    main([one, other], "")
    assert list(written(other)) == ["a"]
    assert not one.results.exists()


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


def test_a_digest_is_of_what_files_say_and_not_of_their_comments_or_places(tmp_path):
    digests = []
    for place, text in (("one", "x = 1"), ("two", "x = 1  # why"), ("three", "x = 2")):
        study = study_in(tmp_path / place, {"a": [f"fleet={tmp_path / place / 'fleet.toml'}"]})
        (tmp_path / place / "fleet.toml").write_text(text)
        digests.append(study.digest("a"))
    assert digests[0] == digests[1] != digests[2]


def test_a_run_is_summed_up_as_recorded_ones_are(tmp_path):
    """The server's share of a round is without its evaluation; bytes are of training and of statistics together."""
    traffic = {"training_bytes_down": 300, "training_bytes_up": 200, "statistics_bytes_down": 30}
    traffic |= {"statistics_bytes_up": 2, "scoring_bytes_down": 5000}
    summary = dict.fromkeys(KEYS) | traffic | {"simulated_seconds": 7200.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    known = traffic | {
        "score": None,
        "simulated_seconds": 0.0,
        "memory_utilisation": None,
        "bandwidth_utilisation": None,
    }
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
    assert (found["bytes_down"], found["bytes_up"]) == (330, 202)
    assert (found["training_bytes_down"], found["scoring_bytes_down"]) == (300, 5000)


def test_tiers_are_in_order_of_width_then_of_name_with_numbers_as_numbers():
    names = ["width-1/8", "exit 10", "exit 2", "width-1", "width-1/2", "big"]
    assert sorted(names, key=in_order) == ["width-1", "width-1/2", "width-1/8", "big", "exit 2", "exit 10"]
