"""Checks of values that come from a message, a file or a user, with errors that say what would be right."""

import reprlib
import sys

MAX_WHOLE = 2**63 - 1  # what PyTorch, NumPy and struct hold in a whole number
MAX_LETTERS = 1000  # of a text from outside in a log or a record
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


def one_line(text: str, maximum: int = MAX_LETTERS) -> str:
    """Return a text from outside, fit for a terminal and a log: cut, and without control characters and line breaks."""
    cut = text if len(text) <= maximum else text[: maximum - 3] + "..."
    return "".join(letter if letter.isprintable() else " " for letter in cut)


def shown(value: object) -> str:
    """Return a value from outside as an error message shows it: its repr, cut."""
    return one_line(_SHORT.repr(value), 200)


def check_number(value: object, where: str, *, maximum: float = sys.float_info.max) -> float:
    """Return `value` as a float if it is a finite number from 0 to `maximum`; ValueError otherwise."""
    # Compared before it becomes a float: a whole number may be too large for one. NaN lies between no bounds.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
        most = f" and at most {maximum:g}" if maximum < sys.float_info.max else ""
        raise ValueError(f"{where} = {shown(value)}: must be a finite number of at least 0{most}")
    return float(value)
