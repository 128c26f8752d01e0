import pytest

from wildflower.devices.quantity import (
    BYTES,
    FLOPS,
    LINK,
    SECONDS,
    Choice,
    Uniform,
    parse_quantity,
)


def memory(value):
    return BYTES.amount(value)


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("512 MB", BYTES, 512e6),
        ("1.5GiB", BYTES, 1.5 * 2**30),
        (" 3 kB ", BYTES, 3e3),
        ("2e3 B", BYTES, 2000),
        ("0 MB", BYTES, 0),
        ("20 Mbit/s", LINK, 20),
        ("1 Gbit/s", LINK, 1000),
        ("250 kbit/s", LINK, 0.25),
        ("10 GFLOP/s", FLOPS, 1e10),
        ("1.85 s", SECONDS, 1.85),
        ("2 min", SECONDS, 120),
    ],
)
def test_amounts(text, unit, number):
    assert unit.amount(text) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("512", "the unit is missing; write it like '512 MB'"),
        (512, "must be a text with a number and a unit, like '512 MB'"),
        ("MB", "must be a text with a number and a unit"),
        ("", "must be a text with a number and a unit"),
        ("nan MB", "must be a text with a number and a unit"),
        ("1 2 MB", "must be a text with a number and a unit"),
        ("-5 MB", "must not be negative"),
        ("1e999 MB", "must not be negative or infinite"),
        ("512 Mb", "unknown unit 'Mb', did you mean 'MB'"),
        ("20 Mbit/s", "unknown unit 'Mbit/s'"),
        (None, "must be a text"),
        (True, "must be a text"),
    ],
)
def test_a_wrong_amount_says_what_is_right(value, message):
    with pytest.raises(ValueError) as error:
        memory(value)
    assert message in str(error.value)


def test_a_plain_amount_is_fixed():
    assert parse_quantity("1 GB", memory) == Uniform(1e9, 1e9)


def test_a_uniform_range():
    quantity = parse_quantity({"uniform": ["1 GB", "3 GB"], "every": "round"}, memory)
    assert quantity == Uniform(1e9, 3e9, "round")
    assert [quantity.pick(draw) for draw in (0.0, 0.25, 0.5)] == [1e9, 1.5e9, 2e9]
    assert quantity.highest == 3e9


def test_a_choice_takes_its_values_by_their_weights():
    quantity = parse_quantity({"choice": ["8 B", "2 B"], "weights": [3, 1]}, memory)
    assert quantity == Choice((8.0, 2.0), (0.75, 0.25), "device")
    assert [quantity.pick(draw) for draw in (0.0, 0.74, 0.75, 0.99)] == [8, 8, 2, 2]
    assert quantity.highest == 8


def test_the_values_of_a_choice_are_equally_likely_without_weights():
    quantity = parse_quantity({"choice": ["1 B", "2 B", "3 B", "4 B"]}, memory)
    assert [quantity.pick(draw) for draw in (0.1, 0.3, 0.6, 0.9)] == [1, 2, 3, 4]


def test_a_draw_beyond_the_rounded_sum_of_the_weights_is_the_last_value():
    quantity = Choice((1.0, 2.0), (0.5, 0.4999999), "device")
    assert quantity.pick(0.99999999) == 2.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "must have either 'uniform' or 'choice'"),
        ({"uniform": ["1 B", "2 B"], "choice": ["1 B"]}, "must have either 'uniform' or 'choice'"),
        ({"uniform": ["1 B"]}, "a list of two amounts"),
        ({"uniform": "1 B"}, "a list of two amounts"),
        ({"uniform": ["2 B", "1 B"]}, "'2 B' is more than '1 B'; the lowest amount comes first"),
        ({"uniform": ["1 B", "-2 B"]}, "must not be negative"),
        ({"uniform": [1, 2]}, "must be a text with a number and a unit"),
        ({"uniform": ["1 B", "2 B"], "weights": [1, 1]}, "unknown key 'weights', valid are every, uniform"),
        ({"uniform": ["1 B", "2 B"], "every": "10 s"}, "every = '10 s': must be 'device'"),
        ({"choice": []}, "choice must be a list of amounts"),
        ({"choice": "1 B"}, "choice must be a list of amounts"),
        ({"choice": ["1 B", "2 B"], "weights": [1]}, "a list of 2 numbers, one for each value"),
        ({"choice": ["1 B", "2 B"], "weights": [1, -1]}, "weights = -1: must be a finite number of at least 0"),
        ({"choice": ["1 B", "2 B"], "weights": [0, 0]}, "at least one must be above 0"),
        ({"choice": ["1 B"], "wieghts": [1]}, "unknown key 'wieghts', did you mean 'weights'"),
    ],
)
def test_a_wrong_quantity_says_what_is_right(value, message):
    with pytest.raises(ValueError) as error:
        parse_quantity(value, memory)
    assert message in str(error.value)
