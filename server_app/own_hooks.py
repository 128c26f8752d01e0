"""The hooks that a run names: `hooks = "my_hooks:EarlyStop(patience = 5), my_hooks:PerLayerNorms"`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from wildflower.plugins.reference import PluginError, class_of, one_sentence
from wildflower.rounds.hooks import RoundHook
from wildflower.server_app.inline_tables import parse_arguments

_HOOK = re.compile(r"\s*([^\s,()]+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")


def hook_references(text: str) -> list[str]:
    """Return the references in a run's `hooks`."""
    return [reference for reference, _ in _parsed(text)]


def check_hook_classes(text: str) -> None:
    """Raise ValueError unless `hooks` can be read, and names classes of hooks. Their modules are imported."""
    for reference, arguments in _parsed(text):
        class_of(reference, RoundHook, "a hook")
        parse_arguments(arguments, like="patience = 5")


def hooks_named(text: str) -> list[RoundHook]:
    """Return the hooks of a run's `hooks`, made with their arguments. Raises ValueError."""
    found = []
    for reference, arguments in _parsed(text):
        given = {
            name.replace("-", "_"): value for name, value in parse_arguments(arguments, like="patience = 5").items()
        }
        try:
            found.append(class_of(reference, RoundHook, "a hook")(**given))
        except PluginError:
            raise
        except Exception as error:  # whatever the class raises
            raise ValueError(f"hooks: {reference}({arguments}): {one_sentence(error)}") from error
    return found


def _parsed(text: str) -> Iterator[tuple[str, str]]:
    """Yield every reference and the text of its arguments."""
    place = 0
    while text[place:].strip():
        match = _HOOK.match(text, place)
        if match is None:
            raise ValueError(f'must be like "my_hooks:EarlyStop(patience = 5), other:PerLayerNorms", not {text!r}')
        yield match[1], match[2] or ""
        place = match.end()
