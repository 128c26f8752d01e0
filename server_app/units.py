"""Numbers as people read them: shares, bytes, durations, scores."""

import math
from collections.abc import Callable, Sequence

from wildflower.tasks.metrics import Scale

Format = Callable[[float], str]


def percent(value: float) -> str:
    """0.8312 as 83.12 %, 0.8 as 80 %."""
    return f"{round(100 * value, 2):g} %"


def score_format(scale: Scale) -> Format:
    """Return how values of a scale are shown: shares in percent."""
    return percent if scale.is_share else plain


def tenths(value: float) -> str:
    """Return 0.8312 as 83.1 %."""
    return f"{round(100 * value, 1):,.10g} %"


def one_digit(scale: Scale) -> Format:
    """Return how values of a scale are shown side by side: shares in percent with one digit."""
    return tenths if scale.is_share else plain


def plain(value: float) -> str:
    """A number with four digits, thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def bytes_text(value: float) -> str:
    """Bytes with decimal prefixes, as networks count: 1.5 MB is 1,500,000 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"


def counted(number: int, noun: str) -> str:
    """1 round, 2 rounds."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def range_text(low: float, high: float) -> str:
    """Two numbers with two digits, or one where they are shown alike: 2.5, 2.5 to 3."""
    shortest, longest = f"{low:.2g}", f"{high:.2g}"
    return shortest if shortest == longest else f"{shortest} to {longest}"


def seconds_text(seconds: float) -> str:
    """A duration in the two largest units that matter: 3 h 12 min, 4 min 5 s, 2.51 s; "never" where it has no end."""
    if math.isinf(seconds):
        return "never"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return _two(whole, 60, "min", "s")
    if whole < 86400:
        return _two(whole // 60, 60, "h", "min")
    return _two(whole // 3600, 24, "d", "h")


def _two(value: int, base: int, large: str, small: str) -> str:
    rest = f" {value % base} {small}" if value % base else ""
    return f"{value // base} {large}{rest}"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit to draw durations up to `seconds` in: its length in seconds, and its name."""
    for length, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * length:
            return length, name
    return 1.0, "seconds"


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [headers, ("---",) * len(headers), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
