"""Values that change second by second and start over at their end: link capacity, free memory."""

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wildflower.plugins.nearest import nearest
from wildflower.plugins.raised_as import raised_as

# Unit of the second column -> factor to Mbit/s or to bytes.
LINK_COLUMNS = {"kbit_per_s": 1e-3, "mbit_per_s": 1.0, "gbit_per_s": 1e3}
MEMORY_COLUMNS = {"bytes": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True, eq=False)
class Trace:
    """One value per second, constant within the second; after the last one it starts over.

    Attributes:
        values: Shape (seconds,), float64.
        cumulative: Shape (seconds + 1,): the integral of the values from 0 to every whole second.
        offset_seconds: Where in the values simulated second 0 lies.
    """

    values: NDArray[np.float64]
    cumulative: NDArray[np.float64]
    offset_seconds: int = 0

    @classmethod
    def of(cls, values: "list[float] | NDArray[np.float64]") -> "Trace":
        """Return a trace of these values, one per second; a single value is a constant."""
        array = np.asarray(values, dtype=np.float64)
        return cls(array, np.concatenate([np.zeros(1), np.cumsum(array)]))

    def starting_at(self, offset_seconds: int) -> "Trace":
        """Return the same trace (its arrays are shared) with simulated second 0 at `offset_seconds`."""
        return replace(self, offset_seconds=offset_seconds)

    def stretched(self, low: float, high: float) -> "Trace":
        """Return the course with its lowest value at `low` and its highest at `high`; ValueError if all are equal."""
        least, most = float(self.values.min()), float(self.values.max())
        if least == most:
            raise ValueError(f"all its values are {least:g}, so that it cannot be stretched to a range")
        return Trace.of(low + (self.values - least) * ((high - low) / (most - least)))

    def at(self, seconds: float) -> float:
        """Return the value at a simulated second."""
        return float(self.values[math.floor(seconds + self.offset_seconds) % len(self.values)])


def read_trace(path: Path, columns: dict[str, float]) -> Trace:
    """Read a CSV file of two columns: `seconds` (0, 1, 2, ...) and a value whose column name is its unit.

    Args:
        path: The file.
        columns: Valid names of the second column and the factor that goes with each: LINK_COLUMNS or MEMORY_COLUMNS.

    Raises:
        ValueError: names the file, the line and what would be right: file missing or empty, wrong header, seconds that
            do not count up by one, values that are not finite or negative.
    """
    wrong = raised_as(ValueError, f"{path}: cannot read this trace: ", (OSError, UnicodeDecodeError))
    with wrong, path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file))
    header = [cell.strip() for cell in rows[0]] if rows else []
    if len(header) != 2 or header[0] != "seconds" or header[1] not in columns:
        hint = nearest(header[-1] if header else "", columns)
        raise ValueError(f"{path}, line 1: {','.join(header)!r}: must be 'seconds,<unit>'; unit: {hint}")
    if len(rows) == 1:
        raise ValueError(f"{path}: the trace is empty; it needs at least one line '0,<value>'")
    values = []
    for second, row in enumerate(rows[1:]):
        where = f"{path}, line {second + 2}"
        if len(row) != 2:
            raise ValueError(f"{where}: {','.join(row)!r}: must be two values, 'seconds,{header[1]}'")
        if row[0].strip() != str(second):
            raise ValueError(f"{where}: second {row[0]!r}: must be {second}; a trace has one line per second, no gaps")
        try:
            value = float(row[1])
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{where}: {header[1]} = {row[1]!r}: must be a finite number of at least 0")
        values.append(value * columns[header[1]])
    return Trace.of(values)
