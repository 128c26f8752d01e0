"""What docs/extending.md says is done in a copy of the code, and trains."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import run_python
from wildflower.plugins import beside

ROOT = Path(__file__).parents[2]
ROOMS = (*beside.OUTSIDE, "wildflower")
PAGE = (ROOT / "docs/extending.md").read_text()
OUTSIDE, INSIDE = PAGE.partition("## Into the project")[::2]
# A block is of the last file that the paragraph before it names, or of the same file as the block before.
BLOCK = re.compile(r"^(`{3,4})(python|diff|toml|markdown|sh)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`([\w/]+\.(?:py|toml|md))`")
RUN = ("mv ", "python -m wildflower.server_app.keys")


def follow(page, root):
    """Do what the page says in a copy of the code."""
    file, end = None, 0
    for block in BLOCK.finditer(page):
        paragraph = page[end : block.start()].rstrip().rpartition("\n\n")[2]
        if named := FILE.findall(paragraph):
            file = root / named[-1]
        end = block.end()
        _, kind, text = block.groups()
        if kind == "sh":
            for line in text.splitlines():
                if line.startswith(RUN):
                    program, *words = line.split()
                    if program == "python":
                        done(root, *words)
                    else:
                        subprocess.run([program, *words], cwd=root, check=True)
        elif kind == "diff":
            lines = text.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            after = "".join(line[1:] for line in lines if line[0] != "-")
            whole = file.read_text()
            assert whole.count(before) == 1, (
                f"docs/extending.md edits lines of {file.name} that are not there:\n{before}"
            )
            file.write_text(whole.replace(before, after))
        else:
            assert not file.exists(), f"docs/extending.md makes {named[-1]}, which is there"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)


def done(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = run_python(*command, folder=folder, environment=environment, timeout_seconds=600)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    return ran.stdout


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A copy of the code, with what the page writes beside an experiment."""
    copy = tmp_path_factory.mktemp("outside")
    for room in (*ROOMS, "docs", "tests"):
        shutil.copytree(ROOT / room, copy / room, symlinks=True)  # with what is compiled, as files keep their times
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / file, copy)
    follow(OUTSIDE, copy)
    return copy


@pytest.fixture(scope="module")
def inside(outside, tmp_path_factory):
    """Another copy, in which all of it has become the project's own."""
    copy = tmp_path_factory.mktemp("inside") / "copy"
    shutil.copytree(outside, copy, symlinks=True, ignore=shutil.ignore_patterns("runs"))
    follow(INSIDE, copy)
    return copy


ROUND = """
import sys
from pathlib import Path
import wildflower.strategies
from wildflower.server_app.app import run
from wildflower.server_app.run_folder import read_rounds
from tests.small_run import simulated_grid
from wildflower.launch.experiment_file import beside, resolve
assert Path(wildflower.strategies.__file__).is_relative_to(Path.cwd()), wildflower.strategies.__file__
experiment, *more = sys.argv[1:]
small = ["rounds=3", "devices-per-round=5", "local-steps=20", "below-smallest=smallest"]
with beside(Path(experiment)) as modules:
    config = resolve(Path(experiment), [*small, *more]).config
    *_, record = read_rounds(run(simulated_grid(), config))
    print(record.strategy, record.task, record.devices_replied, *sorted(record.metrics), *modules)
    print(*record.metrics.values())
    print(record.score)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "said", "minimum"),
    [
        (["run-name=one"], "damped digits 5 distance damped", 0.0),
        (
            ["run-name=two", "task=stripes:TASK", "damped.damping=1"],
            "damped stripes:TASK 5 distance damped stripes perceptron",
            0.6,
        ),
        (["run-name=three", "strategy=counting:Counting"], "counting digits 5 rarest_share counting", 0.0),
    ],
)
def test_a_round_of_what_lies_beside_the_experiment(outside, settings, said, minimum):
    before = {path: path.stat().st_mtime_ns for room in ROOMS for path in (outside / room).rglob("*.py")}
    *_, found, metrics, accuracy = done(outside, "-c", ROUND, "mine/experiment.toml", *settings).splitlines()
    assert found == said
    assert float(accuracy) >= minimum
    if "rarest_share" in said:  # of ten classes
        assert 0 < float(metrics) <= 0.1
    assert before == {path: path.stat().st_mtime_ns for room in ROOMS for path in (outside / room).rglob("*.py")}


@pytest.mark.thorough
def test_the_settings_of_the_page_are_shown_with_what_they_mean(outside):
    table = done(outside, "-m", "wildflower", "config", "--all", "mine/experiment.toml")
    assert "damped.smoothing" in table
    assert re.search(r"damped\.damping +│ 0\.3 +│ experiment", table)


def test_the_command_for_plain_flwr_run_is_a_configuration(outside):
    text = re.search(r"--run-config '([^']*)'", PAGE).group(1).replace("my_package.damped", "damped")
    read = """
import sys, tomllib
from pathlib import Path
from wildflower.server_app.config import RunConfig
sys.path.insert(0, "mine")
values = tomllib.loads(sys.argv[1].replace('" strategy', '"\\nstrategy'))
print(RunConfig.from_run_config(RunConfig().to_dict() | values).params)
"""
    assert done(outside, "-c", read, text).strip() == "damping=0.3 smoothing=0.2"


TESTS = (
    "tests/strategies/test_damped.py",
    "tests/strategies/test_contract.py",
    "tests/server_app/test_config.py",
    "tests/models/test_family.py",
    "tests/docs/test_methods.py",
)
ABOUT_IT = (
    "goes_a_part or (damped and (repeats_itself or device_half or says_first or sections or papers_value)) "
    "or names_of_their or perceptron or every_family or pyproject or name_all_of_them or tables_of_keys"
)


@pytest.mark.thorough
def test_what_the_page_adds_to_the_project_passes_the_tests_that_it_names(inside):
    said = done(inside, "-m", "pytest", "-p", "no:cacheprovider", *TESTS, "-k", ABOUT_IT)
    assert int(re.search(r"(\d+) passed", said).group(1)) >= 30, said


@pytest.mark.thorough
def test_a_round_of_what_has_become_the_projects_own(inside):
    settings = "strategy=damped", "task=stripes", "damped.damping=1", "run-name=four"
    *_, found, _, accuracy = done(inside, "-c", ROUND, "mine/experiment.toml", *settings).splitlines()
    assert found == "damped stripes 5 distance"
    assert float(accuracy) > 0.6


def test_an_edit_of_lines_that_are_gone_is_told(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(AssertionError, match=r"edits lines of a\.py that are not there:\n *y = 1"):
        follow("See\n\nIn `a.py`:\n\n```diff\n y = 1\n+y = 2\n```\n", tmp_path)
