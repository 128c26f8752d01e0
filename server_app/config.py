"""The run configuration: one typed, validated model of every key.

The same flat kebab-case keys stand in `[tool.flwr.app.config]` of pyproject.toml (each with what it means, from
`server_app.meanings`), in an experiment file and in `--set`. A method's own settings carry its name: `fedprox.mu`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from devices.validation import did_you_mean, nearest
from models.family import FAMILIES
from server_app.keys import listed_keys, missing_fields, missing_keys
from strategies import STRATEGIES
from strategies.model_search import layer_shares
from tasks.task import TASKS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class ConfigError(ValueError):
    """A run configuration that cannot be run; the text names the key, the value and what would be right."""


# What keys are called elsewhere, too far from their names here to be found by likeness.
OTHER_NAMES = {
    "lr": "learning-rate",
    "eta": "learning-rate",
    "epochs": "local-epochs",
    "num-epochs": "local-epochs",
    "steps": "local-steps",
    "bs": "batch-size",
    "wd": "weight-decay",
    "scheduler": "schedule",
    "clients": "devices",
    "num-clients": "devices",
    "num-devices": "devices",
    "num-supernodes": "workers",
    "processes": "workers",
    "clients-per-round": "devices-per-round",
    "fraction-fit": "devices-per-round",
    "fraction-train": "devices-per-round",
    "num-rounds": "rounds",
    "num-server-rounds": "rounds",
    "communication-rounds": "rounds",
    "timeout": "deadline-seconds",
    "dataset": "task",
    "data": "task",
    "data-path": "data-dir",
    "split": "partition",
    "model": "family",
    "model-name": "family",
    "architecture": "family",
    "arch": "family",
    "network": "family",
    "method": "strategy",
    "algorithm": "strategy",
    "rates": "widths",
    "ratios": "widths",
    "mu": "fedprox.mu",
    "name": "run-name",
    "output": "output-dir",
    "out": "output-dir",
}
# Strategies whose devices train cuts of one global model.
DISTILLED = ("heterofl", "fedrolex", "federated-dropout", "fjord", "anycostfl", "model-search")
NUMBERS = "must be numbers such as [1, 0.5] or '1, 0.5'"
# What would be right, by the beginning of pydantic's name of an error.
RIGHT = {
    "int_": "a whole number such as {default}",
    "float_": "a number such as {default}",
    "bool_": "true or false",
    "string_": "a text such as '{default}'",
}


def _numbers(value: object) -> tuple[float, ...]:
    """Flower's own TOML configuration holds scalars only: there a list is written "1, 0.5" or "[1, 0.5]"."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        parts: list[object] = [part for part in text.split(",") if part.strip()]
    else:
        parts = list(value) if isinstance(value, list | tuple) else [value]
        if not all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
            raise ValueError(NUMBERS)
    try:
        return tuple(float(part) for part in parts)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        raise ValueError(NUMBERS) from None


def _arguments(value: object) -> object:
    """A family's arguments, such as "first_channels = 16, activation = 'relu6'": the inside of an inline TOML table."""
    if isinstance(value, str):
        parse_arguments(value)
    return value


def _layer_shares(value: object) -> object:
    """Shares of single layers, as `strategies.model_search.layer_shares` reads them."""
    if isinstance(value, str):
        layer_shares(value)
    return value


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments that a text of `family-arguments` stands for. Raises ValueError."""
    try:
        return tomllib.loads(f"arguments = {{{text}}}")["arguments"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"must be like \"first_channels = 16, activation = 'relu6'\": {error}") from None


Arguments = Annotated[str, BeforeValidator(_arguments)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_numbers)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _kebab(name: str) -> str:
    method, dot, rest = name.partition("__")
    return f"{method}.{rest}".replace("_", "-") if dot else name.replace("_", "-")


class RunConfig(BaseModel):
    """Every key of a run, with its default. Units are in the names; 0 or "" means unset where a key may be unset."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=_kebab, populate_by_name=True)

    # What is learned, and from what
    task: str = "digits"
    data_dir: str = ""
    family: str = ""
    family_arguments: Arguments = ""
    partition: Literal["iid", "dirichlet", "natural", "strong-and-weak"] = "dirichlet"
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    examples_per_device: Annotated[int, Field(ge=0)] = 0
    strong_devices: Annotated[int, Field(ge=0)] = 0
    strong_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    strong_test: Literal["share", "whole"] = "share"

    # Who learns
    devices: Count = 20
    workers: Count = 2
    fleet: str = "digits-demo"
    devices_per_round: Count = 10
    over_selection: Rate = 0.0
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    transfer_seconds: Rate = 0.0
    deadline_seconds: Rate = 0.0
    report_max_age_seconds: Rate = 600.0
    below_smallest: Literal["skip", "smallest"] = "skip"
    both_models: bool = False

    # How
    strategy: str = "heterofl"
    widths: Numbers = (1.0, 0.5, 0.25, 0.125, 0.0625)
    rounds: Count = 20
    local_epochs: Count = 1
    local_steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Count = 16
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    betas: Numbers = (0.9, 0.999)
    weight_decay: Rate = 5e-4
    clip_norm: Rate = 0.0
    norm_bound: Rate = 0.0
    schedule: Literal["steps", "cosine"] = "steps"
    decay_rounds: Numbers = ()
    decay_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    augment: bool = True
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1

    # A method's own settings
    fedavg__use: Literal["all-small", "all-large", "exclusive", "affordable", "local"] = "all-large"
    fedprox__mu: Rate = 0.01
    fedadam__eta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    fedadam__beta_1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    fedadam__beta_2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    fedadam__tau: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    heterofl__dynamic: bool = False
    heterofl__statistics_devices: Annotated[int, Field(ge=0)] = 0
    fedrolex__statistics_devices: Annotated[int, Field(ge=0)] = 0
    federated_dropout__statistics_devices: Annotated[int, Field(ge=0)] = 0
    fjord__distillation: bool = False
    fjord__statistics_devices: Annotated[int, Field(ge=0)] = 0
    anycostfl__statistics_devices: Annotated[int, Field(ge=0)] = 0

    model_search__searcher: Literal["exact", "pool"] = "exact"
    model_search__shares: Numbers = (0.0, 0.5, 1.0)
    model_search__layer_shares: Annotated[str, BeforeValidator(_layer_shares)] = ""
    model_search__least_blocks: Count = 1
    model_search__tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.02
    model_search__epsilon: Annotated[float, Field(gt=0, le=1)] = 0.8
    model_search__most_draws: Count = 5
    model_search__weighting: Literal["uniform", "examples"] = "uniform"
    model_search__masked_loss: bool = True
    model_search__statistics_devices: Annotated[int, Field(ge=0)] = 0
    hypemefed__rank: Count = 100
    hypemefed__hidden: Count = 512
    hypemefed__epochs: Count = 5
    hypemefed__learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5e-4
    hypemefed__guess: Literal["change", "weight"] = "change"
    hypemefed__fill: Literal["hypernetwork", "owners", "stale"] = "hypernetwork"
    hypemefed__generate: Literal["layers", "all"] = "layers"
    hypemefed__exits: bool = True
    depthfl__ramp_rounds: Annotated[int, Field(ge=0, lt=2**31)] = 300
    depthfl__alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    scalefl__widths: Numbers = ()
    scalefl__gamma: Rate = 0.0
    scalefl__temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0
    recipfl__eta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    recipfl__clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0
    recipfl__transfer: Literal["teacher", "both", "none"] = "teacher"
    recipfl__divergence: Literal["student || teacher", "teacher || student"] = "student || teacher"
    recipfl__weighting: Literal["sum", "examples"] = "sum"
    recipfl__hidden: Annotated[int, Field(ge=4, lt=2**16)] = 128
    recipfl__decoder_hidden: Annotated[int, Field(ge=1, lt=2**16)] = 256
    recipfl__tile: Annotated[int, Field(ge=0, lt=2**31)] = 64
    recipfl__descriptor: Literal["classes", "client"] = "classes"
    recipfl__conditioned: Literal["all", "classifier"] = "all"
    recipfl__virtual_edges: bool = True
    distillation__steps: Annotated[int, Field(ge=0)] = 0
    distillation__batch_size: Annotated[int, Field(ge=2)] = 64
    distillation__learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3

    # What is measured and kept
    evaluate_every: Count = 1
    evaluate_tiers: bool = True
    personal_every: Annotated[int, Field(ge=0)] = 0
    personal_epochs: Annotated[int, Field(ge=0, lt=2**31)] = 1
    personal_from: Count = 1
    output_dir: str = "runs"
    run_name: str = ""
    resume: bool = False
    state_dir: str = ""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        def need(good: bool, key: str, why: str) -> None:
            if not good:
                raise ValueError(f"{key} = {self.to_dict()[key]!r}: {why}")

        def known(key: str, value: str, names: Mapping[str, object]) -> None:
            need(value in names, key, f"no such {key}; {nearest(value, names)}")

        known("strategy", self.strategy, STRATEGIES)
        known("task", self.task, TASKS)
        if self.family:
            known("family", self.family, FAMILIES)
        need(
            not self.run_name or (Path(self.run_name).name == self.run_name and self.run_name not in (".", "..")),
            "run-name",
            "the name of one folder, without / (output-dir says where it lies)",
        )
        sampled = sampled_devices(self.devices_per_round, self.over_selection)
        if self.fleet:
            need(
                sampled <= self.devices,
                "devices-per-round",
                f"more than devices = {self.devices}"
                + (f" (over-selection = {self.over_selection} asks {sampled})" if self.over_selection else ""),
            )
        need(bool(self.widths), "widths", "at least one width is needed, such as 1 or '1, 0.5'")
        need(all(0 < w <= 1 for w in self.widths), "widths", "every width is above 0 and at most 1")
        need(len(set(self.widths)) == len(self.widths), "widths", "a width is listed twice")
        need(len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", "two numbers in [0, 1)")
        need(all(r.is_integer() and r >= 1 for r in self.decay_rounds), "decay-rounds", "round numbers from 1")
        need(
            self.schedule == "steps" or not self.decay_rounds,
            "decay-rounds",
            "schedule = 'cosine' needs none: leave decay-rounds empty, or set schedule = 'steps'",
        )
        need(
            not self.over_selection or self.deadline_seconds > 0 or bool(self.fleet),
            "over-selection",
            "needs a fleet or deadline-seconds to tell who is late",
        )
        need(
            not self.personal_every or self.personal_from <= self.rounds,
            "personal-from",
            f"with rounds = {self.rounds} no round is scored personally: at most that, or personal-every = 0",
        )
        need(
            not self.both_models or self.strategy != "fedavg" or self.fedavg__use not in ("local", "all-small"),
            "both-models",
            f"with fedavg.use = {self.fedavg__use!r} no device trains two models that travel: leave it false",
        )
        need(
            not self.both_models or self.strategy != "recipfl",
            "both-models",
            "recipfl says itself what strong devices train: leave it false, and see recipfl.transfer",
        )
        need(
            not self.both_models or self.strategy != "hypemefed" or self.hypemefed__fill == "owners",
            "both-models",
            "hypemefed would count a device that trains two models twice in the deep layers, with its own and with "
            f"what hypemefed.fill = {self.hypemefed__fill!r} adds for its smaller one: false, or set that to 'owners'",
        )
        need(
            not self.both_models or self.strategy != "depthfl" or not self.depthfl__alpha,
            "both-models",
            f"with depthfl.alpha = {self.depthfl__alpha} a device corrects the training of one model, not of two: "
            "leave it false, or set depthfl.alpha = 0",
        )
        need(
            not self.distillation__steps or self.strategy in DISTILLED,
            "distillation.steps",
            f"strategy {self.strategy!r} has no sub-models to distill: 0, or one of {', '.join(DISTILLED)}",
        )
        need(
            all(0 <= s <= 1 for s in self.model_search__shares) and max(self.model_search__shares, default=0) > 0,
            "model-search.shares",
            "every share lies in [0, 1], and one is above 0",
        )
        need(
            self.recipfl__hidden % 4 == 0,
            "recipfl.hidden",
            "a multiple of 4: four heads of attention, and four sides of a tensor, share it",
        )
        need(all(0 < w <= 1 for w in self.scalefl__widths), "scalefl.widths", "every width is above 0 and at most 1")
        parted = self.partition == "strong-and-weak"
        need(
            not parted or 0 < self.strong_devices < self.devices,
            "strong-devices",
            f"partition = 'strong-and-weak' needs 1 to {self.devices - 1} of the {self.devices} devices",
        )
        need(
            not parted or (not self.test_fraction and not self.examples_per_device),
            "partition",
            "deals out all examples, and the test set too: test-fraction and examples-per-device do not go with it",
        )
        need(
            self.examples_per_device == 0 or self.partition != "natural",
            "examples-per-device",
            "partition = 'natural' says itself who holds what: use iid or dirichlet, or set it to 0",
        )
        return self

    @classmethod
    def from_run_config(cls, values: Mapping[str, Any]) -> RunConfig:
        """Check a flat run configuration as Flower hands it over; ConfigError names the key that is wrong."""
        if missing := missing_fields(STRATEGIES, cls.model_fields):
            raise ConfigError(missing)
        listed = listed_keys()
        if listed is not None and (missing := missing_keys(cls().to_dict(), listed)):
            raise ConfigError(missing)
        keys = [_kebab(name) for name in cls.model_fields]
        for key in values:
            if key not in keys:
                raise ConfigError(f"unknown key {key!r} = {values[key]!r}: {_meant(key, keys)}")
        try:
            return cls.model_validate({key: _whole_to_float(cls, key, value) for key, value in values.items()})
        except ValidationError as error:
            lines = []
            for item in error.errors(include_url=False):
                if item["loc"]:
                    lines.append(f"{item['loc'][0]} = {item['input']!r}: {_wrong(item)}")
                else:
                    lines.append(item["msg"].removeprefix("Value error, "))
            raise ConfigError("; ".join(lines)) from None

    def ignored(self) -> dict[str, Any]:
        """Keys of other methods that have another value than their default: nothing reads them in this run."""
        values, defaults = self.to_dict(), RunConfig().to_dict()
        return {key: values[key] for key in unread(values) if values[key] != defaults[key]}

    def ignored_text(self) -> str:
        """What `ignored` finds, in words; "" where it finds nothing."""
        told = ", ".join(f"{key} = {value!r}" for key, value in self.ignored().items())
        return f"Keys of other methods, which strategy = {self.strategy!r} does not read: {told}" if told else ""

    def to_dict(self) -> dict[str, Any]:
        """The configuration as flat kebab-case keys and TOML scalars."""
        values = self.model_dump(by_alias=True)
        return {k: ", ".join(map(_number, v)) if isinstance(v, tuple) else v for k, v in values.items()}


def unread(values: Mapping[str, Any]) -> list[str]:
    """The keys of a flat configuration, of any version, that belong to other methods than its own."""
    others = {*STRATEGIES, "distillation"} - {values["strategy"]}
    if values.get("distillation.steps"):
        others.remove("distillation")
    return [key for key in values if key.partition(".")[0] in others and "." in key]


def _meant(key: str, keys: list[str]) -> str:
    """What may be meant by a key that there is not, and else where to look."""
    other = OTHER_NAMES.get(key.lower().replace("_", "-"))
    if other is not None:
        return f"did you mean {other!r}?"
    method, dot, rest = key.partition(".")
    own = [name for name in keys if name.startswith(f"{method}.")]
    if dot and own:
        # All of a method's keys are alike by its name: only what follows tells them apart.
        close = difflib.get_close_matches(rest, [name.partition(".")[2] for name in own], n=2, cutoff=0.5)
        if close:
            return f"did you mean {' or '.join(repr(f'{method}.{name}') for name in close)}?"
        return f"{method} has {', '.join(own)}"
    return did_you_mean(key, keys) or f"'wildflower config' lists all {len(keys)}"


def _wrong(item: ErrorDetails) -> str:
    """What was wrong with one value, and what would be right."""
    message = item["msg"].removeprefix("Value error, ")
    default = RunConfig().to_dict()[str(item["loc"][0])]
    for kind, right in RIGHT.items():
        if item["type"].startswith(kind):
            return f"must be {'a text in quotes' if default == '' else right.format(default=default)}"
    return message


def _whole_to_float(model: type[RunConfig], key: str, value: object) -> object:
    """`learning-rate = 1` is a whole number in TOML and means 1.0."""
    field = next(f for name, f in model.model_fields.items() if _kebab(name) == key)
    return float(value) if field.annotation is float and type(value) is int else value


def sampled_devices(devices_per_round: int, over_selection: float) -> int:
    """How many devices a round asks, with over-selection: 10 with 0.3 asks 13."""
    return devices_per_round + round(devices_per_round * over_selection)
