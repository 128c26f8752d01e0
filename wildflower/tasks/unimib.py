"""UniMiB SHAR (Micucci et al. 2017): falls, from the accelerometer of a phone in the pocket at 50 Hz; 30 subjects.

As HypeMeFed uses it: the eight kinds of falls, and every window of 3 x 151 samples as an image: without its last sample
it is 450 numbers, x first, then y and z, that are cut into 18 rows of 25.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from wildflower.plugins.extras import needed
from wildflower.tasks.data import (
    Data,
    DataSet,
    decoded_files,
    find_file,
    make_data_set,
    stratified_test,
)
from wildflower.tasks.hub import existing_folder


def read_mat(file: Path, name: str) -> np.ndarray:
    """Return the array `name` of a .mat file.

    MissingExtraError where SciPy is not installed, ValueError for a file that is no whole .mat file of version 5 or 7
    or holds no numbers of that name.
    """
    with needed("scipy", f"reading {file}"):
        from scipy.io import loadmat
    try:
        found = loadmat(file)
    except Exception as error:  # a broken file fails wherever the reader happens to be in it
        raise ValueError(f"{file}: no whole .mat file of version 5 or 7 ({error}); fetch it again") from error
    array = found.get(name)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "uif":
        names = ", ".join(key for key in found if not key.startswith("__")) or "nothing"
        raise ValueError(f"{file}: holds {names}, but no numbers called '{name}'")
    return array


SOURCE = "http://www.sal.disco.unimib.it/technologies/unimib-shar/"
FILES = ("fall_data.mat", "fall_labels.mat")
AXES, WINDOW = 3, 151
IMAGE = (1, 18, 25)
FALLS = 8
TEST_FRACTION = 0.2


def load(data_dir: str) -> DataSet:
    """From fall_data.mat and fall_labels.mat in `data_dir`, which must be given; natural ids are the subjects.

    A fifth of each class is the test set, the same for every seed: the authors publish none.
    """
    wanted = f"{' and '.join(FILES)} of UniMiB SHAR, which {SOURCE} offers"
    folder = existing_folder("unimib-shar", data_dir, f"a folder with the files {wanted}")
    data, labels = [find_file(folder, name, "unimib-shar", wanted) for name in FILES]
    return decoded_files("unimib-shar", [data, labels], lambda: _decode(data, labels))


def _decode(data: Path, labels: Path) -> DataSet:
    """fall_data (windows, 3 * 151): x, y and z one after the other; fall_labels (windows, 3): kind, subject, trial."""
    windows, said = read_mat(data, "fall_data"), read_mat(labels, "fall_labels")
    if windows.ndim != 2 or windows.shape[1] != AXES * WINDOW:
        raise ValueError(f"{data}: fall_data must be (windows, {AXES * WINDOW}), not {windows.shape}")
    if said.ndim != 2 or said.shape[1] != 3:
        raise ValueError(f"{labels}: fall_labels must be (windows, 3), not {said.shape}")
    if len(windows) != len(said):
        raise ValueError(f"{data} has {len(windows)} windows, {labels} has {len(said)} labels: the counts must agree")
    if not np.isin(said[:, 0], range(1, FALLS + 1)).all():
        raise ValueError(f"{labels}: kinds of falls must be 1 to {FALLS}")
    samples = windows.astype(np.float32).reshape(-1, AXES, WINDOW)[:, :, :-1]
    everything = Data(
        torch.from_numpy(np.ascontiguousarray(samples)).view(-1, *IMAGE),
        torch.from_numpy(said[:, 0].astype(np.int64) - 1),
    )
    subjects = torch.from_numpy(np.unique(said[:, 1], return_inverse=True)[1].astype(np.int64))
    for_test = stratified_test(everything.labels, TEST_FRACTION)
    train, test = (Data(everything.inputs[part], everything.labels[part]) for part in (~for_test, for_test))
    return make_data_set(train, test, natural_ids=subjects[~for_test])
