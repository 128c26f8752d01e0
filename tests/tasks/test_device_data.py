"""What a device says of its own data, what is agreed of it, and what is wrong with other folders."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from tests.own_folders import image_folder, npz_folder
from wildflower.messages.wire import DATA_ANSWER_LIMITS
from wildflower.rounds.own_data import OwnData
from wildflower.tasks.agreement import Declared, agree, declared_by, problem_of
from wildflower.tasks.data import Vocabulary
from wildflower.tasks.decoding import read_image
from wildflower.tasks.device_data import (
    MAX_NAMES,
    MAX_PROBLEM_LETTERS,
    Agreed,
    Form,
    Moments,
    OwnArguments,
    Summary,
    UnfitError,
    fitted,
    form_of,
    made,
    moments_of,
)
from wildflower.tasks.inspection import describe, server_test
from wildflower.tasks.npz import NpzArguments
from wildflower.tasks.remarks import MAX_EXAMPLE_LETTERS, MAX_REMARKS, MAX_WHAT_LETTERS, Remark, Remarks
from wildflower.tasks.rows import files_behind, saved
from wildflower.tasks.task import TaskSpec, load_task
from wildflower.tasks.texts import OwnTextArguments

GRAY = Form(stored="uint8", input_shape=(1, 2, 2), labels="classes")


def said(device, names=("a", "b"), *, form=GRAY, examples=4, test=1, sums=(800.0,), squares=(90000.0,), **given):
    values = max(1, examples * math.prod(form.input_shape[1:]))
    moments = Moments(values=values, sums=sums, squares=squares)
    values = {"examples": examples, "test_examples": test, "form": form, "label_names": names, "moments": moments}
    return Summary(device=device, **values | given)


def spec_of(folder, task="npz", **given):
    return TaskSpec(name=task, devices=given.pop("devices", 4), data_dir=str(folder), partition="own", **given)


# What is agreed -------------------------------------------------------------------------------------------------------


def test_labels_are_matched_by_text_and_inputs_normalized_over_all_devices():
    # By hand: 16 and 32 values of mean (800 + 640) / 48 = 30 and mean square (90000 + 40000) / 48.
    first, second = said(3, ("cat", "dog")), said(1, ("ant", "cat"), examples=8, sums=(640.0,), squares=(40000.0,))
    agreed, unfit = agree([first, second], Declared(), 1000)
    assert unfit == {}
    assert agreed.label_names == ("ant", "cat", "dog")
    assert agreed.mean == (30.0,)
    assert agreed.std == pytest.approx((math.sqrt(130000 / 48 - 900),))
    assert agree([second, first], Declared(), 1000)[0] == agreed


def test_whole_numbers_are_in_their_order():
    assert agree([said(0, ("10", "9")), said(1, ("0",))], Declared(), 1000)[0].label_names == ("0", "9", "10")


def test_the_form_is_that_of_most_devices():
    other = Form(stored="uint8", input_shape=(3, 2, 2), labels="classes")
    odd = said(2, form=other, sums=(1.0, 1.0, 1.0), squares=(1.0, 1.0, 1.0))
    agreed, unfit = agree([said(0), said(1), odd], Declared(), 1000)
    assert agreed.form == GRAY
    assert unfit == {
        2: "its examples are 3x2x2 bytes with classes for labels, the run's are 1x2x2 bytes with classes for labels"
    }


def test_what_is_declared_holds():
    declared = declared_by(OwnArguments(classes=("b", "a"), mean=(10.0,), std=(2.0,), input_shape=(1, 2, 2)))
    agreed, unfit = agree([said(0, ("a",)), said(1, ("c",))], declared, 1000)
    assert (agreed.label_names, agreed.mean, agreed.std) == (("b", "a"), (10.0,), (2.0,))
    assert unfit == {1: "the run has no label 'c': it has 'b', 'a'"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"examples": 10**9, "moments": None}, "it says that it has 1000000000 examples, max-examples = 1000"),
        ({"examples": 0, "moments": None}, "no training examples"),
        ({"names": ("a", "b", "c", "d", "e", "f")}, "more labels than examples"),
        ({"sums": (5000.0,), "squares": (9e5,)}, "sums that no uint8 values have"),
        ({"sums": (800.0,), "squares": (100.0,)}, "sums that no numbers have"),
        ({"sums": (800.0, 1.0), "squares": (9e4, 1.0)}, "sums of 2 channels"),
        ({"problem": "cannot be read"}, "cannot be read"),
        ({"cut_texts": 1}, "it says that 1 texts were cut, which are more than it has"),
        ({"form": None, "moments": None}, "does not say"),
    ],
)
def test_claims_that_cannot_be_are_refused_and_the_others_go_on(changes, why):
    form = {"form": None} if changes.get("form", 1) is None else {}
    wrong = said(2, **{key: value for key, value in changes.items() if key != "form"}).model_copy(update=form)
    agreed, unfit = agree([said(0), said(1), wrong], Declared(), 1000)
    assert list(unfit) == [2]
    assert why in unfit[2]
    assert agreed == agree([said(0), said(1)], Declared(), 1000)[0]


def test_of_texts_no_more_are_cut_than_there_are():
    form = Form(stored="int32", input_shape=(4,), labels="classes", vocabulary=(9, 0))
    told = {"form": form, "moments": None, "examples": 4, "test": 1}
    assert problem_of(said(0, **told, cut_texts=5), 1000) == ""
    assert "6 texts were cut" in problem_of(said(0, **told, cut_texts=6), 1000)
    for wrong in (-1, 2**63, 1.0):
        with pytest.raises(ValidationError, match="cut_texts"):
            said(0, **told, cut_texts=wrong)


def test_a_device_cannot_fill_the_run_with_labels():
    names = tuple(f"label {number}" for number in range(MAX_NAMES))
    greedy = said(0, names, examples=2000, sums=(800.0,))
    agreed, unfit = agree([said(1), greedy], Declared(), 10_000)
    assert agreed.label_names == ("a", "b")
    assert "more than 1000" in unfit[0]


def test_one_label_in_all_is_said_before_the_run():
    with pytest.raises(ValueError, match="have one label, 'a': declare classes"):
        agree([said(0, ("a",))], Declared(), 1000)
    assert agree([said(0, ("a",))], Declared(label_names=("a", "b")), 1000)[0].classes == 2


def test_no_device_fits():
    with pytest.raises(ValueError, match="no device has data that fit: device 0: it has no images"):
        agree([Summary(device=0, problem="it has no images")], Declared(), 1000)


def test_the_largest_honest_answer_is_read():
    names = tuple(("\N{GRINNING FACE}" * 94) + f"{number:06d}" for number in range(MAX_NAMES))
    sums = (-1.2345678901234567e-300,) * 256
    form = Form(stored="float32", input_shape=(256, 4), labels="classes")
    moments = Moments(values=2**42, sums=sums, squares=sums, centers=sums)
    remark = Remark(what="\N{GRINNING FACE}" * MAX_WHAT_LETTERS, count=2**62, example="\\" * MAX_EXAMPLE_LETTERS)
    told = {"moments": moments, "remarks": (remark,) * MAX_REMARKS}
    largest = said(2**62, names, form=form, examples=2**40, **told)
    assert len(largest.model_dump_json().encode()) < DATA_ANSWER_LIMITS.text_bytes


def test_a_reader_that_remarks_on_much_says_what_can_be_read():
    remarks = Remarks()
    for number in range(3 * MAX_REMARKS):
        remarks.add(f"files of kind {number} with a name\n" + "x" * 400, "long/" * 100 + f"{number}\udcff", number + 1)
    found = remarks.found()
    assert len(found) == MAX_REMARKS
    assert sum(remark.count for remark in found) == sum(range(1, 3 * MAX_REMARKS + 1))
    answer = Summary.model_validate_json(Summary(device=0, remarks=found).model_dump_json())
    assert answer.remarks == found
    assert all(remark.example.isprintable() for remark in found)


def test_sums_beyond_all_floats_are_refused():
    floats = Form(stored="float32", input_shape=(1, 4), labels="classes")
    honest = [said(device, form=floats) for device in range(2)]
    greedy = said(2, form=floats, sums=(1.7e308,), squares=(1.7e308,))
    agreed, unfit = agree([*honest, greedy], Declared(), 1000)
    assert unfit == {2: "it gives sums that no float32 values have"}
    assert agreed == agree(honest, Declared(), 1000)[0]


# What devices say -----------------------------------------------------------------------------------------------------


def test_a_device_says_counts_labels_and_sums(tmp_path):
    inputs = np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2)
    npz_folder(tmp_path, inputs, [7, 3] * 5)
    found = describe(spec_of(tmp_path, test_fraction=0.2, seed=5), 2, moments=True)
    kept = np.random.default_rng([5, 2, 1]).permutation(10)[2:]
    values = inputs[kept].astype(int)
    assert (found.device, found.examples, found.test_examples) == (2, 8, 2)
    assert found.label_names == ("3", "7")
    assert found.moments == Moments(values=32, sums=(float(values.sum()),), squares=(float((values**2).sum()),))


def test_sums_do_not_travel_where_nobody_needs_them(tmp_path):
    npz_folder(tmp_path, np.zeros((4, 1, 2, 2), np.uint8), ["a", "b", "a", "b"])
    spec = spec_of(tmp_path, arguments=NpzArguments(classes=("a", "b", "c")))
    found = describe(spec, 0, moments=False)
    assert found.moments is None
    assert found.label_names == ()


def test_sums_of_floats_do_not_depend_on_their_order():
    inputs = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(0)) * 1e6
    assert moments_of(inputs) == moments_of(inputs.flip(0))


def agreed_on(*names, shape=(1, 2, 2)):
    form = Form(stored="uint8", input_shape=shape, labels="classes")
    return Agreed(form=form, label_names=names, mean=(1.0,) * shape[0], std=(2.0,) * shape[0])


def test_labels_have_the_numbers_of_the_run_and_inputs_its_normalization(tmp_path):
    npz_folder(tmp_path, np.full((3, 1, 2, 2), 5, np.uint8), ["dog", "cat", "dog"])
    task = load_task(spec_of(tmp_path, agreed=agreed_on("ant", "cat", "dog"))).for_device(1)
    assert task.train.labels.tolist() == [2, 1, 2]
    assert task.classes == 3
    assert task.prepare(task.train.inputs, augment=None).unique().tolist() == [2.0]
    assert sorted(task.shard(1).train.tolist()) == [0, 1, 2]
    assert TaskSpec.from_json(json.loads(json.dumps(task.spec.to_json()))) == task.spec


def test_a_run_over_pairs_that_began_without_a_separator_goes_on_without_one():
    """An agreed.json from before has none; devices with BERT's tokenizer now say theirs."""
    old = {"stored": "int32", "input_shape": [4], "labels": "classes", "vocabulary": [9, 0]}
    agreed = Agreed.model_validate_json(json.dumps({"form": old, "label_names": ["a", "b"]}))
    inputs = torch.zeros(2, 4, dtype=torch.int32)
    data = replace(made([(inputs, ["a", "b"])]), vocabulary=Vocabulary(9, 0, separator=3))
    found = fitted(data, agreed)
    assert found.vocabulary == Vocabulary(9, 0)
    own = OwnData(spec_of("", agreed=agreed), {}, 1)
    pairs = said(0, (), form=form_of(data), moments=None)
    assert own.take([pairs]) == {}
    # Another vocabulary does not fit all the same, nor do single texts in a run over pairs.
    with pytest.raises(UnfitError, match=r"4 tokens of 8 in pairs .*, the run's are 4 tokens of 9 with"):
        fitted(replace(data, vocabulary=Vocabulary(8, 0, separator=3)), agreed)
    with pytest.raises(UnfitError, match="the run's are 4 tokens of 9 in pairs"):
        fitted(replace(data, vocabulary=Vocabulary(9, 0)), Agreed(form=form_of(data), label_names=("a", "b")))


def test_data_that_change_are_seen_and_refused_where_they_no_longer_fit(tmp_path):
    npz_folder(tmp_path, np.zeros((3, 1, 2, 2), np.uint8), ["a", "b", "a"])
    task = load_task(spec_of(tmp_path, agreed=agreed_on("a", "b"), max_examples=8))
    assert task.for_device(0).training_examples(0) == 3
    npz_folder(tmp_path, np.zeros((5, 1, 2, 2), np.uint8), ["a"] * 5)
    assert task.for_device(0).training_examples(0) == 5
    for count, shape, label, why in (
        (9, (1, 2, 2), "a", "it has 9 examples, and max-examples = 8"),
        (4, (1, 3, 2), "a", "its examples are 1x3x2 bytes"),
        (4, (1, 2, 2), "z", "the run has no label 'z': it has 'a', 'b'"),
    ):
        npz_folder(tmp_path, np.zeros((count, *shape), np.uint8), [label] * count)
        with pytest.raises(UnfitError, match=why):
            task.for_device(0)


def png(size, value=0):
    content = io.BytesIO()
    Image.new("L", size, value).save(content, "PNG")
    return content.getvalue()


def gray(size=()):
    from wildflower.tasks.images import ImageArguments

    return ImageArguments(color="gray", size=size)


def wrong(folder, task="npz", arguments=None):
    found = describe(spec_of(folder, task, arguments=arguments), 0, moments=True)
    assert (found.examples, found.form, found.moments) == (0, None, None)
    assert len(found.problem) <= MAX_PROBLEM_LETTERS
    return found.problem


def test_a_long_reason_is_cut_visibly(tmp_path):
    problem = wrong(tmp_path / ("a" * 200) / ("b" * 200) / ("c" * 200))
    assert len(problem) == MAX_PROBLEM_LETTERS
    assert problem.endswith("...")


def test_folders_that_cannot_be_read(tmp_path):
    assert "does not exist" in wrong(tmp_path / "nowhere")
    assert "no file train.npz" in wrong(tmp_path)
    assert "no images" in wrong(tmp_path, "images", gray())
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(png((4, 4)))
    (tmp_path / "cat" / "2.png").write_bytes(png((5, 4)))
    assert "images are of mixed sizes, this one 4 x 5 and the first 4 x 4 pixels: set size" in wrong(
        tmp_path, "images", gray()
    )
    sized = describe(spec_of(tmp_path, "images", arguments=gray((2, 3))), 0, moments=True)
    assert (sized.examples, sized.form.input_shape, sized.label_names) == (2, (1, 2, 3), ("cat",))
    (tmp_path / "cat" / "3.png").write_bytes(b"no image")
    # The text is the same each time, so that equal warnings can be merged.
    no_image = "3.png: cannot be read as an image: its bytes are of no image format that is known here"
    assert no_image in wrong(tmp_path, "images", gray((2, 3)))
    (tmp_path / "train.npz").write_bytes(b"PK nothing")
    assert "train.npz: cannot be read" in wrong(tmp_path)


def test_only_a_test_set_is_none_to_train_on(tmp_path):
    npz_folder(tmp_path, np.zeros((4, 1, 2, 2), np.uint8), [0, 1, 0, 1], "test")
    assert "no training examples" in wrong(tmp_path)
    assert len(server_test(spec_of(tmp_path)).test) == 4


def test_the_server_has_no_test_set(tmp_path):
    assert server_test(spec_of("")) is None
    assert server_test(spec_of(tmp_path)) is None
    (tmp_path / "test.npz").write_bytes(b"broken")
    with pytest.raises(UnfitError, match="cannot be read"):
        server_test(spec_of(tmp_path))


def test_files_of_simulated_devices_are_not_the_servers(tmp_path):
    for device in ("0000", "0001"):
        (tmp_path / "devices" / device).mkdir(parents=True)
        (tmp_path / "devices" / device / "train.jsonl").write_text('{"text": "a", "label": "b"}\n')
    assert server_test(spec_of(tmp_path, "text", arguments=OwnTextArguments(tokenizer="none"))) is None


def test_images_listed_in_metadata(tmp_path):
    for part, rows in (("train", [("1.png", "cat"), ("2.png", "dog")]), ("test", [("1.png", "dog")])):
        (tmp_path / part).mkdir()
        for name, _ in rows:
            (tmp_path / part / name).write_bytes(png((2, 2), 9))
        lines = [f"{name},{label}" for name, label in rows]
        (tmp_path / part / "metadata.csv").write_text("\n".join(["file_name,label", *lines]))
    found = describe(spec_of(tmp_path, "images", arguments=gray()), 0, moments=True)
    assert (found.examples, found.test_examples, found.label_names) == (2, 1, ("cat", "dog"))
    assert found.moments.sums == (72.0,)
    (tmp_path / "train" / "metadata.csv").write_text("file_name\n1.png\n")
    assert "metadata.csv:1: no column 'label', there are 'file_name'" in wrong(tmp_path, "images", gray())
    (tmp_path / "train" / "metadata.csv").write_text("file_name,label\n1.png,\n")
    assert "metadata.csv:2: label is empty" in wrong(tmp_path, "images", gray())
    (tmp_path / "train" / "metadata.csv").write_text("file_name,label\n../test/1.png,cat\n")
    assert "is no image in" in wrong(tmp_path, "images", gray())
    (tmp_path / "train" / "metadata.csv").unlink()
    (tmp_path / "train" / "metadata.jsonl").write_text('{"file_name": "2.png", "label": 0.5}\n')
    (tmp_path / "test" / "metadata.csv").write_text("file_name,label\n")
    numbers = describe(spec_of(tmp_path, "images", arguments=gray()), 0, moments=True)
    assert (numbers.form.labels, numbers.label_names) == ("numbers", ())


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "WEBP"])
def test_a_damaged_image_is_told_in_plain_words(form, tmp_path):
    image, file = Image.effect_noise((32, 32), 50), tmp_path / "cat" / "1.png"
    file.parent.mkdir()
    image.save(file, form)
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])
    told = f"{file}: cannot be read as an image: it is damaged, or a part of it is missing"
    assert wrong(tmp_path, "images", gray()) == told


def test_images_of_16_bits_are_read_by_their_upper_8(tmp_path):
    deep = np.array([[0, 255, 256], [32768, 40000, 65535]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png", "L").tolist() == [[[0, 0, 1], [128, 156, 255]]]
    assert read_image(tmp_path / "deep.png", "RGB")[2].tolist() == [[0, 0, 1], [128, 156, 255]]
    Image.fromarray(deep.astype(">u2")).save(tmp_path / "big.tiff")
    (tmp_path / "deep.pgm").write_bytes(b"P5 3 2 65535\n" + deep.astype(">u2").tobytes())
    for name in ("big.tiff", "deep.pgm"):
        assert read_image(tmp_path / name, "L").tolist() == [[[0, 0, 1], [128, 156, 255]]]


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_of_32_bits_are_refused_in_plain_words(dtype, tmp_path):
    file = tmp_path / "cat" / "1.tiff"
    file.parent.mkdir()
    Image.fromarray(np.linspace(0, 1, 64).reshape(8, 8).astype(dtype)).save(file)
    told = "its pixels are signed or have 32 bits, and nothing says which value is white: save it with 8 or 16 bits"
    assert wrong(tmp_path, "images", gray()) == f"{file}: cannot be read as an image: {told}"


def test_numbers_of_images_are_split_whatever_they_are(tmp_path):
    rows = []
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(png((8, 8), 20 * number))
        rows.append(f'{{"file_name": "{number}.png", "label": 0.{number}}}\n')
    (tmp_path / "metadata.jsonl").write_text("".join(rows))
    task = load_task(TaskSpec(name="images", devices=2, data_dir=str(tmp_path), arguments=gray()))
    assert (task.label_kind, len(task.train), len(task.test)) == ("numbers", 8, 2)


def test_a_data_set_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [Image.new("L", (2, 2), value) for value in (1, 2, 3)], "label": [1, 0, 1]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)}).save_to_disk(tmp_path)
    spec = spec_of(tmp_path, "images", arguments=gray(), agreed=agreed_on("cat", "dog"))
    task = load_task(spec).for_device(0)
    assert task.train.labels.tolist() == [1, 0, 1]
    assert task.train.inputs[:, 0, 0, 0].tolist() == [1, 2, 3]


def test_images_may_be_dealt_out_as_well(tmp_path):
    image_folder(tmp_path, np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2), ["a", "b"] * 5)
    task = load_task(TaskSpec(name="images", devices=2, data_dir=str(tmp_path), partition="iid", arguments=gray()))
    assert (len(task.train), len(task.test), task.label_names) == (8, 2, ("a", "b"))
    assert task.input_shape == (1, 2, 2)


def test_a_task_without_a_reader_is_refused():
    with pytest.raises(
        ValueError, match=r"'digits' has no reader for partition 'own': take one of npz, images, table, text"
    ):
        TaskSpec(name="digits", devices=1, partition="own")


def test_each_simulated_device_has_a_folder(tmp_path):
    npz_folder(tmp_path / "devices" / "0002", np.zeros((3, 1, 2, 2), np.uint8), [0, 1, 0])
    spec = spec_of(tmp_path, device_folders=True)
    assert describe(spec, 2, moments=True).examples == 3
    assert "devices/0001' of the task 'npz' does not exist" in describe(spec, 1, moments=True).problem


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_inputs_of_a_reader_that_are_no_numbers_are_refused(wrong):
    inputs = torch.zeros(3, 1, 2)
    inputs[1, 0, 1] = wrong
    with pytest.raises(ValueError, match=r"input 1, counted from 0, holds values that are not finite"):
        made([(inputs, ["a", "b", "a"])])


@pytest.mark.parametrize("label", [1e39, -1e39, float("inf"), float("nan")])
def test_a_label_that_is_no_number_of_32_bits_is_refused(label):
    with pytest.raises(ValueError, match=r"a label is .*, it must be a finite number of at most 32 bits"):
        made([(torch.zeros(2, 1, 1), [1.0, label])])
    assert made([(torch.zeros(2, 1, 1), [1.0, 3e38])]).train.labels.isfinite().all()


def saved_in_two(folder, datasets):
    """A data set of two files of texts."""
    datasets.Dataset.from_dict({"text": ["good", "bad"] * 8, "label": ["a", "b"] * 8}).save_to_disk(
        folder / "train", num_shards=2
    )
    return sorted((folder / "train").glob("*.arrow"))


def test_all_files_of_a_data_set_on_disk_are_bounded_and_known_to_the_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    first, second = saved_in_two(tmp_path, datasets)
    assert saved(tmp_path / "train") == [first]
    assert second in files_behind(first)
    size = first.stat().st_size + second.stat().st_size
    assert saved(tmp_path / "train", size) == [first]
    with pytest.raises(ValueError, match=f"train: {size} bytes are more than {size - 1}"):
        saved(tmp_path / "train", size - 1)
    state = tmp_path / "train" / "state.json"
    state.write_text(state.read_text().replace(second.name, "../x.arrow"))
    with pytest.raises(ValueError, match=r"state\.json: '\.\./x\.arrow' is no file beside it"):
        saved(tmp_path / "train")
    state.write_text('{"_data_files": [1]}')
    with pytest.raises(ValueError, match=r"state\.json: it does not list the data set's files: TypeError"):
        saved(tmp_path / "train")
