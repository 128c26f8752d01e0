"""STL-10, SVHN and UniMiB SHAR from small files in the formats of their authors."""

from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

from wildflower.tasks import stl10, svhn, unimib
from wildflower.tasks.task import TaskSpec, load_task

RNG = np.random.default_rng(0)


def write_stl10(folder: Path, train: int = 12, test: int = 6) -> dict[str, np.ndarray]:
    """Every image as its file has it: color planes one after the other, each column by column."""
    folder.mkdir(parents=True)
    images = {}
    for split, count in (("train", train), ("test", test)):
        images[split] = RNG.integers(0, 256, (count, 3, 96, 96), np.uint8)  # channels, rows, columns
        planes = [plane.tobytes(order="F") for image in images[split] for plane in image]
        (folder / f"{split}_X.bin").write_bytes(b"".join(planes))
        (folder / f"{split}_y.bin").write_bytes(bytes(number % 10 + 1 for number in range(count)))
    return images


def write_svhn(folder: Path, train: int = 12, test: int = 6) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    images = {}
    for split, count in (("train", train), ("test", test)):
        images[split] = RNG.integers(0, 256, (32, 32, 3, count), np.uint8)
        labels = np.array([[number % 10 + 1] for number in range(count)], np.uint8)
        scipy.io.savemat(folder / f"{split}_32x32.mat", {"X": images[split], "y": labels}, do_compression=True)
    return images


def write_unimib(folder: Path, windows: int = 80, **changes: np.ndarray) -> np.ndarray:
    """Ten windows of each fall; window k is of subject 3 + k mod 4."""
    folder.mkdir(parents=True)
    samples = RNG.normal(size=(windows, 453))
    labels = np.array([[k % 8 + 1, 3 + k // 8 % 4, 1] for k in range(windows)], np.uint8)
    scipy.io.savemat(folder / "fall_data.mat", {"fall_data": changes.get("fall_data", samples)})
    scipy.io.savemat(folder / "fall_labels.mat", {"fall_labels": changes.get("fall_labels", labels)})
    return samples


def test_stl10_from_its_binary_files(tmp_path: Path) -> None:
    images = write_stl10(tmp_path / "stl10" / "stl10_binary")
    task = load_task(TaskSpec(name="stl10", data_dir=str(tmp_path / "stl10"), devices=2))
    assert torch.equal(task.train.inputs, torch.from_numpy(images["train"]))
    assert torch.equal(task.test.inputs, torch.from_numpy(images["test"]))
    assert task.train.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert task.input_shape == (3, 96, 96)
    assert task.classes == 10


def test_svhn_from_its_mat_files(tmp_path: Path) -> None:
    images = write_svhn(tmp_path / "svhn")
    task = load_task(TaskSpec(name="svhn", data_dir=str(tmp_path / "svhn"), devices=2))
    assert task.input_shape == (3, 32, 32)
    assert task.train.inputs[5, 2, 7, 30] == images["train"][7, 30, 2, 5]
    # The label 10 is the digit 0.
    assert task.train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert task.classes == 10


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


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (stl10.load, r"no file train_X.bin of the task 'stl10'; expected the files of stl10_binary.tar.gz or parquet"),
        (
            svhn.load,
            r"no file train_32x32.mat of the task 'svhn'; expected train_32x32.mat and test_32x32.mat or parquet",
        ),
        (unimib.load, r"no file fall_data.mat of the task 'unimib-shar'; expected fall_data.mat and fall_labels.mat"),
    ],
)
def test_an_empty_folder_is_told_what_belongs_into_it(load, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        load(str(tmp_path))


def test_unimib_shar_has_no_usual_place() -> None:
    with pytest.raises(
        FileNotFoundError, match="the task 'unimib-shar' needs data-dir: a folder with the files fall_da"
    ):
        unimib.load("")


def test_two_copies_are_not_chosen_between(tmp_path: Path) -> None:
    for copy in ("a", "b"):
        write_svhn(tmp_path / copy)
    with pytest.raises(ValueError, match=r"several files train_32x32.mat: .*/a/train_32x32.mat, .*; leave one"):
        svhn.load(str(tmp_path))


def test_broken_stl10_files(tmp_path: Path) -> None:
    write_stl10(tmp_path / "s")
    file, labels = tmp_path / "s" / "train_X.bin", tmp_path / "s" / "train_y.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"train_X.bin: 331775 bytes are no whole images of 27648 bytes"):
        stl10.load(str(tmp_path))
    file.write_bytes(whole[27648:])
    with pytest.raises(ValueError, match=r"has 11 images, .*train_y.bin has 12 labels"):
        stl10.load(str(tmp_path))
    file.write_bytes(whole)
    labels.write_bytes(bytes(range(12)))
    with pytest.raises(ValueError, match=r"train_y.bin: labels must be 1 to 10, found 0 to 11"):
        stl10.load(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "holds X, but no numbers called 'y'"),
        (
            {"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))},
            r"X must be bytes \(height, width, 3, examples\), not float64",
        ),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1))}, "2 images, 3 labels"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[0], [1]])}, "labels must be 1 to 10, found 0 to 1"),
    ],
)
def test_other_mat_files_are_no_svhn(content: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    write_svhn(tmp_path / "svhn")
    scipy.io.savemat(tmp_path / "svhn" / "train_32x32.mat", content)
    with pytest.raises(ValueError, match=message):
        svhn.load(str(tmp_path))


@pytest.mark.parametrize("keep", [0, 60, 200, 20_000])
def test_a_cut_mat_file_is_named(keep: int, tmp_path: Path) -> None:
    write_svhn(tmp_path / "svhn")
    file = tmp_path / "svhn" / "train_32x32.mat"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train_32x32.mat: (no whole .mat file|holds)"):
        svhn.load(str(tmp_path))


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
