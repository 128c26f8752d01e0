"""Devices and workers that train on a GPU. Not part of `make test`: `make test-gpu` names this file, where CUDA is.

`make test-gpu` also forbids TF32, which rounds the inputs of convolutions. Whether a GPU computes the same bits twice
depends on its kernels, so that runs are compared within a tolerance.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.client_app.test_captured_step import CASES, fits_of, results
from tests.small_run import METHODS as ALL_METHODS
from tests.small_run import same_bits, simulated_grid, small_config, started
from wildflower.client_app import captured_step
from wildflower.client_app.captured_step import CapturedStep, fit_in_turn
from wildflower.client_app.memory import SEGMENTS_BYTES, MemoryMeter, is_out_of_memory, memory_limit
from wildflower.client_app.prepared import compute_device
from wildflower.plugins import flower_log
from wildflower.strategies.shared_losses import PureLoss

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


# Captured steps


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits can be compared where the GPU comes to the same ones twice; nothing has been captured."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(captured_step, "_kinds", {})
    monkeypatch.setattr(captured_step, "CAPTURES", dict(captured_step.CAPTURES))
    monkeypatch.setattr(flower_log, "_told", set())


def both_ways(case: str, **more: object) -> list[object]:
    """Trainings of a case with captured steps, whose bits are those without; and what became of their kinds."""
    family, training, settings = CASES[case]

    def make() -> object:
        return fits_of(family, training, device=compute_device(), **settings | more)

    wanted, found = results(make(), lambda fit: fit.alone()), results(make(), fit_in_turn)
    for (one, tensors), (other, others) in zip(wanted, found, strict=True):
        assert one == other
        assert same_bits(tensors, others)
    return list(captured_step._kinds.values())


@pytest.mark.parametrize("case", CASES)
def test_captured_steps_have_the_same_bits(case: str, deterministic: None) -> None:
    [step] = both_ways(case)
    assert isinstance(step, CapturedStep), step


def waits(task: object, model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that asks the GPU for a number."""
    value = task.loss(model(inputs), labels)
    return value if value.item() > 0 else 2 * value


def test_a_loss_that_waits_for_the_gpu_is_not_captured_and_others_are(deterministic: None) -> None:
    [why] = both_ways("momentum", loss=lambda task, model: PureLoss(task, model, waits))
    assert isinstance(why, str)
    assert "synchroniz" in why
    _, step = both_ways("momentum", kind="another")
    assert isinstance(step, CapturedStep), step


def test_after_a_capture_that_fails_midway_the_gpu_trains_and_draws(
    deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)  # so that the wait is met by the capture
    here = torch.cuda.current_stream()
    [why] = both_ways("momentum", loss=lambda task, model: PureLoss(task, model, waits))
    assert isinstance(why, str)
    assert why.startswith("the capture failed")
    assert captured_step.CAPTURES == {}
    assert torch.cuda.current_stream() == here
    torch.manual_seed(1)
    first = torch.rand(9, device=compute_device())
    torch.manual_seed(1)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(9, device=compute_device())) * 0 + first)
    both_ways("running statistics")


@pytest.mark.parametrize("case", ["momentum", "running statistics", "Adam"])
def test_what_a_captured_step_saves(case: str, deterministic: None, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the ratio: no goal was set, because it was written where no GPU was."""
    family, training, settings = CASES[case]
    seconds = {}
    for name, train in {"without": lambda fit: fit.alone(), "with": fit_in_turn}.items():
        fits = list(fits_of(family, training, counts=[70] * 20, device=compute_device(), **settings))
        results(fits[:4], train)  # to warm up, and past the trainings whose first step is taken both ways
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        for fit in fits[4:]:
            train(fit)
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - started_at
    with capsys.disabled():
        print(f"\n{case}: with captured steps {seconds['with'] / seconds['without']:.2f} of the time without")
