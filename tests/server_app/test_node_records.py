import json

import pytest

from wildflower.devices.resource_report import DeviceReport
from wildflower.rounds.population import NodeState
from wildflower.server_app import node_records
from wildflower.server_app.node_records import FILE, read_nodes, write_nodes
from wildflower.server_app.run_folder import JournalError

REPORT = DeviceReport("jetson-nano", memory_total_bytes=10, memory_available_bytes=5, links_problem="gone")
LARGEST = 2**64 - 1


class Clock:
    def time(self):
        return 1_700_000_000.0


def test_reports_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(node_records, "time", Clock())
    write_nodes(tmp_path, [NodeState(LARGEST, 0, REPORT, 30.5, 0.7), NodeState(5, 1, REPORT, 0.0, 1.0)])
    first, second = read_nodes(tmp_path)
    assert (first.node, first.device, first.report, first.memory_factor) == (LARGEST, 0, REPORT, 0.7)
    assert (first.reported_at, second.reported_at) == (1_699_999_969.5, 1_700_000_000.0)
    write_nodes(tmp_path, [NodeState(5, 1, REPORT, 0.0, 1.0)])
    assert [last.node for last in read_nodes(tmp_path)] == [5]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_run_without_real_devices_is_told(tmp_path):
    with pytest.raises(JournalError, match="no run with real devices"):
        read_nodes(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"node": -1}, "node = -1"),
        ({"node": 2**64}, "below 2\\^64"),
        ({"device": "0"}, "device = '0'"),
        ({"report": {}}, "key 'kind' is missing"),
        ({"memory_factor": 2.0}, "memory_factor = 2.0"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_damage_is_named(change, why, tmp_path):
    write_nodes(tmp_path, [NodeState(5, 1, REPORT, 0.0, 1.0)])
    [line] = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps([line | change]))
    with pytest.raises(JournalError, match=why):
        read_nodes(tmp_path)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(JournalError, match="expected a list"):
        read_nodes(tmp_path)
