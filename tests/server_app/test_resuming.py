import pytest
from fake_runs import CONFIG, three_rounds

from wildflower.server_app import ledger
from wildflower.server_app.journal import Journal
from wildflower.server_app.resuming import DATA_OF_A_FOLDER, check_resumable
from wildflower.server_app.run_folder import JournalError
from wildflower.tasks.task import TASKS


@pytest.mark.parametrize(("end", "state"), [(True, "a finished run"), (False, "an unfinished run")])
def test_an_earlier_run_is_not_overwritten(tmp_path, end, state):
    journal = three_rounds(tmp_path)
    if end:
        journal.finish("finished")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(JournalError) as error:
        Journal.open(tmp_path, CONFIG, resume=False)
    for part in (str(tmp_path), state, "run-name", "resume=true"):
        assert part in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json*")} == before


def test_nothing_to_resume_is_an_error(tmp_path):
    with pytest.raises(JournalError, match="no run to resume"):
        Journal.open(tmp_path / "typo", CONFIG, resume=True)
    assert not (tmp_path / "typo").exists()


def test_resume_with_another_configuration_is_an_error(tmp_path):
    three_rounds(tmp_path)
    with pytest.raises(JournalError, match=r"learning-rate was 0\.1 and is 0\.2"):
        Journal.open(tmp_path, CONFIG | {"learning-rate": 0.2}, resume=True)


def test_data_of_users_are_what_their_folder_holds():
    of_users = {name for name, kind in TASKS.items() if kind.own is not None}
    assert of_users | {"idx"} == set(DATA_OF_A_FOLDER)


@pytest.mark.parametrize("task", ["digits", "idx", "npz", "images", "table", "text"])
def test_another_folder_is_another_data_set_where_the_folder_is_the_data_set(task, tmp_path):
    here, there = CONFIG | {"task": task, "data-dir": "here"}, CONFIG | {"task": task, "data-dir": "there"}
    Journal.open(tmp_path, here, resume=False)
    if task == "digits":
        Journal.open(tmp_path, there, resume=True)
    else:
        with pytest.raises(JournalError, match="data-dir was 'here' and is 'there'"):
            Journal.open(tmp_path, there, resume=True)


def test_keys_that_nothing_reads_may_change_as_between_versions(tmp_path):
    Journal.open(tmp_path, CONFIG | {"fedprox.mu": 0.1, "recipfl.no-more": True}, resume=False)
    check_resumable(tmp_path, CONFIG | {"fedprox.mu": 1.0, "recipfl.new": 3})
    with pytest.raises(JournalError, match=r"configuration: heterofl\.mode was None and is 'fixed'$"):
        check_resumable(tmp_path, CONFIG | {"fedprox.mu": 1.0, "heterofl.mode": "fixed"})


def test_keys_of_the_run_that_nothing_reads_may_change(tmp_path):
    adam = CONFIG | {"optimizer": "adam", "momentum": 0.9}
    Journal.open(tmp_path, adam, resume=False)
    check_resumable(tmp_path, adam | {"momentum": 0.5})
    with pytest.raises(JournalError, match=r"momentum was 0\.9 and is 0\.5, optimizer was 'adam' and is 'sgd'"):
        check_resumable(tmp_path, adam | {"optimizer": "sgd", "momentum": 0.5})


@pytest.mark.parametrize(
    ("with_it", "why"),
    [
        ({"schedule.kind": "cosine"}, "falls towards 0 over 3 rounds"),
        ({"dp.epsilon": 3.0}, "has the noise with which 3 rounds reach dp.epsilon = 3"),
        ({"strategy": "scalefl"}, "what scalefl does in a round .* depends on its having 3 rounds"),
    ],
)
def test_what_the_number_of_rounds_decides_is_not_resumed_for_more_of_them(with_it, why, tmp_path):
    ledger.begin(tmp_path)
    Journal.open(tmp_path, CONFIG | {"rounds": 3} | with_it, resume=False)
    check_resumable(tmp_path, CONFIG | {"rounds": 3} | with_it)
    with pytest.raises(JournalError, match=f"rounds = 5: .*{why}.*leave rounds as they were"):
        check_resumable(tmp_path, CONFIG | {"rounds": 5} | with_it)


def test_a_method_that_leaves_out_what_depends_on_the_number_of_rounds_is_resumed_for_more(tmp_path):
    without = CONFIG | {"rounds": 3, "strategy": "scalefl", "scalefl.gamma": 0.0}
    Journal.open(tmp_path, without, resume=False)
    check_resumable(tmp_path, without | {"rounds": 5})


def test_a_run_is_not_resumed_for_fewer_rounds_than_it_has(tmp_path):
    three_rounds(tmp_path).finish("finished")
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(JournalError, match=r"rounds = 2, but the run in .* has 3: ask for 3 or more"):
        Journal.open(tmp_path, CONFIG | {"rounds": 2}, resume=True)
    assert (tmp_path / "config.json").read_bytes() == before
    assert Journal.open(tmp_path, CONFIG | {"rounds": 3}, resume=True).last_round == 3
