"""wildflower/tasks/two_parts.py."""

import pytest
import torch

from wildflower.tasks.data import Data
from wildflower.tasks.two_parts import seldom_meant


def made(examples, *shape, seed=0, scale=1.0, classes=3):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (examples,), generator=generator)
    # A test set of one class alone has another mean and a smaller deviation.
    middles = labels.reshape(-1, *([1] * len(shape))).double()
    return Data(((torch.randn(examples, *shape, generator=generator) + 2 * middles) * scale).float(), labels)


def bytes_of(data):
    return Data((data.inputs * 10 + 100).clamp(0, 255).to(torch.uint8), data.labels)


TRAIN = made(200, 5, 1)


def told(train, test):
    return [(remark.what, remark.count, remark.example) for remark in seldom_meant(train, test)]


def test_nothing_is_told_of_two_parts_that_are_alike():
    assert told(TRAIN, made(60, 5, 1, seed=1)) == []
    one_class = Data(*(part[made(200, 5, 1, seed=1).labels == 2] for part in vars(made(200, 5, 1, seed=1)).values()))
    assert told(TRAIN, one_class) == []
    assert told(TRAIN, Data(TRAIN.inputs[:0], TRAIN.labels[:0])) == []
    assert told(bytes_of(made(200, 1, 4, 4)), bytes_of(made(60, 1, 4, 4, seed=1))) == []


def test_a_test_on_what_was_learned_by_heart_is_told():
    test = made(60, 5, 1, seed=1)
    few, many = test.inputs.clone(), test.inputs.clone()
    few[7], many[20:30] = TRAIN.inputs[3], TRAIN.inputs[50:60]
    assert told(TRAIN, Data(few, test.labels)) == []  # one in twenty is usual where rows have few values
    [(what, count, example)] = told(TRAIN, Data(many, test.labels))
    assert what.startswith("test examples of 60 whose inputs are training examples")
    assert (count, example) == (10, "test example 20")
    assert told(TRAIN, TRAIN)[0][1] == 200


@pytest.mark.parametrize("scale", [1 / 16, 16.0])
def test_inputs_of_another_scale_are_told(scale):
    [(what, count, _)] = told(TRAIN, made(60, 5, 1, seed=1, scale=scale))
    assert what.startswith("test examples whose inputs have another scale")
    assert count == 60
    bright = bytes_of(made(60, 1, 4, 4, seed=1))
    dark = Data((bright.inputs / 255).to(torch.uint8), bright.labels)
    assert len(told(bytes_of(made(200, 1, 4, 4)), dark)) == 1
    # The numbers of letters and tokens are names.
    letters = Data(torch.randint(10, (200, 8)).to(torch.uint8), TRAIN.labels)
    assert told(letters, Data(letters.inputs + 100, TRAIN.labels)) == []


def test_inputs_that_are_all_the_same_are_told():
    same = Data(torch.ones(200, 5, 1), TRAIN.labels)
    assert told(same, made(60, 5, 1))[0][:2] == (
        "training examples whose inputs are all the same, so that nothing can be learned",
        200,
    )
    same.inputs[199] = 2.0
    assert "all the same" not in str(told(same, made(60, 5, 1)))
