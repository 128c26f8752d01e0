import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from idx_files import write_folder

from wildflower.tasks import hub, idx
from wildflower.tasks.task import TASKS, TaskSpec, load_task

# Columns as on the hub; the images of one data set all have one size.
COLUMNS = {
    "mnist": ("image", "label", (28, 28)),
    "fashion-mnist": ("image", "label", (28, 28)),
    "cifar10": ("img", "label", (32, 32, 3)),
    "cifar100": ("img", "fine_label", (32, 32, 3)),
    "svhn": ("image", "label", (32, 32, 3)),
    "stl10": ("image", "label", (96, 96, 3)),
    "femnist": ("image", "character", (28, 28)),
}


def _pixels(count: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def _rows(name: str, count: int, *, seed: int = 0, classes: int = 5) -> datasets.Dataset:
    image, label, shape = COLUMNS[name]
    columns = {
        image: [PIL.Image.fromarray(pixels) for pixels in _pixels(count, shape, seed)],
        label: [number % classes for number in range(count)],
    }
    features = {
        image: datasets.Image(),
        label: datasets.ClassLabel(names=[str(number) for number in range(classes)]),
    }
    if name == "femnist":
        columns["writer_id"] = [f"f{number % 3:04}_{number % 3:02}" for number in range(count)]
        columns["hsf_id"] = [0] * count
        features |= {"writer_id": datasets.Value("string"), "hsf_id": datasets.Value("int64")}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _parquet(folder: Path, name: str, *, train: int = 20, test: int = 10) -> Path:
    (folder / "data").mkdir(parents=True)
    rows = _rows(name, train)
    for part in range(2):  # the hub cuts large splits into several files
        rows.shard(2, part, contiguous=True).to_parquet(folder / "data" / f"train-{part:05}-of-00002.parquet")
    if name != "femnist":
        _rows(name, test, seed=1).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "femnist"])
def test_a_local_copy_in_parquet_files(name: str, tmp_path: Path) -> None:
    data = TASKS[name].load(str(_parquet(tmp_path / "copy", name)))
    expected = torch.from_numpy(_pixels(20, COLUMNS[name][2], 0)).view(20, *COLUMNS[name][2][:2], -1)
    assert torch.equal(data.train.inputs, expected.permute(0, 3, 1, 2))
    assert data.train.labels.tolist() == [number % 5 for number in range(20)]
    assert len(data.test) == 10
    assert data.classes == 5
    assert data.natural_ids is None


def test_a_local_copy_that_datasets_saved(tmp_path: Path) -> None:
    splits = {"train": _rows("cifar10", 20), "test": _rows("cifar10", 10, seed=1)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    _parquet(tmp_path / "parquet", "cifar10")
    saved, parquet = (hub.load("cifar10", str(tmp_path / kind)) for kind in ("saved", "parquet"))
    assert torch.equal(saved.train.inputs, parquet.train.inputs)
    assert torch.equal(saved.test.inputs, parquet.test.inputs)


def test_the_layout_of_converted_parquet_files_with_several_configurations(tmp_path: Path) -> None:
    for config, count in (("cropped_digits", 20), ("full_numbers", 3)):
        for split in ("train", "test", "extra"):
            (tmp_path / config / split).mkdir(parents=True)
            _rows("svhn", count).to_parquet(tmp_path / config / split / "0000.parquet")
    data = hub.load("svhn", str(tmp_path))
    assert len(data.train) == len(data.test) == 20


@pytest.mark.parametrize("saved", [True, False])
def test_femnist_knows_writers_and_holds_out_a_test_set(saved: bool, tmp_path: Path) -> None:
    if saved:
        _rows("femnist", 300).save_to_disk(tmp_path / "copy")
    else:
        _parquet(tmp_path / "copy", "femnist", train=300)
    spec = TaskSpec(name="femnist", data_dir=str(tmp_path / "copy"), partition="natural", devices=3)
    task = load_task(spec)
    assert torch.bincount(task.test.labels).tolist() == [6] * 5
    assert len(task.train) == 270
    assert task.input_shape == (1, 28, 28)
    # Image k is of writer k mod 3, and images are told apart by their pixels.
    writer_of = {image.tobytes(): number % 3 for number, image in enumerate(_pixels(300, (28, 28), 0))}
    writers = []
    for device in range(3):
        shard = task.shard(device)
        examples = torch.cat([shard.train, shard.test])
        writers.append({writer_of[task.train.inputs[example].numpy().tobytes()] for example in examples.tolist()})
    assert sorted(map(sorted, writers)) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="4 devices are more than the 3 natural ids"):
        load_task(TaskSpec(name="femnist", data_dir=str(tmp_path / "copy"), partition="natural", devices=4))


@pytest.mark.parametrize(
    ("size", "shape"), [("[32]", (1, 32, 32)), ("[20, 32]", (1, 20, 32)), ("[28, 28]", (1, 28, 28))]
)
def test_femnist_of_another_size(size: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = str(_parquet(tmp_path / "copy", "femnist", train=300))
    as_it_is = load_task(TaskSpec(name="femnist", data_dir=folder, devices=3))  # kept, and not taken for the other
    arguments = hub.FemnistArguments.model_validate_json(f'{{"size": {size}}}')
    task = load_task(TaskSpec(name="femnist", data_dir=folder, devices=3, arguments=arguments))
    assert (as_it_is.input_shape, task.input_shape) == ((1, 28, 28), shape)
    assert torch.equal(task.train.labels, as_it_is.train.labels)
    same = PIL.Image.fromarray(as_it_is.train.inputs[0, 0].numpy()).resize(shape[:0:-1], PIL.Image.Resampling.BILINEAR)
    assert np.array_equal(task.train.inputs[0, 0].numpy(), np.array(same))
    if shape == (1, 28, 28):
        assert torch.equal(task.train.inputs, as_it_is.train.inputs)


def test_a_kept_copy_is_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(_parquet(tmp_path / "copy", "cifar10"))
    first = hub.load("cifar10", folder)
    monkeypatch.setattr(hub, "_decode", None)
    assert torch.equal(hub.load("cifar10", folder).train.inputs, first.train.inputs)


def test_what_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    asked = []

    class Hub:
        @staticmethod
        def load_dataset(path: str, config: str | None, *, split: str) -> datasets.Dataset:
            asked.append((path, config, split))
            return _rows("svhn", 20 if split == "train" else 10)

    monkeypatch.setattr(hub, "import_datasets", lambda: Hub)
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    assert len(hub.load("svhn", "").test) == 10
    assert asked == [("ufldl-stanford/svhn", "cropped_digits", split) for split in ("train", "test")]
    hub.load("svhn", "")
    assert len(asked) == 2


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    class Hub:
        @staticmethod
        def load_dataset(*_args: object, **_kwargs: object) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr(hub, "import_datasets", lambda: Hub)
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    with pytest.raises(FileNotFoundError, match=r"uoft-cs/cifar10 could not be downloaded \(no route\).*set data-dir"):
        hub.load("cifar10", "")


def test_without_a_network_nothing_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Port 9 of this machine refuses connections."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a request is tried again"))
    words = r"uoft-cs/cifar10 could not be downloaded \(no connection to http://127.0.0.1:9: .*refused.*set data-dir"
    with pytest.raises(FileNotFoundError, match=words):
        hub.load("cifar10", "")
    assert "etrying" not in "".join(capfd.readouterr())
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("error", "reached"),
    [
        (urllib.error.HTTPError("http://hub", 503, "busy", Message(), None), True),
        (urllib.error.URLError(ssl.SSLCertVerificationError("who are you")), True),
        (urllib.error.URLError(socket.gaierror(-2, "Name or service not known")), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_who_answers_is_reached(error: OSError, reached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert (hub.unreachable() == "") == reached


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_a_folder_without_data(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected"):
        TASKS[name].load(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        TASKS[name].load(str(tmp_path / "nowhere"))


def test_a_copy_without_test_split(tmp_path: Path) -> None:
    _parquet(tmp_path / "copy", "cifar10")
    (tmp_path / "copy" / "data" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="no data of the split 'test'"):
        hub.load("cifar10", str(tmp_path / "copy"))


def test_a_copy_of_another_data_set(tmp_path: Path) -> None:
    _parquet(tmp_path / "copy", "cifar10")
    with pytest.raises(ValueError, match="uoft-cs/cifar100 has no column 'fine_label', only img, label"):
        hub.load("cifar100", str(tmp_path / "copy"))


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    _parquet(tmp_path / "copy", "cifar10")
    file = tmp_path / "copy" / "data" / "train-00001-of-00002.parquet"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"train-00001-of-00002.parquet: not a whole parquet file \(\d+ bytes\)"):
        hub.load("cifar10", str(tmp_path / "copy"))


def _one_bad_image(folder: Path, content: bytes | None) -> str:
    _parquet(folder, "cifar10")
    good = io.BytesIO()
    PIL.Image.fromarray(_pixels(1, (32, 32, 3), 0)[0]).save(good, "PNG")
    images = [{"bytes": content if number == 3 else good.getvalue(), "path": None} for number in range(5)]
    datasets.Dataset.from_dict({"img": images, "label": [0, 1, 2, 3, 4]}).to_parquet(
        folder / "data" / "test-00000-of-00001.parquet"
    )
    return str(folder)


@pytest.mark.parametrize("content", [b"no image", None])
def test_an_image_that_cannot_be_decoded_is_named(content: bytes | None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uoft-cs/cifar10: image 3 cannot be decoded"):
        hub.load("cifar10", _one_bad_image(tmp_path / "copy", content))


def test_an_image_of_another_size_is_named(tmp_path: Path) -> None:
    small = io.BytesIO()
    PIL.Image.fromarray(_pixels(1, (8, 8, 3), 0)[0]).save(small, "PNG")
    with pytest.raises(ValueError, match=r"image 3 is \(3, 8, 8\), the first is \(3, 32, 32\)"):
        hub.load("cifar10", _one_bad_image(tmp_path / "copy", small.getvalue()))


def test_mnist_reads_either_format(tmp_path: Path) -> None:
    assert len(idx.load("mnist", str(write_folder(tmp_path / "idx"))).train) == 40
    assert len(idx.load("mnist", str(_parquet(tmp_path / "parquet", "mnist"))).train) == 20
