"""Devices and workers that train on a GPU. Not part of `make test`: `make test-gpu` names this file, where CUDA is.

`make test-gpu` also forbids TF32, which rounds the inputs of convolutions. Whether a GPU computes the same bits twice
depends on its kernels, so that runs are compared within a tolerance.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.small_run import METHODS as ALL_METHODS
from tests.small_run import simulated_grid, small_config, started
from wildflower.client_app.memory import SEGMENTS_BYTES, MemoryMeter, is_out_of_memory, memory_limit
from wildflower.client_app.work import compute_device

MB = 2**20
ROOT = Path(__file__).parents[1]
ROUNDS = 3
METHODS = ("heterofl", "scaffold", "wildflower")


def digits(folder: Path, method: str, *, workers: int, gpus: bool) -> tuple[dict[str, torch.Tensor], dict]:
    """The final tensors and the summary of a short run over twenty unequal devices."""
    settings = (f"strategy={method}", f"rounds={ROUNDS}", f"workers={workers}", f"output-dir={folder}", "run-name=run")
    command = [sys.executable, "-m", "wildflower", "run", str(ROOT / "benchmarks/demo/digits.toml")]
    environment = os.environ if gpus else os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *(part for setting in settings for part in ("--set", setting))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "run"
    return load_file(run / f"checkpoint/round-{ROUNDS}/state.safetensors"), json.loads(
        (run / "summary.json").read_text()
    )


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    """These tests say nothing on another machine, and so do not pass there."""
    assert torch.cuda.is_available(), "PyTorch sees no GPU here: these tests need one"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_on_a_gpu_learn_what_they_learn_on_processors(method: str, workers: int, tmp_path: Path) -> None:
    with_gpus, summary = digits(tmp_path / "gpus", method, workers=workers, gpus=True)
    without, on_processors = digits(tmp_path / "processors", method, workers=workers, gpus=False)
    assert with_gpus.keys() == without.keys()
    assert any(not torch.equal(with_gpus[name], without[name]) for name in without), "the GPU has computed nothing"
    for name, tensor in without.items():
        # A dozen steps per device and round multiply what is rounded otherwise: single weights are 0.004 apart.
        assert (with_gpus[name] - tensor).norm() <= 0.05 * tensor.norm() + 1e-3, name
    assert summary["devices_by_outcome"] == on_processors["devices_by_outcome"]
    assert summary["final_score"] == pytest.approx(on_processors["final_score"], abs=0.02)


def final_state(folder: Path, settings: dict) -> dict[str, torch.Tensor]:
    """The tensors that a method keeps after two rounds of six devices; no training has failed."""
    folder.mkdir()
    engine, scorer = started(small_config(folder, **settings | {"rounds": 2, "evaluate-every": 2}))
    grid = simulated_grid()
    for number in (1, 2):
        outcomes = [device["outcome"] for device in engine.run_round(grid, number, scorer).devices]
        assert "trained" in outcomes
        assert not any(outcome.startswith("failed") for outcome in outcomes), outcomes
    return engine.method.state().tensors


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_learns_on_a_gpu_what_it_learns_on_a_processor(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what runs on the server: ensembles, hypernetworks, distillation. A method without a state is only run.

    Dropout is off, because a GPU draws other random numbers.
    """
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda inputs, *_: inputs)
    on_gpu = final_state(tmp_path / "gpu", ALL_METHODS[method])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_processor = final_state(tmp_path / "processor", ALL_METHODS[method])
    assert on_gpu.keys() == on_processor.keys()
    for name, tensor in on_processor.items():
        assert on_gpu[name].device.type == "cpu", name
        torch.testing.assert_close(on_gpu[name], tensor, rtol=2e-2, atol=2e-3, msg=lambda said: f"{name}: {said}")


def test_memory_of_the_gpu_is_measured_and_limited() -> None:
    device = compute_device()
    assert device.type == "cuda"
    meter = MemoryMeter(device)
    held = torch.empty(64 * MB, dtype=torch.uint8, device=device)
    assert meter.now_bytes() == pytest.approx(64 * MB, abs=4 * MB)
    del held
    assert meter.now_bytes() < 4 * MB
    assert meter.peak_bytes() == pytest.approx(64 * MB, abs=4 * MB)
    torch.cuda.empty_cache()
    beyond = 256 * MB + SEGMENTS_BYTES + 64 * MB
    with memory_limit(256 * MB, device):
        torch.empty(192 * MB, dtype=torch.uint8, device=device)
        with pytest.raises(RuntimeError) as caught:
            torch.empty(beyond, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    assert torch.empty(beyond, dtype=torch.uint8, device=device).numel() == beyond


def test_a_machine_reports_its_gpu() -> None:
    done = subprocess.run([sys.executable, "-m", "wildflower", "probe"], capture_output=True, text=True, check=True)
    name = torch.cuda.get_device_name()
    assert name in done.stdout, done.stdout
    assert "GFLOP/s" in done.stdout
