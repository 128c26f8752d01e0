"""The plan says beforehand what a run would do, and what to change."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.small_run import METHODS, by_method, simulated_grid, small_config
from wildflower.cli import plan as plans
from wildflower.cli.command import app
from wildflower.cli.plan import PlanError, make_plan, plan_tables
from wildflower.devices.resource_report import DeviceReport
from wildflower.launch.experiment_file import resolve
from wildflower.plugins.beside import looked_for_beside
from wildflower.rounds.population import NodeState
from wildflower.server_app.app import build, run
from wildflower.server_app.journal import Journal
from wildflower.server_app.node_records import write_nodes
from wildflower.server_app.run_folder import read_devices

UNEQUAL = """
reference = "1 GFLOP/s"

[[group]]
name = "quick"
count = 2
memory = "1 GB"
link = "8 Mbit/s"
speed = 1.0

[[group]]
name = "slow"
count = 3
memory = "1 GB"
link = "8 Mbit/s"
speed = 0.05

[[group]]
name = "tiny"
count = 1
training_memory = "1 kB"
"""


def unequal(tmp_path, **changes):
    fleet = tmp_path / "unequal.toml"
    fleet.write_text(UNEQUAL)
    return small_config(tmp_path, **{"fleet": str(fleet), "examples-per-device": 30} | changes)


def tiers(plan):
    return {device.tier: device for device in plan.devices}


def test_figures_are_those_worked_out_by_hand(tmp_path):
    config = unequal(tmp_path, **{"local-steps": 0, "local-epochs": 2})
    plan = make_plan(config)
    whole = build(config)[0].method
    price = whole.cost(whole.scored_architecture)
    quick, slow = tiers(plan)["quick"], tiers(plan)["slow"]
    assert quick.parameters == slow.parameters == price.parameters == plan.whole_parameters
    # 30 examples, twice, at 1 GFLOP/s; 8 Mbit/s are a million bytes per second.
    assert quick.training_seconds == pytest.approx(60 * price.training_flops / 1e9)
    assert slow.training_seconds == pytest.approx(20 * quick.training_seconds)
    assert quick.download_seconds == pytest.approx(quick.bytes_down / 1e6)
    assert (quick.memory_bytes, quick.needed_memory_bytes) == (850_000_000, price.peak_training_memory_bytes)
    assert quick.binds == slow.binds == ()
    assert plan.counts == {"quick": 2, "slow": 3, "tiny": 1}


def test_the_demo_has_heterofls_five_widths():
    """Of the demo's network: 1, 1/2, 1/4, 1/8 and 1/16."""
    plan = make_plan(resolve(Path(__file__).parents[2] / "benchmarks/demo/digits.toml", []).config)
    sizes = {"full": 94_410, "half": 24_170, "quarter": 6_330, "eighth": 1_730, "sixteenth": 510}
    assert {tier: device.parameters for tier, device in tiers(plan).items()} == sizes


def test_a_device_below_the_smallest_is_told_with_a_remedy(tmp_path):
    plan = make_plan(unequal(tmp_path))
    tiny = tiers(plan)["tiny"]
    assert (tiny.parameters, tiny.binds) == (0, ("memory",))
    assert plan.left_out == [tiny]
    [told] = [text for text in plan.warnings if "tiny" in text]
    assert told.startswith("The device of tier tiny gets no model: ")
    assert "Try a smaller width in widths = '1, 0.5, 0.25', or" in told


def test_time_binds_and_the_slow_get_less(tmp_path):
    free = tiers(make_plan(unequal(tmp_path, **{"local-steps": 0})))
    assert free["slow"].seconds > free["quick"].seconds
    limit = round(free["quick"].seconds * 1.05, 6)
    plan = make_plan(unequal(tmp_path, **{"local-steps": 0, "budget.round-seconds": limit}))
    bound = tiers(plan)
    assert bound["quick"] == free["quick"]
    assert 0 < bound["slow"].parameters < free["slow"].parameters
    assert bound["slow"].binds == ("time",)
    assert bound["slow"].seconds <= limit
    assert not any("A round waits" in text for text in plan.warnings)


def test_too_short_a_time_leaves_devices_out(tmp_path):
    plan = make_plan(unequal(tmp_path, **{"budget.round-seconds": 1e-6}))
    assert len(plan.left_out) == 6
    assert any("a larger budget.round-seconds than 1e-06" in text for text in plan.warnings)


def test_the_run_does_what_the_plan_says(tmp_path):
    config = unequal(tmp_path, **{"budget.round-seconds": 0.05, "local-steps": 2, "rounds": 3})
    planned = {device.device: device for device in make_plan(config).devices}
    assert len({device.parameters for device in planned.values()}) == 3
    for record in read_devices(run(simulated_grid(), config)):
        device = planned[record.device]
        assert (record.parameters or 0) == device.parameters
        if record.parameters:
            assert record.simulated_seconds == pytest.approx(device.seconds)
            assert record.simulated_seconds <= 0.05
            assert record.predicted_memory_bytes == device.needed_memory_bytes


@by_method()
def test_every_method_has_a_plan(method, tmp_path):
    plan = make_plan(small_config(tmp_path, **METHODS[method]))
    assert list(plan.counts) == ["whole", "half", "quarter"]
    assert len(plan.devices) == 6
    assert json.loads(json.dumps(plan.to_json()))["method"]


def test_what_is_whole_is_the_largest_model_also_where_another_one_travels(tmp_path):
    plan = make_plan(small_config(tmp_path, strategy="rafl"))
    shares = {device.tier: device.parameters / plan.whole_parameters for device in plan.devices}
    assert 0.9 < shares["whole"] <= 1
    assert shares["quarter"] < shares["half"] < shares["whole"]
    assert not any("has no other" in text for text in plan.warnings)


def test_a_link_that_carries_nothing_never_ends_a_round(tmp_path):
    (tmp_path / "still.csv").write_text("seconds,mbit_per_s\n" + "".join(f"{second},0\n" for second in range(9)))
    traces = 'down_trace = "still.csv"\nup_trace = "still.csv"\nspeed = 1.0'
    still = UNEQUAL.replace('link = "8 Mbit/s"\nspeed = 0.05', traces)
    (tmp_path / "still.toml").write_text(still)
    keys = {"fleet": str(tmp_path / "still.toml"), "below-smallest": "smallest", "budget.transfer-seconds": 1.0}
    plan = make_plan(small_config(tmp_path, **keys))
    assert math.isinf(tiers(plan)["slow"].seconds)
    assert any("Tier slow has devices with a link that carries nothing now" in text for text in plan.warnings)
    cells = [str(cell) for column in plan_tables(plan, by_node=False)[1].columns for cell in column.cells]
    assert cells.count("never") == 3
    assert "Infinity" not in json.dumps(plan.to_json())


def test_all_alike_is_told(tmp_path):
    rich = UNEQUAL.partition('[[group]]\nname = "tiny"')[0].replace("speed = 0.05", "speed = 0.9")
    fleet = tmp_path / "rich.toml"
    fleet.write_text(rich)
    keys = {"fleet": str(fleet), "devices": 5, "examples-per-device": 30}
    [told] = make_plan(small_config(tmp_path, **keys)).warnings
    assert "All devices get the same one" in told
    assert "nothing limits them" in told
    [told] = make_plan(small_config(tmp_path, **keys, strategy="fedavg")).warnings
    told_fedavg = "strategy = 'fedavg' has no other with these settings. Try strategy = 'wildflower', or a family"
    assert told_fedavg in told
    [told] = make_plan(small_config(tmp_path, **keys, strategy="fedavg", widths=1)).warnings
    assert told_fedavg in told
    [told] = make_plan(small_config(tmp_path, **keys, widths=1)).warnings
    assert told.endswith("strategy = 'heterofl' has no other with these settings. Try more widths than widths = '1'.")
    assert make_plan(small_config(tmp_path, **keys, strategy="one-model")).warnings == []  # it is meant to


def test_a_round_waits_for_a_few_slow_devices_and_not_for_most_of_them(tmp_path):
    """One quick device of 24 is no reason to hold the other 23 back; one slow one is, but not over milliseconds."""
    for slow, speed, waits in ((23, 0.001, False), (1, 0.001, True), (1, 0.1, False)):
        fleet = tmp_path / f"{slow}.toml"
        groups = "".join(
            f'[[group]]\nname = "{name}"\ncount = {count}\nmemory = "1 GB"\nspeed = {speed}\n'
            for name, count, speed in (("slow", slow, speed), ("quick", 24 - slow, 1.0))
        )
        fleet.write_text(groups)
        keys = {"fleet": str(fleet), "devices": 24, "examples_per_device": 30}
        told = make_plan(small_config(tmp_path, **keys, strategy="fedavg")).warnings
        assert any("A round waits for tier slow" in text for text in told) == waits


@pytest.mark.parametrize(
    ("settings", "exceeds", "words"),
    [
        # This LeNet-5 has 21,430 parameters, 85.7 kB: 0.086 s of a link of 8 Mbit/s.
        ({"budget.transfer-seconds": 0.05}, ("link",), " kB up are more than its link may carry. strategy"),
        (
            {"budget.round-seconds": 0.1},
            ("time",),
            "where budget.round-seconds = 0.1. strategy = 'fedavg' with below-smallest",
        ),
        ({"budget.memory-fraction": 0.0005}, ("memory",), "of memory where 500 kB may be used. strategy"),
        (
            {"budget.memory-fraction": 0.0005, "budget.transfer-seconds": 0.05},
            ("memory", "link"),
            "of memory where 500 kB may be used, and 85.",
        ),
        ({"budget.transfer-seconds": 0.2, "budget.round-seconds": 3600}, (), None),
    ],
)
def test_a_model_beyond_any_limit_is_told(settings, exceeds, words, tmp_path):
    plan = make_plan(unequal(tmp_path, **{"strategy": "fedavg", "fedavg.use": "all-large", **settings}))
    quick = tiers(plan)["quick"]
    assert quick.exceeds == exceeds
    told = [text for text in plan.warnings if text.startswith("Tier quick gets a model beyond its budget: ")]
    assert [words in text for text in told] == ([True] if exceeds else [])


def test_keys_that_nothing_reads_are_told(tmp_path):
    first, *_ = make_plan(unequal(tmp_path, **{"schedule.decay-factor": 0.5})).warnings
    assert first == "Keys that this run does not read: schedule.decay-factor = 0.5 (read with schedule.decay-rounds)"


LEVELS = """
from torch import nn

def net(classes, hidden):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes))
"""


def test_widths_are_not_advised_where_a_family_names_its_own_candidates(tmp_path):
    (tmp_path / "plan_levels.py").write_text(LEVELS)
    # From 10 kB of memory to 1 MB no level changes: both tiers below can train the smaller one and not the larger one.
    narrow = UNEQUAL.replace('memory = "1 GB"', 'training_memory = "1 MB"')
    (tmp_path / "narrow.toml").write_text(narrow)
    keys = {
        "fleet": str(tmp_path / "narrow.toml"),
        "family": "plan_levels:net",
        "family-arguments": "levels = [{hidden = 8}, {hidden = 100000}]",
    }
    with looked_for_beside(tmp_path):
        plan = make_plan(small_config(tmp_path, **keys))
    assert sum("in widths" in text for text in plan.warnings) == 0
    [told] = [text for text in plan.warnings if "tier tiny" in text]
    assert "Try a smaller family or smaller family-arguments, or a smaller batch-size" in told
    [told] = [text for text in plan.warnings if "get the same one" in text]
    assert told.endswith(
        "try more models between the smallest and the largest, such as levels or depths in family-arguments, or the "
        "method's own keys."
    )


def test_one_device_gets_and_several_get(tmp_path):
    several = UNEQUAL.replace("count = 2", "count = 1").replace("count = 1\ntraining", "count = 2\ntraining")
    (tmp_path / "several.toml").write_text(several)
    plan = make_plan(small_config(tmp_path, fleet=str(tmp_path / "several.toml")))
    assert any(text.startswith("2 of 2 devices of tier tiny get no model: ") for text in plan.warnings)


def nodes_json(folder: Path):
    folder.mkdir()
    slow = DeviceReport("pi", 2 * 10**9, 10**9, down_mbit_per_s=8.0, up_mbit_per_s=4.0, flop_per_s=1e8)
    unknown = DeviceReport("laptop", 8 * 10**9, 4 * 10**9)
    write_nodes(folder, [NodeState(7, 0, slow, 100.0, 1.0), NodeState(9, 3, unknown, 5.0, 0.5)])
    return folder


def test_nodes_of_a_run_are_planned_by_their_last_reports(tmp_path):
    config, run_dir = small_config(tmp_path, fleet=""), nodes_json(tmp_path / "earlier")
    plan = make_plan(config, run_dir)
    pi, laptop = plan.devices
    assert (pi.device, pi.tier, laptop.device, laptop.tier) == (0, "pi", 3, "laptop")
    assert pi.upload_seconds == pytest.approx(pi.bytes_up * 8 / 4e6)
    assert (laptop.download_seconds, laptop.training_seconds, laptop.seconds) == (None, None, 0.0)
    # Half of 85 % of what is free, less the message.
    assert 0.4 * 4e9 < laptop.memory_bytes < 0.425 * 4e9
    with pytest.raises(PlanError, match="set devices = 4 or more"):
        make_plan(small_config(tmp_path, fleet="", devices=2, devices_per_round=2), run_dir)
    with pytest.raises(PlanError, match="name a run whose nodes have reported"):
        make_plan(config)


# The command


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "80"})


def test_without_an_experiment_a_run_is_planned_with_its_own_settings(tmp_path):
    config = small_config(tmp_path, fleet="", family="lenet5")
    run_dir = nodes_json(tmp_path / "earlier")
    Journal.open(run_dir, config.to_dict(), resume=False)
    shown = invoke("--run", run_dir, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["devices"] == make_plan(config, run_dir).to_json()["devices"]
    larger = invoke("--run", run_dir, "--json", "--set", "batch-size=500")
    needed = [json.loads(one.stdout)["devices"][1]["needed_memory_bytes"] for one in (shown, larger)]
    assert needed[1] > 2 * needed[0]


def test_the_command_reads_in_80_columns_and_says_by_its_code_who_gets_none(tmp_path):
    shown = invoke()
    assert shown.exit_code == 0, shown.output
    assert all(len(line) <= 80 for line in shown.output.splitlines())
    for word in ("5 sixteenth", "94,410", "memory, link", "training"):
        assert word in shown.output
    fleet = tmp_path / "unequal.toml"
    fleet.write_text(UNEQUAL)
    options = ("--set", f"fleet={fleet}", "--set", "devices=6", "--set", "devices-per-round=4")
    shown = invoke(*options, "--json")
    assert shown.exit_code == 3
    value = json.loads(shown.stdout)
    assert [device["parameters"] for device in value["devices"] if device["tier"] == "tiny"] == [0]
    assert value["counts"] == {"quick": 2, "slow": 3, "tiny": 1}


def test_ranges_within_a_tier_leave_names_and_headers_whole_in_80_columns(tmp_path):
    fleet = tmp_path / "fleet.toml"
    group = '[[group]]\nname = "workstation"\ncount = 30\ntraining_memory = {uniform = ["1 MB", "3 MB"]}\n'
    fleet.write_text(group + group.replace("workstation", "phone").replace("30", "9"))
    shown = invoke("--set", f"fleet={fleet}", "--set", "devices=39")
    assert shown.exit_code == 0, shown.output
    for words in ("30 workstation ", " parameters ", " MB memory ", " MB budget ", " to \n"):
        assert words in shown.output


def test_what_is_wrong_is_said(tmp_path):
    shown = invoke("--set", "fleet=")
    assert (shown.exit_code, "--run RUN_DIR" in shown.stderr) == (1, True)
    shown = invoke("--run", tmp_path)
    assert (shown.exit_code, "is not the folder of a run" in shown.stderr) == (1, True)
    shown = invoke("--set", "stratgy=fedavg")
    assert (shown.exit_code, "did you mean" in shown.stderr) == (1, True)


def test_large_figures_are_plain_numbers():
    assert [plans._plain(value) for value in (0.9941, 2.849, 1700.4, 14_600.0)] == ["0.994", "2.85", "1,700", "14,600"]
    assert plans._plain(123.4, digits=2) == "123"
