import json

import pytest
from fake_runs import CONFIG, a_device, a_round, three_rounds

from wildflower.server_app.journal import Journal
from wildflower.server_app.run_folder import read_summary
from wildflower.server_app.summary import in_fleet_order


def test_summary_of_a_finished_run(tmp_path):
    journal = three_rounds(tmp_path)
    journal.write_round(a_round(4, score=None, loss=None, score_by_tier=None), [a_device(4, 0)])
    journal.finish("finished")
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "status": "finished",
        "rounds": 4,
        "metric": "accuracy",
        "higher_is_better": True,
        "final_score": pytest.approx(0.3),
        "best_score": pytest.approx(0.3),
        "best_round": 3,
        "score_by_tier": {"small": pytest.approx(0.15), "large": pytest.approx(0.3)},
        "score_by_exit": None,
        "delivered_score": pytest.approx(0.24),
        "delivered_score_by_tier": {"small": pytest.approx(0.15), "large": pytest.approx(0.3)},
        "worst_tier": "small",
        "worst_tier_score": pytest.approx(0.15),
        "last_score": pytest.approx(0.3),
        "last_delivered_score": pytest.approx(0.24),
        "delivered_devices": 5,
        "devices_without_model": 0,
        "devices_beyond_budget": 0,
        "worst_device": None,
        "worst_device_score": None,
        "scored_devices": None,
        "final_evaluations": 1,
        "personal_score": None,
        "personal_score_by_tier": None,
        "personal_score_by_network": None,
        "epsilon": None,
        "delta": None,
        "noised_releases": None,
        "training_bytes_down": 4000,
        "training_bytes_up": 3600,
        "statistics_bytes_down": 1200,
        "statistics_bytes_up": 80,
        "scoring_bytes_down": 20000,
        "devices_by_outcome": {"failed": 3, "late": 3, "trained": 4},
        "simulated_seconds": 240.0,
        "wall_seconds": 6.0,
        "error": None,
    }
    assert (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob("*.new"))


def personal(number: int, accuracy: float | None, **tiers: float) -> dict:
    given = {"personal_score": accuracy, "personal_score_by_tier": tiers, "personal_devices": 3}
    return a_round(number, **given, personal_failed=0, score_by_exit=[0.1 * number, 0.2 * number])


def test_personal_accuracy_is_the_mean_over_the_last_fifth_of_the_rounds(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    for number in range(1, 7):
        journal.write_round(personal(number, 0.1), [])
    assert journal.finish("finished").personal_score == pytest.approx(0.1)
    journal.write_round(a_round(7), [])
    journal.write_round(personal(8, 0.9, small=0.9), [])
    journal.write_round(personal(9, 0.5, small=0.4, large=0.6), [])
    journal.write_round(personal(10, 0.7, small=0.8), [])
    summary = journal.finish("finished")  # of 10 rounds the last two count
    assert summary.personal_score == pytest.approx(0.6)
    assert summary.personal_score_by_tier == pytest.approx({"small": 0.6, "large": 0.6})
    assert summary.score_by_exit == pytest.approx([0.95, 1.9])  # of the rounds 9 and 10


def test_final_figures_are_means_of_the_last_fifth_of_the_evaluations(tmp_path):
    """Ten evaluations in twenty rounds: the last two count, 0.18 and 0.2, and not rounds in which nothing is scored."""
    journal = Journal.open(tmp_path, CONFIG | {"rounds": 20}, resume=False)
    nothing = {"score": None, "score_by_tier": None, "delivered_score": None, "delivered_score_by_tier": None}
    for number in range(1, 21):
        of_round = {"score": number / 100, "score_by_tier": {"a": number / 50}} | {
            "delivered_score": number / 200,
            "delivered_score_by_tier": {"a": number / 100, "b": 0.1 if number == 20 else 0.5},
            "devices_without_model": 3 if number == 2 else 0,
            "devices_beyond_budget": 1 if number == 18 else 0,
        }
        journal.write_round(a_round(number, **(nothing if number % 2 else of_round)), [])
    summary = journal.finish("finished")
    assert summary.final_evaluations == 2
    assert (summary.final_score, summary.last_score) == (pytest.approx(0.19), 0.2)
    assert (summary.delivered_score, summary.last_delivered_score) == (pytest.approx(0.095), 0.1)
    assert summary.score_by_tier == pytest.approx({"a": 0.38})
    assert summary.delivered_score_by_tier == pytest.approx({"a": 0.19, "b": 0.3})
    assert (summary.worst_tier, summary.worst_tier_score) == ("a", pytest.approx(0.19))
    # A device that affords no model counts for a figure in any of the evaluations that it is the mean of.
    assert (summary.devices_without_model, summary.devices_beyond_budget) == (0, 1)
    page = (tmp_path / "report.html").read_text()
    last = "mean of the last 2 evaluations, the last 10 %; up to 1 of 5 devices get more than they afford"
    for text in ("Delivered accuracy", "9.5 %", last, "Worst tier"):
        assert text in page


def test_evaluations_count_in_which_the_whole_model_could_not_be_scored(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1, score=0.3, delivered_score=0.1), [])
    of_tiers = {"score_by_tier": {"a": 0.5}, "delivered_score": 0.4, "delivered_score_by_tier": {"a": 0.4}}
    journal.write_round(a_round(2, score=None, loss=None, **of_tiers), [])
    summary = journal.finish("finished")
    assert (summary.delivered_score, summary.last_delivered_score, summary.worst_tier) == (0.4, 0.4, "a")
    assert (summary.final_score, summary.last_score) == (None, None)
    assert (summary.best_score, summary.best_round) == (0.3, 1)


def test_the_worst_device_of_the_last_evaluation_is_named(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1, worst_device=1, worst_score=0.05, scored_devices=4), [])
    journal.write_round(a_round(2, worst_device=3, worst_score=0.125, scored_devices=5), [])
    journal.write_round(a_round(3, score=None, score_by_tier=None), [])
    summary = journal.finish("finished")
    assert (summary.worst_device, summary.worst_device_score, summary.scored_devices) == (3, 0.125, 5)
    page = (tmp_path / "report.html").read_text()
    assert "Worst device" in page
    assert "device 3, of 5 that have a score" in page


def test_personal_accuracy_of_rounds_that_lack_it_is_none(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    for number, record in enumerate([personal(1, 0.3, small=0.3), a_round(2), personal(3, None)], start=1):
        journal.write_round(record | {"round": number}, [])
    summary = journal.finish("finished")  # nobody could be scored in the last round
    assert (summary.personal_score, summary.personal_score_by_tier) == (None, None)


def test_tiers_of_a_summary_stand_as_in_the_fleet_file(tmp_path):
    """Whose devices are numbered group after group; a tier without a device in the run comes last."""
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    tiers = {"unseen": 0.5, "exit 10": 0.4, "exit 2": 0.3, "a": 0.2}
    devices = [a_device(1, n, tier=tier) for n, tier in [(25, "a"), (7, "exit 10"), (3, "exit 2"), (12, "exit 2")]]
    personal = {"personal_score": 0.5, "personal_score_by_tier": tiers, "personal_devices": 4}
    journal.write_round(a_round(1, score_by_tier=tiers, personal_failed=0, **personal), devices)
    summary = journal.finish("finished")
    for by_tier in (summary.score_by_tier, read_summary(tmp_path).personal_score_by_tier):
        assert list(by_tier.items()) == [("exit 2", 0.3), ("exit 10", 0.4), ("a", 0.2), ("unseen", 0.5)]


def test_summary_of_a_run_that_failed_before_its_first_round(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    summary = journal.finish("failed", "\n".join(f"line {number}" for number in range(100)))
    assert (summary.status, summary.rounds, summary.final_score, summary.best_round) == ("failed", 0, None, None)
    assert summary.error is not None
    assert summary.error.splitlines()[-1] == "line 99"
    assert len(summary.error.splitlines()) == 40
    assert (tmp_path / "report.html").exists()


def test_best_accuracy_is_the_first_of_equals_and_never_nan(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    for number, accuracy in enumerate([float("nan"), 0.5, 0.5, float("nan")], start=1):
        journal.write_round(a_round(number, score=accuracy), [])
    summary = journal.finish("finished")
    assert (summary.best_score, summary.best_round) == (0.5, 2)


def test_a_tier_none_of_whose_devices_was_sampled_stays_where_the_rounds_have_it():
    assert in_fleet_order(["large", "middle", "small"], {3: "middle", 5: "small"}) == ["large", "middle", "small"]
    assert in_fleet_order(["small", "large", "middle"], {3: "middle", 5: "small"}) == ["middle", "small", "large"]
