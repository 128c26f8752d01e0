import json
import math

import pytest
from fake_runs import CONFIG, a_device, a_round, three_rounds
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from server_app.journal import (
    DATA_OF_A_FOLDER,
    Journal,
    JournalError,
    RoundRecord,
    check_resumable,
    in_fleet_order,
    read_config,
    read_devices,
    read_rounds,
    read_summary,
    runs_of,
)
from server_app.report import write_report
from tasks.metrics import Scale
from tasks.task import TASKS


def test_config_holds_the_resolved_configuration_versions_and_seed(tmp_path):
    Journal.open(tmp_path / "run", CONFIG, resume=False)
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert content["config"] == CONFIG
    assert content["seed"] == 7
    assert set(content["versions"]) == {"python", "torch", "flwr", "wildflower"}
    assert content["versions"]["flwr"] == "1.41.0"


def test_lines_have_exactly_the_keys_of_the_contract(tmp_path):
    three_rounds(tmp_path)
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    devices = [json.loads(line) for line in (tmp_path / "devices.jsonl").read_text().splitlines()]
    assert rounds == [a_round(number, device_lines=3) for number in (1, 2, 3)]
    assert len(devices) == 9
    assert devices[3] == a_device(2, 0)


@pytest.mark.parametrize("key", ["metric", "score", "bytes_up", "server_seconds", "devices_bounded"])
def test_a_missing_key_is_an_error_and_writes_nothing(tmp_path, key):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    record = a_round(1)
    del record[key]
    with pytest.raises(ValidationError, match=key):
        journal.write_round(record, [a_device(1, 0)])
    assert not (tmp_path / "rounds.jsonl").exists()
    assert not (tmp_path / "devices.jsonl").exists()


def test_an_unknown_key_is_an_error(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    with pytest.raises(ValidationError, match="accurracy"):
        journal.write_round(a_round(1, accurracy=0.5), [])
    with pytest.raises(ValidationError, match="battery"):
        journal.write_round(a_round(1), [a_device(1, 0, battery=0.5)])
    with pytest.raises(ValidationError, match="exploded"):
        journal.write_round(a_round(1), [a_device(1, 0, outcome="exploded")])
    assert read_rounds(tmp_path) == []


def test_rounds_come_one_after_the_other_with_their_own_devices(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1), [])
    with pytest.raises(ValueError, match="round 3 cannot follow round 1"):
        journal.write_round(a_round(3), [])
    with pytest.raises(ValueError, match="round 1 was written with round 2"):
        journal.write_round(a_round(2), [a_device(1, 0)])


def test_a_diverged_loss_stays_readable_json(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1, loss=float("nan")), [a_device(1, 0, loss=float("inf"))])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads((tmp_path / "rounds.jsonl").read_text(), parse_constant=refuse)["loss"] == "NaN"
    loss = read_rounds(tmp_path)[0].loss
    assert loss != loss
    assert next(read_devices(tmp_path)).loss == float("inf")


@pytest.mark.parametrize(("end", "state"), [(True, "a finished run"), (False, "an unfinished run")])
def test_an_earlier_run_is_not_overwritten(tmp_path, end, state):
    journal = three_rounds(tmp_path)
    if end:
        journal.finish("finished")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(JournalError) as error:
        Journal.open(tmp_path, CONFIG, resume=False)
    for part in (str(tmp_path), state, "run-name", "resume=true"):
        assert part in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json*")} == before


def test_nothing_to_resume_is_an_error(tmp_path):
    with pytest.raises(JournalError, match="no run to resume"):
        Journal.open(tmp_path / "typo", CONFIG, resume=True)
    assert not (tmp_path / "typo").exists()


def test_resume_drops_what_is_beyond_the_checkpoint_and_a_torn_line(tmp_path):
    three_rounds(tmp_path)
    # The crash came while round 4 was written: its devices are there, its round is half there.
    with (tmp_path / "devices.jsonl").open("a") as file:
        file.write(json.dumps(a_device(4, 0)) + "\n")
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(a_round(4))[:50])
    journal = Journal.open(tmp_path, CONFIG | {"rounds": 5, "resume": True}, resume=True)
    assert journal.last_round == 3
    assert (tmp_path / "rounds.jsonl").read_bytes().endswith(b"}\n")
    journal.drop_after(2)
    journal.write_round(a_round(3, score=0.9), [a_device(3, 5)])
    assert [record.score for record in read_rounds(tmp_path)] == pytest.approx([0.1, 0.2, 0.9])
    assert [(device.round, device.device) for device in read_devices(tmp_path)] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
        (2, 2),
        (3, 5),
    ]
    assert read_config(tmp_path)["config"]["rounds"] == 5


@pytest.mark.parametrize("earlier", [False, True], ids=["today", "earlier version"])
@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        (lambda lines: [*lines, json.dumps(a_device(4, 0))[:40]], 3),  # a crash in the first line of round 4
        (lambda lines: [*lines, json.dumps(a_device(4, 0)) + "\n"], 3),
        (lambda lines: [*lines[:-1], lines[-1][:-1]], 2),
        (lambda lines: lines[:-1], 2),  # at a line's end
        (lambda lines: lines[:6], 2),  # at a round's end
        (lambda lines: lines[:2], 0),
        (lambda lines: [], 0),
        (None, 0),  # the file is missing
    ],
)
def test_a_resumed_journal_counts_the_rounds_whose_devices_are_all_there(cut, whole, earlier, tmp_path):
    three_rounds(tmp_path)
    file = tmp_path / "devices.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    if cut is not None:
        file.write_text("".join(cut(lines)))
    if earlier:
        rounds = [json.dumps(a_round(number)) + "\n" for number in (1, 2, 3)]
        (tmp_path / "rounds.jsonl").write_text("".join(rounds))
    assert Journal.open(tmp_path, CONFIG, resume=True).last_round == whole


def test_a_round_is_whole_only_with_every_order_of_a_device(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1, devices_sampled=1), [a_device(1, 0)])
    journal.write_round(a_round(2, devices_sampled=1), [a_device(2, 0), a_device(2, 0)])
    file = tmp_path / "devices.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert Journal.open(tmp_path, CONFIG, resume=True).last_round == 1


def test_a_checkpoint_ahead_of_the_journal_is_an_error(tmp_path):
    journal = three_rounds(tmp_path)
    with pytest.raises(JournalError, match=r"of round 4, but rounds\.jsonl ends with round 3"):
        journal.drop_after(4)


def test_resume_with_another_configuration_is_an_error(tmp_path):
    three_rounds(tmp_path)
    with pytest.raises(JournalError, match=r"learning-rate was 0\.1 and is 0\.2"):
        Journal.open(tmp_path, CONFIG | {"learning-rate": 0.2}, resume=True)


def test_data_of_users_are_what_their_folder_holds():
    of_users = {name for name, kind in TASKS.items() if kind.own is not None}
    assert of_users | {"idx"} == set(DATA_OF_A_FOLDER)


@pytest.mark.parametrize("task", ["digits", "idx", "npz", "images", "table", "text"])
def test_another_folder_is_another_data_set_where_the_folder_is_the_data_set(task, tmp_path):
    here, there = CONFIG | {"task": task, "data-dir": "here"}, CONFIG | {"task": task, "data-dir": "there"}
    Journal.open(tmp_path, here, resume=False)
    if task == "digits":
        Journal.open(tmp_path, there, resume=True)
    else:
        with pytest.raises(JournalError, match="data-dir was 'here' and is 'there'"):
            Journal.open(tmp_path, there, resume=True)


def test_keys_that_nothing_reads_may_change_as_between_versions(tmp_path):
    Journal.open(tmp_path, CONFIG | {"fedprox.mu": 0.1, "recipfl.no-more": True}, resume=False)
    check_resumable(tmp_path, CONFIG | {"fedprox.mu": 1.0, "recipfl.new": 3})
    with pytest.raises(JournalError, match=r"configuration: heterofl\.mode was None and is 'fixed'$"):
        check_resumable(tmp_path, CONFIG | {"fedprox.mu": 1.0, "heterofl.mode": "fixed"})


def test_keys_of_the_run_that_nothing_reads_may_change(tmp_path):
    adam = CONFIG | {"optimizer": "adam", "momentum": 0.9}
    Journal.open(tmp_path, adam, resume=False)
    check_resumable(tmp_path, adam | {"momentum": 0.5})
    with pytest.raises(JournalError, match=r"momentum was 0\.9 and is 0\.5, optimizer was 'adam' and is 'sgd'"):
        check_resumable(tmp_path, adam | {"optimizer": "sgd", "momentum": 0.5})


@pytest.mark.parametrize(
    ("with_it", "why"),
    [
        ({"schedule": "cosine"}, "falls towards 0 over 3 rounds"),
        ({"dp-epsilon": 3.0}, "has the noise with which 3 rounds reach dp-epsilon = 3"),
    ],
)
def test_what_the_number_of_rounds_decides_is_not_resumed_for_more_of_them(with_it, why, tmp_path):
    Journal.open(tmp_path, CONFIG | {"rounds": 3} | with_it, resume=False)
    check_resumable(tmp_path, CONFIG | {"rounds": 3} | with_it)
    with pytest.raises(JournalError, match=f"rounds = 5: .*{why}.*leave rounds as they were"):
        check_resumable(tmp_path, CONFIG | {"rounds": 5} | with_it)


def test_a_run_is_not_resumed_for_fewer_rounds_than_it_has(tmp_path):
    three_rounds(tmp_path).finish("finished")
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(JournalError, match=r"rounds = 2, but the run in .* has 3: ask for 3 or more"):
        Journal.open(tmp_path, CONFIG | {"rounds": 2}, resume=True)
    assert (tmp_path / "config.json").read_bytes() == before
    assert Journal.open(tmp_path, CONFIG | {"rounds": 3}, resume=True).last_round == 3


def test_resuming_a_finished_run_takes_its_summary_away(tmp_path):
    three_rounds(tmp_path).finish("finished")
    Journal.open(tmp_path, CONFIG | {"rounds": 5}, resume=True)
    assert read_summary(tmp_path) is None


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    three_rounds(tmp_path)
    path = tmp_path / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"round": 2}\n' + lines[2])
    with pytest.raises(JournalError, match=r"rounds\.jsonl, line 2"):
        read_rounds(tmp_path)
    path.write_text(lines[0] + lines[2])
    with pytest.raises(JournalError, match="line 2: round 3 instead of 2"):
        read_rounds(tmp_path)


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
        "bytes_down": 4000,
        "bytes_up": 3600,
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


def test_tensorboard_scalars_after_a_resume_have_every_round_once(tmp_path):
    three_rounds(tmp_path)
    journal = Journal.open(tmp_path, CONFIG, resume=True)
    journal.drop_after(1)
    journal.write_round(a_round(2, score=0.75), [])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"accuracy", "loss", "accuracy_by_tier/small", "bytes/up", "seconds/simulated", "seconds/wall"} <= set(
        events.Tags()["scalars"]
    )
    assert "utilisation/bandwidth" not in events.Tags()["scalars"]  # it was None in every round
    by_round = [(event.step, round(event.value, 4)) for event in events.Scalars("accuracy")]
    assert by_round == [(1, 0.1), (2, 0.75)]


def test_a_sweeps_folder_stands_for_its_runs_and_its_logs_for_none(tmp_path):
    sweep = tmp_path / "sweep"
    runs = [sweep / "seed=1", sweep / "seed=2"]
    for run in [*runs, tmp_path / "alone"]:
        three_rounds(run)
    (sweep / "logs").mkdir()
    assert runs_of([sweep, tmp_path / "alone", runs[0]]) == [*runs, tmp_path / "alone"]
    assert runs_of([*sweep.iterdir()]) == [path for path in sweep.iterdir() if path.name != "logs"]
    for other in (tmp_path / "none", sweep / "logs" / "x"):
        with pytest.raises(JournalError, match="give folders like runs/NAME"):
            runs_of([other])


def test_a_tier_none_of_whose_devices_was_sampled_stays_where_the_rounds_have_it():
    assert in_fleet_order(["large", "middle", "small"], {3: "middle", 5: "small"}) == ["large", "middle", "small"]
    assert in_fleet_order(["small", "large", "middle"], {3: "middle", 5: "small"}) == ["middle", "small", "large"]
