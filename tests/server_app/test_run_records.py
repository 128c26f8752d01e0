import json
import math

import pytest
from fake_runs import CONFIG, a_round, three_rounds
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from server_app.journal import Journal
from server_app.report import write_report
from server_app.run_folder import read_devices, read_rounds, read_summary
from server_app.run_records import RoundRecord
from tasks.metrics import Scale


def test_runs_from_before_delivery_are_read_and_shown(tmp_path):
    new = ("delivered_score", "delivered_score_by_tier", "delivered_devices")
    new += ("devices_without_model", "devices_beyond_budget")
    summary = three_rounds(tmp_path).finish("finished")
    old = [{k: v for k, v in a_round(number).items() if k not in new} for number in (1, 2, 3)]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    gone = {
        *new,
        "worst_device",
        "worst_device_score",
        "scored_devices",
        "worst_tier",
        "worst_tier_score",
        "last_score",
        "last_delivered_score",
        "final_evaluations",
    }
    (tmp_path / "summary.json").write_text(summary.model_dump_json(exclude=gone))
    assert read_rounds(tmp_path)[2].delivered_score is None
    assert read_summary(tmp_path).delivered_score is None
    page = write_report(tmp_path).read_text()
    assert "Final accuracy" in page
    assert "Accuracy by tier" in page
    assert "elivered" not in page


def test_rounds_of_earlier_versions_are_read(tmp_path):
    """They have the figures of distillation beside the others, and no count of devices that lost what they kept."""
    three_rounds(tmp_path)
    path = tmp_path / "rounds.jsonl"
    told = ({"distillation_steps_per_second": 37.5, "distillation_told_apart_nats": 0.25}, {}, {})
    lines = []
    for line, own in zip(path.read_text().splitlines(), told, strict=True):
        record = json.loads(line)
        del record["metrics"], record["devices_state_lost"], record["device_lines"]
        none = {"distillation_steps_per_second": None, "distillation_told_apart_nats": None}
        lines.append(json.dumps(record | none | own))
    path.write_text("\n".join(lines) + "\n")
    rounds = read_rounds(tmp_path)
    assert [record.metrics for record in rounds] == [*told]
    assert [record.devices_state_lost for record in rounds] == [0, 0, 0]
    assert rounds[1] == RoundRecord.model_validate(a_round(2))


def test_devices_of_earlier_versions_have_one_payload_for_both_ways(tmp_path):
    three_rounds(tmp_path)
    path = tmp_path / "devices.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert {line.pop("download_bytes"), line.pop("upload_bytes")} == {2000, 1500}
        line["payload_bytes"] = 2000
        line["budget"] = {"memory_bytes": 10**6, "payload_bytes": 3000, "deadline_seconds": 30.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(read_devices(tmp_path))
    assert [(d.download_bytes, d.upload_bytes) for d in found] == [(2000, 2000)] * len(lines)
    budgets = [d.budget for d in found if d.budget is not None]
    assert [(b.download_bytes, b.upload_bytes) for b in budgets] == [(3000, 3000)] * len(lines)


ACCURACIES = {
    "score": "accuracy",
    "score_by_tier": "accuracy_by_tier",
    "score_by_exit": "accuracy_by_exit",
    "personal_score": "personal_accuracy",
    "personal_score_by_tier": "personal_accuracy_by_tier",
    "final_score": "final_accuracy",
    "best_score": "best_accuracy",
}


def with_accuracies(record: dict) -> dict:
    """A record as earlier versions wrote it, all of whose scores were accuracies."""
    return {ACCURACIES.get(k, k): value for k, value in record.items() if k not in ("metric", "higher_is_better")}


def test_accuracies_of_earlier_versions_are_read_as_scores_and_such_a_run_goes_on(tmp_path):
    given = {"score": "NaN", "personal_score": 0.5, "personal_score_by_tier": {"small": 0.5}, "personal_devices": 2}
    rounds = [a_round(1, score_by_exit=[0.1, 0.2]), a_round(2), a_round(3, **given, personal_failed=0)]
    summary = three_rounds(tmp_path).finish("finished")
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(with_accuracies(line)) + "\n" for line in rounds))
    (tmp_path / "summary.json").write_text(json.dumps(with_accuracies(json.loads(summary.model_dump_json()))))
    assert "accuracy_by_tier" in (tmp_path / "rounds.jsonl").read_text()
    assert read_summary(tmp_path) == summary
    first, second, third = read_rounds(tmp_path)
    assert second == RoundRecord.model_validate(a_round(2))
    assert (first.metric, first.score, first.score_by_exit) == ("accuracy", pytest.approx(0.1), [0.1, 0.2])
    assert third.score is not None
    assert math.isnan(third.score)
    assert (third.personal_score, third.personal_score_by_tier) == (0.5, {"small": 0.5})
    journal = Journal.open(tmp_path, CONFIG, resume=True)
    journal.write_round(a_round(4), [])
    assert [json.loads(line)["metric"] for line in (tmp_path / "rounds.jsonl").open()] == ["accuracy"] * 4
    assert journal.finish("finished").best_round == 4


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
