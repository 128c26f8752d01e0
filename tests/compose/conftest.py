"""Rows of the table of faults (benchmarks/trust), which the tests of this folder write down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from wildflower.server_app.run_records import RoundRecord

Note = Callable[..., None]


@pytest.fixture
def note(record_property: Callable[[str, Any], None]) -> Note:
    """Writes a row of the table down, after it has held that nothing finished was lost."""

    def note(
        fault: str, seen: str, seconds: float, before: Sequence[RoundRecord] = (), after: Sequence[RoundRecord] = ()
    ) -> None:
        """`before` and `after` are the finished rounds when the fault came, and when the run had gone on."""
        again = sum(one not in after for one in before)
        lost = sum(not any(same_figures(one, other) for other in after) for one in before)
        assert lost == 0, f"{fault}: {lost} finished rounds are lost"
        row = {"fault": fault, "seen": seen, "rounds_lost": lost, "rounds_again": again, "seconds": round(seconds, 1)}
        record_property("fault", row)

    return note


def same_figures(one: RoundRecord, other: RoundRecord) -> bool:
    """Whether two records say the same but for what clocks measured, and the memory of a process."""
    measured = {"wall_seconds": 0.0, "server_seconds": {}, "server_peak_rss_bytes": 0}
    return one.model_copy(update=measured) == other.model_copy(update=measured)
