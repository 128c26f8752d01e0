"""Workers that share the GPUs of a machine. Not part of `make test`: `make test-gpu` names this file, where CUDA is.

Whether a GPU computes the same bits twice depends on its kernels, so that runs are compared within a tolerance.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
        torch.testing.assert_close(with_gpus[name], tensor, rtol=1e-2, atol=1e-3)
    assert summary["devices_by_outcome"] == on_processors["devices_by_outcome"]
    assert summary["final_score"] == pytest.approx(on_processors["final_score"], abs=0.02)
