"""Maps and bars of the report: cells of rounds by device, class or tier, in few shades."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from wildflower.server_app.activity import MAX_CELLS, MAX_COLUMNS, MAX_DEVICES, MISSED, OUTCOMES, Activity, Tally
from wildflower.server_app.charts import Chart, bar_chart, cell_chart
from wildflower.server_app.label_spread import FILE, Labels
from wildflower.server_app.pages import Block, Charts, blocks
from wildflower.server_app.run_records import RoundRecord
from wildflower.server_app.units import Format, percent, plain, score_format

SHADES = 6  # of sizes, as defined in the page's style


def score_maps(rounds: Sequence[RoundRecord], tier_of: Mapping[int, str], *, whole: str) -> list[Chart]:
    """Draw the accuracy of every class, of the `whole` model if there is one, and scores of every device."""
    scale = rounds[-1].scale
    text = score_format(scale)

    def of_devices(found: Mapping[int, float] | None) -> dict[str, float]:
        return {
            f"{device} ({tier_of[device]})" if device in tier_of else f"{device}": v
            for device, v in (found or {}).items()
        }

    classes = {r.round: r.accuracy_by_class for r in rounds if r.accuracy_by_class}
    devices = {r.round: of_devices(r.score_by_device) for r in rounds if r.score_by_device}
    personal = {r.round: of_devices(r.personal_score_by_device) for r in rounds if r.personal_score_by_device}
    return [
        *(_score_map(f"Accuracy of the {whole}", "class", classes, percent) if whole else []),
        *_score_map(f"Delivered {scale.label}", "device", devices, text),
        *_score_map(f"Personal {scale.label}", "device", personal, text),
    ]


def _score_map(title: str, what: str, scores: Mapping[int, Mapping[str, float]], text: Format) -> list[Chart]:
    """A map of the scores of classes or devices, by name, over the rounds that have them; [] where none does.

    Of many rounds evenly spread ones are shown, the last among them, so that the page stays small.
    """
    everything = list(dict.fromkeys(name for of_round in scores.values() for name in of_round))
    names = everything[:MAX_DEVICES]
    places = {name: row for row, name in enumerate(names)}
    most = max(1, min(MAX_COLUMNS, MAX_CELLS // max(1, len(names))))
    stride = max(1, -(-len(scores) // most))
    shown = sorted(scores)[::-1][::stride][::-1]
    found = [
        (places[name], column, value)
        for column, number in enumerate(shown)
        for name, value in scores[number].items()
        if name in places and math.isfinite(value)
    ]
    if not found:
        return []
    shades = Shades(value for _, _, value in found)
    cells = [
        (row, column, shades.color(value), f"{what} {names[row]}, round {shown[column]}: {text(value)}")
        for row, column, value in found
    ]
    of_rounds = f"One of {stride} evaluations is shown." if stride > 1 else ""
    of_names = f"The first {len(names)} of {len(everything):,} are shown." if len(names) < len(everything) else ""
    note = " ".join(filter(None, (of_rounds, of_names)))
    return [
        cell_chart(
            f"{title}: {what} by round",
            row_names(names),
            shown,
            cells,
            x_label="round",
            key=shades.key(text),
            note=note,
        )
    ]


def architecture_charts(activity: Activity) -> list[Chart]:
    """Return how many devices trained models of which size, over time."""
    shades = Shades(size for counts in activity.sizes.values() for size in counts)
    if not shades.bounds:
        return []
    xs = [column * activity.rounds_per_column + 1 for column in range(activity.columns)]
    bars = []
    named = shades.key(lambda size: f"{plain(size)} parameters")
    for low, bound, (color, name) in zip([0, *shades.bounds], shades.bounds, named, strict=False):
        ys = [
            sum(count for size, count in activity.sizes.get(column, {}).items() if low < size <= bound)
            for column in range(activity.columns)
        ]
        bars.append((name, color, xs, ys))
    return [bar_chart("Trained models by size", bars, x_label="round", y_format=plain)]


def map_chart(activity: Activity) -> list[Chart]:
    """Rows are devices or tiers, columns rounds; a cell is the size of what was trained, or why nothing was."""
    if not activity.rows:
        return []
    rows = {name: row for row, name in enumerate(activity.rows)}
    shades = Shades(c.mean_parameters for c in activity.cells.values() if c.mean_parameters is not None)
    key = shades.key(lambda size: f"{plain(size)} parameters")
    key += [(word, word) for word in MISSED if any(tally.outcomes[word] for tally in activity.rows.values())]
    cells = []
    for (name, column), cell in activity.cells.items():
        mean = cell.mean_parameters
        color = cell.outcomes.most_common(1)[0][0] if mean is None else shades.color(mean)
        cells.append((rows[name], column, color, _cell_text(activity, name, column, cell)))
    note = "Color is the mean size of the trained models, or why none was trained."
    if activity.by_tier:
        note += f" {len(activity.asked):,} devices took part, so a row is a tier."
    if activity.rounds_per_column > 1:
        note += f" Each column is {activity.rounds_per_column} rounds."
    chart = cell_chart(
        f"Who trained what when: {'tier' if activity.by_tier else 'device'} by round",
        row_names(map(str, rows)),
        [column * activity.rounds_per_column + 1 for column in range(activity.columns)],
        cells,
        x_label="round",
        key=key,
        note=note,
    )
    return [chart]


def label_chart(labels: Labels | None, activity: Activity) -> list[Block]:
    """Draw which labels the training examples of each simulated device have."""
    if labels is None:
        return []
    shown = labels.counts[:MAX_DEVICES]
    shades = Shades(count for row in shown for count in row if count)
    cells = []
    for device, row in enumerate(shown):
        tier = f" ({activity.tiers[device]})" if device in activity.tiers else ""
        for place, count in enumerate(row):
            if count:
                text = f"device {device}{tier}: {count:,} of {sum(row):,} examples are {labels.classes[place]}"
                cells.append((place, device, shades.color(count), text))
    chart = cell_chart(
        "Labels of the training examples: class by device",
        row_names(labels.classes),
        list(range(len(shown))),
        cells,
        x_label="device",
        key=shades.key(lambda count: f"{int(count):,} examples"),
        note=_first_of(len(shown), labels.devices),
    )
    counted = _first_of(len(labels.counts), labels.devices)
    data = f"examples by device and class{f' ({counted})' if counted else ''}"
    return [blocks.heading("What devices have"), Charts([chart]), blocks.data([(FILE, data)])]


def _first_of(shown: int, all_there_are: int) -> str:
    return f"The first {shown:,} of {all_there_are:,} devices" if shown < all_there_are else ""


def _cell_text(activity: Activity, name: int | str, column: int, cell: Tally) -> str:
    first = column * activity.rounds_per_column + 1
    last = first + activity.rounds_per_column - 1
    when = f"round {first}" if first == last else f"rounds {first} to {last}"
    who = f"tier {name}" if isinstance(name, str) else f"device {name} ({activity.tiers[name]})"
    what = ", ".join(f"{cell.outcomes[word]} {word}" for word in OUTCOMES if cell.outcomes[word])
    size = "" if cell.mean_parameters is None else f", {plain(cell.mean_parameters)} parameters"
    return f"{who}, {when}: {what}{size}"


class Shades:
    """The shades of some sizes: of few sizes each has its own, else each shade has as many of them.

    Equal steps would show what is near the largest, as scores are at the end of a run, in one shade.

    Attributes:
        bounds: the largest size of each shade.
    """

    def __init__(self, sizes: Iterable[float]) -> None:
        distinct = sorted(set(sizes))
        few = len(distinct) <= SHADES
        steps = [(step + 1) / SHADES for step in range(SHADES)]
        self.bounds = distinct if few else [float(bound) for bound in np.quantile(distinct, steps)]
        self._up_to = "" if few else "up to "

    def color(self, size: float) -> str:
        """Return the color of a size, as the page's style names it; few sizes are spread over all shades."""
        step, last = next(step for step, bound in enumerate(self.bounds) if size <= bound), len(self.bounds) - 1
        return f"s{round(step * (SHADES - 1) / last) if last else SHADES - 1}"

    def key(self, text: Callable[[float], str]) -> list[tuple[str, str]]:
        """Return the colors and what they mean, with sizes as `text` shows them."""
        return [(self.color(bound), f"{self._up_to}{text(bound)}") for bound in self.bounds]


def row_names(names: Iterable[str]) -> list[str]:
    """Names short enough for an axis, no two of them alike: rows of one name would be drawn over each other."""
    found: list[str] = []
    for name in names:
        short, number = _shorten(name, 24), 1
        while short in found:
            number += 1
            short = f"{_shorten(name, 20)} ({number})"
        found.append(short)
    return found


def _shorten(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
