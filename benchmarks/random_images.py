"""Random images in the format of a CIFAR-10 copy, for benchmarks where only the work counts and not what is learned."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np


def write_copy(folder: Path, *, train: int, test: int, side: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Write parquet files that the task `cifar10` reads as a local copy: random colors, random labels of 10 classes.

    Returns the training images (examples, side, side, 3) and labels.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    made = {}
    for split, count in (("train", train), ("test", test)):
        images = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
        labels = np.arange(count) % 10
        encoded = []
        for image in images:
            out = io.BytesIO()
            Image.fromarray(image).save(out, "PNG", compress_level=1)
            encoded.append({"bytes": out.getvalue(), "path": None})
        table = pa.table({"img": encoded, "label": labels})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
        made[split] = (images, labels)
    return made["train"]
