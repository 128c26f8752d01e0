"""Made data are read by the readers of the data sets whose files they have."""

import pytest

from wildflower.papers import made
from wildflower.tasks.arguments import read_arguments
from wildflower.tasks.task import TaskSpec, kind_of, load_task

# Shape of an input and number of classes, as docs/tasks.md has them.
SHAPES = {
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "femnist": ((1, 28, 28), 62),
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "svhn": ((3, 32, 32), 10),
    "stl10": ((3, 96, 96), 10),
    "unimib-shar": ((1, 18, 25), 8),
    "shakespeare": ((80,), 23),  # the letters of the words that are made, blanks, ends of lines, and all others
    "glue-cola": ((12,), 2),
    "glue-sst2": ((12,), 2),
    "glue-mrpc": ((12,), 2),
    "glue-qqp": ((12,), 2),
    "glue-stsb": ((12,), 1),
    "glue-mnli": ((12,), 3),
    "glue-qnli": ((12,), 2),
    "glue-rte": ((12,), 2),
    "text": ((8,), 5),
}


def test_all_that_is_made_is_tried_here():
    assert {name.removeprefix("glue-") for name in SHAPES} == set(made.WRITERS)
    assert len(SHAPES) == len(made.WRITERS)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_task_reads_what_was_made_for_it(name, tmp_path):
    made.write(name, tmp_path / "data", train=240, test=60)
    given = {}
    if name.startswith("glue-") or name == "text":
        given = {"tokenizer": str(made.write_tokenizer(tmp_path / "tokenizer")), "max_tokens": 12}
    if name == "text":
        given |= {"labels": "tags", "text": "words", "label": "tags", "train": [f"{c}.jsonl" for c in made.CORPORA]}
    arguments = read_arguments(name, kind_of(name).arguments, given)
    task = load_task(TaskSpec(name=name, devices=2, data_dir=str(tmp_path / "data"), arguments=arguments))
    shape, classes = SHAPES[name]
    assert task.input_shape == shape
    assert task.classes == classes
    assert len(task.train) >= 100
    assert len(task.test) >= 20


def test_made_images_can_be_learned():
    images, labels = made.images(200, 10, (8, 8), 1)
    others, their_labels = made.images(100, 10, (8, 8), 2)
    means = [images[labels == label].mean(0) for label in range(10)]
    nearest = [min(range(10), key=lambda c: float(((image - means[c]) ** 2).sum())) for image in others.astype(float)]
    assert (nearest == their_labels).mean() > 0.95
