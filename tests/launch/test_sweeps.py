"""Sweeps, with a stand-in for the processes of `wildflower run` that writes a run's journal at once."""

import re

import pytest
from typer.testing import CliRunner

import wildflower as wf
from wildflower.cli.command import app
from wildflower.launch import sweeps
from wildflower.launch.experiment_file import SettingsError
from wildflower.server_app.run_folder import read_config, read_summary

EXPERIMENT = 'task = "digits"\nrounds = 1\ndevices = 20\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    return tmp_path


def swept(folder, *arguments):
    command = ["sweep", str(folder / "exp.toml"), "--folder", str(folder / "out"), *arguments]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("text", "seeds"), [("1-3", [1, 2, 3]), ("4", [4]), ("1, 4 ,7-8,1", [1, 4, 7, 8]), ("0-0", [0])]
)
def test_seeds(text, seeds):
    assert sweeps.parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1-99999", "1.5", "1 2", "9" * 30])
def test_seeds_that_are_none(text):
    with pytest.raises(SettingsError, match="--seeds"):
        sweeps.parse_seeds(text)


def test_a_grid_is_of_keys_and_their_values():
    texts = ["strategy=heterofl, fedrolex", 'widths="1, 0.5","1, 0.25"']
    assert sweeps.parse_grid(texts) == {"strategy": ["heterofl", "fedrolex"], "widths": ["1, 0.5", "1, 0.25"]}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["strategy"], "not of the form"),
        (["=a,b"], "not of the form"),
        (["strategy="], "not of the form"),
        (["strategy=a", "strategy=b"], "given twice"),
        (["strategy=a,,b"], "empty"),
        (["strategy=a,a"], "twice"),
    ],
)
def test_grids_that_are_none(texts, words):
    with pytest.raises(SettingsError, match=words):
        sweeps.parse_grid(texts)


def test_names_tell_runs_apart_and_are_names_of_folders():
    assert sweeps.run_name(["strategy=heterofl", "seed=1"]) == "strategy=heterofl,seed=1"
    assert sweeps.run_name(["fleet=/a b/c.toml"]) == "fleet=_a_b_c.toml"
    long = [sweeps.run_name([f"widths={'1,' * 100}{last}"]) for last in (1, 2)]
    assert long[0] != long[1]
    assert max(map(len, long)) <= sweeps.MAX_NAME_LETTERS


def test_every_value_is_run_with_one_seed_before_the_next_and_laid_side_by_side(folder, runs):
    done = swept(
        folder, "--seeds", "1-2", "--grid", "strategy=heterofl,fedrolex", "--set", "batch-size=7", "--jobs", "2"
    )
    assert done.exit_code == 0, done.output
    asked = [(call["strategy"], call["seed"], call["batch-size"]) for call in runs.asked]
    assert asked == [(s, seed, "7") for seed in ("1", "2") for s in ("heterofl", "fedrolex")]
    run_dir = folder / "out" / "strategy=fedrolex,seed=2"
    assert read_config(run_dir).config["strategy"] == "fedrolex"
    assert f"4/4 {run_dir.name}: delivered accuracy 60 % in" in done.output
    # Two rows of two seeds each, which deliver 50 % and 60 %; the whole models have 60 % and 70 %.
    assert len(re.findall(r"1-2 .* 55\.0 ± 7\.1 .* 65\.0 ± 7\.1 ", done.output)) == 2


ROWS = """
["rate-0.1"]  # a dot is no level here
strategy = "fedavg"
learning-rate = 0.1
fedavg.use = "all-small"
widths = [1, 0.5]

[fedrolex]
strategy = "fedrolex"
seeds = [2]

[also-fedrolex.wildflower]  # which fedrolex does not read
levels = 3
"""


def with_rows(folder, text=ROWS):
    (folder / "rows.toml").write_text(text)
    return "--rows", str(folder / "rows.toml")


def test_rows_are_named_settings_with_all_or_some_of_the_seeds(folder, runs):
    done = swept(folder, "--seeds", "1-2", *with_rows(folder), "--set", "batch-size=7")
    assert done.exit_code == 0, done.output
    names = ["rate-0.1,seed=1", "also-fedrolex,seed=1", "rate-0.1,seed=2", "fedrolex,seed=2", "also-fedrolex,seed=2"]
    assert [call["run-name"] for call in runs.asked] == names
    config = read_config(folder / "out" / "rate-0.1,seed=2").config
    own = {"strategy": "fedavg", "learning-rate": 0.1, "fedavg.use": "all-small", "widths": "1, 0.5"}
    assert config.items() >= (own | {"seed": 2, "batch-size": 7}).items()
    assert read_config(folder / "out" / "also-fedrolex,seed=1").config["wildflower.levels"] == 3


def test_rows_keep_their_names_in_the_table(folder, runs):
    """Also two of the same settings, which would be one row if they had none."""
    rows = '[plain]\nstrategy = "fedrolex"\n[again]\nstrategy = "fedrolex"\n[other]\nstrategy = "heterofl"\n'
    done = swept(folder, "--seeds", "1-2", *with_rows(folder, rows))
    assert done.exit_code == 0, done.output
    for name in ("plain", "again", "other"):
        assert re.search(rf"^. {name} .* 1-2 .* 55\.0 ± 7\.1 ", done.output, re.MULTILINE)
    assert "Left out" not in done.output
    assert re.search(r"other .* strategy = heterofl", done.output)


def test_rows_with_a_grid(folder, runs):
    rows = "[slow]\nlearning-rate = 0.01\n[fast]\nlearning-rate = 0.1\nseeds = 1\n"
    done = swept(folder, "--seeds", "1-2", *with_rows(folder, rows), "--grid", "alpha=0.1,1")
    assert done.exit_code == 0, done.output
    cells = ["slow,alpha=0.1", "slow,alpha=1", "fast,alpha=0.1", "fast,alpha=1"]
    names = [f"{cell},seed=1" for cell in cells] + [f"{cell},seed=2" for cell in cells[:2]]
    assert [call["run-name"] for call in runs.asked] == names
    assert "slow alpha=0.1" in done.output
    assert "fast alpha=1.0" in done.output


def test_a_row_that_sets_workers_has_them(folder, runs):
    rows = "[one]\nworkers = 7\n[usual]\n"
    assert swept(folder, "--seeds", "1", *with_rows(folder, rows), "--jobs", "256").exit_code == 0
    assert [call["workers"] for call in runs.asked] == ["7", "1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no row"),
        ('strategy = "heterofl"', "strategy = 'heterofl' belongs to no row"),
        ("[a\n", "is not TOML"),
        ("[a]\n[a]\n", "('a',) twice"),
        ('["a/b"]\n', "cannot be called 'a/b'"),
        ('[".."]\n', "cannot be called '..'"),
        ('["a, b"]\n', "cannot be called 'a, b'"),
        ("[rate-0.1]\nalpha = 1\n[rate-0.5]\n", 'a name with a dot stands in quotes: ["rate-0.1"]'),
        ("[a]\nstrategi = 1\n", "(row a): unknown key 'strategi'"),
        ("[a]\nrounds = 'many'\n", "(row a): rounds = 'many': must be a whole number"),
        ("[a]\nlearning-rate = '0.1'\n", "(row a): learning-rate = '0.1': must be"),
        ("[a]\nbatch-size = 1979-05-27\n", "row a: batch-size = datetime.date(1979, 5, 27): must be"),
        ("[a]\nseeds = [1.5]\n", "row a: seeds must be whole numbers"),
        ("[a]\nseeds = []\n", "row a: seeds must be whole numbers"),
        ("[a]\nseeds = '1-3'\n", "row a: seeds must be whole numbers"),
        ("[a]\nseeds = [9]\n", "no row runs with any of these seeds"),
        ("[a]\nseed = 1\n", "seed cannot be in row a: give the seeds as such"),
        ("[a]\nrun-name = 'x'\n", "run-name cannot be in row a"),
        ("[a]\nalpha = 1.0\n", "alpha is in the grid and in row a"),
        ("[a]\nbatch-size = 8\n", "batch-size is given for all runs"),
    ],
)
def test_rows_that_cannot_be(text, words, folder, runs):
    done = swept(folder, *with_rows(folder, text), "--grid", "alpha=0.5,1", "--set", "batch-size=7")
    assert done.exit_code == 1
    assert words in " ".join(done.output.split())
    assert runs.asked == []
    assert not (folder / "out").exists()


def test_a_file_of_rows_that_is_not_there(folder):
    done = swept(folder, "--rows", str(folder / "none.toml"))
    assert done.exit_code == 1
    assert "cannot read the rows" in done.output


def test_a_row_of_other_settings_is_refused_in_the_folder_of_its_runs(folder, runs):
    assert swept(folder, "--seeds", "1", *with_rows(folder, "[a]\nalpha = 0.1\n[b]\n")).exit_code == 0
    done = swept(folder, "--seeds", "1", *with_rows(folder, "[a]\nalpha = 0.2\n[b]\n[c]\n"))
    assert done.exit_code == 1
    assert "alpha was 0.1 and is 0.2" in done.output
    assert len(runs.asked) == 2


def test_what_is_finished_is_not_run_again(folder, runs):
    assert swept(folder, "--seeds", "1-2").exit_code == 0
    done = swept(folder, "--seeds", "1-3")
    assert done.exit_code == 0
    assert "3 runs" in done.output
    assert "2 of them finished" in done.output
    assert [call["seed"] for call in runs.asked] == ["1", "2", "3"]


@pytest.mark.parametrize("file", ["summary.json", "rounds.jsonl"])
def test_a_broken_file_of_a_run_is_told_in_words(file, folder, runs):
    swept(folder, "--seeds", "1")
    (folder / "out" / "seed=1" / file).write_text("{}\n")
    told = swept(folder, "--seeds", "1,2")
    assert told.exit_code == 1
    assert f"{file}" in told.stderr
    assert "is missing (and" in told.stderr
    assert len(runs.asked) == 1


def test_a_run_that_fails_leaves_the_others_alone_and_is_tried_again(folder, runs):
    runs.fails = "seed=2"
    done = swept(folder, "--seeds", "1-3")
    assert done.exit_code == 1
    assert "seed=2: failed; see" in done.output
    assert "no data are here" in done.output
    assert "seed=3: delivered accuracy 70 % in" in done.output
    runs.fails = ""
    assert swept(folder, "--seeds", "1-3").exit_code == 0
    assert [call["seed"] for call in runs.asked] == ["1", "2", "3", "2"]


def test_settings_that_no_run_can_start_with_are_said_before_any_is_started(folder, runs):
    done = swept(folder, "--grid", "strategy=heterofl,fedrolecks")
    assert done.exit_code == 1
    assert "fedrolecks" in done.output
    done = swept(folder, "--grid", "no-such-key=1,2")
    assert done.exit_code == 1
    assert "no-such-key" in done.output
    done = swept(folder, "--grid", "rounds=1,many")
    assert done.exit_code == 1
    assert "rounds" in done.output
    done = swept(folder, "--set", "seed=3")
    assert done.exit_code == 1
    assert "seed is given for all runs" in done.output
    for key, words in (("seed=1,2", "give the seeds as such"), ("run-name=a", "sets it for every run")):
        done = swept(folder, "--grid", key)
        assert done.exit_code == 1
        assert words in done.output
    assert runs.asked == []
    assert not (folder / "out").exists()


def test_values_whose_folders_would_have_one_name_are_refused(folder, runs):
    done = swept(folder, "--seeds", "1", "--grid", "data-dir=p/q,p_q")
    assert done.exit_code == 1
    assert "two runs of the sweep would have the folder 'data-dir=p_q,seed=1'" in " ".join(done.output.split())
    assert runs.asked == []


def test_a_folder_with_runs_of_other_settings_is_refused(folder, runs):
    assert swept(folder, "--seeds", "1").exit_code == 0
    done = swept(folder, "--seeds", "1", "--set", "batch-size=7")
    assert done.exit_code == 1
    assert "batch-size was" in done.output
    assert "another folder: --folder, in Python folder=" in done.output
    assert len(runs.asked) == 1


def check_refused_once_edited(folder, runs, settings, edit, words):
    """A sweep goes on with more seeds, until somebody edits what its runs were made with."""
    own = [part for setting in settings for part in ("--set", setting)]
    assert swept(folder, "--seeds", "1", *own).exit_code == 0
    assert swept(folder, "--seeds", "1-2", *own).exit_code == 0
    edit()
    done = swept(folder, "--seeds", "1-3", *own)
    assert done.exit_code == 1
    assert words in done.output
    assert "another folder" in done.output
    assert [call["seed"] for call in runs.asked] == ["1", "2"]


def test_a_folder_with_runs_of_another_version_of_a_method_is_refused(folder, runs):
    method = "from wildflower.strategies.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n"
    module = folder / "of_mine.py"
    module.write_text(method)

    def edit():
        module.write_text(method + "    # It does something else now.\n")

    words = "of_mine from outside the project is not as when the run began"
    check_refused_once_edited(folder, runs, ["strategy=of_mine:Mine"], edit, words)


def test_a_folder_with_runs_over_another_fleet_is_refused(folder, runs):
    fleet = folder / "mine.toml"
    group = '[[group]]\nname = "{name}"\nkind = "x86-64"\ncount = 20\nmemory = "1 GB"\nspeed = 1\n'
    fleet.write_text(group.format(name="a"))

    def edit():
        fleet.write_text(group.format(name="b"))

    words = "or a trace that it names is not what it was"
    check_refused_once_edited(folder, runs, [f"fleet={fleet}"], edit, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('fleet = "{folder}/none.toml"', "none.toml"),
        ('fleet = "{folder}/mine.toml"\ndevices = 17', "add up to 20, and devices = 17"),
        ('initial.weights = "{folder}/none.pth"', "row wrong: there is no file or folder"),
        ('fleet = ""', "row wrong: fleet = '': devices are simulated here and need a fleet"),
    ],
)
def test_what_a_fleet_or_first_weights_show_is_told_before_any_run(text, words, folder, runs):
    (folder / "mine.toml").write_text(
        '[[group]]\nname = "a"\nkind = "x86-64"\ncount = 20\nmemory = "1 GB"\nspeed = 1\n'
    )
    rows = f'[right]\nfleet = "{folder}/mine.toml"\n[wrong]\n{text.format(folder=folder)}\n'
    done = swept(folder, "--seeds", "1", *with_rows(folder, rows))
    assert done.exit_code == 1
    assert words in " ".join(done.output.split())
    assert not runs.asked


def test_a_folder_with_runs_over_data_that_were_edited_is_refused(folder, runs):
    runs.records_data = True
    data = folder / "data"
    data.mkdir()
    rows = [f"{number},{number * 2},{'ab'[number % 2]}" for number in range(60)]
    (data / "train.csv").write_text("\n".join(["x,y,label", *rows]))
    (data / "test.csv").write_text("\n".join(["x,y,label", *rows[:20]]))
    columns = "columns = ['x', 'y'], label = 'label', train = 'train.csv', test = 'test.csv'"
    settings = ("task=table", f"task-arguments={columns}", f"data-dir={data}", "partition=iid", "devices=20")

    def edit():
        (data / "train.csv").write_text("\n".join(["x,y,label", *rows, "7,7,a"]))

    check_refused_once_edited(folder, runs, settings, edit, "training examples: 60 then, 61 now")


def test_a_grid_over_a_key_that_no_run_reads_is_refused(folder, runs):
    done = swept(folder, "--seeds", "1", "--grid", "fedprox.mu=0.1,1")
    assert done.exit_code == 1
    assert "--grid fedprox.mu: no run of the sweep reads this key" in done.output
    assert not runs.asked


def test_what_would_be_the_same_run_again_is_run_once(folder, runs):
    """HeteroFL does not read fedprox.mu, and 0.1 is 0.10."""
    done = swept(folder, "--seeds", "1", "--grid", "strategy=heterofl,fedprox", "--grid", "fedprox.mu=0.1,0.10,1")
    assert done.exit_code == 0, done.output
    assert "3 runs" in done.output
    asked = [(call["strategy"], call["fedprox.mu"]) for call in runs.asked]
    assert asked == [("heterofl", "0.1"), ("fedprox", "0.1"), ("fedprox", "1")]


def test_a_grid_over_a_key_of_a_method_from_outside_goes_with_other_methods(folder, runs):
    """FedAvg is run once, as beside methods of the project."""
    (folder / "of_soft.py").write_text(
        "from wildflower.strategies.fedprox import FedProx, FedProxParams\n\n\n"
        "class SoftParams(FedProxParams):\n    pass\n\n\n"
        "class Soft(FedProx):\n    params_type = SoftParams\n"
    )
    (folder / "exp.toml").write_text(EXPERIMENT + "[of-soft]\nmu = 0.5\n")
    compared = "strategy=of_soft:Soft,fedavg"
    done = swept(folder, "--seeds", "1", "--grid", compared, "--grid", "of-soft.mu=0.1,1")
    assert done.exit_code == 0, done.output
    assert "3 runs" in done.output
    asked = [(call["strategy"], call.get("of-soft.mu")) for call in runs.asked]
    assert asked == [("of_soft:Soft", "0.1"), ("of_soft:Soft", "1"), ("fedavg", None)]
    done = swept(folder, "--seeds", "1", "--grid", compared, "--grid", "of-soft.nu=0.1,1")
    assert done.exit_code == 1
    assert "of-soft.nu" in done.output


def test_of_equal_combinations_the_one_that_was_run_stands_for_all(folder, runs):
    """FedAvg does not read fedprox.mu: more values before the one that was run are the same run."""
    both = "--seeds", "1", "--grid", "strategy=fedavg,fedprox", "--grid"
    assert swept(folder, *both, "fedprox.mu=1").exit_code == 0
    done = swept(folder, *both, "fedprox.mu=0.1,1,2")
    assert "4 runs" in done.output
    assert "2 of them finished" in done.output
    asked = [(call["strategy"], call["fedprox.mu"]) for call in runs.asked]
    assert asked == [("fedavg", "1"), ("fedprox", "1"), ("fedprox", "0.1"), ("fedprox", "2")]


def test_of_equal_combinations_a_finished_one_stands_before_one_that_was_begun(folder, runs):
    both = "--seeds", "1", "--grid", "strategy=fedavg,fedprox", "--grid"
    for values in ("fedprox.mu=0.1", "fedprox.mu=1"):
        assert swept(folder, *both, values).exit_code == 0
    (folder / "out" / "strategy=fedavg,fedprox.mu=0.1,seed=1" / "summary.json").unlink()  # as of a run that was killed
    done = swept(folder, *both, "fedprox.mu=0.1,1")
    assert "3 runs" in done.output
    assert "3 of them finished" in done.output


def test_more_rounds_go_on_where_a_run_ended(folder, runs):
    assert swept(folder, "--seeds", "1").exit_code == 0
    done = swept(folder, "--seeds", "1", "--set", "rounds=2")
    assert "0 of them finished" in done.output
    assert runs.asked[1]["resume"] == "true"


def test_a_sweep_that_is_stopped_stops_its_runs_and_goes_on_later(folder, runs):
    runs.waits = True
    done = swept(folder, "--seeds", "1-2")
    assert done.exit_code == 130
    assert "Stopped" in done.output
    runs.waits = False
    assert swept(folder, "--seeds", "1-2").exit_code == 0
    asked = [(call["seed"], "resume" in call) for call in runs.asked]
    assert asked == [("1", False), ("1", True), ("2", False)]
    assert read_summary(folder / "out" / "seed=1").status == "finished"


@pytest.mark.parametrize(
    ("rows", "told"), [({1: {"strategy": "fedavg"}}, "cannot be called 1"), ({"a": {1: 2}}, "1 is no key")]
)
def test_names_and_keys_of_rows_are_texts(rows, told, tmp_path):
    experiment = tmp_path / "experiment.toml"
    experiment.write_text("")
    with pytest.raises(SettingsError, match=told):
        wf.sweep(experiment, rows=rows, folder=tmp_path / "sweep")
