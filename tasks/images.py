"""A folder of images with a folder per class below it: train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from tasks.data import (
    DECODED_VERSION,
    Data,
    DataSet,
    decoded_once,
    describe_files,
    digest,
    make_data_set,
    stratified_test,
)
from tasks.hub import existing_folder
from tasks.own import OwnArguments, made

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_IMAGES, MAX_PIXELS, MAX_BYTES = 1_000_000, 2**26, 2**33
MODES = {"gray": ("L", 1), "rgb": ("RGB", 3)}


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
        mask = stratified_test(train.labels, arguments.test_share)
        train, test = (Data(train.inputs[part], train.labels[part]) for part in (~mask, mask))
    measured = make_data_set(train, test)
    return DataSet(train, test, found.classes, measured.mean, measured.std, label_names=found.label_names)


def own(data_dir: str, arguments: ImageArguments) -> DataSet:
    """The images of a device's folder; the name of the folder that an image lies in is its label.

    FileNotFoundError where there are none, ValueError where one cannot be read or images are of several sizes.
    """
    folder = existing_folder("images", data_dir)
    parted = any((folder / part).is_dir() for part in ("train", "test"))
    files = [_files(folder / part) if parted else [] for part in ("train", "test")]
    if not parted:
        files[0] = _files(folder)
    listed = [file for part in files for file in part]
    if not listed:
        raise FileNotFoundError(
            f"{folder}: no images of the task 'images'; expected a folder per class, such as cat/1.jpg or "
            "train/cat/1.jpg"
        )
    key = digest(
        decoded=DECODED_VERSION,
        files=describe_files(listed),
        size=arguments.size,
        color=arguments.color,
    )
    return decoded_once("images", key, lambda: _decode(files, arguments))


def _files(folder: Path) -> list[Path]:
    """The images of all class folders in a folder, in order; hidden files and folders are left out."""
    classes = (
        sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".") if folder.is_dir() else []
    )
    found = [
        file
        for of_class in classes
        for file in sorted(of_class.iterdir())
        if file.suffix.lower() in SUFFIXES and file.name[0] != "." and file.is_file()
    ]
    if len(found) > MAX_IMAGES:
        raise ValueError(f"{folder}: {len(found)} images are more than {MAX_IMAGES}")
    return found


def _decode(files: list[list[Path]], arguments: ImageArguments) -> DataSet:
    first = _read(next(file for part in files for file in part), arguments)
    count = sum(map(len, files))
    if count * first.numel() > MAX_BYTES:
        raise ValueError(
            f"{count} images of {first.shape[1]} x {first.shape[2]} pixels take more than {MAX_BYTES} bytes: set a "
            "smaller size in task-arguments"
        )
    parts = []
    for part in files:
        inputs = torch.empty((len(part), *first.shape), dtype=torch.uint8)
        for place, file in enumerate(part):
            image = _read(file, arguments)
            if image.shape != first.shape:
                sizes = (f"{shape[1]} x {shape[2]}" for shape in (image.shape, first.shape))
                raise ValueError(
                    "{}: images are of mixed sizes, this one {} and the first {} pixels: set size in task-arguments, "
                    "such as size = [32, 32]".format(file, *sizes)
                )
            inputs[place] = image
        parts.append((inputs, [file.parent.name for file in part]))
    return made(parts)


def _read(file: Path, arguments: ImageArguments) -> Tensor:
    """An image as bytes (channels, height, width)."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} are more than {MAX_PIXELS} pixels")
            return _tensor(image, arguments)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, ValueError, SyntaxError) as error:
        raise ValueError(f"{file}: cannot be read as an image: {error or type(error).__name__}") from error


def _tensor(image: Image, arguments: ImageArguments) -> Tensor:
    from PIL.Image import Resampling

    mode, channels = MODES[arguments.color]
    image = image if image.mode == mode else image.convert(mode)
    if arguments.size:
        height, width = arguments.size[0], arguments.size[-1]
        if image.size != (width, height):
            # As `wildflower predict` does, which is to see what was trained on.
            image = image.resize((width, height), Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()
