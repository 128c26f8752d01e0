import json

import pytest

from wildflower.devices import bandwidth, links
from wildflower.devices.bandwidth import BandwidthError, Measured
from wildflower.devices.checked import load, save
from wildflower.devices.links import (
    FILE,
    LONGEST_RETRY_SECONDS,
    MAX_PROBE_BYTES,
    MIN_PROBE_BYTES,
    RETRY_SECONDS,
    LinkHistory,
    averaged,
    update_links,
    with_links,
)
from wildflower.devices.node_config import read
from wildflower.devices.resource_report import DeviceReport

REPORT = DeviceReport("x86-64", memory_total_bytes=10, memory_available_bytes=5)
DAY = 86400.0


class Link:
    """Stands in for the probe: its speed can be set, and it counts what was sent."""

    def __init__(self):
        self.down, self.up, self.problem, self.spent_bytes, self.sent = 100.0, 10.0, None, 0, []

    def measure(self, address, token, ca, *, nbytes):
        self.sent.append(nbytes)
        if self.problem:
            raise BandwidthError(self.problem, self.spent_bytes)
        return Measured(int(self.down * 1e6 / 8), 1.0), Measured(int(self.up * 1e6 / 8), 1.0)


class Clock:
    now = 1_700_000_000.0

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(links, "time", fake)
    return fake


@pytest.fixture
def link(monkeypatch, clock):
    fake = Link()
    monkeypatch.setattr(bandwidth, "measure_links", fake.measure)
    return fake


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "token").write_text("a token of more than sixteen letters")
    service = {"bandwidth-address": "server:9000", "bandwidth-insecure": True}
    links = {"down-mbit-per-s": 5.0, "up-mbit-per-s": 1.0}
    return read({**service, "bandwidth-token-file": str(tmp_path / "token"), **links})


def test_the_first_figures_are_made_on_credit_and_paid_back(settings, link, clock, tmp_path):
    history = update_links(settings, tmp_path, traffic_bytes=0)
    assert (history.down_mbit_per_s, history.up_mbit_per_s) == (100.0, 10.0)
    assert history.credit_bytes == -2 * MIN_PROBE_BYTES
    for _ in range(5):
        update_links(settings, tmp_path, traffic_bytes=0)
    assert link.sent == [MIN_PROBE_BYTES]
    clock.now += 30
    report = with_links(REPORT, settings, update_links(settings, tmp_path, traffic_bytes=0))
    assert (report.down_mbit_per_s, report.up_mbit_per_s, report.links_from) == (100.0, 10.0, "probe")
    assert report.down_age_seconds == report.up_age_seconds == 30


def test_after_the_first_the_probe_spends_one_percent_of_the_traffic(settings, link, tmp_path):
    update_links(settings, tmp_path, traffic_bytes=0)
    rounds = [3_000_000] * 40
    for traffic_bytes in rounds:
        update_links(settings, tmp_path, traffic_bytes=traffic_bytes)
    spent = 2 * sum(link.sent[1:])
    assert len(link.sent) > 4
    assert 0.005 * sum(rounds) < spent <= 0.01 * sum(rounds)


def test_a_large_round_pays_for_a_large_probe_and_no_more(settings, link, tmp_path):
    update_links(settings, tmp_path, traffic_bytes=2 * MIN_PROBE_BYTES * 100)
    update_links(settings, tmp_path, traffic_bytes=10**8)
    update_links(settings, tmp_path, traffic_bytes=10**11)
    assert link.sent == [MIN_PROBE_BYTES, 500_000, MAX_PROBE_BYTES]


def test_noise_is_averaged_and_another_link_is_believed():
    assert averaged(None, 8.0) == 8.0
    assert averaged(10.0, 8.0) == pytest.approx(8.888, abs=1e-3)
    assert averaged(1000.0, 2.0) == 2.0
    assert averaged(2.0, 1000.0) == 1000.0
    assert averaged(None, 1e9) == 1e6


def test_a_shaped_link_is_in_the_next_report(settings, link, tmp_path):
    update_links(settings, tmp_path, traffic_bytes=10**8)
    link.down = link.up = 2.0
    report = with_links(REPORT, settings, update_links(settings, tmp_path, traffic_bytes=10**8))
    assert (report.down_mbit_per_s, report.up_mbit_per_s) == (2.0, 2.0)


def test_a_probe_that_cannot_be_reached_is_told_and_not_tried_at_once_again(settings, link, clock, tmp_path):
    link.problem = "server:9000 did not answer"
    history = update_links(settings, tmp_path, traffic_bytes=10**8)
    report = with_links(REPORT, settings, history)
    assert (report.down_mbit_per_s, report.up_mbit_per_s, report.links_from) == (5.0, 1.0, "node config")
    assert report.down_age_seconds is None
    assert report.links_problem == "server:9000 did not answer"
    assert history.credit_bytes == 10**6
    update_links(settings, tmp_path, traffic_bytes=10**8)
    assert len(link.sent) == 1
    clock.now += RETRY_SECONDS
    link.problem = None
    report = with_links(REPORT, settings, update_links(settings, tmp_path, traffic_bytes=0))
    assert (report.links_from, report.links_problem) == ("probe", None)


def test_what_was_measured_outlives_a_failure_but_not_a_day(settings, link, clock, tmp_path):
    update_links(settings, tmp_path, traffic_bytes=10**8)
    link.problem = "gone"
    clock.now += 100
    report = with_links(REPORT, settings, update_links(settings, tmp_path, traffic_bytes=10**8))
    assert (report.links_from, report.down_age_seconds, report.links_problem) == ("probe", 100, "gone")
    clock.now += DAY
    report = with_links(REPORT, settings, load(LinkHistory, tmp_path / FILE))
    assert (report.links_from, report.down_mbit_per_s) == ("node config", 5.0)
    # Where nobody wrote anything down, an old figure is better than none.
    unwritten = settings.model_copy(update={"down_mbit_per_s": None, "up_mbit_per_s": None})
    report = with_links(REPORT, unwritten, load(LinkHistory, tmp_path / FILE))
    assert (report.links_from, report.down_mbit_per_s, report.down_age_seconds) == ("probe", 100.0, DAY + 100)


def test_after_a_day_without_work_the_link_is_measured_on_credit(settings, link, clock, tmp_path):
    update_links(settings, tmp_path, traffic_bytes=0)
    clock.now += DAY + 1
    link.down = link.up = 0.5
    report = with_links(REPORT, settings, update_links(settings, tmp_path, traffic_bytes=0))
    assert (report.down_mbit_per_s, report.down_age_seconds) == (0.5, 0)
    assert link.sent == [MIN_PROBE_BYTES] * 2


def test_a_slow_link_is_not_kept_busy_by_its_measurement(settings, link, tmp_path):
    link.up = 0.8  # 100,000 bytes per second
    for _ in range(3):
        update_links(settings, tmp_path, traffic_bytes=10**9)
    assert link.sent == [MIN_PROBE_BYTES, 100_000, 100_000]


def test_what_failed_with_many_bytes_is_tried_with_few_and_paid_for(settings, link, clock, tmp_path):
    update_links(settings, tmp_path, traffic_bytes=10**9)
    link.problem, link.spent_bytes = "DEADLINE_EXCEEDED", 2 * MAX_PROBE_BYTES
    history = update_links(settings, tmp_path, traffic_bytes=10**9)
    assert history.credit_bytes == 0
    clock.now += RETRY_SECONDS
    link.problem = None
    update_links(settings, tmp_path, traffic_bytes=10**9)
    assert link.sent == [MIN_PROBE_BYTES, MAX_PROBE_BYTES, MIN_PROBE_BYTES]


def test_a_measurement_behind_a_query_is_kept_and_paid_for(settings, link, clock, tmp_path):
    link.down = link.up = 2.0  # a second of it is less than what is saved up
    update_links(settings, tmp_path, traffic_bytes=0)
    update_links(settings, tmp_path, traffic_bytes=10**9)
    link.sent.clear()
    clock.now += 6000
    credit_bytes = load(LinkHistory, tmp_path / FILE).credit_bytes
    while (history := update_links(settings, tmp_path, traffic_bytes=0)).credit_bytes >= 2 * MIN_PROBE_BYTES:
        assert history.measured_at == clock.now
        assert load(LinkHistory, tmp_path / FILE) == history
    assert 0 < 2 * sum(link.sent) <= credit_bytes


@pytest.mark.thorough
def test_long_trouble_leaves_a_debt_of_one_large_measurement(settings, link, clock, tmp_path):
    link.problem, link.spent_bytes = "DEADLINE_EXCEEDED", 2 * MIN_PROBE_BYTES
    for _ in range(1000):
        clock.now += LONGEST_RETRY_SECONDS
        history = update_links(settings, tmp_path, traffic_bytes=0)
    assert history.credit_bytes == -2 * MAX_PROBE_BYTES
    link.problem, link.spent_bytes = "UNAUTHENTICATED", 0
    (tmp_path / FILE).unlink()
    clock.now += RETRY_SECONDS
    assert update_links(settings, tmp_path, traffic_bytes=0).credit_bytes == 0


def test_failures_that_cost_something_are_further_and_further_apart(settings, link, clock, tmp_path):
    link.problem, link.spent_bytes = "DEADLINE_EXCEEDED", MIN_PROBE_BYTES
    start, times = clock.now, []
    for minute in range(24 * 60):
        clock.now = start + 60 * minute
        before = len(link.sent)
        update_links(settings, tmp_path, traffic_bytes=0)
        times += [minute] * (len(link.sent) - before)
    # 1, 2, 4, 8, 16, 32 and then 60 minutes apart.
    assert times[:8] == [0, 1, 3, 7, 15, 31, 63, 123]
    assert len(times) < 32
    # One that costs nothing, since the service is not there, may be tried each minute.
    link.problem, link.spent_bytes = "did not answer", 0
    clock.now += LONGEST_RETRY_SECONDS
    before = len(link.sent)
    for _ in range(5):
        update_links(settings, tmp_path, traffic_bytes=0)
        clock.now += RETRY_SECONDS
    assert len(link.sent) == before + 5


def test_a_measurement_that_is_broken_off_counts_as_failed(settings, link, tmp_path, monkeypatch):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(bandwidth, "measure_links", killed)
    with pytest.raises(KeyboardInterrupt):
        update_links(settings, tmp_path, traffic_bytes=0)
    monkeypatch.setattr(bandwidth, "measure_links", link.measure)
    assert update_links(settings, tmp_path, traffic_bytes=0).problem == "the measurement was broken off"
    assert link.sent == []


def test_a_clock_that_was_set_back_delays_no_measurement(settings, link, clock, tmp_path):
    link.problem = "gone"
    update_links(settings, tmp_path, traffic_bytes=10**8)
    link.problem = None
    clock.now -= DAY
    assert update_links(settings, tmp_path, traffic_bytes=0).measured_at == clock.now
    clock.now -= DAY
    assert update_links(settings, tmp_path, traffic_bytes=0).measured_at == clock.now


def test_a_problem_of_many_lines_is_one_that_a_report_takes(settings, link, clock, tmp_path):
    link.problem = "first\nsecond\x1b[2J" + "x" * 5000
    report = with_links(REPORT, settings, update_links(settings, tmp_path, traffic_bytes=0))
    assert report.links_problem.startswith("first second [2Jxx")
    assert len(report.links_problem) == 1000
    assert load(LinkHistory, tmp_path / FILE).problem == report.links_problem


def test_a_full_disk_is_told_and_costs_no_work(settings, link, tmp_path, monkeypatch):
    def full(history, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(links, "save", full)
    for _ in range(3):
        report = with_links(REPORT, settings, update_links(settings, tmp_path, traffic_bytes=10**9))
    assert report.links_from == "node config"
    assert "cannot be kept: [Errno 28] No space left" in report.links_problem
    assert link.sent == []  # or every message would measure


def test_a_token_that_is_not_there_is_a_problem_and_no_crash(settings, link, tmp_path):
    (tmp_path / "token").unlink()
    report = with_links(REPORT, settings, update_links(settings, tmp_path, traffic_bytes=0))
    assert "No such file" in report.links_problem
    assert link.sent == []


def test_without_a_probe_nothing_is_measured_or_written(link, tmp_path):
    none = read({})
    report = with_links(REPORT, none, update_links(none, tmp_path, traffic_bytes=10**9))
    assert report == REPORT
    owner = read({"down-mbit-per-s": 8.0})
    assert with_links(REPORT, owner, LinkHistory()).links_from == "node config"
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_was_set_back_makes_no_negative_age(settings, link, clock, tmp_path):
    history = update_links(settings, tmp_path, traffic_bytes=0)
    clock.now -= 1000
    assert with_links(REPORT, settings, history).down_age_seconds == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"down_mbit_per_s": -1}'])
def test_a_damaged_history_is_none(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    assert (load(LinkHistory, tmp_path / FILE) or LinkHistory()) == LinkHistory()


@pytest.mark.parametrize(("key", "value"), [("down_mbit_per_s", 0), ("measured_at", "now"), ("credit_bytes", 0.5)])
def test_a_history_with_a_wrong_value_is_none(key, value, tmp_path):
    good = LinkHistory(1.0, 1.0, 5.0, 0.0, "why", -3)
    save(good, tmp_path / FILE)
    assert load(LinkHistory, tmp_path / FILE) == good
    (tmp_path / FILE).write_text(json.dumps(json.loads((tmp_path / FILE).read_text()) | {key: value}))
    assert load(LinkHistory, tmp_path / FILE) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bandwidth-address", 9000),
        ("bandwidth-share", 2.0),
        ("down-mbit-per-s", "fast"),
        ("up-mbit-per-s", -1),
        ("up-mbit-per-s", True),
    ],
)
def test_a_wrong_key_of_the_node_config_is_named(key, value):
    with pytest.raises(ValueError, match=f"node config: {key}"):
        read({"bandwidth-token-file": "/token", key: value})


def test_a_probe_without_its_token_is_refused():
    with pytest.raises(ValueError, match="bandwidth-address without bandwidth-token-file"):
        read({"bandwidth-address": "superlink:9000", "bandwidth-ca": "/ca.crt"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "give either bandwidth-ca"),
        ({"bandwidth-insecure": False}, "give either bandwidth-ca"),
        ({"bandwidth-insecure": True, "bandwidth-ca": "/ca.crt"}, "give either bandwidth-ca"),
        ({"bandwidth-insecure": "yes"}, "must be true or false"),
    ],
)
def test_a_link_without_tls_must_be_asked_for(config, words):
    config |= {"bandwidth-address": "superlink:9000", "bandwidth-token-file": "/token"}
    with pytest.raises(ValueError, match=words):
        read(config)
