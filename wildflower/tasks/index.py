"""Index files: which device holds which examples, kept so that machines whose last bits differ share one partition."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wildflower.tasks.data import cache_folder, digest, written_whole

INDEX_VERSION = 1
"""Raised whenever partitions change, so that index files of an older release are not read."""


@dataclass(frozen=True)
class Index:
    """Examples of every device: device d holds `examples[starts[d] : starts[d + 1]]`."""

    examples: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> Index:
        """Return the index of the examples of each device."""
        return cls(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, device: int) -> np.ndarray:
        return self.examples[self.starts[device] : self.starts[device + 1]]

    def deals_all(self, examples: int, devices: int) -> bool:
        """Return whether every example is dealt once and every device has some."""
        sizes = np.diff(self.starts)
        once = np.array_equal(np.sort(self.examples), np.arange(examples))
        return once and len(self) == devices and self.starts[0] == 0 and sizes.sum() == examples and sizes.min() > 0


def kept_index(
    partition: str, column: np.ndarray, parts: int, compute: Callable[[], Index], **settings: float
) -> Index:
    """Return the index that is kept for a column of labels or sources and these settings; computed if there is none.

    ValueError where the file is damaged or does not deal every example once.
    """
    hashed = hashlib.sha256(np.ascontiguousarray(column, dtype="<i8").tobytes()).hexdigest()
    key = digest(index=INDEX_VERSION, partition=partition, column=hashed, **settings)
    file = cache_folder("partitions") / f"{partition}-{key}.npz"
    if not file.exists():
        index = compute()
        with written_whole(file) as beside:
            np.savez(beside, examples=index.examples, starts=index.starts)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            index = Index(arrays["examples"], arrays["starts"])
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"the index file {file} cannot be read ({error}); delete it and it is made anew") from error
    if not index.deals_all(len(column), parts):
        raise ValueError(f"{file}: does not deal {len(column)} examples to {parts} devices; delete it")
    return index
