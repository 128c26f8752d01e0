"""Whole pages: self-contained HTML made by a template, with charts that Plotly draws in the browser, offline.

Plotly travels in the page, compressed: the page is about 2 MB, and needs no network. Where scripts are off, its figures
and tables can be read nevertheless. Every text is escaped by the template.
"""

import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from wildflower.plugins.extras import check_installed
from wildflower.server_app.charts import Chart
from wildflower.server_app.page_template import MACROS, PAGE, SCRIPT, STYLE
from wildflower.server_app.tables import TextTable

GZIP = 31  # zlib's way to name gzip's format and its largest window
PIECE_BYTES = 2**16
# The words of this project, for whoever sees a page for the first time.
WORDS = {
    "delivered": "the mean, over all devices of the fleet, of the score of the model that each would be given now",
    "tier": "a kind of device: those of one group of the fleet, with like memory and links",
    "worst tier": "the tier whose devices are given the models with the worst mean score",
    "whole model": "the global model at its full size, which only the largest devices may be able to hold",
    "personal": "scores that devices take on their own test examples",
    "simulated time": "the clock of the fleet's devices: what they take to download, train and upload",
    "statistics": "bytes that travel so that models with batch norm can be scored, not to train",
    "budget": "the memory, bytes and time that a device may spend in a round",
    "epsilon": "what a differentially private run may tell of one device; smaller is more private",
    "baseline": "what the scores are compared with: the least that a method should be better than",
}


@dataclass(frozen=True)
class Charts:
    """Charts side by side. One in which nothing changes is a sentence below the others."""

    charts: Sequence[Chart]

    @property
    def drawn(self) -> list[Chart]:
        """The charts that have something to show."""
        return [chart for chart in self.charts if not chart.constant]

    @property
    def constant(self) -> str:
        """The others in words."""
        return "; ".join(f"{chart.title}: {chart.constant}" for chart in self.charts if chart.constant)


Block = str | Charts


def page(title: str, name: str, content: Sequence[Block], badge: str = "") -> str:
    """Return a whole HTML document.

    Args:
        title: of the window.
        name: the headline, with a `badge` beside it.
        content: of `blocks`, and charts, from top to bottom.
    """
    charts = [chart for block in content if isinstance(block, Charts) for chart in block.drawn if chart.traces]
    figures = [{"traces": chart.traces, "layout": chart.layout} for chart in charts]
    number_of = {id(chart): number for number, chart in enumerate(charts)}
    return TEMPLATE.render(
        title=title,
        name=name,
        badge=badge,
        blocks=content,
        style=STYLE,
        script=SCRIPT,
        figures=figures,
        number_of=lambda chart: number_of[id(chart)],
        library=library() if figures else "",
    )


def words_table(words: Sequence[str]) -> list[Block]:
    """Return what these of the project's `WORDS` mean, as the end of a page."""
    rows = [[word, WORDS[word]] for word in words]
    return [blocks.heading("Words"), blocks.shown(TextTable("Words", ["word", "meaning"], rows, text_columns=2))]


def table_html(table: TextTable) -> str:
    """Return a table alone, for a notebook."""
    return str(blocks.cells_of(table))


@cache
def library() -> str:
    """Return Plotly's script, compressed, in letters."""
    # `plotly.offline.get_plotlyjs` returns a text of 10 MB, and its bytes would be 5 MB more: neither is held here.
    # Level 6 takes 0.1 s longer, which every run would pay, for a page that is a tenth smaller.
    packer = zlib.compressobj(2, wbits=GZIP)
    check_installed("plotly", "a page with charts")
    with (files("plotly") / "package_data" / "plotly.min.js").open("rb") as script:
        pieces = [packer.compress(piece) for piece in iter(partial(script.read, PIECE_BYTES), b"")]
    return b64encode(b"".join([*pieces, packer.flush()])).decode()


ENVIRONMENT = Environment(autoescape=True, undefined=StrictUndefined)
ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
ENVIRONMENT.filters["letters"] = lambda text: b64encode(text.encode()).decode()
TEMPLATE = ENVIRONMENT.from_string(MACROS + PAGE)
blocks: Any = ENVIRONMENT.from_string(MACROS).module
"""What a page is made of beside charts: `blocks.heading(text)`, `blocks.shown(table)` and so on are HTML."""
