"""A SuperLink and two SuperNodes as processes of this machine, without containers.

Not part of `make test`, because most of their time is waiting: `make test-compose` names this file.
"""

import os
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from tests.deployment import Deployment, kill
from tests.launch.test_bundle import OWN
from tests.launch.test_end_to_end import start
from tests.small_run import connected_grid, same_bits
from wildflower.cli.fleet_state import fleet_rows, state_of
from wildflower.launch.before import Deployment as At
from wildflower.launch.experiment_file import write_toml
from wildflower.launch.superlink import connected
from wildflower.server_app import checkpoint
from wildflower.server_app.app import run
from wildflower.server_app.config import RunConfig
from wildflower.server_app.node_records import read_nodes
from wildflower.server_app.run_folder import read_devices, read_rounds, read_summary

ROOT = Path(__file__).parents[2]

ROUNDS = 4
# Devices keep corrections from one round to the next, and the server a state of its own.
EXPERIMENT = f"""
task = "digits"
family = "vgg"
family-arguments = "block_channels = [2, 4, 32], exits = [0, 1, 2]"
strategy = "depthfl"
depthfl.alpha = 0.1
fleet = ""
devices = 2
devices-per-round = 2
rounds = {ROUNDS}
local-steps = 1
examples-per-device = 24
seed = 3
run-name = "one"
"""


def values(folder):
    """The experiment as Flower would hand it over."""
    read = tomllib.loads(EXPERIMENT.replace("depthfl.alpha", '"depthfl.alpha"'))
    return RunConfig.from_run_config({**read, "output-dir": str(folder)})


def said(process):
    """The lines that a run prints, as they come."""
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


@pytest.mark.flower
@pytest.mark.worker
def test_a_run_goes_on_after_its_superlink_was_killed(tmp_path):
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    arguments = [str(tmp_path / "experiment.toml"), "--set", f"output-dir={tmp_path}"]
    deployment = Deployment(tmp_path / "flower")
    try:
        superlink = deployment.start_superlink()
        for device in range(2):
            deployment.start_node(device, of=2)
        first = deployment.run(*arguments)
        lines = []
        for line in said(first):
            lines.append(line)
            if line.startswith("round 2/"):
                break
        assert lines[-1].startswith("round 2/"), "".join(lines)
        kill(superlink)
        first.kill()
        first.wait()
        before = read_rounds(tmp_path / "one")
        assert len(before) < ROUNDS

        deployment.start_superlink()
        again = deployment.run(*arguments, "--set", "resume=true")
        output, _ = again.communicate()
        assert again.returncode == 0, output
        rows = fleet_rows(state_of(tmp_path / "one", At(deployment.address, None)), time.time())
    finally:
        deployment.close()

    summary = read_summary(tmp_path / "one")
    assert summary is not None
    assert (summary.status, summary.rounds) == ("finished", ROUNDS)
    assert read_rounds(tmp_path / "one")[: len(before) - 1] == before[:-1]
    devices = list(read_devices(tmp_path / "one"))
    assert [d.outcome for d in devices] == ["trained"] * 2 * ROUNDS
    assert [{d.node for d in devices if d.device == device} for device in range(2)] == [
        {last.node} for last in read_nodes(tmp_path / "one")
    ]
    assert [(row[2], row[0].split()[0]) for row in rows] == [("online", "0"), ("online", "1")]

    # The same run without Flower's processes, and without the trouble.
    undisturbed = tmp_path / "undisturbed"
    run(connected_grid(2, undisturbed), values(undisturbed))
    found, expected = checkpoint.load(tmp_path / "one"), checkpoint.load(undisturbed / "one")
    assert found.round == expected.round == ROUNDS
    assert same_bits(found.state.tensors, expected.state.tensors)


@pytest.mark.flower
@pytest.mark.worker
def test_a_node_that_trusts_a_key_runs_the_apps_alone_that_it_has_signed(tmp_path):
    deployment = Deployment(tmp_path / "flower", key_count=1)
    assert deployment.secrets is not None
    try:
        deployment.start_superlink()
        deployment.enroll()
        deployment.start_node(0, of=1, options=["--trusted-entities", str(deployment.secrets / "trusted.yaml")])
        one = EXPERIMENT.replace("devices = 2", "devices = 1").replace("devices-per-round = 2", "devices-per-round = 1")
        (tmp_path / "experiment.toml").write_text(one)
        given = [str(tmp_path / "experiment.toml"), "--set", f"output-dir={tmp_path}", "--set", "rounds=1"]
        signed = deployment.run(*given, "--sign", str(deployment.secrets / "app.key"))
        output, _ = signed.communicate()
        assert signed.returncode == 0, output
        assert [device.outcome for device in read_devices(tmp_path / "one")] == ["trained"]
        unsigned = deployment.run(*given, "--set", "run-name=other")
        log = tmp_path / "flower" / "node-0.log"
        end = time.monotonic() + 300  # which only a busy machine needs
        while "FAB verification failed" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        assert "The app has no signature" in log.read_text()
        kill(unsigned)
        assert not list(read_devices(tmp_path / "other"))
    finally:
        deployment.close()


@pytest.mark.flower
@pytest.mark.worker
def test_real_nodes_have_what_lay_beside_the_experiment_and_what_is_installed(tmp_path):
    installed = tmp_path / "installed" / "a_package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    (installed / "mine_too.py").write_text(OWN.replace("mine_all", "a_package.mine_too"))
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine_all.py").write_text(OWN)
    shared = {
        "fleet": "",
        "devices": 2,
        "devices-per-round": 2,
        "rounds": 1,
        "local-steps": 1,
        "below-smallest": "smallest",
        "output-dir": str(tmp_path),
    }
    beside_it = {"strategy": "mine_all:Mine", "task": "mine_all:TASK", "mine-all.share": 0.75, "run-name": "beside"}
    package = "a_package.mine_too"
    by_reference = {"strategy": f"{package}:Mine", "task": f"{package}:TASK", "run-name": "installed"}
    plain = by_reference | {"strategy-settings": "share = 0.25"}
    (own / "experiment.toml").write_text(write_toml(shared | beside_it))
    (tmp_path / "plain.toml").write_text(write_toml(shared | plain))
    deployment = Deployment(tmp_path / "flower", {"PYTHONPATH": str(installed.parent)})
    try:
        deployment.start_superlink()
        for device in range(2):
            deployment.start_node(device, of=2)
        done = deployment.run(str(own / "experiment.toml"))
        said = done.communicate()[0]
        assert done.returncode == 0, said
        with connected(deployment.address, None) as link:  # as `flwr run .` does
            run_id = link.submit(ROOT, tmp_path / "plain.toml")
            while not (status := link.status(run_id)[0]).startswith("finished"):
                time.sleep(1)
            assert status == "finished:completed", (tmp_path / "flower" / "superlink.log").read_text()[-5000:]
    finally:
        deployment.close()
    for name, strategy, share in (("beside", "mine-all", 0.75), ("installed", "mine-too", 0.25)):
        [record] = read_rounds(tmp_path / name)
        assert (record.strategy, record.devices_replied, record.metrics) == (strategy, 2, {"share": share})


@pytest.mark.flower
def test_flowers_simulation_gives_the_bits_of_own_workers(tmp_path):
    shared = {"task": "digits", "family": "lenet5", "devices-per-round": 2, "rounds": 3, "evaluate-every": 1}
    shared |= {"local-steps": 2, "output-dir": str(tmp_path)}
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(write_toml(shared | {"run-name": "one"}))
    deployment = Deployment(tmp_path / "flower")
    try:
        deployment.start_superlink("--simulation")
        nodes = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"
        with connected(deployment.address, None) as link:  # as `flwr run .` does
            run_id = link.submit(ROOT, experiment, "--federation-config", nodes)
            while not (status := link.status(run_id)[0]).startswith("finished"):
                time.sleep(1)
            assert status == "finished:completed", (tmp_path / "flower" / "superlink.log").read_text()[-5000:]
    finally:
        deployment.close()
    assert (tmp_path / "one" / "report.html").read_text().startswith("<!doctype html>")
    own = start(experiment, "workers=1", "run-name=two")
    told = own.communicate()[0]
    assert own.returncode == 0, told
    states = [tmp_path / run / "checkpoint" / "round-3" / "state.safetensors" for run in ("one", "two")]
    assert states[0].read_bytes() == states[1].read_bytes()
    scores = [[(r.score, r.loss) for r in read_rounds(tmp_path / run)] for run in ("one", "two")]
    assert scores[0] == scores[1]


@pytest.mark.flower
@pytest.mark.worker
def test_the_server_sees_sums_only_and_the_model_has_the_same_bits(tmp_path):
    text = EXPERIMENT.replace('"depthfl"\ndepthfl.alpha = 0.1', '"fedavg"').replace("= 2\n", "= 3\n")
    assert "devices-per-round = 3" in text
    (tmp_path / "experiment.toml").write_text(text)
    deployment = Deployment(tmp_path / "flower")
    try:
        deployment.start_superlink()
        for device in range(3):
            deployment.start_node(device, of=3)
        secure = {"secure-aggregation.minimum": "3", "rounds": "2", "output-dir": str(tmp_path)}
        settings = [part for key, value in secure.items() for part in ("--set", f"{key}={value}")]
        process = deployment.run(str(tmp_path / "experiment.toml"), *settings)
        lines = list(said(process))
        assert process.wait() == 0, "".join(lines)
    finally:
        deployment.close()
    assert all(device.outcome == "trained" and device.loss is None for device in read_devices(tmp_path / "one"))
    read = tomllib.loads(text) | {"rounds": 2, "output-dir": str(tmp_path / "plain")}
    plain = run(connected_grid(3, tmp_path / "grid"), RunConfig.from_run_config(read))
    assert same_bits(checkpoint.load(tmp_path / "one").state.tensors, checkpoint.load(plain).state.tensors)


FLEET = """
[[group]]
name = "large"
count = 3
fits_width = 1.0

[[group]]
name = "small"
count = 3
fits_width = 0.5
"""


@pytest.mark.flower
@pytest.mark.worker
def test_nodes_that_act_as_workers_of_a_fleet_give_the_bits_of_one_machine_also_where_one_goes(tmp_path):
    """Devices keep state (SCAFFOLD's corrections), which stays on their node."""
    (tmp_path / "six.toml").write_text(FLEET)
    shared = {"task": "digits", "family": "lenet5", "strategy": "scaffold", "fleet": str(tmp_path / "six.toml")}
    shared |= {"devices": 6, "devices-per-round": 4, "rounds": 3, "local-steps": 2, "seed": 3, "run-name": "one"}
    (tmp_path / "experiment.toml").write_text(write_toml(shared))
    deployment = Deployment(tmp_path / "flower")
    try:
        deployment.start_superlink()
        nodes = [deployment.start_node(number, of=2) for number in range(2)]
        arguments = [str(tmp_path / "experiment.toml"), "--set", "engine=nodes"]
        done = deployment.run(*arguments, "--set", f"output-dir={tmp_path / 'nodes'}")
        said_by_run = done.communicate()[0]
        assert done.returncode == 0, said_by_run
        stranger = deployment.run(str(tmp_path / "experiment.toml"), "--set", f"output-dir={tmp_path / 'no'}")
        assert "--set engine=nodes makes the nodes there workers" in " ".join(stranger.communicate()[0].split())
        kill(nodes[0])
        alone = deployment.run(*arguments, "--set", f"output-dir={tmp_path / 'alone'}", "--set", "strategy=fedavg")
        said_by_run = alone.communicate()[0]
        assert alone.returncode == 0, said_by_run
    finally:
        deployment.close()
    devices = list(read_devices(tmp_path / "nodes" / "one"))
    assert {device.outcome for device in devices} == {"trained"}
    by_device = {d.device: {o.node for o in devices if o.device == d.device} for d in devices}
    assert all(len(own) == 1 for own in by_device.values())
    assert len(set.union(*by_device.values())) == 2
    here = start(tmp_path / "experiment.toml", f"output-dir={tmp_path / 'here'}")
    told = here.communicate()[0]
    assert here.returncode == 0, told
    states = [tmp_path / run / "one" / "checkpoint" / "round-3" / "state.safetensors" for run in ("nodes", "here")]
    assert states[0].read_bytes() == states[1].read_bytes()
    assert [d.outcome for d in read_devices(tmp_path / "alone" / "one")].count("trained") >= 4


@pytest.mark.flower
def test_a_hundred_keys_are_enrolled_in_ten_seconds_by_one_process(tmp_path):
    """Seconds of work, of the command and of the SuperLink: whoever else keeps the machine busy does not count."""
    deployment = Deployment(tmp_path / "flower", key_count=100)

    def worked_seconds():
        of_commands, of_superlink = os.times(), superlink.cpu_times()
        return of_commands.children_user + of_commands.children_system + of_superlink.user + of_superlink.system

    try:
        superlink = psutil.Process(deployment.start_superlink().pid)
        started = worked_seconds()
        said = deployment.enroll().splitlines()
        seconds = worked_seconds() - started
        again = deployment.enroll().splitlines()
    finally:
        deployment.close()
    assert len({line.partition("registered as node ")[2] for line in said}) == 100
    assert all("registered before" in line for line in again)
    assert seconds < 10
