"""Activities from phone sensors: UCI's "Smartphone-Based Recognition of Human Activities and Postural Transitions".

Source: Reyes-Ortiz et al. 2016, "Transition-Aware Human Activity Recognition Using Smartphones". 30 users wore a phone
at the waist, in two recordings each; accelerometer and gyroscope at 50 Hz. The recordings are UCI's text files.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from wildflower.tasks.data import Data, DataSet, decoded_files, make_data_set
from wildflower.tasks.hub import existing_folder

LABELS = "labels.txt"
"""The file beside acc_exp01_user01.txt, gyro_exp01_user01.txt and so on: experiment, user, activity, first and last
sample."""

SOURCE = "https://archive.ics.uci.edu/dataset/341"

CHANNELS = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
"""In g and radians per second."""

ACTIVITIES = 12
"""Walking, upstairs, downstairs, sitting, standing, lying, then six transitions between the last three."""

WINDOW = 128
STRIDE = 64
"""Samples: 2.56 s, half of which the next window shares. UCI's 10,929 windows are cut like this."""

TEST_FRACTION = 0.2
"""The last windows of each activity of each user."""


@dataclass(frozen=True)
class Recording:
    """`samples` (samples, 6) and the activity of each, counted from 0, -1 where there is none."""

    samples: np.ndarray
    activities: np.ndarray


def load(data_dir: str) -> DataSet:
    """Return windows (6, 128) of one activity each; natural ids are the users.

    FileNotFoundError where `data_dir` does not hold UCI's text files, ValueError for files of another kind.
    """
    wanted = f"the folder RawData of UCI's HAPT, with {LABELS}, which {SOURCE} offers"
    lists = sorted(existing_folder("hapt", data_dir, wanted).rglob(LABELS))
    if len(lists) != 1:
        raise FileNotFoundError(f"{data_dir}: {len(lists)} files {LABELS} of the task 'hapt'; expected one: {wanted}")
    texts = [*lists, *sorted(lists[0].parent.glob("*_exp*_user*.txt"))]
    return decoded_files("hapt", texts, lambda: make_windows(read_texts(lists[0].parent)))


def read_texts(folder: Path) -> dict[int, list[Recording]]:
    """Return the recordings of each user in UCI's text files, in order of time.

    FileNotFoundError where one of them is missing, ValueError where its numbers cannot be.
    """
    stretches = _numbers(folder / LABELS, 5)
    if (stretches != stretches.round()).any():
        raise ValueError(
            f"{folder / LABELS}: expected whole numbers: experiment, user, activity, first and last sample"
        )
    users = defaultdict[int, list[Recording]](list)
    # A recording that the labels name, or that one sensor has, is there as a whole.
    named = {(int(experiment), int(user)) for experiment, user in stretches[:, :2]}
    for file in folder.glob("*_exp*_user*.txt"):
        if found := re.fullmatch(r"(?:acc|gyro)_exp(\d+)_user(\d+)\.txt", file.name):
            named.add((int(found[1]), int(found[2])))
    for experiment, user in sorted(named):
        end = f"exp{experiment:02}_user{user:02}.txt"
        parts = [_numbers(folder / f"{sensor}_{end}", 3) for sensor in ("acc", "gyro")]
        if len(parts[0]) != len(parts[1]):
            raise ValueError(f"{folder}: {end}: {len(parts[0])} samples of acc, and {len(parts[1])} of gyro")
        activities = np.full(len(parts[0]), -1)
        for line in stretches[(stretches[:, 0] == experiment) & (stretches[:, 1] == user)]:
            activity, first, last = map(int, line[2:])
            if not (1 <= activity <= ACTIVITIES and 1 <= first <= last <= len(activities)):
                raise ValueError(f"{folder / LABELS}: {line.tolist()}: there are {len(activities)} samples")
            activities[first - 1 : last] = activity - 1
        users[user].append(Recording(np.concatenate(parts, axis=1), activities))
    return dict(sorted(users.items()))


def _numbers(file: Path, columns: int) -> np.ndarray:
    """Return a table of finite numbers."""
    try:
        found = np.loadtxt(file, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file}: no table of numbers ({error})") from None
    if found.shape[1] != columns or not len(found) or not np.isfinite(found).all():
        raise ValueError(f"{file}: {found.shape[1]} columns in {len(found)} rows: expected {columns} of finite numbers")
    return found


def make_windows(recordings: Mapping[int, Iterable[Recording]]) -> DataSet:
    """Cut every stretch of one activity into windows of 128 samples, 64 apart, and hold a fifth out for testing.

    That is the last fifth, in order of time, of the windows of each activity of each user, and at least one of two;
    training has no window that shares samples with one of those. A user's training windows are ordered by the part of
    their own activity that came before: any last part of them has its share of every activity, and of each the latest.
    """
    inputs, labels, ids = list[np.ndarray](), list[int](), list[int]()
    test_inputs, test_labels = list[np.ndarray](), list[int]()
    for user, of_user in enumerate(recordings.values()):
        training: list[tuple[float, int, np.ndarray]] = []
        for activity, windows in sorted(_cut(of_user).items()):
            border = len(windows) - (round(TEST_FRACTION * len(windows)) or len(windows) > 1)
            for _, samples in windows[border:]:
                test_inputs.append(samples)
                test_labels.append(activity)
            end = windows[border][0] if border < len(windows) else math.inf
            kept = [samples for start, samples in windows[:border] if start + WINDOW <= end]
            training += [((rank + 0.5) / len(kept), activity, samples) for rank, samples in enumerate(kept)]
        for _, activity, samples in sorted(training, key=lambda window: window[:2]):
            inputs.append(samples)
            labels.append(activity)
            ids.append(user)
    if not inputs:
        raise ValueError(f"the recordings have no {WINDOW} samples of one activity in a row")
    return make_data_set(_data(inputs, labels), _data(test_inputs, test_labels), natural_ids=torch.tensor(ids))


def _cut(recordings: Iterable[Recording]) -> dict[int, list[tuple[int, np.ndarray]]]:
    """Return each activity's windows in order of time: number of the first sample, samples (6, 128)."""
    windows = defaultdict[int, list[tuple[int, np.ndarray]]](list)
    before = 0  # samples of the user's earlier recordings, and a gap wide enough that no windows seem to overlap
    for recording in recordings:
        borders = np.flatnonzero(np.diff(recording.activities)) + 1
        for stretch in np.split(np.arange(len(recording.activities)), borders):
            activity = int(recording.activities[stretch[0]])
            if activity >= 0:
                for start in stretch[: max(0, len(stretch) - WINDOW + 1) : STRIDE].tolist():
                    windows[activity].append((before + start, recording.samples[start : start + WINDOW].T))
        before += len(recording.activities) + WINDOW
    return windows


def _data(windows: list[np.ndarray], activities: list[int]) -> Data:
    inputs = np.stack(windows).astype(np.float32) if windows else np.empty((0, len(CHANNELS), WINDOW), np.float32)
    return Data(torch.from_numpy(inputs), torch.tensor(activities, dtype=torch.int64))
