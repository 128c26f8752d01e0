"""What is started with a run is stopped with it, and in which order."""

import signal
from types import SimpleNamespace

import pytest

from wildflower.launch import superlink


@pytest.mark.parametrize(
    ("server", "number"),
    [
        (["python3", "/venv/bin/flwr-serverapp", "--insecure"], signal.SIGTERM),
        (["/venv/bin/flwr-simulation"], signal.SIGKILL),
    ],
)
def test_a_server_ends_before_what_it_works_with(server, number, tmp_path, monkeypatch):
    """Else it would take the end of its SuperLink, or of a process of Ray's, for a fault, and its run for failed."""
    commands = {"superlink": ["flower-superlink"], "server": server, "ray": ["ray::Actor"], "gone": []}
    processes = [
        SimpleNamespace(name=name, create_time=lambda at=at: at, cmdline=lambda command=command: command)
        for at, (name, command) in enumerate(commands.items())
    ]
    told: list[tuple[str, int]] = []
    ended: set[str] = set()

    def wait(waited, timeout):
        if waited is not processes:
            ended.update(process.name for process in waited)

    def running(found):
        return [process for process in found if process.name not in ended] if not told[1:] else []

    monkeypatch.setattr(superlink, "_ours", lambda *_: processes)
    monkeypatch.setattr(superlink, "_running", running)
    monkeypatch.setattr(superlink, "_signal", lambda process, number: told.append((process.name, number)))
    monkeypatch.setattr(superlink.psutil, "wait_procs", wait)
    superlink.stop_everything([], tmp_path)
    assert told == [
        ("server", number),
        ("gone", signal.SIGTERM),
        ("ray", signal.SIGTERM),
        ("superlink", signal.SIGTERM),
    ]
