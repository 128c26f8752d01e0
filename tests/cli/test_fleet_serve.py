import socket
import threading
import urllib.error
import urllib.request

import pytest

from tests.server_app import fake_runs
from wildflower.cli import fleet_serve
from wildflower.cli.fleet_serve import Look, alerts_of, metrics_of, server_at
from wildflower.devices.resource_report import DeviceReport
from wildflower.launch.known_nodes import KnownNode
from wildflower.plugins.user_error import UserError
from wildflower.server_app.node_records import LastReport
from wildflower.server_app.run_records import DeviceRecord

NOW = 1_700_000_000.0
REPORT = DeviceReport("pi", memory_total_bytes=100, memory_available_bytes=40, temperature_celsius=61.5)


def last(device, name, age=10.0, quarantined=None):
    return LastReport(device + 10, device, REPORT, NOW - age, 1.0, quarantined, name)


def records(device, *outcomes):
    return [
        DeviceRecord.model_validate(fake_runs.a_device(number, device, outcome=outcome))
        for number, outcome in enumerate(outcomes, 1)
    ]


def test_silent_refused_and_quarantined_devices_are_alerts():
    reports = [last(0, "kitchen"), last(1, "attic", age=7200.0), last(2, "", quarantined="it lied")]
    found = alerts_of(reports, records(0, "trained", "refused: hot", "refused: hot", "refused: hot"), {}, NOW)
    assert found == [
        "Device 0 kitchen: refused: hot, 3 times in a row",
        "Device 1 attic: no contact for 2 h",
        "Device 2: quarantined: it lied",
    ]
    seen = {11: KnownNode("attic", "online", NOW - 5)}
    assert alerts_of([last(1, "attic", age=7200.0)], records(1, "refused: hot", "trained"), seen, NOW) == []


def test_figures_are_as_prometheus_reads_them():
    text = metrics_of([last(0, 'the "kitchen"')], records(0, "trained", "late"), {}, 2)
    lines = text.splitlines()
    labels = '{device="0",name="the \\"kitchen\\"",kind="pi"}'
    assert f"wildflower_device_memory_available_bytes{labels} 40.0" in lines
    assert f"wildflower_device_temperature_celsius{labels} 61.5" in lines
    assert f"wildflower_device_rounds_trained{labels} 1.0" in lines
    assert "wildflower_alerts 2.0" in lines
    assert not any("down_mbit" in line for line in lines)  # nobody measured it


@pytest.fixture
def server():
    looks = []

    def look():
        looks.append(1)
        return Look([["0 <script>", "online"]], ["Device 0: no contact"], "wildflower_alerts 1.0\n")

    found = server_at("127.0.0.1:0", "fleet of one", ["device", "status"], look)
    threading.Thread(target=found.serve_forever).start()
    yield f"http://127.0.0.1:{found.server_address[1]}", looks
    found.shutdown()
    found.server_close()


def test_the_page_shows_the_table_and_escapes_what_devices_say(server):
    address, looks = server
    with urllib.request.urlopen(address + "/") as answer:
        text = answer.read().decode()
    assert "<td>0 &lt;script&gt;</td><td>online</td>" in text
    assert "Device 0: no contact" in text
    with urllib.request.urlopen(address + "/metrics") as answer:
        assert answer.read() == b"wildflower_alerts 1.0\n"
    assert len(looks) == 1


def test_nothing_else_is_answered(server):
    address, _ = server
    for request, code in (
        (urllib.request.Request(address + "/config.json"), 404),
        (urllib.request.Request(address + "/", data=b"x"), 501),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == code


def test_a_client_that_says_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(fleet_serve, "CLIENT_SECONDS", 0.05)
    with server_at("127.0.0.1:0", "", [], lambda: Look([], [], "")) as found:
        threading.Thread(target=found.serve_forever).start()
        with socket.create_connection(found.server_address, timeout=60) as silent:
            silent.sendall(b"GET /")
            assert silent.recv(1) == b""
        found.shutdown()


@pytest.mark.parametrize("address", ["9464", "127.0.0.1:http", "127.0.0.1:99999"])
def test_a_wrong_address_is_said(address):
    with pytest.raises(UserError, match="--serve"):
        server_at(address, "", [], lambda: Look([], [], ""))
