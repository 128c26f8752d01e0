"""Data sets in memory, and the cache folder that spares every later process the decoding.

A decoded data set is kept as one safetensors file. Reading it back maps the file, so that all client processes of a
machine share one copy of the pages and none of them imports the library that decoded it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import secrets
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wildflower.plugins.extras import data_package_text
from wildflower.tasks.labels import NO_LABEL, LabelKind
from wildflower.tasks.remarks import Remark, Remarks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import BaseModel

ONE_COLOR = "images are of one color all over, so that nothing can be seen in them"
SUMS_ROUND = 1e-14
MAX_NAMED = 3  # files in an error
STORED_TO_NORMALIZE = (torch.uint8, torch.float32, torch.float64)

DECODED_VERSION = 4
"""Raised whenever decoding changes, so that files of an older release are not read."""


@dataclass(frozen=True)
class Data:
    """Examples: `inputs` and `labels`, which are of a `wildflower.tasks.labels.LabelKind`.

    Inputs are bytes, (examples, channels, height, width) of images or (examples, sequence) of characters, or float32,
    (examples, channels, length) of signals, or like images where a signal is cut into rows, or float64,
    (examples, columns, 1) of tables, or int32, (examples, sequence) of a tokenizer's tokens.
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise ValueError(f"{len(self.inputs)} inputs do not go with {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def label_kind(self) -> LabelKind:
        """Return what the labels are."""
        if self.labels.is_floating_point():
            return "numbers"
        return "classes" if self.labels.dim() == 1 else "classes of tokens"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a data set of texts.

    tokens: how many there are, numbered from 0. pad_id: the one behind the end of a text. cut_texts: how many texts
    were longer than the limit, and were cut. separator: the token behind each text of a pair, where the tokenizer gives
    the second another token type than the first; -1: texts come alone, or it does not. unclear_pair: where the
    first pair stands a text of which holds the separator itself; "" where there is none.
    """

    tokens: int
    pad_id: int
    cut_texts: int = 0
    separator: int = -1
    unclear_pair: str = ""

    def check_pairs(self, separator: int) -> None:
        """Raise ValueError where a model tells texts apart by a token (-1: by none) that stands inside of one."""
        if separator >= 0 and self.unclear_pair:
            raise ValueError(
                f"{self.unclear_pair}: a text of this pair holds the tokenizer's separator, token {self.separator}, by "
                "which the model tells the two texts apart: write it otherwise, or take a model with one token type, "
                "such as DistilBERT"
            )


@dataclass(frozen=True)
class DataSet:
    """A decoded data set.

    `classes` is how many outputs a model has per label: 1 where labels are numbers.
    `mean` and `std` (channels,) are those of `train.inputs`, in the unit in which the inputs are stored; None where the
    inputs are tokens, which stand for themselves.
    `natural_ids` (training examples,) says which real-world source, numbered from 0, each example is from.
    `label_names`: what the classes are called, by number; () where they have no names.
    `columns`: names of the inputs' channels, of a table; () where they have none.
    `label_sets` (sources, classes), bool: which classes each source has, where every source has its own.
    `vocabulary`: of texts, whose tokens are a tokenizer's.
    `remarks`: what a person should know before round 1, such as files that were left out.
    `in_order`: natural ids are numbers of devices.
    """

    train: Data
    test: Data
    classes: int
    mean: Tensor | None = None
    std: Tensor | None = None
    natural_ids: Tensor | None = None
    label_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    label_sets: Tensor | None = None
    vocabulary: Vocabulary | None = None
    remarks: tuple[Remark, ...] = ()
    in_order: bool = False

    @property
    def cut_texts(self) -> int:
        """Return how many texts were longer than the limit, and were cut; 0 where the inputs are no texts."""
        return 0 if self.vocabulary is None else self.vocabulary.cut_texts


def make_data_set(train: Data, test: Data, *, natural_ids: Tensor | None = None) -> DataSet:
    """Return a data set of images (bytes), signals (float32) or tables (float64), with its classes, mean and deviation.

    Labels are of any `LabelKind`. Mean and deviation are per channel, in the precision of the inputs.

    All sums are exact, in whichever order: every machine normalizes by the same bits.
    """
    if not len(train) or not len(test):
        raise ValueError(f"a data set needs examples, found {len(train)} for training and {len(test)} for testing")
    if train.inputs.dtype != test.inputs.dtype or train.inputs.dtype not in STORED_TO_NORMALIZE:
        raise ValueError(
            f"training and test inputs must be bytes, float32 or float64, both alike, not {train.inputs.dtype} and "
            f"{test.inputs.dtype}"
        )
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise ValueError(
            f"training inputs are {tuple(train.inputs.shape[1:])}, test inputs {tuple(test.inputs.shape[1:])}: "
            "they must have one shape"
        )
    if not all(bool(inputs.isfinite().all()) for inputs in (train.inputs, test.inputs)):
        raise ValueError("an input is no finite number")
    if train.label_kind != test.label_kind:
        raise ValueError(f"training labels are {train.label_kind}, test labels {test.label_kind}: they must be alike")
    classes = _count_classes(train.label_kind, torch.cat([train.labels.flatten(), test.labels.flatten()]))
    centers = [center_of(channel) for channel in train.inputs.unbind(1)]
    per_channel = [
        [total / channel.numel() for total in channel_sums(channel, center)]
        for channel, center in zip(train.inputs.unbind(1), centers, strict=True)
    ]
    offset, square = torch.tensor(per_channel, dtype=torch.float64).unbind(1)
    mean = torch.tensor(centers, dtype=torch.float64) + offset
    std = (square - offset**2).clamp_min(0).sqrt()
    constant = [is_constant(*pair) for pair in zip(mean.tolist(), std.tolist(), strict=True)]
    if any(constant):
        raise ValueError(
            f"channel {constant.index(True)} of the training inputs, counted from 0, has one value only, so it "
            "cannot be normalized"
        )
    precision = torch.float64 if train.inputs.dtype == torch.float64 else torch.float32
    return DataSet(train, test, classes, mean.to(precision), std.to(precision), natural_ids)


def _count_classes(kind: LabelKind, labels: Tensor) -> int:
    if kind == "numbers":
        if not bool(labels.isfinite().all()):
            raise ValueError("a label is no finite number")
        return 1
    if kind == "classes of tokens":
        labels = labels[labels != NO_LABEL]
        if not len(labels):
            raise ValueError("no token has a label")
    if int(labels.min()) < 0:
        raise ValueError(f"labels count from 0, found {int(labels.min())}")
    return int(labels.max()) + 1


def center_of(values: Tensor) -> float:
    """Return what values of 64 bits are reduced by before they are squared: their mean in 32 bits; 0 for all others.

    The square of such a value has no room in 64 bits: of Unix seconds the deviation would be lost.
    """
    if values.dtype != torch.float64 or not values.numel():
        return 0.0
    return float(torch.tensor(math.fsum(values.flatten().tolist()) / values.numel()).float())


def is_constant(mean: float, std: float) -> bool:
    """Return whether a deviation is none, but for the rounding of sums of 64 bits about a center."""
    return std <= SUMS_ROUND * abs(mean)


def channel_sums(values: Tensor, center: float = 0.0) -> tuple[float, float]:
    """Return the sum and the sum of squares of values less a center, the same in whichever order they are added.

    Those of bytes are whole numbers. Those of float32 are rounded once: a 64-bit float holds the square of such a one.
    """
    if values.dtype == torch.uint8:
        counts, levels = torch.bincount(values.flatten(), minlength=256), torch.arange(256)
        return int(counts @ levels), int(counts @ levels**2)
    wide = values.double().flatten() - center
    return math.fsum(wide.tolist()), math.fsum((wide**2).tolist())


def stratified_test(labels: Tensor, fraction: float) -> Tensor:
    """Return a mask (examples,) of test examples for a data set that comes without: `fraction` of each class.

    The choice depends on the labels alone, never on the seed of a run.
    """
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        chosen = torch.randperm(len(members), generator=generator)[: round(fraction * len(members))]
        mask[members[chosen]] = True
    return mask


def split(data: Data, share: float, where: object) -> tuple[Data, Data]:
    """Split examples into those to train on and to test on: a share of each class, or of all numbers.

    ValueError, which says where the examples lie, where nothing would be left for one of them.
    """
    strata = data.labels if data.label_kind == "classes" else torch.zeros(len(data), dtype=torch.int64)
    mask = stratified_test(strata, share)
    if not mask.any() or mask.all():
        each = "" if data.label_kind != "classes" else f" of {len(strata.unique())} classes"
        raise ValueError(
            f"{where}: {len(data)} examples{each} are too few to keep a share of {share} of each for testing: give "
            "more of them, or some to test on"
        )
    return Data(data.inputs[~mask], data.labels[~mask]), Data(data.inputs[mask], data.labels[mask])


def refuse_unread_test_file(folder: Path, formats: Sequence[str], train: Sequence[str], arguments: BaseModel) -> None:
    """Raise ValueError where a test file lies beside that to train on, and the arguments do not say whether it is read.

    Args:
        folder: where the files lie.
        formats: how their names may end.
        train: the files to train on.
        arguments: of the task: `test` names a file, `test_share` says that a part of what is to train on is for
            testing.
    """
    names = [f"test{ending}" for ending in formats]
    found = [name for name in names if name not in train and (folder / name).is_file()]
    if found and not arguments.model_fields_set & {"test", "test_share"}:
        raise ValueError(
            f"{folder / found[0]} is not read, because task-arguments do not name it: add test = '{found[0]}', or "
            "test_share = 0.2 if a part of what is to train on shall be for testing, or move the file away"
        )


def one_color(images: Tensor) -> Tensor:
    """Return which of some images (images, channels, height, width) have several pixels, and all of one color: bool."""
    flat = images.flatten(2)
    return (flat == flat[:, :, :1]).flatten(1).all(dim=1) & (flat.shape[2] > 1)


def unread(files: Sequence[Path], formats: Sequence[str]) -> tuple[Remark, ...]:
    """Count the files of these formats that lie beside files that are read, and are not read themselves."""
    remarks = Remarks()
    for folder in sorted({file.parent for file in files}):
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in formats and path not in files and path.name[0] != "." and path.is_file():
                remarks.add("files beside those that are read, left out: task-arguments do not name them", path.name)
    return remarks.found()


CACHE = "WILDFLOWER_CACHE"  # of the environment


def cache_folder(kind: str) -> Path:
    """Return the folder for files of one kind (`data`, `partitions`): `$WILDFLOWER_CACHE`, else `~/.cache/wildflower`.

    The first one may be shared, and is made as the umask says. The second one only its user can enter.
    """
    root = os.environ.get(CACHE) or "~/.cache/wildflower"
    return Path(root).expanduser() / kind


def digest(**determined_by: object) -> str:
    """Return the name of a cache file: 20 hexadecimal digits over everything that determines its contents."""
    return hashlib.sha256(json.dumps(determined_by, sort_keys=True).encode()).hexdigest()[:20]


def no_file(folder: Path, name: str, task: str, expected: str) -> FileNotFoundError:
    """Return the error that says which file a folder lacks, and what it has."""
    there = sorted(path.name for path in folder.iterdir())
    holds = ", ".join(there[:MAX_NAMED]) + (", ..." if len(there) > MAX_NAMED else "")
    return FileNotFoundError(
        f"{folder}: no file {name} of the task '{task}'; expected {expected}; the folder holds {holds or 'nothing'}"
    )


def find_file(folder: Path, name: str, task: str, expected: str) -> Path:
    """Return the one file of that name in a folder or below it; FileNotFoundError for none, ValueError for several."""
    found = sorted(folder.rglob(name))
    if not found:
        raise no_file(folder, name, task, expected)
    if len(found) > 1:
        raise ValueError(f"{folder}: several files {name}: {', '.join(map(str, found))}; leave one")
    return found[0]


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Gives a path beside `target` to write to, renamed to `target` at the end.

    Other processes see no file or all of it; of several that write the same one, the last wins and nothing is lost.
    """
    # Hidden, so that no search for finished files finds it; named anew by every process and thread.
    beside = target.with_name(f".{target.stem}-{secrets.token_hex(8)}{target.suffix}")
    try:
        if not os.environ.get(CACHE):  # the user's own, which has examples of data that may be nobody else's
            target.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.touch(exist_ok=False)
    except OSError as error:
        raise OSError(
            f"cannot write to the cache folder {target.parent} ({error.strerror}); "
            "set WILDFLOWER_CACHE to a folder that can be written"
        ) from error
    try:
        yield beside
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def installed_data(task: str, package: str, download: str, inside: str, otherwise: str) -> Path:
    """Return the folder of an installed package with data, which is found without importing it.

    Args:
        task: whose data they are.
        package: what it calls itself in site-packages.
        download: what it is called where packages are downloaded.
        inside: a pattern of files or folders that it has.
        otherwise: what a data folder could have in its stead, for the error.

    Raises:
        FileNotFoundError: the package is not installed, or has no such files.
    """
    found = importlib.util.find_spec(package)
    for place in (found.submodule_search_locations or []) if found else []:
        if any(Path(place).glob(inside)):
            return Path(place)
    raise FileNotFoundError(
        f"no data for the task {task!r}: {data_package_text(download)}; or set data-dir to a folder with {otherwise}"
    )


def decoded_files(name: str, files: Sequence[Path], decode: Callable[[], DataSet], **also: object) -> DataSet:
    """Return the data set of some files, decoded by the first process that asks; `also`: what else it follows from."""
    described = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return decoded_once(name, digest(decoded=DECODED_VERSION, files=described, **also), decode)


def decoded_once(name: str, key: str, decode: Callable[[], DataSet]) -> DataSet:
    """Return the data set of the cache file `name`-`key`, decoded and written there by the first process that asks."""
    file = cache_folder("data") / f"{name}-{key}.safetensors"
    if not file.exists():
        write_data_set(decode(), file)
    try:
        return read_data_set(file)
    except ValueError as error:
        raise ValueError(f"{error}; delete it and it is made anew") from error


def read_data_set(file: Path) -> DataSet:
    """Return the data set of a file of `write_data_set`; ValueError where it cannot be read."""
    try:
        with safe_open(file, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  it is no dictionary
            facts = json.loads(opened.metadata()["facts"])
        return DataSet(
            train=Data(tensors["train_inputs"], tensors["train_labels"]),
            test=Data(tensors["test_inputs"], tensors["test_labels"]),
            classes=facts["classes"],
            mean=tensors.get("mean"),
            std=tensors.get("std"),
            natural_ids=tensors.get("natural_ids"),
            label_names=tuple(facts["label_names"]),
            columns=tuple(facts.get("columns", ())),
            label_sets=tensors.get("label_sets"),
            vocabulary=None if facts["vocabulary"] is None else Vocabulary(**facts["vocabulary"]),
            remarks=tuple(map(Remark.model_validate, facts["remarks"])),
            in_order=facts["in_order"],
        )
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"the file {file} cannot be read ({error})") from error


def write_data_set(data: DataSet, file: Path) -> None:
    """Write a data set as one safetensors file."""
    tensors = {
        "train_inputs": data.train.inputs,
        "train_labels": data.train.labels,
        "test_inputs": data.test.inputs,
        "test_labels": data.test.labels,
        "mean": data.mean,
        "std": data.std,
        "natural_ids": data.natural_ids,
        "label_sets": data.label_sets,
    }
    facts = {
        "classes": data.classes,
        "label_names": data.label_names,
        "columns": data.columns,
        "vocabulary": None if data.vocabulary is None else asdict(data.vocabulary),
        "remarks": [remark.model_dump() for remark in data.remarks],
        "in_order": data.in_order,
    }
    given = {key: value.contiguous() for key, value in tensors.items() if value is not None}
    with written_whole(file) as beside:
        save_file(given, beside, metadata={"facts": json.dumps(facts)})
