"""Before round 1 of a run over texts: whether its tokenizer goes with the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.bert import Bert
from wildflower.models.module import ModuleFamily
from wildflower.models.traced.family import Traced
from wildflower.plugins.flower_log import log
from wildflower.plugins.reference import one_sentence
from wildflower.tasks.task import Task
from wildflower.tasks.tokens import VOCABULARY, TextArguments, load_tokenizer

SPARE_ROWS = 0.01  # of an embedding, which some models round up to a multiple of 64
# Tokens that a vocabulary keeps free for words of one's own: BERT's and RoBERTa's.
_FREE = re.compile(r"\[unused\d+\]|<unused\d+>|madeupword\d+")


def check_vocabulary(task: Task, family: Family) -> None:
    """Raise ValueError where the family's embeddings are of another tokenizer than the task's texts.

    Likewise where it tells the texts of a pair apart by a token that stands inside of one. A family says the rows of
    its embeddings in `vocabulary`, and in `pad_id` the token that it leaves out.
    """
    rows, pad_id = getattr(family, "vocabulary", None), getattr(family, "pad_id", None)
    if task.vocabulary is not None and isinstance(family, Bert) and rows is None:
        raise ValueError("it reads characters, as many as there are classes: take family = 'transformers:AutoModel'")
    if task.vocabulary is not None:
        task.vocabulary.check_pairs(family.pair_separator)
    if task.vocabulary is None or rows is None:
        return
    tokens = task.vocabulary.tokens
    if not rows * (1 - SPARE_ROWS) <= tokens <= rows:
        raise ValueError(
            f"the tokenizer has {tokens} tokens, the embeddings have {rows} rows: take the tokenizer of this model"
        )
    if pad_id is not None and pad_id != task.vocabulary.pad_id:
        raise ValueError(
            f"the tokenizer pads with token {task.vocabulary.pad_id}, the model leaves out token {pad_id}: take the "
            "tokenizer of this model"
        )


def check_answers(task: Task, family: Family, batch_size: int) -> None:
    """Raise ValueError where networks answer once per input and the task labels every token, or the other way round."""
    if not isinstance(family, ModuleFamily | Traced):
        return
    answer = family.answer(family.full(), batch_size)
    if task.label_kind != "classes of tokens":
        if len(answer) > 1:
            raise ValueError(
                f"its network returns (batch, {', '.join(map(str, answer))}), an answer for every token, and the task "
                f"has one label per input: it must return (batch, {answer[0]})"
            )
    elif answer[1:] != family.input_shape[-1:]:
        raise ValueError(
            f"its network returns (batch, {', '.join(map(str, answer))}), and the task has a label for every token: it "
            f"must return (batch, {answer[0]}, {family.input_shape[-1]})"
        )


def check_last_token(task: Task, family: Family) -> None:
    """Raise ValueError where a family that does not say how many tokens it reads fails on the tokenizer's last one.

    A fake tensor has no values, so that pricing cannot find this: the largest and the smallest network are built, and
    compute once. The smallest has the fewest rows, because its tensors are slices of the larger ones'.
    """
    if task.vocabulary is None or getattr(family, "vocabulary", None) is not None:
        return
    for arch, which in {family.smallest(): "smallest", family.full(): "largest"}.items():
        tokens, last = task.vocabulary.tokens, task.vocabulary.tokens - 1
        why = _failure(family, arch, last)
        # A network that fails on padding too has another fault, of which its own words say more.
        if why is not None and _failure(family, arch, task.vocabulary.pad_id) is None:
            raise ValueError(
                f"its {which} network fails on token {last}, the last of the tokenizer's {tokens} "
                f"({one_sentence(why)}): give its embeddings {tokens} rows, or take the tokenizer of this model"
            )
        if why is not None:
            raise why


def _failure(family: Family, arch: Architecture, token: int) -> Exception | None:
    """What the network raises for an input of this token alone; None where it computes."""
    inputs = torch.full((1, *family.input_shape), token, dtype=family.input_dtype)
    # First weights are drawn here and thrown away: those of the run must be what they are without this.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        network = family.with_statistics.build(arch).eval()  # static batch norm cannot normalize one example
        try:
            network(inputs)
        except Exception as error:  # of any kind: it may be the user's code
            return error
    return None


def check_same_tokens(task: Task, family: Family, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError where a tokenizer beside the weights numbers tokens otherwise than the task's.

    `folder` is the one that the weights' file lies in.

    As many tokens do not make the same vocabulary: every word would have another word's embedding. Tokens that only one
    of them has behind the other's last are allowed, and so are words in place of tokens that the model keeps free.
    Where the weights hold no embeddings of tokens (initial.names leaves them out), any tokenizer goes.
    """
    arguments = task.spec.arguments
    if task.vocabulary is None or not isinstance(arguments, TextArguments):
        return
    if not any((folder / file).is_file() for file in ("tokenizer.json", VOCABULARY)):
        return
    if tensors.keys().isdisjoint(_token_embeddings(family, task.vocabulary.tokens)):
        return
    try:
        own = load_tokenizer(str(folder.absolute()), "").get_vocab()
        tasks_own = load_tokenizer(arguments.tokenizer, task.spec.data_dir).get_vocab()
    except (FileNotFoundError, ValueError) as error:
        # Such as where only devices have the task's, which then lies in their folders.
        log.warning("The tokenizer beside initial.weights cannot be compared with the task's: %s", error)
        return
    ours, theirs = ({number: token for token, number in each.items()} for each in (tasks_own, own))
    both = sorted(ours.keys() & theirs.keys())
    differing = [number for number in both if ours[number] != theirs[number] and not _FREE.fullmatch(theirs[number])]
    if differing:
        first = differing[0]
        raise ValueError(
            f"tokenizer = {arguments.tokenizer!r} has other tokens than the model's own tokenizer in this folder: "
            f"{len(differing)} of {len(both)} differ, the first is number {first}, {ours[first]!r} and in the folder "
            f"{theirs[first]!r}: take tokenizer = {str(folder)!r}, or leave the model's embeddings out by initial.names"
        )


def _token_embeddings(family: Family, tokens: int) -> set[str]:
    """The names of tensors that hold a row per token: no other matrix counts, though a small vocabulary has fewer rows.

    A family that does not say its `vocabulary` may have spare rows.
    """
    rows = getattr(family, "vocabulary", None)
    if isinstance(family, Traced):
        return {name for name, count in family.embeddings.items() if count >= tokens}
    return {
        f"{name}.weight"
        for name, module in family.without_memory(family.full()).named_modules()
        if isinstance(module, nn.Embedding)
        and (module.num_embeddings >= tokens if rows is None else module.num_embeddings == rows)
    }
