"""Data that lie on the devices: the partition `own`, under which every device trains on what its own folder holds.

The server has a folder of the same kind. It says what all data must look like (`Agreed`), and its test set scores the
global model. A node reads the `data-dir` of its own configuration; in a simulation device n has the folder
`devices/n` in the server's, four digits wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from tasks.data import Data, DataSet

FOLDERS = "devices"
"""Where in the server's folder simulated devices have theirs."""


class OwnDataError(ValueError):
    """A device's data are not what the run needs; the text says what is wrong and what would be right."""


class Agreed(BaseModel):
    """What the data of all devices have in common; it travels with every order.

    Attributes:
        input_shape: of one example.
        input_dtype: of the inputs as stored, such as "uint8".
        label_kind: as `tasks.data.Data.label_kind`.
        classes: how many outputs a model has.
        label_names: what the classes are called, by number; () where they have no names.
        mean, std: by which inputs are normalized, per channel; () where inputs are tokens.
        tokens, pad_id: of texts, the tokenizer's; None otherwise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_shape: tuple[int, ...]
    input_dtype: str
    label_kind: str
    classes: int = Field(ge=1)
    label_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    tokens: int | None = None
    pad_id: int | None = None

    @classmethod
    def of(cls, data: DataSet) -> Agreed:
        """What the server's data say."""
        return cls(
            input_shape=tuple(data.train.inputs.shape[1:]),
            input_dtype=_dtype(data.train.inputs),
            label_kind=data.train.label_kind,
            classes=data.classes,
            label_names=data.label_names,
            mean=() if data.mean is None else tuple(data.mean.tolist()),
            std=() if data.std is None else tuple(data.std.tolist()),
            tokens=None if data.vocabulary is None else data.vocabulary.tokens,
            pad_id=None if data.vocabulary is None else data.vocabulary.pad_id,
        )

    def fitted(self, data: DataSet, who: str) -> DataSet:
        """A device's data as the run has them: classes by the run's numbers, normalized as all others.

        Raises:
            OwnDataError: inputs or labels are of another kind, or a label is none of the run's.
        """
        train = self._fitted(data.train, data.label_names, who)
        test = self._fitted(data.test, data.label_names, who) if len(data.test) else data.test
        vocabulary = data.vocabulary and (data.vocabulary.tokens, data.vocabulary.pad_id)
        if vocabulary != (None if self.tokens is None else (self.tokens, self.pad_id)):
            raise OwnDataError(f"{who}: its texts are made of another tokenizer's tokens than the server's")
        return replace(
            data,
            train=train,
            test=test,
            classes=self.classes,
            label_names=self.label_names,
            mean=torch.tensor(self.mean) if self.mean else None,
            std=torch.tensor(self.std) if self.std else None,
            natural_ids=None,
            label_sets=None,
        )

    def _fitted(self, part: Data, names: Sequence[str], who: str) -> Data:
        shape, dtype = tuple(part.inputs.shape[1:]), _dtype(part.inputs)
        if (shape, dtype) != (self.input_shape, self.input_dtype):
            raise OwnDataError(
                f"{who}: its inputs are {dtype} of shape {_text(shape)}, the run's are {self.input_dtype} of shape "
                f"{_text(self.input_shape)}"
            )
        if part.label_kind != self.label_kind:
            raise OwnDataError(f"{who}: its labels are {part.label_kind}, the run's are {self.label_kind}")
        if part.label_kind == "numbers":
            return part
        return Data(part.inputs, self._numbered(part.labels, names, who))

    def _numbered(self, labels: Tensor, names: Sequence[str], who: str) -> Tensor:
        """Labels by the run's numbers: matched by name where both sides have names."""
        if names and self.label_names:
            present = sorted({int(label) for label in labels.unique() if label >= 0})
            if unknown := [names[label] for label in present if names[label] not in self.label_names]:
                known = ", ".join(self.label_names[:20])
                raise OwnDataError(f"{who}: the label {unknown[0]!r} is none of the run's, which are {known}")
            numbers = torch.tensor([self.label_names.index(n) if n in self.label_names else -1 for n in names])
            return torch.where(labels >= 0, numbers[labels.clamp(min=0)], labels)
        if len(labels) and int(labels.max()) >= self.classes:
            raise OwnDataError(f"{who}: its largest label is {int(labels.max())}, the run has {self.classes} classes")
        return labels


@dataclass(frozen=True)
class Own:
    """The data of several devices behind one another: device n has the examples from `starts[n]` to `starts[n + 1]`.

    test: the test examples that each device brought itself, in the same way; they may be none.
    """

    train: Data
    starts: list[int]
    test: Data
    test_starts: list[int]


def joined(parts: Sequence[DataSet]) -> Own:
    """The data of devices 0, 1 and so on, behind one another."""

    def behind(datas: list[Data]) -> tuple[Data, list[int]]:
        starts = [0]
        for data in datas:
            starts.append(starts[-1] + len(data))
        return Data(torch.cat([d.inputs for d in datas]), torch.cat([d.labels for d in datas])), starts

    train, starts = behind([part.train for part in parts])
    test, test_starts = behind([part.test for part in parts])
    return Own(train, starts, test, test_starts)


def device_folder(data_dir: str, device: int) -> Path:
    """The folder of a simulated device."""
    return Path(data_dir) / FOLDERS / f"{device:04d}"


def _dtype(inputs: Tensor) -> str:
    return str(inputs.dtype).removeprefix("torch.")


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
