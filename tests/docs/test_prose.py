"""No page has a sentence above 35 words or a table's cell above 40, outside quotations and code."""

import pytest

from tests.docs.prose import ROOT, pages, too_long


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_and_cells_are_short(page):
    assert too_long(page.read_text(encoding="utf-8")) == []


def test_what_is_too_long_is_found():
    long = "word " * 36
    assert [found.kind for found in too_long(f"Short. {long}end. Short.\n")] == ["sentence"]
    assert [found.words for found in too_long(f"| a | {long * 2}|\n|---|---|\n")] == [72]
    assert too_long(f'He said "{long}" and left.\n') == []
    assert too_long(f"Run `{long}` here.\n\n```text\n{long}\n```\n") == []
    assert too_long("- one two. " + "Three four. " * 30 + "\n") == []


def test_the_design_is_read_in_ten_minutes():
    assert len((ROOT / "docs/design.md").read_bytes()) <= 15_000
