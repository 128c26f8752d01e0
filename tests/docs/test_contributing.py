"""What contributors' files name: none of them can run here."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(file):
    return yaml.safe_load(file.read_text())


def is_make(command):
    """Whether a command is `make` of a target that is there, and nothing else."""
    word, *targets = command.split()
    return word == "make" and bool(targets) and set(targets) <= TARGETS


def test_the_makefile_has_the_targets_that_are_looked_for():
    assert {"demo", "test", "lint", "wheel"} <= TARGETS
    assert is_make("make demo")
    assert not is_make("make nothing")
    assert not is_make("pip install .")


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_call_make_alone(file):
    jobs = read(file)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert {step["uses"].partition("@")[0] for step in steps if "uses" in step} <= {
        "actions/checkout",
        "actions/setup-python",
    }
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    assert all(map(is_make, commands))
    for job in jobs.values():
        for reference in re.findall(r"\$\{\{ *matrix\.(\w+)", str(job)):
            assert reference in job["strategy"]["matrix"]


def test_tests_and_wheels_are_made_with_every_python_on_both_processors():
    (jobs,) = [read(file)["jobs"] for file in WORKFLOWS]
    assert set(jobs) == {"lint", "test", "wheel"}
    for name in ("test", "wheel"):
        matrix = jobs[name]["strategy"]["matrix"]
        assert [python.partition(".")[2] for python in matrix["python"]] == ["11", "12", "13"]
        assert f">={matrix['python'][0]}" == PROJECT["project"]["requires-python"]
        assert len({runner.endswith("-arm") for runner in matrix["runner"]}) == 2


def test_hooks_before_a_commit_call_make():
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert hooks
    assert all(is_make(hook["entry"]) and hook["language"] == "system" for hook in hooks)


@pytest.mark.parametrize("name", ["bug", "request"])
def test_issue_forms_are_whole(name):
    form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    assert all(field["type"] in ("textarea", "input") and field["attributes"]["label"] for field in form["body"])
    files = re.findall(r"[\w/]+\.md", str(form))
    assert all((ROOT / file).is_file() for file in files)


def test_every_package_of_the_wheel_says_that_it_has_types():
    assert PROJECT["tool"]["importlinter"]["root_packages"] == ["wildflower"]
    assert (ROOT / "wildflower" / "py.typed").is_file()
    assert PROJECT["tool"]["setuptools"]["package-data"]["wildflower"] == ["py.typed"]


def test_the_wheel_has_every_package_and_no_other():
    setuptools = PROJECT["tool"]["setuptools"]
    outside = {folder: name for name, folder in setuptools["package-dir"].items()}
    links = {path.name: path for path in (ROOT / "wildflower").iterdir() if path.is_symlink()}
    assert {name: path.resolve() for name, path in links.items()} == {folder: ROOT / folder for folder in outside}
    found = {"wildflower"}
    for top in ("wildflower", *outside):
        for init in (ROOT / top).rglob("*/__init__.py"):
            if not init.is_relative_to(ROOT / "wildflower") or not links.keys() & set(init.relative_to(ROOT).parts):
                found.add(".".join(init.parent.relative_to(ROOT).parts))
    named = {outside.get(name.split(".")[0], name.split(".")[0]) + name[len(name.split(".")[0]) :] for name in found}
    assert sorted(setuptools["packages"]) == sorted(named | set(outside.values()))
