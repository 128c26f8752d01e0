"""Keys of a run that belong together, each group one table: `dp = {epsilon = 4, clip = 1}`, or `dp.epsilon = 4`.

What goes together within a group is checked here, and what goes with the rest of the run in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from wildflower.devices.node_config import MIN_MEMBERS
from wildflower.messages.orders import MOST_AT_ONCE
from wildflower.messages.programs import ProgramFormat
from wildflower.models.initial import checked_names
from wildflower.plugins.raised_as import raised_as
from wildflower.server_app.inline_tables import parse_arguments, weights_of
from wildflower.strategies.params import Betas, Count, CountOrZero, Numbers, Params, Rate, readable, to_scalar
from wildflower.strategies.privacy import MAX_CLIP, MAX_NOISE_MULTIPLIER

# What names in a file of weights are called in the family: the inside of an inline TOML table.
NamesTable = Annotated[
    str, readable(lambda text: checked_names(parse_arguments(text, like="'bert' = '', 'fc' = false")))
]
Share = Annotated[float, Field(gt=0, lt=1)]


class Initial(Params):
    """The first weights."""

    weights: str = Field(
        "",
        description='First weights: a safetensors or .pth file, a folder of Hugging Face\'s or a name on its hub; "" '
        "draws them; of a choice one for each member, as \"large = 'a.pth', small = 'b.pth'\" (docs/your-model.md)",
    )
    names: NamesTable = Field(
        "",
        description="What names in that file are called in the family, such as \"'features' = 'stem', 'fc' = false\"",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        with raised_as(ValueError, f"initial.weights = {self.weights!r}: "):
            weights_of(self.weights)
        if self.names and not self.weights:
            raise ValueError(
                f"initial.names = {self.names!r}: says what names in the file of initial.weights are called, and there "
                "is none"
            )
        return self


class Strong(Params):
    """The devices of the partition strong-and-weak."""

    devices: CountOrZero = Field(
        0, description="Number of strong devices under strong-and-weak: those of the fleet's first group"
    )
    share: Share = Field(0.5, description="Share of the training examples that strong devices hold together")
    test: Literal["share", "whole"] = Field(
        "share", description="Test examples of a strong device: an equal share like all others, or the whole test set"
    )


class Public(Params):
    """The server's public data."""

    task: str = Field(
        "",
        description="Task whose training inputs, without labels, are the server's public data, for methods that learn "
        'from such; "": none',
    )
    data_dir: str = Field("", description='Folder of the public data; "" looks in the usual places')
    examples: CountOrZero = Field(0, description="Public examples, drawn at random; 0 takes all")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.task and (self.data_dir or self.examples):
            raise ValueError("public.task = '': public.data-dir and public.examples say nothing without it")
        return self


class BudgetLimits(Params):
    """Limits of the model that a device gets."""

    memory_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.85, description="Share of the reported available memory that training may use: the cost may be 12 % off"
    )
    transfer_seconds: Rate = Field(
        0.0, description="Longest time that tensor sets may travel one way, which bounds the payload; 0 is no limit"
    )
    round_seconds: Rate = Field(
        0.0,
        description="Longest time that a device's download, training and upload may take by what is known of it, which "
        "bounds its model; 0 is no limit",
    )


class Adam(Params):
    """Settings of adam and adamw."""

    betas: Betas = Field((0.9, 0.999), description="Betas of adam and adamw")
    fused: bool = Field(
        False,
        description="Adam and adamw step in one kernel, which is faster and gives other bits (benchmarks/overhead)",
    )


class Compute(Params):
    """Settings that change how fast devices train, and with it the bits."""

    layout: Literal["contiguous", "channels-last"] = Field(
        "contiguous",
        description="How images lie in memory in training, on devices and in ensemble distillation on the server: "
        "contiguous, or channels-last, which is faster on some networks and gives other bits (benchmarks/overhead)",
    )
    side_by_side: Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)] = Field(
        "auto",
        description="Simulated devices of one model that a worker trains at once, which gives other bits: a number, "
        "off, fastest (what the first ones took less time with), or auto: fastest on GPUs, off on processors",
    )

    @field_validator("side_by_side")
    @classmethod
    def _possible(cls, value: str) -> str:
        if value not in ("auto", "fastest", "off") and not (value.isdecimal() and 1 <= int(value) <= MOST_AT_ONCE):
            raise ValueError(f"must be auto, fastest, off or a number from 1 to {MOST_AT_ONCE}")
        return value


class AggregationRule(Params):
    """The rule for the values that devices return, how large they may be, and whose are waited for."""

    rule: Literal["mean", "trimmed-mean", "median", "norm-bounded-mean"] = Field(
        "mean",
        description="What becomes of the values that devices return of one coordinate: mean, trimmed-mean, median, "
        "norm-bounded-mean (docs/security.md)",
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.2, description="Share of a coordinate's devices that trimmed-mean leaves out at each end"
    )
    norm_bound: Rate = Field(
        0.0,
        description="Largest norm of a device's update, larger ones are scaled down; 0 does not bound "
        "(docs/security.md)",
    )
    over_selection: Rate = Field(
        0.0,
        description="Share of devices sampled beyond devices-per-round; the first devices-per-round that answer count",
    )


class DifferentialPrivacy(Params):
    """Differential privacy of devices."""

    epsilon: Rate = Field(
        0.0,
        description="Epsilon of the whole run, which says how much noise the devices' mean change gets; 0: not "
        "differentially private, or as dp.noise-multiplier says (docs/privacy.md)",
    )
    noise_multiplier: Annotated[float, Field(ge=0, le=MAX_NOISE_MULTIPLIER)] = Field(
        0.0,
        description="Standard deviation of the noise on the sum of the devices' changes, in multiples of dp.clip, in "
        "place of dp.epsilon; 0: none",
    )
    clip: Annotated[float, Field(gt=0, le=MAX_CLIP)] = Field(
        1.0, description="Largest norm of a device's change under differential privacy; larger ones are scaled down"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="Probability with which epsilon need not hold: well below 1 / devices"
    )
    resume_copy: bool = Field(
        False,
        description="Under differential privacy, whether the folder of a resumed run was copied, moved to another disk "
        "or restored, is its newest copy, and no other goes on (docs/privacy.md)",
    )

    @property
    def is_on(self) -> bool:
        """Return whether the run is differentially private."""
        return bool(self.epsilon or self.noise_multiplier)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.epsilon and self.noise_multiplier:
            raise ValueError(
                f"dp.noise-multiplier = {self.noise_multiplier!r}: dp.epsilon = {self.epsilon:g} says how much noise "
                "there is: leave one of them 0"
            )
        return self


class SecureAggregation(Params):
    """Sums under masks."""

    minimum: Annotated[int, Field(ge=0, le=1000)] = Field(
        0,
        description="Smallest number of devices whose sum the server may see, as under secure aggregation it sees sums "
        f"only, {MIN_MEMBERS} at least, such as 5; smaller groups are left out. 0: off (docs/secure-aggregation.md)",
    )

    @property
    def is_on(self) -> bool:
        """Return whether the server sees sums of devices' updates only."""
        return self.minimum > 0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if 0 < self.minimum < MIN_MEMBERS:
            raise ValueError(f"secure-aggregation.minimum = {self.minimum}: must be at least {MIN_MEMBERS}, or 0: off")
        return self


class Schedule(Params):
    """The learning rate over the rounds."""

    kind: Literal["steps", "cosine"] = Field(
        "steps",
        description="Schedule of the learning rate: steps (at schedule.decay-rounds), cosine (falls towards 0 over all "
        "rounds)",
    )
    decay_rounds: Numbers = Field(
        (), description="Rounds after each of which the learning rate is multiplied by schedule.decay-factor"
    )
    decay_factor: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="Factor of the learning rate at each of schedule.decay-rounds"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        given = f"schedule.decay-rounds = {to_scalar(self.decay_rounds)!r}"
        if not all(r.is_integer() and r >= 1 for r in self.decay_rounds):
            raise ValueError(f"{given}: must be numbers of rounds, from 1 on")
        if self.kind != "steps" and self.decay_rounds:
            raise ValueError(
                f"{given}: schedule.kind = 'cosine' needs none: leave schedule.decay-rounds empty, or set "
                "schedule.kind = 'steps'"
            )
        return self


class Statistics(Params):
    """The way in which batch norm statistics of a scored model are taken."""

    devices: CountOrZero = Field(
        0,
        description="Devices that take batch norm statistics of a scored model that has none; 0: as many as "
        "devices-per-round, and 30 at least",
    )
    examples: CountOrZero = Field(
        64, description="Training examples that each of them passes at most, drawn anew each time; 0: all"
    )


class Checkpoints(Params):
    """Checkpoints that a resumed run goes on from."""

    resume_from: CountOrZero = Field(
        0, description="Round whose checkpoint a resumed run goes on from; later rounds are dropped; 0: the newest good"
    )
    keep: Count = Field(3, description="Number of checkpoints that are kept, those of the last rounds")


class DeliveryRounds(Params):
    """Models that reach real devices while the run goes on."""

    every: CountOrZero = Field(0, description="Rounds between deliveries of models to real devices; 0: none")
    format: ProgramFormat = Field("pt2", description="Format of these models: pt2, onnx or pte (docs/export.md)")


class Personal(Params):
    """Scores of every device on its own test shard."""

    every: CountOrZero = Field(
        0, description="Rounds between evaluations of every device on its own test shard; 0: never"
    )
    epochs: CountOrZero = Field(
        1, description="Epochs that a device trains the model before it is scored so; 0: it is scored as it is given"
    )
    first_round: Count = Field(1, description="First round of personal evaluations")
