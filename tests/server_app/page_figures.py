"""What a page shows: its charts as they travel in it, and what stands around them."""

import base64
import gzip
import html
import json
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shown:
    """A chart: the names in its legend, its traces, and all texts of its points."""

    names: list[str]
    traces: list[dict[str, Any]]

    @property
    def texts(self) -> str:
        return json.dumps([trace["text"] for trace in self.traces])


def split(page: str) -> tuple[str, list[dict[str, Any]], str]:
    """The page without its charts, their figures, and the library's script."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    library = re.search(r'<script type="application/octet-stream" id="library">(.*?)</script>', page, re.DOTALL)
    if found is None or library is None:
        return page, [], ""
    script = gzip.decompress(base64.b64decode(library[1])).decode()
    return page.replace(library[1], "").replace(found[1], ""), json.loads(found[1]), script


def charts_of(page: str) -> dict[str, Shown]:
    """The charts by their titles; an empty one has no traces."""
    rest, figures, _ = split(page)
    shown = {}
    for figure in re.findall(r"<figure.*?</figure>", rest, re.DOTALL):
        title = html.unescape(re.search(r"<figcaption>(.*?)</figcaption>", figure)[1])
        number = re.search(r'data-figure="(\d+)"', figure)
        names = re.findall(r'"></span>([^<]+?)(?: <b>|</button>)', figure)
        shown[title] = Shown(
            [html.unescape(name).strip() for name in names], figures[int(number[1])]["traces"] if number else []
        )
    return shown
