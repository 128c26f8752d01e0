"""Folders of images as people keep them: what is read, what is left out and told, and what is refused."""

import logging
import os

import numpy as np
import pytest
from PIL import Image

from wildflower.cli.predict import PredictError, _predict
from wildflower.messages.programs import Facts
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.tasks.images import ImageArguments, load, own
from wildflower.tasks.inspection import describe, inspect_device, inspect_whole, server_test
from wildflower.tasks.task import TaskSpec, load_task

GRAY = ImageArguments(color="gray")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "photos"


def put(folder, *names):
    """Images that differ in all pixels, and files that are none; a name that ends in a slash is a folder."""
    for number, name in enumerate(names):
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in (".png", ".jpg", ".jfif", ".gif", ".webp", ".tif"):
            form = {".jpg": "JPEG", ".jfif": "JPEG", ".tif": "TIFF"}.get(path.suffix.lower(), path.suffix[1:].upper())
            image = Image.linear_gradient("L").resize((4, 4)).rotate(90 * number)
            image.save(path, form)
        elif not name.endswith("/"):
            path.write_bytes(b"anything")
    return folder


def counted(data):
    """How many things were remarked on, by the first words about them."""
    return {remark.what.split(",")[0]: (remark.count, remark.example) for remark in data.remarks}


def images_of(data):
    return {name: data.train.labels.tolist().count(n) for n, name in enumerate(data.label_names)}


def test_photos_in_folders_inside_of_a_class_are_of_the_class(folder):
    put(folder, "cat/2023/1.png", "cat/2024/may/2.PNG", "cat/3.png", "dog/4.png")
    data = own(str(folder), GRAY)
    assert images_of(data) == {"cat": 3, "dog": 1}
    assert counted(data) == {"images in folders inside that of their class": (2, "cat/2023/1.png")}


def test_endings_in_any_case_and_jfif_are_read(folder):
    put(folder, "a/1.JPG", "a/2.jfif", "a/3.Png", "b/4.gif", "b/5.webp", "b/6.TIF")
    data = own(str(folder), GRAY)
    assert (images_of(data), data.remarks) == ({"a": 3, "b": 3}, ())


def test_whatever_is_not_read_is_counted_with_its_reason(folder):
    hidden = ("cat/.DS_Store", "cat/Thumbs.db", "cat/._1.png", "__MACOSX/cat/._1.png", ".git/config", "dog/desktop.ini")
    put(folder, "cat/1.png", "dog/1.png", *hidden, "cat/2.HEIC", "dog/3.heic", "dog/photos.zip", "cat/scan", "0.png")
    put(folder, "readme.txt", "cat/list.txt")
    os.symlink(folder / "gone", folder / "cat" / "gone.png")
    os.symlink(folder / "cat", folder / "cat" / "again")
    os.mkfifo(folder / "dog" / "pipe.png")
    assert counted(own(str(folder), GRAY)) == {
        "hidden files and folders": (6, ".git"),
        "photos that end in .heic": (2, "cat/2.HEIC"),
        "links that lead nowhere": (2, "cat/again"),
        "files that end in .txt": (2, "readme.txt"),
        "archives": (1, "dog/photos.zip"),
        "files without an ending": (1, "cat/scan"),
        "images that lie in no folder of a class": (1, "0.png"),
        "things that are no files": (1, "dog/pipe.png"),
    }


def test_a_link_to_a_folder_elsewhere_is_read(tmp_path, folder):
    put(tmp_path / "elsewhere", "1.png", "2.png")
    put(folder, "dog/1.png")
    os.symlink(tmp_path / "elsewhere", folder / "cat")
    assert images_of(own(str(folder), GRAY)) == {"cat": 2, "dog": 1}


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (("cat/1.heic", "cat/2.heic"), r"cat: no image is read for this class \(photos that end in .heic, .*: 2, such"),
        (("cat/",), "cat: no image is read for this class, the folder is empty"),
        (("cat/cat.zip",), r"\(archives, left out because they are not unpacked: 1, such as cat/cat.zip\)"),
        (("train/cat/a.txt", "train/dog/1.png"), "train/cat: no image is read for this class"),
    ],
)
def test_a_class_that_ends_up_empty_is_an_error(folder, inside, why):
    put(folder, "dog/1.png", *inside)
    with pytest.raises(ValueError, match=why):
        own(str(folder), GRAY)


def test_a_class_may_have_nothing_to_test_on(folder):
    put(folder, "train/cat/1.png", "train/dog/1.png", "test/cat/1.png", "test/dog/")
    data = own(str(folder), GRAY)
    assert (len(data.train), len(data.test)) == (2, 1)
    assert counted(data) == {"folders without images": (1, "dog")}


@pytest.mark.parametrize("name", ["valid", "val", "validation", "dev", "Val"])
def test_a_folder_for_validation_is_counted_and_is_no_class(folder, name):
    put(folder, "train/cat/1.png", "train/dog/1.png", f"{name}/cat/2.png", f"{name}/dog/3.png")
    data = own(str(folder), GRAY)
    assert (images_of(data), len(data.test)) == ({"cat": 1, "dog": 1}, 0)
    assert counted(data) == {f"images in {name}/": (2, f"{name}/cat/2.png")}


def test_a_folder_for_validation_beside_classes(folder):
    put(folder, "cat/1.png", "dog/1.png", "valid/cat/2.png")
    assert counted(own(str(folder), GRAY)) == {"images in valid/": (1, "valid/cat/2.png")}


def test_test_images_without_classes_are_counted(folder):
    put(folder, "train/cat/1.png", "train/dog/1.png", "test/1.png", "test/2.png", "extra/cat/1.png", "docs/a.md")
    data = own(str(folder), GRAY)
    assert (len(data.train), len(data.test)) == (2, 0)
    assert counted(data) == {
        "images that lie in no folder of a class": (2, "test/1.png"),
        "images in folders beside train/": (1, "extra/cat/1.png"),
        "folders without images beside train/": (1, "docs"),
    }


def test_splits_are_known_whatever_their_capitals(folder):
    put(folder, "Training/cat/1.png", "Training/dog/1.png", "TESTING/cat/2.png")
    data = own(str(folder), GRAY)
    assert (len(data.train), len(data.test), data.remarks) == (2, 1, ())
    put(folder, "train/cat/1.png")
    with pytest.raises(ValueError, match="Training/ and train/ mean the same: leave one of them"):
        own(str(folder), GRAY)


def test_classes_called_like_splits(folder):
    put(folder, "bus/1.png", "car/1.png", "train/1.png")
    assert images_of(own(str(folder), GRAY)) == {"bus": 1, "car": 1, "train": 1}
    put(folder, "test/1.png")
    with pytest.raises(ValueError, match=r"If 'test' is a class, .* classes = \['bus', 'car', 'test'\]"):
        own(str(folder), GRAY)
    three = folder.parent / "three"
    put(three, "bus/1.png", "train/1.png", "test/1.png")
    with pytest.raises(ValueError, match=r"classes = \['bus', 'train', 'test'\]"):
        own(str(three), GRAY)
    declared = ImageArguments(color="gray", classes=("bus", "car", "test", "train"))
    assert images_of(own(str(folder), declared)) == {"bus": 1, "car": 1, "test": 1, "train": 1}


def test_declared_classes_have_their_order_where_images_are_dealt_out(folder):
    put(folder, *(f"{label}/{n}.png" for label in ("test", "cat") for n in range(5)))
    engine, _ = build(config(folder, **{"task-arguments": "classes = ['test', 'dog', 'cat'], size = [8, 8]"}))
    task = load_task(TaskSpec.from_json(engine.settings.task))
    assert (task.label_names, task.classes) == (("test", "dog", "cat"), 3)
    assert inspect_whole(task).counts == {"test": (4, 1), "dog": (0, 0), "cat": (4, 1)}
    with pytest.raises(ValueError, match="the run has no label 'cat': it has 'test', 'dog'"):
        load(str(folder), ImageArguments(classes=("test", "dog")))


def test_a_class_called_test_inside_of_splits(folder):
    put(folder, "train/test/1.png", "train/train/1.png", "test/test/1.png", "test/train/1.png")
    data = own(str(folder), GRAY)
    assert (data.label_names, len(data.train), len(data.test)) == (("test", "train"), 2, 2)


def test_a_declared_class_is_read_anew_though_its_files_are_the_same(folder):
    put(folder, "train/a/1.png", "train/b/1.png", "test/a/1.png", "bus/1.png")
    assert len(own(str(folder), GRAY).test) == 1
    declared = ImageArguments(color="gray", classes=("train", "test", "bus"))
    assert images_of(own(str(folder), declared)) == {"bus": 1, "test": 1, "train": 2}


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("train/1.png", "test/1.png"), "images lie in no folder of a class"),
        (("photos/cat/1.png", "photos/dog/1.png"), "photos: is it a class.* all images lie in cat, dog"),
        (
            ("photos/train/cat/1.png", "photos/test/dog/1.png"),
            "photos/test: it is called like a split, but lies inside",
        ),
        (("cat/train/1.png", "cat/val/1.png", "dog/train/1.png"), "cat/val: it is called like a split"),
    ],
)
def test_folders_that_nobody_can_tell_from_classes_are_refused(folder, names, why):
    with pytest.raises(ValueError, match=why):
        own(str(put(folder, *names)), GRAY)


def test_no_images_says_what_there_is(folder):
    put(folder, "photos.zip", "1.png")
    with pytest.raises(FileNotFoundError, match=r"no images .*, but archives, .*: 1, .* no folder of a class, .*: 1"):
        own(str(folder), GRAY)


def test_only_images_to_test_on_are_an_error_where_they_are_dealt_out(folder):
    put(folder, "cat/1.png", "dog/1.png", "test/cat/1.png")
    with pytest.raises(
        ValueError, match=r"none to train on: images in folders beside test/, left out: 2, such as cat/1"
    ):
        load(str(folder), GRAY)


def test_lists_of_images(folder):
    put(folder, "a/1.png", "a/2.png", "b/3.png")
    (folder / "metadata.csv").write_text("file_name;label\na\\1.png;cat\nb/3.png;dog\n")
    data = own(str(folder), GRAY)
    assert images_of(data) == {"cat": 1, "dog": 1}
    assert counted(data) == {"images that metadata.csv does not list": (1, "a/2.png")}
    (folder / "metadata.csv").write_text("file_name,label\na/1.png,cat\na/1.png,dog\n")
    with pytest.raises(ValueError, match=r"metadata\.csv:3: 'a/1\.png' is listed twice"):
        own(str(folder), GRAY)
    (folder / "metadata.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"there are metadata\.csv and metadata\.jsonl: leave one"):
        own(str(folder), GRAY)


def test_a_list_over_splits_would_train_on_what_is_for_testing(folder):
    put(folder, "train/1.png", "test/2.png")
    (folder / "metadata.csv").write_text("file_name,label\ntrain/1.png,cat\ntest/2.png,dog\n")
    with pytest.raises(ValueError, match="it lists images in test/ beside others"):
        own(str(folder), GRAY)


def test_the_folders_of_simulated_devices_are_no_classes(folder):
    put(folder, "devices/0000/cat/1.png", "devices/0001/dog/1.png", "notes/a.txt")
    spec = TaskSpec(name="images", devices=2, data_dir=str(folder), partition="own", arguments=GRAY)
    assert server_test(spec) is None
    put(folder, "cat/1.png", "dog/1.png", "devices/0000/dog/1.png")
    (folder / "notes" / "a.txt").unlink()
    (folder / "notes").rmdir()
    assert counted(own(str(folder), GRAY)) == {"folders of simulated devices": (1, "devices")}


def test_a_device_tells_what_it_left_out_also_where_nothing_remains(folder):
    put(folder, "cat/1.png", "dog/1.png", "dog/2.heic", "dog/2023/2.png")
    spec = TaskSpec(name="images", devices=1, data_dir=str(folder), partition="own", arguments=GRAY, test_fraction=0.4)
    said = describe(spec, 0, moments=True)
    assert (said.examples, [(r.count, r.example) for r in said.remarks]) == (
        2,
        [(1, "dog/2.heic"), (1, "dog/2023/2.png")][::-1],
    )
    found = inspect_device(spec, 0)
    assert (found.counts, found.remarks, found.problem) == ({"cat": (1, 0), "dog": (2, 0)}, said.remarks, "")
    put(folder, "test/cat/1.png")
    assert describe(spec, 0, moments=True).problem.startswith(
        "it has no training examples: images in folders beside test/, left out: 3, such as cat/1.png"
    )
    assert "does not exist" in inspect_device(TaskSpec(**{**vars(spec), "data_dir": str(folder / "no")}), 0).problem


def config(folder, **changes):
    values = {
        "task": "images",
        "task-arguments": "color = 'gray', size = [8, 8]",
        "partition": "iid",
        "data-dir": str(folder),
        "devices": 2,
        "devices-per-round": 2,
        "fleet": "five-memories",
        "strategy": "fedavg",
        "fedavg.use": "all-large",
        "family": "lenet5",
        "family-arguments": "",
    }
    return RunConfig.from_run_config(values | changes)


def test_what_was_left_out_is_in_the_log_before_round_1(folder, caplog):
    put(folder, *(f"{label}/{n}.png" for label in ("Yes", "yes", "NA") for n in range(5)), "yes/6.heic")
    with caplog.at_level(logging.WARNING, logger="flwr"):
        build(config(folder))
    told = [record.getMessage() for record in caplog.records]
    left_out = "photos that end in .heic, which is not read (save them as .jpg): 1, such as yes/6.heic"
    assert f"Data of {folder}: {left_out}" in told
    assert "These labels look alike, and are classes of their own: 'Yes', 'yes'" in told
    assert "This label is what programs write where a value is missing, and is a class here: 'NA'" in told
    task = load_task(TaskSpec(name="images", devices=1, data_dir=str(folder), arguments=GRAY))
    assert inspect_whole(task).counts == {"NA": (4, 1), "Yes": (4, 1), "yes": (4, 1)}


def test_devices_with_the_same_reason_share_a_line_of_the_log(folder, caplog):
    for device in ("0000", "0001"):
        put(folder / "devices" / device, *(f"{label}/{n}.png" for label in "ab" for n in range(4)), "a/1.heic")
    with caplog.at_level(logging.WARNING, logger="flwr"):
        build(config(folder, partition="own", **{"test-fraction": 0.25}))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Data of")]
    reason = "photos that end in .heic, which is not read (save them as .jpg)"
    assert lines == [f"Data of devices 0, 1: {reason}: 2, such as a/1.heic"]


def test_predictions_are_not_made_of_hidden_files(folder):
    put(folder, "._1.png", "Thumbs.db")
    facts = Facts.model_construct(input_shape=[1, 4, 4], input_dtype="uint8", task="images")
    with pytest.raises(PredictError, match="holds no images"):
        _predict(lambda inputs: inputs, facts, folder)


def test_scans_of_12_bits_that_become_nearly_black_are_counted(folder):
    """The upper 8 of 16 bits of values up to 4,095 are 0 to 15."""
    for name, largest in (("weak/1.tif", 4095), ("weak/2.tif", 4096), ("full/1.tif", 65535)):
        put(folder, name)
        Image.fromarray(np.linspace(0, largest, 16).reshape(4, 4).astype(np.uint16)).save(folder / name)
    [remark] = own(str(folder), GRAY).remarks
    assert (remark.count, remark.example) == (1, "weak/1.tif")
    assert "scans of 12 bits must be scaled to 16" in remark.what


def test_images_to_train_on_without_folders_of_classes(folder):
    put(folder, "train/cat.1.png", "train/dog.1.png")
    with pytest.raises(
        ValueError, match=r"train: images lie in no folder of a class\. Put the images .* such as train/cat"
    ):
        own(str(folder), GRAY)


def test_classes_to_test_on_that_are_spelled_otherwise(folder):
    put(folder, "train/Cat/1.png", "train/Dog/1.png", "test/cat/1.png", "test/Dog/1.png")
    with pytest.raises(ValueError, match=r"the label 'cat', which no training example has, .* write 'cat' as 'Cat' if"):
        load_task(TaskSpec(name="images", devices=2, data_dir=str(folder), arguments=GRAY))
