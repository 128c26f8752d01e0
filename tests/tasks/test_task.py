import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from idx_files import write_folder

from tests.programs import run_python
from wildflower.tasks.arguments import read_arguments
from wildflower.tasks.data import Data, make_data_set
from wildflower.tasks.inputs import channels_last, crop_and_flip, readable
from wildflower.tasks.task import TASKS, Task, TaskSpec, load_task
from wildflower.tasks.tokens import TextArguments

DIGITS = TaskSpec(name="digits", devices=20)


def _examples(task: Task) -> list[int]:
    shards = [task.shard(device) for device in range(task.spec.devices)]
    return sorted(torch.cat([part for shard in shards for part in (shard.train, shard.test)]).tolist())


def test_a_spec_survives_json() -> None:
    spec = TaskSpec(
        name="cifar10",
        devices=7,
        data_dir="~/cifar",
        partition="dirichlet",
        alpha=0.1,
        seed=3,
        test_fraction=0.2,
        examples_per_device=50,
    )
    assert TaskSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert TaskSpec.from_json({"name": "digits", "devices": 20}) == DIGITS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "fashion-mnst"}, "unknown task 'fashion-mnst', did you mean 'fashion-mnist'"),
        ({"name": "xyzzy"}, "unknown task 'xyzzy'.* Valid: digits, mnist"),
        ({"name": ["digits"]}, r"name = \['digits'\]: must be a text"),
        ({"partition": "dirichlett"}, "partition = 'dirichlett': must be 'iid', 'dirichlet', 'natural'"),
        ({"alpha": 0}, "alpha = 0: must be above 0"),
        ({"alpha": -0.5}, "alpha = -0.5: must be above 0"),
        ({"alpha": float("nan")}, "alpha = nan: must be a finite number"),
        ({"alpha": float("inf")}, "alpha = inf: must be a finite number"),
        ({"alpha": "0.5"}, "alpha = '0.5': must be a number"),
        ({"devices": 0}, "devices = 0: must be at least 1"),
        ({"devices": 2.5}, "devices = 2.5: must be a whole number"),
        ({"devices": True}, "devices = True: must be a whole number"),
        ({"seed": -1}, "seed = -1: must be at least 0"),
        ({"test_fraction": 1.0}, "test_fraction = 1.0: must be below 1"),
        ({"test_fraction": -0.1}, "test_fraction = -0.1: must be at least 0"),
        ({"examples_per_device": 0}, "examples_per_device = 0: must be at least 1"),
        ({"examples_per_device": 5, "partition": "natural"}, "does not go with partition 'natural'"),
        ({"data_dir": None}, "data_dir = None: must be a text"),
        ({"alhpa": 0.5}, "there should be no key 'alhpa'"),
    ],
)
def test_a_wrong_spec_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskSpec.from_json({"name": "digits", "devices": 20, **changes})


def test_a_spec_that_is_incomplete_or_none() -> None:
    with pytest.raises(ValueError, match="the key 'devices' is missing"):
        TaskSpec.from_json({"name": "digits"})
    with pytest.raises(ValueError, match="it must be an object"):
        TaskSpec.from_json(["digits", 20])  # type: ignore[arg-type]


def test_digits() -> None:
    task = load_task(DIGITS)
    assert (len(task.train), len(task.test)) == (1438, 359)
    assert task.input_shape == (1, 8, 8)
    assert task.classes == 10
    assert int(task.train.inputs.max()) == 16
    assert task.family == "cnn3"
    shares = torch.bincount(task.test.labels) / torch.bincount(torch.cat([task.train.labels, task.test.labels]))
    torch.testing.assert_close(shares, torch.full((10,), 0.2), rtol=0, atol=0.003)


def test_the_test_set_does_not_depend_on_the_seed() -> None:
    first, second = (load_task(TaskSpec(name="digits", devices=5, seed=seed)) for seed in (1, 2))
    assert torch.equal(first.test.inputs, second.test.inputs)


def test_digits_take_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'digits' comes with scikit-learn and takes no data folder"):
        load_task(TaskSpec(name="digits", devices=5, data_dir=str(tmp_path)))


def test_a_task_is_loaded_once() -> None:
    assert load_task(DIGITS) is load_task(TaskSpec(name="digits", devices=20))


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_shards_deal_out_all_examples_once(partition: str) -> None:
    assert _examples(load_task(TaskSpec(name="digits", devices=20, partition=partition))) == list(range(1438))


def test_a_shard_keeps_its_share_for_testing() -> None:
    task = load_task(TaskSpec(name="digits", devices=20, test_fraction=0.25))
    shard = task.shard(3)
    assert len(shard.test) == round(0.25 * (len(shard.train) + len(shard.test)))
    assert shard.train.dtype == shard.test.dtype == torch.int64
    assert not set(shard.train.tolist()) & set(shard.test.tolist())
    assert not len(load_task(TaskSpec(name="digits", devices=20, test_fraction=0.0)).shard(3).test)


@pytest.mark.thorough
def test_a_device_with_one_example_trains_on_it() -> None:
    task = load_task(TaskSpec(name="digits", devices=1438, test_fraction=0.9))
    assert len(task.shard(7).train) == 1
    assert len(task.shard(7).test) == 0


@pytest.mark.parametrize(
    "spec",
    [
        TaskSpec(name="digits", devices=20, test_fraction=0.25),
        TaskSpec(name="digits", devices=1438, partition="iid", test_fraction=0.9),
        TaskSpec(name="digits", devices=5000, examples_per_device=7, test_fraction=0.5),
        TaskSpec(name="digits", devices=5000, examples_per_device=7, partition="iid"),
        TaskSpec(name="digits", devices=20, partition="strong-and-weak", strong_devices=2),
    ],
)
def test_examples_are_counted_without_a_shard(spec: TaskSpec) -> None:
    task = load_task(spec)
    assert [task.training_examples(d) for d in range(20)] == [len(task.shard(d).train) for d in range(20)]
    assert [task.test_examples(d) for d in range(20)] == [len(task.own_test(d)[1]) for d in range(20)]
    for count in (task.training_examples, task.test_examples):
        for device in (-1, spec.devices):
            with pytest.raises(IndexError, match=f"device {device} is not one of 0 to {spec.devices - 1}"):
                count(device)


def test_a_shard_is_the_same_every_time_and_another_for_another_seed() -> None:
    shard = load_task(DIGITS).shard(3)
    load_task.cache_clear()
    again, other = load_task(DIGITS).shard(3), load_task(TaskSpec(name="digits", devices=20, seed=1)).shard(3)
    assert torch.equal(shard.train, again.train)
    assert torch.equal(shard.test, again.test)
    assert not torch.equal(shard.train, other.train)


@pytest.mark.parametrize("device", [-1, 20])
def test_a_device_that_is_not_there(device: int) -> None:
    with pytest.raises(IndexError, match=f"device {device} is not one of 0 to 19"):
        load_task(DIGITS).shard(device)


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_more_devices_than_examples(partition: str) -> None:
    with pytest.raises(ValueError, match=r"1439 devices are more than the 1438 training examples.*examples-per-device"):
        load_task(TaskSpec(name="digits", devices=1439, partition=partition))


def test_natural_partition_of_a_task_without_sources() -> None:
    with pytest.raises(ValueError, match="partition 'natural' needs a task that records where each example is from"):
        load_task(TaskSpec(name="digits", devices=5, partition="natural"))


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_any_number_of_devices_that_draw_their_examples(partition: str, empty_cache: Path) -> None:
    task = load_task(TaskSpec(name="digits", devices=100_000, partition=partition, examples_per_device=30))
    first, last = task.shard(0), task.shard(99_999)
    assert len(first.train) == len(last.train) == 30
    assert len(set(last.train.tolist()) | set(last.test.tolist())) == 30
    assert not torch.equal(first.train, last.train)
    assert not (empty_cache / "partitions").exists()


def test_more_examples_per_device_than_there_are() -> None:
    with pytest.raises(ValueError, match="examples-per-device = 1439 is more than the 1438 training examples"):
        load_task(TaskSpec(name="digits", devices=2, examples_per_device=1439))


def test_a_folder_of_idx_files_as_a_task(tmp_path: Path) -> None:
    task = load_task(TaskSpec(name="idx", devices=4, data_dir=str(write_folder(tmp_path))))
    assert task.input_shape == (1, 6, 5)
    assert task.classes == 4
    assert _examples(task) == list(range(40))


def test_prepared_inputs_are_normalized() -> None:
    task = load_task(DIGITS)
    before = task.train.inputs.clone()
    inputs = task.prepare(task.train.inputs, augment=None)
    assert inputs.dtype == torch.float32
    assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    # Tasks that are not augmented take a generator and leave it alone.
    assert torch.equal(inputs, task.prepare(task.train.inputs, augment=torch.Generator().manual_seed(0)))
    assert torch.equal(task.train.inputs, before)


def _color_task(name: str) -> Task:
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> Data:
        inputs = torch.randint(1, 256, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
        return Data(inputs, torch.arange(count) % 10)

    return Task(TaskSpec(name=name, devices=2), make_data_set(some(40), some(10)))


@pytest.mark.parametrize(("name", "flips"), [("cifar10", True), ("cifar100", True), ("stl10", True), ("svhn", False)])
def test_color_tasks_are_augmented(name: str, flips: bool) -> None:
    task = _color_task(name)
    batch = task.train.inputs[:1].expand(400, -1, -1, -1)
    plain = task.prepare(batch, augment=None)
    augmented = task.prepare(batch, augment=torch.Generator().manual_seed(1))
    assert augmented.shape == plain.shape
    assert torch.equal(augmented, task.prepare(batch, augment=torch.Generator().manual_seed(1)))
    assert not torch.equal(augmented, task.prepare(batch, augment=torch.Generator().manual_seed(2)))
    # 9 x 9 shifts, of which each may be mirrored.
    different = len({image.numpy().tobytes() for image in augmented})
    assert (different > 81) == flips
    assert different > 70


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_what_a_model_reads_is_no_view_of_the_data_set(dtype):
    stored = torch.full((2, 3), 2).to(dtype)
    normalization = (torch.zeros(3), torch.ones(3)) if dtype == torch.float32 else None
    readable(stored, normalization).zero_()
    assert stored.unique().tolist() == [2]


def test_every_crop_is_a_window_of_the_padded_image() -> None:
    images = torch.arange(1, 1 + 50 * 2 * 4 * 5).view(50, 2, 4, 5)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    crops = crop_and_flip(images, torch.Generator().manual_seed(0), padding=2, flip=True)
    mirrored = shifted = 0
    for image, crop in zip(padded, crops, strict=True):
        windows = [image[:, top : top + 4, left : left + 5] for top in range(5) for left in range(5)]
        straight = any(torch.equal(crop, window) for window in windows)
        assert straight or any(torch.equal(crop, window.flip(2)) for window in windows)
        mirrored += not straight
        shifted += not torch.equal(crop, windows[12]) and not torch.equal(crop, windows[12].flip(2))
    assert 12 <= mirrored <= 38
    assert shifted >= 40


def test_every_task_has_a_loader_that_checks_its_folder() -> None:
    for name, kind in TASKS.items():
        needed = {"table": {"columns": ["a"], "label": "b"}}.get(name, {})
        needed |= {"tokenizer": "any"} if issubclass(kind.arguments or type, TextArguments) else {}
        arguments = read_arguments(name, kind.arguments, needed)
        with pytest.raises((FileNotFoundError, ValueError), match=name):
            kind.load("/no/such/folder", *([arguments] if arguments else []))


HEAVY = {
    "transformers",
    "seqeval",
    "sklearn",
    "scipy",
    "datasets",
    "pandas",
    "pyarrow",
    "torchvision",
    "PIL",
}


@pytest.fixture
def imported_by_client() -> Callable[[list[TaskSpec]], set[str]]:
    """Loads tasks in a process of its own, takes shards and batches, and gives the modules it has imported."""

    def run(specs: list[TaskSpec]) -> set[str]:
        program = (
            "import json, sys\n"
            "from wildflower.tasks.task import TaskSpec, load_task\n"
            "for spec in json.loads(sys.argv[1]):\n"
            "    task = load_task(TaskSpec.from_json(spec))\n"
            "    task.prepare(task.train.inputs[task.shard(1).train], augment=None)\n"
            "print(json.dumps(sorted(sys.modules)))\n"
        )
        done = run_python("-c", program, json.dumps([spec.to_json() for spec in specs]))
        assert done.returncode == 0, done.stderr
        return set(json.loads(done.stdout))

    return run


def test_a_client_with_kept_files_imports_nothing_heavy(
    imported_by_client: Callable[[list[TaskSpec]], set[str]], tmp_path: Path
) -> None:
    folder = str(write_folder(tmp_path))
    specs = [
        TaskSpec(name="digits", devices=5, partition="dirichlet", seed=11),
        TaskSpec(name="digits", devices=100_000, examples_per_device=30),
        TaskSpec(name="idx", devices=5, seed=11, data_dir=folder),
    ]
    for spec in specs:
        load_task(spec)
    modules = imported_by_client(specs)
    assert "wildflower.tasks.task" in modules
    assert modules & HEAVY == set()


def test_a_client_of_fashion_mnist_imports_nothing_heavy(
    imported_by_client: Callable[[list[TaskSpec]], set[str]], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, train=600, classes=10, size=(28, 28))
    spec = TaskSpec(name="fashion-mnist", devices=10, partition="dirichlet", data_dir=str(folder))
    task = load_task(spec)
    assert (task.input_shape, task.classes, task.family) == ((1, 28, 28), 10, "lenet5")
    assert _examples(task) == list(range(600))
    assert imported_by_client([spec]) & HEAVY == set()


STRONG = TaskSpec(name="digits", devices=12, partition="strong-and-weak", strong_devices=2, strong_share=0.4)


def test_strong_and_weak_devices_test_on_the_test_set() -> None:
    task = load_task(STRONG)
    assert _examples(task) == list(range(len(task.train)))
    tested = sum(len(task.own_test(device)[1]) for device in range(12))
    assert tested == len(task.test)
    assert task.training_examples(0) == len(task.shard(0).train) > 3 * task.training_examples(11)
    inputs, labels = task.own_test(3)
    assert inputs.shape == (len(labels), 1, 8, 8)
    assert len(labels) in (len(task.test) // 12, len(task.test) // 12 + 1)


def test_strong_devices_may_test_on_the_whole_test_set() -> None:
    task, shares = load_task(STRONG.model_copy(update={"strong_test": "whole"})), load_task(STRONG)
    for device in (0, 1):
        inputs, labels = task.own_test(device)
        assert torch.equal(inputs, task.test.inputs)
        assert torch.equal(labels, task.test.labels)
        assert task.test_examples(device) == len(labels)
    assert torch.equal(task.own_test(2)[0], shares.own_test(2)[0])
    assert task.test_examples(2) == shares.test_examples(2) < len(task.test)


def test_other_devices_test_on_what_they_keep() -> None:
    task = load_task(TaskSpec(name="digits", devices=4, test_fraction=0.25))
    inputs, labels = task.own_test(1)
    kept = task.shard(1).test
    assert torch.equal(inputs, task.train.inputs[kept])
    assert torch.equal(labels, task.train.labels[kept])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strong_devices": 0}, "needs strong_devices from 1 to 11, got 0"),
        ({"strong_devices": 12}, "needs strong_devices from 1 to 11, got 12"),
        ({"strong_devices": 1.0}, "strong_devices = 1.0: must be a whole number"),
        ({"strong_share": 1}, "strong_share = 1: must be below 1"),
        ({"strong_test": "half"}, "strong_test"),
        ({"test_fraction": 0.1}, "test_fraction and examples_per_device do not go with it"),
        ({"examples_per_device": 5}, "test_fraction and examples_per_device do not go with it"),
    ],
)
def test_impossible_strong_devices_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskSpec.from_json(STRONG.to_json() | changes)


def test_what_is_no_picture_has_no_channels():
    tokens, signal = torch.ones(2, 3, dtype=torch.uint8), torch.ones(2, 3, 4)
    assert channels_last(tokens) is tokens
    assert channels_last(signal) is signal
