"""Public data for the runs on Fashion-MNIST, and what a server may learn from them beforehand.

They are scikit-learn's handwritten digits, 8x8, resized to the side of the devices' images: another data set than the
devices', with other classes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from wildflower.launch.experiment_file import write_toml
from wildflower.messages.orders import LocalTraining
from wildflower.models.family import make_family
from wildflower.models.space import Space
from wildflower.models.supernet import Supernet
from wildflower.server_app.inline_tables import to_toml
from wildflower.strategies.rafl import RaFLParams
from wildflower.strategies.supernet_training import (
    CALIBRATION_BATCHES,
    SCORED_TOGETHER,
    SupernetParams,
    SupernetTraining,
    accuracy,
    batches_of,
    calibrated,
)
from wildflower.tasks.spec import load_data_set
from wildflower.tasks.task import TaskSpec, load_task

SIDE = 28
# Of the supernet's training on the digits; the learning rate falls to 0.
STEPS = 200
PAIRS = 100  # sub-networks whose accuracies a predictor learns from
TRAINING = LocalTraining(batch_size=64, learning_rate=0.05, momentum=0.9)


def write_digits(folder: Path, side: int = SIDE) -> Path:
    """The digits as the task `npz` reads them, 1,438 to train on and 359 to test on; returns their folder."""
    return write_resized(folder, "digits", 16, side)


def write_resized(folder: Path, task: str, largest: int, side: int) -> Path:
    """The images of a task, of values up to `largest`, as the task `npz` reads them; returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = load_data_set(task, "", None)
    for name, part in (("train", data.train), ("test", data.test)):
        images = resized(part.inputs.float() * (255 / largest), side)
        np.savez(folder / f"{name}.npz", inputs=images.numpy(), labels=part.labels.numpy())
    return folder


def resized(images: Tensor, side: int) -> Tensor:
    """Images of values 0 to 255 as bytes of another side, bilinear; smaller ones are means."""
    large = F.interpolate(images, (side, side), mode="bilinear", antialias=side < images.shape[-1])
    return large.round().clamp(0, 255).to(torch.uint8)


def pretrained(folder: Path, family: dict[str, Any], seed: int, steps: int = STEPS, side: int = SIDE) -> Path:
    """The file of the weights of a supernet trained on the digits, which is made where the folder lacks it.

    Its space is that of RaFL's personal models, and its batch norms have the statistics of the largest one.

    Args:
        family: name and arguments of the supernet's family.
        seed: of its first weights and its training.
        side: of the images.
    """
    file = folder / f"supernet-{seed}.safetensors"
    if not file.exists():
        digits = write_digits(folder / "digits", side)
        task = load_task(TaskSpec(name="npz", devices=1, data_dir=str(digits), seed=seed))
        shape = {"input_shape": list(task.input_shape), "classes": task.classes}
        space = Space.of(make_family(family | shape), RaFLParams().shares, None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            supernet = Supernet(space)
        examples = torch.arange(len(task.train))
        training = SupernetTraining(supernet, task, examples, TRAINING, SupernetParams(steps=steps), seed)
        while training.step < steps:
            training.advance()
        batches = list(batches_of(task, task.train, examples, TRAINING.batch_size, CALIBRATION_BATCHES))
        networks = {
            name: calibrated(supernet.extract(architecture), batches)
            for name, architecture in (("largest", space.largest()), ("smallest", space.smallest()))
        }
        test = list(batches_of(task, task.test, torch.arange(len(task.test)), SCORED_TOGETHER))
        scores = {name: accuracy(network, test) for name, network in networks.items()}
        _facts_of(file).write_text(json.dumps(scores) + "\n")
        weights = {name: value.detach().contiguous() for name, value in networks["largest"].state_dict().items()}
        safetensors.torch.save_file(weights, file)
    return file


def once_for_all(folder: Path, family: dict[str, Any], seed: int, steps: int = STEPS, pairs: int = PAIRS) -> Path:
    """Likewise, of a supernet in its family's own space, by `wildflower supernet`.

    Beside the file of weights lie accuracies, of `pairs` random sub-networks too, which RaFL's predictor learns from.
    """
    file = folder / f"supernet-{seed}.safetensors"
    if not file.exists():
        digits = write_digits(folder / "digits")
        name, arguments = (
            family["name"],
            ", ".join(f"{key} = {to_toml(family[key])}" for key in family if key != "name"),
        )
        experiment = {"task": "npz", "data-dir": str(digits), "family": name, "family-arguments": arguments}
        experiment |= {"seed": seed, "optimizer": TRAINING.optimizer, "batch-size": TRAINING.batch_size}
        experiment |= {"learning-rate": TRAINING.learning_rate, "momentum": TRAINING.momentum, "weight-decay": 0.0}
        settings = folder / "supernet.toml"
        settings.write_text(write_toml(experiment))
        command = [sys.executable, "-m", "wildflower", "supernet", str(settings), "--output", str(file)]
        subprocess.run([*command, "--steps", str(steps), "--pairs", str(pairs)], check=True)
    return file


def scores_on_digits(file: Path) -> dict[str, float]:
    """Accuracies on digits of networks that share a supernet's weights.

    They are those of the largest and the smallest network on the test set, or after `once_for_all` the lowest and the
    highest of all that were measured, on the examples that were held out.
    """
    facts = json.loads(_facts_of(file).read_text())
    if "measured" not in facts:
        return facts
    accuracies = [entry["accuracy"] for entry in facts["measured"]]
    return {"lowest": min(accuracies), "highest": max(accuracies)}


def _facts_of(file: Path) -> Path:
    return file.with_suffix(".json")
