"""The site of `make docs`: it is built without a warning, has its sections and its reference, and fetches nothing."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
import typer

import wildflower
from tests.programs import run_python
from wildflower.cli.command import app
from wildflower.server_app.config import RunConfig
from wildflower.strategies import METHODS

ROOT = Path(__file__).parents[2]
SECTIONS = ["Start", "Choose a method", "Guides", "Methods", "Reference", "How it works", "Evidence"]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_between_files_become_links_of_the_site(hooks):
    text = (
        "[a](../../benchmarks/rafl/README.md#results) [b](../fleets.md), [c](#here), [d](https://x.org/y.md), `[e](f)`"
    )
    assert hooks.with_links_of_the_site(text, "docs/methods/rafl.md") == (
        "[a](../benchmarks/rafl/README.md#results) [b](../fleets.md), [c](#here), [d](https://x.org/y.md), `[e](f)`"
    )
    assert hooks.with_links_of_the_site("[a](docs/plan.md), [b](pyproject.toml)", "README.md") == (
        "[a](plan.md), [b](source/pyproject.toml.md)"
    )
    assert hooks.with_links_of_the_site("[a](../../docs/plan.md)", "benchmarks/bytes/README.md") == "[a](../../plan.md)"


def test_a_link_that_is_called_like_a_page_leads_to_it():
    for page in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md"), ROOT / "README.md"):
        for called, path in re.findall(r"\[([\w-]+\.md)\]\(([^)\s#:]+)[^)]*\)", page.read_text()):
            assert Path(path).name == called, f"{page}: [{called}]({path})"


def test_lists_are_indented_for_python_markdown(hooks):
    assert hooks.with_deeper_lists("- a\n  b\n  - c\n    d\n\nno list\n  kept\n") == (
        "- a\n    b\n    - c\n        d\n\nno list\n  kept\n"
    )
    fenced = "1. a\n\n   ```sh\n   if\n     x\n   ```\n"
    assert hooks.with_deeper_lists(fenced) == "1. a\n\n    ```sh\n    if\n      x\n    ```\n"


def test_a_page_of_a_file_is_made_from_this_file(hooks):
    for path in ("README.md", "docs/fleets.md", "docs/methods/README.md", "benchmarks/README.md", "CHANGELOG.md"):
        assert hooks.file_of(hooks.page_of(path)) == path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "HOME": str(folder)}
    done = run_python("-m", "mkdocs", "build", "--site-dir", str(folder / "site"), environment=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder / "site"


def article(page):
    text = page.read_text(encoding="utf-8")
    return text[text.index("<article") : text.index("</article>")]


@pytest.mark.thorough
def test_the_site_has_its_sections_in_order(site):
    tabs = (site / "index.html").read_text(encoding="utf-8").partition("md-tabs__list")[2].partition("</nav>")[0]
    assert [
        re.sub(r"<[^>]*>|\s+", " ", tab).strip() for tab in re.findall(r"<a [^>]*>(.*?)</a>", tabs, re.DOTALL)
    ] == SECTIONS
    for name in METHODS:
        assert (site / f"methods/{name}.html").is_file()
    for page in (ROOT / "benchmarks").glob("*/README.md"):
        assert (site / page.relative_to(ROOT).with_name("index.html")).is_file()


@pytest.mark.thorough
def test_the_reference_has_every_key_command_and_name(site):
    pages = {page: article(site / f"{page}.html") for page in ("keys", "commands", "python-reference")}
    of_the_run = {key for key in RunConfig().to_dict() if key.partition(".")[0] not in METHODS}
    shared = {name for kind in METHODS.values() for name in kind.shared_params}
    assert [key for key in of_the_run if key.partition(".")[0] not in shared and f">{key}<" not in pages["keys"]] == []
    for name, command in typer.main.get_command(app).commands.items():
        section = pages["commands"].partition(f'<h2 id="{name}">')[2].partition("<h2 ")[0]
        options = [
            o for p in command.params if getattr(p, "help", None) and p.param_type_name == "option" for o in p.opts
        ]
        assert [option for option in options if option not in section] == []
    for name in wildflower.__all__:
        value = getattr(wildflower, name)
        assert f'id="{value.__module__}.{value.__qualname__}"' in pages["python-reference"]


@pytest.mark.thorough
def test_no_page_fetches_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    fetched = re.compile(
        r'<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?="?(?:https?:)?//|<link\b[^>]*href="?(?:https?:)?//'
    )
    assert [page.name for page in pages if fetched.search(page.read_text(encoding="utf-8"))] == []
    styles = [style for style in site.rglob("*.css") if re.search(r"url\(\W?(https?:)?//|@import", style.read_text())]
    assert styles == []


@pytest.mark.thorough
def test_no_list_or_table_is_left_as_text(site):
    for page in site.rglob("*.html"):
        if "source" in page.relative_to(site).parts:
            continue
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", article(page), flags=re.DOTALL)
        assert not re.search(r"<p>[^<]*\n\s*(?:- |\|)", text), page.name
