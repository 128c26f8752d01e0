from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from seqeval.metrics import f1_score as entity_f1_score
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_absolute_error
from torch import Tensor

from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.metrics import (
    ACCURACY,
    F1,
    METRICS,
    Accuracy,
    EntityF1,
    Matthews,
    MeanAbsoluteError,
    Metric,
    Pearson,
    Scale,
    TokenAccuracy,
    scale_of,
    usual_metric,
)

Answers = tuple[Tensor, Tensor]  # outputs, labels


def _classes(classes: int, examples: int = 60) -> Answers:
    """Outputs that are right more often than by chance, of classes that are not equally frequent."""
    generator = torch.Generator().manual_seed(classes)
    labels = (torch.rand(examples, generator=generator) ** 2 * classes).long()
    outputs = torch.randn(examples, classes, generator=generator)
    return outputs + torch.nn.functional.one_hot(labels, classes), labels


def _numbers(examples: int = 60, offset: float = 0.0) -> Answers:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randn(examples, generator=generator) + offset
    return (labels + torch.randn(examples, generator=generator))[:, None], labels


def _tokens(examples: int = 60) -> Answers:
    outputs, labels = _classes(4, examples * 7)
    labels[torch.rand(len(labels), generator=torch.Generator().manual_seed(2)) < 0.3] = NO_LABEL
    return outputs.view(examples, 7, 4).transpose(1, 2), labels.view(examples, 7)


def _pearson(outputs: Tensor, labels: Tensor) -> float:
    return float(np.corrcoef(outputs[:, 0].double().numpy(), labels.double().numpy())[0, 1])


def _of_labeled_tokens(outputs: Tensor, labels: Tensor) -> float:
    labeled = labels != NO_LABEL
    return float(accuracy_score(labels[labeled], outputs.argmax(1)[labeled]))


TAGS = ("O", "B-drug", "I-drug", "B-dose", "I-dose")


def _tags(examples: int = 60) -> Answers:
    """Tags that are right more often than not, some of which begin with an I-, where no entity began."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 5, (examples, 9), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.5] = 0
    outputs = torch.randn(examples, 5, 9, generator=generator)
    outputs += 3 * torch.nn.functional.one_hot(labels, 5).transpose(1, 2)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = NO_LABEL
    labels[5] = NO_LABEL
    return outputs, labels


def _of_entities(outputs: Tensor, labels: Tensor) -> float:
    def names(values: Tensor) -> list[list[str]]:
        rows = zip(values.tolist(), labels.tolist(), strict=True)
        return [[TAGS[v] for v, label in zip(*row, strict=True) if label != NO_LABEL] for row in rows]

    return float(entity_f1_score(names(labels), names(outputs.argmax(1))))


CASES: dict[str, tuple[Metric, Answers, Callable[[Tensor, Tensor], float]]] = {
    "accuracy": (Accuracy(), _classes(5), lambda outputs, labels: accuracy_score(labels, outputs.argmax(1))),
    "token accuracy": (TokenAccuracy(), _tokens(), _of_labeled_tokens),
    "f1": (F1(), _classes(2), lambda outputs, labels: f1_score(labels, outputs.argmax(1))),
    "entity f1": (EntityF1(TAGS), _tags(), _of_entities),
    "matthews of 2": (Matthews(), _classes(2), lambda outputs, labels: matthews_corrcoef(labels, outputs.argmax(1))),
    "matthews of 5": (Matthews(), _classes(5), lambda outputs, labels: matthews_corrcoef(labels, outputs.argmax(1))),
    "pearson": (Pearson(), _numbers(), _pearson),
    "pearson far from 0": (Pearson(), _numbers(offset=1000.0), _pearson),
    "mean absolute error": (
        MeanAbsoluteError(),
        _numbers(),
        lambda outputs, labels: mean_absolute_error(labels, outputs[:, 0]),
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def test_every_metric_is_tested() -> None:
    assert {metric.name for metric, _, _ in CASES.values()} == set(METRICS)


@cases
def test_a_metric_is_what_scikit_learn_or_numpy_say(name: str) -> None:
    metric, (outputs, labels), expected = CASES[name]
    value = metric.value(metric.sums(outputs, labels), len(labels))
    assert value == pytest.approx(expected(outputs, labels), rel=1e-6, abs=1e-9)
    assert abs(value) > 0.1  # or a metric that is always 0 would do


@cases
def test_sums_of_batches_add_up_to_those_of_all_examples(name: str) -> None:
    metric, (outputs, labels), _ = CASES[name]
    parts = [metric.sums(outputs[start : start + 17], labels[start : start + 17]) for start in range(0, 60, 17)]
    added = [sum(part) for part in zip(*parts, strict=True)]
    assert added == pytest.approx(metric.sums(outputs, labels), rel=1e-12)
    assert len(added) == metric.size(outputs.shape[1])


@cases
def test_honest_sums_pass_the_check(name: str) -> None:
    metric, (outputs, labels), _ = CASES[name]
    for examples in (1, 2, 60):
        metric.check(metric.sums(outputs[:examples], labels[:examples]), examples, outputs.shape[1])


@pytest.mark.parametrize(
    ("metric", "sums", "message"),
    [
        (Accuracy(), [31], "31 correct answers to 30 examples"),
        (Accuracy(), [-1], "a count is not a whole number"),
        (Accuracy(), [1.5], "a count is not a whole number"),
        (Accuracy(), [], "0 sums are not the 1 of accuracy"),
        (Accuracy(), [1, 2], "2 sums are not the 1 of accuracy"),
        (Accuracy(), [float("nan")], "a sum of accuracy is not finite"),
        (Accuracy(), [float("inf")], "a sum of accuracy is not finite"),
        (TokenAccuracy(), [41, 40], "41 correct answers to 40 tokens"),
        (TokenAccuracy(), [0, 0], "no token of 30 examples has a label"),
        (TokenAccuracy(), [3, 40.5], "a count is not a whole number"),
        (F1(), [3, 2, 4], "3 right of 2 answers and 4 labels"),
        (F1(), [2, 31, 4], "31 answers or labels are not of 30 examples"),
        (EntityF1(TAGS), [5, 9, 4], "5 right of 9 answers and 4 labels"),
        (EntityF1(TAGS), [5.5, 9, 9], "a count is not a whole number"),
        (Matthews(), [10, 20, 10, 10], "4 sums are not the 5 of Matthews correlation"),
        (Matthews(), [10, 20, 11, 15, 15], "31 answers and 30 labels are not of 30 examples"),
        (Matthews(), [10, 20, 10, 15, 14], "30 answers and 29 labels are not of 30 examples"),
        (Matthews(), [26, 20, 10, 15, 15], "26 correct answers cannot be right, at most 25 can be"),
        (Matthews(), [10, 31, -1, 15, 15], "a count is not a whole number"),
        (Pearson(), [0, 0, -1, 1, 0], "a sum of squares is smaller than its numbers allow"),
        (Pearson(), [60, 0, 30, 1, 0], "a sum of squares is smaller than its numbers allow"),
        (Pearson(), [0, 60, 1, 30, 0], "a sum of squares is smaller than its numbers allow"),
        (Pearson(), [0, 0, 4, 4, 5], "the sum of products is larger than the sums of squares allow"),
        (Pearson(), [0, 0, 4, 4, -5], "the sum of products is larger than the sums of squares allow"),
        (Pearson(), [1e308, 0, 1e308, 1, 0], "the sums are too large"),
        (MeanAbsoluteError(), [-0.1], "a sum of distances of -0.1 cannot be right"),
        (MeanAbsoluteError(), [float("nan")], "a sum of mean absolute error is not finite"),
    ],
)
def test_sums_that_cannot_be_are_refused(metric: Metric, sums: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric.check(sums, 30, 2)


def test_accuracy_is_correct_answers_over_examples_to_the_bit() -> None:
    for correct in range(361):
        assert ACCURACY.value([float(correct)], 360) == correct / 360


def test_a_correlation_with_what_is_always_the_same_is_0() -> None:
    outputs, labels = _classes(3)
    one_answer = torch.zeros_like(outputs)
    one_answer[:, 1] = 1
    assert Matthews().value(Matthews().sums(one_answer, labels), 60) == 0
    assert Matthews().value(Matthews().sums(outputs, torch.ones_like(labels)), 60) == 0
    outputs, labels = _numbers()
    for constant in (0.0, 0.1, 1e6):
        assert Pearson().value(Pearson().sums(torch.full_like(outputs, constant), labels), 60) == 0
        assert Pearson().value(Pearson().sums(outputs, torch.full_like(labels, constant)), 60) == 0
    assert Pearson().value(Pearson().sums(outputs[:1], labels[:1]), 1) == 0


def test_a_perfect_correlation_is_not_above_1() -> None:
    _, labels = _numbers()
    assert Pearson().value(Pearson().sums(labels[:, None] * 3 + 0.1, labels), 60) == pytest.approx(1)
    assert Pearson().value(Pearson().sums(labels[:, None] * 3 + 0.1, labels), 60) <= 1
    assert Pearson().value(Pearson().sums(-labels[:, None], labels), 60) == pytest.approx(-1)


def test_tokens_without_a_label_count_for_nothing() -> None:
    outputs, labels = _tokens()
    assert TokenAccuracy().sums(outputs, torch.full_like(labels, NO_LABEL)) == [0, 0]
    assert TokenAccuracy().value([0, 0], 60) == 0


def test_better_scores_rank_higher() -> None:
    scores: list[Any] = [0.2, None, 0.7, float("nan"), 0.5]
    assert max(scores, key=Accuracy.scale.rank) == 0.7
    assert max(scores, key=MeanAbsoluteError.scale.rank) == 0.2
    assert (
        MeanAbsoluteError.scale.rank(float("nan"))
        == MeanAbsoluteError.scale.rank(None)
        == Accuracy.scale.rank(None)
        == -float("inf")
    )


def test_what_a_journals_metric_means() -> None:
    assert scale_of("pearson") is Pearson.scale
    assert scale_of("mean_absolute_error", higher_is_better=True) is MeanAbsoluteError.scale
    assert scale_of(None) is Accuracy.scale
    assert scale_of("hinge_distance", higher_is_better=False) == Scale("hinge distance", higher_is_better=False)
    assert Pearson.scale.title == "Pearson correlation"
    assert MeanAbsoluteError.scale.title == "Mean absolute error"


def test_tags_are_those_of_entities_or_are_scored_one_by_one() -> None:
    assert usual_metric("classes of tokens", ("B", "I", "O")) == EntityF1(("B", "I", "O"))  # of one kind, without names
    assert usual_metric("classes of tokens", ("NOUN", "VERB")) == TokenAccuracy()
    with pytest.raises(ValueError, match=r"the tag 'U-drug' is neither O nor .*single words of entities are E- and S-"):
        EntityF1((*TAGS, "U-drug"))


def test_an_entity_is_right_if_its_type_and_both_ends_are() -> None:
    """Of drug 0-1, dose 3, drug 5 the first and the last are found; a dose is found one word too long."""
    metric = EntityF1(TAGS)
    labels = torch.tensor([[1, 2, 0, 3, 0, 1]])
    answers = torch.tensor([[1, 2, 0, 3, 4, 1]])
    sums = metric.sums(torch.nn.functional.one_hot(answers, 5).transpose(1, 2), labels)
    assert sums == [2, 3, 3]
    assert metric.value(sums, 1) == pytest.approx(2 / 3)


def test_f1_without_any_answer_is_0() -> None:
    assert F1().value([0, 0, 0], 5) == 0
    assert EntityF1(TAGS).value([0, 0, 0], 5) == 0
