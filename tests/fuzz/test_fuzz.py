"""20,000 hostile inputs: nothing crashes, nothing is slow, and what is accepted is harmless.

What is made by hand to cost much is in tests/rounds/test_hostile_replies.py.
"""

import itertools
import threading
import time

import pytest

from tests.fuzz.harness import fuzz
from tests.fuzz.targets import Target, all_targets

NAMES = (
    *("replies", "replies in int8", "orders", "reports", "answers about keys", "answers about data"),
    *("checkpoints", "journals", "fleet files", "configurations"),
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return {target.name: target for target in all_targets(tmp_path_factory.mktemp("fuzz"))}


def test_there_are_twenty_thousand(targets):
    assert tuple(targets) == NAMES
    assert sum(target.count for target in targets.values()) == 20_000


@pytest.mark.parametrize("name", NAMES)
def test_hostile_input_is_refused_at_once_or_harmless(name, targets):
    tally = fuzz(targets[name], targets[name].count)
    assert tally.tried == targets[name].count
    assert 0 < tally.accepted < tally.tried  # else nothing was tested
    assert tally.slowest_seconds < targets[name].max_seconds, tally


def test_a_heartbeat_is_not_starved_while_replies_are_read(targets):
    """What keeps a run alive at the SuperLink is a thread of this process."""
    beats, done = [], threading.Event()

    def beat():
        while not done.wait(0.01):
            beats.append(time.perf_counter())

    thread = threading.Thread(target=beat)
    thread.start()
    fuzz(targets["replies"], 300, seed=2)
    done.set()
    thread.join()
    assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 2.0


def test_the_harness_finds_what_crashes_what_harms_and_what_is_slow():
    def read(number):
        if number == 7:
            raise KeyError("seven")
        if number == 8:
            sum(range(3 * 10**6))
        return number

    def harmless(number):
        assert number != 9

    def target(value):
        return Target("numbers", 1, lambda rng: value, read, (ValueError,), harmless)

    with pytest.raises(AssertionError, match="'numbers 1 0' crashed numbers: KeyError: 'seven'"):
        fuzz(target(7), 1)
    with pytest.raises(AssertionError, match="does harm"):
        fuzz(target(9), 1)
    assert fuzz(target(8), 1).slowest_seconds > 0.02
    assert fuzz(target(1), 2).accepted == 2
