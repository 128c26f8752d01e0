"""Data sets in the format of the Hugging Face hub: downloaded by `datasets`, or from a local copy. Images, and rows."""

from __future__ import annotations

import io
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from wildflower.plugins.extras import needed
from wildflower.plugins.raised_as import raised_as
from wildflower.tasks.arguments import TaskArguments
from wildflower.tasks.data import (
    Data,
    DataSet,
    decoded_files,
    make_data_set,
    stratified_test,
)
from wildflower.tasks.decoding import read_image

if TYPE_CHECKING:
    from datasets import Dataset

PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Repository:
    """The place of a data set on the hub, and the names of its columns."""

    path: str
    channels: int = 0
    image: str = "image"
    label: str = "label"
    config: str | None = None
    natural_id: str | None = None
    held_out: float = 0.0
    """Fraction of each class held out as the test set, for a repository without one."""
    size: tuple[int, ...] = ()
    """Height and width to which images are resized, or one side of a square; empty keeps their size."""


REPOSITORIES = {
    "mnist": Repository("ylecun/mnist", 1),
    "fashion-mnist": Repository("zalando-datasets/fashion_mnist", 1),
    "cifar10": Repository("uoft-cs/cifar10", 3, image="img"),
    "cifar100": Repository("uoft-cs/cifar100", 3, image="img", label="fine_label"),
    "svhn": Repository("ufldl-stanford/svhn", 3, config="cropped_digits"),
    "stl10": Repository("tanganke/stl10", 3),
    "femnist": Repository("flwrlabs/femnist", 1, label="character", natural_id="writer_id", held_out=0.1),
}


class FemnistArguments(TaskArguments):
    """Arguments of the task `femnist`."""

    size: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=0, max_length=2)] = Field(
        (), description="Height and width to which the images of 28 x 28 are resized; empty: they stay as they are"
    )


def existing_folder(name: str, data_dir: str, needed: str = "") -> Path:
    """`data_dir` as a path; FileNotFoundError unless it is a folder: no other place is searched in its stead.

    needed: what must be given, of a task that has no other place; ValueError where nothing is.
    """
    if needed and not data_dir:
        raise ValueError(f"the task '{name}' needs data-dir: {needed}")
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"data-dir '{data_dir}' of the task '{name}' {what}; it must be a folder")
    return folder


def find_local(folder: Path) -> list[Path]:
    """Return the files of a local copy: parquet files as on the hub, or what `save_to_disk` wrote; empty if neither."""
    return sorted(folder.rglob("*.parquet")) or sorted(folder.rglob("*.arrow"))


def files_of_copy(folder: Path, task: str, repository: str, part: str = "") -> list[Path]:
    """`find_local`; FileNotFoundError where there are no files.

    Args:
        task: whose data are looked for.
        repository: what is copied, for the error.
        part: a folder inside, which is searched instead if it is there.
    """
    files = find_local(folder / part if (folder / part).is_dir() else folder)
    if not files:
        example = Path(part) / "train-00000-of-00001.parquet"
        raise FileNotFoundError(
            f"{folder}: no data of the task '{task}'; expected parquet files such as {example}, or a folder that "
            f"save_to_disk of `datasets` wrote, of {repository} on the Hugging Face hub"
        )
    return files


def load(name: str, data_dir: str, arguments: FemnistArguments | None = None) -> DataSet:
    """Return the data set `name` of REPOSITORIES from a local copy in `data_dir`, else from the hub.

    FileNotFoundError when there is no copy and the hub cannot be reached; ValueError when a copy lacks a column.
    """
    repository = REPOSITORIES[name]
    if arguments is not None:
        repository = replace(repository, size=arguments.size)
    folder = existing_folder(name, data_dir) if data_dir else None
    return decoded_files(
        name,
        [] if folder is None else files_of_copy(folder, name, repository.path),
        lambda: _decode(repository, lambda split: open_split(repository, split, folder)),
        repository=None if folder else (repository.path, repository.config),
        size=repository.size,
    )


def open_split(repository: Repository, split: str, folder: Path | None) -> Dataset:
    """Return the rows of a split, of a local copy in `folder` or from the hub."""
    return _download(repository, split) if folder is None else _open(folder, repository, split)


def import_datasets() -> Any:
    """Return the package `datasets`; MissingExtraError says how it is installed."""
    with needed("datasets", "a data set of the hub, or in its format,"):
        import datasets
    return datasets


def _download(repository: Repository, split: str) -> Dataset:
    datasets = import_datasets()
    if Path(repository.path).exists():  # which `datasets` would read
        raise ValueError(f"{repository.path} lies here, and so is no name on the hub: set data-dir to it")
    problem = unreachable()
    try:
        with _offline() if problem else nullcontext():
            return datasets.load_dataset(repository.path, repository.config, split=split)
    except OSError as error:
        raise FileNotFoundError(
            f"the data set {repository.path} could not be downloaded ({problem or error}); "
            f"connect to the hub once, or set data-dir to a local copy of {repository.path}"
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # such as an unknown configuration
        config = f", configuration {repository.config}" if repository.config else ""
        raise ValueError(f"the data set {repository.path}{config}, split {split}, cannot be read: {error}") from error


def unreachable() -> str:
    """Return why no connection to the hub can be made; "" where it answers, whatever it says."""
    from huggingface_hub.constants import ENDPOINT as endpoint

    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except OSError as error:
        reason = getattr(error, "reason", error)
        # Who distrusts a certificate has reached somebody; the hub's client may have other authorities.
        return "" if isinstance(reason, ssl.SSLError) else f"no connection to {endpoint}: {reason}"
    return ""


@contextmanager
def _offline() -> Iterator[None]:
    """Let the hub's client look in its cache only: without a network it tries every request six times in 23 seconds.

    Neither `datasets` nor the client has a setting for how often it tries.
    """
    import datasets.config
    import huggingface_hub.constants

    places: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _open(folder: Path, repository: Repository, split: str) -> Dataset:
    """Return the rows of a split in a local copy: of its parquet files, else of what `save_to_disk` wrote."""
    datasets = import_datasets()
    if repository.config is not None and (folder / repository.config).is_dir():
        folder = folder / repository.config
    parquet = sorted(file for file in folder.rglob("*.parquet") if _is_of_split(file, split))
    places = sorted({str(file.parent.parent if file.parent.name == split else file.parent) for file in parquet})
    if len(places) > 1:
        named = f"is none of them: {repository.config}" if repository.config else "is not named"
        raise ValueError(
            f"{folder}: several folders have data of the split '{split}' ({', '.join(places)}), and the configuration "
            f"{named}. data-dir may be one of them"
        )
    if parquet:
        import pyarrow

        return datasets.Dataset(pyarrow.concat_tables([_read_parquet(file) for file in parquet]))
    # A repository without a test set may have been saved as one data set, without a folder per split.
    for saved in (folder / split, folder) if repository.held_out else (folder / split,):
        if (saved / "state.json").is_file():
            rows = datasets.load_from_disk(str(saved))
            # Without a name, or as a part of a split: train[:10%].
            if saved == folder and rows.split is not None and str(rows.split).partition("[")[0] != split:
                raise ValueError(f"{saved}: this is the split '{rows.split}', and not '{split}'")
            return rows
    raise FileNotFoundError(f"{folder}: no data of the split '{split}', such as {split}-00000-of-00001.parquet")


def _is_of_split(file: Path, split: str) -> bool:
    """Return whether a file is `<split>.parquet`, `<split>-00000-of-00001.parquet` or `<split>/<number>.parquet`."""
    stem = file.stem.split("-")[0]
    return stem == split or (stem.isdecimal() and file.parent.name == split)


def _read_parquet(file: Path) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file}: not a whole parquet file ({file.stat().st_size} bytes): {error}") from error


def _decode(repository: Repository, open_split: Callable[[str], Dataset]) -> DataSet:
    rows = open_split("train")
    train = _examples(rows, repository)
    sources = None
    if repository.natural_id is not None:
        sources = np.array([row[repository.natural_id] for row in _columns(rows, repository, repository.natural_id)])
    if repository.held_out:
        for_test = stratified_test(train.labels, repository.held_out)
        test = Data(train.inputs[for_test], train.labels[for_test])
        train = Data(train.inputs[~for_test], train.labels[~for_test])
        sources = None if sources is None else sources[~for_test.numpy()]
    else:
        test = _examples(open_split("test"), repository)
    if sources is None:
        return make_data_set(train, test)
    numbered = np.unique(sources, return_inverse=True)[1].astype(np.int64)
    return make_data_set(train, test, natural_ids=torch.from_numpy(numbered))


def _columns(rows: Dataset, repository: Repository, *columns: str) -> Iterator[dict[str, Any]]:
    """Yield some columns of each row, a thousand at a time, with images as files; ValueError if there is no such."""
    for column in columns:
        if column not in rows.column_names:
            there = ", ".join(rows.column_names)
            raise ValueError(f"the copy of {repository.path} has no column '{column}', only {there}")
    for table in rows.select_columns(list(columns)).with_format("arrow").iter(batch_size=1000):
        yield from table.to_pylist()


def _examples(rows: Dataset, repository: Repository) -> Data:
    images: Tensor | None = None
    labels = torch.empty(len(rows), dtype=torch.int64)
    for position, row in enumerate(_columns(rows, repository, repository.image, repository.label)):
        with raised_as(ValueError, f"{repository.path}: image {position} cannot be decoded: ", (ValueError, TypeError)):
            encoded, color = io.BytesIO(row[repository.image]["bytes"]), "RGB" if repository.channels == 3 else "L"
            image = read_image(encoded, color, repository.size)
        if images is None:
            images = torch.empty((len(rows), *image.shape), dtype=torch.uint8)
        if image.shape != images.shape[1:]:
            raise ValueError(
                f"{repository.path}: image {position} is {tuple(image.shape)}, the first is {tuple(images.shape[1:])}"
            )
        images[position], labels[position] = image, row[repository.label]
    if images is None:
        raise ValueError(f"{repository.path}: a split has no examples")
    return Data(images, labels)
