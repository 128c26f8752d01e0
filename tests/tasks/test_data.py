import os
import stat
from pathlib import Path

import pytest
import torch

from wildflower.tasks.data import (
    Data,
    DataSet,
    cache_folder,
    decoded_once,
    make_data_set,
    stratified_test,
    written_whole,
)


def _data(*, train: int = 30, test: int = 10, channels: int = 2) -> tuple[Data, Data]:
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> Data:
        inputs = torch.randint(0, 256, (count, channels, 4, 3), generator=generator, dtype=torch.uint8)
        return Data(inputs, torch.arange(count) % 3)

    return some(train), some(test)


def _equal(first: DataSet, second: DataSet) -> bool:
    return (
        first.classes == second.classes
        and torch.equal(first.train.inputs, second.train.inputs)
        and torch.equal(first.train.labels, second.train.labels)
        and torch.equal(first.test.inputs, second.test.inputs)
        and torch.equal(first.test.labels, second.test.labels)
        and torch.equal(first.mean, second.mean)
        and torch.equal(first.std, second.std)
    )


def test_mean_and_std_are_measured_per_channel() -> None:
    train, test = _data()
    data = make_data_set(train, test)
    pixels = train.inputs.double().permute(1, 0, 2, 3).flatten(1)
    torch.testing.assert_close(data.mean, pixels.mean(1).float())
    torch.testing.assert_close(data.std, pixels.std(1, correction=0).float())


def test_signals_are_measured_in_the_unit_they_come_in() -> None:
    generator = torch.Generator().manual_seed(0)
    signals = torch.randn((40, 3, 50), generator=generator) * torch.tensor([1e-3, 1.0, 5.0])[:, None] + 0.25
    data = make_data_set(Data(signals, torch.arange(40) % 3), Data(signals[:5] + 9, torch.arange(5) % 3))
    wide = signals.double().permute(1, 0, 2).flatten(1)
    torch.testing.assert_close(data.mean, wide.mean(1).float())
    torch.testing.assert_close(data.std, wide.std(1, correction=0).float())
    # The order of the examples does not matter, not even for the last bit.
    turned = make_data_set(Data(signals.flip(0), torch.arange(40) % 3), Data(signals[:5], torch.arange(5) % 3))
    assert torch.equal(turned.mean, data.mean)
    assert torch.equal(turned.std, data.std)
    signals[3, 1, 7] = torch.nan
    with pytest.raises(ValueError, match="an input is no finite number"):
        make_data_set(Data(signals, torch.arange(40) % 3), Data(signals[:5], torch.arange(5) % 3))


def test_classes_are_counted_over_training_and_test_labels() -> None:
    train, test = _data()
    assert make_data_set(train, Data(test.inputs, test.labels + 4)).classes == 7


def test_what_is_no_data_set() -> None:
    train, test = _data()
    with pytest.raises(ValueError, match="30 inputs do not go with 29 labels"):
        Data(train.inputs, train.labels[:-1])
    with pytest.raises(ValueError, match="found 30 for training and 0 for testing"):
        make_data_set(train, Data(test.inputs[:0], test.labels[:0]))
    with pytest.raises(ValueError, match=r"bytes, float32 or float64, both alike, not torch\.float32 and torch\.uint8"):
        make_data_set(Data(train.inputs.float(), train.labels), test)
    with pytest.raises(ValueError, match=r"\(2, 4, 3\), test inputs \(1, 4, 3\)"):
        make_data_set(train, _data(channels=1)[1])
    with pytest.raises(ValueError, match="labels count from 0, found -1"):
        make_data_set(train, Data(test.inputs, test.labels - 1))
    with pytest.raises(ValueError, match="one value only"):
        make_data_set(Data(torch.zeros_like(train.inputs), train.labels), test)


def test_a_held_out_set_has_its_share_of_every_class() -> None:
    labels = torch.tensor([0] * 50 + [1] * 20 + [2] * 10)
    mask = stratified_test(labels, 0.2)
    assert torch.bincount(labels[mask]).tolist() == [10, 4, 2]
    assert torch.equal(mask, stratified_test(labels, 0.2))
    torch.rand(3)  # whatever the run does with the global generator
    assert torch.equal(mask, stratified_test(labels, 0.2))


def test_a_data_set_is_decoded_once_and_read_back(empty_cache: Path) -> None:
    made = make_data_set(*_data(), natural_ids=torch.arange(30))
    calls = []

    def decode() -> DataSet:
        calls.append(1)
        return made

    first, second = decoded_once("toy", "key", decode), decoded_once("toy", "key", decode)
    assert len(calls) == 1
    assert _equal(first, made)
    assert _equal(second, made)
    assert second.natural_ids is not None
    assert second.natural_ids.tolist() == list(range(30))
    assert [file.name for file in (empty_cache / "data").iterdir()] == ["toy-key.safetensors"]


def test_a_spoiled_cache_file_is_named(empty_cache: Path) -> None:
    decoded_once("toy", "key", lambda: make_data_set(*_data()))
    (file,) = (empty_cache / "data").iterdir()
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"toy-key\.safetensors cannot be read .* delete it"):
        decoded_once("toy", "key", lambda: make_data_set(*_data()))


def test_a_file_that_fails_halfway_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before")

    def fail() -> None:
        with written_whole(tmp_path / "a.txt") as beside:
            beside.write_text("half")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_the_cache_folder_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WILDFLOWER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("data") == tmp_path / ".cache" / "wildflower" / "data"


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o755)])
def test_the_users_own_cache_is_closed_to_others_and_one_that_is_named_is_as_the_umask_says(
    shared: bool, mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / ("shared" if shared else ".cache/wildflower")
    monkeypatch.setenv("WILDFLOWER_CACHE", str(root) if shared else "")
    before = os.umask(0o022)
    try:
        with written_whole(cache_folder("data") / "x.safetensors") as file:
            file.write_bytes(b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(root.stat().st_mode) == mode
    assert (root / "data" / "x.safetensors").read_bytes() == b"x"
