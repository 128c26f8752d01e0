import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from wildflower.cli.command import app
from wildflower.server_app.config import descriptions
from wildflower.server_app.journal import Journal

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str | Path, columns: int = 200) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)})


def a_run(run_dir: Path, accuracy: float, seed: int = 1, *, finished: bool = False) -> Path:
    config = {"strategy": "heterofl", "task": "digits", "fleet": "pis", "seed": seed, "run-name": run_dir.name}
    journal = Journal.open(run_dir, config, resume=False)
    journal.write_round(
        {
            "round": 1,
            "strategy": "heterofl",
            "task": "digits",
            "metric": "accuracy",
            "higher_is_better": True,
            "score": accuracy,
            "loss": 1.0,
            "score_by_tier": {"small": accuracy / 2},
            "score_by_exit": None,
            "personal_score": None,
            "personal_score_by_tier": None,
            "personal_devices": None,
            "personal_failed": None,
            "devices_sampled": 1,
            "devices_replied": 1,
            "devices_failed": 0,
            "devices_refused": 0,
            "devices_bounded": 0,
            "devices_state_lost": 0,
            "devices_below_smallest": 0,
            "training_bytes_down": 100,
            "training_bytes_up": 100,
            "statistics_bytes_down": 0,
            "statistics_bytes_up": 0,
            "scoring_bytes_down": 0,
            "memory_utilisation": None,
            "bandwidth_utilisation": None,
            "distinct_architectures": 1,
            "simulated_seconds": 5.0,
            "wall_seconds": 1.0,
            "server_seconds": {
                "assign": 0,
                "payload": 0,
                "absorb": 0,
                "finish": 0,
                "evaluate": 0,
            },
            "metrics": {},
            "server_peak_rss_bytes": 0,
        },
        [],
    )
    if finished:
        journal.finish("finished")
    return run_dir


def test_help_starts_without_anything_heavy():
    heavy = "torch, flwr, numpy, pydantic, psutil, wildflower.server_app.journal"
    code = f"import sys, wildflower.cli.command; print([m for m in '{heavy}'.split(', ') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    shown = invoke("--help")
    assert shown.exit_code == 0
    for command in ("run", "report", "compare", "config"):
        assert f" {command} " in shown.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(("argument", "code", "stream"), [("--help", 0, "stdout"), ("--no-such", 2, "stderr")])
def test_the_command_ends_with_its_code_after_everything_that_is_to_be_done_at_exit(argument, code, stream):
    # What a subcommand's modules register is called first.
    end = f"""
import atexit, os, sys, wildflower.cli.command

leave, started = os._exit, wildflower.cli.command.app

def app():
    atexit.register(print, "at exit")
    started()

sys.argv = ["wildflower", "{argument}"]
os._exit = lambda code: (os.write(1, b"no object is freed"), leave(code))
wildflower.cli.command.app = app
wildflower.cli.command.main()
"""
    done = subprocess.run([sys.executable, "-c", end], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert argument in getattr(done, stream)
    assert done.stdout.endswith("at exit\nno object is freed")


def test_versions_are_those_of_what_is_installed(monkeypatch):
    shown = invoke("--version")
    assert shown.exit_code == 0
    lines = dict(line.split(" ", 1) for line in shown.stdout.splitlines())
    assert list(lines) == ["wildflower", "flwr", "torch", "python"]
    assert (lines["flwr"], lines["torch"]) == (version("flwr"), version("torch"))
    monkeypatch.setattr("wildflower.server_app.journal.version", not_there)
    assert "torch not installed\n" in invoke("--version").stdout


def not_there(package):
    raise PackageNotFoundError(package)


def test_report_of_a_run_that_goes_on(tmp_path):
    run_dir = a_run(tmp_path / "one", 0.5)
    shown = invoke("report", run_dir)
    assert shown.exit_code == 0
    assert "unfinished" in shown.stdout
    assert "50 %" in shown.stdout
    assert "unfinished" in (run_dir / "report.html").read_text()
    assert not (run_dir / "summary.json").exists()


def test_only_a_fleet_has_simulated_time(tmp_path):
    run_dir = a_run(tmp_path / "one", 0.5)
    config = json.loads((run_dir / "config.json").read_text())
    for fleet, there in (("five-memories", True), ("", False)):
        config["config"]["fleet"] = fleet
        (run_dir / "config.json").write_text(json.dumps(config))
        assert ("simulated time" in invoke("report", run_dir).stdout) is there
        assert ("Simulated time" in (run_dir / "report.html").read_text()) is there


@pytest.mark.parametrize(
    ("command", "words"),
    [("report", "is not the folder of a run"), ("compare", "is neither the folder of a run")],
)
def test_a_folder_without_a_run_is_named(tmp_path, command, words):
    shown = invoke(command, tmp_path)
    assert shown.exit_code == 1
    assert f"{tmp_path} {words}" in shown.stderr


def test_compare_takes_what_a_sweep_and_a_run_have_left_as_the_readme_has_it(tmp_path):
    a_run(tmp_path / "alone", 0.5, 1, finished=True)
    for seed in (2, 3):
        a_run(tmp_path / "digits-sweep" / f"seed={seed}", 0.5, seed, finished=True)
    (tmp_path / "digits-sweep" / "logs").mkdir()
    shown = invoke("compare", *sorted(tmp_path.glob("*/")))
    assert shown.exit_code == 0
    assert "1-3" in shown.stdout
    inside = invoke("compare", *sorted((tmp_path / "digits-sweep").glob("*/")))
    assert (inside.exit_code, inside.stderr) == (0, "")
    assert "2-3" in inside.stdout


def test_compare_says_what_it_leaves_out_because_it_is_broken(tmp_path):
    for name in ("good", "bad"):
        a_run(tmp_path / name, 0.5, finished=True)
    (tmp_path / "bad" / "config.json").write_text("{")
    shown = invoke("compare", tmp_path / "good", tmp_path / "bad")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "Left out" in shown.stdout
    assert "it is not JSON" in shown.stdout
    assert invoke("compare", tmp_path / "bad").exit_code == 1


def test_compare_prints_tables_and_writes_a_page(tmp_path):
    runs = [a_run(tmp_path / name, score, seed, finished=True) for name, score, seed in [("a", 0.5, 1), ("b", 0.7, 2)]]
    shown = invoke("compare", *runs, "--html", tmp_path / "page.html", "--target", "0.6", columns=80)
    assert shown.exit_code == 0
    assert "60.0 ± 14.1" in shown.stdout
    assert "60 %" in shown.stdout
    tables = shown.stdout.partition("Plots: ")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert (tmp_path / "page.csv").read_text().startswith("run,method,seed,round,")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_config_prints_every_value_with_its_source(tmp_path):
    experiment = tmp_path / "experiment.toml"
    experiment.write_text("rounds = 7\n")
    shown = invoke("config", experiment, "--set", "alpha=0.25")
    assert shown.exit_code == 0
    sources = {
        cells[1].strip(): (cells[2].strip(), cells[3].strip())
        for cells in (line.split("│") for line in shown.stdout.splitlines())
        if len(cells) == 6
    }
    assert sources["rounds"] == ("7", "experiment.toml")
    assert sources["alpha"] == ("0.25", "--set")
    assert sources["seed"][1] == "default"


def test_config_says_what_keys_mean_and_shows_only_what_was_changed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = invoke("config", "--changed", "--set", "rounds=7", "--set", "alpha=0.5", "--set", "workers=2")
    assert shown.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    assert rows == [["rounds", "7", "--set", "Rounds of the whole run"]]


def test_config_shows_every_key_with_what_it_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # a description in one line
    shown = CliRunner().invoke(app, ["config", "--all"], env={"COLUMNS": "500"})
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    told = {key: meaning for key, _, _, meaning in rows}
    assert told == descriptions()
    assert "Settings of fedprox" in shown.stdout
    assert told["alpha"] == "Concentration of the Dirichlet partition: smaller is more unequal"
    assert told["distillation.batch-size"] == "Noise inputs per step of distillation"


def test_config_shows_first_what_people_set(monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")

    def keys(*options):
        firsts = [line.split("│")[1].strip() for line in invoke("config", *options).stdout.splitlines() if "│" in line]
        return [first for first in firsts if first]  # a long meaning takes several lines

    assert "learning-rate" in keys()
    assert len(keys()) <= 25
    assert keys("--set", "fedprox.mu=0.3", "--set", "rounds=7") == [*keys(), "fedprox.mu"]


def test_a_wrong_setting_is_an_error():
    shown = invoke("config", "--set", "aplha=1")
    assert shown.exit_code == 1
    assert "'alpha'" in shown.stderr


def test_run_needs_an_experiment_that_is_there(tmp_path):
    shown = invoke("run", tmp_path / "nowhere.toml")
    assert shown.exit_code == 1
    assert "nowhere.toml" in shown.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--superlink", "fl.example:8000"], "--root-certificates FILE, or --insecure"),
        (["--superlink", "fl.example:8000", "--insecure", "--root-certificates", "ca.crt"], "or --insecure"),
        (["--insecure"], "belong to --superlink"),
        (["--superlink", "127.0.0.1", "--insecure"], "--superlink 127.0.0.1: must be HOST:PORT"),
        (["--superlink", "fl.example:many", "--insecure"], "must be HOST:PORT"),
        (["--superlink", "http://fl.example:8000", "--insecure"], "must be HOST:PORT"),
    ],
)
def test_a_superlink_is_reached_with_tls_or_expressly_without(options, words):
    shown = invoke("run", "experiment.toml", *options)
    assert shown.exit_code == 1
    assert words in shown.stderr
