from tests.cli.test_command import invoke
from wildflower.cli.nodes import HEADERS, table
from wildflower.devices.resource_report import DeviceReport
from wildflower.launch.known_nodes import KnownNode
from wildflower.server_app.node_records import LastReport

NOW = 1_700_000_000.0


def last(node, device, factor=1.0):
    report = DeviceReport(
        "raspberry-pi-5",
        memory_total_bytes=4 * 10**9,
        memory_available_bytes=10**9,
        up_mbit_per_s=2.5,
        links_from="node config",
    )
    return LastReport(node, device, report, NOW - 90, factor, None)


def test_connected_nodes_come_first_and_then_devices_in_order():
    nodes = {30: KnownNode("", "offline", None), **{n: KnownNode("", "online", None) for n in (10, 40)}}
    nodes[20] = KnownNode("kitchen", "online", NOW)
    rows = table(nodes, {10: last(10, 2), 20: last(20, 1, factor=0.5), 30: last(30, 0)}, NOW)
    assert [row[:3] for row in rows] == [
        ["20 kitchen", "online", "1"],
        ["10", "online", "2"],
        ["40", "online", ""],
        ["30", "offline", "0"],
    ]
    assert {len(row) for row in rows} == {len(HEADERS)}
    assert rows[0][3:] == [
        "raspberry-pi-5",
        "1,000 MB available of 4,000 MB, budget lowered to 50% after an overrun",
        "unknown",
        "2.5 Mbit/s (node config)",
        "1 min 30 s ago",
    ]
    assert rows[1][4] == "1,000 MB available of 4,000 MB"
    assert rows[2][-1] == "no report"


def test_tls_or_its_absence_must_be_said():
    for arguments in ([], ["--insecure", "--root-certificates", "ca.crt"]):
        shown = invoke("nodes", "--superlink", "127.0.0.1:1", *arguments)
        assert shown.exit_code == 1
        assert "--root-certificates FILE, or --insecure" in shown.output


def test_a_run_that_left_no_reports_is_told(tmp_path):
    shown = invoke("nodes", "--superlink", "127.0.0.1:1", "--insecure", "--run", tmp_path)
    assert shown.exit_code == 1
    assert "no run with real devices" in shown.output
