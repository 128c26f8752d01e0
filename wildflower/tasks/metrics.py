"""Metrics: how well a model answers, as one number.

A metric is computed from sums that add up over batches, so that whoever scores a model sends these and no outputs.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from wildflower.plugins.extras import needed
from wildflower.tasks.labels import NO_LABEL, LabelKind

if TYPE_CHECKING:
    from torch import Tensor  # commands that only read journals start without it

SLACK = 1e-6  # relative; by how much sums of rounded products may break an inequality that holds for exact ones


@dataclass(frozen=True)
class Scale:
    """The meaning of a metric's values to a reader.

    Attributes:
        label: the metric's name in the middle of a sentence.
        higher_is_better: False for errors.
        is_share: values are shares of what is answered, from 0 to 1, and are shown in percent.
    """

    label: str
    higher_is_better: bool = True
    is_share: bool = False

    def rank(self, value: float | None) -> float:
        """Return the rank of a value: the higher, the better; what is no number or is not there comes last."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value

    @property
    def title(self) -> str:
        """Return the label as it begins a title."""
        return self.label[:1].upper() + self.label[1:]


@dataclass(frozen=True)
class Metric(ABC):
    """A number for the answers to some examples.

    Class attributes:
        name: in journals: letters, digits and underscores.
        scale: what the values mean. Journals hold of it whether higher is better; of a metric that is not in `METRICS`,
            reports show plain numbers under its name.
    """

    name: ClassVar[str]
    scale: ClassVar[Scale]
    library: ClassVar[str] = ""  # one of `wildflower.plugins.extras.EXTRAS`, which `sums` imports

    def size(self, classes: int) -> int:
        """Return how many sums there are where a model has so many outputs."""
        return 1

    @abstractmethod
    def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
        """Return the sums of a batch, from outputs (batch, classes) or (batch, classes, sequence) and labels."""

    def value(self, sums: Sequence[float], examples: int) -> float:
        """Return the metric of at least one example, from the sums over all of them: here the mean of the first one."""
        return sums[0] / examples

    def check(self, sums: Sequence[float], examples: int, classes: int) -> None:
        """Raise ValueError where no answers to so many examples have these sums."""
        if len(sums) != self.size(classes):
            raise ValueError(f"{len(sums)} sums are not the {self.size(classes)} of {self.scale.label}")
        if not all(map(math.isfinite, sums)):
            raise ValueError(f"a sum of {self.scale.label} is not finite")
        self._check(sums, examples)

    def without_model(self, labels: Tensor) -> float:
        """Return what a device counts as that has no model, by the labels of the test set.

        Shares and correlations: 0. Of an error 0 would be the best: a metric of one says its own, or it is no number.
        """
        return 0.0 if self.scale.higher_is_better else math.nan

    def _check(self, sums: Sequence[float], examples: int) -> None:  # noqa: B027  (not every metric has bounds)
        """`check` of as many finite numbers as there should be."""


@dataclass(frozen=True)
class Accuracy(Metric):
    """The share of examples whose class has the highest output. Sums: correct answers."""

    name: ClassVar[str] = "accuracy"
    scale: ClassVar[Scale] = Scale("accuracy", is_share=True)

    @override
    def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
        return [float((outputs.argmax(1) == labels).sum())]

    @override
    def _check(self, sums: Sequence[float], examples: int) -> None:
        _check_counts(sums)
        if sums[0] > examples:
            raise ValueError(f"{sums[0]:g} correct answers to {examples} examples cannot be right")


@dataclass(frozen=True)
class TokenAccuracy(Metric):
    """The share of labeled tokens whose class has the highest output. Sums: correct answers, labeled tokens."""

    name: ClassVar[str] = "token_accuracy"
    scale: ClassVar[Scale] = Scale("token accuracy", is_share=True)

    @override
    def size(self, classes: int) -> int:
        return 2

    @override
    def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
        labeled = labels != NO_LABEL
        correct = (outputs.argmax(1) == labels) & labeled
        return [float(correct.sum()), float(labeled.sum())]

    @override
    def value(self, sums: Sequence[float], examples: int) -> float:
        return sums[0] / sums[1] if sums[1] else 0.0

    @override
    def _check(self, sums: Sequence[float], examples: int) -> None:
        _check_counts(sums)
        if not sums[0] <= sums[1]:
            raise ValueError(f"{sums[0]:g} correct answers to {sums[1]:g} tokens cannot be right")
        if not sums[1]:
            raise ValueError(f"no token of {examples} examples has a label")


@dataclass(frozen=True)
class _Found(Metric):
    """The harmonic mean of precision and recall (van Rijsbergen 1979). Sums: right answers, answers, labels."""

    @override
    def size(self, classes: int) -> int:
        return 3

    @override
    def value(self, sums: Sequence[float], examples: int) -> float:
        correct, answered, wanted = sums
        return 2 * correct / (answered + wanted) if answered + wanted else 0.0

    @override
    def _check(self, sums: Sequence[float], examples: int) -> None:
        _check_counts(sums)
        correct, answered, wanted = sums
        if correct > min(answered, wanted):
            raise ValueError(f"{correct:g} right of {answered:g} answers and {wanted:g} labels cannot be right")


@dataclass(frozen=True)
class F1(_Found):
    """F1 of class 1 against class 0.

    It is 0 where class 1 is neither answered nor right. Sums: right answers 1, answers 1, labels 1.
    """

    name: ClassVar[str] = "f1"
    scale: ClassVar[Scale] = Scale("F1", is_share=True)

    @override
    def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
        answered, right = outputs.argmax(1) == 1, labels == 1
        return [float((answered & right).sum()), float(answered.sum()), float(right.sum())]

    @override
    def _check(self, sums: Sequence[float], examples: int) -> None:
        super()._check(sums, examples)
        if max(sums) > examples:
            raise ValueError(f"{max(sums):g} answers or labels are not of {examples} examples")


_ENTITY_TAG = re.compile(r"O|[BIES](-.+)?")


@dataclass(frozen=True)
class EntityF1(_Found):
    """F1 of entities, as `seqeval` and CoNLL count them: an entity is right if its type and both of its ends are.

    It is 0 where no entity is answered or right. Sums: right entities, answered ones, those of the labels.

    tags: what the classes are called, such as O, B-Drug and I-Drug.
    """

    name: ClassVar[str] = "entity_f1"
    scale: ClassVar[Scale] = Scale("entity F1", is_share=True)
    library: ClassVar[str] = "seqeval"

    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if other := next((tag for tag in self.tags if not _ENTITY_TAG.fullmatch(tag)), None):
            raise ValueError(
                f"the tag {other!r} is neither O nor such as B-{other} and I-{other}, so that entities cannot be "
                "counted (ends and single words of entities are E- and S-): mend the tags, or say metric = "
                "'token_accuracy'"
            )

    @override
    def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
        with needed(self.library, "the metric entity_f1"):
            from seqeval.metrics.sequence_labeling import get_entities
        correct = answered = wanted = 0
        for answers, right in zip(outputs.argmax(1).tolist(), labels.tolist(), strict=True):
            labeled = [(answer, label) for answer, label in zip(answers, right, strict=True) if label != NO_LABEL]
            if not labeled:
                continue
            found, true = (set(get_entities([self.tags[c] for c in tags])) for tags in zip(*labeled, strict=True))
            correct, answered, wanted = correct + len(found & true), answered + len(found), wanted + len(true)
        return [float(correct), float(answered), float(wanted)]


@dataclass(frozen=True)
class Matthews(Metric):
    """Matthews' correlation of answers and classes, for any number of classes (Gorodkin 2004).

    It is -1 to 1, and 0 where all answers or all labels are of one class. Sums: correct answers, then how often each
    class is answered, then how often it is right: all that the correlation needs of the confusion matrix.
    """

    name: ClassVar[str] = "matthews"
    scale: ClassVar[Scale] = Scale("Matthews correlation")

    @override
    def size(self, classes: int) -> int:
        return 1 + 2 * classes

    @override
    def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
        answers, classes = outputs.argmax(1), outputs.shape[1]
        counts = [answers.bincount(minlength=classes), labels.bincount(minlength=classes)]
        return [float((answers == labels).sum()), *(float(n) for count in counts for n in count.tolist())]

    @override
    def value(self, sums: Sequence[float], examples: int) -> float:
        answered, right = _halves(sums)
        covariance = sums[0] * examples - sum(a * r for a, r in zip(answered, right, strict=True))
        variances = [examples**2 - sum(count**2 for count in counts) for counts in (answered, right)]
        return covariance / math.sqrt(variances[0] * variances[1]) if all(variances) else 0.0

    @override
    def _check(self, sums: Sequence[float], examples: int) -> None:
        _check_counts(sums)
        answered, right = _halves(sums)
        if sum(answered) != examples or sum(right) != examples:
            raise ValueError(f"{sum(answered):g} answers and {sum(right):g} labels are not of {examples} examples")
        maximum = sum(map(min, answered, right))
        if sums[0] > maximum:
            raise ValueError(f"{sums[0]:g} correct answers cannot be right, at most {maximum:g} can be")


def _halves(sums: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return how often each class is answered, and how often it is right, of Matthews' sums."""
    middle = 1 + len(sums) // 2
    return sums[1:middle], sums[middle:]


@dataclass(frozen=True)
class Pearson(Metric):
    """Pearson's correlation of one output per example and the labels, which are numbers.

    It is -1 to 1, and 0 where all outputs or all labels are alike. Sums: of outputs, of labels, of their squares, of
    their products.
    """

    name: ClassVar[str] = "pearson"
    scale: ClassVar[Scale] = Scale("Pearson correlation")

    @override
    def size(self, classes: int) -> int:
        return 5

    @override
    def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
        x, y = outputs.reshape(-1).double(), labels.double()
        return [float(terms.sum()) for terms in (x, y, x * x, y * y, x * y)]

    @override
    def value(self, sums: Sequence[float], examples: int) -> float:
        of_x, of_y, covariance = _moments(sums, examples)
        # Below this a variance is what rounding left of 0.
        if min(of_x - 1e-12 * examples * sums[2], of_y - 1e-12 * examples * sums[3]) <= 0:
            return 0.0
        return min(1.0, max(-1.0, covariance / math.sqrt(of_x) / math.sqrt(of_y)))

    @override
    def _check(self, sums: Sequence[float], examples: int) -> None:
        of_x, of_y, covariance = _moments(sums, examples)
        if not all(map(math.isfinite, (of_x, of_y, covariance))):
            raise ValueError("the sums are too large")
        slack_x, slack_y = SLACK * examples * sums[2], SLACK * examples * sums[3]
        if min(sums[2], sums[3]) < 0 or of_x < -slack_x or of_y < -slack_y:
            raise ValueError("a sum of squares is smaller than its numbers allow")
        if abs(covariance) > math.sqrt(max(0.0, of_x) + slack_x) * math.sqrt(max(0.0, of_y) + slack_y):
            raise ValueError("the sum of products is larger than the sums of squares allow")


def _moments(sums: Sequence[float], examples: int) -> tuple[float, float, float]:
    """Variances of outputs and of labels and their covariance, each times the square of the number of examples."""
    x, y, xx, yy, xy = sums
    return examples * xx - x * x, examples * yy - y * y, examples * xy - x * y


@dataclass(frozen=True)
class MeanAbsoluteError(Metric):
    """The mean distance of one output per example from the label, which is a number. Sums: of the distances."""

    name: ClassVar[str] = "mean_absolute_error"
    scale: ClassVar[Scale] = Scale("mean absolute error", higher_is_better=False)

    @override
    def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
        return [float((outputs.reshape(-1).double() - labels.double()).abs().sum())]

    @override
    def without_model(self, labels: Tensor) -> float:
        # Of always answering the median label: no other constant has a smaller error.
        return float((labels.double() - labels.double().median()).abs().mean())

    @override
    def _check(self, sums: Sequence[float], examples: int) -> None:
        if sums[0] < 0:
            raise ValueError(f"a sum of distances of {sums[0]} cannot be right")


def _check_counts(sums: Sequence[float]) -> None:
    if not all(count >= 0 and count == int(count) for count in sums):
        raise ValueError("a count is not a whole number of at least 0")


ACCURACY = Accuracy()
METRICS: dict[str, type[Metric]] = {
    kind.name: kind for kind in (Accuracy, F1, Matthews, TokenAccuracy, EntityF1, Pearson, MeanAbsoluteError)
}


def usual_metric(labels: LabelKind, label_names: Sequence[str] = ()) -> Metric:
    """Return the metric of a task that names none: the F1 of entities if classes of tokens are named as their tags."""
    if labels == "numbers":
        return Pearson()
    if labels == "classes":
        return ACCURACY
    # Parts of speech, for one, are names of tokens and mark no entities.
    marks = any(name in ("B", "I") or name[:2] in ("B-", "I-") for name in label_names)
    return EntityF1(tuple(label_names)) if marks else TokenAccuracy()


def scale_of(name: str | None, higher_is_better: bool = True) -> Scale:
    """Return what the values of a journal's metric mean; None, where nothing was scored yet, is read as accuracy."""
    if name is None or name in METRICS:
        return METRICS[name or ACCURACY.name].scale
    return Scale(name.replace("_", " "), higher_is_better)
