import sqlite3
import time
from dataclasses import replace

import pytest

from tests.cli.test_plan import nodes_json
from tests.server_app import fake_runs
from tests.small_run import small_config
from wildflower.cli import fleet_history
from wildflower.cli.fleet_history import DAY_HEADERS, EVERY_SECONDS, days_of, ends_of, history_at, remember
from wildflower.cli.fleet_serve import keep_state
from wildflower.cli.fleet_state import state_of
from wildflower.devices.resource_report import DeviceReport
from wildflower.launch.known_nodes import KnownNode
from wildflower.plugins.user_error import UserError
from wildflower.server_app.journal import Journal
from wildflower.server_app.node_records import LastReport
from wildflower.server_app.run_records import DeviceRecord, RoundRecord

NOON = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))  # where the test runs: days are the server's
DAY = 86400.0
REPORT = DeviceReport("pi", 10**9, 6 * 10**8, temperature_celsius=61.5)


@pytest.fixture
def history(tmp_path):
    with history_at(tmp_path / "fleet.sqlite") as found:
        yield found


def last(device=3, report=REPORT, at=NOON):
    return LastReport(device + 10, device, report, at, 1.0, None, "kitchen")


def outcome(number, word, device=3):
    return DeviceRecord.model_validate(fake_runs.a_device(number, device, outcome=word))


def days(history, device=3):
    return [dict(zip(DAY_HEADERS, row, strict=True)) for row in days_of(history, device)]


def test_a_day_of_a_device_is_a_row(history):
    ended = [(NOON, outcome(1, "trained")), (NOON, outcome(2, "late")), (NOON, outcome(2, "trained", device=4))]
    for _ in range(2):  # seen again in the same ten minutes: nothing counts twice
        remember(history, "run", [last()], {}, ended, NOON + 5)
    later = NOON + EVERY_SECONDS
    hot = replace(REPORT, memory_available_bytes=4 * 10**8, temperature_celsius=71.2)
    remember(history, "other-run", [last(report=hot, at=later)], {}, [(later, outcome(1, "refused: hot"))], later + 5)
    [day] = days(history)
    assert day == {
        "day": time.strftime("%Y-%m-%d", time.localtime(NOON)),
        "heard of": "0.3 h",
        "trained in": "1 of 3",
        "other outcomes": "1 late, 1 refused",
        "free memory": "400 to 600 MB",
        "hottest": "71 °C",
    }
    remember(history, "run", [], {}, [(NOON + DAY, outcome(3, "trained"))], NOON + DAY)
    assert [day["trained in"] for day in days(history)] == ["1 of 1", "1 of 3"]  # the newest first


def test_a_heartbeat_counts_and_an_old_report_gives_no_figures(history):
    remember(history, "run", [last(at=NOON - 3600)], {13: KnownNode("kitchen", "online", NOON - 5)}, [], NOON)
    [day] = days(history)
    assert (day["heard of"], day["free memory"], day["hottest"]) == ("0.2 h", "", "")
    remember(history, "run", [last(device=4, at=NOON - 3600)], {}, [], NOON)
    assert days(history, 4) == []


def test_it_holds_thirty_days_and_so_many_rows(history, monkeypatch):
    monkeypatch.setattr(fleet_history, "MAX_ROWS", 20)
    for step in range(40):
        at = NOON + step * EVERY_SECONDS
        remember(history, "run", [last(at=at)], {}, [(at, outcome(step + 1, "trained"))], at)
        for table in ("seen", "outcomes"):
            assert history.execute(f"SELECT count(*) FROM {table}").fetchone()[0] <= 20
    assert days(history)[0]["trained in"] == "20 of 20"
    remember(history, "run", [], {}, [], NOON + 31 * DAY)
    assert days(history) == []


def test_a_file_has_a_most_of_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_history, "MAX_BYTES", 2**16)
    file = tmp_path / "fleet.sqlite"
    many = [(NOON, outcome(number + 1, "trained")) for number in range(1000)]
    with pytest.raises(UserError, match="full"), history_at(file) as history:
        remember(history, "r" * 250, [], {}, many, NOON)
    assert file.stat().st_size <= 2**16
    with history_at(file) as history:
        assert days(history) == []  # what did not fit was taken back


def test_another_file_is_told_and_stays(tmp_path):
    file = tmp_path / "fleet.sqlite"
    file.write_text("These are the notes of somebody, which are longer than the header of a database. " * 2)
    with pytest.raises(UserError, match=r"fleet.sqlite: .*Move it away"), history_at(file):
        pass
    assert file.read_text().startswith("These are")


def test_only_its_user_reads_it(tmp_path):
    with history_at(tmp_path / "fleet.sqlite"):
        pass
    assert (tmp_path / "fleet.sqlite").stat().st_mode & 0o077 == 0


def test_rounds_end_one_after_the_other_before_the_last():
    rounds = [RoundRecord.model_validate(fake_runs.a_round(number, wall_seconds=10.0 * number)) for number in (1, 2)]
    ended = list(ends_of([outcome(1, "trained"), outcome(2, "late"), outcome(3, "late")], rounds, 100.0))
    assert [(end, device.round) for end, device in ended] == [(80.0, 1), (100.0, 2)]


def test_what_a_run_has_left_is_kept(tmp_path):
    run_dir = nodes_json(tmp_path / "run")
    Journal.open(run_dir, small_config(tmp_path, fleet="", family="lenet5").to_dict(), resume=False)
    (run_dir / "rounds.jsonl").write_text(RoundRecord.model_validate(fake_runs.a_round(1)).model_dump_json() + "\n")
    (run_dir / "devices.jsonl").write_text(outcome(1, "trained", device=0).model_dump_json() + "\n")
    keep_state(tmp_path / "fleet.sqlite", state_of(run_dir, None), time.time())
    with sqlite3.connect(tmp_path / "fleet.sqlite") as history:
        [day] = days(history, 0)
        [other] = days(history, 3)
    assert (day["trained in"], day["free memory"]) == ("1 of 1", "1,000 to 1,000 MB")
    assert (other["trained in"], other["heard of"]) == ("0 of 0", "0.2 h")
