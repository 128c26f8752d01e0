"""The instance of a node: drawn at random when it starts, and handed to its children in their environment.

Two boards with a copied key are two instances. Nothing is written down, because that would be copied with the card.
Nothing else stands here: a node's first process imports it, and has to stay small.
"""

from __future__ import annotations

import os
import secrets
import time

VARIABLE = "WILDFLOWER_NODE_INSTANCE"


def draw_instance() -> None:
    """Make this process, and all that it starts, a node's new instance."""
    os.environ[VARIABLE] = f"{secrets.token_hex(8)}@{time.monotonic()}"  # of the machine, the same in all processes


def instance() -> tuple[str | None, float | None]:
    """This node's instance, and how many seconds ago it was drawn; None and None outside of a node."""
    name, _, started = os.environ.get(VARIABLE, "").partition("@")
    if not name or not started:
        return None, None
    return name, max(0.0, time.monotonic() - float(started))
