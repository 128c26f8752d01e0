"""Who writes the folder of a run."""

import fcntl

import pytest

from server_app import run_folder
from server_app.run_folder import LOCK, JournalError, alone_in, is_held


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
