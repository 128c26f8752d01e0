"""Nodes that are refused again and again, and two boards with one key."""

import logging
from dataclasses import replace

import pytest

from tests.small_run import changed_reply, connected_grid, small_config
from wildflower.cli.fleet_state import State, fleet_rows
from wildflower.devices.instance import VARIABLE, draw_instance, instance
from wildflower.devices.resource_report import DeviceReport
from wildflower.launch.known_nodes import KnownNode
from wildflower.messages.error import MessageError
from wildflower.rounds.connected_devices import Instances
from wildflower.rounds.quarantine import Quarantine
from wildflower.server_app.app import run
from wildflower.server_app.node_records import ask_release, read_nodes, take_releases
from wildflower.server_app.run_folder import JournalError, read_devices

REPORT = DeviceReport("jetson-nano", memory_total_bytes=10, memory_available_bytes=5)
HARDWARE = {"fleet": "", "devices": 4, "devices_per_round": 4, "rounds": 6, "evaluate_every": 6}


def lie(reply, arrays):
    reply["updates"][0]["examples"] = 10**6


def run_with_a_liar(tmp_path, honest_from=100, before_round=lambda number: None, **changes):
    grid = connected_grid(4, tmp_path)

    def tamper(message):
        kind, node, number = message.metadata.message_type, message.metadata.src_node_id, message.metadata.group_id
        if (kind, node) == ("train", 1):
            before_round(int(number))
            return changed_reply(lie)(message) if int(number) < honest_from else message
        return message

    grid.tamper = tamper
    return run(grid, small_config(tmp_path, **HARDWARE | changes))


def outcomes(run_dir, device):
    return [d.outcome.partition(":")[0] for d in read_devices(run_dir) if d.device == device]


def test_a_node_that_is_refused_three_times_in_a_row_is_quarantined_and_listed(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run_dir = run_with_a_liar(tmp_path)
    assert outcomes(run_dir, 0) == ["refused"] * 3  # and not asked in the rounds after that
    assert all(outcomes(run_dir, device) == ["trained"] * 6 for device in (1, 2, 3))
    [told] = [r.getMessage() for r in caplog.records if "quarantined" in r.getMessage()]
    assert told.startswith("Node 1 is quarantined and asked nothing any more: 3 replies")
    assert "trained on 1000000 examples" in told
    assert "--release 1" in told
    listed = {last.node: last.quarantined for last in read_nodes(run_dir)}
    assert "trained on 1000000 examples" in listed[1]
    assert [listed[node] for node in (2, 3, 4)] == [None] * 3
    known = {node: KnownNode("", "online", None) for node in listed}
    rows = {row[1]: row[2] for row in fleet_rows(State(run_dir, read_nodes(run_dir), [], None, known), 0.0)}
    assert rows["1"].startswith("online, quarantined: device 0 says")
    assert rows["2"] == "online"


@pytest.mark.thorough
def test_it_stays_so_in_a_resumed_run_until_it_is_released_by_hand(tmp_path):
    run_dir = run_with_a_liar(tmp_path, rounds=3)
    run_with_a_liar(tmp_path, rounds=5, resume=True)
    assert outcomes(run_dir, 0) == ["refused"] * 3
    with pytest.raises(JournalError, match=r"node 2 is not quarantined in .*; quarantined: 1"):
        ask_release(run_dir, 2)
    ask_release(run_dir, 1)
    run_with_a_liar(tmp_path, honest_from=6, rounds=7, resume=True)
    assert outcomes(run_dir, 0) == ["refused"] * 3 + ["trained"] * 2
    assert take_releases(run_dir) == []


def test_a_good_reply_in_between_begins_the_count_anew():
    found = Quarantine()
    for _ in range(5):
        found.refused(1, "a")
        found.refused(1, "b")
        found.accepted(1)
    assert found.held == {}
    for _ in range(3):
        found.refused(1, "\x1b[2J" + "x" * 2000)
    assert found.held[1].isprintable()
    assert len(found.held[1]) <= 1000


def test_where_all_are_refused_nobody_is_quarantined(tmp_path):
    grid = connected_grid(4, tmp_path)
    grid.tamper = lambda m: changed_reply(lie)(m) if m.metadata.message_type == "train" else m
    with pytest.raises(Exception, match="rounds in a row in which none trained"):
        run(grid, small_config(tmp_path, **HARDWARE))
    assert {last.quarantined for last in read_nodes(tmp_path / "runs" / "small")} == {None}


# Two boards with one key.


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr("wildflower.rounds.connected_devices.time", found)
    return found


def of(name, age_seconds):
    return replace(REPORT, instance=name, instance_age_seconds=age_seconds)


def test_a_node_that_is_started_anew_is_taken(clock):
    found = Instances()
    found.check(1, of("a", 500.0))
    clock.now += 100
    found.check(1, of("b", 20.0))
    clock.now += 10
    found.check(1, of("b", 30.0))
    found.check(1, REPORT)  # not started by wildflower-node: nothing is known


@pytest.mark.parametrize("first", ["elder", "younger"])
def test_of_two_boards_the_one_that_started_later_is_refused(first, clock, caplog):
    found, started = Instances(), {"elder": 0.0, "younger": 300.0}
    second = "younger" if first == "elder" else "elder"
    with caplog.at_level(logging.WARNING, logger="flwr"):
        found.check(1, of(first, clock.now - started[first]))
        for _ in range(3):
            for name in (second, first):
                clock.now += 10
                if name == "younger":
                    with pytest.raises(MessageError, match="a second board answered with this node's key"):
                        found.check(1, of(name, clock.now - started[name]))
                else:
                    found.check(1, of(name, clock.now - started[name]))
    [record] = caplog.records
    assert record.getMessage().startswith("Two boards answer with the key of node 1")
    found.check(2, of("younger", 10.0))  # another node


def test_an_instance_is_of_a_start(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    assert instance() == (None, None)
    draw_instance()
    first, age_seconds = instance()
    assert len(first) == 16
    assert 0 <= age_seconds < 10
    draw_instance()
    assert instance()[0] != first


def test_an_update_of_a_second_board_is_refused(tmp_path):
    grid = connected_grid(4, tmp_path)

    def as_another(name, age_seconds):
        def change(reply, arrays):
            reply["updates"][0]["report"] |= {"instance": name, "instance_age_seconds": age_seconds}

        return changed_reply(change)

    grid.tamper = lambda m: (
        as_another(*(("a", 900.0) if m.metadata.group_id == "1" else ("b", 800.0)))(m)
        if (m.metadata.message_type, m.metadata.src_node_id) == ("train", 1)
        else m
    )
    run_dir = run(grid, small_config(tmp_path, **HARDWARE | {"rounds": 2}))
    assert outcomes(run_dir, 0) == ["trained", "refused"]
    assert [d.outcome for d in read_devices(run_dir) if d.device == 0][1] == (
        "refused: a second board answered with this node's key"
    )
