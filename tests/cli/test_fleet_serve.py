import json
import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, chromium
from tests.server_app import fake_runs
from wildflower.cli import bounded_server, fleet_serve
from wildflower.cli.fleet_serve import Look, alerts_of, metrics_of, server_at
from wildflower.cli.fleet_state import HEADERS
from wildflower.devices.resource_report import DeviceReport
from wildflower.launch.known_nodes import KnownNode
from wildflower.plugins.user_error import UserError
from wildflower.server_app.node_records import LastReport
from wildflower.server_app.run_records import DeviceRecord

NOW = 1_700_000_000.0
NOTHING = Look([], [], [], "")
REPORT = DeviceReport("pi", memory_total_bytes=100, memory_available_bytes=40, temperature_celsius=61.5)


def last(device, name, age=10.0, quarantined=None, **reported):
    report = replace(REPORT, **reported)
    return LastReport(device + 10, device, report, NOW - age, 1.0, quarantined, name)


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


def test_a_full_disk_and_a_wrong_clock_are_alerts():
    # A report takes a while to come, and longer where its node was busy.
    right = last(0, "right", disk_free_bytes=10**9, clock_seconds=NOW - 12)
    wrong = [
        last(1, "full", disk_free_bytes=30 * 10**6),
        last(2, "early", age=10.0, clock_seconds=NOW - 7),
    ]
    late = last(3, "late", age=10.0, clock_seconds=NOW - 250)
    assert alerts_of([right, *wrong, late], [], {}, NOW) == [
        "Device 1 full: 30 MB of its disk are free",
        "Device 2 early: its clock is 3 s ahead of the server's; Flower refuses it from 5 s on",
    ]


def test_the_board_for_grafana_asks_for_what_is_served_and_for_all_of_it():
    board = json.loads((Path(__file__).parents[2] / "deploy/grafana.json").read_text())
    asked = set(re.findall(r"wildflower_\w+", " ".join(t["expr"] for p in board["panels"] for t in p["targets"])))
    full = last(0, "", disk_free_bytes=1, clock_seconds=NOW, down_mbit_per_s=1.0, up_mbit_per_s=1.0, throttled=True)
    text = metrics_of([full], [], {10: KnownNode("", "online", None)}, 0)
    assert asked == set(re.findall(r"^wildflower_\w+", text, re.MULTILINE))


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
        row = ["7 <script>alert(1)</script>", "17", "online", *["x"] * (len(HEADERS) - 3)]
        nobody = ["", "18", "registered", *[""] * (len(HEADERS) - 3)]
        return Look([row, nobody], [7], ["Device 7: no contact"], "wildflower_alerts 1.0\n")

    def days(device):
        return [["2026-11-30", "3.5 h", f"{device} of 9", "2 late", "410 to 620 MB", "71 °C"]]

    found = server_at("127.0.0.1:0", "Fleet of one", look, days)
    threading.Thread(target=found.serve_forever).start()
    yield f"http://127.0.0.1:{found.server_address[1]}", looks
    found.shutdown()
    found.server_close()


def test_the_pages_show_tables_and_escape_what_devices_say(server):
    address, looks = server
    with urllib.request.urlopen(address + "/") as answer:
        text = answer.read().decode()
    assert '<a href="/device/7">7 &lt;script&gt;alert(1)&lt;/script&gt;</a></td>' in text
    assert text.count('<a href="/device/') == 1
    assert "Device 7: no contact" in text
    with urllib.request.urlopen(address + "/metrics") as answer:
        assert answer.read() == b"wildflower_alerts 1.0\n"
    with urllib.request.urlopen(address + "/device/7") as answer:
        text = answer.read().decode()
    assert '<td data-name="trained in">7 of 9</td>' in text
    assert len(looks) == 1


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_the_pages_fit_a_desk_and_a_phone_in_chromium(server, tmp_path):
    address, _ = server
    with chromium(tmp_path / "profile") as tab:
        for width, headers in ((1300, len(HEADERS)), (390, 0)):
            tab.show(address + "/", width, picture=tmp_path / f"{width}.png")
            assert tab.value("document.documentElement.scrollWidth") <= width
            shown = "[...document.querySelectorAll('th')].filter(cell => cell.offsetWidth).length"
            assert tab.value(shown) == headers
            assert "Device 7: no contact" in tab.value("document.body.innerText")
        tab.value("document.querySelector('td a').click()")
        tab.wait_for_load()
        assert "410 to 620 MB" in tab.value("document.body.innerText")
        assert tab.value("document.documentElement.scrollWidth") <= 390
        assert not [line for line in tab.log if "favicon" not in line]


def test_nothing_else_is_answered(server):
    address, _ = server
    for request, code in (
        (urllib.request.Request(address + "/config.json"), 404),
        (urllib.request.Request(address + "/device/8"), 404),
        (urllib.request.Request(address + "/device/07"), 404),
        (urllib.request.Request(address + "/", data=b"x"), 501),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == code


@pytest.mark.parametrize(("client_seconds", "connection_seconds"), [(0.05, 30.0), (600.0, 0.05)])
def test_a_slow_client_is_let_go_by_its_silence_and_by_its_time_in_all(monkeypatch, client_seconds, connection_seconds):
    monkeypatch.setattr(fleet_serve, "CLIENT_SECONDS", client_seconds)
    monkeypatch.setattr(bounded_server, "CONNECTION_SECONDS", connection_seconds)
    with server_at("127.0.0.1:0", "", lambda: NOTHING, lambda _: []) as found:
        threading.Thread(target=found.serve_forever).start()
        with socket.create_connection(found.server_address, timeout=60) as slow, suppress(ConnectionError):
            slow.sendall(b"GET /")
            assert slow.recv(1) == b""
        found.shutdown()


def answered(address):
    """Whether a page is served, once the thread of a client before has ended."""
    for _ in range(1000):
        with suppress(OSError), urllib.request.urlopen(address) as answer:
            return answer.status == 200
    return False


def test_further_clients_are_let_go_at_once_and_served_when_there_is_room(monkeypatch):
    monkeypatch.setattr(bounded_server, "MAX_AT_ONCE", 2)
    threads = threading.active_count()
    with server_at("127.0.0.1:0", "", lambda: NOTHING, lambda _: []) as found, ExitStack() as open_ones:
        threading.Thread(target=found.serve_forever).start()

        def connect():
            client = open_ones.enter_context(socket.create_connection(found.server_address, timeout=60))
            client.sendall(b"GET / HTTP/1.1\r\n")
            return client

        first, second = connect(), connect()
        for refused in (connect(), connect()):
            with suppress(ConnectionResetError):
                assert refused.recv(1) == b""
        assert threading.active_count() <= threads + 5  # the server's, and two for each connection
        first.sendall(b"Connection: close\r\n\r\n")
        assert first.recv(15) == b"HTTP/1.0 200 OK"
        while first.recv(2**16):
            pass
        assert answered(f"http://127.0.0.1:{found.server_address[1]}/metrics")
        second.close()
        found.shutdown()


@pytest.mark.parametrize("address", ["9464", "127.0.0.1:http", "127.0.0.1:99999"])
def test_a_wrong_address_is_said(address):
    with pytest.raises(UserError, match="--serve"):
        server_at(address, "", lambda: NOTHING, lambda _: [])
