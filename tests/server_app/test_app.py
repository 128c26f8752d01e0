import json
import logging
import re
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from tests.own_folders import digits, npz_folder
from tests.small_run import FLEET, METHODS, FakeTime, by_method, connected_grid, same_bits, simulated_grid, small_config
from wildflower.rounds import asking
from wildflower.rounds.population import NoNodesError
from wildflower.server_app import checkpoint
from wildflower.server_app.app import app, build, run
from wildflower.server_app.checkpoint import CheckpointError
from wildflower.server_app.config import ConfigError
from wildflower.server_app.inputs import run_folder
from wildflower.server_app.journal import Journal
from wildflower.server_app.models import load_model
from wildflower.server_app.no_progress import NoProgressError
from wildflower.server_app.run_folder import (
    JournalError,
    alone_in,
    read_config,
    read_devices,
    read_rounds,
    read_summary,
)
from wildflower.tasks.task import load_task


class Crash(BaseException):
    """What kills a process, such as Ctrl-C: nothing that code may catch and go on."""


def crash_in_round(grid, number):
    """Raise as the first reply of a round arrives: after its messages were sent, before it is finished."""

    def order(messages):
        if messages and messages[0].metadata.group_id == str(number):
            raise Crash
        return messages

    grid.seen = order
    return grid


CLOCKED = {
    "wall_seconds": True,
    "server_seconds": True,
    "server_peak_rss_bytes": True,
    "metrics": {"distillation_steps_per_second"},
}


def told(run_dir):
    """What the journal says of the run, without what depends on the wall's clock."""
    rounds = [record.model_dump(exclude=CLOCKED) for record in read_rounds(run_dir)]
    devices = [d.model_dump(exclude={"seconds", "node", "measured_memory_bytes"}) for d in read_devices(run_dir)]
    return rounds, devices


def test_a_run_leaves_what_the_contract_says(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=2, evaluate_every=1))
    assert run_dir == tmp_path / "runs" / "small"
    assert {path.name for path in run_dir.iterdir()} == {
        "config.json",
        "rounds.jsonl",
        "devices.jsonl",
        "checkpoint",
        "models",
        "summary.json",
        "report.html",
        "labels.json",
        "model.json",
        "tensorboard",
    }
    summary = read_summary(run_dir)
    assert (summary.status, summary.rounds, summary.error) == ("finished", 2, None)
    assert summary.devices_by_outcome == {"trained": 8}
    assert 0 < summary.final_score <= 1
    assert checkpoint.load(run_dir).round == 2
    assert checkpoint.load(run_dir).now_seconds == read_rounds(run_dir)[-1].simulated_seconds > 0


# Some are variants whose server keeps the same.
VARIANTS = ["all-small", "exclusive", "heterofl dynamic", "model-search pool", "fjord without distillation"]


def _of_round_4(run_dir, name):
    return (run_dir / "checkpoint" / "round-4" / name).read_bytes()


@by_method(method for method in METHODS if method not in VARIANTS)
def test_a_resumed_run_ends_with_the_same_bits(method, tmp_path):
    """A crash in the middle of round 3 that tears the line it was writing; the resumed run does rounds 3 and 4."""
    keys = METHODS[method] | {"evaluate-every": 2}
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole = run(simulated_grid(2), small_config(tmp_path / "whole", **keys))

    with pytest.raises(Crash):
        run(crash_in_round(simulated_grid(2), 3), small_config(tmp_path / "broken", **keys))
    broken = tmp_path / "broken" / "runs" / "small"
    assert read_summary(broken) is None  # as of a run that was stopped: it has not failed
    assert checkpoint.load(broken).round == 2
    line = (whole / "rounds.jsonl").read_text().splitlines()[2]
    with (broken / "rounds.jsonl").open("a") as file:
        file.write(line[: len(line) // 2])
    with (broken / "devices.jsonl").open("a") as file:
        file.write((whole / "devices.jsonl").read_text().splitlines(keepends=True)[8])

    config = small_config(tmp_path / "broken", **keys | {"resume": True, "workers": 1})
    assert run(simulated_grid(3), config) == broken
    assert read_summary(broken).status == "finished"
    first, second = checkpoint.load(whole), checkpoint.load(broken)
    assert same_bits(first.state.tensors, second.state.tensors)
    assert (first.round, first.now_seconds, first.state.values) == (4, second.now_seconds, second.state.values)
    files = ("state.json", "state.safetensors")
    assert all(_of_round_4(whole, name) == _of_round_4(broken, name) for name in files)
    assert told(whole) == told(broken)


def test_a_checkpoint_that_is_a_round_behind_the_journal_is_enough(tmp_path, monkeypatch):
    """The journal is written first, so a crash between the two leaves it one round ahead."""
    keys = METHODS["fedadam"]
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole = run(simulated_grid(), small_config(tmp_path / "whole", **keys))
    save = checkpoint.save

    def crash_before_round_3(run_dir, state, keep):
        if state.round == 3:
            raise Crash
        save(run_dir, state, keep)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", crash_before_round_3)
        with pytest.raises(Crash):
            run(simulated_grid(), small_config(tmp_path / "broken", **keys))
    broken = tmp_path / "broken" / "runs" / "small"
    assert len(read_rounds(broken)) == 3
    run(simulated_grid(), small_config(tmp_path / "broken", **keys | {"resume": True}))
    assert same_bits(checkpoint.load(whole).state.tensors, checkpoint.load(broken).state.tensors)
    assert told(whole) == told(broken)


def test_a_finished_run_can_go_on_for_more_rounds(tmp_path):
    run(simulated_grid(), small_config(tmp_path, rounds=1))
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=3, resume=True))
    assert [record.round for record in read_rounds(run_dir)] == [1, 2, 3]


def test_a_failed_run_says_why_and_keeps_its_rounds(tmp_path):
    def cut():
        raise RuntimeError("the wire was cut")

    def broken(messages):
        if messages[0].metadata.group_id == "2":
            grid.get_node_ids = cut
            cut()
        return messages

    grid = simulated_grid()
    grid.seen = broken
    with pytest.raises(RuntimeError, match="the wire was cut"):
        run(grid, small_config(tmp_path))
    summary = read_summary(tmp_path / "runs" / "small")
    assert (summary.status, summary.rounds) == ("failed", 1)
    assert summary.error.endswith("RuntimeError: the wire was cut")


def test_a_run_is_not_overwritten(tmp_path):
    config = small_config(tmp_path, rounds=1)
    run_dir = run(simulated_grid(), config)
    before = (run_dir / "rounds.jsonl").read_bytes()
    with pytest.raises(JournalError, match="already holds a finished run"):
        run(simulated_grid(), config)
    assert (run_dir / "rounds.jsonl").read_bytes() == before


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(JournalError, match="holds no run to resume"):
        run(simulated_grid(), small_config(tmp_path, resume=True))
    with pytest.raises(ConfigError, match="run-name must say which run to resume"):
        run(simulated_grid(), small_config(tmp_path, resume=True, run_name=""))


@pytest.mark.parametrize("changes", [{"learning-rate": 0.1}, METHODS["fedadam"], METHODS["local"], {"family": "cnn3"}])
def test_another_experiment_does_not_resume_this_one(tmp_path, changes):
    run(simulated_grid(), small_config(tmp_path, strategy="fedavg", rounds=1))
    [key] = [key for key in ("learning-rate", "fedavg.use", "family", "strategy") if key in changes][:1]
    keys = {"strategy": "fedavg"} | changes
    with pytest.raises(JournalError, match=f"another configuration: {key} was .* and is"):
        run(simulated_grid(), small_config(tmp_path, **keys, rounds=2, resume=True))


def test_a_changed_fleet_file_does_not_resume_the_run(tmp_path):
    run(simulated_grid(), small_config(tmp_path, rounds=1))
    config = small_config(tmp_path, rounds=2, resume=True)
    fleet = tmp_path / "six.toml"
    fleet.write_text(fleet.read_text().replace("speed = 2.0", "speed = 2.5"))
    with pytest.raises(JournalError, match=r"the fleet file '.*six\.toml' or a trace that it names is not what it was"):
        run(simulated_grid(), config)


def arrays_of(folder, *, classes=3, first_label=0, brighter=0):
    inputs, labels, test_inputs, test_labels = (array[:40] for array in digits())
    labels = labels % classes
    labels[0] = first_label
    npz_folder(folder, inputs + np.uint8(brighter), labels)
    npz_folder(folder, test_inputs, test_labels % classes, "test")
    load_task.cache_clear()  # as another process would have it
    return {"task": "npz", "data_dir": str(folder), "partition": "iid", "examples_per_device": 0}


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        ({"classes": 4}, r"\(classes: 3 then, 4 now\); put the old data back"),
        ({"first_label": 1}, "there are as many examples, and their labels or inputs differ"),
        ({"brighter": 1}, "their labels or inputs differ"),
    ],
)
def test_a_run_is_not_resumed_over_edited_data(edited, words, tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1, **arrays_of(tmp_path / "data")))
    config = small_config(tmp_path, rounds=2, resume=True, **arrays_of(tmp_path / "data", **edited))
    with pytest.raises(JournalError, match=words):
        run(simulated_grid(), config)
    assert len(read_rounds(run_dir)) == 1


def test_a_run_goes_on_over_the_same_data(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1, **arrays_of(tmp_path / "data")))
    recorded = read_config(run_dir)
    sizes = {"training-examples": 40, "test-examples": 40, "classes": 3, "input-shape": "1x8x8"}
    assert recorded.data == sizes | {"sha256": recorded.data["sha256"]}
    again = arrays_of(tmp_path / "data")  # written anew, at another time
    run(simulated_grid(), small_config(tmp_path, rounds=2, resume=True, **again))
    assert len(read_rounds(run_dir)) == 2


def test_a_family_that_does_not_take_the_inputs_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"family = 'vgg' does not go with the 1x8x8 inputs of 'digits': a pool"):
        build(small_config(tmp_path, family="vgg"))


def test_a_family_takes_arguments(tmp_path):
    arguments = "first_channels = 8, activation = 'relu6'"
    built, _ = build(small_config(tmp_path, family="resnet18", family_arguments=arguments))
    assert built.method.family.groups["stage4.stream"] == 64
    with pytest.raises(ConfigError, match="'resnet18' has no argument 'channels'; did you mean 'stage_channels'"):
        build(small_config(tmp_path, family="resnet18", family_arguments="channels = 8"))
    with pytest.raises(ConfigError) as caught:
        build(small_config(tmp_path, family="cnn3", family_arguments="first_channel = 16"))
    assert str(caught.value).startswith("family-arguments = 'first_channel = 16': family 'cnn3' has no argument")
    assert "kernel" in str(caught.value)
    assert "inputs" not in str(caught.value)
    with pytest.raises(ConfigError, match="family-arguments = 'a b': must be like"):
        small_config(tmp_path, family_arguments="a b")


def test_two_processes_do_not_write_one_run(tmp_path):
    config = small_config(tmp_path, rounds=1)
    with alone_in(run_folder(config)), pytest.raises(JournalError, match="another process writes the run"):
        run(simulated_grid(), config)
    run(simulated_grid(), config)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    config = small_config(tmp_path, rounds=1)
    Journal.open(run_folder(config), config.to_dict(), False, fleet=build(config)[0].population.fleet_digest)
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1, resume=True))
    assert [record.round for record in read_rounds(run_dir)] == [1]


def test_an_optimizer_without_momentum_starts_under_flowers_defaults(tmp_path):
    built, _ = build(small_config(tmp_path, optimizer="adam", momentum=0.9))
    assert built.settings.training.momentum == 0.0
    assert built.settings.optimizer == "adam"


def test_a_torn_checkpoint_stops_a_resumed_run_before_it_changes_anything(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=2, checkpoints={"keep": 1}))
    before = (run_dir / "rounds.jsonl").read_bytes()
    path = run_dir / "checkpoint" / "round-2" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        run(simulated_grid(), small_config(tmp_path, rounds=4, resume=True))
    assert (run_dir / "rounds.jsonl").read_bytes() == before
    summary = read_summary(run_dir)
    assert (summary.status, "round-2 is not a whole checkpoint" in summary.error) == ("failed", True)
    assert "Error:" not in summary.error  # in words, for who resumes it
    assert "\n" not in summary.error


@pytest.mark.thorough
def test_a_run_goes_on_from_the_checkpoint_before_a_torn_one_or_from_any_round(tmp_path):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    keys = METHODS["fedadam"]
    whole = run(simulated_grid(), small_config(tmp_path / "whole", **keys))
    broken = run(simulated_grid(), small_config(tmp_path / "broken", **keys))
    (broken / "checkpoint" / "round-4" / "state.json").write_text("{")
    assert run(simulated_grid(), small_config(tmp_path / "broken", **keys, resume=True)) == broken
    assert same_bits(checkpoint.load(whole).state.tensors, checkpoint.load(broken).state.tensors)
    again = small_config(tmp_path / "broken", **keys, resume=True, checkpoints__resume_from=2)
    run(simulated_grid(), again)
    assert checkpoint.rounds(broken) == [4, 3, 2]
    assert same_bits(checkpoint.load(whole).state.tensors, checkpoint.load(broken).state.tensors)
    assert told(whole) == told(broken)
    before = {path: path.read_bytes() for path in broken.glob("*.json*")}
    with pytest.raises(JournalError, match=r"^checkpoints.resume-from = 1: .* there are those of rounds 2, 3, 4$"):
        run(
            simulated_grid(),
            small_config(tmp_path / "broken", **keys, resume=True, checkpoints__resume_from=1, rounds=5),
        )
    assert {path: path.read_bytes() for path in broken.glob("*.json*")} == before
    with pytest.raises(ConfigError, match=r"checkpoints\.resume-from = 2: goes with resume = true only"):
        small_config(tmp_path, checkpoints__resume_from=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "keys",
    [
        *(METHODS[method] for method in ("rafl", "spatl", "scaffold", "local")),
        METHODS["all-large"] | {"wire": "int8"},
    ],
    ids=lambda keys: keys["strategy"],
)
def test_devices_keep_what_a_run_needs_that_goes_on_from_its_oldest_checkpoint(keys, tmp_path):
    keys = keys | {"devices-per-round": 6, "rounds": 7, "evaluate-every": 7}  # all train in every round
    run_dir = run(simulated_grid(), small_config(tmp_path, **keys))
    whole, lines = checkpoint.load(run_dir), told(run_dir)
    assert checkpoint.rounds(run_dir) == [7, 6, 5]

    def kept() -> set[tuple[int, ...]]:
        found = defaultdict(list)
        for path in (run_dir / "device-state").rglob("device-*/*.safetensors"):
            key, number, _ = path.name.rsplit(".", 2)
            found[path.parent.name, key].append(int(number))
        return {tuple(sorted(numbers)) for numbers in found.values()}

    # When round 7 was done, that of round 4 was the oldest. What rounding has lost counts for two rounds.
    expected = {(3, 4, 5, 6, 7)} if "wire" in keys else {(4, 5, 6, 7)}
    assert kept() == expected
    run(simulated_grid(), small_config(tmp_path, **keys, resume=True, checkpoints__resume_from=5))
    assert same_bits(whole.state.tensors, checkpoint.load(run_dir).state.tensors)
    assert told(run_dir) == lines


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["rounds.jsonl", "devices.jsonl"])
def test_a_run_goes_on_from_a_checkpoint_that_the_torn_journal_reaches(file, tmp_path, caplog):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    keys = METHODS["fedadam"]
    whole = run(simulated_grid(), small_config(tmp_path / "whole", **keys))
    broken = run(simulated_grid(), small_config(tmp_path / "broken", **keys))
    data = (broken / file).read_bytes()
    (broken / file).write_bytes(data[:-20])
    run(simulated_grid(), small_config(tmp_path / "broken", **keys, resume=True))
    assert "torn and whole up to round 3: going back to the checkpoint of round 3" in caplog.text
    assert told(whole) == told(broken)
    assert same_bits(checkpoint.load(whole).state.tensors, checkpoint.load(broken).state.tensors)
    # With nothing that it reaches, nothing is changed.
    (broken / file).write_bytes(data[:20])
    for _ in range(2):
        with pytest.raises(CheckpointError, match="torn and whole up to round 0"):
            run(simulated_grid(), small_config(tmp_path / "broken", **keys, resume=True))


def test_a_crash_in_the_first_line_of_a_round_leaves_the_only_checkpoint_good(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1, checkpoints={"keep": 1}))
    with (run_dir / "devices.jsonl").open("a") as file:
        file.write('{"device": 0, "node"')
    run(simulated_grid(), small_config(tmp_path, rounds=2, checkpoints={"keep": 1}, resume=True))
    assert [record.round for record in read_rounds(run_dir)] == [1, 2]
    assert {device.round for device in read_devices(run_dir)} == {1, 2}


@pytest.mark.thorough
@pytest.mark.parametrize("resume", [True, False])
def test_a_disk_that_fills_before_the_first_checkpoint_does_not_block_the_runs_name(resume, tmp_path, monkeypatch):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    config = small_config(tmp_path / "broken", rounds=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        patch.setattr("wildflower.server_app.journal.Journal.finish", full)  # nor is there room for the summary
        with pytest.raises(OSError, match="No space left"):
            run(simulated_grid(), config)
    broken = run_folder(config)
    assert len(read_rounds(broken)) == 1
    run(simulated_grid(), small_config(tmp_path / "broken", rounds=2, resume=resume))
    whole = run(simulated_grid(), small_config(tmp_path / "whole", rounds=2))
    assert told(whole) == told(broken)
    assert same_bits(checkpoint.load(whole).state.tensors, checkpoint.load(broken).state.tensors)


# Before round 1


def nothing_happened(grid, folder):
    return grid.sent == [] and not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"task": "fashion-mnist", "data-dir": "/nowhere"}, FileNotFoundError, "/nowhere"),
        ({"task": "digits", "data-dir": "/nowhere"}, ValueError, "takes no data folder, got '/nowhere'"),
        ({"fleet": "digits-dmo"}, ValueError, "no fleet 'digits-dmo' comes with the project, .*digits-demo"),
        ({"fleet": "nowhere.toml"}, ValueError, "nowhere.toml: cannot read this fleet file"),
        ({"devices": 7}, ValueError, "counts of the groups add up to 6, and devices = 7"),
    ],
)
def test_what_is_not_there_stops_the_run(changes, error, words, tmp_path):
    grid = simulated_grid()
    with pytest.raises(error, match=words):
        run(grid, small_config(tmp_path, **changes))
    assert nothing_happened(grid, tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('memory = "-1 GB"', "memory = '-1 GB'"),
        ("memory = 4", "memory = 4"),
        ('memory = "1 GB"\nlink = "-5 Mbit/s"', "link = '-5 Mbit/s'"),
        ('memory = "1 GB"\nlink = 5', "link = 5"),
        ('memory = "1 GB"\nspeed = -1.0', "speed = -1.0"),
        ('memory = "1 GB"\nup_trace = "up.csv"', "up_trace = 'up.csv'"),
        ("fits_width = 1.5", "fits_width = 1.5"),
        ('memory = "1 GB"\nbattery = 3', "unknown key 'battery'"),
    ],
)
def test_a_fleet_file_with_impossible_values_stops_the_run(line, words, tmp_path):
    (tmp_path / "bad.toml").write_text(f'[[group]]\nname = "all"\ncount = 6\n{line}\n')
    grid = simulated_grid()
    with pytest.raises(ValueError) as error:
        run(grid, small_config(tmp_path, fleet=str(tmp_path / "bad.toml")))
    assert "bad.toml: group 'all'" in str(error.value)
    assert words in str(error.value)
    assert nothing_happened(grid, tmp_path)


def test_more_devices_per_round_than_there_are_stops_the_run(tmp_path):
    with pytest.raises(ConfigError, match="devices-per-round = 7: more than devices = 6"):
        small_config(tmp_path, devices_per_round=7)


@pytest.mark.thorough
@pytest.mark.parametrize("below", ["skip", "smallest"])
@pytest.mark.parametrize("method", ["heterofl", "all-small", "local", "federated-dropout"])
def test_a_budget_below_the_smallest_architecture(below, method, tmp_path):
    (tmp_path / "poor.toml").write_text(
        '[[group]]\nname = "poor"\ncount = 3\nmemory = "1 kB"\n[[group]]\nname = "rich"\ncount = 3\nmemory = "1 GB"\n'
    )
    keys = {"fleet": str(tmp_path / "poor.toml"), "below-smallest": below, "devices-per-round": 6, "rounds": 1}
    run_dir = run(simulated_grid(), small_config(tmp_path, **METHODS[method] | keys))
    lines = list(read_devices(run_dir))
    poor = [d for d in lines if d.tier == "poor"]
    smallest = [2, 4, 30, 21]  # a quarter of LeNet-5, rounded up
    if below == "skip":
        why = "skipped: no architecture of this strategy fits the budget"
        assert [(d.outcome, d.architecture) for d in poor] == [(why, None)] * 3
    else:
        assert [(d.outcome, d.architecture["widths"]) for d in poor] == [("trained", smallest)] * 3
    assert [d.outcome for d in lines if d.tier == "rich"] == ["trained"] * 3
    [record] = read_rounds(run_dir)
    assert record.devices_below_smallest == 3


def test_flower_hands_over_the_run_configuration(tmp_path):
    context = Context(1, 0, {}, RecordDict(), small_config(tmp_path, rounds=1).to_dict())
    app(simulated_grid(), context)
    assert read_summary(tmp_path / "runs" / "small").status == "finished"
    wrong = Context(1, 0, {}, RecordDict(), {"roundz": 3})
    with pytest.raises(ConfigError, match="unknown key 'roundz' = 3: did you mean 'rounds'"):
        app(simulated_grid(), wrong)


def test_a_run_without_a_name_gets_one(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1, run_name=""))
    assert run_dir.name.startswith("heterofl-digits-20")
    assert json.loads((run_dir / "config.json").read_text())["config"]["run-name"] == run_dir.name


def test_real_devices_run_through_the_same_rounds(tmp_path):
    config = small_config(tmp_path, fleet="", devices=3, devices_per_round=3, rounds=2, evaluate_every=1)
    run_dir = run(connected_grid(3, tmp_path), config)
    assert {d.outcome for d in read_devices(run_dir)} == {"trained"}
    assert {d.device: d.node for d in read_devices(run_dir)} == {0: 1, 1: 2, 2: 3}
    assert read_rounds(run_dir)[-1].score is not None


@pytest.mark.parametrize(
    ("method", "norm", "scaler"),
    [("heterofl", "static", True), ("all-large", "batch", False), ("fedrolex", "static", True)],
)
def test_the_family_is_built_as_the_method_wants_it(method, norm, scaler, tmp_path):
    built, _ = build(small_config(tmp_path, **METHODS[method]))
    family = built.method.family
    assert (family.norm, family.scaler) == (norm, scaler)
    assert (family.classes, family.input_shape) == (10, (1, 8, 8))


@pytest.mark.parametrize(("changes", "takes"), [({}, True), ({"dp.noise-multiplier": 1e-9, "dp.delta": 1e-3}, False)])
def test_static_norms_are_scored_with_statistics_of_devices_where_these_may_tell_them(changes, takes, tmp_path):
    keys = {"strategy": "fedavg", "family-arguments": "norm = 'static'", "rounds": 1, "evaluate-every": 1}
    model, _ = load_model(run(simulated_grid(), small_config(tmp_path, **keys | changes)))
    assert any(name.endswith("running_var") for name in model.state_dict()) == takes


def test_a_run_in_which_nobody_can_train_is_given_up_and_says_why(tmp_path):
    grid = simulated_grid(2)
    grid.broken = {1: 2, 2: 2}
    with pytest.raises(RuntimeError, match=r"3 rounds in a row .* the client raised an exception"):
        run(grid, small_config(tmp_path, rounds=9))
    summary = json.loads((tmp_path / "runs" / "small" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["rounds"] == 3


def poor_fleet(folder, lines='memory = "10 kB"'):
    path = folder / "poor.toml"
    path.write_text(f'[[group]]\nname = "poor"\ncount = 6\n{lines}\n')
    return {"fleet": str(path)}


SHARES = "smaller shares in model-search.shares = '0.25, 0.5, 1'"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "fleet", "changes", "words"),
    [
        (
            "heterofl",
            'memory = "10 kB"',
            {},
            r"12 skipped; the smallest model of heterofl over lenet5 needs [\d.]+ kB of memory and [\d.]+ kB of "
            r"weights down and [\d.]+ kB up, the largest budget seen was 8\.5 kB of memory and weights without "
            r"limit; try more memory in the fleet '.*poor\.toml', or a smaller width in widths = '1, 0\.5, 0\.25', or "
            r"a smaller batch-size than 16, or micro-batch-size = 8, or below-smallest = 'smallest'$",
        ),
        ("local", 'memory = "10 kB"', {}, r"try more memory .*, or a smaller width in widths = '1, 0\.5, 0\.25'"),
        (
            "fedrolex",
            'memory = "1 GB"\nlink = "8 kbit/s"',
            {"budget.transfer-seconds": 0.5},
            r"850 MB of memory and 500 B of weights down and 500 B up; try a larger "
            r"budget\.transfer-seconds than 0\.5, or a smaller width",
        ),
        (
            "exclusive",
            'memory = "10 kB"',
            {},
            r"or a smaller family or smaller family-arguments, or a smaller batch-size than 16, or micro-batch-size = 8"
            r"$",
        ),
        (
            "depthfl",
            'memory = "10 kB"',
            {},
            r"or a smaller family or smaller family-arguments, or a smaller batch-size",
        ),
        ("model-search", 'memory = "10 kB"', {}, "try more memory .*, or " + SHARES),
        (
            "heterofl",
            'memory = "1 GB"',
            {"deadline-seconds": 1e-6},
            "12 late; who is late misses deadline-seconds = 1e-06",
        ),
    ],
)
def test_a_run_in_which_nobody_trained_has_failed_and_says_what_would_help(method, fleet, changes, words, tmp_path):
    keys = METHODS[method] | {"rounds": 3, "evaluate-every": 3} | poor_fleet(tmp_path, fleet) | changes
    with pytest.raises(NoProgressError, match=f"no device trained in any of 3 rounds: .*{words}"):
        run(simulated_grid(), small_config(tmp_path, **keys))
    summary = read_summary(tmp_path / "runs" / "small")
    assert (summary.status, summary.rounds) == ("failed", 3)
    assert summary.error.startswith("no device trained")


def test_a_run_without_any_node_has_failed_and_says_so_in_words(tmp_path, monkeypatch):
    clock = FakeTime()
    for module in ("population", "connected_devices"):
        monkeypatch.setattr(f"wildflower.rounds.{module}.time", clock)
    with pytest.raises(NoNodesError):
        run(simulated_grid(nodes=0), small_config(tmp_path, fleet="", devices=3, devices_per_round=3))
    summary = read_summary(tmp_path / "runs" / "small")
    assert (summary.status, summary.rounds) == ("failed", 0)
    assert summary.error.startswith("no node has connected within 600 s: start nodes")


def test_no_link_is_too_slow_where_nothing_travels(tmp_path):
    keys = METHODS["local"] | {"rounds": 1, "evaluate-every": 1, "budget.transfer-seconds": 0.5}
    fleet = poor_fleet(tmp_path, 'memory = "1 GB"\nlink = "8 kbit/s"')
    run_dir = run(simulated_grid(), small_config(tmp_path, **keys, **fleet))
    [record] = read_rounds(run_dir)
    assert (record.devices_replied, record.training_bytes_down, record.training_bytes_up) == (4, 0, 0)


def test_a_log_warns_early_where_nobody_trains(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "flwr"), pytest.raises(NoProgressError):
        run(simulated_grid(), small_config(tmp_path, **poor_fleet(tmp_path), rounds=5, evaluate_every=5))
    assert [m for m in caplog.messages if "the first 3 rounds: 12 skipped; the smallest" in m]


def test_a_warning_names_a_model_in_few_words(tmp_path, caplog):
    keys = poor_fleet(tmp_path) | {"below-smallest": "smallest", "rounds": 1, "evaluate-every": 1}
    with caplog.at_level(logging.WARNING, "flwr"):
        run(simulated_grid(), small_config(tmp_path, **keys))
    takes = "so any device takes its batch norm statistics"
    assert f"Round 1: no device affords the whole lenet5, {takes}" in caplog.messages
    [smallest] = [m for m in caplog.messages if re.search(rf"affords the lenet5 of [\d,]+ parameters, {takes}", m)]
    assert len(smallest) < 150


def test_a_run_in_which_somebody_trained_once_has_finished(tmp_path, monkeypatch, caplog):
    """In the first round; then nobody has memory. A resumed run knows of it."""
    budget = asking.budget_in_round

    def soon_poor(device, population, settings):
        whole = budget(device, population, settings)
        return replace(whole, memory_bytes=0) if population.now_seconds else whole

    monkeypatch.setattr(asking, "budget_in_round", soon_poor)
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1))
    run(simulated_grid(), small_config(tmp_path, rounds=5, evaluate_every=9, resume=True))
    assert [record.devices_replied for record in read_rounds(run_dir)] == [4, 0, 0, 0, 0]
    assert read_summary(run_dir).status == "finished"
    assert "No device has trained" not in caplog.text


@pytest.mark.thorough
def test_a_tier_may_be_called_global(tmp_path):
    fleet = tmp_path / "named.toml"
    fleet.write_text(FLEET.replace('"quarter"', '"global"'))
    folders = {}
    for name, path in (("plain", None), ("named", fleet)):
        changes = {} if path is None else {"fleet": str(path)}
        (tmp_path / name).mkdir()
        config = small_config(tmp_path / name, rounds=4, **changes)
        folders[name] = run(simulated_grid(2), config)
    records = {n: json.loads((f / "rounds.jsonl").read_text().splitlines()[-1]) for n, f in folders.items()}
    assert records["named"]["score"] == records["plain"]["score"]
    assert records["named"]["score_by_tier"]["global"] == records["plain"]["score_by_tier"]["quarter"]


def test_keys_of_other_methods_are_named(tmp_path, caplog):
    keys = {"rounds": 1, "fedprox.mu": 0.3, "distillation.batch-size": 4, "model-search.shares": "1, 0.5"}
    with caplog.at_level(logging.WARNING, "flwr"):
        run(simulated_grid(), small_config(tmp_path, **keys, run_name="told"))
    assert (
        "Keys of other methods, which strategy = 'heterofl' does not read: fedprox.mu = 0.3, "
        "model-search.shares = '1, 0.5', distillation.batch-size = 4"
    ) in caplog.text


@pytest.mark.parametrize(("groups", "good"), [((2, 4), True), ((1, 5), False), ((6,), True)])
def test_the_fleets_first_group_are_the_strong_devices(groups, good, tmp_path):
    fleet = tmp_path / "counted.toml"
    text = '[[group]]\nname = "group{}"\ncount = {}\nmemory = "1 GB"\nlink = "1 Mbit/s"\n'
    fleet.write_text("\n".join(text.format(number, count) for number, count in enumerate(groups)))
    changes = {"fleet": str(fleet), "partition": "strong-and-weak", "strong.devices": 2, "examples-per-device": 0}
    refusal = pytest.raises(ConfigError, match=r"strong\.devices = 2: the fleet's first group, 'group0', has 1 devices")
    with nullcontext() if good else refusal:
        build(small_config(tmp_path, **changes))
