"""The node config as an owner types it: a text of pairs, read as Flower reads it, with errors in one line."""

from __future__ import annotations

import re
import tomllib
from typing import Any

PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # Flower takes no notice of what is not like this
RIGHT = "right would be 'partition-id=0 kind=\"jetson-nano\"'"


def read_node_config(text: str) -> dict[str, Any]:
    """'a=1 b="two words"' as a dict, the way Flower reads it; ValueError where it is not of that form."""
    import click
    from flwr.common.config import parse_config_args

    if not text.endswith(".toml"):
        _check_pairs(text)
    try:
        return dict(parse_config_args([text] if text.strip() else None))
    except click.ClickException as error:
        raise ValueError(f"node config {text!r}: {error.message}; {RIGHT}") from None


def _check_pairs(text: str) -> None:
    """ValueError, which names the first pair that Flower would not read, and says what is wrong with it."""
    if rest := PAIR.sub("", text).split():
        raise ValueError(
            f"node config {text!r}: {rest[0]!r} is no key=value; a text with spaces stands in double quotes; {RIGHT}"
        )
    keys: set[str] = set()
    for key, value in PAIR.findall(text):
        if key in keys:
            raise ValueError(f"node config {text!r}: the key {key!r} is there twice")
        keys.add(key)
        try:
            tomllib.loads(f"{key} = {value}")
        except tomllib.TOMLDecodeError:
            raise ValueError(
                f"node config: {f'{key}={value}'!r} is neither a number, nor true or false, nor a text in double "
                f"quotes; a text would be '{key}=\"{value.strip(chr(34))}\"'"
            ) from None
