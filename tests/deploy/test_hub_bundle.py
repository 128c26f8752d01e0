"""The folder for Flower's app hub: what the hub would refuse is refused here, and the app runs from it alone."""

import os
import runpy
from pathlib import Path

import pytest
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_description, _validate_files
from flwr.cli.config_utils import load_and_validate

from tests.programs import run_python

ROOT = Path(__file__).parents[2]
HUB = runpy.run_path(str(ROOT / "deploy/hub_bundle.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return HUB["make"](tmp_path_factory.mktemp("hub") / "wildflower")


def test_flower_would_publish_it_whole(folder):
    config, _ = load_and_validate(folder / "pyproject.toml", check_module=False)
    _validate_description(config["project"]["description"])
    published = _collect_file_paths(folder)
    _validate_files(published)
    assert {file.relative_to(folder) for file in published} == {
        file.relative_to(folder) for file in folder.rglob("*") if file.is_file()
    }
    assert {"README.md", "LICENSE", "pyproject.toml"} <= {file.name for file in published}


def test_readme_leads_nowhere_that_is_not_there(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "<img" not in text
    assert "](docs/" not in text
    assert "How to choose" in text or "how to choose" in text


def test_readme_leads_to_the_repository_where_its_address_is_known():
    picture = '<picture>\n<source srcset="d">\n<img alt="e" src="f.svg">\n</picture>'
    text = f"[a](docs/a.md) [b](https://x.org) ![c](docs/c.svg)\n{picture}"
    address = "https://host/owner/wildflower/blob/main"
    assert HUB["readme"](text, address) == (
        f"[a]({address}/docs/a.md) [b](https://x.org) ![c]({address}/docs/c.svg?raw=true)\n"
        f"![e]({address}/f.svg?raw=true)"
    )
    assert HUB["readme"](text, "") == "a [b](https://x.org) *c*\n*e*"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("picture.svg", b"<svg/>", "the hub takes .md, .py, .toml and LICENSE"),
        ("large.py", b"#" * 1_000_001, "1,000,001 bytes; the hub takes 1,000,000 of a file"),
        ("latin.py", "# ä".encode("latin-1"), "can't decode"),
    ],
)
def test_what_the_hub_refuses_is_told(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        HUB["check"](tmp_path)


def test_too_many_files_are_told(tmp_path):
    for number in range(1_001):
        (tmp_path / f"{number}.py").touch()
    with pytest.raises(ValueError, match="1001 files; the hub takes 1000"):
        HUB["check"](tmp_path)


RUN = """
import sys
from pathlib import Path
import wildflower
assert Path(wildflower.__file__).is_relative_to(Path(sys.argv[1])), wildflower.__file__
from wildflower.client_app.app import app as client
from wildflower.server_app.app import app as server
import wildflower.models.cnn, wildflower.strategies.wildflower
"""


@pytest.mark.thorough
def test_both_apps_are_imported_from_it_alone(folder, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = run_python("-c", RUN, str(folder), folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("library", ["sklearn"])
def test_a_missing_library_is_named(folder, tmp_path, library):
    """As with the base dependencies alone."""
    code = f"""
import sys
sys.modules[{library!r}] = None
from wildflower.tasks.task import TaskSpec, load_task
load_task(TaskSpec(name="digits", devices=2))
"""
    environment = {**os.environ, "PYTHONPATH": str(folder), "WILDFLOWER_CACHE": str(tmp_path)}
    done = run_python("-c", code, folder=tmp_path, environment=environment)
    assert done.returncode != 0
    assert f"needs {library}, which is not installed" in done.stderr
    assert "wildflower[server]" in done.stderr
