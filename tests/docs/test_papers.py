"""docs/papers.md and the papers' pages in benchmarks/ quote recorded results: figures are what the files hold."""

import json
import math
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal

import pytest

from wildflower.server_app.keys import DOCS

ROOT = DOCS.parent
CLAIMS = (DOCS / "papers.md").read_text(encoding="utf-8")
STUDIES = ["model_search", "hypemefed", "inclusivefl", "rafl", "recipfl"]
PAGES = {study: (ROOT / f"benchmarks/{study}/paper.md").read_text(encoding="utf-8") for study in STUDIES}
RECORDED = re.compile(r"<!-- recorded: (.+) = (\S+\.json): (\S+) -->")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def cells(row):
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def tables():
    """Of every table on the pages: the comments in front of it, its titles and its rows."""
    found = []
    for match in re.finditer(r"((?:^<!-- recorded.*-->\n)*)\n?((?:^\|.*\n)+)", "\n".join(PAGES.values()), re.MULTILINE):
        titles, _, *rows = (cells(row) for row in match[2].splitlines())
        sources = {title: (file, figure) for title, file, figure in RECORDED.findall(match[1])}
        found.append((sources, [dict(zip(titles, row, strict=True)) for row in rows]))
    return found


def ours(row):
    """The one cell of a row that has our figure."""
    [title] = [title for title in row if title.startswith("ours")]
    return row[title]


def at(value, path):
    """What stands there in a file; None where nothing does.

    Of a list: "best" is its highest value and "when-best" which it is, counted from 1, "last" its last one, and
    "first-at-70" the first row whose score is 70 % or more. Of a dictionary: "sum" and "mean" over those in it.
    """
    if not path or value is None:
        return value
    part, *rest = path
    if isinstance(value, list):
        if part == "when-best":
            return 1 + value.index(max(value))
        if part.startswith("first-at-"):
            target = int(part.removeprefix("first-at-")) / 100
            return at(next((row for row in value if row[1] >= target), None), rest)
        return at(max(value) if part == "best" else value[-1] if part == "last" else value[int(part)], rest)
    if part in ("sum", "mean"):
        parts = [at(inner, rest) for inner in value.values() if isinstance(inner, dict)]
        return None if None in parts else math.fsum(parts) / (len(parts) if part == "mean" else 1)
    return at(value.get(part), rest)


def of_method(file, key, figure):
    """A figure of every seed, in percent if it has no factor such as `1e-6*` in front; and whether there are seeds."""
    content = json.loads((ROOT / file).read_text())
    entries = content.get("results", content)
    if entries is content and key in content:
        runs, seeded = [content[key]], False
    elif key in entries:
        runs, seeded = list(entries[key].values()), True
    else:
        runs = [run for name, run in entries.items() if re.fullmatch(rf"{re.escape(key)} (\| )?\d+", name)]
        seeded = True
    factor, _, path = figure.rpartition("*")
    values = [at(run, path.split(".")) for run in runs]
    return [None if value is None else float(factor or 100) * value for value in values], seeded


def shown_as(file, key, figure):
    """How the page shows it."""
    values, seeded = of_method(file, key, figure)
    known = [value for value in values if value is not None]
    if not values or (not seeded and known != values):
        return "not run"
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} seed{'s' if len(values) > 1 else ''}"
    several = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else " (one seed)" if seeded else ""
    return f"{statistics.fmean(values):.2f}{several}"


METHODS = [
    (title, row[title], row["recorded as"], *source)
    for sources, rows in tables()
    for row in rows
    for title, source in sources.items()
]
SINGLE = [(ours(row), row["recorded in"]) for _, rows in tables() for row in rows if row.get("recorded in")]


SECTIONS = CLAIMS.split("\n## ")[1:]


def rows_of(section):
    rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    assert rows[0][0] == "claim"
    return rows[2:]


def test_every_paper_has_one_table_of_claims():
    papers = ["Dynamic model search", "HypeMeFed", "InclusiveFL", "RaFL", "RecipFL"]
    assert [section.split(" (")[0].splitlines()[0] for section in SECTIONS] == papers
    for section in SECTIONS:
        assert section.count("\n|---|") == 1
        for _, _, ours, verdict, _ in rows_of(section):
            assert verdict in ({""} if ours == "not run" else {"holds", "partly", "not"})
    assert len(METHODS) > 100
    assert len(SINGLE) > 30


@pytest.mark.parametrize(("study", "section"), list(zip(STUDIES, SECTIONS, strict=True)))
def test_a_claims_figures_are_those_of_the_papers_page(study, section):
    """Rounded to as many digits as the claim has."""
    assert f"(../benchmarks/{study}/paper.md)" in section
    there = {Decimal(number.replace(",", "")) for number in NUMBER.findall(PAGES[study])}
    for claim, papers, ours, _, _ in rows_of(section):
        for number in re.findall(r"(?<![\w-])\d+(?:\.\d+)?(?![\w-])", f"{papers}; {ours}"):
            given = Decimal(number)
            assert given in {exact.quantize(given, ROUND_HALF_UP) for exact in there}, (claim, number)


@pytest.mark.parametrize(("title", "shown", "key", "file", "figure"), METHODS)
def test_a_methods_figure_is_the_mean_over_its_recorded_seeds(title, shown, key, file, figure):
    """And what the page says is not run is not recorded."""
    assert re.fullmatch("`[^`]+`", key)
    assert shown == shown_as(file, key.strip("`"), figure)


@pytest.mark.parametrize(("shown", "place"), SINGLE)
def test_a_single_figure_is_what_its_file_holds(shown, place):
    file, path = re.fullmatch(r"`([^`]+)`(?:: (.*))?", place).groups()
    text = (ROOT / file).read_text()
    number = NUMBER.match(shown)[0]
    if file.endswith(".md"):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text)
        return
    value = at(json.loads(text), path.split(" / "))
    decimals = len(number.partition(".")[2])
    assert f"{(100 if '%' in shown else 1) * value:.{decimals}f}" == number


def test_what_is_said_not_to_be_run_has_no_figure_and_the_rest_has_one():
    for sources, rows in tables():
        for row in rows:
            place = row.get("recorded in")
            if place is not None:
                assert (ours(row) == "not run") == (place == "")
            assert not sources or "recorded as" in row
            without_file = [title for title in row if title.startswith("ours") and title not in sources]
            assert place is not None or all(row[title] == "not run" for title in without_file)


def test_every_result_file_that_a_page_names_is_there():
    named = set(re.findall(r"benchmarks/[\w/.-]+\.(?:json|md)", "".join(PAGES.values())))
    assert len(named) > 12
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
