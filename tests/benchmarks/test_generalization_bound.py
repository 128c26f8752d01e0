import math

import pytest

from benchmarks.recipfl.generalization_bound import examples_needed

SETTINGS = {
    "devices": 100,
    "parameters": 1000,
    "epsilon": 0.1,
    "delta": 0.05,
    "radius": 1.0,
    "lipschitz": 2.0,
}


def test_by_hand():
    """4 R K sqrt(d) / epsilon = 4 * 2 * 31.623 / 0.1 = 2529.82, whose logarithm is 7.8359; log(4 / 0.05) = 4.3820.

    4 * 1000 / (100 * 0.01) = 4000, times 7.8359 is 31,344; 4 / (100 * 0.01) = 4, times 4.3820 is 17.5.
    """
    assert examples_needed(**SETTINGS) == pytest.approx(31_361, abs=1)


def test_many_devices_do_not_help_below_the_floor():
    few, many = (examples_needed(**SETTINGS | {"devices": devices}) for devices in (10, 1000))
    assert few == pytest.approx(100 * many)
    assert examples_needed(**SETTINGS | {"devices": 10**7}) == pytest.approx(100)  # 1 / 0.1^2


@pytest.mark.parametrize(
    ("name", "larger"), [("epsilon", False), ("delta", False), ("radius", True), ("lipschitz", True)]
)
def test_what_needs_more_examples(name, larger):
    more = examples_needed(**SETTINGS | {name: SETTINGS[name] * 2})
    assert (more > examples_needed(**SETTINGS)) == larger
    assert examples_needed(**SETTINGS | {"parameters": 2000}) > 2 * examples_needed(**SETTINGS) - 18


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "devices must be at least 1"),
        ({"parameters": 0}, "parameters must be at least 1"),
        ({"epsilon": 0.0}, "epsilon must lie between 0 and 1"),
        ({"delta": 1.0}, "delta must lie between 0 and 1"),
        ({"radius": -1.0}, "radius must be above 0"),
        ({"radius": float("nan")}, "radius must be above 0"),
        ({"lipschitz": math.inf}, "lipschitz must be above 0"),
    ],
)
def test_impossible_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        examples_needed(**SETTINGS | changes)


def test_a_small_cube_needs_no_cover():
    small = SETTINGS | {"radius": 1e-9, "devices": 1}
    assert examples_needed(**small) == pytest.approx(400 * math.log(80))
