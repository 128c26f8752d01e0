import pytest

from benchmarks.hypemefed.guesses import FAMILY, PAIRS, WAYS, errors, units_of
from wildflower.strategies.submodel import initial_weights

SENT = {
    name: value
    for name, value in initial_weights(FAMILY, 1).items()
    if name in {*PAIRS, *(source for source, _ in PAIRS.values())}
}
FIRST, SECOND = sorted(PAIRS)


def a_round(*changes):
    """Devices change everything by a number each; their tiers are 1, 2, 3."""
    return SENT, [{name: value + change for name, value in SENT.items()} for change in changes], [1, 2, 3]


def test_errors_of_hypernetworks_that_have_learned_nothing_by_hand():
    """Devices change all by 9, 2 and 4, in the mean by 5.

    Of the first deep layer the owners' mean is 3, which lacks 2, and with a guess of 0 the mean is 2, which lacks 3. Of
    the second it is 4, which lacks 1, and with two guesses of 0 it is 4 / 3, which lacks 11 / 3.
    """
    found = errors([a_round(9.0, 2.0, 4.0)], epochs=0)
    assert found[FIRST] == {"shifted": pytest.approx(1.0, rel=1e-3), "as guessed": pytest.approx(9 / 4, rel=1e-3)}
    assert found[SECOND] == {"shifted": pytest.approx(1.0, rel=1e-3), "as guessed": pytest.approx(121 / 9, rel=1e-3)}
    assert set(found[FIRST]) == set(WAYS)


def test_units_are_of_owners_only():
    """Of the first layer ((81 + 4 + 16) / 3)^1/2 = 5.8023, of the next (20 / 2)^1/2, of the last 4."""
    source, _ = PAIRS[FIRST]
    units = units_of(*a_round(9.0, 2.0, 4.0))
    assert units[source] == pytest.approx(5.8023, abs=1e-3)
    assert units[FIRST] == pytest.approx(10**0.5, abs=1e-3)
    assert units[SECOND] == pytest.approx(4.0, abs=1e-3)
