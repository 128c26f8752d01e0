"""HAPT from UCI's text files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.hapt_texts import write_texts
from wildflower.tasks.hapt import Recording, make_windows, read_texts
from wildflower.tasks.task import TaskSpec, load_task


def recording(*stretches: tuple[int, int], seed: int = 0) -> Recording:
    """Random samples, and activities from (label, samples) of each stretch; -1 is none."""
    labels = np.repeat([label for label, _ in stretches], [samples for _, samples in stretches])
    return Recording(np.random.default_rng(seed).normal(size=(len(labels), 6)), np.where(labels > 0, labels - 1, -1))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    users = {
        user: [
            recording((-1, 30), (1, 128 + 9 * 64), (-1, 5), (7, 200), seed=user),
            recording((2, 128 + 4 * 64), (1, 127), (3, 128), seed=user + 100),
        ]
        for user in (1, 2, 3)
    }
    write_texts(users, tmp_path / "data")
    found = read_texts(tmp_path / "data")
    for user, recordings in users.items():
        for one, other in zip(recordings, found[user], strict=True):
            assert np.array_equal(one.samples, other.samples)
            assert np.array_equal(one.activities, other.activities)
    return tmp_path / "data"


def ramp(activities: list[int], start: int) -> Recording:
    """Every sample says where it is."""
    numbers = np.arange(start, start + len(activities), dtype=float)
    return Recording(np.repeat(numbers[:, None], 6, axis=1), np.array(activities))


def test_windows_are_cut_in_time_and_the_last_of_each_activity_are_for_testing() -> None:
    # Activity 0: windows at 0, 64, ..., 576 (ten), of which the last two are for testing; the one at 448 overlaps
    # with the first of these, at 512. Activity 1: one window at 1000, in the second recording one at 5000, for testing.
    # Activity 2 has a single window, at 5200.
    first = [0] * (128 + 9 * 64) + [-1] * (1000 - 704) + [1] * 191
    second = [1] * 128 + [-1] * 72 + [2] * 130
    data = make_windows({4: [ramp(first, 0), ramp(second, 5000)], 9: [ramp([0] * 128, 9000)]})
    assert data.test.inputs[:, 0, 0].tolist() == [512, 576, 5000]
    assert data.test.labels.tolist() == [0, 0, 1]
    # Ordered by the part of their own activity: 1/14, 3/14, 5/14, 7/14 (with 1/2 of the two others), 9/14, ...
    assert data.train.inputs[:, 0, 0].tolist() == [0, 64, 128, 192, 1000, 5200, 256, 320, 384, 9000]
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0, 0]
    assert data.natural_ids.tolist() == [0] * 9 + [1]
    assert torch.equal(data.train.inputs[1, 3], torch.arange(64.0, 192.0))
    assert data.train.inputs.dtype == torch.float32
    assert data.train.inputs.shape[1:] == (6, 128)


def test_windows_of_different_recordings_do_not_overlap() -> None:
    # The recordings follow one another, but the window for testing begins the second one.
    data = make_windows({1: [ramp([0] * 128, 0), ramp([0] * 128 + [1] * 128, 128)]})
    assert data.train.inputs[:, 0, 0].tolist() == [0, 256]
    assert data.test.inputs[:, 0, 0].tolist() == [128]


def test_recordings_without_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match="no 128 samples of one activity in a row"):
        make_windows({1: [ramp([0, 1] * 200, 0)]})


def test_the_task(data_dir: Path) -> None:
    task = load_task(TaskSpec(name="hapt", devices=3, data_dir=str(data_dir), partition="natural"))
    # Per user 10, 2, 5 and 1 windows of activities 0, 6, 1 and 2; for testing 2, 1 and 1, with one dropped before each.
    assert (len(task.train), len(task.test)) == (3 * (7 + 0 + 3 + 1), 3 * (2 + 1 + 1))
    assert (task.input_shape, task.family, task.classes) == ((6, 128), "cnn3", 7)
    assert [len(task.shard(device).train) for device in range(3)] == [11, 11, 11]
    batch = task.prepare(task.train.inputs, augment=torch.Generator())
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch.mean((0, 2)), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.std((0, 2), correction=0), torch.ones(6), atol=1e-5, rtol=0)


def test_what_a_device_tests_on_comes_after_what_it_trains_on(data_dir: Path) -> None:
    spec = TaskSpec(name="hapt", devices=3, data_dir=str(data_dir), partition="natural", test_fraction=0.3)
    task = load_task(spec)
    shard = task.shard(1)
    assert (len(shard.train), len(shard.test)) == (8, 3)
    assert int(shard.train.max()) < int(shard.test.min())
    assert set(task.train.labels[shard.test].tolist()) == {0, 1}


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_other_partitions_deal_windows(data_dir: Path, partition: str) -> None:
    spec = TaskSpec(name="hapt", devices=4, data_dir=str(data_dir), partition=partition, alpha=5.0)
    shards = [load_task(spec).shard(device).train for device in range(4)]
    assert sorted(torch.cat(shards).tolist()) == list(range(33))


def test_without_data_the_message_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs data-dir: the folder RawData of UCI's HAPT"):
        load_task(TaskSpec(name="hapt", devices=2))
    with pytest.raises(FileNotFoundError, match=r"0 files labels\.txt of the task 'hapt'; expected one"):
        load_task(TaskSpec(name="hapt", devices=2, data_dir=str(tmp_path)))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """UCI's files: user 2 in experiments 3 and 4, user 1 in experiment 12."""
    folder = tmp_path / "uci" / "RawData"
    folder.mkdir(parents=True)
    for experiment, user, samples in ((3, 2, 400), (4, 2, 200), (12, 1, 400)):
        for sensor, sign in (("acc", 1), ("gyro", -1)):
            rows = "".join(f"{sign * (experiment + i / 1000)} {i % 7} {-i / 1000}\n" for i in range(samples))
            (folder / f"{sensor}_exp{experiment:02}_user{user:02}.txt").write_text(rows)
    (folder / "labels.txt").write_text("3 2 5 1 192\n3 2 12 200 201\n4 2 1 10 200\n12 1 5 1 400\n")
    return folder


def test_ucis_text_files_are_read_as_they_are(raw: Path) -> None:
    found = read_texts(raw)
    assert list(found) == [1, 2]
    first, second = found[2]
    assert first.samples[8].tolist() == [3.008, 1, -0.008, -3.008, 1, -0.008]
    # Samples are counted from 1, and the last one belongs to it.
    assert first.activities.tolist() == [4] * 192 + [-1] * 7 + [11, 11] + [-1] * 199
    assert second.activities.tolist() == [-1] * 9 + [0] * 191
    task = load_task(TaskSpec(name="hapt", devices=2, data_dir=str(raw.parent), partition="natural"))
    # User 1 has 5 windows, one for testing, which overlaps with one; user 2 two of one activity and one of another.
    assert (len(task.train), len(task.test)) == (3 + 1, 1 + 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("labels.txt", "3 2 5 1 401\n", "there are 400 samples"),
        ("labels.txt", "3 2 13 1 40\n", "there are 400 samples"),
        ("labels.txt", "3 2 5 0 40\n", "there are 400 samples"),
        ("labels.txt", "3 2 5 40\n", "4 columns in 1 rows: expected 5"),
        ("labels.txt", "3 2 5 1.5 40\n", "expected whole numbers"),
        ("labels.txt", "walking\n", "no table of numbers"),
        ("acc_exp03_user02.txt", "1 2 3\n", "1 samples of acc, and 400 of gyro"),
        ("gyro_exp03_user02.txt", "1 2 nan\n" * 400, "expected 3 of finite numbers"),
    ],
)
def test_wrong_text_files_are_named(raw: Path, name: str, text: str, message: str) -> None:
    (raw / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_texts(raw)


@pytest.mark.parametrize(
    "missing", [["gyro_exp12_user01"], ["acc_exp12_user01"], ["acc_exp04_user02", "gyro_exp04_user02"]]
)
def test_missing_text_files_are_named(raw: Path, missing: list[str]) -> None:
    for name in missing:
        (raw / f"{name}.txt").unlink()
    with pytest.raises(FileNotFoundError, match=missing[0]):
        read_texts(raw)
