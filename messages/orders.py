"""Work orders and updates: the typed content of every message between server and nodes.

A message carries a batch for one node: JSON for what is asked, and one packed array per distinct payload. Both sides
validate with these models; a field that is unknown, missing or of another type is a MessageError that names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from devices.validation import MOST_LETTERS, MOST_WHOLE, one_line, shown
from messages.error import MessageError

M = TypeVar("M", bound=BaseModel)
# Below 2^63, so that NumPy and PyTorch can hold them.
Positive = Annotated[int, Field(ge=1, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Width = Annotated[float, Field(gt=0, le=1)]
Examples = Annotated[int, Field(ge=0, lt=2**31)]  # bounded, because they are weights of sums of 64-bit integers

# Bounds of what nodes send, far above what any honest one needs. A list is left at its first wrong element, or a long
# one would make an error of each.
MOST_CLASSES, MOST_ORDERS, MOST_KEYS, MOST_ERRORS = 2**16, 2**20, 64, 16
Line = Annotated[str, Field(max_length=MOST_LETTERS)]
Digest = Annotated[str, Field(max_length=64)]


def _flat(report: dict[str, Any]) -> dict[str, Any]:
    """A report whose keys and values are short; what they mean is `DeviceReport`'s to check."""
    for key, value in report.items():
        match value:
            case None | bool() | float():
                fits = True
            case int():
                fits = abs(value) <= MOST_WHOLE
            case str():
                fits = len(value) <= MOST_LETTERS
            case _:
                fits = False
        if not fits or len(key) > MOST_KEYS:
            raise ValueError(
                f"{shown(key)} = {shown(value)}: must be a number below 2^63, true, false, null or a text of at most "
                f"{MOST_LETTERS} letters"
            )
    return report


Report = Annotated[dict[str, Any], Field(max_length=MOST_KEYS), AfterValidator(_flat)]


class _Model(BaseModel):
    # Strict: a number in quotes is another type. A diverged model's loss is NaN, and says so.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class Objective(_Model):
    """What a device computes with its data, named by what it computes and not by the method that asks for it.

    kind:
        cross entropy: the mean cross-entropy of the batch.
        masked cross entropy: the logits of classes that the device does not hold are set to 0 first (HeteroFL).
        sum of exits: the mean cross-entropies of all exits that the sub-model has, added up without weights; the loss
            that is reported is that sum (HypeMeFed).
        mutual learning of exits: the sum of exits + `weight` x the sum over exits of the mean over the other exits of
            KL(other || exit), the other being constant (DepthFL). With one exit, cross-entropy. With `alpha` above 0,
            FedDyn's regularizer of that strength, for which the device keeps a correction; it is not in the loss that
            is reported.
        weighted exits: sum over exits j = 1..K of j L_j, divided by K (K + 1) / 2, where L_j is the cross-entropy of
            exit j, and of all but the last + `gamma` T^2 KL(last || exit j) between softmaxes of `temperature` T;
            the last exit is not constant there (ScaleFL).
        taught: cross-entropy + the cross-entropy with the softmax of a teacher + the divergence between softmaxes of
            what both classifiers read, KL("student || teacher") or the other way round (RecipFL).
        proximal: cross-entropy + mu / 2 ||w - w_received||^2 (FedProx).
        ordered dropout: cross-entropy of the leading cut of one of `widths`, drawn anew for every batch. With
            `distillation`, cross-entropy of the whole sub-model, and of the cut to what the whole one says (FjORD).
        batch norm statistics: no training; the cumulative batch norm statistics of one pass (HeteroFL's static BN).
    """

    kind: Literal[
        "cross entropy",
        "masked cross entropy",
        "sum of exits",
        "mutual learning of exits",
        "weighted exits",
        "taught",
        "proximal",
        "ordered dropout",
        "batch norm statistics",
    ] = "cross entropy"
    mu: float = Field(0.0, ge=0, allow_inf_nan=False)
    widths: tuple[Width, ...] = ()  # of the global model's channels, ascending; the last is the ordered architecture's
    distillation: bool = False
    weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    alpha: float = Field(0.0, ge=0, allow_inf_nan=False)
    gamma: float = Field(0.0, ge=0, allow_inf_nan=False)
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    divergence: Literal["student || teacher", "teacher || student"] = "student || teacher"

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if self.mu and self.kind != "proximal":
            raise ValueError(f"mu belongs to proximal, not to {self.kind}")
        if (self.weight or self.alpha) and self.kind != "mutual learning of exits":
            raise ValueError(f"weight and alpha belong to mutual learning of exits, not to {self.kind}")
        if self.divergence != "student || teacher" and self.kind != "taught":
            raise ValueError(f"divergence belongs to taught, not to {self.kind}")
        if (self.gamma or self.temperature != 1.0) and self.kind != "weighted exits":
            raise ValueError(f"gamma and temperature belong to weighted exits, not to {self.kind}")
        return self

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.kind != "ordered dropout":
            if self.widths or self.distillation:
                raise ValueError(f"widths and distillation belong to ordered dropout, not to {self.kind}")
        elif not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths of ordered dropout must ascend, such as [0.25, 0.5, 1.0], not {self.widths}")
        return self


class LocalTraining(_Model):
    """How a device trains: epochs over its data, or a number of steps where `steps` is given."""

    epochs: NonNegative = 1
    steps: NonNegative = 0
    batch_size: Positive = 32
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(0.1, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # of adam and adamw
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(0.0, ge=0)
    augment: bool = True

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if not self.epochs and not self.steps:
            raise ValueError("epochs = 0 and steps = 0: one of them must be at least 1")
        return self


class Merge(_Model):
    """How a node adds up the updates of its devices before it answers.

    weighting: every device counts by its examples, or all alike.
    present_classes: rows of the classifier count only for devices that hold the class (HeteroFL).
    """

    weighting: Literal["examples", "uniform"] = "examples"
    present_classes: bool = False


class WorkOrder(_Model):
    """What one device is asked to do. A device may have several orders, which it does one after the other.

    Attributes:
        order: its number, unlike any other's of the exchange.
        payload: index of the array with its weights in this message; None where the device keeps its own model.
        group: updates of one group are of the same tensors at the same coordinates, so that they may be added up.
        digest: digest of the layout of the weights to return.
        memory_bytes: what training may use; 0 for no limit but the device's own.
        keeps_statistics: batch norm's running statistics are the device's own, kept from one training to the next;
            those that it was sent do not count.
        asks_class_counts: the device is to say how many training examples of each class it holds.
        teacher: the number of an earlier order of the device in this message, whose trained model teaches in this one.
    """

    order: NonNegative
    device: NonNegative
    tier: str
    architecture: dict[str, Any]
    payload: NonNegative | None
    group: NonNegative
    digest: str
    objective: Objective
    seed: NonNegative
    memory_bytes: NonNegative
    predicted_memory_bytes: NonNegative
    teacher: NonNegative | None = None
    keeps_statistics: bool = False
    asks_class_counts: bool = False


class Batch(_Model):
    """The work orders that one message carries to one node.

    Attributes:
        shared_process: the node carries many simulated devices beside other such nodes, so it trains on one thread.
        norm_bound: how far an update may be from what was sent, where the node adds updates up; 0: as far as it likes.
        state_dir: where devices keep what must survive rounds, on the node; empty for the node's own default.
    """

    run: str
    round: NonNegative
    task: dict[str, Any]
    family: dict[str, Any]
    training: LocalTraining
    merge: Merge | None
    shared_process: bool
    norm_bound: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    state_dir: str = ""
    orders: list[WorkOrder] = Field(min_length=1)


class Update(_Model):
    """What one device answers to one order.

    Attributes:
        order: the number of that order.
        outcome: "trained", or "refused: why" (by the device, before or while training), or "failed: why".
        payload: index of the array with its weights in this message; None where they were added to a sum or stay.
        seconds: wall time of the work on the device.
        measured_memory_bytes: peak memory above what the process held before the work; None where nothing was trained
            and in a simulation, where the devices of one process share its allocator.
        overrun: the work outgrew its memory while it ran, was killed because the machine had none left, or was not
            begun because less was free than it needs, though its budget allowed it.
        bounded: its weights were further from those sent than the bound, and were moved back.
    """

    order: NonNegative
    device: NonNegative
    outcome: Line
    payload: NonNegative | None = None
    examples: Examples = 0
    loss: float | None = None
    seconds: Seconds = 0.0
    measured_memory_bytes: NonNegative | None = None
    overrun: bool = False
    bounded: bool = False
    present_classes: list[NonNegative] | None = Field(None, max_length=MOST_CLASSES, fail_fast=True)
    class_counts: list[Examples] | None = Field(None, max_length=MOST_CLASSES, fail_fast=True)
    report: Report | None = None


class SumHeader(_Model):
    """A sum of updates of one group: the orders that they answer, its weight, also per class, and its array."""

    group: NonNegative
    orders: list[NonNegative] = Field(min_length=1, max_length=MOST_ORDERS, fail_fast=True)
    digest: Digest
    weight: Positive
    class_weight: list[NonNegative] | None = Field(None, max_length=MOST_CLASSES, fail_fast=True)
    payload: NonNegative


class Reply(_Model):
    """What one node answers to one batch."""

    run: Line
    round: NonNegative
    updates: list[Update] = Field(max_length=MOST_ORDERS, fail_fast=True)
    sums: list[SumHeader] = Field(default_factory=list, max_length=MOST_ORDERS, fail_fast=True)


class EvaluationOrder(_Model):
    """One model to score on one device, which first trains it where the batch says so.

    data: the device's own test shard, or the test set of the whole task.
    payload: index of the array with the weights; None for the model that the device keeps.
    objective, seed, memory_bytes, predicted_memory_bytes, keeps_statistics: of the training, as in a work order.
    """

    device: NonNegative
    architecture: dict[str, Any]
    payload: NonNegative | None
    digest: str
    data: Literal["shard", "test set"]
    objective: Objective = Objective()
    seed: NonNegative = 0
    memory_bytes: NonNegative = 0
    predicted_memory_bytes: NonNegative = 0
    keeps_statistics: bool = False


class EvaluationBatch(_Model):
    """The evaluation orders that one message carries to one node.

    training: what every device does with the model before it is scored; its result is scored and forgotten.
    """

    run: str
    round: NonNegative
    task: dict[str, Any]
    family: dict[str, Any]
    batch_size: Positive
    training: LocalTraining | None = None
    shared_process: bool
    state_dir: str = ""
    orders: list[EvaluationOrder] = Field(min_length=1)


class Score(_Model):
    """Correct answers, summed loss and examples of one evaluation order; `error` where it could not be done."""

    device: NonNegative
    correct: NonNegative = 0
    loss_sum: float = 0.0
    examples: NonNegative = 0
    error: Line | None = None


class EvaluationReply(_Model):
    """What one node answers to one evaluation batch."""

    run: Line
    round: NonNegative
    scores: list[Score] = Field(max_length=MOST_ORDERS, fail_fast=True)


class NodeReport(_Model):
    """A node's answer to a query: the device it carries and that device's report."""

    device: NonNegative
    report: Report


def parse(model: type[M], text: object) -> M:
    """Read one of these models from JSON text; raises MessageError that names the field and what was wrong."""
    if not isinstance(text, str):
        raise MessageError(f"{model.__name__}: expected JSON text, got {type(text).__name__}")
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:  # a list of them would take ten times the memory of the text
            raise MessageError(f"{model.__name__}: {error.error_count()} fields are wrong or unknown") from None
        # Names of unknown fields are the sender's own words, and so is part of what some errors say.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = one_line(".".join(str(part) for part in first["loc"]), 200) or "the whole text"
        raise MessageError(f"{model.__name__}: {where}: {one_line(first['msg'], 500)}") from None
