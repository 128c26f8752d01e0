from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.hypemefed import hypernetworks
from benchmarks.hypemefed.hypernetworks import compared, figures, measure, missing
from wildflower.models.vgg import Vgg
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.data import Data, make_data_set
from wildflower.tasks.task import TASKS

FAMILY = Vgg(input_shape=(1, 8, 8), classes=3, block_channels=(2, 3), exits=(0, 1))
# 2 x 1 x 9 entries to 512 to 3 x 2 x 9; 2 x 2 x 9 to 512 to 3 x 3 x 9.
NAIVE = {
    "block1.conv1.weight": 18 * 512 + 512 + 512 * 54 + 54,
    "block1.conv2.weight": 36 * 512 + 512 + 512 * 81 + 81,
}
# 6 and 3 to 512 to 9 and 2 times 6 (three singular vectors make six); 6 and 6 to 512 to 9 and 9.
LOW = {
    "block1.conv1.weight": 6 * 512 + 512 + 513 * 2 * 9 + 3 * 512 + 512 + 513 * 2 * 6,
    "block1.conv2.weight": 6 * 512 + 512 + 513 * 2 * 9 + 6 * 512 + 512 + 513 * 2 * 9,
}


def two_rounds():
    """Four devices, the last two of which are withheld: they change all by 0.1, 0.3, 0.2 and 0.25."""
    first = {name: value for name, value in initial_weights(FAMILY, 1).items() if value.dim() == 4}

    def plus(value):
        return {name: weight + value for name, weight in first.items()}

    return [(plus(begun), [plus(begun + 0.1 * share) for share in (1, 3, 2, 2.5)]) for begun in (0.0, 0.2)]


def test_layers_that_do_not_fit_have_sizes_only(monkeypatch):
    needed = 16 * NAIVE["block1.conv1.weight"]
    monkeypatch.setattr(hypernetworks.psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * needed))
    naive = measure(FAMILY, two_rounds(), "weight", None, epochs=1)
    assert {target: layer["parameters"] for target, layer in naive.items()} == NAIVE
    assert "seconds_per_epoch" in naive["block1.conv1.weight"]
    assert "seconds_per_epoch" not in naive["block1.conv2.weight"]
    assert figures(naive)[4:] == ["does not fit", "", *[""] * 5]
    low = measure(FAMILY, two_rounds(), "change", 100, epochs=1)
    assert {target: layer["parameters"] for target, layer in low.items()} == LOW
    assert [row[0] for row in compared(naive, low)] == ["block1.conv1.weight", "together"]


@pytest.mark.parametrize("guess", ["change", "weight"])
def test_errors_are_those_of_the_withheld_devices(guess):
    """In the last round they change all by 0.2 and 0.25; the mean of the others is 0.2."""
    rounds = two_rounds()
    layers = measure(FAMILY, rounds, guess, 100, epochs=1)
    target = "block1.conv2.weight"
    errors = layers[target]["mean_absolute_error"]
    assert errors["mean_of_others"] == pytest.approx(0.025)
    assert errors["sent"] == pytest.approx(0.225)
    models = rounds[-1][1][2:]
    assert errors["zeros"] == pytest.approx(sum(float(model[target].abs().mean()) for model in models) / 2)
    random = initial_weights(FAMILY, 2)[target]
    assert errors["random"] == pytest.approx(sum(float((random - model[target]).abs().mean()) for model in models) / 2)


def test_changes_that_follow_from_each_other_are_learned():
    """All layers change alike, so that what is right for a withheld device is what its first layer says."""
    layers = measure(FAMILY, two_rounds() * 5, "change", 100, epochs=50)
    for layer in layers.values():
        assert layer["mean_absolute_error"]["generated"] < 0.02


def test_figures_of_several_layers_by_hand():
    """Errors are means over entries: (2 x 0.1 + 6 x 0.5) / 8 = 0.4; 16 bytes per parameter while training."""

    def layer(parameters, entries, seconds, error):
        errors = dict.fromkeys(hypernetworks.ERRORS, error)
        return {
            "parameters": parameters,
            "times": 1 if entries == 2 else 3,
            "entries": entries,
            "seconds_to_read": 2 * seconds,
            "seconds_per_epoch": seconds,
            "mean_absolute_error": errors,
        }

    layers = {"a": layer(1_000_000, 2, 0.5, 0.1), "b": layer(2_000_000, 6, 1.0, 0.5)}
    assert figures(layers) == ["1 to 3", "3,000,000", "12", "48", "3.00", "1.50", *["0.40000"] * 5]
    fast = {"a": layer(10_000, 2, 0.1, 0.2), "b": layer(20_000, 6, 0.2, 0.2)}
    assert compared(layers, fast)[0] == [
        "a",
        "1,000,000 / 10,000",
        "4 / 0",
        "16 / 0",
        "1.00 / 0.20",
        "0.50 / 0.10",
        "0.10000 / 0.20000",
        "99.00 %",
        "5.0",
    ]
    # 1.5 s of both naive ones beside 0.3 s.
    assert compared(layers, fast)[2] == [
        "together",
        "3,000,000 / 30,000",
        "12 / 0",
        "48 / 0",
        "3.00 / 0.60",
        "1.50 / 0.30",
        "0.40000 / 0.20000",
        "99.00 %",
        "5.0",
    ]


def test_a_case_is_run_again_with_other_settings_or_when_there_is_memory_for_more(monkeypatch):
    monkeypatch.setattr(hypernetworks.psutil, "virtual_memory", lambda: SimpleNamespace(available=3200))
    small, large = {"parameters": 100}, {"parameters": 101}
    done = {"parameters": 101, "seconds_per_epoch": 1.0}
    assert not missing({"epochs": 5, "layers": {"a": done, "b": large}}, {"epochs": 5})
    assert missing({"epochs": 5, "layers": {"a": done, "b": small}}, {"epochs": 5})
    assert missing({"epochs": 5, "layers": {"a": done}}, {"epochs": 25})
    assert missing({}, {"epochs": 5})


def test_images_are_scaled_to_the_input(monkeypatch):
    images = torch.arange(20, dtype=torch.uint8).reshape(20, 1, 1, 1).expand(20, 1, 4, 4).contiguous()
    labels = torch.arange(20) % 2
    data = make_data_set(Data(images, labels), Data(images, labels))
    kind = replace(TASKS["fashion-mnist"], load=lambda folder: data)
    monkeypatch.setitem(TASKS, "fashion-mnist", kind)
    task = hypernetworks.scaled(2, (1, 3, 5))
    assert task.input_shape == (1, 3, 5)
    assert torch.equal(task.train.inputs, images[:, :, :1, :1].expand(20, 1, 3, 5))
