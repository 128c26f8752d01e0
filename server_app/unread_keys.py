"""Keys that nothing reads in a run: those of other methods, and those that are read with other keys only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wildflower.plugins.reference import is_loaded, is_reference
from wildflower.strategies import METHODS
from wildflower.strategies.method import Method
from wildflower.strategies.named import method_of
from wildflower.strategies.params import kebab

# Keys of the run that are read only if other keys have certain values. Each has those values in words, and a function
# that says whether a flat configuration has them.
READ_WITH: dict[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "minimum-devices": ("fleet = ''", lambda values: not values["fleet"]),
    "alpha": (
        "partition = 'dirichlet' or 'strong-and-weak'",
        lambda values: values["partition"] in ("dirichlet", "strong-and-weak"),
    ),
    "max-examples": ("partition = 'own'", lambda values: values["partition"] == "own"),
    **dict.fromkeys(
        ("strong.devices", "strong.share", "strong.test"),
        ("partition = 'strong-and-weak'", lambda values: values["partition"] == "strong-and-weak"),
    ),
    "local-epochs": ("local-steps = 0", lambda values: not values["local-steps"]),
    "momentum": ("optimizer = 'sgd'", lambda values: values["optimizer"] == "sgd"),
    "adam.betas": ("optimizer = 'adam' or 'adamw'", lambda values: values["optimizer"] != "sgd"),
    "aggregation.trim": (
        "aggregation.rule = 'trimmed-mean'",
        lambda values: values["aggregation.rule"] == "trimmed-mean",
    ),
    **dict.fromkeys(
        ("dp.clip", "dp.delta", "dp.resume-copy"),
        (
            "dp.epsilon or dp.noise-multiplier above 0",
            lambda values: bool(values["dp.epsilon"] or values["dp.noise-multiplier"]),
        ),
    ),
    "schedule.decay-factor": ("schedule.decay-rounds", lambda values: bool(values["schedule.decay-rounds"])),
    "delivery.format": ("delivery.every above 0", lambda values: bool(values["delivery.every"])),
    **dict.fromkeys(
        ("personal.epochs", "personal.first-round"),
        ("personal.every above 0", lambda values: bool(values["personal.every"])),
    ),
}


def unread_keys(values: Mapping[str, Any], groups: Iterable[str]) -> list[str]:
    """Return the keys of a whole flat configuration that nothing reads in its run, whose own tables are `groups`.

    They are other methods', those of a shared part that is turned off, or those of `READ_WITH` with other values.
    """
    own, strategy = [key for key, (_, is_read) in READ_WITH.items() if not is_read(values)], values["strategy"]
    kind = METHODS.get(strategy) or loaded_method(strategy)
    if kind is None and is_reference(strategy):  # what it shares with others is not known here
        return own + [key for key in values if key.partition(".")[0] in METHODS]
    read = set(groups) | {kind.name() if kind and is_reference(strategy) else strategy}
    for group, params in (kind.shared_params if kind else {}).items():
        given = values.get(f"{group}.{kebab(params.switch)}", 0) if params.switch else 1
        if getattr(kind, f"{group}_{params.switch}", 0) if given < 0 else given:  # below 0 the method says it
            read.add(group)
    return own + [key for key in values if "." in key and key.partition(".")[0] not in read]


def loaded_method(strategy: str) -> type[Method] | None:
    """Return a method from outside if its module is imported: what a run's folder names is never run to read it."""
    if not (is_reference(strategy) and is_loaded(strategy)):
        return None
    try:
        return method_of(strategy)
    except ValueError:
        return None  # it is another version
