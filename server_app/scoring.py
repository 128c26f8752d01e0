"""How the server scores a model on the task's test set: all exits of a family that has several, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.base import with_weights
from rounds.engine import Scorer, Scores
from strategies.method import Model
from tasks.scoring import Scored, score, score_exits
from tasks.task import Task

SCORED_TOGETHER = 256  # examples of the test set; devices score as many as they train


def scorer(task: Task) -> Scorer:
    """Scores a model in this process."""

    def score_model(model: Model) -> Scores:
        # Not before: a process that has used CUDA cannot fork workers that do.
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module = with_weights(model.family, model.architecture, model.weights)
        inputs, labels = task.test.inputs, task.test.labels
        if has_exits(model):
            found = score_exits(module, task, inputs, labels, batch_size=SCORED_TOGETHER, device=device)
        else:
            found = [score(module, task, inputs, labels, batch_size=SCORED_TOGETHER, device=device)]
        return scores(model, task, found)

    return score_model


def has_exits(model: Model) -> bool:
    """Whether a model is scored at all its exits."""
    return len(model.family.segments) > 1


def scores(model: Model, task: Task, found: Sequence[Scored]) -> Scores:
    """The scores of a model: of its one exit, or of all exits and then of what they say together."""
    means = [(task.metric.value(scored.sums, scored.examples), scored.loss_sum / scored.examples) for scored in found]
    if not has_exits(model):
        return Scores(*means[0])
    whole = means[-1] if model.exits == "mean" else means[-2]
    return Scores(*whole, tuple(value for value, _ in means[:-1]))
