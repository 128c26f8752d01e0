"""Stacks of modules of any kind: they come to what devices come to in turn, or say why they are no stack."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.client_app.test_side_by_side import DOUBLE, SPEC, assert_alike, work_picks
from wildflower.client_app.fitting import Fit
from wildflower.client_app.stack import fit_stacked
from wildflower.client_app.stack_operators import InTurn
from wildflower.messages.orders import LocalTraining
from wildflower.strategies.shared_losses import PureLoss
from wildflower.tasks.task import load_task

COUNTS = (9, 23, 14)
TRAINING = LocalTraining(batch_size=7, epochs=2, learning_rate=0.05, momentum=0.9)


class Layers(nn.Module):
    """Two layers, of which `between` computes something in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 10)

    def between(self, x):
        return self.second(x).relu()

    def forward(self, images):
        return self.head(self.between(self.first(images.flatten(1)).relu()))


def fits(make, change=None, loss=PureLoss, training=TRAINING, options=None, counts=COUNTS, dtype=DOUBLE):
    """Trainings of modules in float64.

    Args:
        change: is done to each device's module.
        loss: of the task, the module and the device's number.
        options: further arguments of a device's training.
    """
    task, found = load_task(SPEC), []
    for device, count in enumerate(counts):
        torch.manual_seed(100 + device)
        model = make().to(dtype)
        if change is not None:
            change(model, device)
        shard = torch.randperm(len(task.train))[:count]

        def start(shard=shard, device=device):
            return work_picks(shard, training, torch.Generator().manual_seed(device))

        def examples_of(picked):
            return task.prepare(task.train.inputs[picked], augment=None).to(dtype), task.train.labels[picked]

        computed = loss(task, model) if loss is PureLoss else loss(task, model, device)
        more = {} if options is None else options(device)
        found.append(
            Fit(model, computed, start, examples_of, count, training, torch.device("cpu"), **more)  # type: ignore
        )
    return found


def assert_no_stack(words, *arguments, **options):
    """These are trained in turn, for a reason that is told, and no model has changed."""
    asked = fits(*arguments, **options)
    asked.sort(key=lambda fit: -fit.examples)
    before = [{name: value.clone() for name, value in fit.model.state_dict().items()} for fit in asked]
    with pytest.raises(InTurn, match=words):
        fit_stacked(asked, [torch.Generator().get_state()] * len(asked))
    for fit, wanted in zip(asked, before, strict=True):
        for name, value in fit.model.state_dict().items():
            assert torch.equal(value, wanted[name])


class Embedded(nn.Module):
    def __init__(self, by_function=False, **options):
        super().__init__()
        self.table, self.head = nn.Embedding(17, 6, **options), nn.Linear(6, 10)
        self.by_function = by_function

    def forward(self, images):
        tokens = (images.flatten(1) * 16).round().clamp(0, 16).long()
        found = F.embedding(tokens, self.table.weight, 0) if self.by_function else self.table(tokens)
        return self.head(found.mean(1))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": 3, "scale_grad_by_freq": True}])
def test_embeddings_whose_padding_is_not_trained_on_any_device(options):
    assert_alike(lambda: fits(lambda: Embedded(**options)))


def test_the_padding_of_an_embedding_by_its_function():
    assert_alike(lambda: fits(lambda: Embedded(by_function=True)))


def test_an_embedding_that_changes_its_table_is_no_stack():
    assert_no_stack("max_norm changes its table", lambda: Embedded(max_norm=0.5))
