"""A public docstring begins with a verb, or with a noun if it is of a class or a module."""

import pytest

from tests.docs.docstrings import ROOT, broken, modules


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_begins_with_no_question(path):
    assert broken(path.read_text(encoding="utf-8")) == []


def test_what_begins_with_one_is_found():
    source = '''"""What is asked."""


class Order:
    """What one device is asked."""

    def price(self):
        """Whether it is high."""

    def _inner(self):
        """How it is."""


def total():
    """Return what all cost."""
'''
    assert broken(source) == ["the module", "Order", "Order.price"]
