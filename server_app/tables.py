"""Tables of texts, as they are printed, shown and exported; and records of runs as tables of pandas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wildflower.plugins.extras import needed
from wildflower.server_app.run_records import flat
from wildflower.server_app.units import markdown_table

if TYPE_CHECKING:
    import pandas as pd
    from pydantic import BaseModel


@dataclass(frozen=True)
class TextTable:
    """A table of texts.

    Attributes:
        text_columns: the first ones, which are set to the left; the others, as numbers, to the right.
        muted: the rows that do not count.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    muted: Sequence[int] = field(default_factory=list)

    def __str__(self) -> str:
        """Return lines whose columns are aligned by spaces."""
        lines = [self.headers, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.headers))]

        def row(line: Sequence[str]) -> str:
            cells = (
                cell.ljust(width) if column < self.text_columns else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            return "  ".join(cells).rstrip()

        return "\n".join([self.title, *map(row, lines)])

    def frame(self) -> pd.DataFrame:
        """Return the table as one of pandas."""
        with needed("pandas", "a table"):
            import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(self.headers), dtype=object)

    def csv(self) -> str:
        """Return the table as CSV."""
        return self.frame().to_csv(index=False, lineterminator="\n")

    def latex(self) -> str:
        """Return the table for a paper, with the package booktabs."""
        columns = "l" * self.text_columns + "r" * (len(self.headers) - self.text_columns)
        escaped = self.frame().map(_latex).rename(columns=_latex)
        return escaped.to_latex(index=False, column_format=columns)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return markdown_table(self.headers, self.rows)


def _latex(text: str) -> str:
    """Return a text as LaTeX shows it as it is."""
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    signs |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
    return "".join(signs.get(letter, letter) for letter in text)


def frame_of(records: Iterable[BaseModel], kind: type[BaseModel], whole: Sequence[str] = ()) -> pd.DataFrame:
    """Return records of a kind as lines of a table, with a column per part of their dicts and lists but the `whole`."""
    with needed("pandas", "a table"):
        import pandas as pd

    rows = [flat(record.model_dump(), whole) for record in records]
    frame = pd.DataFrame(rows, columns=None if rows else list(kind.model_fields))
    # Where a round has none of something, that stands beside the columns of the others' parts.
    parted = {str(column).partition(".")[0] for column in frame.columns if "." in str(column)}
    order = {name: place for place, name in enumerate(kind.model_fields)}
    columns = [column for column in frame.columns if column not in parted]
    return frame[sorted(columns, key=lambda column: order[str(column).partition(".")[0]])]
