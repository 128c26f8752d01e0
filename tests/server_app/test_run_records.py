import pytest
from fake_runs import CONFIG, a_round
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from wildflower.server_app.journal import Journal
from wildflower.server_app.run_folder import read_rounds, read_summary
from wildflower.tasks.metrics import Scale


def test_a_record_of_today_has_no_accuracy(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    with pytest.raises(ValidationError, match="accuracy"):
        journal.write_round(a_round(1, accuracy=0.5), [])


def test_a_metric_that_is_not_known_here_keeps_its_name_and_its_direction(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    for number, score in enumerate([3.0, 1.5, 2.0], start=1):
        error = {"metric": "hinge_distance", "higher_is_better": False, "score": score, "score_by_tier": {"a": score}}
        personal = {"personal_score": 4.5, "personal_score_by_tier": {}, "personal_devices": 1, "personal_failed": 0}
        journal.write_round(a_round(number, **error, **personal), [])
    summary = journal.finish("finished")
    assert (summary.best_score, summary.best_round, summary.final_score) == (1.5, 2, 2.0)
    assert (summary.worst_tier, summary.worst_tier_score) == ("large", pytest.approx(0.3))  # the larger error
    assert read_summary(tmp_path).scale == Scale("hinge distance", higher_is_better=False)
    report = (tmp_path / "report.html").read_text()
    for text in (
        "Delivered hinge distance",
        "best 1.5 in round 2",
        "Hinge distance delivered by tier",
        "Personal hinge distance",
    ):
        assert text in report
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = {"hinge_distance", "personal_hinge_distance", "hinge_distance_by_tier/a"}
    assert scalars <= set(events.Tags()["scalars"])
    assert not any("accuracy" in name for name in events.Tags()["scalars"])


def test_a_methods_own_figures_come_back(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    own = {"drift": 0.5, "not_measured": None, "diverged": float("inf")}
    seconds = a_round(1)["server_seconds"] | {"sorting": 0.25}
    journal.write_round(a_round(1, metrics=own, server_seconds=seconds), [])
    [record] = read_rounds(tmp_path)
    assert record.metrics == own
    assert record.server_seconds["sorting"] == 0.25
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("metrics/drift")] == [0.5]
    assert [event.value for event in events.Scalars("server_seconds/sorting")] == [0.25]
    assert "metrics/not_measured" not in events.Tags()["scalars"]
