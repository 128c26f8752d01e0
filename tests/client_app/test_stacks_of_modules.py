"""Stacks of modules of any kind: they come to what devices come to in turn, or say why they are no stack."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.client_app.test_side_by_side import DOUBLE, SPEC, assert_alike, work_picks
from wildflower.client_app.fitting import Fit, fit_here
from wildflower.client_app.stack import fit_stacked, score_stacked
from wildflower.client_app.stack_operators import InTurn
from wildflower.messages.orders import LocalTraining
from wildflower.models.cnn import Cnn3
from wildflower.strategies.shared_losses import PureLoss
from wildflower.tasks.scoring import Scoring
from wildflower.tasks.task import load_task

COUNTS = (9, 23, 14)
STATIC = Cnn3(input_shape=(1, 8, 8), norm="static")
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


# What is of a module, and what it does to itself


def test_a_module_that_stands_at_two_places_and_a_scalar_parameter():
    class Shared(Layers):
        def __init__(self):
            super().__init__()
            self.again, self.gain = self.second, nn.Parameter(torch.tensor(2.0))

        def between(self, x):
            return self.again(super().between(x)) * self.gain

    assert_alike(lambda: fits(Shared, training=TRAINING.model_copy(update={"clip_norm": 0.1})))


def test_dropout_in_place_changes_what_is_read_later():
    class InPlace(Layers):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5, inplace=True)

        def between(self, x):
            y = self.second(x)
            return y + 2 * self.dropout(y)

    assert_alike(lambda: fits(InPlace))


def test_dropout_where_the_batch_is_not_the_first_side():
    class Columns(Layers):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def between(self, x):
            return self.dropout(self.second(x).t()).t()

    assert_alike(lambda: fits(Columns))


def test_dropout_over_images_with_channels_last_is_no_stack():
    training = TRAINING.model_copy(update={"layout": "channels-last"})
    assert_no_stack(
        "in the order of channels-last images", lambda: nn.Sequential(Layers(), nn.Dropout()), None, PureLoss, training
    )


def test_weight_norm():
    class Normed(Layers):
        def __init__(self):
            super().__init__()
            self.second = nn.utils.parametrizations.weight_norm(self.second)

    assert_alike(lambda: fits(Normed))


def test_frozen_parts_that_devices_have_each_for_itself():
    assert_alike(lambda: fits(Layers, lambda model, _: model.first.requires_grad_(False)))


def test_parts_that_are_frozen_on_some_devices_are_no_stack():
    assert_no_stack("train different parts", Layers, lambda model, device: model.first.requires_grad_(device != 1))


class Counting(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("batches", torch.zeros(1, dtype=torch.int64))

    def between(self, x):
        self.batches += 1
        return super().between(x)


class Assigning(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def between(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().between(x - self.mean)


class Decaying(Layers):
    def between(self, x):
        with torch.no_grad():
            self.second.weight.mul_(0.99)
        return super().between(x)


class Annealing(Layers):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def between(self, x):
        self.calls += 1
        return super().between(x) * (1 + self.calls / 10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Counting, "changes what devices have alike"),
        (Assigning, "puts other tensors in the place of its own"),
        (Decaying, "changes its weights while it computes"),
        (Annealing, "keeps more than tensors"),
    ],
)
def test_modules_that_change_themselves_are_no_stack(make, words):
    assert_no_stack(words, make)


# What devices have for themselves


def scaled(model, device):
    model.first.register_forward_hook(lambda module, inputs, output: output * (device + 1))


def backward(model, device):
    model.first.register_full_backward_hook(lambda module, into, out: None)


def gradients(model, device):
    model.first.weight.register_hook(lambda gradient: gradient * (device + 1))


def attribute(model, device):
    model.first.scale = float(device)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled, "differ in more than"),
        (attribute, "differ in more than"),
        (backward, "a Linear of its model has hooks"),
        (gradients, "the parameter first.weight has a hook"),
    ],
)
def test_hooks_and_attributes_of_one_device_are_no_stack(change, words):
    assert_no_stack(words, Layers, change)


def weighted(weight, task, model, inputs, labels):
    return task.loss(model(inputs), labels) * weight


def by_partial(task, model, device):
    return PureLoss(task, model, partial(weighted, device + 1))


def by_closure(task, model, device):
    return PureLoss(task, model, lambda task, model, x, y: task.loss(model(x), y) * (device + 1))


def taught(task, model, device):
    teacher = Layers().double()
    return PureLoss(task, model, lambda task, model, x, y: F.mse_loss(model(x), teacher(x).detach()))


class Hidden(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.of = [model]

    def forward(self, x):
        return self.of[0](x)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (by_partial, "differ in more than"),
        (by_closure, "differ in more than"),
        (taught, "differ in more than"),
        (lambda task, model, _: PureLoss(task, Hidden(model)), "no parameter that is the model's first.weight"),
    ],
)
def test_losses_that_hold_what_differs_are_no_stack(loss, words):
    assert_no_stack(words, Layers, loss=loss)


def test_losses_of_functions_that_hold_the_same_are_a_stack():
    def loss(task, model, device):
        weight = torch.full((), 2.0)  # each device's own, of equal values
        return PureLoss(task, model, lambda _, outputs, x, y: task.loss(model(x), y) * weight)

    assert_alike(lambda: fits(Layers, loss=loss))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda device: {"rate": 1.0 + device}, "different rates"),
        (lambda device: {"new_statistics": device == 2}, "begin as a mean"),
    ],
)
def test_trainings_that_are_set_otherwise_are_no_stack(options, words):
    assert_no_stack(words, Layers, options=options)


def test_the_loss_of_a_model_of_16_bits_is_not_rounded_to_them():
    def loss(task, model, device):
        return PureLoss(task, model, lambda task, model, x, y: task.loss(model(x).float(), y))

    training = LocalTraining(batch_size=9, learning_rate=1e-30)
    alone, beside = (fits(Layers, None, loss, training, counts=(9, 9), dtype=torch.bfloat16) for _ in range(2))
    found, _ = fit_stacked(beside, [torch.Generator().get_state()] * 2)
    assert found == pytest.approx([fit_here(fit) for fit in alone], rel=5e-4)


# Scores


def scorings(make, options=lambda device: {}):
    """Scorings of models on so many examples, 10 at a time."""
    task, found = load_task(SPEC), []
    for device, count in enumerate(COUNTS):
        torch.manual_seed(100 + device)
        model = make(**options(device))
        picked = torch.randperm(len(task.train))[:count]
        inputs, labels = task.train.inputs[picked], task.train.labels[picked]
        found.append(Scoring(model, task, inputs, labels, 10, torch.device("cpu")))
    return found


def test_norms_without_statistics_are_scored_without_padding():
    def make():
        return STATIC.build(STATIC.full())

    alone = [scoring.alone() for scoring in scorings(make)]
    for wanted, found in zip(alone, score_stacked(scorings(make)), strict=True):
        assert found.sums == wanted.sums
        assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5)


class Scaled(Layers):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def between(self, x):
        return super().between(x) * self.scale


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (Counting, lambda device: {}, "changes its tensors while it is scored"),
        (Scaled, lambda device: {"scale": float(device)}, "differ in more than"),
    ],
)
def test_scored_models_that_are_no_stack(make, options, words):
    asked = scorings(make, options)
    with pytest.raises(InTurn, match=words):
        score_stacked(asked)
    assert all(not buffer.any() for scoring in asked for buffer in scoring.model.buffers())
