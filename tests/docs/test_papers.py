"""docs/papers.md quotes recorded results: the files are there, and figures are what they hold."""

import json
import re
import statistics

import pytest

from server_app.journal import todays_names
from server_app.keys import DOCS

ROOT = DOCS.parent
PAGE = (DOCS / "papers.md").read_text()
RECORDED = re.compile(r"<!-- recorded: (.+) = (\S+\.json): (\S+) -->")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def cells(row):
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def tables():
    """Of every table on the page: the comments in front of it, its titles and its rows."""
    found = []
    for match in re.finditer(r"((?:^<!-- recorded.*-->\n)*)\n?((?:^\|.*\n)+)", PAGE, re.MULTILINE):
        titles, _, *rows = (cells(row) for row in match[2].splitlines())
        sources = {title: (file, figure) for title, file, figure in RECORDED.findall(match[1])}
        found.append((sources, [dict(zip(titles, row, strict=True)) for row in rows]))
    return found


def ours(row):
    """The one cell of a row that has our figure."""
    [title] = [title for title in row if title.startswith("ours")]
    return row[title]


def of_method(file, key, figure):
    """A figure of every seed, in percent."""
    values = []
    for figures in json.loads((ROOT / file).read_text())["results"][key].values():
        value = todays_names(figures)
        for part in figure.split("."):
            value = value[part]
        values.append(100 * value)
    return values


METHODS = [
    (title, row[title], row["recorded as"], *source)
    for sources, rows in tables()
    for row in rows
    for title, source in sources.items()
]
SINGLE = [(ours(row), row["recorded in"]) for _, rows in tables() for row in rows if row.get("recorded in")]


def test_every_paper_has_a_section_with_tables_and_lines_on_the_order():
    sections = PAGE.split("\n## ")[1:]
    papers = ["Dynamic model search", "HypeMeFed", "InclusiveFL", "RaFL", "RecipFL"]
    assert [section.split(" (")[0].splitlines()[0] for section in sections] == papers
    for section in sections:
        assert "\n|---|" in section
        assert "**Order" in section
        assert "\nDifferences" in section
    assert len(METHODS) > 100
    assert len(SINGLE) > 30


@pytest.mark.parametrize(("title", "shown", "key", "file", "figure"), METHODS)
def test_a_methods_figure_is_the_mean_over_its_recorded_seeds(title, shown, key, file, figure):
    if not key:
        assert shown == "not run"
        return
    values = of_method(file, key.strip("`"), figure)
    expected = f"{statistics.fmean(values):.2f}"
    several = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else " (one seed)"
    assert shown == expected + several


@pytest.mark.parametrize(("shown", "place"), SINGLE)
def test_a_single_figure_is_what_its_file_holds(shown, place):
    file, path = re.fullmatch(r"`([^`]+)`(?:: (.*))?", place).groups()
    text = (ROOT / file).read_text()
    number = NUMBER.match(shown)[0]
    if file.endswith(".md"):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text)
        return
    value = json.loads(text)
    for part in path.split(" / "):
        if isinstance(value, list):
            value = max(value) if part == "best" else value[int(part)]
        else:
            value = todays_names(value)[part] if part not in value else value[part]
    decimals = len(number.partition(".")[2])
    assert f"{(100 if '%' in shown else 1) * value:.{decimals}f}" == number


def test_what_is_said_not_to_be_run_has_no_figure_and_the_rest_has_one():
    for sources, rows in tables():
        for row in rows:
            place = row.get("recorded in")
            if place is not None:
                assert (ours(row) == "not run") == (place == "")
            assert not sources or "recorded as" in row


def test_every_result_file_that_the_page_names_is_there():
    named = set(re.findall(r"benchmarks/[\w/.-]+\.(?:json|md)", PAGE))
    assert len(named) > 12
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
