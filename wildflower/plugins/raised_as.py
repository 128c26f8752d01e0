"""Errors of a part in the words of who calls it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raised_as(
    kind: type[Exception], begin: str, caught: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Turn an error of a `with` block into one of this kind, with words in front of its text."""
    try:
        yield
    except caught as error:
        raise kind(f"{begin}{error}") from None
