import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wildflower.devices.clock import Timing, VirtualClock, transfer_seconds
from wildflower.devices.fleet import Fleet
from wildflower.devices.time_series import Trace

MBIT = 125_000  # bytes


def test_a_constant_link():
    # 10 Mbit at 4 Mbit/s.
    assert transfer_seconds(Trace.of([4.0]), 0.0, 10 * MBIT) == 2.5
    assert transfer_seconds(Trace.of([4.0]), 7.3, 10 * MBIT) == pytest.approx(2.5)


def test_a_transfer_over_several_seconds_of_a_trace():
    # Seconds carry 1, 0, 4 Mbit. From 0.5: 0.5 Mbit until 1, nothing until 2, then 2.5 of the 3 Mbit in 0.625 s.
    assert transfer_seconds(Trace.of([1.0, 0.0, 4.0]), 0.5, 3 * MBIT) == pytest.approx(0.5 + 1 + 0.625)


def test_a_transfer_that_starts_where_the_link_is_down_waits():
    # From 1.25 the link is down until 2; then 1 Mbit at 4 Mbit/s.
    assert transfer_seconds(Trace.of([1.0, 0.0, 4.0]), 1.25, 1 * MBIT) == pytest.approx(0.75 + 0.25)


def test_the_trace_starts_over():
    # One period of 3 s carries 5 Mbit: 11 Mbit from 0 are two periods, and 1 Mbit that fills second 6 to 7.
    assert transfer_seconds(Trace.of([1.0, 0.0, 4.0]), 0.0, 11 * MBIT) == pytest.approx(7.0)
    # From 2.5: 2 Mbit until 3, one more period until 6 (7 Mbit), 1 Mbit until 7, nothing until 8, 1 Mbit in 0.25 s.
    assert transfer_seconds(Trace.of([1.0, 0.0, 4.0]), 2.5, 9 * MBIT) == pytest.approx(8.25 - 2.5)


def test_a_transfer_ends_when_the_last_byte_is_through_not_when_the_trace_ends():
    # A period carries 3 Mbit in its first second; after 6 Mbit the link is down again, but nothing is left.
    assert transfer_seconds(Trace.of([3.0, 0.0, 0.0]), 0.0, 6 * MBIT) == pytest.approx(4.0)


def test_the_offset_of_a_device_moves_the_trace():
    trace = Trace.of([1.0, 0.0, 4.0])
    assert transfer_seconds(trace.starting_at(2), 0.0, 5 * MBIT) == pytest.approx(2.0)
    assert transfer_seconds(trace.starting_at(1), 0.5, 2 * MBIT) == pytest.approx(1.0)


def test_nothing_to_send_takes_no_time_and_neither_does_a_link_without_limit():
    assert transfer_seconds(Trace.of([0.0]), 3.0, 0) == 0
    assert transfer_seconds(None, 3.0, 10**9) == 0


def test_a_link_that_is_down_for_good_takes_forever():
    assert transfer_seconds(Trace.of([0.0, 0.0]), 0.0, 1) == math.inf


def test_a_transfer_that_never_starts_never_ends():
    assert transfer_seconds(Trace.of([1.0]), math.inf, 1) == math.inf
    assert transfer_seconds(None, math.inf, 0) == math.inf


@pytest.mark.parametrize(
    ("start", "nbytes", "name"),
    [(-1.0, 1, "start_seconds"), (math.nan, 1, "start_seconds"), (0.0, -1, "nbytes")],
)
def test_wrong_arguments_are_named(start, nbytes, name):
    with pytest.raises(ValueError, match=name):
        transfer_seconds(Trace.of([1.0]), start, nbytes)


@given(
    values=st.lists(st.sampled_from([0.0, 0.012, 0.7, 1.0, 3.3, 60.0]), min_size=1, max_size=6).filter(any),
    start=st.floats(0, 1e5),
    nbytes=st.integers(1, 10**8),
)
def test_what_passes_in_that_time_is_what_was_sent(values, start, nbytes):
    trace = Trace.of(values)

    def passed(seconds):
        whole, rest = divmod(seconds, len(values))
        return whole * sum(values) + sum(values[: int(rest)]) + (rest - int(rest)) * values[int(rest)]

    end = start + transfer_seconds(trace, start, nbytes)
    assert end >= start
    assert passed(end) - passed(start) == pytest.approx(nbytes * 8 / 1e6, rel=1e-6, abs=1e-6)


FLEET = """
reference = "2 GFLOP/s"

[[group]]
name = "steady"
count = 1
memory = "1 GB"
down = "8 Mbit/s"
up = "2 Mbit/s"
speed = 0.5

[[group]]
name = "wired"
count = 1
memory = "1 GB"

[[group]]
name = "cut-off"
count = 1
memory = "1 GB"
down = "0 Mbit/s"
up = "1 Mbit/s"

[[group]]
name = "mobile"
count = 1
memory = "1 GB"
down_trace = "down.csv"
up_trace = "up.csv"
speed = 2
"""


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "down.csv").write_text("seconds,mbit_per_s\n0,1\n")
    (tmp_path / "up.csv").write_text("seconds,mbit_per_s\n0,0\n1,0\n2,0\n3,2\n")
    return Fleet(tmp_path / "fleet.toml", seed=0)


def test_a_round_is_download_training_and_upload(fleet):
    timing = VirtualClock().timing(fleet, 0, bytes_down=4 * MBIT, flops=3e9, bytes_up=4 * MBIT)
    # 4 Mbit at 8 Mbit/s, 3 GFLOP at half of 2 GFLOP/s, 4 Mbit at 2 Mbit/s.
    assert timing == Timing(download_seconds=0.5, training_seconds=3.0, upload_seconds=2.0)
    assert timing.total_seconds == 5.5


def test_links_without_limit_take_no_time(fleet):
    timing = VirtualClock().timing(fleet, 1, bytes_down=10**12, flops=2e9, bytes_up=10**12)
    assert timing == Timing(0.0, 1.0, 0.0)


def test_a_device_that_never_gets_its_weights_never_answers(fleet):
    timing = VirtualClock().timing(fleet, 2, bytes_down=1, flops=2e9, bytes_up=1)
    assert timing == Timing(math.inf, 1.0, math.inf)
    assert timing.total_seconds == math.inf


@pytest.mark.parametrize("now", [0.0, 1.0, 2.5, 1001.0])
def test_the_upload_starts_when_training_ends_on_the_trace_as_it_is_then(fleet, now):
    # Download 1 Mbit at 1 Mbit/s: 1 s. Training 2 GFLOP at 4 GFLOP/s: 0.5 s. The link up carries 2 Mbit/s in the last
    # of every four seconds: the upload of 1 Mbit waits for it and takes 0.5 s.
    start = (now + 1.5 + fleet.links(3).up.offset_seconds) % 4
    expected = 3.5 - start if start <= 3 else 0.5
    timing = VirtualClock(now).timing(fleet, 3, bytes_down=MBIT, flops=2e9, bytes_up=MBIT)
    assert timing.upload_seconds == pytest.approx(expected)
    assert (timing.download_seconds, timing.training_seconds) == (pytest.approx(1.0), 0.5)


def test_what_is_drawn_in_every_round_is_that_of_the_round_that_starts_now(tmp_path):
    (tmp_path / "drawn.toml").write_text(
        '[[group]]\nname = "drawn"\ncount = 1\nmemory = "1 GB"\n'
        'link = { uniform = ["1 Mbit/s", "9 Mbit/s"], every = "round" }\n'
        'speed = { uniform = [1, 9], every = "round" }\n'
    )
    drawn = Fleet(tmp_path / "drawn.toml", seed=0)
    timing = VirtualClock(50.0).timing(drawn, 0, bytes_down=MBIT, flops=1e9, bytes_up=2 * MBIT)
    report = drawn.report(0, 50.0)
    assert report.down_mbit_per_s != drawn.report(0, 0.0).down_mbit_per_s
    assert timing.download_seconds == pytest.approx(1 / report.down_mbit_per_s)
    assert timing.training_seconds == pytest.approx(1e9 / report.flop_per_s)
    assert timing.upload_seconds == pytest.approx(2 / report.up_mbit_per_s)


def test_the_clock_advances():
    clock = VirtualClock()
    clock.advance(2.5)
    clock.advance(0)
    assert clock.now_seconds == 2.5


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan, None])
def test_time_only_passes_forward_and_ends_somewhere(seconds):
    clock = VirtualClock(5.0)
    with pytest.raises(ValueError, match="seconds = "):
        clock.advance(seconds)
    assert clock.now_seconds == 5.0


@pytest.mark.parametrize("flops", [-1, math.nan, math.inf])
def test_wrong_flops_are_named(fleet, flops):
    with pytest.raises(ValueError, match="flops = "):
        VirtualClock().timing(fleet, 0, bytes_down=1, flops=flops, bytes_up=1)
