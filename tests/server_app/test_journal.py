import json
from importlib.metadata import version

import pytest
from fake_runs import CONFIG, a_device, a_round, three_rounds
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from wildflower.server_app.journal import Journal
from wildflower.server_app.run_folder import JournalError, read_config, read_devices, read_rounds, read_summary, runs_of


def test_config_holds_the_resolved_configuration_versions_and_seed(tmp_path):
    Journal.open(tmp_path / "run", CONFIG, resume=False)
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert content["config"] == CONFIG
    assert content["seed"] == 7
    assert set(content["versions"]) == {"python", "torch", "flwr", "wildflower"}
    assert content["versions"]["flwr"] == version("flwr")


def test_lines_have_exactly_the_keys_of_the_contract(tmp_path):
    three_rounds(tmp_path)
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    devices = [json.loads(line) for line in (tmp_path / "devices.jsonl").read_text().splitlines()]
    assert rounds == [a_round(number, device_lines=3) for number in (1, 2, 3)]
    assert len(devices) == 9
    assert devices[3] == a_device(2, 0)


@pytest.mark.parametrize("key", ["metric", "score", "training_bytes_up", "server_seconds", "devices_bounded"])
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
    assert read_config(tmp_path).config["rounds"] == 5


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
def test_a_resumed_journal_counts_the_rounds_whose_devices_are_all_there(cut, whole, tmp_path):
    three_rounds(tmp_path)
    file = tmp_path / "devices.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    if cut is not None:
        file.write_text("".join(cut(lines)))
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


def test_tensorboard_scalars_after_a_resume_have_every_round_once(tmp_path):
    three_rounds(tmp_path)
    journal = Journal.open(tmp_path, CONFIG, resume=True)
    journal.drop_after(1)
    journal.write_round(a_round(2, score=0.75), [])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {
        "accuracy",
        "loss",
        "accuracy_by_tier/small",
        "scoring_bytes_down",
        "simulated_seconds",
        "wall_seconds",
    } <= set(events.Tags()["scalars"])
    assert "bandwidth_utilisation" not in events.Tags()["scalars"]  # it was None in every round
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
