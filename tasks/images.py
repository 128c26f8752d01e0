"""Images in a folder per class, such as train/cat/1.jpg or cat/1.jpg, listed with labels, or saved by `datasets`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tasks.data import (
    DECODED_VERSION,
    DataSet,
    decoded_once,
    describe_files,
    digest,
    make_data_set,
    split,
)
from tasks.hub import existing_folder, import_datasets
from tasks.own import OwnArguments, made
from tasks.texts import Rows, check_columns, csv_rows, files_behind, json_rows, saved

if TYPE_CHECKING:
    from PIL.Image import Image

PARTS = ("train", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_IMAGES, MAX_BYTES = 1_000_000, 2**33
MAX_PIXELS = 2**26  # of one image, before it is decoded
MODES = {"gray": "L", "rgb": "RGB"}  # of Pillow's


class ImageArguments(OwnArguments):
    """What the task `images` takes."""

    size: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=0, max_length=2)] = Field(
        (), description="Height and width to which all images are resized; empty: all must be of one size"
    )
    color: Literal["rgb", "gray"] = Field("rgb", description="Whether images are read in color or in gray")
    test_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="Share of each class that is kept for testing where there is no folder test/"
    )


def load(data_dir: str, arguments: ImageArguments) -> DataSet:
    """The images in `data_dir`, which must be given: of train/ and test/, or a share of each class is for testing."""
    if not data_dir:
        raise ValueError("the task 'images' needs data-dir: a folder with a folder of images for each class")
    found = own(data_dir, arguments)
    train, test = found.train, found.test
    if not len(test):
        train, test = split(train, arguments.test_share, data_dir)
    try:
        measured = make_data_set(train, test)
    except ValueError as error:
        raise ValueError(f"{data_dir}: {error}") from None
    return DataSet(train, test, found.classes, measured.mean, measured.std, label_names=found.label_names)


@dataclass(frozen=True)
class Listed:
    """An image that is to be read: what errors call it, its label, and what gives the bytes of its file."""

    name: str
    label: str | float
    encoded: Callable[[], bytes]


def own(data_dir: str, arguments: ImageArguments) -> DataSet:
    """The images of a device's folder, whose labels are the names of the folders that they lie in.

    With metadata.csv or metadata.jsonl beside the images their columns `file_name` and `label` say the labels. A folder
    that `save_to_disk` of `datasets` wrote has columns `image` and `label`.

    FileNotFoundError where there are none, ValueError where one cannot be read or images are of several sizes.
    """
    folder = existing_folder("images", data_dir)
    parted = any((folder / part).is_dir() for part in PARTS)
    folders = [folder / part for part in PARTS] if parted else [folder]
    found = [_listed(part) for part in folders]
    files = [file for files, _ in found for file in files]
    if not files:
        raise FileNotFoundError(
            f"{folder}: no images of the task 'images'; expected a folder per class, such as cat/1.jpg or "
            "train/cat/1.jpg, or metadata.csv with the columns file_name and label"
        )
    key = digest(
        decoded=[DECODED_VERSION, 2],  # the second is raised where this task reads images otherwise
        files=describe_files(files),
        size=arguments.size,
        color=arguments.color,
    )
    return decoded_once("images", key, lambda: _decode([list_images() for _, list_images in found], arguments))


def _listed(folder: Path) -> tuple[list[Path], Callable[[], list[Listed]]]:
    """The files that a folder's images depend on, and what lists the images."""
    if not folder.is_dir():
        return [], list
    if of_data_set := saved(folder, MAX_BYTES):
        return files_behind(of_data_set[0]), lambda: _saved(folder)
    for name, rows in (("metadata.csv", csv_rows), ("metadata.jsonl", json_rows)):
        file = folder / name
        if file.is_file():
            below = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]
            return [file, *below], partial(_named, folder, file, rows)
    files = [file for of_class in sorted(folder.iterdir()) if of_class.is_dir() for file in _images(of_class)]
    return files, lambda: [Listed(str(file), file.parent.name, file.read_bytes) for file in files]


def _images(folder: Path) -> list[Path]:
    """The images in a folder, in order; hidden files, and those of a hidden folder, are left out."""
    if folder.name.startswith("."):
        return []
    return sorted(
        file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != "." and file.is_file()
    )


def _named(folder: Path, file: Path, rows: Callable[[Path], Rows]) -> list[Listed]:
    """The images that a file of metadata lists."""
    found = []
    for line, row in rows(file):
        check_columns(row, ("file_name", "label"), file, line)
        if empty := [column for column in ("file_name", "label") if row[column] in (None, "")]:
            raise ValueError(f"{file}:{line}: {empty[0]} is empty")
        image, label = folder / str(row["file_name"]), row["label"]
        if not image.resolve().is_relative_to(folder.resolve()) or not image.is_file():
            raise ValueError(f"{file}:{line}: {row['file_name']!r} is no image in {folder}")
        found.append(Listed(str(image), label if isinstance(label, float) else str(label), image.read_bytes))
    return found


def _saved(folder: Path) -> list[Listed]:
    """The images of a data set that `save_to_disk` of `datasets` wrote."""
    rows = import_datasets().load_from_disk(str(folder))
    for column in ("image", "label"):
        if column not in rows.column_names:
            raise ValueError(f"{folder}: no column {column!r}, there are {', '.join(map(repr, rows.column_names))}")
    names = getattr(rows.features["label"], "names", None)
    table = rows.with_format("arrow")[:]
    labels = table.column("label").to_pylist()
    labels = labels if names is None else [names[label] for label in labels]
    return [
        Listed(f"{folder}, image {number}", label if isinstance(label, float) else str(label), partial(_bytes, image))
        for number, (image, label) in enumerate(zip(table.column("image").to_pylist(), labels, strict=True))
    ]


def _bytes(image: object) -> bytes:
    found = image.get("bytes") if isinstance(image, dict) else None
    if found is None:
        raise ValueError("the data set holds no bytes of it")
    return bytes(found)


def _decode(parts: list[list[Listed]], arguments: ImageArguments) -> DataSet:
    count = sum(map(len, parts))
    if count > MAX_IMAGES:
        raise ValueError(f"{count} images are more than {MAX_IMAGES}")
    first = _read(next(image for part in parts for image in part), arguments)
    if count * first.numel() > MAX_BYTES:
        raise ValueError(
            f"{count} images of {first.shape[1]} x {first.shape[2]} pixels take more than {MAX_BYTES} bytes: set a "
            "smaller size in task-arguments"
        )
    found = []
    for part in parts:
        inputs = torch.empty((len(part), *first.shape), dtype=torch.uint8)
        for place, listed in enumerate(part):
            image = _read(listed, arguments)
            if image.shape != first.shape:
                sizes = (f"{shape[1]} x {shape[2]}" for shape in (image.shape, first.shape))
                raise ValueError(
                    "{}: images are of mixed sizes, this one {} and the first {} pixels: set size in task-arguments, "
                    "such as size = [32, 32]".format(listed.name, *sizes)
                )
            inputs[place] = image
        found.append((inputs, [listed.label for listed in part]))
    return made(found)


def _read(listed: Listed, arguments: ImageArguments) -> Tensor:
    """An image as bytes (channels, height, width)."""
    try:
        return read_image(io.BytesIO(listed.encoded()), MODES[arguments.color], arguments.size)
    except (OSError, ValueError) as error:
        raise ValueError(f"{listed.name}: cannot be read as an image: {error}") from error


def read_image(file: Path | io.BytesIO, mode: str, size: Sequence[int] = ()) -> Tensor:
    """The bytes (channels, height, width) of an image, for training and for `wildflower predict` alike.

    Args:
        file: of at most MAX_PIXELS pixels; others are not decoded.
        mode, size: as of `pixels_of`.

    Raises:
        ValueError: it cannot be read as an image; the text says why.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            width, height = image.size
            of_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")  # as Pillow reads some that have 16
            of_32_bits = image.mode in ("I", "F") and not of_16_bits
            if width * height <= MAX_PIXELS and not of_32_bits:
                return pixels_of(image, mode, size)
    except UnidentifiedImageError:  # whose text names the file, or an object in memory by its address
        raise ValueError("its bytes are of no image format that is known here") from None
    except Image.DecompressionBombError:
        raise ValueError(f"it has more than {MAX_PIXELS} pixels") from None
    except (OSError, ValueError, SyntaxError) as error:  # those of the system have a number, Pillow's have none
        of_system = error.strerror if isinstance(error, OSError) else None
        lacks = str(error) if "not available" in str(error) else ""  # a decoder, in this installation of Pillow
        raise ValueError(of_system or lacks or "it is damaged, or a part of it is missing") from error
    if of_32_bits:  # which Pillow would clip to 255
        raise ValueError(
            "its pixels are signed or have 32 bits, and nothing says which value is white: save it with 8 or 16 bits"
        )
    raise ValueError(f"{width} x {height} are more than {MAX_PIXELS} pixels")


def pixels_of(image: Image, mode: str, size: Sequence[int] = ()) -> Tensor:
    """The bytes (channels, height, width) of an image that is open.

    Args:
        mode: Pillow's "L" or "RGB", to which the image is converted. Of gray values of 16 bits the upper 8 are taken.
        size: height and width, or one side of a square, to which it is resized; empty keeps its size.
    """
    from PIL.Image import Resampling, fromarray

    if image.mode.startswith("I"):  # which Pillow would clip to 255
        image = fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    image = image if image.mode == mode else image.convert(mode)
    if size and image.size != (size[-1], size[0]):
        image = image.resize((size[-1], size[0]), Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(mode)).permute(2, 0, 1).contiguous()
