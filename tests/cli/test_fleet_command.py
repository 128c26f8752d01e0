import os
import sys
from subprocess import run

import pytest
from flwr.proto.node_pb2 import NodeInfo

from tests.cli.test_command import invoke
from tests.cli.test_plan import nodes_json
from tests.deployment import Deployment
from tests.server_app import fake_runs
from tests.small_run import small_config
from wildflower.cli.fleet_state import HEADERS, State, fleet_rows, newest_run
from wildflower.cli.plan import make_plan
from wildflower.launch.known_nodes import KnownNode, nodes_of
from wildflower.server_app.journal import Journal
from wildflower.server_app.node_records import read_nodes
from wildflower.server_app.run_records import DeviceRecord

LATER = 30.0


@pytest.fixture
def run_dir(tmp_path):
    """A run of devices 0, a Pi at node 7, and 3, a laptop at node 9."""
    folder = nodes_json(tmp_path / "earlier")
    Journal.open(folder, small_config(tmp_path, fleet="", family="lenet5").to_dict(), resume=False)
    return folder


def test_every_device_is_a_row_with_its_name_and_what_it_got(run_dir, tmp_path):
    reports = read_nodes(run_dir)
    plan = make_plan(small_config(tmp_path, fleet="", family="lenet5"), run_dir)
    given = [
        fake_runs.a_device(1, 0, outcome="trained", parameters=1000),
        fake_runs.a_device(2, 0, outcome="late", parameters=2000),
        fake_runs.a_device(2, 3, outcome="refused: out of memory"),
    ]
    records = [DeviceRecord.model_validate(record) for record in given]
    now = reports[0].reported_at + LATER
    known = {7: KnownNode("kitchen", "online", now - 5), 8: KnownNode("cellar", "registered", None)}
    rows = [
        dict(zip(HEADERS, row, strict=True)) for row in fleet_rows(State(run_dir, reports, records, plan, known), now)
    ]
    assert [(row["device"], row["node"]) for row in rows] == [("0 kitchen", "7"), ("3 laptop", "9"), ("cellar", "8")]
    kitchen, laptop, cellar = rows
    assert (kitchen["status"], kitchen["seen"], kitchen["up"]) == ("online", "5 s ago", "4 Mbit/s")
    assert kitchen["model"] == f"2,000 ({2000 / plan.whole_parameters:.0%})"
    assert (kitchen["last outcome"], kitchen["trained in"]) == ("late (round 2)", "1 of 2")
    assert (laptop["status"], laptop["down"], laptop["last outcome"]) == ("", "?", "refused: out of memory (round 2)")
    assert "budget lowered to 50%" in laptop["memory"]
    assert (cellar["status"], cellar["seen"], cellar["last outcome"]) == ("registered", "never", "no report")


def test_a_device_that_gets_nothing_is_told_with_the_command_that_says_why(run_dir):
    assert invoke("fleet", run_dir).exit_code == 0
    config = run_dir / "config.json"
    config.write_text(config.read_text().replace('"budget.transfer-seconds": 0.0', '"budget.transfer-seconds": 0.001'))
    shown = invoke("fleet", run_dir, columns=300)
    assert shown.exit_code == 3, shown.output
    assert "none: plan --run says why" in shown.stdout
    assert f"wildflower plan --run {run_dir}" in shown.stdout


def test_nodes_whose_keys_were_revoked_are_left_out():
    listed = [
        NodeInfo(node_id=2**64 - 1, name="pi", status="online", online_until=160.0, heartbeat_interval=30.0),
        NodeInfo(node_id=2, name="new", status="registered"),
        NodeInfo(node_id=3, name="old", status="unregistered"),
    ]
    assert nodes_of(listed) == {2**64 - 1: KnownNode("pi", "online", 100.0), 2: KnownNode("new", "registered", None)}


def test_nodes_are_listed_without_a_run():
    known = {8: KnownNode("", "registered", None), 9: KnownNode("attic", "online", 100.0)}
    rows = fleet_rows(State(None, [], [], None, known), 130.0)
    assert [row[:4] for row in rows] == [
        ["unknown", "8", "registered", "never"],
        ["attic", "9", "online", "30 s ago"],
    ]


def test_of_a_folder_of_runs_the_one_is_shown_whose_devices_reported_last(run_dir, tmp_path):
    other = nodes_json(tmp_path / "zero")
    os.utime(other / "nodes.json", (1, 1))
    assert newest_run(tmp_path) == run_dir
    assert newest_run(run_dir) == run_dir
    assert newest_run(other / "nothing") == other / "nothing"
    assert invoke("fleet", tmp_path).exit_code == 0


def test_what_is_wrong_is_said(tmp_path, run_dir):
    (tmp_path / "empty").mkdir()
    assert "no run with real devices" in invoke("fleet", tmp_path / "empty").stderr
    assert "name the folder of a run" in invoke("fleet").stderr
    assert "node 5 is not quarantined" in invoke("fleet", run_dir, "--release", "5").stderr
    for options in ([], ["--insecure", "--root-certificates", "ca.crt"]):
        shown = invoke("fleet", "--superlink", "127.0.0.1:1", *options)
        assert "--root-certificates FILE, or --insecure" in shown.stderr
    assert "belong to --superlink" in invoke("fleet", run_dir, "--insecure").stderr
    shown = invoke("fleet", run_dir, "--superlink", "127.0.0.1:1", "--insecure")
    assert shown.exit_code == 1
    assert "127.0.0.1:1: " in shown.stderr


@pytest.mark.thorough
@pytest.mark.flower
def test_names_are_those_of_the_keys(tmp_path, run_dir):
    deployment = Deployment(tmp_path / "deployment", key_count=1)
    try:
        deployment.start_superlink()
        deployment.enroll()
        command = [sys.executable, "-m", "wildflower", "fleet", str(run_dir), *deployment.connection]
        shown = run(command, capture_output=True, text=True)
        assert "node-0" in shown.stdout, shown.stderr
        assert "registered" in shown.stdout
    finally:
        deployment.close()
