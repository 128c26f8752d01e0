"""Line charts of the report: scores, what the run cost, devices and figures of the method, by round."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from wildflower.server_app.charts import Chart, Line, line_chart
from wildflower.server_app.pages import Block, Charts, Heading
from wildflower.server_app.run_records import RoundRecord
from wildflower.server_app.summary import in_fleet_order
from wildflower.server_app.units import bytes_text, percent, score_format, seconds_text, time_unit


def score_charts(rounds: Sequence[RoundRecord], tier_of: Mapping[int, str]) -> list[Chart]:
    """Draw scores over rounds, simulated time and traffic, by tier, by exit and on devices, and the loss."""
    numbers = [record.round for record in rounds]
    length, unit = time_unit(rounds[-1].simulated_seconds)
    clock = [record.simulated_seconds / length for record in rounds]
    scale = rounds[-1].scale
    text = score_format(scale)
    scores = [record.score for record in rounds]
    # With evaluate-tiers = false nothing says what devices would be given.
    delivered = [record.delivered_score for record in rounds]
    known = any(score is not None for score in delivered)
    scores_of = [(r.delivered_score_by_tier if known else r.score_by_tier) or {} for r in rounds]
    tiers = in_fleet_order((tier for of_round in scores_of for tier in of_round), tier_of)
    by_tier = [Line(tier, numbers, [of_round.get(tier) for of_round in scores_of]) for tier in tiers]
    tier_title = f"{scale.title} delivered by tier" if known else f"{scale.title} by tier"
    delivered_lines = [Line("delivered", numbers, delivered)] if known else []
    delivered_clock = [Line("delivered", clock, delivered)] if known else []
    exits = range(max(len(record.score_by_exit or []) for record in rounds))
    by_exit = [[_at(record.score_by_exit, exit) for record in rounds] for exit in exits]
    personal_tiers = in_fleet_order(
        (tier for record in rounds for tier in record.personal_score_by_tier or {}), tier_of
    )
    personal = [Line("all devices", numbers, [record.personal_score for record in rounds])]
    personal += [
        Line(tier, numbers, [(record.personal_score_by_tier or {}).get(tier) for record in rounds])
        for tier in personal_tiers
    ]
    networks = dict.fromkeys(name for record in rounds for name in record.personal_score_by_network or {})
    personal += [
        Line(name, numbers, [(record.personal_score_by_network or {}).get(name) for record in rounds])
        for name in networks
    ]
    traffic = [float(total) for total in accumulate(record.training_bytes for record in rounds)]
    delivered_traffic = [Line("delivered", traffic, delivered)] if known else []
    charts = [
        line_chart(
            f"{scale.title} over rounds",
            [*delivered_lines, Line("whole model", numbers, scores)],
            x_label="round",
            y_format=text,
        ),
        line_chart(
            f"{scale.title} over simulated time",
            [*delivered_clock, Line("whole model", clock, scores)],
            x_label=unit,
            y_format=text,
        ),
        line_chart(
            f"{scale.title} over traffic",
            [*delivered_traffic, Line("whole model", traffic, scores)],
            x_label="training, down and up",
            y_format=text,
            x_format=bytes_text,
        ),
        *([line_chart(tier_title, by_tier, x_label="round", y_format=text)] if by_tier else []),
        line_chart("Loss", [Line("global model", numbers, [record.loss for record in rounds])], x_label="round"),
    ]
    if exits:
        charts.append(
            line_chart(
                f"{scale.title} by exit of the global model",
                [Line(f"exit {exit + 1}", numbers, by_exit[exit]) for exit in exits],
                x_label="round",
                y_format=text,
            )
        )
    if personal_tiers:
        title = f"Personal {scale.label}, on devices' own test shards"
        charts.append(line_chart(title, personal, x_label="round", y_format=text))
    return charts


def cost_charts(rounds: Sequence[RoundRecord]) -> list[Chart]:
    """Draw bytes, seconds and budgets by round."""
    numbers = [record.round for record in rounds]
    length, unit = time_unit(rounds[-1].simulated_seconds)
    parts = [record.server_seconds for record in rounds]
    of_round = {
        "training, down": [record.training_bytes_down for record in rounds],
        "training, up": [record.training_bytes_up for record in rounds],
        "statistics, down": [record.statistics_bytes_down for record in rounds],
        "statistics, up": [record.statistics_bytes_up for record in rounds],
        "scoring, down": [record.scoring_bytes_down for record in rounds],
    }
    traffic = {name: sizes for name, sizes in of_round.items() if name.startswith("training") or any(sizes)}
    server = [sum(seconds.values()) for seconds in parts]
    return [
        line_chart(
            "Bytes per round",
            [Line(name, numbers, sizes) for name, sizes in traffic.items()],
            x_label="round",
            y_format=bytes_text,
            from_zero=True,
        ),
        line_chart(
            "Bytes in all",
            [Line(name, numbers, list(accumulate(sizes))) for name, sizes in traffic.items()],
            x_label="round",
            y_format=bytes_text,
            from_zero=True,
        ),
        line_chart(
            f"Simulated {unit} in all",
            [Line("the devices' clock", numbers, [record.simulated_seconds / length for record in rounds])],
            x_label="round",
            from_zero=True,
        ),
        line_chart(
            "Seconds per round on this machine",
            [Line("whole round", numbers, [record.wall_seconds for record in rounds]), Line("server", numbers, server)],
            x_label="round",
            y_format=seconds_text,
            from_zero=True,
        ),
        line_chart(
            "Seconds per round on the server",
            _that_happened(
                *(
                    Line(part, numbers, [seconds.get(part, 0.0) for seconds in parts], color)
                    for color, part in enumerate(dict.fromkeys(name for seconds in parts for name in seconds))
                )
            ),
            x_label="round",
            y_format=seconds_text,
            from_zero=True,
        ),
        line_chart(
            "Budget used by what was assigned",
            [
                Line("memory", numbers, [record.memory_utilisation for record in rounds]),
                Line("bandwidth", numbers, [record.bandwidth_utilisation for record in rounds]),
            ],
            x_label="round",
            from_zero=True,
            y_format=percent,
        ),
    ]


def device_charts(rounds: Sequence[RoundRecord]) -> list[Chart]:
    """Draw how many devices took part, and how many different architectures they trained."""
    numbers = [record.round for record in rounds]
    return [
        line_chart(
            "Devices per round",
            [
                Line("replied", numbers, [record.devices_replied for record in rounds], color=2),
                Line("sampled", numbers, [record.devices_sampled for record in rounds], color=7),
                *_that_happened(
                    Line("failed", numbers, [record.devices_failed for record in rounds], color=1),
                    Line("refused", numbers, [record.devices_refused for record in rounds], color=3),
                    Line("scaled down", numbers, [record.devices_bounded for record in rounds], color=5),
                    Line("below the smallest", numbers, [record.devices_below_smallest for record in rounds], color=4),
                    Line("lost what they kept", numbers, [record.devices_state_lost for record in rounds], color=6),
                ),
            ],
            x_label="round",
            from_zero=True,
        ),
        line_chart(
            "Different architectures per round",
            [Line("architectures", numbers, [record.distinct_architectures for record in rounds])],
            x_label="round",
            from_zero=True,
        ),
    ]


def own_charts(rounds: Sequence[RoundRecord]) -> list[Block]:
    """Figures of the method's own."""
    names = sorted({name for record in rounds for name, y in record.metrics.items() if y is not None})
    if not names:
        return []
    numbers = [record.round for record in rounds]
    charts = [
        line_chart(
            name.replace("_", " ").capitalize(),
            [Line(name.replace("_", " "), numbers, [record.metrics.get(name) for record in rounds])],
            x_label="round",
            from_zero=True,
        )
        for name in names
    ]
    return [Heading("Figures of the method"), Charts(charts)]


def _that_happened(*lines: Line) -> list[Line]:
    """The lines that are not 0 all the time: what never happened only hides the others."""
    return [line for line in lines if any(y != 0 for _, y in line.points())]


def _at(values: Sequence[float] | None, place: int) -> float | None:
    return values[place] if values is not None and place < len(values) else None
