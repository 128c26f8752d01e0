"""The page that `deploy/board-test` writes of a board, for one small training."""

import runpy
import time

import pytest

from tests.client_app.work_orders import LENET
from tests.deploy.test_scripts import DEPLOY
from wildflower.devices.resource_report import DeviceReport

REPORT = DeviceReport("raspberry-pi-4", memory_total_bytes=4 * 10**9, memory_available_bytes=3 * 10**9)


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(DEPLOY / "board-test"))


@pytest.mark.thorough
def test_a_training_has_its_memory_predicted_and_measured(program):
    case = {
        "family": LENET.spec(),
        "size": "half of its width",
        "architecture": LENET.width(0.5).to_json(),
        "batch_size": 8192,  # a few MB of other memory are small beside what it takes
        "optimizer": "sgd",
    }
    size, predicted, measured, seconds, speed = program["training_row"](case)
    assert size == case["size"]
    assert float(predicted.split()[0]) == pytest.approx(float(measured.split()[0]), rel=0.25)
    assert float(seconds.split()[0]) > 0
    assert speed.endswith("GFLOP/s")


def test_the_page_goes_on_where_something_fails_and_when_time_is_over(program, tmp_path):
    def fails(*_):
        raise OSError("no space left")

    page = program["page"]
    page.__globals__.update(
        disk_rows=fails, training_row=lambda case: [case["size"], "1 MB", "2 MB", "3 s", "4 GFLOP/s"]
    )
    lines = "\n".join(page(REPORT, tmp_path, time.monotonic() + 60))
    assert lines.startswith("# Board test: raspberry-pi-4\n")
    assert "It failed: OSError: no space left" in lines
    assert lines.count("| 1 MB | 2 MB | 3 s | 4 GFLOP/s |") == 3
    assert "| hypemefed-testbed | 4 GB | 11.8 GFLOP/s |" in lines  # a fifth of 59
    assert "Not measured: the 15 minutes were over." in "\n".join(page(REPORT, tmp_path, time.monotonic() - 1))
