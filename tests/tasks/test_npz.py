import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.tasks import npz
from wildflower.tasks.task import TaskSpec, load_task

RNG = np.random.default_rng(7)


def made(count: int, *shape: int, dtype: Any = np.uint8) -> dict[str, np.ndarray]:
    inputs = RNG.integers(0, 256, (count, *shape)) if dtype == np.uint8 else RNG.normal(3, 2, (count, *shape))
    return {"inputs": inputs.astype(dtype), "labels": np.arange(count) % 3}


def write(folder: Path, train: dict[str, np.ndarray], test: dict[str, np.ndarray]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "train.npz", **train)
    np.savez_compressed(folder / "test.npz", **test)
    return str(folder)


@pytest.mark.parametrize(
    ("shape", "dtype", "input_shape"),
    [
        ((3, 9, 8), np.uint8, (3, 9, 8)),
        ((9, 8), np.uint8, (1, 9, 8)),
        ((2, 17), np.float32, (2, 17)),
        ((2, 17), ">f4", (2, 17)),
        ((1, 8, 9), np.float32, (1, 8, 9)),
    ],
    ids=str,
)
def test_images_and_signals_are_read_as_they_were_written(
    tmp_path: Path, shape: tuple[int, ...], dtype: Any, input_shape: tuple[int, ...]
) -> None:
    train, test = made(40, *shape, dtype=dtype), made(12, *shape, dtype=dtype)
    task = load_task(TaskSpec(name="npz", devices=4, data_dir=write(tmp_path, train, test)))
    assert task.input_shape == input_shape
    assert (len(task.train), len(task.test), task.classes) == (40, 12, 3)
    native = torch.uint8 if dtype == np.uint8 else torch.float32
    assert task.train.inputs.dtype == native
    assert task.train.inputs.flatten().tolist() == train["inputs"].flatten().tolist()
    assert task.test.labels.tolist() == test["labels"].tolist()
    prepared = task.prepare(task.train.inputs, augment=None)
    channels = prepared.transpose(0, 1).flatten(1)
    torch.testing.assert_close(channels.mean(1), torch.zeros(input_shape[0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(channels.std(1, correction=0), torch.ones(input_shape[0]), rtol=1e-5, atol=0)
    family = make_family({"name": task.family, "input_shape": list(input_shape), "classes": 3})
    assert cost(family, family.full(), batch_size=1, optimizer="sgd").parameters > 0


def test_arrays_in_columns_and_small_integers_are_read(tmp_path: Path) -> None:
    train, test = made(8, 9, 8), made(4, 9, 8)
    train |= {"inputs": np.asfortranarray(train["inputs"]), "labels": train["labels"].astype(np.uint8)}
    data = npz.load(write(tmp_path, train, test))
    assert data.train.inputs[:, 0].tolist() == train["inputs"].tolist()
    assert data.train.labels.tolist() == train["labels"].tolist()


def test_groups_are_the_natural_partition(tmp_path: Path) -> None:
    train = made(12, 9, 8) | {"groups": np.array([500, -3, 7] * 4, np.int32)}
    folder = write(tmp_path, train, made(3, 9, 8))
    assert npz.load(folder).natural_ids.tolist() == [2, 0, 1] * 4
    task = load_task(TaskSpec(name="npz", devices=3, data_dir=folder, partition="natural"))
    assert sorted(sorted(task.shard(device).train.tolist()) for device in range(3)) == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8, 11],
    ]


def test_without_groups_there_is_no_natural_partition(tmp_path: Path) -> None:
    folder = write(tmp_path, made(12, 9, 8), made(3, 9, 8))
    with pytest.raises(ValueError, match=r"npz with the array groups in train\.npz"):
        load_task(TaskSpec(name="npz", devices=3, data_dir=folder, partition="natural"))


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    assert len(npz.load(write(tmp_path, made(12, 9, 8), made(3, 9, 8))).train) == 12
    assert len(npz.load(write(tmp_path, made(15, 9, 8), made(3, 9, 8))).train) == 15


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


GOOD = made(6, 9, 8)
SIGNAL = made(6, 2, 9, dtype=np.float32)
GAP = SIGNAL["inputs"].copy()
GAP[[2, 4], 1, 3] = np.nan


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (
            {"x": GOOD["inputs"], "y": GOOD["labels"]},
            "holds arrays called x, y; it must hold inputs and labels, may hold",
        ),
        (GOOD | {"group": GOOD["labels"]}, "holds arrays called inputs, labels, group; .* groups, and no others"),
        ({"inputs": GOOD["inputs"]}, "holds arrays called inputs; it must hold inputs and labels"),
        ({}, "holds arrays called nothing"),
        (GOOD | {"inputs": GOOD["inputs"] / 255}, "inputs are float64, they must be uint8 .* or float32: convert them"),
        (GOOD | {"inputs": GOOD["inputs"].astype(np.int64)}, "inputs are int64"),
        (GOOD | {"inputs": GOOD["inputs"].reshape(6, -1)}, r"inputs have shape \(6, 72\); uint8 images are N x chan"),
        (SIGNAL | {"inputs": SIGNAL["inputs"][:, :, :0]}, r"inputs have shape \(6, 2, 0\)"),
        (
            GOOD | {"inputs": np.zeros((6, 32, 32, 3), np.uint8)},
            r"shape \(6, 32, 32, 3\), with channels last: use inputs.transpose\(0, 3, 1, 2\)",
        ),
        (
            made(6, 128, 9, dtype=np.float32),
            r"shape \(6, 128, 9\), with channels last, or with 128 .*use inputs\.transpose\(0, 2, 1\)",
        ),
        (made(6, 28, 28, dtype=np.float32), r"shape \(6, 28, 28\), which may be images without an axis of channels"),
        (made(6, 16, 16, 12, dtype=np.float32), r"shape \(6, 16, 16, 12\), with channels last"),
        (made(6, 20, 16, 3, dtype=np.float32), r"shape \(6, 20, 16, 3\), with channels last.* or channels = 'last' in"),
        (made(6, 20, 16, 2), r"shape \(6, 20, 16, 2\), with channels last"),
        (SIGNAL | {"inputs": GAP}, r"2 of 6 inputs hold values that are not finite, the first is inputs\[2\]"),
        (GOOD | {"inputs": GOOD["inputs"][:5]}, "5 inputs, 6 labels: the counts must agree"),
        (GOOD | {"inputs": np.array(5, np.uint8)}, "no inputs, 6 labels: the counts must agree"),
        (GOOD | {"groups": np.arange(7)}, "7 groups, 6 labels: the counts must agree"),
        (GOOD | {"groups": np.array(list("aabbcc"))}, "groups are <U1 .* must be whole numbers, one per example"),
        (
            GOOD | {"labels": np.array(list("aabbcc"))},
            r"labels are <U1 of shape .* example: as in numpy\.unique\(labels, return_inverse=True\)\[1\] over "
            r"those of train\.npz and test\.npz together$",
        ),
        (GOOD | {"groups": np.zeros((6, 2), np.int64)}, r"groups are int64 of shape \(6, 2\)"),
        (GOOD | {"labels": GOOD["labels"] / 2}, r"labels are float64 .* as in labels.astype\(numpy.int64\)"),
        (GOOD | {"labels": GOOD["labels"] == 1}, "labels are bool"),
        (GOOD | {"labels": np.eye(6, dtype=np.int64)}, r"labels have shape \(6, 6\), they must have one number per"),
        (GOOD | {"labels": np.array(3)}, r"labels have shape \(\)"),
        (GOOD | {"labels": GOOD["labels"] - 1}, r"labels\[0\] is -1, labels count from 0"),
        (
            GOOD | {"labels": GOOD["labels"].astype(np.uint64) + np.uint64(2**63)},
            "labels hold 9223372036854775810",
        ),
        ({"inputs": GOOD["inputs"][:0], "labels": GOOD["labels"][:0]}, "holds no examples"),
        (GOOD | {"labels": np.array([[1], [1, 2], 0, 0, 0, 0], object)}, "cannot be read .* arrays of numbers, as in"),
    ],
)
def test_a_bad_array_is_told_with_its_file_and_what_would_be_right(
    tmp_path: Path, train: dict[str, np.ndarray], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        npz.load(write(tmp_path, train, GOOD))
    assert str(raised.value).startswith(f"{tmp_path / 'train.npz'}: ")


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (GOOD, made(6, 8, 8), r"training inputs are \(1, 9, 8\), test inputs \(1, 8, 8\): they must have one shape"),
        (GOOD, made(6, 1, 9, 8, dtype=np.float32), "must be bytes, float32 or float64, both alike"),
        (GOOD | {"inputs": GOOD["inputs"] * 0}, GOOD, "one value only, so it cannot be normalized"),
        (
            GOOD | {"labels": GOOD["labels"] + 1},
            GOOD | {"labels": GOOD["labels"] + 1},
            "smallest label is 1, ",
        ),
        (GOOD | {"labels": GOOD["labels"] * 10}, GOOD, "largest label is 20, and there are 12 examples"),
    ],
)
def test_files_that_do_not_go_together(
    tmp_path: Path, train: dict[str, np.ndarray], test: dict[str, np.ndarray], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        npz.load(write(tmp_path, train, test))
    assert str(raised.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("content", ["empty", "text", "cut", "flipped", "npy"])
def test_a_file_that_is_none_or_not_whole(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, GOOD, GOOD)
    whole = (tmp_path / "test.npz").read_bytes()
    middle = len(whole) // 3
    (tmp_path / "test.npz").write_bytes(
        {
            "empty": b"",
            "text": b"<html>not found</html>",
            "cut": whole[:-40],
            "flipped": whole[:middle] + bytes(b ^ 255 for b in whole[middle : middle + 40]) + whole[middle + 40 :],
            "npy": npy(GOOD["inputs"]),
        }[content]
    )
    with pytest.raises(ValueError, match=r"test\.npz: cannot be read .* whole file of numpy\.savez"):
        npz.load(folder)


def test_a_missing_file_is_named_with_what_is_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "training.npz", **GOOD)
    with pytest.raises(FileNotFoundError, match=r"no file train\.npz, .* test\.npz; the folder holds training\.npz"):
        npz.load(str(tmp_path))


def test_the_folder_must_be_named_and_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'npz' needs data-dir"):
        npz.load("")
    with pytest.raises(FileNotFoundError, match="data-dir '/no/such/folder' of the task 'npz' does not exist"):
        npz.load("/no/such/folder")


@pytest.mark.parametrize("shape", [(6, 128, 9), (6, 20, 16, 3)])
@pytest.mark.parametrize("own", [False, True])
def test_the_place_of_channels_can_be_said(tmp_path: Path, shape: tuple[int, ...], own: bool) -> None:
    arrays = made(*shape, dtype=np.float32)
    folder = write(tmp_path, arrays, arrays)
    read = npz.own if own else npz.load
    last = read(folder, npz.NpzArguments(channels="last")).train.inputs
    assert last.shape == (6, shape[-1], *shape[1:-1])
    assert last[2, 1].tolist() == arrays["inputs"][2, ..., 1].tolist()
    assert read(folder, npz.NpzArguments(channels="first")).train.inputs.shape == shape


def test_images_of_one_color_and_files_that_are_not_read_are_counted(tmp_path: Path) -> None:
    arrays = made(6, 9, 8)
    arrays["inputs"][[1, 4]] = 7
    folder = write(tmp_path, arrays, arrays)
    np.savez(tmp_path / "valid.npz", **arrays)
    for read in (npz.load, npz.own):
        assert [(remark.count, remark.example) for remark in read(folder).remarks] == [(4, "input 1"), (1, "valid.npz")]


def test_signals_that_float32_would_round_or_has_rounded_to_few_steps_are_told(tmp_path: Path) -> None:
    """Around 1.7e9 float32 has steps of 128: of the seconds of an hour 29 values are left, of those of a week 4,726."""
    spans = (0, 1), (1.7e9, 1.7e9 + 604_800), (1.7e9, 1.7e9 + 3600)
    signals = {
        "inputs": np.stack([np.linspace(start, end, 6 * 7).reshape(6, 7) for start, end in spans], axis=1),
        "labels": np.arange(6) % 2,
    }
    folder = write(tmp_path, signals, signals)
    with pytest.raises(ValueError, match=r"inputs are float64.*first subtract a number from each channel"):
        npz.load(folder)
    rounded = signals | {"inputs": signals["inputs"].astype(np.float32)}
    [remark] = npz.load(write(tmp_path, rounded, rounded)).remarks
    assert (remark.count, remark.example) == (2, "channel 2, counted from 0")  # of both files
    assert "float32 rounds them to few steps" in remark.what
