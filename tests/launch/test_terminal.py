"""Tables on a terminal of 80 columns: every word and every figure is in one piece."""

import io

import pytest
from rich.console import Console

from tests.cli.test_command import invoke
from tests.server_app.fake_runs import CONFIG, a_device, a_round
from wildflower.launch.terminal import tables_of

HEADERS = ("node", "status", "device", "kind", "memory", "down", "up", "reported")
TIERS = [f"raspberry-pi-{number}" for number in range(9)]
NODE = ["9223372036854775803", "online", "117", "jetson-nano"]
NODES = [
    [*NODE, "3.71 GB, budget lowered to 81% after an overrun", "104 Mbit/s", "52.1 Mbit/s", "12 s ago"],
    ["77", "online, quarantined: 3 updates in a row", "", "", "", "", "", "no report"],
]


def printed(title, headers, rows, width):
    text = io.StringIO()
    console = Console(file=text, width=width)
    for table in tables_of(title, headers, rows, width):
        console.print(table)
    return text.getvalue()


@pytest.mark.parametrize(
    ("headers", "rows"),
    [
        (HEADERS, NODES),
        (["method", *TIERS], [["heterofl learning-rate=0.1", *["61.3 ± 1.25 (2 of 3)"] * 9]]),
        (["key", "value"], [["widths", "1, 0.5, 0.25, 0.125, 0.0625 " * 5]]),
        (["what", "is [bold]there"], []),
    ],
)
@pytest.mark.parametrize("width", [80, 300])
def test_no_word_is_cut_and_no_line_is_longer_than_the_terminal(headers, rows, width):
    shown = printed("A title", headers, rows, width)
    assert max(map(len, shown.splitlines())) <= width
    words = set(shown.split())
    for text in (*headers, *(text for row in rows for text in row)):
        assert set(text.split()) <= words
    for figure in ("104 Mbit/s", "3.71 GB", "12 s"):
        assert figure in shown or figure not in str(rows)


def test_what_does_not_stand_side_by_side_stands_below_each_other_with_its_first_column():
    narrow = tables_of("", HEADERS, NODES, 80)
    assert [[column.header for column in table.columns] for table in narrow] == [
        ["node", "status", "device", "kind", "memory"],
        ["node", "down", "up", "reported"],
    ]
    assert len(tables_of("", HEADERS, NODES, 300)) == 1


def test_a_word_longer_than_any_column_is_folded():
    path = "/a/very/long/path/without/blanks" * 4
    shown = printed("", ["what", "where"], [["data", path]], 80)
    assert max(map(len, shown.splitlines())) <= 80
    cells = [line.split("│")[2].strip() for line in shown.splitlines() if line.count("│") == 3]
    assert "".join(cells) == path


def test_a_comparison_of_many_tiers_is_readable_in_80_columns(tmp_path):
    from wildflower.server_app.journal import Journal

    runs = [tmp_path / "a", tmp_path / "b"]
    for seed, run_dir in enumerate(runs, start=1):
        journal = Journal.open(run_dir, CONFIG | {"seed": seed}, resume=False)
        scores = {tier: 0.0123 * (number + seed) for number, tier in enumerate(TIERS)}
        journal.write_round(a_round(1, delivered_score_by_tier=scores), [a_device(1, 0)])
        journal.finish("finished")
    shown = invoke("compare", *runs, columns=80)
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    words = set(shown.stdout.split())
    assert set(TIERS) <= words
    assert {"1.8", "11.7"} <= words  # the means of the first tier and of the last, in percent
