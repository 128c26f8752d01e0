"""The folder of a node, which keeps what must stay on it."""

from collections.abc import Mapping
from pathlib import Path


def node_state_dir(config: Mapping[str, object]) -> Path:
    """Return the folder that `state-dir` in the node config names, or the user's own."""
    own = config.get("state-dir")
    return Path(str(own)).expanduser() if own else Path.home() / ".local" / "state" / "wildflower"
