"""The family of a run's models, checked against the task that they are to learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from wildflower.models.cost import cost
from wildflower.models.family import Family, family_class, make_family
from wildflower.models.frozen import check_freeze
from wildflower.models.initial import folder_of_sizes
from wildflower.models.of_transformers import NAME
from wildflower.plugins.extras import MissingExtraError
from wildflower.plugins.flower_log import log
from wildflower.plugins.nearest import did_you_mean
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference, one_sentence
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.inline_tables import parse_arguments
from wildflower.server_app.trial import Batches, try_networks
from wildflower.server_app.vocabulary import check_answers, check_last_token, check_vocabulary
from wildflower.tasks.task import Task

OF_THE_SERVER = ("function", "graph")  # of a user's module, which a configuration names elsewhere


def family_of(
    config: RunConfig, task: Task, options: Mapping[str, Any], defaults: dict[str, Any], examples: Sequence[int]
) -> Family:
    """The family of a run; ConfigError where it cannot take the task's inputs.

    `options` are the method's and cannot be changed; `defaults` are the method's where the user says nothing else, as
    far as the family has such arguments. `examples`: of each device, for training.
    """
    name = config.family or task.family
    of_task = {"input_shape": list(task.input_shape), "classes": task.classes}
    fixed = {**of_task, **options}
    arguments = parse_arguments(config.family_arguments)
    if set(arguments) & set(fixed):
        raise ConfigError(
            f"family-arguments = {config.family_arguments!r}: {', '.join(sorted(set(arguments) & set(fixed)))} follow "
            "from task and strategy: leave them out"
        )
    try:
        known = [field.name for field in fields(family_class(name, arguments))]
        if unknown := next((key for key in arguments if key not in known), None):
            free = [key for key in known if key not in ("freeze", *OF_THE_SERVER, *fixed)]
            free += ["levels"] if is_reference(name) and "levels" not in free else []
            hint = did_you_mean(unknown, free)
            raise ConfigError(
                f"family-arguments = {config.family_arguments!r}: family {name!r} has no argument {unknown!r}; "
                f"{f'{hint} It' if hint else 'it'} has {', '.join(free) or 'none'}"
            )
        # The folder or hub name that weights come from says what model they are of, where a family can read that.
        if "model" in known and (folder := folder_of_sizes(config.initial.weights)) is not None:
            defaults = {"model": str(folder), **defaults}
        # A family without batch norm or scaler, such as one of any modules, has nothing to say to a method's wishes.
        wishes = {**_of_task(config, task, {**defaults, **arguments}), **defaults, **arguments, **options}
        wanted = {key: value for key, value in wishes.items() if key in known}
        if isinstance(members := wanted.get("members"), Mapping):
            wanted["members"] = {member: _member(config, task, given) for member, given in members.items()}
        frozen = [part.strip() for part in config.freeze.split(",") if part.strip()]
        family = make_family({"name": name, **wanted, **of_task, **({"freeze": frozen} if frozen else {})})
        for one in family.alternatives.values():
            check_vocabulary(task, one)
        with raised_as(ConfigError, f"freeze = {config.freeze!r}: "):
            check_freeze(family)
        for one in family.alternatives.values():
            check_last_token(task, one)
        # Before they are priced: what a module keeps for later, as by `lru_cache`, then has values.
        batches = Batches(config.batch_size, config.micro_batch_size, examples)
        for finding in try_networks(family, task, batches):
            log.warning("%s", finding)
        if batches.left_over:
            left = "%s of %s devices leave one example out in every pass: it would be a batch by itself"
            log.info(left, batches.left_over, len(examples))
        cost(family, family.full(), batch_size=config.batch_size, optimizer=config.optimizer)
        for one in family.alternatives.values():
            check_answers(task, one, config.batch_size)
    except (ConfigError, MissingExtraError):
        raise
    except Exception as error:
        if not isinstance(error, ValueError) and not is_reference(name):
            raise
        why = str(error) if isinstance(error, ValueError) else one_sentence(error)
        given = f" with family-arguments = {config.family_arguments!r}" if config.family_arguments else ""
        if is_reference(name):  # it may not go with any inputs
            raise ConfigError(f"family = {name!r}{given}: {why.removeprefix(f'{name}: ')}") from None
        shape = "x".join(map(str, task.input_shape))
        raise ConfigError(
            f"family = {name!r}{given} does not go with the {shape} inputs of {config.task!r}: {why}"
        ) from None
    return family


def _of_task(config: RunConfig, task: Task, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the task says of a family, as far as the family has such arguments."""
    of_texts = _text_sizes(task, arguments)
    if "labels" in arguments and arguments["labels"] != of_texts.get("labels", arguments["labels"]):
        raise ConfigError(
            f"family-arguments = {config.family_arguments!r}: labels = {arguments['labels']!r}, and those of "
            f"{config.task!r} are of {of_texts['labels']!r}: leave labels out"
        )
    return {**of_texts, "tokens": task.normalization is None}


def _member(config: RunConfig, task: Task, arguments: Any) -> Any:
    """Return the arguments of a member of a choice, with what the task says of it."""
    if not isinstance(arguments, Mapping):
        return arguments  # which `make_family` refuses
    known = {field.name for field in fields(family_class(arguments.get("name"), arguments))}
    return {key: value for key, value in _of_task(config, task, arguments).items() if key in known} | dict(arguments)


def _text_sizes(task: Task, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a task of texts says of a family that has such fields: its tokens, and whether each of them has a label.

    Whether texts come in pairs too: `separator` then is the token behind both.
    """
    if task.vocabulary is None:
        return {}
    labels = {
        "labels": "tokens" if task.label_kind == "classes of tokens" else "sequence",
        "separator": task.vocabulary.separator,  # which no model's folder says
    }
    # A model that exists has a vocabulary of its own, which is then compared with the task's.
    model = arguments.get("model")
    own = model is not None and (not isinstance(model, Mapping) or NAME in model)
    return labels if own else labels | {"vocabulary": task.vocabulary.tokens, "pad_id": task.vocabulary.pad_id}
