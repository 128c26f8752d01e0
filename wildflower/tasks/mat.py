"""Arrays out of MATLAB's files (version 5 and 7, as SVHN and UniMiB SHAR are published)."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from wildflower.plugins.extras import needed


def read_mat(file: Path, name: str) -> np.ndarray:
    """Return the array `name` of a .mat file.

    MissingExtraError where SciPy is not installed, ValueError for a file that is no whole .mat file of version 5 or 7
    or holds no numbers of that name.
    """
    with needed("scipy", f"reading {file}"):
        from scipy.io import loadmat
        from scipy.io.matlab import MatReadError
    try:
        found = loadmat(file)
    # A broken file fails wherever the reader happens to be in it.
    except (
        MatReadError,
        ArithmeticError,
        EOFError,
        LookupError,
        MemoryError,
        NotImplementedError,
        OSError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        raise ValueError(f"{file}: no whole .mat file of version 5 or 7 ({error}); fetch it again") from error
    array = found.get(name)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "uif":
        names = ", ".join(key for key in found if not key.startswith("__")) or "nothing"
        raise ValueError(f"{file}: holds {names}, but no numbers called '{name}'")
    return array
