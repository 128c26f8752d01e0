"""Errors of a part in the words of who calls it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raised_as(
    kind: type[Exception], begin: str, caught: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Raise what a `with` block raises as an error of this kind, whose text begins with where that was."""
    try:
        yield
    except caught as error:
        raise kind(f"{begin}{error}") from None
