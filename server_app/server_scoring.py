"""Scoring on the task's test set by the server: all exits of a family that has several, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from wildflower.models.network import lighten
from wildflower.models.weights import with_weights
from wildflower.rounds.evaluation import Scorer, Scores
from wildflower.server_app.label_spread import class_names
from wildflower.strategies.method import Model
from wildflower.tasks.scoring import Scored, TestPart, add_up, score_batches, test_part
from wildflower.tasks.task import Task

SCORED_TOGETHER = 64  # examples of the test set: more leave the processor's cache; devices score as many as they train


def scorer(task: Task, *, held_out: bool = False) -> Scorer:
    """Scores a model in this process; with `held_out` also on both parts of `wildflower.tasks.scoring.test_part`."""

    def score_part(model: Model, part: TestPart) -> list[Scored]:
        # Not before: a process that has used CUDA cannot fork workers that do.
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module = with_weights(model.family, model.architecture, model.weights)
        lighten(module)
        inputs, labels = test_part(task, part)
        exits = has_exits(model)
        found = score_batches(module, task, inputs, labels, batch_size=SCORED_TOGETHER, device=device, exits=exits)
        return [add_up(task, batches) for batches in zip(*found, strict=True)]

    return scorer_of(task, score_part, held_out=held_out)


def scorer_of(task: Task, score_part: Callable[[Model, TestPart], list[Scored]], *, held_out: bool) -> Scorer:
    """A scorer from a function that scores a model on a part of the test set: its one exit, or as `scores` says."""

    def score_model(model: Model) -> Scores:
        if not held_out:
            return whole_scores(model, task, score_part(model, "all"))
        by_part = score_part(model, "held out"), score_part(model, "rest")
        whole = whole_scores(model, task, [add_up(task, parts) for parts in zip(*by_part, strict=True)])
        chosen_by, rest = (scores(model, task, found).score for found in by_part)
        return whole._replace(held_out=chosen_by, rest=rest)

    return score_model


def has_exits(model: Model) -> bool:
    """Return whether a model is scored at all its exits."""
    return len(model.family.segments) > 1


def scores(model: Model, task: Task, found: Sequence[Scored]) -> Scores:
    """The scores of a model: of its one exit, or of all exits and then of what they say together."""
    means = [(task.metric.value(scored.sums, scored.examples), scored.loss_sum / scored.examples) for scored in found]
    own = means[_place(model)]
    return Scores(*own, tuple(value for value, _ in means[:-1])) if has_exits(model) else Scores(*own)


def whole_scores(model: Model, task: Task, found: Sequence[Scored]) -> Scores:
    """`scores` over the whole test set, with the accuracy of each class."""
    return scores(model, task, found)._replace(by_class=accuracy_by_class(task, found[_place(model)].right))


def _place(model: Model) -> int:
    """Which of the scores of its exits are the model's: of all together or the deepest, or of its only one."""
    return 0 if not has_exits(model) else -1 if model.exits == "mean" else -2


def accuracy_by_class(task: Task, right: Sequence[int]) -> dict[str, float] | None:
    """The share of each class's test examples that are answered right, by the classes' names.

    Classes of which the test set has no example are left out. None where right answers were not counted by class.

    Args:
        right: right answers to the test examples of each class.
    """
    if not right:
        return None
    counts = task.test.labels.bincount(minlength=task.classes).tolist()
    return {
        name: correct / count for name, correct, count in zip(class_names(task), right, counts, strict=True) if count
    }
