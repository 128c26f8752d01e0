import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from idx_files import idx_bytes, write_folder

from wildflower.tasks import hub, idx

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_is_read_as_it_was_written(tmp_path: Path, packed: bool) -> None:
    data = idx.load_any(str(write_folder(tmp_path / "mine", packed=packed)))
    rng = np.random.default_rng(5)
    assert torch.equal(data.train.inputs, torch.from_numpy(rng.integers(0, 256, (40, 6, 5)).astype(np.uint8))[:, None])
    assert data.train.labels.tolist() == [number % 4 for number in range(40)]
    assert data.test.inputs.shape == (20, 1, 6, 5)
    assert data.test.inputs.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64
    assert data.classes == 4
    pixels = data.train.inputs.double()
    torch.testing.assert_close(data.mean.double(), pixels.mean()[None], rtol=1e-6, atol=0)
    torch.testing.assert_close(data.std.double(), pixels.std(correction=0)[None], rtol=1e-6, atol=0)


def test_a_packed_and_an_unpacked_copy_of_one_file_do_not_compete(tmp_path: Path) -> None:
    write_folder(tmp_path, packed=True)
    write_folder(tmp_path, packed=False)
    assert len(idx.load_any(str(tmp_path)).train) == 40


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    assert len(idx.load_any(str(write_folder(tmp_path, train=40))).train) == 40
    assert len(idx.load_any(str(write_folder(tmp_path, train=44))).train) == 44


def test_file_names_of_other_sources(tmp_path: Path) -> None:
    write_folder(tmp_path, packed=False)
    for file in list(tmp_path.iterdir()):
        file.rename(tmp_path / ("emnist-" + file.name.replace("t10k", "test").replace("-idx", ".idx")))
    assert len(idx.load_any(str(tmp_path)).test) == 20


def _broken(tmp_path: Path, name: str, content: bytes) -> str:
    (write_folder(tmp_path, packed=False) / name).write_bytes(content)
    with pytest.raises(ValueError, match=name) as raised:
        idx.load_any(str(tmp_path))
    return str(raised.value)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    whole = (write_folder(tmp_path, packed=False) / IMAGES).read_bytes()
    message = _broken(tmp_path, IMAGES, whole[:-1])
    assert f"truncated, {len(whole) - 1} bytes" in message
    assert f"asks for {len(whole)}" in message


def test_a_file_that_is_too_long(tmp_path: Path) -> None:
    whole = (write_folder(tmp_path, packed=False) / IMAGES).read_bytes()
    assert "too long" in _broken(tmp_path, IMAGES, whole + b"\0")


def test_a_file_cut_in_its_header(tmp_path: Path) -> None:
    whole = (write_folder(tmp_path, packed=False) / IMAGES).read_bytes()
    assert "header, 9 of 16 bytes" in _broken(tmp_path, IMAGES, whole[:9])


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", idx_bytes(np.zeros((3, 6), int))])
def test_a_wrong_magic_number(tmp_path: Path, content: bytes) -> None:
    assert "starts with 00000803" in _broken(tmp_path, IMAGES, content)


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    packed = write_folder(tmp_path) / f"{IMAGES}.gz"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"idx3-ubyte\.gz: not a whole gzip file \(\d+ bytes\)"):
        idx.load_any(str(tmp_path))


def test_a_gzip_file_that_is_none(tmp_path: Path) -> None:
    (write_folder(tmp_path) / f"{IMAGES}.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a whole gzip file"):
        idx.load_any(str(tmp_path))


def test_images_and_labels_of_different_numbers(tmp_path: Path) -> None:
    message = _broken(tmp_path, LABELS, idx_bytes(np.zeros(39)))
    assert "40 images" in message
    assert "39 labels" in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write_folder(tmp_path) / f"{LABELS}.gz").unlink()
    with pytest.raises(FileNotFoundError, match=f"no file with the train labels; expected .* {LABELS}"):
        idx.load_any(str(tmp_path))


def test_two_data_sets_in_one_folder(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / f"letters-{IMAGES}.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match=f"several files could hold the train images: letters-{IMAGES}"):
        idx.load_any(str(tmp_path))


def test_a_data_folder_that_is_not_there_is_an_error_even_where_the_data_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idx, "INSTALL_FOLDER", tmp_path)
    write_folder(tmp_path / "mnist")
    assert len(idx.load("mnist", "").train) == 40
    with pytest.raises(FileNotFoundError, match="data-dir '/no/such/folder' of the task 'mnist' does not exist"):
        idx.load("mnist", "/no/such/folder")


def test_a_data_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="is a file"):
        idx.load("mnist", str(tmp_path / "file"))


def test_a_named_folder_comes_before_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "INSTALL_FOLDER", tmp_path)
    write_folder(tmp_path / "mnist")
    assert len(idx.load("mnist", str(write_folder(tmp_path / "mine", train=8))).train) == 8


def test_without_any_data_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        @staticmethod
        def load_dataset(*_args: object, **_kwargs: object) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr(idx, "INSTALL_FOLDER", tmp_path)
    monkeypatch.setattr(hub, "import_datasets", lambda: Unreachable)
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    with pytest.raises(FileNotFoundError, match=r"set data-dir .* or put them into .*mnist.*ylecun/mnist.*no route"):
        idx.load("mnist", "")


def test_any_folder_must_be_named() -> None:
    with pytest.raises(ValueError, match="'idx' needs data-dir"):
        idx.load_any("")


def test_files_where_the_systems_package_puts_them_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "INSTALL_FOLDER", tmp_path)
    write_folder(tmp_path / "fashion-mnist", test=30, classes=10, size=(28, 28))
    data = idx.load("fashion-mnist", "")
    assert data.train.inputs.shape == (40, 1, 28, 28)
    assert torch.bincount(data.test.labels).tolist() == [3] * 10
