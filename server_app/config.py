"""The run configuration: one typed, validated model of every key.

The same flat kebab-case keys stand in `[tool.flwr.app.config]` of pyproject.toml, in an experiment file and in `--set`.
A method's own settings carry its name: `NAME.KEY`. Every setting stands once: as a field here or of a method's
`Params`, with its default, its bounds and what it is. All else that shows settings is made from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from wildflower.devices.node import MIN_MEMBERS
from wildflower.messages.encoding import Wire
from wildflower.models.initial import checked_names
from wildflower.plugins.beside import digests, keep
from wildflower.plugins.nearest import did_you_mean, near
from wildflower.plugins.reference import is_loaded, is_reference, module_label, top_module
from wildflower.server_app.checks import check
from wildflower.server_app.inline_tables import flat, parse_arguments, rates_of
from wildflower.server_app.listed_keys import listed_keys, missing_keys
from wildflower.server_app.own_hooks import check_hook_classes, hook_references
from wildflower.strategies import DEFAULT_METHOD, METHODS
from wildflower.strategies.method import Method
from wildflower.strategies.named import method_of, settings_of
from wildflower.strategies.params import (
    Count,
    CountOrZero,
    Decay,
    Numbers,
    Params,
    PositiveRate,
    Rate,
    kebab,
    to_scalar,
)
from wildflower.strategies.privacy import MAX_CLIP, MAX_NOISE_MULTIPLIER
from wildflower.tasks.arguments import TaskArguments, must, read_arguments
from wildflower.tasks.task import kind_of

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
    "name": "run-name",
    "output": "output-dir",
    "out": "output-dir",
}
# Keys of the run that are read only if other keys have certain values. Each has those values in words, and a function
# that says whether a flat configuration has them.
READ_WITH: dict[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "alpha": (
        "partition = 'dirichlet' or 'strong-and-weak'",
        lambda values: values["partition"] in ("dirichlet", "strong-and-weak"),
    ),
    "max-examples": ("partition = 'own'", lambda values: values["partition"] == "own"),
    **dict.fromkeys(
        ("strong-devices", "strong-share", "strong-test"),
        ("partition = 'strong-and-weak'", lambda values: values["partition"] == "strong-and-weak"),
    ),
    "report-max-age-seconds": ("fleet = ''", lambda values: not values["fleet"]),
    "local-epochs": ("local-steps = 0", lambda values: not values["local-steps"]),
    "momentum": ("optimizer = 'sgd'", lambda values: values["optimizer"] == "sgd"),
    "betas": ("optimizer = 'adam' or 'adamw'", lambda values: values["optimizer"] != "sgd"),
    "aggregation-trim": ("aggregation = 'trimmed-mean'", lambda values: values["aggregation"] == "trimmed-mean"),
    **dict.fromkeys(
        ("dp-clip", "dp-delta", "resume-copy"),
        (
            "dp-epsilon or dp-noise-multiplier above 0",
            lambda values: bool(values["dp-epsilon"] or values["dp-noise-multiplier"]),
        ),
    ),
    "secure-minimum": ("secure-aggregation = true", lambda values: bool(values["secure-aggregation"])),
    "decay-factor": ("decay-rounds", lambda values: bool(values["decay-rounds"])),
    **dict.fromkeys(
        ("personal-epochs", "personal-from"),
        ("personal-every above 0", lambda values: bool(values["personal-every"])),
    ),
}
# What would be right, by the beginning of pydantic's name of an error.
RIGHT = {
    "int_": "a whole number such as {default}",
    "float_": "a number such as {default}",
    "bool_": "true or false",
    "string_": "a text such as '{default}'",
}


def _arguments(value: object) -> object:
    """A family's arguments, such as "exits = [1, 2, 3], kernel = 5": the inside of an inline TOML table."""
    if isinstance(value, str):
        parse_arguments(value)
    return value


def _names_table(value: object) -> object:
    """What names in a file of weights are called in the family: the inside of an inline TOML table."""
    if isinstance(value, str):
        checked_names(parse_arguments(value, like="'bert' = '', 'fc' = false"))
    return value


def _rates(value: object) -> object:
    if isinstance(value, str):
        rates_of(value)
    return value


def _task_arguments(value: object) -> object:
    if isinstance(value, str):
        parse_arguments(value, like="tokenizer = 'my-model', max_tokens = 64")
    return value


Arguments = Annotated[str, BeforeValidator(_arguments)]
RatesTable = Annotated[str, BeforeValidator(_rates)]
NamesTable = Annotated[str, BeforeValidator(_names_table)]
TaskArgumentsText = Annotated[str, BeforeValidator(_task_arguments)]
Share = Annotated[float, Field(gt=0, lt=1)]

# Where a part of the settings begins, by its first field.
PARTS = {
    "task": "What is learned, and from what",
    "devices": "Who learns",
    "strategy": "How devices learn",
    "evaluate_every": "What is measured and kept",
}


def method_groups(strategy: str = "") -> dict[str, type[Params]]:
    """The settings of all methods and of the parts that they share: the first part of the keys -> their class.

    Args:
        strategy: of the run; where it is a reference, the settings of that method are among them.
    """
    if not is_reference(strategy):
        return settings_of(METHODS)
    kind = method_of(strategy)
    found = settings_of({**METHODS, kind.name(): kind})
    if both := sorted(found.keys() & set(map(kebab, RunConfig.model_fields))):
        raise ValueError(f"its keys would be called {both[0]}.*, and {both[0]} is a key of every run: rename its file")
    return found


class RunConfig(Params):
    """Every key of a run, with its default. Units are in the names; 0 or "" means unset where a key may be unset."""

    task: str = Field("digits", description="Data set, and what is learned from it (docs/tasks.md)")
    data_dir: str = Field("", description='Folder of the data; "" looks in the usual places')
    task_arguments: TaskArgumentsText = Field(
        "", description="Arguments of the task, such as \"tokenizer = 'my-model'\" for texts (docs/tasks.md)"
    )
    family: str = Field("", description='Global model, and how it is cut (docs/families.md); "" takes the task\'s own')
    family_arguments: Arguments = Field(
        "", description='Arguments of the family, such as "kernel = 5" for a cnn3 (docs/families.md)'
    )
    initial_weights: str = Field(
        "",
        description='First weights: a safetensors or .pth file, a folder of Hugging Face\'s or a name on its hub; "" '
        "draws them (docs/your-model.md)",
    )
    initial_names: NamesTable = Field(
        "",
        description="What names in that file are called in the family, such as \"'features' = 'stem', 'fc' = false\"",
    )
    partition: Literal["iid", "dirichlet", "natural", "strong-and-weak", "own"] = Field(
        "dirichlet",
        description="How examples are dealt out to devices: iid, dirichlet, natural, strong-and-weak, or own: every "
        "device has what lies in its own folder (docs/your-devices.md)",
    )
    alpha: PositiveRate = Field(0.5, description="Concentration of the Dirichlet partition: smaller is more unequal")
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of each device's examples that it keeps for its own test"
    )
    examples_per_device: CountOrZero = Field(
        0,
        description="Examples that every device draws under iid and dirichlet, shared ones allowed; 0 deals out all "
        "examples once",
    )
    max_examples: Annotated[int, Field(ge=1, lt=2**31)] = Field(
        1_000_000,
        description="Most examples that a device may say it has under partition = 'own', which bounds its weight",
    )
    strong_devices: CountOrZero = Field(
        0, description="Number of strong devices under strong-and-weak: those of the fleet's first group"
    )
    strong_share: Share = Field(0.5, description="Share of the training examples that strong devices hold together")
    strong_test: Literal["share", "whole"] = Field(
        "share", description="Test examples of a strong device: an equal share like all others, or the whole test set"
    )

    public_task: str = Field(
        "",
        description="Task whose training inputs, without labels, are the server's public data, for methods that learn "
        'from such; "": none',
    )
    public_data_dir: str = Field("", description='Folder of the public data; "" looks in the usual places')
    public_examples: CountOrZero = Field(0, description="Public examples, drawn at random; 0 takes all")

    devices: Count = Field(20, description="Number of devices in all")
    workers: Count = Field(
        2,
        description="Number of processes that train the simulated devices in turn, or of nodes with engine = nodes",
    )
    engine: Literal["local", "flower", "nodes"] = Field(
        "local",
        description="What simulated devices run on under `wildflower run`: processes of its own (local), Flower's "
        "simulation (flower), or with `--superlink` the nodes there, which are workers then (nodes)",
    )
    fleet: str = Field(
        "digits-demo", description='Bundled fleet or .toml file (docs/fleets.md); "" for real devices, one per node'
    )
    devices_per_round: Count = Field(10, description="Devices sampled per round")
    over_selection: Rate = Field(
        0.0, description="Share of devices sampled beyond that; the first devices-per-round that answer count"
    )
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.85, description="Share of the reported available memory that training may use: the cost may be 12 % off"
    )
    transfer_seconds: Rate = Field(
        0.0, description="Longest time that tensor sets may travel one way, which bounds the payload; 0 is no limit"
    )
    deadline_seconds: Rate = Field(
        0.0, description="Longest time of a round, simulated under a fleet, real on hardware; 0 waits for all"
    )
    round_seconds: Rate = Field(
        0.0,
        description="Longest time that a device's download, training and upload may take by what is known of it, which "
        "bounds its model; 0 is no limit",
    )
    report_max_age_seconds: Rate = Field(
        600.0, description="Age of a real node's last report from which on it is asked for a new one"
    )
    below_smallest: Literal["skip", "smallest"] = Field(
        "skip", description='What a device below the smallest architecture gets: nothing (skip), or the "smallest"'
    )
    both_models: bool = Field(
        False,
        description="Whether a device that can afford more than the smallest candidate trains the smallest as well",
    )

    strategy: str = Field(
        DEFAULT_METHOD, description=f"Method (docs/methods): {', '.join(METHODS)}, or package.module:Class of your own"
    )
    strategy_settings: Arguments = Field(
        "",
        description='Settings of a method of your own where no key holds them, such as "damping = 0.3" '
        "(docs/extending.md)",
    )
    hooks: str = Field(
        "",
        description='What is done beside every round, such as "my_hooks:EarlyStop(patience = 5), other:PerLayerNorms" '
        "(docs/extending.md)",
    )
    widths: Numbers = Field(
        (1.0, 0.5, 0.25, 0.125, 0.0625), description="Candidate widths; a device gets the widest that fits"
    )
    rounds: Count = Field(20, description="Rounds of the whole run")
    local_epochs: Count = Field(1, description="Passes of a device over its examples in a round")
    local_steps: CountOrZero = Field(0, description="Optimizer steps of a device in a round, in place of epochs")
    batch_size: Count = Field(16, description="Batch size of local training")
    micro_batch_size: CountOrZero = Field(
        0,
        description="Examples of a batch with which a device computes at once, adding up their gradients, so that it "
        "can train a larger model in its memory; 0: the whole batch (docs/plan.md)",
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="Optimizer of local training: sgd, adam, adamw"
    )
    learning_rate: PositiveRate = Field(0.05, description="Learning rate of local training")
    learning_rates: RatesTable = Field(
        "",
        description="Parts of the model with another learning rate, and how many times the usual one it is, such as "
        '"classifier = 10, embeddings = 0.1"',
    )
    freeze: str = Field(
        "",
        description='Parts of the model that are not trained, such as "embeddings, encoder.layer.0"; a device is sent '
        "them once (docs/your-model.md)",
    )
    momentum: Decay = Field(0.9, description="Momentum of sgd; the other optimizers have none")
    betas: Numbers = Field((0.9, 0.999), description="Betas of adam and adamw")
    weight_decay: Rate = Field(5e-4, description="Weight decay of local training")
    clip_norm: Rate = Field(0.0, description="Largest norm of a gradient; 0 does not clip")
    layout: Literal["contiguous", "channels-last"] = Field(
        "contiguous",
        description="How images lie in memory in training, on devices and in ensemble distillation on the server: "
        "contiguous, or channels-last, which is faster on some networks and gives other bits (benchmarks/overhead)",
    )
    fused_optimizer: bool = Field(
        False,
        description="Adam and adamw step in one kernel, which is faster and gives other bits (benchmarks/overhead)",
    )
    norm_bound: Rate = Field(
        0.0,
        description="Largest norm of a device's update, larger ones are scaled down; 0 does not bound "
        "(docs/security.md)",
    )
    aggregation: Literal["mean", "trimmed-mean", "median", "norm-bounded-mean"] = Field(
        "mean",
        description="What becomes of the values that devices return of one coordinate: mean, trimmed-mean, median, "
        "norm-bounded-mean (docs/security.md)",
    )
    aggregation_trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.2, description="Share of a coordinate's devices that trimmed-mean leaves out at each end"
    )
    dp_epsilon: Rate = Field(
        0.0,
        description="Epsilon of the whole run, which says how much noise the devices' mean change gets; 0: not "
        "differentially private, or as dp-noise-multiplier says (docs/privacy.md)",
    )
    dp_noise_multiplier: Annotated[float, Field(ge=0, le=MAX_NOISE_MULTIPLIER)] = Field(
        0.0,
        description="Standard deviation of the noise on the sum of the devices' changes, in multiples of dp-clip, in "
        "place of dp-epsilon; 0: none",
    )
    dp_clip: Annotated[float, Field(gt=0, le=MAX_CLIP)] = Field(
        1.0, description="Largest norm of a device's change under differential privacy; larger ones are scaled down"
    )
    dp_delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="Probability with which epsilon need not hold: well below 1 / devices"
    )
    secure_aggregation: bool = Field(
        False, description="Whether the server sees sums of devices' updates only, under masks (docs/privacy.md)"
    )
    secure_minimum: Annotated[int, Field(ge=MIN_MEMBERS, le=1000)] = Field(
        5, description="Smallest number of devices whose sum the server may see; smaller groups are left out"
    )
    wire: Wire = Field(
        "float32",
        description="As what tensor sets travel, both ways: float32, or rounded to float16 or int8, half the bytes or "
        "a quarter (docs/design.md#messages)",
    )
    schedule: Literal["steps", "cosine"] = Field(
        "steps",
        description="Schedule of the learning rate: steps (at decay-rounds), cosine (falls towards 0 over all rounds)",
    )
    decay_rounds: Numbers = Field(
        (), description="Rounds after each of which the learning rate is multiplied by decay-factor"
    )
    decay_factor: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="Factor of the learning rate at each of decay-rounds"
    )
    augment: bool = Field(True, description="Whether training images are cropped and flipped where the task has that")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        1, description="Seed of all that is drawn at random: partition, fleet, first weights, rounds"
    )

    evaluate_every: Count = Field(
        1, description="Rounds between evaluations of the global model; the last one is evaluated too"
    )
    evaluate_tiers: bool = Field(
        True, description="Whether the newest sub-model of every tier is scored too, not the global model alone"
    )
    statistics_devices: CountOrZero = Field(
        0,
        description="Devices that take batch norm statistics of a scored model that has none; 0: as many as "
        "devices-per-round, and 30 at least",
    )
    statistics_examples: CountOrZero = Field(
        64, description="Training examples that each of them passes at most, drawn anew each time; 0: all"
    )
    deliver: Literal["largest", "best"] = Field(
        "largest",
        description="Model by which a device counts in the delivered score: largest, which is the one that it would be "
        "assigned, or best, which is the best on held-out examples of all that fit it (docs/scores.md)",
    )
    personal_every: CountOrZero = Field(
        0, description="Rounds between evaluations of every device on its own test shard; 0: never"
    )
    personal_epochs: CountOrZero = Field(
        1, description="Epochs that a device trains the model before it is scored so; 0: it is scored as it is given"
    )
    personal_from: Count = Field(1, description="First round of personal evaluations")
    output_dir: str = Field(
        "runs",
        description="Folder of all runs, absolute or relative to where the SuperLink was started (wildflower run: "
        "where you are)",
    )
    run_name: str = Field("", description='Folder of this run; "" makes a name of strategy, task and time')
    resume: bool = Field(False, description="Whether the run of this name goes on from its newest good checkpoint")
    resume_from: CountOrZero = Field(
        0, description="Round whose checkpoint a resumed run goes on from; later rounds are dropped; 0: the newest good"
    )
    resume_copy: bool = Field(
        False,
        description="Under differential privacy, whether the folder of a resumed run was copied, moved to another disk "
        "or restored, is its newest copy, and no other goes on (docs/privacy.md)",
    )
    keep_checkpoints: Count = Field(3, description="Number of checkpoints that are kept, those of the last rounds")
    tracker: Literal["", "mlflow", "wandb"] = Field(
        "",
        description='Where figures of rounds go beside the journal, by the library of that name: mlflow, wandb, or "": '
        "nowhere (docs/trackers.md)",
    )
    state_dir: str = Field(
        "", description='Folder where simulated devices keep what stays on them; "" is a folder of the run'
    )

    groups: dict[str, Params] = Field(
        default_factory=lambda: {name: params() for name, params in method_groups().items()}, exclude=True
    )

    @property
    def method(self) -> type[Method]:
        """The server half of the run's method."""
        return method_of(self.strategy)

    @property
    def method_name(self) -> str:
        """What the method is called: its keys begin with it."""
        return self.method.name() if is_reference(self.strategy) else self.strategy

    @property
    def sampled_devices(self) -> int:
        """How many devices a round asks, with over-selection: 10 with 0.3 asks 13."""
        return self.devices_per_round + round(self.devices_per_round * self.over_selection)

    @property
    def params(self) -> Params:
        """The method's own settings."""
        return self.groups.get(self.method_name, self.method.params_type())

    @property
    def shared(self) -> dict[str, Params]:
        """The settings of the shared parts that the method reads."""
        return {name: self.groups[name] for name in self.method.shared_params}

    @property
    def label(self) -> str:
        """Strategy and task, for the name of a run."""
        return f"{self.method_name}-{module_label(self.task) if is_reference(self.task) else self.task}"

    def own_task_arguments(self) -> TaskArguments | None:
        """The arguments of the run's task; None where it has none. ValueError says what is wrong with them."""
        return read_arguments(self.task, kind_of(self.task).arguments, parse_arguments(self.task_arguments))

    def references(self) -> list[str]:
        """All that the run has from outside, by reference: method, task, families and hooks."""
        found = [self.strategy, self.task, self.public_task, *self.families(), *hook_references(self.hooks)]
        return [reference for reference in dict.fromkeys(found) if is_reference(reference)]

    def families(self) -> list[str]:
        """The run's family, and the members of a family `choice`."""
        return [self.family or kind_of(self.task).family, *_names(parse_arguments(self.family_arguments))]

    @property
    def is_private(self) -> bool:
        """Whether the run is differentially private."""
        return bool(self.dp_epsilon or self.dp_noise_multiplier)

    @field_validator("hooks")
    @classmethod
    def _hooks(cls, text: str) -> str:
        check_hook_classes(text)
        return text

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check(self)
        return self

    @classmethod
    def from_run_config(cls, values: Mapping[str, Any]) -> RunConfig:
        """Check a flat run configuration as Flower hands it over; ConfigError names the key that is wrong."""
        listed = listed_keys()
        if listed is not None and (missing := missing_keys(cls().to_dict(), listed)):
            raise ConfigError(missing)
        strategy = values.get("strategy", "")
        try:
            if isinstance(strategy, str) and "." in strategy:  # its keys would be unknown, which is not the trouble
                method_of(strategy)
            settings = all_settings(strategy)
        except ValueError as error:
            raise ConfigError(f"strategy = {strategy!r}: {error}") from error
        values = _with_strategy_settings(values)
        for key in values:
            if key not in settings:
                raise ConfigError(f"unknown key {key!r} = {values[key]!r}: {_meant(key, list(settings))}")
        groups: dict[str, Params | None] = {}
        problems: list[str] = []
        for name, params in method_groups(strategy).items():
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            groups[name], wrong = _validated(params, own, prefix)
            problems += wrong
        run = {key: value for key, value in values.items() if "." not in key}
        # A group that is wrong is None here: keys are still checked by themselves, but not how they go together.
        config, wrong = _validated(cls, {**run, "groups": groups}, "")
        if not isinstance(config, RunConfig):
            raise ConfigError("; ".join(wrong + problems))
        return config

    def ignored(self) -> dict[str, Any]:
        """Keys that have another value than their default, and that nothing reads in this run."""
        values, defaults = self.to_dict(), RunConfig().to_dict()
        return {key: values[key] for key in unread(values) if values[key] != defaults[key]}

    def ignored_text(self) -> str:
        """What `ignored` finds, in words; "" where it finds nothing."""
        of_methods, own = [], []
        for key, value in self.ignored().items():
            if key in READ_WITH:
                own.append(f"{key} = {value!r} (read with {READ_WITH[key][0]})")
            else:
                of_methods.append(f"{key} = {value!r}")
        texts = []
        if of_methods:
            names = ", ".join(of_methods)
            texts.append(f"Keys of other methods, which strategy = {self.strategy!r} does not read: {names}")
        if own:
            texts.append(f"Keys that this run does not read: {', '.join(own)}")
        return ". ".join(texts)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as flat kebab-case keys and TOML scalars."""
        values = self.model_dump(by_alias=True)
        for name, params in self.groups.items():
            values |= {f"{name}.{key}": value for key, value in params.model_dump(by_alias=True).items()}
        return {key: to_scalar(value) for key, value in values.items()}


def digests_of(config: RunConfig) -> dict[str, str]:
    """Hashes of the modules that a run has from outside, by their names; they are imported already."""
    return digests(_modules_of(config))


def keep_modules(config: RunConfig, folder: Path) -> None:
    """Copy the modules that a run has from outside into a folder, but for installed packages."""
    keep(_modules_of(config), folder)


def _modules_of(config: RunConfig) -> list[str]:
    return [top_module(reference) for reference in config.references()]


def all_settings(strategy: str = "") -> dict[str, FieldInfo]:
    """The field of every key: those of the run, then those of the methods, of a run's `strategy` from outside too."""
    found = {kebab(name): field for name, field in RunConfig.model_fields.items() if name != "groups"}
    for group, params in method_groups(strategy).items():
        found |= {f"{group}.{kebab(name)}": field for name, field in params.model_fields.items()}
    return found


def defaults(strategy: str = "") -> dict[str, Any]:
    """The default of every key, of a run's `strategy` from outside too, as flat kebab-case keys and TOML scalars."""
    fields = all_settings(strategy)
    return {key: to_scalar(field.get_default(call_default_factory=True)) for key, field in fields.items()}


def unread(values: Mapping[str, Any]) -> list[str]:
    """The keys of a flat configuration, of any version, that nothing reads in its run.

    They are other methods', those of a shared part that is turned off, or those of `READ_WITH` with other values.
    """
    known = {**_run_defaults(), **values}  # a configuration of an earlier version has fewer keys
    own = [key for key, (_, is_read) in READ_WITH.items() if key in values and not is_read(known)]
    return own + _unread_of_methods(values)


@cache
def _run_defaults() -> Mapping[str, Any]:
    return RunConfig().to_dict()


def _unread_of_methods(values: Mapping[str, Any]) -> list[str]:
    """The unread keys of methods and of the parts that they share, which have a dot in their name."""
    strategy = values["strategy"]
    kind = METHODS.get(strategy) or _loaded(strategy)
    if kind is None and is_reference(strategy):  # what it shares with others is not known here
        return [key for key in values if key.partition(".")[0] in METHODS]
    read = {kind.name() if kind and is_reference(strategy) else strategy}
    for group, params in (kind.shared_params if kind else {}).items():
        if not params.switch or values.get(f"{group}.{kebab(params.switch)}"):
            read.add(group)
    return [key for key in values if "." in key and key.partition(".")[0] not in read]


def descriptions(strategy: str = "") -> dict[str, str]:
    """What every key is, in a sentence each; those of a `strategy` from outside where it is imported already."""
    fields = all_settings(strategy if _loaded(strategy) else "")
    return {key: field.description or "" for key, field in fields.items()}


def _loaded(strategy: str) -> type[Method] | None:
    """A method from outside whose module is imported already: what a run's folder names is never run to read it."""
    if not (is_reference(strategy) and is_loaded(strategy)):
        return None
    try:
        return method_of(strategy)
    except ValueError:
        return None  # it is another version


def _with_strategy_settings(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with what `strategy-settings` holds as keys of its own; ConfigError where that cannot be."""
    strategy, text = values.get("strategy", ""), values.get("strategy-settings", "")
    if not text or not isinstance(text, str):
        return values
    given = f"strategy-settings = {text!r}"
    if not is_reference(strategy):
        named = strategy or RunConfig().strategy
        raise ConfigError(f"{given}: strategy = {named!r} is the project's own, and has keys such as {named}.NAME")
    try:
        content = parse_arguments(text, like="damping = 0.3, steps = 2")
    except ValueError as error:
        raise ConfigError(f"{given}: {error}") from None
    name = method_of(strategy).name()
    found = {key if "." in key else f"{name}.{key}": value for key, value in flat(content).items()}
    if twice := sorted(found.keys() & values.keys()):
        raise ConfigError(f"{given}: {', '.join(twice)} is given twice: there, and as a key")
    return {**values, **found, "strategy-settings": ""}


def _names(arguments: object) -> list[str]:
    """What a family's arguments name: members of a `choice` are {name = ..., ...}."""
    if not isinstance(arguments, dict):
        return []
    own = [arguments["name"]] if isinstance(arguments.get("name"), str) else []
    return own + [name for value in arguments.values() for name in _names(value)]


def _validated(kind: type[Params], values: Mapping[str, Any], prefix: str) -> tuple[Params | None, list[str]]:
    """A group of settings, or what is wrong with it."""
    names = {kebab(name): field for name, field in kind.model_fields.items()}
    given = {key: _whole_to_float(names[key], value) for key, value in values.items()}
    try:
        return kind.model_validate(given), []
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            if item["loc"] == ():
                lines.append(item["msg"].removeprefix("Value error, "))
            elif item["loc"][0] != "groups":  # what is wrong with those is known
                key = f"{prefix}{item['loc'][0]}"
                default = names[str(item["loc"][0])].get_default(call_default_factory=True)
                lines.append(f"{key} = {item['input']!r}: {_wrong(to_scalar(default), item)}")
        return None, lines


def _meant(key: str, keys: list[str]) -> str:
    """What may be meant by a key that there is not, and else where to look."""
    plain = key.lower().replace("_", "-")
    of_methods = [name for name in keys if name.endswith(f".{plain}")]
    other = OTHER_NAMES.get(plain) or (of_methods[0] if len(of_methods) == 1 else None)
    if other is not None:
        return f"did you mean {other!r}?"
    method, dot, rest = key.partition(".")
    if rest in keys:  # a key of the run, which no method has for itself
        return f"did you mean {rest!r}?"
    own = [name for name in keys if name.startswith(f"{method}.")]
    if dot and own:
        # All of a method's keys are alike by its name: only what follows tells them apart.
        close = near(rest, [name.partition(".")[2] for name in own], most=2)
        if close:
            return f"did you mean {' or '.join(repr(f'{method}.{name}') for name in close)}?"
        return f"{method} has {', '.join(own)}"
    return did_you_mean(key, keys) or f"'wildflower config' lists all {len(keys)}"


def _wrong(default: object, item: ErrorDetails) -> str:
    """What was wrong with one value, and what would be right."""
    for kind, right in RIGHT.items():
        if item["type"].startswith(kind):
            return f"must be {'a text in quotes' if default == '' else right.format(default=default)}"
    return must(item)


def _whole_to_float(field: FieldInfo, value: object) -> object:
    """`learning-rate = 1` is a whole number in TOML and means 1.0."""
    kind = field.annotation
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return float(value) if kind is float and type(value) is int else value
