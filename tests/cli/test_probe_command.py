import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_command import invoke
from wildflower.cli.probe_command import report_rows
from wildflower.devices.bandwidth import CHUNK_BYTES, measure_links
from wildflower.devices.resource_report import DeviceReport

ROOT = Path(__file__).parents[2]
TOKEN = "a token of more than sixteen letters"


def test_probe_prints_the_report_as_json(tmp_path):
    shown = invoke("probe", "--json", "--state-dir", tmp_path, "--node-config", 'kind="jetson-nano" up-mbit-per-s=2.5')
    assert shown.exit_code == 0, shown.output
    report = DeviceReport.from_json(json.loads(shown.stdout))
    assert (report.kind, report.up_mbit_per_s, report.links_from) == ("jetson-nano", 2.5, "node config")


def test_probe_prints_a_table():
    shown = invoke("probe", "--node-config", "down-mbit-per-s=20")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"link down +│ 20 Mbit/s \(node config\)", shown.stdout)
    assert re.search(r"memory +│ [\d,]+ MB available of [\d,]+ MB", shown.stdout)


def test_every_figure_is_told_with_its_age():
    report = DeviceReport(
        "x86-64",
        memory_total_bytes=4 * 10**9,
        memory_available_bytes=10**9,
        down_mbit_per_s=12.34,
        down_age_seconds=61.2,
        links_from="probe",
        links_problem="gone",
        temperature_celsius=61.0,
        throttled=True,
    )
    rows = dict(report_rows(report))
    assert rows["link down"] == "12.3 Mbit/s (probe, measured 61 s ago)"
    assert rows["link up"] == "unknown"
    assert rows["memory"] == "1,000 MB available of 4,000 MB"
    assert (rows["temperature"], rows["throttled"], rows["bandwidth probe"]) == ("61.0 °C", "yes", "gone")


@pytest.mark.parametrize("text", ["down-mbit-per-s", "down-mbit-per-s=fast", "up-mbit-per-s=-2", 'kind=""'])
def test_a_wrong_node_config_is_refused(text):
    shown = invoke("probe", "--node-config", text)
    assert shown.exit_code == 1
    assert "Error: node config" in shown.output


def test_a_misspelled_key_is_refused_with_the_right_one():
    shown = invoke("probe", "--node-config", "partition-id=1 memory-limit-byte=100000")
    assert shown.exit_code == 1
    assert "unknown key 'memory-limit-byte', did you mean 'memory-limit-bytes'" in shown.output


def test_a_text_without_quotes_is_named():
    shown = invoke("probe", "--node-config", "partition-id=1 data-dir=/srv/photos")
    assert shown.exit_code == 1
    assert "'data-dir=/srv/photos' is neither" in shown.output
    assert "Traceback" not in shown.output


def test_the_bandwidth_service_serves_until_it_is_told_to_stop(tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    command = [sys.executable, "-m", "wildflower", "bandwidth-server", "--token-file", str(token), "--insecure"]
    process = subprocess.Popen([*command, "--address", "127.0.0.1:0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        port = re.fullmatch(r"Bandwidth service at 127.0.0.1:(\d+) without TLS\n", said)
        assert port, said
        down, up = measure_links(f"127.0.0.1:{port[1]}", TOKEN, None, nbytes=4 * CHUNK_BYTES)
        assert down.nbytes == up.nbytes == 3 * CHUNK_BYTES
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "--certificate and --key are needed, or --insecure"),
        (["--certificate", "x"], "--certificate and --key are needed"),
        (["--insecure", "--key", "x"], "leave out one or the other"),
        (["--certificate", "missing.crt", "--key", "missing.key"], "No such file"),
    ],
)
def test_a_service_that_cannot_be_started_says_why(arguments, why, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    shown = invoke("bandwidth-server", "--token-file", tmp_path / "token", *arguments)
    assert shown.exit_code == 1
    assert why in shown.output
