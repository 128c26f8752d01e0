"""The starter of a node's messages; in the last test a node is killed in the middle of work."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.deployment import Deployment
from wildflower.client_app import starter
from wildflower.client_app.supernode import INSTALLING, STARTER, kept_in

ALONE = f"""
import os, runpy, sys, time
sys.argv = ["starter", str(os.getppid())]
starter = runpy.run_path({str(STARTER)!r})
starter["end_with"](os.getppid())

def work(token):
    print(os.getpid(), flush=True)
    time.sleep(600)

starter["serve"](lambda: "token", lambda token: lambda: True, work, os.getppid())
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_one_message_after_the_other_is_worked_on_in_a_process_of_its_own(tmp_path, monkeypatch):
    tokens, renewed, log = ["a", "", "b"], [], tmp_path / "log"
    parent = os.getppid()

    def claim():
        if not tokens:
            raise StopIteration
        return tokens.pop(0)

    def work(token):
        with log.open("a") as file:
            file.write(f"{token} {os.getpid()} {sys.argv}\n")

    def renewing(token):
        return lambda: renewed.append(token) or True

    monkeypatch.setenv(starter.POLL, "0.01")
    with pytest.raises(StopIteration):
        starter.serve(claim, renewing, work, parent)
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
    assert [line[0] for line in lines] == ["a", "b"]
    assert len({line[1] for line in lines} | {str(os.getpid())}) == 3
    assert {line[2] for line in lines} == {"['flwr-clientapp']"}
    assert renewed == ["a", "b"]


def test_a_message_whose_claim_is_lost_is_not_started(monkeypatch):
    class EndError(Exception):
        pass

    tokens = ["gone"]

    def claim():
        if not tokens:
            raise EndError
        return tokens.pop()

    monkeypatch.setenv(starter.POLL, "0")
    monkeypatch.setattr(starter, "start", lambda *_: pytest.fail("started"))
    with pytest.raises(EndError):
        starter.serve(claim, lambda token: lambda: False, None, os.getppid())


def test_a_claim_is_renewed_while_its_process_lives_and_one_that_is_not_wanted_is_killed():
    renewed = []

    def renew():
        renewed.append(len(renewed))
        return len(renewed) < 3

    child = starter.start(lambda token: time.sleep(600), "token")
    starter.watch(child, renew, seconds=0.05)
    assert len(renewed) >= 3
    assert not psutil.pid_exists(child[0])


def test_a_claim_that_is_refused_once_and_renewed_then_ends_no_work(tmp_path):
    go_on, told = os.pipe()
    renewed = []

    def work(token):
        os.read(go_on, 1)
        (tmp_path / "done").touch()

    def renew():
        renewed.append(len(renewed))
        if len(renewed) == 6:
            os.write(told, b"x")
        return len(renewed) % 2 == 0

    starter.watch(starter.start(work, "token"), renew, seconds=0.05)
    assert (tmp_path / "done").exists()


def test_an_error_of_the_work_ends_its_process_alone(capfd):
    def work(token):
        raise RuntimeError("no work today")

    child = starter.start(work, "token")
    starter.watch(child, lambda: True)
    assert "RuntimeError: no work today" in capfd.readouterr().err
    assert not psutil.pid_exists(child[0])


def test_flowers_own_starter_is_replaced_but_for_one_that_installs(monkeypatch):
    asked = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: asked.append(command))
    popen = kept_in([]).Popen
    popen(["flower-superexec", "--insecure", "--parent-pid", "7"])
    popen(["flower-superexec", INSTALLING])
    assert asked == [
        [sys.executable, "-P", str(STARTER), "--insecure", "--parent-pid", "7"],
        ["flower-superexec", INSTALLING],
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_the_starter_and_its_work_end_with_the_node():
    node = subprocess.Popen([sys.executable, "-c", PARENT, ALONE], stdout=subprocess.PIPE, text=True)
    work = psutil.Process(int(node.stdout.readline()))
    of_node = psutil.Process(node.pid).children(recursive=True)
    assert work in of_node
    assert work.name() == "flwr-clientapp"
    assert len(of_node) == 2
    node.send_signal(signal.SIGKILL)
    node.wait()
    assert wait_until(lambda: all(map(gone, of_node)))


@pytest.mark.thorough
def test_a_node_that_is_killed_in_the_middle_of_work_leaves_nothing_behind(tmp_path):
    """Also not the worker, which is no child of it."""
    (tmp_path / "experiment.toml").write_text(
        'task = "digits"\nfamily = "lenet5"\nfleet = ""\ndevices = 1\ndevices-per-round = 1\nrounds = 1\n'
        f'local-steps = 1000000\noutput-dir = "{tmp_path}"\nrun-name = "one"\n'
    )

    def of_node():
        """All processes of the node, once it works: it, its starter, that of the message, the worker and its child."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                here = process.environ().get("FLWR_HOME", "").startswith(str(tmp_path))
                command = " ".join(process.cmdline())
                if here and ("wildflower-node" in command or "client_app" in command):
                    found.append(process)
        return found if len(found) >= 5 else []

    deployment = Deployment(tmp_path / "flower")
    try:
        deployment.start_superlink()
        node = deployment.start_node(0, 1)
        run = deployment.run(str(tmp_path / "experiment.toml"))
        found = wait_until(of_node, 240.0)
        assert found
        node.kill()
        assert wait_until(lambda: all(map(gone, found)), 120.0)  # a worker that begins loads torch first
    finally:
        deployment.close()
        run.kill()
        run.communicate()
