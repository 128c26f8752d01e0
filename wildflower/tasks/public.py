"""Public data: inputs without labels that the server holds beside the devices' data, for methods that learn from them.

They are the training inputs of a task, which may be another one than the run's. Labels are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wildflower.tasks.arguments import TaskArguments, read_arguments
from wildflower.tasks.data import Vocabulary
from wildflower.tasks.inputs import readable
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.spec import load_data_set
from wildflower.tasks.task import Task, kind_of


@dataclass(frozen=True)
class PublicData:
    """Inputs of the server's own.

    Attributes:
        inputs: as stored, (examples, *shape of one example).
        normalization: mean and deviation per channel, of the public data themselves; None where inputs are tokens.
        vocabulary: of texts; None where inputs are no texts.
        of_tokens: the run's models answer for every position of an input, and not for the input as a whole.
    """

    inputs: Tensor
    normalization: tuple[Tensor, Tensor] | None
    vocabulary: Vocabulary | None = None
    of_tokens: bool = False

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, picked: Tensor) -> Tensor:
        """Return the inputs of these numbers as a model reads them, not augmented."""
        return readable(self.inputs[picked], self.normalization, self.vocabulary)

    @property
    def positions(self) -> tuple[int, ...]:
        """Return for how many positions of an input models answer; () where they answer for it as a whole."""
        return (self.inputs.shape[-1],) if self.of_tokens else ()

    def tags(self, picked: Tensor) -> Tensor | None:
        """Return what stands in place of the labels of tokens, (batch, positions of `batch`): `NO_LABEL` at padding.

        None where models answer for an input as a whole.
        """
        if not self.of_tokens:
            return None
        read = self.batch(picked)
        tags = torch.zeros(len(read), read.shape[-1], dtype=torch.int64)
        return tags if self.vocabulary is None else tags.masked_fill(read == self.vocabulary.pad_id, NO_LABEL)


def load_public(
    name: str,
    data_dir: str,
    arguments: TaskArguments | None,
    *,
    task: Task,
    dtype: torch.dtype,
    examples: int,
    seed: int,
    separator: int = -1,
) -> PublicData:
    """Return the training inputs of a task as public data.

    Args:
        name: of the public task.
        data_dir: where its data lie; "" for the usual places.
        arguments: of the public task; None takes its defaults.
        task: the run's task, whose models read the public inputs.
        dtype: of what the run's models read; int64 stands for tokens.
        examples: how many are drawn at random; 0 takes all.
        seed: what that draw follows from.
        separator: by which the run's models tell the two texts of a pair apart; -1: they do not.

    Raises:
        ValueError: the inputs are of another shape, kind or vocabulary, or there are fewer, or the task must be given
            arguments; FileNotFoundError: there are no data.
    """
    data = load_data_set(name, data_dir, arguments or read_arguments(name, kind_of(name).arguments, {}))
    found = tuple(data.train.inputs.shape[1:])
    # Texts are cut to the longest of a batch: shorter ones fit as well.
    fits = found == task.input_shape if data.vocabulary is None else found <= task.input_shape
    if not fits:
        shapes = ("x".join(map(str, shape)) for shape in (found, task.input_shape))
        raise ValueError("its inputs are {}, and the run's models read {}: take a task of that shape".format(*shapes))
    normalization = None if data.mean is None or data.std is None else (data.mean, data.std)
    if (normalization is None) != (dtype == torch.int64):
        kinds = ("tokens", "images or signals")
        have, read = kinds if normalization is None else kinds[::-1]
        raise ValueError(f"its inputs are {have}, and the run's models read {read}")
    mine, theirs = (v and (v.tokens, v.pad_id) for v in (data.vocabulary, task.vocabulary))
    if mine != theirs:
        raise ValueError("its tokens are of another vocabulary than the task's: give both the same tokenizer")
    if data.vocabulary is not None:
        data.vocabulary.check_pairs(separator)
    inputs = data.train.inputs
    if examples > len(inputs):
        raise ValueError(f"it has {len(inputs)} training inputs, and public.examples asks for {examples}")
    if examples:
        generator = torch.Generator().manual_seed(seed)
        inputs = inputs[torch.randperm(len(inputs), generator=generator)[:examples]]
    return PublicData(inputs, normalization, data.vocabulary, task.label_kind == "classes of tokens")
