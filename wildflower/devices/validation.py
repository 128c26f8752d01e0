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


def check_whole(value: object, where: str, *, minimum: int = 0) -> int:
    """Return `value` if it is an int from `minimum` to 2^63 - 1 (a bool is none); ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_WHOLE:
        raise ValueError(f"{where} = {shown(value)}: must be a whole number of at least {minimum} and below 2^63")
    return value


def check_number(
    value: object, where: str, *, minimum: float = 0.0, positive: bool = False, maximum: float = sys.float_info.max
) -> float:
    """Return `value` as a float if it is a finite number from `minimum` to `maximum`, above 0 with `positive`."""
    bound = "above 0" if positive else f"of at least {minimum:g}"
    if maximum < sys.float_info.max:
        bound += f" and at most {maximum:g}"
    # Compared before it becomes a float: a whole number may be too large for one. NaN lies between no bounds.
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ValueError(f"{where} = {shown(value)}: must be a finite number {bound}")
    if positive and value <= 0:
        raise ValueError(f"{where} = {shown(value)}: must be a finite number {bound}")
    return float(value)
