"""benchmarks/tables.py."""

from pathlib import Path

import pytest

from benchmarks.tables import markdown, write_between


def test_a_table_has_a_line_below_its_heads() -> None:
    assert markdown(["method", "MB"], [["fedavg", "1.5"]]) == "| method | MB |\n|---|---|\n| fedavg | 1.5 |"


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("a\n<!-- x -->\nold\n<!-- end of x -->\nb\n<!-- y -->\nkept\n<!-- end of y -->\n")
    assert write_between(file, "x", "new") == "new"
    assert file.read_text() == "a\n<!-- x -->\n\nnew\n\n<!-- end of x -->\nb\n<!-- y -->\nkept\n<!-- end of y -->\n"


@pytest.mark.parametrize("text", ["nothing", "<!-- x -->", "<!-- end of x -->\n<!-- x -->"])
def test_a_file_without_both_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "README.md"
    file.write_text(text)
    with pytest.raises(ValueError, match="no marks <!-- x --> and <!-- end of x -->"):
        write_between(file, "x", "new")
    assert file.read_text() == text
