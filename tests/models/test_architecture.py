import pytest

from wildflower.models.architecture import Architecture


def test_json_round_trip():
    for arch in (Architecture((1, 2)), Architecture((3, 0, 4), (2, 1))):
        assert Architecture.from_json(arch.to_json()) == arch
    assert Architecture((1, 2)).to_json() == {"widths": [1, 2]}


def test_equal_architectures_are_one_key():
    assert {Architecture((1, 2), (3,)): "a"}[Architecture((1, 2), (3,))] == "a"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "not list"),
        ({}, "'widths' is missing"),
        ({"widths": [1], "width": 1}, r"unknown keys \['width'\]"),
        ({"widths": 3}, "'widths' must be a list of counts, not int"),
        ({"widths": [1, -2]}, r"widths\[1\] must be a count >= 0, not -2"),
        ({"widths": [1, True]}, r"widths\[1\]"),
        ({"widths": [1], "kernels": [1.0]}, r"kernels\[0\] must be a count >= 0, not 1.0"),
    ],
)
def test_bad_json_is_refused_by_name(value, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_json(value)
