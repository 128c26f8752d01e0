import math
import random
import re
from collections import OrderedDict
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn

from tests.client_app.work_orders import CPU, LENET, close, context_of, cut, digits, do, payload, work_order
from wildflower.client_app import context
from wildflower.client_app.batches import batches_of, micro_batches
from wildflower.client_app.board_gpu import Untraceable
from wildflower.client_app.chance import Chance
from wildflower.client_app.fitting import regularizing
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.limits import Refusal
from wildflower.client_app.order import do_order
from wildflower.client_app.rounding import LOST_ON_THE_WIRE
from wildflower.messages.orders import LocalTraining
from wildflower.messages.packing import MessageError, pack
from wildflower.messages.tensor_sets import TensorSet, digest
from wildflower.models.lenet import LeNet5
from wildflower.models.mlp import Mlp
from wildflower.strategies.fedprox import ProximalTraining
from wildflower.strategies.fjord import OrderedDropout
from wildflower.strategies.local import TrainingAlone
from wildflower.strategies.method import Answer, ClientStep, Training
from wildflower.strategies.scaffold import ControlledTraining
from wildflower.strategies.shared_losses import Regularizer
from wildflower.strategies.static_norm import MaskedTraining
from wildflower.strategies.statistics import TakeStatistics
from wildflower.strategies.training_steps import ClassCounts


def weights(done):
    """The weights that a device returns."""
    return done.answer.tensor_sets["weights"]


def no_build(monkeypatch):
    payload(), digits()  # what the server has made

    def build(self, architecture):
        raise AssertionError("a model was built")

    monkeypatch.setattr(LeNet5, "build", build)


def by_hand(device, seed, batches, family=LENET, width=0.5, **sgd):
    """Plain SGD on the batches that the seed shuffles; the mean loss over the examples."""
    task, architecture = digits(), family.width(width)
    model = family.build(architecture)
    model.load_state_dict(cut(family, architecture))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    generator = torch.Generator().manual_seed(seed)
    shard, losses = task.shard(device).train, []
    pieces = []
    while len(pieces) < batches:
        pieces += list(shard[torch.randperm(len(shard), generator=generator)].split(10))
    for picked in pieces[:batches]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(task.prepare(task.train.inputs[picked], augment=None)), task.train.labels[picked])
        loss.backward()
        optimizer.step()
        losses += [float(loss.detach())] * len(picked)
    return model.state_dict(), sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("how", "batches"),
    [({"epochs": 1}, 4), ({"epochs": 3}, 12), ({"epochs": 9, "steps": 3}, 3), ({"steps": 6}, 6)],
    ids=str,
)
def test_epochs_go_through_all_examples_and_steps_are_counted(how, batches):
    # 40 examples, a tenth of them for testing: 36 for training, in batches of 10, 10, 10 and 6.
    settings = LocalTraining(batch_size=10, learning_rate=0.05, momentum=0.5, weight_decay=0.01, **how)
    found = do(work_order(2), settings)
    expected, wanted = by_hand(2, 9, batches, lr=0.05, momentum=0.5, weight_decay=0.01)
    assert found.examples == 36
    assert found.answer.loss == pytest.approx(wanted, abs=1e-6)
    assert all(close(weights(found)[name], value) for name, value in expected.items())


def test_two_halves_of_a_device_share_nothing_and_stay_what_they_are():
    """36 examples, which differ: 18 in each half, the same in the next round, whose batches are shuffled otherwise."""

    def half(seed, share):
        chosen = context_of(work_order(2, seed=seed), LocalTraining(batch_size=5, epochs=2))
        parts = [inputs for [(inputs, _, _)] in chosen.steps(share=share)]
        seen = [tuple(x.flatten().tolist()) for inputs in parts for x in inputs]
        assert chosen.steps_taken == 8
        return seen

    first, second, again = half(1, (0.0, 0.5)), half(1, (0.5, 1.0)), half(2, (0.0, 0.5))
    assert len(first) == len(second) == 2 * 18
    assert len({*first, *second}) == 36
    assert set(first) == set(again)
    assert first != again


def test_batches_of_one_example_are_trained_on_where_they_were_asked_for():
    found = do(work_order(0), LocalTraining(batch_size=1, steps=3, learning_rate=0.05))
    assert not close(weights(found)["head.fc1.weight"], cut(LENET, LENET.width(0.5))["head.fc1.weight"])


def test_a_last_batch_of_one_example_is_left_out():
    # 36 examples in batches of 7 leave one over, which batch norm cannot normalize over a 1x1 map.
    counted = batches_of(
        digits(), digits().shard(0).train, LocalTraining(batch_size=7), torch.Generator(), CPU, once=False
    )
    seen = [len(labels) for _, labels in counted]
    assert seen == [7, 7, 7, 7, 7]


PLAIN = Mlp(input_shape=(1, 8, 8))  # no batch norm, for which the examples of a batch are not independent


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
def test_micro_batches_train_as_whole_batches_do(most):
    """Batches of 10, 10, 10 and 6 in parts that are not all alike, with a regularizer beside the loss, and clipped."""
    how = {"batch_size": 10, "learning_rate": 0.05, "momentum": 0.5, "clip_norm": 0.3, "augment": False}
    order = work_order(2, PLAIN, local=ProximalTraining(mu=0.5))
    whole, parts = (do(order, LocalTraining(**how, micro_batch_size=size), family=PLAIN) for size in (0, most))
    assert parts.answer.loss == pytest.approx(whole.answer.loss, abs=1e-6)
    for name, value in weights(whole).items():
        assert torch.allclose(weights(parts)[name], value, atol=1e-6), name


def test_a_device_computes_with_no_more_examples_at_once_than_a_micro_batch():
    order, training = work_order(2), LocalTraining(batch_size=10, micro_batch_size=4, epochs=2)
    made, seen = context_of(order, training), []
    model = made.build(made.received["weights"])
    made.fit(model, lambda inputs, labels: seen.append(len(labels)) or F.cross_entropy(model(inputs), labels))
    assert seen == 2 * [*(3 * [4, 3, 3]), 3, 3]
    assert made.steps_taken == 8
    assert {len(labels) for _, labels in made.one_pass()} == {4}


def test_parts_of_a_batch():
    def parts(examples, most):
        return [len(part) for part in micro_batches(torch.arange(examples), most)]

    assert parts(9, 8) == [5, 4]
    assert parts(32, 8) == [8, 8, 8, 8]
    assert parts(5, 2) == [2, 2]  # batch norm cannot normalize the fifth over a 1x1 map
    assert parts(2, 1) == [1, 1]
    assert parts(1, 4) == [1]


@pytest.mark.parametrize(
    ("key", "training"),
    [
        ("micro-batch-size", LocalTraining(batch_size=10, micro_batch_size=4)),
        ("learning-rates", LocalTraining(batch_size=10, learning_rates={"head": 2.0})),
    ],
)
def test_what_a_boards_trainer_does_not_have_is_trained_on_the_cpu(key, training, tmp_path, caplog):
    """Nobody listens at the socket: to ask the trainer would be an error."""
    order = work_order(2)
    on_cpu = do(order, training)
    found = do(order, training, board=tmp_path / "no.sock")
    assert all(torch.equal(value, weights(on_cpu)[name]) for name, value in weights(found).items())
    assert f"its trainer has no {key}" in caplog.text


def test_a_loop_of_its_own_gets_every_batch_in_parts_and_what_share_of_it_each_is():
    """36 examples in batches of 10 in parts of at most 4: three of 4, 3 and 3, and one of 3 and 3."""
    made = context_of(work_order(2), LocalTraining(batch_size=10, micro_batch_size=4))
    batches = [[(len(inputs), len(labels), share) for inputs, labels, share in batch] for batch in made.steps()]
    assert batches == 3 * [[(4, 4, 0.4), (3, 3, 0.3), (3, 3, 0.3)]] + [[(3, 3, 0.5), (3, 3, 0.5)]]
    assert made.steps_taken == 4
    made = context_of(work_order(2), LocalTraining(batch_size=10))
    assert [[share for _, _, share in batch] for batch in made.steps()] == 4 * [[1.0]]


def test_a_part_is_made_when_it_is_asked_for_and_is_augmented(monkeypatch):
    made, asked = context_of(work_order(2), LocalTraining(batch_size=10, micro_batch_size=4)), []

    def batch_of(task, picked, training, device, augment):
        asked.append((len(picked), augment))
        return picked, picked

    monkeypatch.setattr(context, "batch_of", batch_of)
    batch = next(made.steps())
    assert asked == []
    next(batch)
    assert asked == [(4, made._generator)]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_the_betas_of_adam_are_those_of_the_order(optimizer):
    sent = LocalTraining(optimizer=optimizer, betas=(0.8, 0.7)).model_dump_json()
    received = LocalTraining.model_validate_json(sent)
    assert context_of(work_order(), received).optimizer(nn.Linear(1, 1)).defaults["betas"] == (0.8, 0.7)


def test_a_model_may_be_trained_at_a_multiple_of_the_rate():
    """The rate is 2.5 times the run's, also in the parts that have a multiple of their own."""
    training = LocalTraining(learning_rate=0.1, learning_rates={"fc": 3.0})
    made = context_of(work_order(), training).optimizer(
        nn.Sequential(OrderedDict(fc=nn.Linear(1, 1), rest=nn.Linear(1, 1))), 2.5
    )
    assert sorted(group["lr"] for group in made.param_groups) == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_fused_optimizer_is_one_and_takes_the_same_steps_but_for_rounding(optimizer):
    how = {"batch_size": 10, "optimizer": optimizer, "learning_rate": 0.001}
    fused, plain = (LocalTraining(**how, fused=fused) for fused in (True, False))
    assert context_of(work_order(), fused).optimizer(nn.Linear(1, 1)).param_groups[0]["fused"] is True
    assert not context_of(work_order(), plain).optimizer(nn.Linear(1, 1)).param_groups[0]["fused"]
    found, expected = (weights(do(work_order(2), how)) for how in (fused, plain))
    # Four steps of about 0.001 each. Where a gradient is nearly 0, its rounding decides on the sign of a step.
    differences = torch.cat([(found[name] - value).abs().flatten() for name, value in expected.items()])
    assert differences.mean() < 1e-5


def test_channels_last_training_is_the_same_but_for_rounding_and_sends_the_same_shapes():
    last = LocalTraining(batch_size=10, learning_rate=0.05, layout="channels-last")
    made = context_of(work_order(2), last)
    for inputs in [*(x for x, _ in made.one_pass()), *(x for batch in made.steps() for x, _, _ in batch)]:
        channels, height, width = inputs.shape[1:]
        assert inputs.stride() == (channels * height * width, 1, width * channels, channels)
    found, expected = (
        weights(do(work_order(2), how)) for how in (last, LocalTraining(batch_size=10, learning_rate=0.05))
    )
    for name, value in expected.items():
        assert found[name].is_contiguous()
        assert torch.allclose(found[name], value, atol=1e-4), name


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_same_order_gives_the_same_bits_and_another_seed_others(optimizer):
    how = LocalTraining(batch_size=10, optimizer=optimizer, learning_rate=0.01)
    first, again, other = (weights(do(work_order(1, seed=seed), how)) for seed in (8, 8, 99))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not all(torch.equal(first[n], other[n]) for n in first)


def test_gradients_are_clipped_to_the_norm_that_is_asked():
    start = cut(LENET, LENET.width(0.5))
    found = do(work_order(0), LocalTraining(batch_size=10, steps=1, learning_rate=1.0, clip_norm=0.01))
    learned = [name for name in start if "running" not in name]
    moved = torch.cat([(weights(found)[n] - start[n]).flatten() for n in learned])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_proximal_training_stays_nearer_to_what_was_received():
    start = cut(LENET, LENET.width(0.5))

    def moved(local):
        found = do(work_order(0, local=local), LocalTraining(batch_size=10, epochs=4, learning_rate=0.05))
        return sum(float((weights(found)[n] - start[n]).square().sum()) for n in start if "running" not in n)

    assert moved(ProximalTraining(mu=5.0)) < 0.5 * moved(Training())


@pytest.mark.parametrize("distillation", [False, True])
def test_ordered_dropout_trains_the_sub_model_that_was_ordered(distillation):
    static = LeNet5(input_shape=(1, 8, 8), norm="static")
    half, quarter = static.width(0.5), static.width(0.25)
    local = OrderedDropout(lower=(quarter,), distillation=distillation)
    how = LocalTraining(batch_size=10, epochs=6, learning_rate=0.05)

    def trained(**changes):
        return weights(do(work_order(2, static, local=local, **changes), how, family=static))

    found, again, other = trained(), trained(), trained(seed=99)
    start = cut(static, half)
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in start.items()}
    assert all(not torch.equal(found[n], start[n]) for n in start if n.endswith("conv.weight"))
    assert all(torch.equal(found[n], again[n]) for n in start)
    assert not all(torch.equal(found[n], other[n]) for n in start)
    task, shard = digits(), digits().shard(2).train
    inputs, labels = task.prepare(task.train.inputs[shard], augment=None), task.train.labels[shard]
    for architecture in (quarter, half):  # both learned
        losses = []
        for state in (start, found):
            model = static.build(architecture)
            model.load_state_dict(static.place(architecture).gather(state))
            losses.append(float(F.cross_entropy(model(inputs), labels).detach()))
        assert losses[1] < losses[0]


def test_masked_training_leaves_the_rows_of_absent_classes_alone():
    static = LeNet5(input_shape=(1, 8, 8), norm="static", scaler=True)
    task = digits()
    task_labels = task.train.labels
    device = next(d for d in range(4) if len(task_labels[task.shard(d).train].unique()) < 10)
    found = do(work_order(device, static, local=MaskedTraining()), family=static)
    start, row = cut(static, static.width(0.5)), "head.classifier.weight"
    held = task_labels[task.shard(device).train].bincount(minlength=10)
    absent = held == 0
    assert bool(absent.any())
    assert torch.equal(weights(found)[row][absent], start[row][absent])
    assert not torch.equal(weights(found)[row][~absent], start[row][~absent])


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(batch_size=10, epochs=5),
        LocalTraining(batch_size=32, micro_batch_size=10, epochs=5),
    ],
    ids=["batches", "micro-batches"],
)
@pytest.mark.parametrize(("examples", "batches"), [(0, 4), (11, 2), (20, 2), (1000, 4)])
def test_statistics_are_the_mean_over_the_batches_of_one_pass(examples, batches, training):
    """First layer, by hand: the convolution's mean and unbiased variance per channel in each batch, then their mean.

    The most that a device passes is rounded up to whole batches, or micro-batches.
    """
    found = do(work_order(1, local=TakeStatistics(examples=examples)), training)
    statistics = found.answer.tensor_sets["statistics"]
    tensor_set = TakeStatistics().returned(LENET, LENET.width(0.5))["statistics"]
    assert [entry.name for entry in tensor_set.layout.entries] == [
        "block1.norm.running_mean",
        "block1.norm.running_var",
        "block2.norm.running_mean",
        "block2.norm.running_var",
    ]
    assert found.answer.loss is None
    task, sent = digits(), cut(LENET, LENET.width(0.5))
    shard = task.shard(1).train
    shuffled = shard[torch.randperm(len(shard), generator=torch.Generator().manual_seed(8))]
    means, variances = [], []
    for picked in shuffled.split(10)[:batches]:
        x = task.prepare(task.train.inputs[picked], augment=None)
        y = F.conv2d(x, sent["block1.conv.weight"], sent["block1.conv.bias"], padding=2)
        channels = y.transpose(0, 1).flatten(1)
        means.append(channels.mean(1))
        variances.append(channels.var(1, unbiased=True))
    assert len(means) == batches
    assert close(statistics["block1.norm.running_mean"], torch.stack(means).mean(0))
    assert close(statistics["block1.norm.running_var"], torch.stack(variances).mean(0))


@pytest.mark.parametrize(
    ("budget", "available", "words", "overrun"),
    [
        (999_999, None, "training needs about 1000000 bytes, the budget is 999999 bytes", False),
        (999_999, 999_999, "the budget is 999999 bytes", False),
        (0, 999_999, "training needs about 1000000 bytes, this device has free 999999 bytes", False),
        (10**6, 999_999, "this device has free 999999 bytes", True),
        (10**9, 1, "this device has free 1 bytes", True),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_built(budget, available, words, overrun, monkeypatch):
    no_build(monkeypatch)
    with pytest.raises(Refusal, match=words) as refused:
        do(work_order(memory_bytes=budget), arrays=[payload()], available_bytes=available)
    assert refused.value.overrun == overrun


def test_no_gradients_are_left():
    """Of a model that teaches or is scored next they would be held for nothing."""
    assert all(parameter.grad is None for parameter in do(work_order()).answer.model.parameters())


def test_what_just_fits_is_trained():
    assert do(work_order(memory_bytes=10**6)).answer.loss is not None


@pytest.mark.parametrize(
    ("budget", "available", "words"),
    [
        (1_200_000, 10**12, "training grew to 5500000 bytes, the budget is 1200000 bytes"),
        (10**12, 1_300_000, "training grew to 5500000 bytes, this device has free 1300000 bytes"),
        (0, 1_300_000, "training grew to 5500000 bytes, this device has free 1300000 bytes"),
    ],
)
def test_training_that_outgrows_a_limit_is_stopped(budget, available, words, monkeypatch):
    batches = []

    class Growing(context.MemoryMeter):
        def peak_bytes(self) -> int:
            batches.append(1)
            return 4_000_000 + 500_000 * len(batches)

    monkeypatch.setattr(context, "MemoryMeter", Growing)
    monkeypatch.setattr(context, "touched_bytes", lambda model: 4_000_000)
    order = work_order(memory_bytes=budget)
    with pytest.raises(Refusal, match=words):
        do(order, LocalTraining(batch_size=10, epochs=5), available_bytes=available)
    assert len(batches) == 3  # of twenty


def test_memory_that_is_freed_before_the_step_ends_counts(monkeypatch):
    honest = Training.loss

    def greedy(local, context, model):
        loss = honest(local, context, model)

        def of_batch(inputs, labels):
            torch.ones(2**24)  # 64 MiB, every page of them written, and given back at once
            return loss(inputs, labels)

        return of_batch

    do(work_order())  # what the first training of a process loads is none of this one's
    monkeypatch.setattr(Training, "loss", greedy)
    order = work_order(memory_bytes=40 * 2**20)
    with pytest.raises(Refusal, match=r"training grew to \d+ bytes, the budget is 41943040 bytes"):
        do(order, LocalTraining(batch_size=10, epochs=5), available_bytes=10**12)


def test_in_a_simulation_nobody_can_tell_what_one_device_holds(monkeypatch):
    monkeypatch.setattr(context.MemoryMeter, "peak_bytes", lambda self: 10**15)
    found = do(work_order(memory_bytes=1_200_000))
    assert found.answer.loss is not None
    assert found.measured_memory_bytes is None


def test_on_a_machine_of_its_own_the_peak_is_told(monkeypatch):
    monkeypatch.setattr(context.MemoryMeter, "peak_bytes", lambda self: 1_100_000)
    assert do(work_order(), available_bytes=10**12).measured_memory_bytes == 1_100_000


def test_running_out_of_memory_is_a_refusal(monkeypatch):
    def fit(*arguments, **more):
        raise MemoryError("no more")

    monkeypatch.setattr(context.DeviceContext, "fit", fit)
    with pytest.raises(Refusal, match=r"^out of memory: no more"):  # many devices in one process: nobody measures
        do(work_order())
    with pytest.raises(Refusal, match=r"^out of memory after \d+ bytes, .*: no more"):
        do(work_order(), available_bytes=10**12)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ({"widths": [3, 8, 60]}, "3 widths, but there are 4"),
        ({"widths": [7, 8, 60, 42]}, "width of conv1 must be 1 to 6, not 7"),
        ({"widths": [0, 8, 60, 42]}, "width of conv1 must be 1 to 6, not 0"),
        ({"widths": [3, 8, 60, 42], "kernels": [1]}, "1 kernels, but there are 0"),
        ({"blocks": 3}, "unknown keys"),
        ({}, "'widths' is missing"),
    ],
)
def test_an_unknown_architecture_is_refused_before_anything_is_built(architecture, words, monkeypatch):
    no_build(monkeypatch)
    with pytest.raises(ValueError, match=words):
        do(work_order(architecture=architecture), arrays=[payload()])


def test_server_and_device_must_agree_about_the_tensor_sets(monkeypatch):
    no_build(monkeypatch)
    with pytest.raises(
        MessageError, match=r"disagree about the tensor sets of wildflower\.strategies\.training_steps:T"
    ):
        do(work_order(digest="0" * 16), arrays=[payload()])


@pytest.mark.parametrize("payloads", [{}, {"weights": 0, "control": 0}, {"control": 0}])
def test_the_tensor_sets_are_those_that_the_device_half_lists(payloads):
    words = f"device 0: tensor sets {sorted(payloads)} came, not ['weights']"
    with pytest.raises(MessageError, match=re.escape(words)):
        do(work_order(payloads=payloads), arrays=[payload()])


def test_weights_of_another_length_are_refused():
    with pytest.raises(MessageError, match="packed weights have"):
        do(work_order(), arrays=[payload(width=1.0)])


def test_a_device_that_trains_alone_goes_on_with_its_own_model(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    order = work_order(local=TrainingAlone())

    def trained(round_number):
        done = do(order, state=state, round_number=round_number)
        assert done.answer.tensor_sets == {}
        return done.answer.model.state_dict(), done.answer.loss

    first, second, again = trained(1), trained(2), trained(2)
    assert second[1] < first[1]
    assert all(torch.equal(second[0][n], again[0][n]) for n in first[0])
    anew = trained(1)
    assert all(torch.equal(first[0][n], anew[0][n]) for n in first[0])


# Regularizers


def linear(value):
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(value)
    return model


@pytest.mark.parametrize(
    ("regularizer", "gradient", "value"),
    [
        (Regularizer(), 4.0, 12.0),
        (Regularizer(strength=0.5), 4.5, 12.0),
        (Regularizer(strength=0.5, reported=True), 4.5, 12.25),
        (Regularizer(strength=0.5, toward={"weight": torch.tensor([[1.0]])}), 5.0, 12.0),
        (Regularizer(correction={"weight": torch.tensor([[0.1]]), "deeper.weight": torch.ones(3)}), 3.9, 12.0),
        (Regularizer(strength=0.5, correction={"weight": torch.tensor([[0.1]])}, reported=True), 4.4, 12.25),
        (Regularizer(strength=0.5, correction={"deeper.weight": torch.ones(3)}), 4.5, 12.0),
    ],
    ids=["none", "pull", "reported pull", "pull elsewhere", "correction", "both", "a correction of another layer"],
)
def test_a_regularized_loss_by_hand(regularizer, gradient, value):
    """Received 2, now 3, loss w x with x = 4: the gradient is 4 + strength (3 - 2) - correction."""
    model = linear(2.0)
    regularize = regularizing(model, regularizer)
    model.weight.data.fill_(3.0)
    for _ in range(2):  # the second step starts from nothing too
        model.zero_grad()
        beside = regularize()
        found = model(torch.tensor([[4.0]])).sum()
        found.backward()
        assert found.item() + (0 if beside is None else beside.item()) == pytest.approx(value)
        assert model.weight.grad.item() == pytest.approx(gradient)


# What stays on the device


def tensor(value):
    return {"x": torch.tensor([float(value)])}


def test_what_is_kept_is_there_in_the_next_round_and_for_its_architecture(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    first = context_of(work_order(), state=state)
    first.keep("one", tensor(1))
    first.keep("all", tensor(2), per_architecture=False)
    assert first.kept("one") is None  # the order is not done yet
    assert first.save()
    assert first.kept("one") is None  # a round that is done again begins where it began
    next_round = context_of(work_order(), state=state, round_number=2)
    assert next_round.kept("one")["x"].item() == 1
    assert next_round.kept("all", per_architecture=False)["x"].item() == 2
    wider = context_of(work_order(width=1.0), state=state, round_number=2)
    assert wider.kept("one") is None
    assert wider.kept("all", per_architecture=False)["x"].item() == 2
    assert not context_of(work_order(), state=state, round_number=2).save()


def test_an_evaluation_keeps_nothing_and_may_ask_for_what_is_recent(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    trained = context_of(work_order(), state=state, round_number=3)
    assert trained.keeps
    trained.keep("one", tensor(1))
    trained.save()
    for evaluated, found in ((3, 1), (4, None)):
        scored = context_of(work_order(), state=state, round_number=evaluated + 1, evaluated_round=evaluated)
        assert not scored.keeps
        assert scored.kept("one")["x"].item() == 1
        recent = scored.kept("one", recent=True)
        assert (recent and recent["x"].item()) == found
        scored.keep("one", tensor(9))
        assert not scored.save()
    training = context_of(work_order(), state=state, round_number=9)
    assert training.kept("one", recent=True)["x"].item() == 1  # whose last training may be long ago


class KeepsAndFails(Training):
    """Keeps something, and then cannot go on."""

    def train(self, context):
        context.keep("one", tensor(1))
        raise MemoryError("no more")


def test_nothing_is_kept_of_an_order_that_was_not_done(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    with pytest.raises(Refusal, match="out of memory"):
        do(work_order(local=KeepsAndFails()), state=state)
    assert state.is_empty(99)


class KeepsTwo(Training):
    """Keeps two things, which are of one round."""

    def train(self, context):
        context.keep("one", tensor(1))
        context.keep("two", tensor(2))
        return super().train(context)


def test_a_disk_that_fills_up_between_two_files_leaves_both_as_they_were(tmp_path, monkeypatch):
    state = DeviceState(str(tmp_path), "a run", 0)
    order = work_order(local=KeepsTwo())
    do(order, state=state)
    before = sorted(path.name for path in state.folder.iterdir())
    save = state.save

    def full(key, number, tensors):
        if key.startswith("two"):
            raise OSError(28, "No space left on device")
        save(key, number, tensors)

    monkeypatch.setattr(state, "save", full)
    with pytest.raises(OSError, match="No space left"):
        do(order, state=state, round_number=2)
    assert sorted(path.name for path in state.folder.iterdir()) == before


@pytest.mark.parametrize("local", [TrainingAlone(), ControlledTraining()])
def test_what_a_device_keeps_stays_as_it_was_where_training_diverges(local, tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    order = work_order(local=local)
    start = cut(LENET, LENET.width(0.5))
    layouts = [tensor_set.layout for tensor_set in local.sent(LENET, LENET.width(0.5)).values()]
    arrays = [pack({entry.name: start[entry.name] for entry in layout.entries}, layout) for layout in layouts]
    do(order, arrays=arrays, state=state)
    before = {path.name: path.read_bytes() for path in state.folder.iterdir()}
    diverging = LocalTraining(batch_size=10, learning_rate=1e30)
    with pytest.raises(MessageError, match=r"training has diverged: .* smaller learning-rate or clip-norm helps"):
        do(order, diverging, arrays=arrays, state=state, round_number=2)
    assert {path.name: path.read_bytes() for path in state.folder.iterdir()} == before


def test_a_device_says_that_it_keeps_something_and_that_it_has_lost_it(tmp_path, caplog):
    state = DeviceState(str(tmp_path), "a run", 0)
    order = work_order(local=TrainingAlone())
    first = do(order, state=state)
    assert (first.state_kept, first.state_lost) == (True, False)
    plain = do(work_order(), state=state)
    assert (plain.state_kept, plain.state_lost) == (False, False)
    again = order.model_copy(update={"kept": True})
    assert not do(again, state=state, round_number=2).state_lost
    for path in state.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-5])
    torn = do(again, state=state, round_number=3)
    assert torn.state_lost
    assert "Device 0 begins anew" in caplog.text
    for path in state.folder.iterdir():
        path.unlink()
    gone = do(again, state=state, round_number=3)
    assert (gone.state_kept, gone.state_lost) == (True, True)
    assert all(torch.equal(gone.answer.model.state_dict()[n], v) for n, v in first.answer.model.state_dict().items())


# What a client step is given, and what it must return


def test_an_earlier_model_is_constant():
    earlier = LENET.build(LENET.full()).train()
    context_of(work_order(), earlier=earlier)
    assert not earlier.training
    assert not any(parameter.requires_grad for parameter in earlier.parameters())


def test_steps_are_counted_and_a_pass_for_statistics_is_none():
    trained, passed = context_of(work_order()), context_of(work_order(local=TakeStatistics()))
    do_order(trained)
    do_order(passed)
    assert (trained.steps_taken, passed.steps_taken) == (4, 0)


def test_what_was_sent_is_there_again_after_training():
    found = context_of(work_order())
    do_order(found)
    start = cut(LENET, LENET.width(0.5))
    assert not torch.equal(found.received["weights"]["head.fc1.bias"], start["head.fc1.bias"])
    assert all(torch.equal(found.sent_again("weights")[name], value) for name, value in start.items())
    assert found.sent_again("control") == {}


def test_chance_follows_from_the_order_and_is_none_of_a_traced_loss(monkeypatch):
    drawn = [chance.random() for chance in (context_of(work_order()).chance, random.Random(7))]
    assert drawn[0] == drawn[1]
    chance = Chance(7)
    monkeypatch.setattr(Chance, "traced", True)
    for ask in (
        chance.random,
        lambda: chance.choice([1, 2, 3]),
        lambda: chance.randrange(5),
        lambda: chance.uniform(0, 1),
        lambda: chance.getrandbits(3),
        lambda: chance.shuffle([1, 2, 3]),
    ):
        with pytest.raises(Untraceable, match="the loss is another one for every batch"):
            ask()


def test_who_only_counts_its_classes_needs_no_memory():
    done = do(work_order(2, local=ClassCounts(), memory_bytes=1), available_bytes=1)
    labels = digits().train.labels[digits().shard(2).train]
    assert done.answer.facts == {"class_counts": labels.bincount(minlength=10).tolist()}
    assert (done.answer.tensor_sets, done.answer.model, done.answer.loss) == ({}, None, None)


def test_a_device_without_examples_says_so(monkeypatch):
    monkeypatch.setattr(context.DeviceContext, "examples", 0)
    with pytest.raises(Refusal, match="the device holds no training examples"):
        do(work_order())


class Wrong(ClientStep):
    """Does not return what it lists."""

    what: Literal["tensor_sets", "nothing", "tensor", "shape", "type", "facts", "length", "nan"]

    def facts(self, family):
        return {"length": {"steps": 2}, "nan": {"steps": 1}}.get(self.what, {})

    def train(self, context):
        weights = dict(context.received["weights"])
        if self.what == "tensor":
            del weights["head.classifier.bias"]
        if self.what == "shape":
            weights["head.classifier.bias"] = torch.zeros(9)
        if self.what == "type":
            weights["head.classifier.bias"] = weights["head.classifier.bias"].double()
        tensor_sets = {"tensor_sets": {"weights": weights, "control": weights}, "nothing": {}}.get(self.what)
        facts = {"facts": {"steps": [1.0]}, "length": {"steps": [1.0]}, "nan": {"steps": [math.nan]}}.get(self.what, {})
        return Answer(None, {"weights": weights} if tensor_sets is None else tensor_sets, facts=facts)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("tensor_sets", "returns tensor sets ['control', 'weights'], but lists ['weights']"),
        ("nothing", "returns tensor sets [], but lists ['weights']"),
        ("tensor", "returns another tensor set 'weights' than it lists: missing tensor 'head.classifier.bias'"),
        (
            "shape",
            "returns another tensor set 'weights' than it lists: tensor 'head.classifier.bias' has shape [9] instead",
        ),
        (
            "type",
            "returns another tensor set 'weights' than it lists: tensor 'head.classifier.bias' has dtype torch.float64",
        ),
        ("facts", "returns facts {'steps': 1}, but lists {}"),
        ("length", "returns facts {'steps': 1}, but lists {'steps': 2}"),
        ("nan", "returns the fact 'steps' with numbers that are not finite"),
    ],
)
def test_a_device_half_that_does_not_return_what_it_lists_is_refused_by_name(what, words):
    with pytest.raises(MessageError, match=re.escape(f"tests.client_app.test_context:Wrong {words}")):
        do(work_order(local=Wrong(what=what)))


class ConvolutionsAlone(ClientStep):
    """Is sent, and returns, the convolutions alone."""

    def sent(self, family, architecture):
        return {"convolutions": _convolutions(family, architecture)}

    def returned(self, family, architecture):
        return {"convolutions": _convolutions(family, architecture)}

    def train(self, context):
        return Answer(None, {"convolutions": {n: 2 * v for n, v in context.received["convolutions"].items()}})


def _convolutions(family, architecture):
    return TensorSet.of({n: spec for n, spec in family.tensors(architecture).items() if ".conv." in n})


def test_a_device_half_says_itself_what_travels():
    order = work_order(local=ConvolutionsAlone())
    tensor_set = _convolutions(LENET, LENET.width(0.5))
    assert order.digest == digest({"convolutions": tensor_set}, {"convolutions": tensor_set})
    start = cut(LENET, LENET.width(0.5))
    sent = pack({entry.name: start[entry.name] for entry in tensor_set.layout.entries}, tensor_set.layout)
    found = do(order, arrays=[sent]).answer.tensor_sets["convolutions"]
    assert found.keys() == {f"block{n}.conv.{what}" for n in (1, 2) for what in ("weight", "bias")}
    assert all(torch.equal(value, 2 * start[name]) for name, value in found.items())


def after_a_rounded_round(folder):
    """An order under a wire that rounds, and the state of a device that has done it in round 1."""
    state = DeviceState(str(folder), "a run", 0)
    order = work_order(feedback=True)
    first = do(order, state=state, wire="int8")
    assert (first.state_kept, first.state_lost) == (False, False)
    assert [path.name.split("-weights-")[0] for path in state.folder.iterdir()] == [LOST_ON_THE_WIRE]
    return order, state


def test_what_rounding_lost_and_cannot_be_read_begins_with_zero(tmp_path, caplog):
    order, state = after_a_rounded_round(tmp_path)
    without = do(order, state=DeviceState(str(tmp_path), "another run", 0), wire="int8", round_number=2)
    whole = do(order, state=state, wire="int8", round_number=2)
    assert whole.encoded != without.encoded
    for path in state.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-5])
    torn = do(order, state=state, wire="int8", round_number=2)
    assert torn.encoded == without.encoded
    assert (torn.state_kept, torn.state_lost) == (False, False)
    assert "what rounding has lost of its changes cannot be read" in caplog.text


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_an_update_is_returned_where_what_rounding_lost_cannot_be_written(tmp_path, caplog, monkeypatch, error):
    order, state = after_a_rounded_round(tmp_path)
    expected = do(order, state=state, wire="int8", round_number=2)

    def full(*_):
        raise error

    monkeypatch.setattr(state, "save", full)
    done = do(order, state=state, wire="int8", round_number=2)
    assert done.encoded == expected.encoded
    assert not done.state_kept
    assert "cannot be written" in caplog.text
    assert "No space left on device" in caplog.text


def test_no_memory_to_encode_an_update_is_an_overrun(tmp_path, monkeypatch):
    def refused(*_):
        raise MemoryError("no more")

    monkeypatch.setattr("wildflower.client_app.rounding.encode_entry", refused)
    with pytest.raises(Refusal, match=r"out of memory.*no more") as refusal:
        do(work_order(), state=DeviceState(str(tmp_path), "a run", 0), wire="int8")
    assert refusal.value.overrun
