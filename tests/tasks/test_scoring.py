import torch
from torch import nn

from wildflower.models.cnn import Cnn3
from wildflower.models.network import MeanOfExits
from wildflower.tasks.scoring import add_up, score, score_batches
from wildflower.tasks.task import TaskSpec, load_task

CPU = torch.device("cpu")


def _model(pixels: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(pixels), nn.Dropout(0.5), nn.Linear(pixels, 10))


def test_a_score_is_that_of_all_examples_at_once_whatever_the_batch() -> None:
    task = load_task(TaskSpec(name="digits", devices=2))
    inputs, labels = task.test.inputs[:101], task.test.labels[:101]
    model = _model(64).eval()
    outputs = model(task.prepare(inputs, augment=None)).detach()
    model.train()
    for batch_size in (7, 101, 1000):
        [correct], loss, examples, right = score(model, task, inputs, labels, batch_size=batch_size, device=CPU)
        assert correct == int((outputs.argmax(1) == labels).sum())
        assert abs(loss - float(nn.functional.cross_entropy(outputs, labels, reduction="sum"))) < 1e-3
        assert examples == 101
        is_right = outputs.argmax(1) == labels
        assert right == [int(is_right[labels == number].sum()) for number in range(10)]
        assert sum(right) == correct


def test_all_exits_are_scored_in_one_pass_as_sub_models_are() -> None:
    task = load_task(TaskSpec(name="digits", devices=2))
    inputs, labels = task.test.inputs[:101], task.test.labels[:101]
    family = Cnn3(input_shape=task.input_shape, exits=(1, 2, 3))
    torch.manual_seed(0)
    model = family.build(family.full())
    batches = score_batches(model, task, inputs, labels, batch_size=40, device=CPU, exits=True)
    found = [add_up(task, of_exit) for of_exit in zip(*batches, strict=True)]
    assert not model.training
    assert len(found) == 4
    for exit, (correct, loss, _, right) in enumerate(found[:-1], start=1):
        alone = family.build(family.up_to(exit))
        alone.load_state_dict(family.place(family.up_to(exit)).gather(model.state_dict()))
        expected = score(alone, task, inputs, labels, batch_size=101, device=CPU)
        assert (correct, len(labels), right) == (expected[0], expected[2], expected[3])
        assert abs(loss - expected[1]) < 1e-3
    assert len({scored.loss_sum for scored in found}) == 4
    with torch.no_grad():
        mean = torch.stack(model.exits(task.prepare(inputs, augment=None))).mean(dim=0)
    assert found[-1].sums == [int((mean.argmax(1) == labels).sum())]
    assert abs(found[-1].loss_sum - float(nn.functional.cross_entropy(mean, labels, reduction="sum"))) < 1e-3
    assert score_batches(model, task, inputs[:0], labels[:0], batch_size=8, device=CPU, exits=True) == []


def test_images_are_scored_with_the_channels_of_a_pixel_side_by_side() -> None:
    task = load_task(TaskSpec(name="digits", devices=2))
    seen = []

    class Looks(nn.Module):
        takes_channels_last = True  # as the networks of families do

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return x.flatten(1)[:, :10]

    score(Looks(), task, task.test.inputs[:8], task.test.labels[:8], batch_size=8, device=CPU)
    assert seen[0].stride() == (64, 1, 8, 1)
    assert torch.equal(seen[0], task.prepare(task.test.inputs[:8], augment=None))
    family = Cnn3(input_shape=task.input_shape)
    for width, side_by_side in ((1.0, True), (0.25, True), (0.125, False), (0.0625, False)):  # of 32 channels
        network = family.build(family.width(width))
        assert network.takes_channels_last == side_by_side
        assert MeanOfExits(network).takes_channels_last == side_by_side


class Viewed(nn.Module):
    """A user's own network: `view` refuses tensors that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.last = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x.view(x.size(0), -1))


def test_a_module_of_ones_own_is_scored_with_contiguous_images() -> None:
    task = load_task(TaskSpec(name="digits", devices=2))
    examples = score(Viewed(), task, task.test.inputs[:20], task.test.labels[:20], batch_size=10, device=CPU)[2]
    assert examples == 20
