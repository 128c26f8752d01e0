"""Folders of devices that hold their own data: digits, as npz files or as images in a folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from wildflower.tasks.task import TaskSpec, load_task


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training inputs and labels, then those for testing."""
    task = load_task(TaskSpec(name="digits", devices=1))
    return task.train.inputs.numpy(), task.train.labels.numpy(), task.test.inputs.numpy(), task.test.labels.numpy()


def npz_folder(folder: Path, inputs: np.ndarray, labels: Sequence[object], name: str = "train") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", inputs=inputs, labels=np.array(labels))
    return folder


def image_folder(folder: Path, inputs: np.ndarray, labels: Sequence[object], part: str = "") -> Path:
    for number, (pixels, label) in enumerate(zip(inputs, labels, strict=True)):
        of_class = folder / part / str(label) if part else folder / str(label)
        of_class.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0]).save(of_class / f"{number:04d}.png")
    return folder


def digits_of_devices(devices: int, each: int = 30) -> list[tuple[np.ndarray, np.ndarray]]:
    """Distinct training digits for every device."""
    inputs, labels, _, _ = digits()
    return [(inputs[d * each : (d + 1) * each], labels[d * each : (d + 1) * each]) for d in range(devices)]
