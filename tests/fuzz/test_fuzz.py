"""20,000 hostile inputs that hypothesis makes: nothing crashes, nothing is slow, and what is accepted is harmless.

What is made by hand to cost much is in tests/rounds/test_hostile_replies.py.
"""

import itertools
import threading
import time

import pytest
from hypothesis import strategies as st

from tests.fuzz.harness import fuzz
from tests.fuzz.mutations import messages
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
    fuzz(targets["replies"], 300)
    done.set()
    thread.join()
    assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 2.0


def target_of(inputs, read, harmless=lambda found: None):
    return Target("numbers", 1, inputs, read, (ValueError,), harmless)


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
        return target_of(st.just(value), read, harmless)

    with pytest.raises(AssertionError, match="numbers: KeyError: 'seven': 7"):
        fuzz(target(7), 10)
    with pytest.raises(AssertionError, match=r"numbers: it does harm: .*: 9"):
        fuzz(target(9), 10)
    tally = fuzz(target(8), 10)
    assert tally.slowest_seconds > 0.02
    assert tally.slowest_input == "8"
    assert fuzz(target_of(st.integers(), read), 30).accepted == 30


def test_what_fails_is_told_by_its_smallest_input():
    """A reader that fails where the loss is another one: of all changes the least one is left."""

    def read(text):
        if '"loss": 1.5' not in text:
            raise KeyError("loss")

    honest = {"updates": [{"device": 3, "loss": 1.5, "names": ["a", "b"]}]}
    with pytest.raises(AssertionError) as caught:
        fuzz(target_of(messages(honest), read), 200)
    assert str(caught.value) == """numbers: KeyError: 'loss': '{"updates": null}'"""
    notes = "\n".join(caught.value.__notes__)
    assert notes.count("becomes") == 1
    assert "(('updates',), 'becomes', None)" in notes
