"""docs/simulate.md, docs/your-data.md and docs/choose.md are typed as they stand there, and do what they say."""

import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.programs import run_python
from wildflower.server_app.config import RunConfig
from wildflower.strategies import METHODS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh|python|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`([\w-]+\.toml)`")
# The demo has 30 rounds: three show as much.
FEWER = ["--set", "rounds=3", "--set", "evaluate-every=3"]


def read(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def follow(page, folder):
    """Do what a page says in a folder; return what each command printed."""
    text = read(page)
    printed = {}
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    environment |= {"OMP_NUM_THREADS": "1"}
    for block in BLOCK.finditer(text):
        kind, code = block.groups()
        named = FILE.findall(text[: block.start()].rstrip().rpartition("\n\n")[2])
        if kind == "toml":
            if named:
                (folder / named[-1]).write_text(code)
        elif kind == "python":
            done = run_python("-c", code, folder=folder, environment=environment)
            assert done.returncode == 0, done.stderr
        else:
            for line in code.splitlines():
                program, *words = shlex.split(line)
                if program != "wildflower":
                    assert program in ("make", "export")
                    continue
                fewer = FEWER if words[0] in ("run", "sweep") and "benchmarks/demo/digits.toml" in words else []
                done = run_python("-m", "wildflower", *words, *fewer, folder=folder, environment=environment)
                assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
                printed[line] = done.stdout
    return printed


@pytest.fixture
def here(tmp_path):
    shutil.copytree(ROOT / "benchmarks/demo", tmp_path / "benchmarks/demo")
    return tmp_path


@pytest.mark.thorough
def test_simulate(here):
    printed = follow("simulate.md", here)
    assert "94,410" in printed["wildflower plan mine.toml"]
    assert (here / "runs/first/report.html").is_file()
    assert (here / "comparison.html").is_file()


@pytest.mark.thorough
def test_your_data(here):
    pytest.importorskip("onnxruntime")
    printed = follow("your-data.md", here)
    [plan] = [text for line, text in printed.items() if " plan " in line]
    assert re.search(r"9 board .* 37%", plan)
    [compared] = [text for line, text in printed.items() if " sweep " in line]
    assert "95 % interval" in " ".join(compared.split())
    assert "±" in compared
    assert {"comparison.html", "comparison.csv", "board.onnx"} <= {file.name for file in here.iterdir()}


@pytest.mark.thorough
def test_the_example_of_the_tree(here):
    fedavg, wildflower, in_time = (" ".join(text.split()) for text in follow("choose.md", here).values())
    assert "Tier raspberry-pi gets a model beyond its budget" in fedavg
    assert re.search(r"20 raspberry-pi [\d,]+ 61% .* 20 raspberry-pi [\d. s]+23\.4 s memory", wildflower)
    assert re.search(r"20 raspberry-pi [\d,]+ 52% .* 20 raspberry-pi [\d. s]+19\.9 s memory, time", in_time)


def test_the_number_to_beat_is_a_method():
    settings = tomllib.loads(BLOCK.search(read("choose.md").partition("## The number to beat")[2])[2])
    assert RunConfig.from_run_config(settings).strategy in METHODS


def test_the_tree_has_at_most_ten_lines_and_one_method_each():
    tree = re.search(r"^```text\n(.*?)^```$", read("choose.md"), re.DOTALL | re.MULTILINE)[1].splitlines()
    assert len(tree) <= 10
    for line in tree:
        method, situation = re.split(r"  +", line, maxsplit=1)
        assert method in METHODS
        assert situation
