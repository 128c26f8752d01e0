"""Pieces of a self-contained HTML page: charts as inline SVG, tables, and numbers as people read them.

No script and no network, so a page opens anywhere and stays small. Every text is escaped here, where it enters the
page; the strings that functions of this module return are the only markup.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tasks.metrics import Scale

COLORS = 8  # of lines, as defined in STYLE; more lines than that are told apart by their dashes
DASHES = ("", "6 3", "2 3")
# The drawing's own units: at the usual three charts side by side about one pixel, on a phone a little less.
WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 72, 12, 10, 34
POINTS_WITH_TEXT = 150

Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """One named line of a chart. A point whose y is None or not finite is left out. `color` groups several lines."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    color: int | None = None
    faint: bool = False

    def points(self) -> list[tuple[float, float]]:
        """What can be drawn of it."""
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if y is not None and math.isfinite(y)]


def percent(value: float) -> str:
    """0.8312 as 83.12 %, 0.8 as 80 %."""
    return f"{round(100 * value, 2):g} %"


def score_format(scale: Scale) -> Format:
    """How values of a scale are shown: shares in percent."""
    return percent if scale.is_share else plain


def plain(value: float) -> str:
    """A number with four digits, thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def bytes_text(value: float) -> str:
    """Bytes with decimal prefixes, as networks count: 1.5 MB is 1,500,000 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"


def seconds_text(seconds: float) -> str:
    """A duration in the two largest units that matter: 3 h 12 min, 4 min 5 s, 2.51 s."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return _two(whole, 60, "min", "s")
    if whole < 86400:
        return _two(whole // 60, 60, "h", "min")
    return _two(whole // 3600, 24, "d", "h")


def _two(value: int, base: int, large: str, small: str) -> str:
    rest = f" {value % base} {small}" if value % base else ""
    return f"{value // base} {large}{rest}"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit to draw durations up to `seconds` in: its length in seconds, and its name."""
    for length, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * length:
            return length, name
    return 1.0, "seconds"


def ticks(low: float, high: float, at_most: int = 6) -> list[float]:
    """Round numbers from `low` or just below it to `high` or just above it, at most `at_most` steps apart."""
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / at_most))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= at_most:
            step *= factor
            break
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if first == last:
        last += 1
    return [number * step for number in range(first, last + 1)]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_format: Format = plain,
    x_format: Format = plain,
    from_zero: bool = False,
) -> str:
    """A figure with one line per entry of `lines`, a legend when there are several, and a text on every point."""
    drawn = [line for line in lines if line.points()]
    every = [point for line in drawn for point in line.points()]
    if not every:
        return _figure(title, "", '<p class="empty">nothing was measured</p>')
    x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    y_low, y_high = min(y for _, y in every), max(y for _, y in every)
    y_ticks = ticks(min(0.0, y_low) if from_zero else y_low, y_high, at_most=5)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def left_of(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def top_of(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in y_ticks:
        top = top_of(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>')
        text = y_format(y)
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{top + 4:.1f}">{escape(text)}</text>')
    whole = all(x == int(x) for x, _ in every)  # rounds have no halves
    for x in ticks(x_low, x_high):
        if x_low <= x <= x_high and (x == int(x) or not whole):
            parts.append(
                f'<text class="x" x="{left_of(x):.1f}" y="{HEIGHT - BOTTOM + 16}">{escape(x_format(x))}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="x label" x="{middle}" y="{HEIGHT - 4}">{escape(x_label)}</text>')

    legend = []
    for index, line in enumerate(drawn):
        color = index if line.color is None else line.color
        dash = DASHES[color // COLORS % len(DASHES)]
        style = f"c{color % COLORS}" + (" faint" if line.faint else "")
        points = line.points()
        path = " ".join(f"{left_of(x):.1f},{top_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line {style}" stroke-dasharray="{dash}" points="{path}"/>')
        if not line.faint and len(points) <= POINTS_WITH_TEXT:
            radius = 2.5 if len(points) <= 40 else 1.5
            for x, y in points:
                text = escape(f"{line.name}: {y_format(y)} at {x_label} {x_format(x)}")
                parts.append(
                    f'<circle class="{style}" cx="{left_of(x):.1f}" cy="{top_of(y):.1f}" r="{radius}">'
                    f"<title>{text}</title></circle>"
                )
        if not line.faint:
            legend.append((style, dash, line.name, y_format(points[-1][1])))
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return _figure(title, _legend(legend), svg)


def _legend(entries: Iterable[tuple[str, str, str, str]]) -> str:
    items = [
        f'<li><svg class="key" viewBox="0 0 20 10"><polyline class="line {style}" stroke-dasharray="{dash}" '
        f'points="0,5 20,5"/></svg>{escape(name)} <b>{escape(last)}</b></li>'
        for style, dash, name, last in entries
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _figure(title: str, legend: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{drawing}</figure>"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """A table of texts. The first `text_columns` are set to the left, the others, as numbers, to the right."""

    def cells(values: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if column < text_columns else ' class=n'}>{escape(value)}</{tag}>"
            for column, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells(headers, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """The headline: (label, figure, what else to know about it) each in a card."""
    items = [
        f"<div class=card><span>{escape(label)}</span>"
        f"<strong>{escape(figure)}</strong><small>{escape(more)}</small></div>"
        for label, figure, more in figures
    ]
    return f'<div class="cards">{"".join(items)}</div>'


def page(title: str, body: str) -> str:
    """A whole HTML document around `body`, which is markup."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #5d6778; --rule: #e1e5eb;
  --c0: #2563eb; --c1: #d9480f; --c2: #0f9d6b; --c3: #9333ea; --c4: #b7860b; --c5: #0891b2; --c6: #db2777;
  --c7: #64748b;
  --s0: #cfe3f7; --s1: #a3c9ee; --s2: #72abe2; --s3: #4489d0; --s4: #2566b3; --s5: #123f7c;
  --good: #0f9d6b; --bad: #d42a2a; --late: #e8a317; --refused: #a33bc2; --skipped: #a9b1bd; }
@media (prefers-color-scheme: dark) { :root { --back: #10141b; --card: #181e28; --ink: #e7ebf2; --soft: #98a3b5;
  --rule: #2b3442;
  --c0: #6ea8fe; --c1: #ff9a62; --c2: #45d19d; --c3: #c79bff; --c4: #e6c04c; --c5: #4fd0e6; --c6: #ff86bd;
  --c7: #a6b2c4;
  --s0: #1d3a5c; --s1: #23538a; --s2: #2f72b8; --s3: #4f97df; --s4: #85bdf2; --s5: #cbe4fd;
  --good: #45d19d; --bad: #ff6b6b; --late: #f2b84b; --refused: #d184ea; --skipped: #5b6676; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 10px; }
p.lead { color: var(--soft); margin: 0 0 18px; overflow-wrap: anywhere; }
.badge { display: inline-block; vertical-align: 4px; font-size: 13px; font-weight: 600; padding: 1px 10px;
  border-radius: 99px;
  margin-left: 8px; border: 1.5px solid currentColor; color: var(--soft); }
.badge.finished { color: var(--good); } .badge.failed { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; }
.card, figure, .wide, pre, details { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.card { padding: 12px 14px; display: flex; flex-direction: column; }
.card span, .card small, .note, .empty { color: var(--soft); font-size: 13px; }
.card strong { font-size: 22px; line-height: 1.35; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 14px;
  margin-top: 14px; }
figure { margin: 0; padding: 12px 14px; min-width: 0; display: flex; flex-direction: column; }
figure > svg { width: 100%; height: auto; margin-top: auto; }
figcaption { font-weight: 600; }
.note { margin: 6px 0 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 2px 0 6px; padding: 0;
  font-size: 13px;
  color: var(--soft); overflow-wrap: anywhere; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.key { width: 20px; height: 10px; margin-right: 5px; }
.box { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 5px;
  vertical-align: -1px; }
svg text { font-size: 11.5px; fill: var(--soft); } svg text.y { text-anchor: end; }
  svg text.x { text-anchor: middle; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
  .line.faint { stroke-width: 1; opacity: .35; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } .c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); }
circle { fill: var(--card); stroke-width: 1.5; }
.s0 { fill: var(--s0); background: var(--s0); } .s1 { fill: var(--s1); background: var(--s1); }
.s2 { fill: var(--s2); background: var(--s2); } .s3 { fill: var(--s3); background: var(--s3); }
.s4 { fill: var(--s4); background: var(--s4); } .s5 { fill: var(--s5); background: var(--s5); }
.failed { fill: var(--bad); } .late { fill: var(--late); } .refused { fill: var(--refused); }
  .skipped { fill: var(--skipped); }
.box.failed { background: var(--bad); } .box.late { background: var(--late); }
.box.refused { background: var(--refused); } .box.skipped { background: var(--skipped); }
.scroll, .wide { overflow-x: auto; } .scroll svg { display: block; min-width: 1000px; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; } th, td { padding: 6px 12px; text-align: left; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; border-bottom: 1px solid var(--rule); }
tr + tr td { border-top: 1px solid var(--rule); } td { overflow-wrap: anywhere; min-width: 60px; }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { padding: 12px 14px; overflow-x: auto; font-size: 13px; line-height: 1.45; border-left: 4px solid var(--bad); }
details { padding: 10px 14px; margin-top: 12px; } summary { cursor: pointer; font-weight: 600; }
  details .wide { border: 0; }
@media (max-width: 900px) { .cards { grid-template-columns: 1fr 1fr; } }
@media (max-width: 600px) { main { padding: 16px 12px 32px; } h1 { font-size: 22px; } svg text { font-size: 13px; }
  th, td { padding: 5px 8px; } .cards { gap: 8px; } .card strong { font-size: 19px;
  } }
"""
