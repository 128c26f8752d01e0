"""Names of Flower that stand in our files as text: a newer Flower without them would say nothing."""

import re
from importlib.metadata import distribution
from pathlib import Path

import flwr
import pytest
from flwr.common.constant import ErrorCode

from wildflower.client_app import ending
from wildflower.rounds.exchange import _ERRORS

ROOT = Path(__file__).parents[2]
APP = ("client_app", "models", "server_app", "strategies", "wildflower")
SOURCE = [file.read_text(encoding="utf-8") for file in Path(flwr.__file__).parent.rglob("*.py")]
DESIGN = (ROOT / "docs/newer-flower.md").read_text()


def ours(*folders):
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in ("", ".py", ".sh")]
    return [file.read_text() for file in files if file.is_file()]


VARIABLES = {name for text in ours(*APP, "deploy") for name in re.findall(r"FLWR_[A-Z_]+", text)}


def test_what_is_no_part_of_flowers_offer_to_apps_is_written_down():
    modules = {
        m
        for text in ours(*APP, "deploy")
        for m in re.findall(r"^\s*(?:from|import) (flwr\.[\w.]+)", text, re.MULTILINE)
    }
    offered = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.common")
    assert "flwr.supernode" in modules  # they are found
    assert [module for module in sorted(modules) if module not in offered and module not in DESIGN] == []
    assert [name for name in sorted(VARIABLES) if name not in DESIGN] == []


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_flower_reads_the_variable(name):
    assert any(f'"{name}"' in text for text in SOURCE)


def test_a_messages_process_is_called_as_we_think(monkeypatch):
    commands = {entry.name for entry in distribution("flwr").entry_points if entry.group == "console_scripts"}
    monkeypatch.setattr("sys.argv", ["/somewhere/flwr-clientapp"])
    assert ending.is_messenger()
    assert {"flwr", "flwr-clientapp", "flower-supernode", "flower-superlink"} <= commands


def test_errors_have_the_numbers_that_we_think():
    assert {
        ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "the client's app could not be loaded",
        ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "the client raised an exception",
        ErrorCode.MESSAGE_UNAVAILABLE: "no reply before the deadline",
        ErrorCode.NODE_UNAVAILABLE: "the node is offline",
        ErrorCode.CLIENT_APP_CRASHED: "the client process died",
    } == _ERRORS


def test_the_gate_lets_through_what_nodes_ask_for():
    allowed = re.compile(re.search(r'request_uri !~ "(.*?)"', (ROOT / "deploy/gate.conf").read_text()).group(1))
    paths = {path for text in SOURCE for path in re.findall(r'path="(/[^"]*fleet/[^"]*)"', text)}
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not allowed.search(path)] == []
