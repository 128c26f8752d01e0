"""Tables in Markdown files between two marks, `<!-- name -->` and `<!-- end of name -->`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def median_and_range(values: Sequence[float]) -> str:
    """The median of figures, the least and the most."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def write_between(file: Path, name: str, text: str) -> str:
    """Replace what stands between a file's two marks of a name by a text, which is returned.

    If the file has a page details.md beside it which has the marks, the text goes there.

    Raises:
        ValueError: neither has both marks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    details = file.with_name("details.md")
    if details.is_file() and begin in details.read_text():
        file = details
    before, mark, rest = file.read_text().partition(begin)
    if not mark or end not in rest:
        raise ValueError(f"{file}: no marks {begin} and {end}")
    file.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")
    return text
