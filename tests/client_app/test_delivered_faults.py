"""Deliveries that go wrong: whatever happens, the model in use is whole, and is used until a good one is there."""

import errno
import hashlib
import os
import signal
from pathlib import Path

import pytest

from tests.own_folders import digits_of_devices, npz_folder
from wildflower.client_app import delivered, work
from wildflower.client_app.delivered import CURRENT, program_in, take, version_of
from wildflower.messages.delivery import Delivered, Delivery
from wildflower.messages.error import MessageError
from wildflower.messages.orders import parse
from wildflower.messages.programs import Facts, program_of, with_preparation
from wildflower.models.lenet import LeNet5
from wildflower.tasks.agreement import Declared, agree
from wildflower.tasks.device_data import UnfitError
from wildflower.tasks.inspection import describe
from wildflower.tasks.task import TaskSpec, load_task

pytestmark = pytest.mark.thorough  # torch.export takes seconds
SPEC = TaskSpec(name="digits", devices=4, test_fraction=0.25)
FAMILY = LeNet5((1, 8, 8), 10)
FIRST, SECOND = "1-aaaaaaaaaaaa", "2-bbbbbbbbbbbb"


def program(**changes):
    """A program of an untrained model, and its facts."""
    model = FAMILY.build(FAMILY.width(0.25))
    facts = Facts(
        format="pt2",
        task="digits",
        input_shape=[1, 8, 8],
        input_dtype="uint8",
        classes=10,
        labels=list("0123456789"),
        mean=[4.9],
        std=[6.0],
        family=FAMILY.spec(),
        architecture=FAMILY.width(0.25).to_json(),
        exits="deepest",
        metric="accuracy",
        score=0.1,
        round=1,
    )
    return program_of(with_preparation(model, facts), facts, "here"), facts.model_dump(mode="json") | changes


@pytest.fixture(scope="module")
def made():
    return program()


def delivery_of(made, version, **changes):
    sha256 = hashlib.sha256(made[0]).hexdigest()
    values = {"run": "r", "device": 0, "version": version, "file_format": "pt2", "task": SPEC.to_json()}
    return Delivery(**{**values, "sha256": sha256, "facts": made[1]} | changes)


@pytest.fixture
def give(made, tmp_path):
    """Gives a version to the device of a node, as its worker does. -> its answer."""
    config = {"partition-id": 0, "state-dir": str(tmp_path)}

    def deliver(version, array=made[0], **changes):
        said, _ = work.do("delivery", delivery_of(made, version, **changes).model_dump_json(), [array], config)
        return parse(Delivered, said)

    return deliver


def in_use(tmp_path):
    return version_of(tmp_path / "model" / CURRENT)


def test_a_program_of_another_size_is_not_taken(give, made, tmp_path):
    assert give(FIRST).used
    for array in (made[0][:-1], made[0] + b"\0", b""):
        with pytest.raises(MessageError, match="its sha256 is another"):
            give(SECOND, array)
    assert in_use(tmp_path) == FIRST


def test_a_model_of_other_inputs_is_not_used(give, made, tmp_path):
    give(FIRST)
    answer = give(SECOND, facts=made[1] | {"input_shape": [3, 32, 32]})
    assert not answer.used
    assert "reads inputs of shape [3, 32, 32], and the task's have [1, 8, 8]" in answer.why
    assert in_use(tmp_path) == FIRST


@pytest.mark.parametrize("facts", [{}, {"format": "onnx"}, {"labels": 3}])
def test_facts_that_are_none_of_a_model_are_told(give, made, facts, tmp_path):
    give(FIRST)
    answer = give(SECOND, facts={**(made[1] if facts else {}), **facts})
    assert not answer.used
    assert "model.pt2.json" in answer.why
    assert in_use(tmp_path) == FIRST


def test_the_same_version_twice_is_the_same(give, tmp_path):
    assert give(FIRST).used
    again = give(FIRST)
    assert (again.used, again.before) == (True, None)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [FIRST, CURRENT]


def test_a_full_disk_leaves_the_model_in_use(give, tmp_path, monkeypatch):
    give(FIRST)
    write = delivered._write

    def full(file: Path, data: bytes) -> None:
        write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(delivered, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            give(SECOND)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [FIRST, CURRENT]
    assert give(SECOND).used


@pytest.mark.parametrize("place", ["_write", "score_of", "use"])
def test_a_device_that_is_killed_half_way_goes_on_with_its_model(give, made, place, tmp_path, monkeypatch):
    give(FIRST)
    if (child := os.fork()) == 0:
        monkeypatch.setattr(delivered, place, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            take(delivery_of(made, SECOND), *made, load_task(SPEC), tmp_path / "model")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert in_use(tmp_path) == FIRST
    assert program_in(tmp_path / "model" / CURRENT).read_bytes() == made[0]
    assert give(SECOND).used
    left = [path.name for path in (tmp_path / "model").iterdir()]
    assert sorted(left) == [FIRST, SECOND, CURRENT, "previous"]


def test_a_device_whose_own_examples_are_gone_goes_on_with_its_model(made, tmp_path):
    folder = tmp_path / "photos"
    inputs, labels = digits_of_devices(1)[0]
    npz_folder(folder, inputs, labels)
    spec = TaskSpec(name="npz", partition="own", devices=1, test_fraction=0.25, data_dir=str(folder))
    agreed, _ = agree([describe(spec, 0, moments=True)], Declared(), spec.max_examples)
    spec = spec.model_copy(update={"agreed": agreed})
    config = {"partition-id": 0, "state-dir": str(tmp_path), "data-dir": str(folder)}
    facts = made[1] | {"input_dtype": str(load_task(spec).for_device(0).own_test(0)[0].dtype).removeprefix("torch.")}

    def give(version):
        message = delivery_of(made, version, task=spec.to_json(), facts=facts).model_dump_json()
        return parse(Delivered, work.do("delivery", message, [made[0]], config)[0])

    first = give(FIRST)
    assert first.used
    assert first.score is not None  # on the examples of its own folder
    (folder / "train.npz").unlink()
    with pytest.raises((UnfitError, FileNotFoundError), match=r"train\.npz"):
        give(SECOND)
    assert in_use(tmp_path) == FIRST
