"""Who writes the folder of a run, and who can read it."""

import fcntl
import os
import stat

import pytest

from tests.small_run import simulated_grid, small_config
from wildflower.devices.private import private_open
from wildflower.server_app import ledger, run_folder
from wildflower.server_app.app import run
from wildflower.server_app.report import write_report
from wildflower.server_app.run_folder import LOCK, JournalError, alone_in, is_held


def test_one_process_at_a_time(tmp_path):
    with alone_in(tmp_path):
        assert is_held(tmp_path)
        with pytest.raises(JournalError, match="another process writes the run"), alone_in(tmp_path):
            pass
        assert is_held(tmp_path)
    assert is_held(tmp_path) is None


def test_a_lock_that_was_taken_away_while_it_was_waited_for_is_nobodys(tmp_path, monkeypatch):
    """A third one has begun in between: else two would write, each with a file of its own."""
    locked = run_folder._locked

    def other_ends_and_third_begins(file, seconds):
        (tmp_path / LOCK).unlink()
        third = (tmp_path / LOCK).open("a")
        fcntl.flock(third, fcntl.LOCK_EX)
        files.append(third)
        return locked(file, seconds)

    files = []
    monkeypatch.setattr(run_folder, "_locked", other_ends_and_third_begins)
    with pytest.raises(JournalError, match="another process writes the run"), alone_in(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()
    files[0].close()


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_what_a_run_leaves_only_its_user_can_read(umask, tmp_path):
    """Folder and files alike, whatever the umask; a resumed run and a report made again keep to that."""
    before = os.umask(umask)
    try:
        config = small_config(tmp_path, strategy="scaffold", evaluate_every=1, rounds=1)
        folder = run(simulated_grid(), config)
        run(simulated_grid(), config.model_copy(update={"resume": True, "rounds": 2}))
        write_report(folder)
        ledger.begin(folder)
        with private_open(folder / "app.log", "ab"):
            pass
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    names = {path.name for path in found}
    assert {"rounds.jsonl", "state.json", "state.safetensors", "tensorboard", "models.json", "report.html"} <= names
    assert {"device-state", "labels.json", "ledger.jsonl"} <= names
    open_to_others = [path for path, mode in found.items() if mode != (0o700 if path.is_dir() else 0o600)]
    assert not open_to_others
    assert (
        stat.S_IMODE(folder.parent.stat().st_mode) == 0o777 & ~umask
    )  # the folder of all runs is as its user wants it


def test_a_folder_that_its_user_has_shared_stays_shared(tmp_path):
    with alone_in(tmp_path / "run"):
        pass
    (tmp_path / "run").chmod(0o750)
    with alone_in(tmp_path / "run"):
        pass
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o750
