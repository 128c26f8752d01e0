"""Files and folders that only their user can read, whatever the umask."""

import os
import stat

import pytest

from wildflower.devices.private import close_to_others, private_folder, private_open


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_made_is_closed_to_others(umask, tmp_path):
    before = os.umask(umask)
    try:
        private_folder(tmp_path / "runs" / "one")
        with private_open(tmp_path / "log", "ab") as file:
            file.write(b"x")
        (tmp_path / "of-a-library").touch()
        close_to_others(tmp_path / "of-a-library")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "runs" / "one") == 0o700
    assert mode_of(tmp_path / "runs") == 0o777 & ~umask
    assert mode_of(tmp_path / "log") == mode_of(tmp_path / "of-a-library") == 0o600


def test_what_is_there_keeps_its_mode_and_its_content(tmp_path):
    (tmp_path / "log").write_text("x")
    (tmp_path / "log").chmod(0o640)
    with private_open(tmp_path / "log", "ab") as file:
        file.write(b"y")
    private_folder(tmp_path)
    assert (tmp_path / "log").read_text() == "xy"
    assert mode_of(tmp_path / "log") == 0o640
