import re
from pathlib import Path

import pytest

from wildflower.devices.node import node_report
from wildflower.devices.node_config import KEYS
from wildflower.devices.probe import probe_machine


def test_what_the_owner_wrote_goes_into_the_report(tmp_path):
    config = {
        "partition-id": 3,
        "kind": "raspberry-pi-5",
        "memory-limit-bytes": 10**6,
        "payload-limit-bytes": 10**5,
        "up-mbit-per-s": 4,
    }
    report = node_report(config, tmp_path)
    assert (report.kind, report.memory_limit_bytes, report.payload_limit_bytes) == ("raspberry-pi-5", 10**6, 10**5)
    assert (report.up_mbit_per_s, report.down_mbit_per_s, report.links_from) == (4.0, None, "node config")
    assert report.memory_total_bytes > 0


def test_without_a_word_of_the_owner_the_machine_speaks(tmp_path):
    report, machine = node_report({"partition-id": 0}, tmp_path), probe_machine()
    assert (report.kind, report.memory_total_bytes) == (machine.kind, machine.memory_total_bytes)
    assert report.memory_limit_bytes is report.payload_limit_bytes is report.links_from is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "value"), [("kind", ""), ("memory-limit-bytes", "1 GB"), ("payload-limit-bytes", -1)])
def test_a_wrong_key_is_named(key, value, tmp_path):
    with pytest.raises(ValueError, match=f"node config: {key}"):
        node_report({key: value}, tmp_path)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("memory-limit-byte", "unknown key 'memory-limit-byte', did you mean 'memory-limit-bytes'"),
        ("bandwidth-cert", "'bandwidth-ca'"),
        ("quota", "valid are bandwidth-address, "),
    ],
)
def test_an_unknown_key_is_an_error(key, words, tmp_path):
    with pytest.raises(ValueError, match="node config: unknown key") as refused:
        node_report({"partition-id": 0, key: 100_000}, tmp_path)
    assert words in str(refused.value)


def test_every_key_of_the_docs_is_valid():
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    table = text.split("## The node config")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {key for row in rows for key in re.findall(r"`([a-z-]+)`", row)} == KEYS - {"num-partitions"}
