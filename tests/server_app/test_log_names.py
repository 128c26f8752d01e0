import logging

import pytest
from flwr.common import log

from tests.rounds.test_population import connected
from wildflower.devices.resource_report import DeviceReport
from wildflower.rounds.population import NodeState
from wildflower.server_app.app import naming_devices, with_names

NODES = {17: "kitchen", 18: "attic"}
DEVICES = {3: "kitchen", 4: "attic"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Node 17 did not report: gone", "Node 17 (kitchen) did not report: gone"),
        (
            "Nodes 17 and 18 both say they carry device 3",
            "Nodes 17 (kitchen) and 18 (attic) both say they carry device 3 (kitchen)",
        ),
        ("the sum over devices [3, 4, 5] is lost", "the sum over devices [3 (kitchen), 4 (attic), 5] is lost"),
        ("Device " + 5000 * "3" + " is none", "Device " + 5000 * "3" + " is none"),  # more than int() takes
        ("3 devices and 17 nodes have data", "3 devices and 17 nodes have data"),
    ],
)
def test_numbers_of_nodes_and_devices_get_their_names(text, named):
    assert with_names(text, NODES, DEVICES) == named


def test_what_a_run_logs_is_named_and_nothing_after_it(caplog, monkeypatch):
    population = connected()
    population.names = NODES
    report = DeviceReport("board", memory_total_bytes=10, memory_available_bytes=5)
    monkeypatch.setattr(population, "newest_reports", lambda: [NodeState(17, 3, report, 0.0, 1.0, "kitchen")])
    with naming_devices(population):
        log(logging.WARNING, "Round %s: device %s has lost what it kept", 2, 3)
    log(logging.WARNING, "device %s", 3)
    assert caplog.messages == ["Round 2: device 3 (kitchen) has lost what it kept", "device 3"]
