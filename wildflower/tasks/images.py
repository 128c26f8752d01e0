"""Images in a folder per class, such as train/cat/1.jpg or cat/1.jpg, listed with labels, or saved by `datasets`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from wildflower.plugins.raised_as import raised_as
from wildflower.tasks.class_folders import (
    METADATA,
    TESTING,
    VALIDATION,
    images_below,
    images_of_classes,
    layout_of,
)
from wildflower.tasks.data import (
    ONE_COLOR,
    DataSet,
    decoded_files,
    make_data_set,
    one_color,
    split,
)
from wildflower.tasks.decoding import decoded
from wildflower.tasks.device_data import OwnArguments, made, renamed
from wildflower.tasks.hub import existing_folder, import_datasets
from wildflower.tasks.remarks import Remarks, in_words, joined
from wildflower.tasks.rows import as_name, check_columns, files_behind, named_rows, rows_of, saved

DARK = "images have no value above 15 of 255: scans of 12 bits must be scaled to 16 before they are saved"
SEVERAL = "images have several frames or pages, of which the first alone is read"
MAX_IMAGES, MAX_BYTES = 1_000_000, 2**33
MODES = {"gray": "L", "rgb": "RGB"}  # of Pillow's


class ImageArguments(OwnArguments):
    """Arguments of the task `images`."""

    dealt_out = ("classes",)

    size: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=0, max_length=2)] = Field(
        (), description="Height and width to which all images are resized; empty: all must be of one size"
    )
    color: Literal["rgb", "gray"] = Field("rgb", description="Whether images are read in color or in gray")
    test_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="Share of each class that is kept for testing where there is no folder test/"
    )


def load(data_dir: str, arguments: ImageArguments) -> DataSet:
    """Return the images in `data_dir`, which must be given: of train/ and test/, or with a share of each to test on."""
    found = own(data_dir, arguments)
    train, test = found.train, found.test
    if not len(train):
        why = f": {in_words(found.remarks)}" if found.remarks else ""
        raise ValueError(f"{data_dir}: there are images to test on and none to train on{why}")
    if not len(test):
        train, test = split(train, arguments.test_share, data_dir)
    names = found.label_names
    with raised_as(ValueError, f"{data_dir}: "):
        if arguments.classes:
            names = arguments.classes
            train, test = (renamed(part, found.label_names, names) for part in (train, test))
        measured = make_data_set(train, test)
    return replace(measured, classes=len(names) or 1, label_names=names, remarks=found.remarks)


@dataclass(frozen=True)
class Listed:
    """An image that is to be read: what errors call it, its label, and what gives the bytes of its file."""

    name: str
    label: str | float
    encoded: Callable[[], bytes]

    @property
    def short(self) -> str:
        """Its name without most of its path."""
        return "/".join(Path(self.name).parts[-2:])


def own(data_dir: str, arguments: ImageArguments) -> DataSet:
    """Return the images of a device's folder, whose labels are the names of the folders that they lie in.

    With metadata.csv or metadata.jsonl beside the images their columns `file_name` and `label` say the labels. A folder
    that `save_to_disk` of `datasets` wrote has columns `image` and `label`.

    FileNotFoundError where there are none, ValueError where one cannot be read or images are of several sizes.
    """
    folder, remarks = existing_folder("images", data_dir, "a folder with a folder of images for each class"), Remarks()
    # A list of the images, or what `datasets` wrote.
    is_listed = any((folder / name).is_file() for name in (*METADATA, "state.json"))
    parts = (folder, None) if is_listed else layout_of(folder, arguments.classes, remarks)
    found = [_listed(part, arguments.classes, remarks, testing=number > 0) for number, part in enumerate(parts)]
    files = [file for files, _ in found for file in files]
    if not files:
        but = f", but {in_words(left_out)}" if (left_out := remarks.found()) else ""
        raise FileNotFoundError(
            f"{folder}: no images of the task 'images'{but}; expected a folder per class, such as cat/1.jpg or "
            "train/cat/1.jpg, or metadata.csv with the columns file_name and label"
        )
    data = decoded_files(
        "images",
        files,
        lambda: _decode([list_images() for _, list_images in found], arguments),
        version=4,  # raised where this task reads images otherwise
        labels=[[file.relative_to(folder).parts for file in of_part] for of_part, _ in found],
        size=arguments.size,
        color=arguments.color,
    )
    return replace(data, remarks=joined([*remarks.found(), *data.remarks]))


def _listed(
    folder: Path | None, classes: Sequence[str], remarks: Remarks, *, testing: bool
) -> tuple[list[Path], Callable[[], list[Listed]]]:
    """Return the files that a folder's images depend on, and what lists the images."""
    if folder is None:
        return [], list
    if of_data_set := saved(folder, MAX_BYTES):
        return files_behind(of_data_set[0]), lambda: _saved(folder)
    lists = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(lists) > 1:
        raise ValueError(f"{folder}: there are {METADATA[0]} and {METADATA[1]}: leave one of them")
    if lists:
        named = _named(folder, lists[0])
        listed = {Path(each.name) for each in named}
        below = list(images_below(folder, Remarks()))
        for path in below:
            if path not in listed:
                remarks.add(f"images that {lists[0].name} does not list, left out", path.relative_to(folder))
        return [lists[0], *below], lambda: named
    files = images_of_classes(folder, classes, remarks, testing=testing)
    return files, lambda: [Listed(str(file), file.relative_to(folder).parts[0], file.read_bytes) for file in files]


def _named(folder: Path, file: Path) -> list[Listed]:
    """Return the images that a file of metadata lists."""
    found = dict[Path, Listed]()
    for line, row in rows_of(file):
        check_columns(row, ("file_name", "label"), file, line)
        if empty := [column for column in ("file_name", "label") if row[column] in (None, "")]:
            raise ValueError(f"{file}:{line}: {empty[0]} is empty")
        image, label = folder / str(row["file_name"]), row["label"]
        if not image.is_file():
            image = folder / str(row["file_name"]).replace("\\", "/")  # as Windows writes paths
        if not image.resolve().is_relative_to(folder.resolve()) or not image.is_file():
            raise ValueError(f"{file}:{line}: {row['file_name']!r} is no image in {folder}")
        if image in found:
            raise ValueError(f"{file}:{line}: {row['file_name']!r} is listed twice")
        with raised_as(ValueError, f"{file}:{line}: label "):
            found[image] = Listed(str(image), label if isinstance(label, float) else as_name(label), image.read_bytes)
    below = {image.relative_to(folder).parts[0].lower() for image in found if image.parent != folder}
    if splits := sorted(below.intersection((*TESTING, *VALIDATION))):
        raise ValueError(
            f"{file}: it lists images in {splits[0]}/ beside others, and all of them would be trained on: put a list "
            "into each of the folders train and test"
        )
    return list(found.values())


def _saved(folder: Path) -> list[Listed]:
    """Return the images of a data set that `save_to_disk` of `datasets` wrote."""
    datasets, found = import_datasets(), []
    rows = datasets.load_from_disk(str(folder))
    if "image" in rows.column_names:
        rows = rows.cast_column("image", datasets.Image(decode=False))
    for number, row in named_rows(rows, f"{folder}, image "):
        check_columns(row, ("image", "label"), folder, number, ", image ")
        label = row["label"] if isinstance(row["label"], float) else str(row["label"])
        found.append(Listed(f"{folder}, image {number}", label, partial(_bytes, row["image"])))
    return found


def _bytes(image: object) -> bytes:
    found = image.get("bytes") if isinstance(image, dict) else None
    if found is None:
        raise ValueError("the data set holds no bytes of it")
    return bytes(found)


def _decode(parts: list[list[Listed]], arguments: ImageArguments) -> DataSet:
    count = sum(map(len, parts))
    if count > MAX_IMAGES:
        raise ValueError(f"{count} images are more than {MAX_IMAGES}")
    remarks, broken, found = Remarks(), list[str](), []
    first: torch.Size | None = None
    for part in parts:
        inputs: Tensor | None = None
        for place, listed in enumerate(part):
            try:
                image, several = _read(listed, arguments)
            except ValueError as error:  # the others are looked at all the same, so that all are mended at once
                broken.append(str(error))
                continue
            first = first or image.shape
            if count * image.numel() > MAX_BYTES:
                raise ValueError(
                    f"{count} images of {image.shape[1]} x {image.shape[2]} pixels take more than {MAX_BYTES} bytes: "
                    "set a smaller size in task-arguments"
                )
            if image.shape != first:
                sizes = (f"{shape[1]} x {shape[2]}" for shape in (image.shape, first))
                raise ValueError(
                    "{}: images are of mixed sizes, this one {} and the first {} pixels: set size in task-arguments, "
                    "such as size = [32, 32]".format(listed.name, *sizes)
                )
            if several:
                remarks.add(SEVERAL, listed.short)
            if bool(one_color(image[None])):
                remarks.add(ONE_COLOR, listed.short)
            elif int(image.max()) < 16:
                remarks.add(DARK, listed.short)
            inputs = torch.empty((len(part), *first), dtype=torch.uint8) if inputs is None else inputs
            inputs[place] = image
        found.append((inputs, [listed.label for listed in part]))
    if broken:
        raise ValueError(broken[0] + (f" ({len(broken)} images cannot be read, this is the first)" * (len(broken) > 1)))
    assert first is not None
    empty = torch.empty((0, *first), dtype=torch.uint8)
    data = made([(empty if inputs is None else inputs, labels) for inputs, labels in found])
    return replace(data, remarks=remarks.found())


def _read(listed: Listed, arguments: ImageArguments) -> tuple[Tensor, bool]:
    """Return an image as bytes (channels, height, width), and whether there are more frames than that."""
    with raised_as(ValueError, f"{listed.name}: cannot be read as an image: ", (OSError, ValueError)):
        return decoded(io.BytesIO(listed.encoded()), MODES[arguments.color], arguments.size)
