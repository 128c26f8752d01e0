"""The number of trials that a run's settings were chosen from, as `wildflower tune` leaves it beside its runs."""

from __future__ import annotations

import json
from pathlib import Path

SEARCH = "search.json"


def trials_of(run_dir: Path) -> str:
    """Return of how many trials a run is one, in words; "" where it is of no search, or its file cannot be read."""
    for folder in run_dir.resolve().parents[:2]:  # a run of the search, or of a sweep beside its runs
        try:
            found = json.loads((folder / SEARCH).read_bytes())
            return f"{int(found['trials'])} trials ({int(found['pruned'])} ended early) over {', '.join(found['keys'])}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""
