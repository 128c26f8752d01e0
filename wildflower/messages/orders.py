"""Work orders and updates: the typed content of every message between server and nodes.

A message carries a batch for one node: JSON for what is asked, and one packed array per distinct payload. Both sides
validate with these models; a field that is unknown, missing or of another type is a MessageError that names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import core_schema

from wildflower.devices.validation import MAX_LETTERS, MAX_WHOLE, one_line
from wildflower.messages.encoding import Wire
from wildflower.messages.error import MessageError
from wildflower.models.cost import ACCUMULATED
from wildflower.tasks.device_data import Summary

M = TypeVar("M", bound=BaseModel)
# Below 2^63, so that NumPy and PyTorch can hold them.
Positive = Annotated[int, Field(ge=1, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Examples = Annotated[int, Field(ge=0, lt=2**31)]  # bounded, because they are weights of sums of 64-bit integers

# Bounds of what nodes send, far above what any honest one needs. A list is left at its first wrong element, or a long
# one would make an error of each.
MAX_CLASSES, MAX_ORDERS, MAX_KEYS, MAX_ERRORS = 2**16, 2**20, 64, 16
MOST_AT_ONCE = 1024  # devices that one process trains at once
SideBySide = Annotated[int, Field(ge=1, le=MOST_AT_ONCE)] | Literal["auto", "fastest"]
MAX_SUMS = 4 * MAX_CLASSES
MAX_BESIDE = 4  # networks that are scored beside a device's model
Line = Annotated[str, Field(max_length=MAX_LETTERS)]
Frozen = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class _Scalar:
    """One error in plain words in place of one for every type that a value of a report might have had."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        words = f"must be a number below 2^63, true, false, null or a text of at most {MAX_LETTERS} letters"
        return core_schema.custom_error_schema(handler(source), "scalar", custom_error_message=words)


# Values are scalars, so that nothing nested is ever built: an empty list takes 28 times its text.
Key = Annotated[str, Field(max_length=MAX_KEYS)]
Whole = Annotated[int, Field(ge=-MAX_WHOLE, le=MAX_WHOLE)]
Number = Annotated[float, Field(gt=-(2.0**63), lt=2.0**63)]  # what is too large for a `Whole` would be a float
Scalar = Annotated[Whole | Number | bool | Line | None, _Scalar()]
Report = Annotated[dict[Key, Scalar], Field(max_length=MAX_KEYS, fail_fast=True)]
Name = Annotated[str, Field(max_length=100)]
Payloads = Annotated[dict[Name, NonNegative], Field(max_length=MAX_KEYS)]
Facts = Annotated[
    dict[Name, Annotated[list[float], Field(max_length=MAX_CLASSES, fail_fast=True)]], Field(max_length=MAX_KEYS)
]


class Typed(BaseModel):
    """The base of what messages hold."""

    # Strict: a number in quotes is another type. A diverged model's loss is NaN, and says so.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class StepReference(Typed):
    """The client step of a method, as it travels: what the device does with its data.

    name: "package.module:Class". settings: the fields of that class, which its own validation reads.
    """

    name: Annotated[str, Field(max_length=300)]
    settings: dict[str, Any] = Field(default_factory=dict)


class LocalTraining(Typed):
    """The training of a device: epochs over its data, or a number of steps if `steps` is given.

    learning_rates: parts of the model that have another learning rate, and how many times the usual one that is.
    layout: how images lie in memory while a model trains; channels-last is faster on some networks, with other bits.
    fused: adam and adamw take a step in one kernel, which is faster, with other bits.
    micro_batch_size: examples of a batch that a device computes with at once, adding up their gradients; 0: all.
    """

    epochs: NonNegative = 1
    steps: NonNegative = 0
    batch_size: Positive = 32
    micro_batch_size: NonNegative = 0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(0.1, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # of adam and adamw
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(0.0, ge=0)
    augment: bool = True
    learning_rates: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    layout: Literal["contiguous", "channels-last"] = "contiguous"
    fused: bool = False

    @property
    def examples_at_once(self) -> int:
        """Return how many examples a device computes with at once: a whole batch, or a micro-batch."""
        return min(self.micro_batch_size or self.batch_size, self.batch_size)

    @property
    def accumulates(self) -> bool:
        """Return whether gradients of several micro-batches are added up before a step."""
        return self.examples_at_once < self.batch_size

    @property
    def priced_optimizer(self) -> str:
        """Return the optimizer as the cost model names it: momentum keeps a state, micro-batches a sum of gradients."""
        name = "sgd-momentum" if self.optimizer == "sgd" and self.momentum else self.optimizer
        return name + ACCUMULATED if self.accumulates else name

    def rate_of(self, name: str) -> float:
        """Return the factor of a parameter's learning rate: that of the longest part that its name begins with."""
        fitting = [part for part in self.learning_rates if name == part or name.startswith(f"{part}.")]
        return self.learning_rates[max(fitting, key=len)] if fitting else 1.0

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if not self.epochs and not self.steps:
            raise ValueError("epochs = 0 and steps = 0: one of them must be at least 1")
        return self


class Merge(Typed):
    """The way in which a node adds up the updates of its devices before it answers.

    weighting: every device counts by its examples, or all alike.
    present_classes: rows of the classifier count only for devices that hold the class (HeteroFL).
    """

    weighting: Literal["examples", "uniform"] = "examples"
    present_classes: bool = False


class ModelOrder(Typed):
    """The orders that bring a device a model, to train it or to score it.

    Attributes:
        payloads: tensor set -> index of its array in this message.
        digest: of the layouts of all tensor sets, both ways (`wildflower.messages.tensor_sets.digest`).
        client_step: the client step of the method.
        memory_bytes: what training may use; 0 for no limit but the device's own.
        frozen: the name of what is frozen of the sub-model (`wildflower.messages.frozen_parts.Part`); "" for nothing.
        frozen_payload: index of the array with what the device lacks of it; None if it has all of it.
    """

    device: NonNegative
    architecture: dict[str, Any]
    payloads: dict[str, NonNegative]
    digest: str
    client_step: StepReference
    seed: NonNegative
    memory_bytes: NonNegative
    predicted_memory_bytes: NonNegative
    frozen: Frozen = ""
    frozen_payload: NonNegative | None = None


class WorkOrder(ModelOrder):
    """The work that one device is asked to do. A device may have several orders, which it does one after the other.

    Attributes:
        order: its number, unlike any other's of the exchange.
        group: tensor sets of one group are of the same tensors at the same coordinates, so that they may be added up.
        after: the number of an earlier order of the device in this message, whose trained model this one reads.
        kept: the device keeps something since an earlier round, as far as the server knows; where nothing of it is
            left, or it cannot be read, it was lost.
        feedback: what rounding for the wire loses is kept, and added to what the device returns next. False where the
            sub-model's channels change every round, because the error would belong to other channels.
        masked_with: the devices, itself among them, whose sum is all that the server may see; it adds the masks that
            were agreed with them. [] without secure aggregation.
    """

    order: NonNegative
    tier: str
    group: NonNegative
    after: NonNegative | None = None
    kept: bool = False
    feedback: bool = True
    masked_with: list[NonNegative] = Field(default_factory=list)


class ToNode(Typed):
    """The messages that carry orders to one node.

    Attributes:
        shared_process: the node carries many simulated devices beside other such nodes, so it trains on one thread.
        state_dir: where devices keep what must survive rounds, on the node; empty for the node's own default.
    """

    run: str
    round: NonNegative
    shared_process: bool
    state_dir: str = ""


class Batch(ToNode):
    """The work orders that one message carries to one node.

    Attributes:
        norm_bound: how far an update may be from what was sent, where the node adds updates up; 0: as far as it likes.
        clip: where above 0, changes of at most this norm are added up in place of weights, every device counting alike.
        wire: as what tensor sets travel (`wildflower.messages.encoding`). To a node of many devices they come in full.
            The node rounds each simulated device's tensor sets as sending would.
        each_by_itself: the node adds nothing up: the server wants every device's tensor sets by themselves.
        oldest_checkpoint: the round of the oldest checkpoint that the run may go on from, so that devices keep what
            such a run needs; None: only that of the round before.
        side_by_side: how many devices of one architecture and client step train at once on a node of many: 1, they take
            turns, or what the node finds to be faster, under "auto" only on a GPU.
    """

    task: dict[str, Any]
    family: dict[str, Any]
    training: LocalTraining
    wire: Wire = "float32"
    each_by_itself: bool = False
    norm_bound: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    oldest_checkpoint: NonNegative | None = None
    side_by_side: SideBySide = 1
    orders: list[WorkOrder] = Field(min_length=1)


class Update(Typed):
    """The answer of one device to one order.

    Attributes:
        order: the number of that order.
        outcome: "trained", or "refused: why" (by the device, before or while training), or "failed: why".
        payloads: tensor set -> index of its array in this message, of those that were not added to a sum.
        seconds: wall time of the work on the device.
        measured_memory_bytes: peak memory above what the process held before the work; None where nothing was trained
            and in a simulation, where the devices of one process share its allocator.
        overrun: the work outgrew its memory while it ran, was killed because the machine had none left, or was not
            begun because less was free than it needs, though its budget allowed it.
        at_once: how many devices were trained at once, this one among them.
        bounded: its tensor sets were further from those sent than the bound, and were moved back.
        facts: numbers that the client step returns beside its tensor sets.
        state_kept: the device keeps something of this order for later rounds.
        state_lost: what the device had kept from earlier rounds could not be read any more; it began anew.
    """

    order: NonNegative
    device: NonNegative
    outcome: Line
    payloads: Payloads = Field(default_factory=dict)
    examples: Examples = 0
    loss: float | None = None
    seconds: Seconds = 0.0
    measured_memory_bytes: NonNegative | None = None
    overrun: bool = False
    at_once: Annotated[int, Field(ge=1, le=MOST_AT_ONCE)] = 1
    bounded: bool = False
    present_classes: list[NonNegative] | None = Field(None, max_length=MAX_CLASSES, fail_fast=True)
    facts: Facts = Field(default_factory=dict)
    state_kept: bool = False
    state_lost: bool = False
    report: Report | None = None


class SumHeader(Typed):
    """A sum of one tensor set over devices of one group: their orders, its weight, also per class, and its array."""

    group: NonNegative
    tensor_set: Name
    orders: list[NonNegative] = Field(min_length=1, max_length=MAX_ORDERS, fail_fast=True)
    weight: Positive
    class_weight: list[NonNegative] | None = Field(None, max_length=MAX_CLASSES, fail_fast=True)
    payload: NonNegative


class Reply(Typed):
    """The answer of one node to one batch."""

    run: Line
    round: NonNegative
    updates: list[Update] = Field(max_length=MAX_ORDERS, fail_fast=True)
    sums: list[SumHeader] = Field(default_factory=list, max_length=MAX_ORDERS, fail_fast=True)


Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Sealed = Annotated[str, Field(pattern=r"^([0-9a-f]{96})?$")]
Share = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
Confirmation = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
MAX_SHARES = 1024


class Member(Typed):
    """The public facts of a device whose update is added up under masks: two keys, and a hash of its own seed."""

    device: NonNegative
    channel_key: Hex64
    mask_key: Hex64
    own_seed_hash: Hex64


class KeyOrder(Typed):
    """One step of secure aggregation for one device (masks.py); which one follows from what it is given.

    With weights it makes keys of a new round. With members it seals shares of its seeds for each of them. With blocks
    alone it confirms them to the other members. With sealed shares too it reveals, for each of the members that sealed
    them, the one or the other share.

    Attributes:
        weights: the digest of the weights that it will train (`wildflower.messages.masks.digest_of_weights`).
        members: all whose keys are known.
        threshold: how many shares give a seed.
        minimum: the fewest devices of a block.
        blocks: the devices whose masked updates have arrived, parted so that from the same weights no other sum is
            ever of some devices of a block and not of the others (`wildflower.client_app.policy`).
        sealed: the shares that members have sealed for this device, in the members' order; "" of those that did not.
        confirmed: what members have confirmed to this device, in the members' order; "" of those that did not.
    """

    device: NonNegative
    weights: Hex64 | None = None
    members: list[Member] = Field(default_factory=list)
    threshold: NonNegative = 0
    minimum: NonNegative = 0
    blocks: list[list[NonNegative]] = Field(default_factory=list)
    sealed: list[Sealed] = Field(default_factory=list)
    confirmed: list[Confirmation] = Field(default_factory=list)


class KeyBatch(ToNode):
    """Steps of secure aggregation that one message carries to one node."""

    orders: list[KeyOrder] = Field(min_length=1)


class KeyAnswer(Typed):
    """The answer of one device to a `KeyOrder`; `error` if it could not.

    Attributes:
        member: its new keys.
        only_with: its block in a sum that it has confirmed for the same weights: it takes part in no other block of
            them. [] where it has been in none.
        sealed: its shares for the members, in their order.
        share_hashes: of its shares of its own seed for the members, in their order, then of those of its mask key's.
        confirmed: what it confirms to each of the members, in their order.
        shares: the revealed shares of those that had sealed any, in the members' order; "" of those whose shares it
            could not read.
    """

    device: NonNegative
    member: Member | None = None
    only_with: list[NonNegative] = Field(default_factory=list, max_length=MAX_SHARES, fail_fast=True)
    sealed: list[Sealed] = Field(default_factory=list, max_length=MAX_SHARES, fail_fast=True)
    share_hashes: list[Hex64] = Field(default_factory=list, max_length=2 * MAX_SHARES, fail_fast=True)
    confirmed: list[Confirmation] = Field(default_factory=list, max_length=MAX_SHARES, fail_fast=True)
    shares: list[Share] = Field(default_factory=list, max_length=MAX_SHARES, fail_fast=True)
    error: Line | None = None


class KeyReply(Typed):
    """The answer of one node to a `KeyBatch`."""

    run: Line
    round: NonNegative
    answers: list[KeyAnswer] = Field(max_length=MAX_ORDERS, fail_fast=True)


class EvaluationOrder(ModelOrder):
    """One model to score on one device, which first trains it where the batch says so.

    data: the device's own test shard, or the test set of the whole task.
    """

    data: Literal["shard", "test set"]
    seed: NonNegative = 0
    memory_bytes: NonNegative = 0
    predicted_memory_bytes: NonNegative = 0


class EvaluationBatch(ToNode):
    """The evaluation orders that one message carries to one node.

    training: what every device does with the model before it is scored; its result is scored and forgotten.
    side_by_side: as of `Batch`, where the node trains and scores.
    """

    task: dict[str, Any]
    family: dict[str, Any]
    batch_size: Positive
    training: LocalTraining | None = None
    side_by_side: SideBySide = 1
    orders: list[EvaluationOrder] = Field(min_length=1)


Sums = Annotated[list[float], Field(max_length=MAX_SUMS, fail_fast=True)]


class Score(Typed):
    """Sums of the task's metric and of the losses of one evaluation order; `error` where it could not be done.

    beside: the metric's sums of further networks, over the same examples, in the order of `ClientStep.scored_beside`.
    """

    device: NonNegative
    sums: Sums = Field(default_factory=list)
    beside: list[Sums] = Field(default_factory=list, max_length=MAX_BESIDE, fail_fast=True)
    loss_sum: float = 0.0
    examples: NonNegative = 0
    error: Line | None = None


class EvaluationReply(Typed):
    """The answer of one node to one evaluation batch."""

    run: Line
    round: NonNegative
    scores: list[Score] = Field(max_length=MAX_ORDERS, fail_fast=True)


class DataQuestion(Typed):
    """The question about data that devices hold themselves: sums and counts, never an example.

    moments: whether sums per channel are needed, to normalize inputs.
    """

    run: str
    task: dict[str, Any]
    moments: bool


class DataAnswer(Typed):
    """The answer of a node about its device's data."""

    run: Line
    said: Summary


class NodeReport(Typed):
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
        if error.error_count() > MAX_ERRORS:  # a list of them would take ten times the memory of the text
            raise MessageError(f"{model.__name__}: {error.error_count()} fields are wrong or unknown") from None
        # Names of unknown fields are the sender's own words, and so is part of what some errors say.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = one_line(".".join(str(part) for part in first["loc"]), 200) or "the whole text"
        raise MessageError(f"{model.__name__}: {where}: {one_line(first['msg'], 500)}") from None
