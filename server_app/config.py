"""The run configuration: one typed, validated model of every key.

The same kebab-case keys stand in `[tool.flwr.app.config]` of pyproject.toml, in an experiment file and in `--set`. Keys
that belong together are a table, such as `dp.epsilon`, and so are a method's own. Every setting stands once: as a
field here, of a group (`key_groups.py`) or of a method's `Params`, with its default, its bounds and what it is. All
else that shows settings is made from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from wildflower.messages.encoding import Wire
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference, module_label, top_module
from wildflower.server_app.checks import check
from wildflower.server_app.inline_tables import flat, parse_arguments, rates_of, tables_flat
from wildflower.server_app.key_groups import (
    Adam,
    AggregationRule,
    BudgetLimits,
    Checkpoints,
    Compute,
    DeliveryRounds,
    DifferentialPrivacy,
    Initial,
    Personal,
    Public,
    Schedule,
    SecureAggregation,
    Statistics,
    Strong,
)
from wildflower.server_app.listed_keys import listed_keys, missing_keys
from wildflower.server_app.near_keys import meant
from wildflower.server_app.own_hooks import check_hook_classes, hook_references
from wildflower.server_app.unread_keys import READ_WITH, loaded_method, unread_keys
from wildflower.server_app.validated import validated
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
    readable,
    to_scalar,
)
from wildflower.tasks.arguments import TaskArguments, read_arguments
from wildflower.tasks.task import kind_of


class ConfigError(ValueError):
    """A run configuration that cannot be run; the text names the key, the value and what would be right."""


Arguments = Annotated[str, readable(parse_arguments)]
RatesTable = Annotated[str, readable(rates_of)]
TaskArgumentsText = Annotated[str, readable(partial(parse_arguments, like="tokenizer = 'my-model', max_tokens = 64"))]
Hooks = Annotated[str, readable(check_hook_classes)]

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


def run_groups() -> dict[str, type[Params]]:
    """Return the groups of keys that every run has: the first part of the keys -> their class."""
    kinds = {kebab(name): field.annotation for name, field in RunConfig.model_fields.items()}
    return {key: kind for key, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Params)}


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
    initial: Initial = Field(default_factory=Initial)
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
    strong: Strong = Field(default_factory=Strong)

    public: Public = Field(default_factory=Public)

    devices: Count = Field(20, description="Number of devices in all")
    workers: Count = Field(
        2,
        description="Number of processes that train the simulated devices in turn, or of nodes with engine = nodes",
    )
    engine: Literal["local", "nodes"] = Field(
        "local",
        description="What simulated devices run on under `wildflower run`: processes of its own (local), or with "
        "`--superlink` the nodes there, which are workers then (nodes)",
    )
    fleet: str = Field(
        "digits-demo", description='Bundled fleet or .toml file (docs/fleets.md); "" for real devices, one per node'
    )
    devices_per_round: Count = Field(10, description="Devices sampled per round")
    minimum_devices: Count = Field(
        1,
        description="Fewest connected real devices with which a round begins: up to ten minutes are waited for them, "
        "in the first round for devices-per-round",
    )
    buffer: CountOrZero = Field(
        0,
        description="Updates that make a new model, while slower devices go on with what they were sent: asynchronous "
        "rounds, with devices-per-round at work at any time; 0 waits for a round's devices (docs/asynchronous.md)",
    )
    budget: BudgetLimits = Field(default_factory=BudgetLimits)
    deadline_seconds: Rate = Field(
        0.0, description="Longest time of a round, simulated under a fleet, real on hardware; 0 waits for all"
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
    hooks: Hooks = Field(
        "",
        description='What is done beside every round, such as "my_hooks:EarlyStop(patience = 5), other:PerLayerNorms" '
        "(docs/hooks.md)",
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
    adam: Adam = Field(default_factory=Adam)
    weight_decay: Rate = Field(5e-4, description="Weight decay of local training")
    clip_norm: Rate = Field(0.0, description="Largest norm of a gradient; 0 does not clip")
    compute: Compute = Field(default_factory=Compute)
    aggregation: AggregationRule = Field(default_factory=AggregationRule)
    dp: DifferentialPrivacy = Field(default_factory=DifferentialPrivacy)
    secure_aggregation: SecureAggregation = Field(default_factory=SecureAggregation)
    wire: Wire = Field(
        "float32",
        description="As what tensor sets travel, both ways: float32, or rounded to float16 or int8, half the bytes or "
        "a quarter (docs/design.md#messages); qsgd: int8 whose changes are QSGD's 64 levels",
    )
    schedule: Schedule = Field(default_factory=Schedule)
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
    statistics: Statistics = Field(default_factory=Statistics)
    deliver: Literal["largest", "best"] = Field(
        "best",
        description="Model by which a device counts in the delivered score: the best on held-out examples of all that "
        "fit it (best), or the one that it would be assigned (largest; docs/scores.md)",
    )
    delivery: DeliveryRounds = Field(default_factory=DeliveryRounds)
    personal: Personal = Field(default_factory=Personal)
    output_dir: str = Field(
        "runs",
        description="Folder of all runs, absolute or relative to where the SuperLink was started (wildflower run: "
        "where you are)",
    )
    run_name: str = Field("", description='Folder of this run; "" makes a name of strategy, task and time')
    resume: bool = Field(False, description="Whether the run of this name goes on from its newest good checkpoint")
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)
    tracker: Literal["", "mlflow", "wandb"] = Field(
        "",
        description='Where figures of rounds go beside the journal, by the library of that name: mlflow, wandb, or "": '
        "nowhere (docs/trackers.md)",
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
        """Return what the method is called: its keys begin with it."""
        return self.method.name() if is_reference(self.strategy) else self.strategy

    @property
    def sampled_devices(self) -> int:
        """Return how many devices a round asks, with over-selection: 10 with 0.3 asks 13."""
        return self.devices_per_round + round(self.devices_per_round * self.aggregation.over_selection)

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
        found = [self.strategy, self.task, self.public.task, *self.families(), *hook_references(self.hooks)]
        return [reference for reference in dict.fromkeys(found) if is_reference(reference)]

    def modules(self) -> list[str]:
        """Return the modules that the run has from outside; they are imported already."""
        return [top_module(reference) for reference in self.references()]

    def families(self) -> list[str]:
        """The run's family, and the members of a family `choice`."""
        return [self.family or kind_of(self.task).family, *_names(parse_arguments(self.family_arguments))]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check(self)
        return self

    @classmethod
    def from_run_config(cls, values: Mapping[str, Any]) -> RunConfig:
        """Check a run configuration, flat as Flower hands it over or with tables; ConfigError names a wrong key."""
        listed = listed_keys()
        if listed is not None and (missing := missing_keys(cls().to_dict(), listed)):
            raise ConfigError(missing)
        strategy = values.get("strategy", "")
        with raised_as(ConfigError, f"strategy = {strategy!r}: "):
            if isinstance(strategy, str) and "." in strategy:  # its keys would be unknown, which is not the trouble
                method_of(strategy)
            settings = all_settings(strategy)
        values = _with_strategy_settings(tables_flat(values, settings))
        for key in values:
            if key not in settings:
                raise ConfigError(f"unknown key {key!r} = {values[key]!r}: {meant(key, list(settings))}")
        own_groups = run_groups()
        groups: dict[str, Params | None] = {}
        problems: list[str] = []
        for name, params in {**own_groups, **method_groups(strategy)}.items():
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            groups[name], wrong = validated(params, own, prefix)
            problems += wrong
        run = {key: value for key, value in values.items() if "." not in key}
        run |= {name: groups.pop(name) for name in own_groups}
        # A group that is wrong is None here: keys are still checked by themselves, but not how they go together.
        config, wrong = validated(cls, {**run, "groups": groups}, "")
        if not isinstance(config, RunConfig):
            raise ConfigError("; ".join(wrong + problems))
        return config

    def ignored(self) -> dict[str, Any]:
        """Keys that have another value than their default, and that nothing reads in this run."""
        values, defaults = self.to_dict(), RunConfig().to_dict()
        return {key: values[key] for key in unread(values) if values[key] != defaults[key]}

    def ignored_text(self) -> str:
        """Return what `ignored` finds, in words; "" where it finds nothing."""
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
        values = flat(self.model_dump(by_alias=True))
        for name, params in self.groups.items():
            values |= {f"{name}.{key}": value for key, value in params.model_dump(by_alias=True).items()}
        return {key: to_scalar(value) for key, value in values.items()}


def all_settings(strategy: str = "") -> dict[str, FieldInfo]:
    """The field of every key: those of the run, then those of the methods, of a run's `strategy` from outside too."""
    found: dict[str, FieldInfo] = {}
    own = run_groups()
    for name, field in RunConfig.model_fields.items():
        if name != "groups":
            key = kebab(name)
            found |= _settings_in(key, own[key]) if key in own else {key: field}
    for group, params in method_groups(strategy).items():
        found |= _settings_in(group, params)
    return found


def _settings_in(group: str, params: type[Params]) -> dict[str, FieldInfo]:
    return {f"{group}.{kebab(name)}": field for name, field in params.model_fields.items()}


def defaults(strategy: str = "") -> dict[str, Any]:
    """The default of every key, of a run's `strategy` from outside too, as flat kebab-case keys and TOML scalars."""
    fields = all_settings(strategy)
    return {key: to_scalar(field.get_default(call_default_factory=True)) for key, field in fields.items()}


def unread(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a flat configuration, whole or not, that nothing reads in its run.

    They are other methods', those of a shared part that is turned off, or those of `READ_WITH` with other values.
    """
    found = unread_keys({**_run_defaults(), **values}, run_groups())
    return [key for key in found if key in values]


@cache
def _run_defaults() -> Mapping[str, Any]:
    return RunConfig().to_dict()


def descriptions(strategy: str = "") -> dict[str, str]:
    """Return what every key is, in a sentence each; those of a `strategy` from outside where it is imported already."""
    fields = all_settings(strategy if loaded_method(strategy) else "")
    return {key: field.description or "" for key, field in fields.items()}


def _with_strategy_settings(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with what `strategy-settings` holds as keys of its own; ConfigError where that cannot be."""
    strategy, text = values.get("strategy", ""), values.get("strategy-settings", "")
    if not text or not isinstance(text, str):
        return values
    given = f"strategy-settings = {text!r}"
    if not is_reference(strategy):
        named = strategy or RunConfig().strategy
        raise ConfigError(f"{given}: strategy = {named!r} is the project's own, and has keys such as {named}.NAME")
    with raised_as(ConfigError, f"{given}: "):
        content = parse_arguments(text, like="damping = 0.3, steps = 2")
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
