"""The starter of servers; in the last test it is a SuperLink's, and the server never loads."""

import os
import sqlite3
import stat
import subprocess
from datetime import datetime, timedelta

import pytest
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from tests.client_app.test_starter import wait_until
from tests.deployment import Deployment
from tests.server_app.test_deliveries import HARDWARE
from wildflower.launch.experiment_file import write_toml
from wildflower.launch.server_starter import AGAIN_SECONDS, RENEW_SECONDS, renew_while_alive
from wildflower.launch.superlink import flower_environment

LATE = timedelta(seconds=HEARTBEAT_DEFAULT_INTERVAL + 1)


@pytest.fixture
def claimed(monkeypatch):
    """A state of Flower's with one claimed run, its number, and a function that lets time pass."""
    clock = [in_memory_corestate.now()]
    monkeypatch.setattr(in_memory_corestate, "now", lambda: clock[0])
    state = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()).state()
    task = state.create_task(TaskType.SERVER_APP, run_id=1)
    assert state.claim_task(task)

    def passes(time):
        clock[0] += time
        state.get_tasks()  # upon which Flower looks for claims that have ended

    return state, task, passes


def test_flower_starts_a_slow_server_again(claimed):
    """If this fails, Flower has mended it, and `wildflower-superlink` can go."""
    state, task, passes = claimed
    passes(LATE)
    assert state.claim_task(task)


def test_a_renewed_claim_outlives_a_slow_start(claimed):
    state, task, passes = claimed
    for _ in range(5):
        assert state.acknowledge_task_heartbeat(task)
        passes(timedelta(seconds=RENEW_SECONDS + AGAIN_SECONDS))
    assert state.claim_task(task) is None
    assert state.activate_task(task)


def test_a_claim_is_renewed_at_once_and_until_the_process_has_ended():
    waited, renewed = [], []

    class Process:
        def poll(self):
            return None if len(waited) < 4 else 0

        def wait(self, seconds):
            waited.append(seconds)
            if len(waited) < 4:
                raise subprocess.TimeoutExpired("a server", seconds)

    def renew():
        renewed.append(len(waited))
        return len(renewed) != 2

    renew_while_alive(Process(), renew)
    assert renewed == [0, 1, 2, 3]
    assert waited == [RENEW_SECONDS, AGAIN_SECONDS, RENEW_SECONDS, RENEW_SECONDS]


@pytest.mark.thorough
def test_the_superlink_renews_the_claim_of_a_server_that_has_not_loaded(tmp_path):
    started, commands = tmp_path / "started", tmp_path / "bin"
    commands.mkdir()
    slow = commands / "flwr-serverapp"
    slow.write_text(f'#!/bin/sh\necho started >>"{started}"\nexec sleep 600\n')
    slow.chmod(stat.S_IRWXU)
    usual = flower_environment(os.environ, tmp_path)["PATH"]
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(write_toml(HARDWARE | {"task": "digits", "family": "lenet5", "output-dir": str(tmp_path)}))
    deployment = Deployment(tmp_path / "flower", {"PATH": f"{commands}{os.pathsep}{usual}"})

    def is_renewed():
        with sqlite3.connect(f"file:{deployment.database}?mode=ro", uri=True) as database:
            rows = database.execute("select starting_at, active_until from task where active_until is not null")
            return any(datetime.fromisoformat(until) - datetime.fromisoformat(at) > LATE for at, until in rows)

    try:
        deployment.start_superlink()
        run = deployment.run(str(experiment))
        deployment.started.append(run)
        assert wait_until(is_renewed, 300)  # half a minute, and more on a busy machine
    finally:
        deployment.close()
    assert started.read_text() == "started\n"
