"""The 1,797 handwritten digits that come with scikit-learn (UCI "Optical Recognition of Handwritten Digits")."""

from __future__ import annotations

import torch

from wildflower.plugins.extras import needed
from wildflower.tasks.data import Data, DataSet, decoded_files, make_data_set, stratified_test

TEST_FRACTION = 0.2
"""The share of every class; scikit-learn's copy comes without a test set."""


def load(data_dir: str) -> DataSet:
    """Return digits: 8x8 images of values 0 to 16, 10 classes, 80 % of each for training; there is no data folder."""
    if data_dir:
        raise ValueError(f"the task 'digits' comes with scikit-learn and takes no data folder, got '{data_dir}'")
    return decoded_files("digits", [], _decode)


def _decode() -> DataSet:
    with needed("sklearn", "the task 'digits', whose data come with scikit-learn,"):
        from sklearn.datasets import load_digits
    pixels, targets = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).to(torch.uint8).view(-1, 1, 8, 8)
    labels = torch.from_numpy(targets).long()
    test = stratified_test(labels, TEST_FRACTION)
    return make_data_set(Data(inputs[~test], labels[~test]), Data(inputs[test], labels[test]))
