"""Public digits for RaFL's runs, the supernet that learns them, and the table."""

import numpy as np
import safetensors.torch
import torch

from benchmarks.rafl.public import once_for_all, pretrained, resized, scores_on_digits, write_digits
from benchmarks.rafl.run import STUDY, table
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import make_family
from wildflower.strategies.predictor import load_pairs
from wildflower.tasks.public import load_public
from wildflower.tasks.task import TaskSpec, load_task


def test_digits_are_resized_to_bytes_of_the_devices_shape(tmp_path):
    """A corner keeps its value."""
    images = torch.zeros(1, 1, 8, 8)
    images[0, 0, 0, 0], images[0, 0, 7, 7] = 255, 64
    large = resized(images, 28)
    assert (large.dtype, large.shape) == (torch.uint8, (1, 1, 28, 28))
    assert (large[0, 0, 0, 0], large[0, 0, 27, 27], large[0, 0, 0, 27]) == (255, 64, 0)


def test_they_are_public_data_of_the_server(tmp_path):
    folder = write_digits(tmp_path / "digits")
    task = load_task(TaskSpec(name="npz", devices=1, data_dir=str(folder)))
    public = load_public("npz", str(folder), None, task=task, dtype=torch.float32, examples=0, seed=1)
    assert (len(public), task.input_shape) == (1438, (1, 28, 28))
    assert len(np.load(folder / "test.npz")["labels"]) == 359


def test_a_pretrained_supernet_is_made_once_and_is_the_familys(tmp_path):
    family = {"name": "resnet18", "first_channels": 4, "norm": "batch", "scaler": False}
    file = pretrained(tmp_path, family, 1, steps=1)
    made = file.stat().st_mtime_ns
    assert pretrained(tmp_path, family, 1, steps=1) == file
    assert file.stat().st_mtime_ns == made
    assert set(scores_on_digits(file)) == {"largest", "smallest"}
    whole = make_family(family | {"input_shape": [1, 28, 28], "classes": 10})
    shapes = {name: spec.shape for name, spec in whole.tensors(whole.full()).items()}
    found = {name: tuple(value.shape) for name, value in safetensors.torch.load_file(file).items()}
    assert {name: shape for name, shape in found.items() if not name.endswith("num_batches_tracked")} == shapes


def test_a_supernet_of_once_for_all_comes_with_accuracies_for_the_predictor(tmp_path):
    family = {"name": "mobilenet-v3", "halvings": 5, "stage_channels": [8] * 6, "depths": [2]}
    family |= {"kernel_sizes": [3], "expand_ratios": [3, 4]}
    file = once_for_all(tmp_path, family, 1, steps=1, pairs=1)
    space = ElasticSpace.of(make_family(family | {"input_shape": [1, 28, 28], "classes": 10}))
    _, accuracies = load_pairs(file.with_suffix(".json"), space)
    assert len(accuracies) == 3  # the largest, the smallest, and one more
    assert scores_on_digits(file) == {"lowest": min(accuracies), "highest": max(accuracies)}


def test_a_row_has_the_mean_over_its_seeds_and_bytes_only_where_all_reach_the_target():
    def of(first, last):
        return {
            "rounds": [[5, first, 1e6, 0.1], [10, last, 2e6, 0.2]],
            "bandwidth_utilisation": 0.5,
            "personal_score": None,
        }

    rows = table(STUDY, {"rafl a 0.5": {"1": of(0.1, 0.8), "2": of(0.3, 0.6)}, "rafl c 0.1": {"1": of(0.7, 0.9)}})
    assert rows.splitlines()[2:] == [
        "| 0.5 | rafl a | 2 | 20.0 | 70.0 | 2 | 1 of 2 | 12.0 | 50% |  |",
        "| 0.1 | rafl c | 1 | 70.0 | 90.0 | 2 | 1 | 12.0 | 50% |  |",
    ]
