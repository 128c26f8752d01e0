"""Line charts of the report: scores, what the run cost, devices and figures of the method, by round."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

from wildflower.server_app.charts import Chart, Line, line_chart
from wildflower.server_app.pages import Block, Charts, blocks
from wildflower.server_app.run_records import TRAFFIC, RoundRecord
from wildflower.server_app.summary import OF_DEVICES, in_fleet_order
from wildflower.server_app.units import Format, bytes_text, percent, plain, score_format, seconds_text, time_unit


def _chart(
    title: str, rounds: Sequence[RoundRecord], values: Mapping[str, Sequence[float | None]], form: Format
) -> Chart:
    """Return a chart of costs or counts by round, from 0 on."""
    numbers = [record.round for record in rounds]
    lines = [Line(name, numbers, ys) for name, ys in values.items()]
    return line_chart(title, lines, x_label="round", y_format=form, from_zero=True)


def score_charts(
    rounds: Sequence[RoundRecord], tier_of: Mapping[int, str], baseline: tuple[str, float] | None, *, whole: str
) -> list[Chart]:
    """Draw scores over rounds, simulated time and traffic, by tier, by exit and on devices, and the loss.

    Args:
        baseline: a name and a score, of which there is a line.
        whole: what the global model is called; "" if there is none.
    """
    scale, text = rounds[-1].scale, score_format(rounds[-1].scale)
    length, unit = time_unit(rounds[-1].simulated_seconds)
    numbers = [float(record.round) for record in rounds]
    traffic = [float(total) for total in accumulate(record.training_bytes for record in rounds)]
    clock = [record.simulated_seconds / length for record in rounds]
    # With evaluate-tiers = false nothing says what devices would be given.
    known = any(record.delivered_score is not None for record in rounds)
    figures = {"delivered": [record.delivered_score for record in rounds]} if known else {}
    if whole:
        figures[whole] = [record.score for record in rounds]
    if not figures:
        figures[OF_DEVICES] = [record.score for record in rounds]

    def over(name: str, xs: Sequence[float], x_label: str, x_format: Format = plain) -> Chart:
        lines = [Line(label, xs, ys) for label, ys in figures.items()]
        evaluated = [x for x, record in zip(xs, rounds, strict=True) if record.score_by_tier is not None]
        if baseline is not None and evaluated:
            ends = sorted({evaluated[0], evaluated[-1]})
            lines.append(Line(f"baseline: {baseline[0]}", ends, [baseline[1]] * len(ends), color=7, dash="dot"))
        title = f"{scale.title} over {name}"
        return line_chart(title, lines, x_label=x_label, y_format=text, x_format=x_format)

    by_round = partial(line_chart, x_label="round", y_format=text)
    charts = [over("rounds", numbers, "round"), over("simulated time", clock, unit)]
    charts.append(over("traffic", traffic, "training, down and up", bytes_text))
    of_tiers = [(r.delivered_score_by_tier if known else r.score_by_tier) for r in rounds]
    if by_tier := _by_part(rounds, of_tiers, tier_of):
        charts.append(by_round(f"{scale.title} delivered by tier" if known else f"{scale.title} by tier", by_tier))
    loss = Line("global model" if whole else OF_DEVICES, numbers, [r.loss for r in rounds])
    charts.append(line_chart("Loss", [loss], x_label="round"))
    of_exits = [{f"exit {n}": s for n, s in enumerate(r.score_by_exit or [], start=1)} for r in rounds]
    if by_exit := _by_part(rounds, of_exits, {}):
        charts.append(by_round(f"{scale.title} by exit of the global model", by_exit))
    if personal := _by_part(rounds, [r.personal_score_by_tier for r in rounds], tier_of):
        everyone = Line("all devices", numbers, [record.personal_score for record in rounds])
        networks = _by_part(rounds, [r.personal_score_by_network for r in rounds], {})
        title = f"Personal {scale.label}, on devices' own test shards"
        charts.append(by_round(title, [everyone, *personal, *networks]))
    return charts


def _by_part(
    rounds: Sequence[RoundRecord], parts: Sequence[Mapping[str, float] | None], tier_of: Mapping[int, str]
) -> list[Line]:
    """Return a line per name that any of the rounds has, tiers in the order of the fleet."""
    names = in_fleet_order((name for of_round in parts for name in of_round or {}), tier_of)
    numbers = [record.round for record in rounds]
    return [Line(name, numbers, [(of_round or {}).get(name) for of_round in parts]) for name in names]


def cost_charts(rounds: Sequence[RoundRecord]) -> list[Chart]:
    """Draw bytes, seconds and budgets by round."""
    length, unit = time_unit(rounds[-1].simulated_seconds)
    of_round = {name.replace("_bytes_", ", "): [getattr(r, name) for r in rounds] for name in TRAFFIC}
    traffic = {name: sizes for name, sizes in of_round.items() if name.startswith("training") or any(sizes)}
    parts = [record.server_seconds for record in rounds]
    names = dict.fromkeys(name for seconds in parts for name in seconds)
    server = {name: [seconds.get(name, 0.0) for seconds in parts] for name in names}
    here = {"whole round": [r.wall_seconds for r in rounds], "server": [sum(seconds.values()) for seconds in parts]}
    budget = {
        "memory": [record.memory_utilisation for record in rounds],
        "bandwidth": [record.bandwidth_utilisation for record in rounds],
    }
    in_all = {name: list(accumulate(sizes)) for name, sizes in traffic.items()}
    simulated = [record.simulated_seconds / length for record in rounds]
    return [
        _chart("Bytes per round", rounds, traffic, bytes_text),
        _chart("Bytes in all", rounds, in_all, bytes_text),
        _chart(f"Simulated {unit} in all", rounds, {"the devices' clock": simulated}, plain),
        _chart("Seconds per round on this machine", rounds, here, seconds_text),
        _chart("Seconds per round on the server", rounds, _that_happened(server), seconds_text),
        _chart("Budget used by what was assigned", rounds, budget, percent),
    ]


def device_charts(rounds: Sequence[RoundRecord]) -> list[Chart]:
    """Draw how many devices took part, and how many different architectures they trained."""
    happened = {
        "failed": [record.devices_failed for record in rounds],
        "refused": [record.devices_refused for record in rounds],
        "scaled down": [record.devices_bounded for record in rounds],
        "below the smallest": [record.devices_below_smallest for record in rounds],
        "lost what they kept": [record.devices_state_lost for record in rounds],
    }
    asked: dict[str, Sequence[float]] = {
        "replied": [record.devices_replied for record in rounds],
        "sampled": [record.devices_sampled for record in rounds],
    }
    different = {"architectures": [record.distinct_architectures for record in rounds]}
    return [
        _chart("Devices per round", rounds, asked | _that_happened(happened), plain),
        _chart("Different architectures per round", rounds, different, plain),
    ]


def own_charts(rounds: Sequence[RoundRecord]) -> list[Block]:
    """Return the figures of the method's own."""
    names = sorted({name for record in rounds for name, y in record.metrics.items() if y is not None})
    values = {name: [record.metrics.get(name) for record in rounds] for name in names}
    words = {name: name.replace("_", " ") for name in names}
    charts = [_chart(words[name].capitalize(), rounds, {words[name]: ys}, plain) for name, ys in values.items()]
    return [blocks.heading("Figures of the method"), Charts(charts)] if charts else []


def _that_happened(values: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return those that are not 0 all the time: what never happened only hides the others."""
    return {name: ys for name, ys in values.items() if any(ys)}
