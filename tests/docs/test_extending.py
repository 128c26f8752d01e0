import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("client_app", "devices", "messages", "models", "server_app", "strategies", "tasks", "tests")
# A block is of the last file that the paragraph before it names, or of the same file as the block before.
BLOCK = re.compile(r"```(python|diff)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"`([\w/]+\.(?:py|toml))`")


def follow(page, root):
    """Do what the page says in a copy of the code."""
    file, end = None, 0
    for block in BLOCK.finditer(page):
        paragraph = page[end : block.start()].rstrip().rpartition("\n\n")[2]
        if named := FILE.findall(paragraph):
            file = root / named[-1]
        end = block.end()
        kind, text = block.groups()
        if kind == "python":
            assert not file.exists(), f"docs/extending.md makes {named[-1]}, which is there"
            file.write_text(text)
            continue
        lines = text.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        whole = file.read_text()
        assert whole.count(before) == 1, f"docs/extending.md edits lines of {file.name} that are not there:\n{before}"
        file.write_text(whole.replace(before, after))


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    copy = tmp_path_factory.mktemp("extended")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    follow((ROOT / "docs/extending.md").read_text(), copy)
    return copy


def run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(folder), "WILDFLOWER_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


TESTS = (
    "tests/strategies/test_damped.py",
    "tests/strategies/test_contract.py",
    "tests/server_app/test_config.py",
    "tests/models/test_family.py",
)
ABOUT_IT = (
    "goes_a_part or (damped and (repeats_itself or docstring)) or names_of_their or perceptron or every_family "
    "or pyproject"
)


def test_what_the_page_adds_passes_the_tests_that_it_names(extended):
    said = run(extended, "-m", "pytest", "-p", "no:cacheprovider", *TESTS, "-k", ABOUT_IT)
    assert int(re.search(r"(\d+) passed", said).group(1)) >= 10, said


ROUND = """
from pathlib import Path
import strategies
from tests.small_run import METHODS, simulated_grid, small_config, started
assert Path(strategies.__file__).is_relative_to(Path.cwd()), strategies.__file__
wanted = {"task": "stripes", "family": "", "rounds": 1, "local-steps": 20, "below-smallest": "smallest"}
strategy, scorer = started(small_config(Path(), **METHODS["damped"], **wanted))
record = strategy.run_round(simulated_grid(), 1, scorer).record
print(strategy.name, strategy.family.name, record["task"], record["devices_replied"], record["score"] > 0.4)
"""


def test_a_round_of_the_new_method_with_the_new_family_on_the_new_task(extended):
    assert run(extended, "-c", ROUND).splitlines()[-1] == "damped perceptron stripes 4 True"


def test_an_edit_of_lines_that_are_gone_is_told(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(AssertionError, match=r"edits lines of a\.py that are not there:\n *y = 1"):
        follow("See\n\nIn `a.py`:\n\n```diff\n y = 1\n+y = 2\n```\n", tmp_path)
