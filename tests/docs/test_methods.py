"""The pages of methods are complete, their tables are those of the code, and what docs name is there."""

import re
import tomllib
from pathlib import Path

import pytest

from wildflower.server_app.config import RunConfig, run_groups
from wildflower.server_app.keys import DOCS, key_table, pages, with_table
from wildflower.strategies import METHODS

ROOT = DOCS.parent
SHARED = sorted({name for kind in METHODS.values() for name in kind.shared_params})
DEFAULTS = RunConfig().to_dict()
SECTIONS = ["What it is for", "Equations", "Keys", "Where it differs", "Measured"]
PAPER_VALUES = re.compile(r"^\| `([^`]+)` \| .* \| `((?:[^`\\]|\\.)*)` \| .* \|$", re.MULTILINE)
TEXTS = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    + [*DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)
ROOMS = "client_app|models|server_app|strategies|wildflower"


def page_of(name):
    return (DOCS / f"methods/{name}.md").read_text()


def names_of(text):
    """GitHub's anchors of a page's headings."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_method_and_every_shared_part_has_a_page():
    there = {page.stem for page in (DOCS / "methods").glob("*.md")} - {"README", "models"}
    assert there == {*METHODS, *SHARED}


@pytest.mark.parametrize("name", pages())
def test_the_tables_of_keys_are_those_of_the_settings(name):
    page = (DOCS / name).read_text()
    assert with_table(page, pages()[name]) == page, "python -m wildflower.server_app.keys writes the tables anew"


def test_the_keys_of_the_run_and_of_all_methods_are_in_the_tables():
    tables = pages()
    found = {key for table in tables.values() for key in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)}
    assert found == set(DEFAULTS)
    of_the_run = re.findall(r"^\| `([^`]+)` \|", tables["keys.md"], re.MULTILINE)
    assert {key.partition(".")[0] for key in of_the_run if "." in key} == set(run_groups())
    for name, kind in METHODS.items():
        keys = re.findall(r"^\| `([^`]+)` \|", tables[f"methods/{name}.md"], re.MULTILINE)
        assert {key.partition(".")[0] for key in keys} <= {name, *kind.shared_params}
        assert {key for key in DEFAULTS if key.partition(".")[0] in kind.shared_params} <= set(keys)


def test_methods_have_few_keys():
    """Whoever adds one asks first who would set it; a control of an experiment is a plug-in of its benchmark."""
    of_methods = [key for key in DEFAULTS if "." in key and key.partition(".")[0] not in run_groups()]
    assert len(of_methods) <= 75


def test_a_bar_in_a_default_or_a_meaning_ends_no_cell():
    assert key_table({"a.b": "x || y"}, {"a.b": "either | or"}).splitlines()[-1] == (
        r'| `a.b` | `"x \|\| y"` | either \| or |'
    )


def test_a_page_without_marks_is_told():
    with pytest.raises(ValueError, match="between one line <!-- keys -->"):
        with_table("# No marks\n", "")


@pytest.mark.parametrize("name", [*METHODS, *SHARED])
def test_a_page_says_first_whether_its_defaults_are_the_papers_and_which_keys_are_ours(name):
    page = page_of(name)
    head = page.partition("\n## ")[0]
    assert len(head.splitlines()) <= 14
    title = f"(`{name}`)" if name in METHODS else f"(`{name}.*`)"
    assert head.splitlines()[0].endswith(title)
    defaults, ours = re.search(
        r"^\*\*Defaults:\*\* (.*?)^\*\*Keys of ours:\*\* (.*)\Z", head, re.DOTALL | re.M
    ).groups()
    for setting in re.findall(r"`([^`]* = [^`]*)`", defaults):
        key, _, value = setting.partition(" = ")
        given = tomllib.loads(f"value = {value}")["value"]
        RunConfig.from_run_config({"strategy": name if name in METHODS else "heterofl", key: given})
        assert given != DEFAULTS[key], f"{setting} is the default"
    for key in re.findall(r"`([^`]*)`", defaults + ours):
        key = key.partition(" = ")[0]
        assert key in DEFAULTS or (key.endswith(".*") and key[:-2] in SHARED), f"there is no key {key}"
    own = [key for key in re.findall(r"`([^`]*)`", ours) if not key.endswith(".*")]
    assert all(key.startswith(f"{name}.") for key in own)


@pytest.mark.parametrize("name", [*METHODS, *SHARED])
def test_a_page_has_its_sections_in_order(name):
    assert re.findall(r"^## (.*)$", page_of(name), re.MULTILINE) == SECTIONS
    equations = page_of(name).partition("## Equations")[2].partition("\n## ")[0]
    assert re.search(r"^```text\n.*^```$", equations, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", [*METHODS, *SHARED])
def test_a_page_has_the_papers_value_of_every_key_beside_the_default(name):
    said = dict(PAPER_VALUES.findall(page_of(name).partition("<!-- /keys -->")[2]))
    defaults = {key: value for key, value in DEFAULTS.items() if key.startswith(f"{name}.")}
    here = {key: tomllib.loads("value = " + value.replace(r"\|", "|"))["value"] for key, value in said.items()}
    assert here == defaults


@pytest.mark.parametrize("table", ["README.md", "docs/methods/README.md"])
def test_the_tables_of_methods_name_all_of_them(table):
    text = (ROOT / table).read_text()
    prefix = "docs/methods/" if table == "README.md" else ""
    rows = "".join(line for line in text.splitlines(keepends=True) if line.startswith("| "))
    assert set(re.findall(r"\]\(([^)]*)\.md\)", rows)) >= {f"{prefix}{name}" for name in METHODS}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page):
    text = page.read_text()
    without_code = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} is not there"
        if anchor:
            assert anchor in names_of(file.read_text()), f"{target}: there is no such heading"


# extending.md makes the files that it names, and the changes are also of what was.
@pytest.mark.parametrize(
    "page",
    [page for page in TEXTS if page.name not in ("extending.md", "CHANGELOG.md")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_file_of_ours_that_a_page_names_is_there(page):
    text = page.read_text()
    named = set(re.findall(rf"`((?:{ROOMS}|benchmarks|deploy|docs|tests)/[\w/.-]+\.(?:py|toml|md|json|conf))`", text))
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_picture_of_a_round_is_there_and_needs_nothing_else():
    picture = (DOCS / "images/round.svg").read_text()
    assert "docs/images/round.svg" in (ROOT / "README.md").read_text()
    assert picture.startswith("<svg")
    assert not re.search(r"<script|href=|url\(http", picture)


def test_there_is_no_page_of_all_methods_any_more():
    assert not Path(DOCS / "methods.md").exists()
