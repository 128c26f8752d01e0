"""The page of `wildflower check`, and that a run takes the same steps."""

import shutil
from collections import namedtuple
from datetime import datetime

import pytest
from typer.testing import CliRunner

from tests.own_folders import digits_of_devices, image_folder
from tests.small_run import METHODS, by_method, simulated_grid, small_config
from wildflower.cli.check import check
from wildflower.cli.command import app
from wildflower.launch.experiment_file import place, resolve
from wildflower.server_app.app import run
from wildflower.server_app.inputs import run_folder

FLEET = """
[[group]]
name = "whole"
count = 2
memory = "1 GB"

[[group]]
name = "small"
count = 2
training_memory = "1.2 MB"
"""

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes, width=4):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, classes)

    def forward(self, images):
        return self.head(torch.relu(self.norm(self.stem(images.flatten(1)))))
"""


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Type `wildflower check experiment.toml` with some settings in a folder of its own; -> exit code and page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "four.toml").write_text(FLEET)
    (tmp_path / "experiment.toml").write_text(
        'task = "digits"\nfamily = "cnn3"\nfleet = "four.toml"\ndevices = 4\ndevices-per-round = 2\nrounds = 2\n'
    )

    def check(*settings: str) -> tuple[int, str]:
        words = [word for setting in settings for word in ("--set", setting)]
        done = CliRunner().invoke(app, ["check", "experiment.toml", *words], env={"COLUMNS": "120"})
        return done.exit_code, " ".join(done.output.split())

    return check


def test_a_good_run_shows_data_model_and_devices(typed, tmp_path):
    code, page = typed()
    assert (code, page[-18:]) == (0, "The run can begin.")
    for part in (
        "heterofl on digits, 2 rounds, 2 of 4 devices per round, seed 1",
        f"will write to {tmp_path}/runs/heterofl-digits-",
        "1,438 examples to train on, 359 to test on, inputs 1x8x8",
        "│ 0 │ 142 │ 36 │",
        "cnn3, 94,410 parameters as a whole",
        "2 whole 94,410 100%",
    ):
        assert part in page
    assert not (tmp_path / "runs").exists()


def test_all_that_is_wrong_is_listed_at_once(typed, tmp_path):
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "rounds.jsonl").write_text("a round\n")
    code, page = typed("run-name=taken", "family-arguments=kernel = 50")
    assert code == 1
    assert f"Error: {tmp_path}/runs/taken" in page
    assert "Error: family = 'cnn3' with family-arguments = 'kernel = 50'" in page
    assert "1,438 examples to train on" in page
    assert "The run cannot begin: 2 errors." in page


def test_what_does_not_depend_on_each_other_is_wrong_at_once(typed):
    code, page = typed("run-name=a", "resume=true", "engine=nodes", "fleet=none.toml", "tracker=wandb")
    assert code == 1
    assert "Error: " in page
    assert "holds no run to resume" in page
    assert "none.toml: cannot read this fleet file" in page


def test_a_run_is_not_resumed_with_another_fleet(typed, tmp_path):
    run_dir = tmp_path / "runs" / "begun"
    config, _ = place(resolve(tmp_path / "experiment.toml", ["run-name=begun"]).config, tmp_path, datetime.now())
    run(simulated_grid(), config)
    assert typed("run-name=begun", "resume=true")[0] == 0
    (tmp_path / "four.toml").write_text(FLEET.replace("1.2 MB", "1.3 MB"))
    code, page = typed("run-name=begun", "resume=true")
    assert code == 1
    assert f"the run in {run_dir} cannot be resumed: the fleet file" in page


def test_a_module_of_ones_own_is_tried_and_its_levels_and_buffers_are_shown(typed, tmp_path):
    (tmp_path / "own_checked.py").write_text(MODULE)
    levels = "family-arguments=levels = [{width = 4}, {width = 8}]"
    code, page = typed("family=own_checked:Net", levels, "strategy=fedavg", "batch-size=16")
    assert code == 0, page
    for part in (
        "own_checked:Net, 626 parameters as a whole",
        "2 levels, each a part of the next, of 318 to 626 parameters",
        "buffers that travel and are averaged: norm.running_mean, norm.running_var",
        "Tried 2 networks of the family: in evaluation mode on batches of 1, 2,",
    ):
        assert part in page
    code, page = typed("family=own_checked:Net", levels, "strategy=wildflower")
    assert "buffers" not in page


def test_a_module_that_the_trial_refuses_is_one_error(typed, tmp_path):
    (tmp_path / "own_refused.py").write_text(MODULE.replace("return self", "return [] if not self.training else self"))
    code, page = typed("family=own_refused:Net")
    assert code == 1
    assert page.count("own_refused:Net answers with 0 tensors in a tuple, dict or the like") == 1
    assert "1,438 examples to train on" in page
    assert page.endswith("The run cannot begin: 1 error.")


def test_a_setting_that_cannot_be_is_one_line(typed):
    code, page = typed("learning-rate=-1")
    assert code == 1
    assert "learning-rate" in page
    assert "Traceback" not in page


def test_what_is_left_out_of_folders_is_shown_by_device(typed, tmp_path):
    for device, (inputs, labels) in enumerate(digits_of_devices(4)):
        image_folder(tmp_path / "data" / "devices" / f"{device:04}", inputs, labels)
    (tmp_path / "data" / "devices" / "0002" / "3" / "holiday.heic").write_bytes(b"photo")
    code, page = typed("task=images", "partition=own", "data-dir=data", "test-fraction=0.3")
    assert code == 0, page
    assert page.count("Warning: Data of device 2: ") == page.count("holiday.heic") == 1
    own = ("task=images", "partition=own", "data-dir=data", "test-fraction=0.3")
    _, page = typed(*own, "family-arguments=kernel = 50")
    assert page.count("holiday.heic") == 1


def test_the_folder_of_devices_in_place_of_the_one_above_is_told_once(typed, tmp_path):
    for device, (inputs, labels) in enumerate(digits_of_devices(4)):
        image_folder(tmp_path / "data" / "devices" / f"{device:04}", inputs, labels)
    code, page = typed("task=images", "partition=own", "data-dir=data/devices", "test-fraction=0.3")
    assert code == 1
    assert f"is data-dir = '{tmp_path / 'data'}' meant?" in page
    assert "The run cannot begin: 1 error." in page


def test_own_data_without_a_fleet_are_those_of_real_devices(typed):
    code, page = typed("task=images", "partition=own", "fleet=", "test-fraction=0.3")
    assert code == 0, page
    assert "real ones, which `wildflower run` reaches with --superlink" in page


def test_a_device_whose_folder_is_unfit_is_named_with_the_reason(typed, tmp_path):
    for device, (inputs, labels) in enumerate(digits_of_devices(3)):
        image_folder(tmp_path / "data" / "devices" / f"{device:04}", inputs, labels)
    code, page = typed("task=images", "partition=own", "data-dir=data", "test-fraction=0.3")
    assert code == 0
    assert "0003" in page.partition("│ 3 │")[2]


def test_a_full_disk_is_told_by_the_page_and_by_the_run(typed, tmp_path, monkeypatch):
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 10**5))
    code, page = typed()
    assert code == 0
    assert "has 100 kB free, and the run's checkpoints and models take about 1.89 MB" in page


def test_groups_too_small_for_a_secure_sum_are_told(typed):
    secure = ("secure-aggregation.minimum=3", "devices-per-round=4", "strategy=fedavg")
    static = "family-arguments=norm = 'static'"
    _, page = typed(*secure, static)
    assert "secure-aggregation.minimum" not in page
    _, page = typed(*secure, static, "fedavg.use=affordable")
    assert "secure-aggregation.minimum = 3: only 2 devices can get the model of 94,410 parameters" in page


def test_sums_of_a_single_block_are_warned_of_where_devices_are_real(typed):
    secure = ("strategy=fedavg", "family=mlp", "devices=20", "secure-aggregation.minimum=5")
    code, page = typed(*secure, "fleet=", "devices-per-round=9")
    assert code == 0
    assert (
        "secure-aggregation.minimum = 5 with devices-per-round = 9: the devices of a round are a single block." in page
    )
    _, page = typed(*secure, "fleet=", "devices-per-round=10")
    assert "a single block" not in page


def test_devices_without_a_model_are_warned_of(typed, tmp_path):
    (tmp_path / "four.toml").write_text(FLEET.replace("1.2 MB", "0.1 MB"))
    code, page = typed()
    assert code == 0
    assert "Warning: " in page
    assert "small" in page.partition("Warning: ")[2]


def test_counts_that_are_the_same_of_all_devices_are_one_number(typed):
    _, page = typed("partition=iid", "devices-per-round=2")
    assert "devices hold 359 to 360 examples to train on" in page
    assert ", of 10 of the 10 classes" in page


def test_real_devices_are_left_to_be_asked(typed):
    code, page = typed("fleet=", "run-name=real")
    assert code == 0
    assert "Devices are asked when they connect" in page


def test_what_a_private_run_costs_is_shown(typed):
    _, page = typed("strategy=fedavg", "dp.noise-multiplier=1.0", "family-arguments=norm = 'static'")
    assert "Privacy the run costs epsilon" in page
    assert "with delta 1e-05" in page


@by_method()
def test_every_method_has_a_page(method, tmp_path):
    config = small_config(tmp_path, **METHODS[method])
    page = check(config, run_folder(config), 100)
    assert page.problems == []
    assert [title for title, _ in page.sections][:4] == ["Run", "Data", "Model", "Devices"]
