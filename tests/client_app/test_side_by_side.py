"""Devices whose trainings are done at once return what they return in turn."""

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.client_app.work_orders import Apart, answers, batch, packed, work_order
from wildflower.client_app import alike, side_by_side, stack, training_message, work
from wildflower.client_app.fitting import Fit, fit_here
from wildflower.messages.orders import EvaluationBatch, EvaluationOrder, EvaluationReply, LocalTraining, parse
from wildflower.messages.packing import pack
from wildflower.messages.tensor_sets import TensorSet, digest
from wildflower.models.cnn import Cnn3, PflCnn
from wildflower.models.family import make_family
from wildflower.models.lenet import LeNet5
from wildflower.models.mlp import Mlp
from wildflower.models.weights import with_weights
from wildflower.plugins import flower_log
from wildflower.strategies.depthfl import MutualLearningOfExits
from wildflower.strategies.fednova import NormalizedTraining
from wildflower.strategies.fedprox import ProximalTraining
from wildflower.strategies.scalefl import WeightedExits
from wildflower.strategies.shared_losses import PureLoss, Regularizer
from wildflower.strategies.static_norm import MaskedTraining
from wildflower.strategies.submodel import initial_weights
from wildflower.strategies.training_steps import Training
from wildflower.tasks.scoring import Scoring
from wildflower.tasks.task import TaskSpec, load_task

SPEC = TaskSpec(name="digits", devices=4, seed=1, partition="iid")
SHARED = TaskSpec(name="digits", devices=4, seed=1, partition="dirichlet", alpha=0.5, test_fraction=0.3)
DOUBLE = torch.float64
FAMILIES = [Cnn3(input_shape=(1, 8, 8), norm="static"), Cnn3(input_shape=(1, 8, 8)), Mlp(input_shape=(1, 8, 8))]
DROPPING = PflCnn(input_shape=(1, 8, 8))


def doubled(inputs_and_labels):
    inputs, labels = inputs_and_labels
    return inputs.to(DOUBLE), labels


def fits_of(counts, width, training, family, regularizers=None, seed=0, factors=None):
    """Trainings in float64 of devices with so many examples."""
    task, architecture = load_task(SPEC), family.width(width)
    found = []
    for device, count in enumerate(counts):
        generator = torch.Generator().manual_seed(seed + device)
        weights = {
            name: torch.rand(spec.shape, generator=generator, dtype=DOUBLE) * 0.4 + 0.05
            for name, spec in family.tensors(architecture).items()
        }
        model = with_weights(family, architecture, weights)
        shard = torch.randperm(len(task.train), generator=generator)[:count]

        def start(shard=shard, device=device):
            return work_picks(shard, training, torch.Generator().manual_seed(device))

        def examples_of(picked):
            return task.prepare(task.train.inputs[picked], augment=None).to(DOUBLE), task.train.labels[picked]

        regularizer = None if regularizers is None else regularizers(model, generator)
        found.append(
            Fit(
                model,
                PureLoss(task, model),
                start,
                examples_of,
                count,
                training,
                torch.device("cpu"),
                regularizer,
                factors={} if factors is None else factors(model, generator),
            )
        )
    return found


def work_picks(shard, training, generator):
    from wildflower.client_app.batches import picks_of

    return picks_of(shard, training, generator)


def assert_alike(make):
    """Train two copies of the same trainings, in turn and at once."""
    alone, beside = make(), make()
    in_turn = []
    for number, fit in enumerate(alone):
        torch.manual_seed(number)
        in_turn.append(fit_here(fit))
    order = sorted(range(len(beside)), key=lambda k: -beside[k].examples)
    drawn = [torch.Generator().manual_seed(k).get_state() for k in order]
    losses, _ = stack.fit_stacked([beside[k] for k in order], drawn)
    at_once = dict(zip(order, losses, strict=True))
    for number, fit in enumerate(alone):
        assert at_once[number] == pytest.approx(in_turn[number], rel=1e-5)
        for (name, wanted), found in zip(
            fit.model.state_dict().items(), beside[number].model.state_dict().values(), strict=True
        ):
            assert torch.linalg.norm(found - wanted) <= 1e-5 * torch.linalg.norm(wanted), (number, name)


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(2, 23), min_size=2, max_size=5),
    width=st.sampled_from([0.0625, 0.125, 0.25]),
    batch_size=st.integers(2, 9),
    steps=st.integers(0, 4),
    micro=st.sampled_from([0, 2, 3]),
    family=st.sampled_from(FAMILIES),
    optimizer=st.sampled_from(["sgd", "adam"]),
    clip=st.sampled_from([0.0, 0.3]),
)
def test_numbers_of_examples_steps_and_widths(counts, width, batch_size, steps, micro, family, optimizer, clip):
    training = LocalTraining(
        batch_size=batch_size,
        steps=steps,
        epochs=2,
        micro_batch_size=micro,
        learning_rate=0.02,
        momentum=0.9,
        weight_decay=1e-3,
        optimizer=optimizer,
        clip_norm=clip,
    )
    assert_alike(lambda: fits_of(counts, width, training, family))


@pytest.mark.parametrize("micro", [0, 3])
def test_dropout_draws_what_each_device_draws_alone(micro):
    training = LocalTraining(batch_size=7, epochs=2, micro_batch_size=micro, learning_rate=0.02)
    assert_alike(lambda: fits_of([9, 23, 14], 0.25, training, DROPPING))


@pytest.mark.parametrize("counts", [[9, 23, 14], [7, 7, 7, 7, 7, 7, 7]])
def test_dropout_right_after_a_convolution(counts):
    training = LocalTraining(batch_size=7, epochs=2, learning_rate=0.02)

    def make():
        fits = fits_of(counts, 0.125, training, FAMILIES[1])
        for fit in fits:
            block = fit.model.get_submodule("block2")
            block.conv.bias = None  # else the sum with it puts the rows in front
            block.conv = nn.Sequential(block.conv, nn.Dropout(0.5))
        return fits

    assert_alike(make)


def recurrent(kind, **options):
    arguments = {"kind": kind, **options}
    name, levels = "own_traced:Recurrent", [{"hidden": 4}, {"hidden": 8}]
    return make_family({"name": name, "input_shape": [1, 8, 8], "arguments": arguments, "levels": levels})


@pytest.mark.parametrize(
    ("kind", "options"), [("GRU", {}), ("RNN", {}), ("RNN", {"nonlinearity": "relu", "bias": False})]
)
def test_recurrent_layers(kind, options):
    training = LocalTraining(batch_size=7, epochs=2, learning_rate=0.02, momentum=0.9)
    assert_alike(lambda: fits_of([9, 23, 14], 0.5, training, recurrent(kind, **options)))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [("GRU", {"dropout": 0.5}, "a recurrent layer with dropout"), ("LSTM", {}, "an LSTM is one operator")],
)
def test_recurrent_layers_that_are_no_stack(kind, options, words):
    training = LocalTraining(batch_size=7, epochs=1, learning_rate=0.02)
    fits = fits_of([9, 7], 0.5, training, recurrent(kind, **options))
    with pytest.raises(stack.InTurn, match=words):
        stack.fit_stacked(fits, [torch.Generator().get_state()] * 2)


@pytest.mark.parametrize("strength", [0.0, 0.7])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_regularizers(strength, correction, given):
    training = LocalTraining(batch_size=7, epochs=2, learning_rate=0.02, momentum=0.5)

    def regularizers(model, generator):
        drawn = {name: torch.rand(p.shape, generator=generator, dtype=DOUBLE) for name, p in model.named_parameters()}
        return Regularizer(strength, drawn if given else None, drawn if correction else {}, reported=strength > 0)

    assert_alike(lambda: fits_of([9, 23, 14], 0.125, training, FAMILIES[0], regularizers))


@pytest.mark.parametrize("alike", [False, True])
def test_factors_of_gradients(alike):
    training = LocalTraining(batch_size=7, epochs=2, learning_rate=0.02, momentum=0.5, clip_norm=0.3)

    def masks(model, generator):
        name, weight = next(iter(model.named_parameters()))
        mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1) if alike else generator) > 0.5
        return {name: mask}

    def make():
        return fits_of([9, 23, 14], 0.125, training, FAMILIES[0], factors=masks)

    assert_alike(make)
    fit = make()[0]
    name, weight = next(iter(fit.model.named_parameters()))
    before = weight.detach().clone()
    fit_here(fit)
    assert torch.equal(weight != before, fit.factors[name])


def test_factors_leave_the_gradients_of_regularizers_as_they_are():
    training = LocalTraining(batch_size=9, learning_rate=0.02)

    def zeros(model, generator):
        return {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def pulls(model, generator):
        drawn = {name: torch.rand(p.shape, generator=generator, dtype=DOUBLE) for name, p in model.named_parameters()}
        return Regularizer(0.0, None, drawn)

    def make():
        return fits_of([9, 8], 0.125, training, FAMILIES[0], pulls, factors=zeros)

    assert_alike(make)
    fit = make()[0]
    before = {name: p.detach().clone() for name, p in fit.model.named_parameters()}
    fit_here(fit)
    for name, moved in fit.model.named_parameters():
        torch.testing.assert_close(moved.detach() - before[name], 0.02 * fit.regularizer.correction[name])


def test_factors_of_different_parameters_are_no_stack():
    fits = fits_of([9, 8], 0.125, LocalTraining(batch_size=9), FAMILIES[0])
    fits[1] = replace(fits[1], factors={name: torch.ones(p.shape) for name, p in fits[1].model.named_parameters()})
    with pytest.raises(stack.InTurn, match="factors of gradients for different parameters"):
        stack.fit_stacked(fits, [torch.get_rng_state()] * 2)


def test_parts_of_the_model_with_rates_of_their_own():
    training = LocalTraining(batch_size=7, learning_rate=0.02, learning_rates={"block1": 0.0, "block2": 3.0})
    assert_alike(lambda: fits_of([9, 23], 0.125, training, FAMILIES[0]))


# Messages


def trained(updates, arrays):
    """What each device returned: its weights by device, and its loss."""
    return {u.device: (arrays[u.payloads["weights"]], u.loss) for u in updates if u.outcome == "trained"}


def replies(number, *orders, local=Apart(), **changes):
    content = batch(*orders, side_by_side=number, each_by_itself=True, **changes)
    reply, arrays = answers(content)
    assert [u.device for u in sorted(reply.updates, key=lambda u: u.order)] == [order.device for order in orders]
    return reply.updates, arrays


def values(data):
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


@pytest.fixture
def stacked(monkeypatch):
    """How many trainings were done at once, each time."""
    seen = []
    real = stack.fit_stacked
    monkeypatch.setattr(side_by_side, "fit_stacked", lambda fits, drawn: (seen.append(len(fits)), real(fits, drawn))[1])
    monkeypatch.setattr(flower_log, "_told", set())
    return seen


def test_a_message_comes_to_the_same(stacked):
    orders = [work_order(device) for device in range(4)]
    wanted = trained(*replies(1, *orders))
    assert not stacked
    found = trained(*replies(3, *orders))
    assert stacked == [2, 2]
    assert found.keys() == wanted.keys() == {0, 1, 2, 3}
    for device, (weights, loss) in wanted.items():
        assert loss == pytest.approx(found[device][1], rel=1e-4)
        torch.testing.assert_close(values(found[device][0]), values(weights), rtol=1e-3, atol=1e-5)
    assert trained(*replies(3, *orders)) == found  # the same bits each time


def test_a_device_that_cannot_train_is_told_alone(stacked):
    """An order that is malformed, and data that cannot be had: the others' bits are those without these devices."""
    orders = [work_order(device) for device in range(4)]
    wanted = trained(*replies(4, orders[0], orders[2]))
    orders[1] = work_order(1, digest="0" * 16)
    orders[3] = work_order(99, order=3)
    updates, arrays = replies(4, *orders)
    assert trained(updates, arrays) == wanted
    outcomes = {u.device: u.outcome for u in updates}
    assert outcomes[1].startswith("refused: device 1: server and device disagree")
    assert outcomes[99].startswith("failed: IndexError: device 99")


def test_examples_that_cannot_be_read_concern_their_device_alone(stacked, monkeypatch):
    orders = [work_order(device) for device in range(3)]
    wanted = trained(*replies(3, orders[0], orders[2]))
    real = training_message.DeviceContext._examples_of

    def broken(self, picked):
        if self.order.device == 1:
            raise OSError("the card is gone")
        return real(self, picked)

    monkeypatch.setattr(training_message.DeviceContext, "_examples_of", broken)
    updates, arrays = replies(3, *orders)
    assert trained(updates, arrays) == wanted
    assert [u.outcome for u in updates if u.device == 1] == ["failed: OSError: the card is gone"]


def test_a_device_that_diverges_leaves_the_others_bits(stacked, monkeypatch):
    orders = [work_order(device) for device in range(3)]
    wanted = trained(*replies(3, *orders))
    real = training_message.DeviceContext._examples_of

    def huge(self, picked):
        inputs, labels = real(self, picked)
        return (inputs * float("inf") if self.order.device == 1 else inputs), labels

    monkeypatch.setattr(training_message.DeviceContext, "_examples_of", huge)
    updates, arrays = replies(3, *orders)
    assert trained(updates, arrays) == {device: wanted[device] for device in (0, 2)}
    assert "not finite" in next(u.outcome for u in updates if u.device == 1)


class ByClosure(Apart):
    """A loss that is any function, which might keep something from one batch to the next."""

    def loss(self, context, model):
        return lambda inputs, labels: context.task.loss(model(inputs), labels)


def test_a_client_step_that_cannot_trains_in_turn_and_that_is_told_once(stacked, caplog):
    orders = [work_order(device, local=ByClosure()) for device in range(3)]
    wanted = trained(*replies(1, *orders))
    assert trained(*replies(3, *orders)) == wanted  # to the bit
    assert trained(*replies(3, *orders)) == wanted
    told = [record.getMessage() for record in caplog.records if "in turn" in record.getMessage()]
    assert told == [
        "tests.client_app.test_side_by_side:ByClosure is trained in turn: its loss is no PureLoss "
        "(wildflower.strategies.shared_losses)"
    ]


def test_where_memory_does_not_suffice_halves_train_at_once(stacked, monkeypatch):
    orders = [work_order(device) for device in range(4)]
    wanted = trained(*replies(2, *orders))
    real = side_by_side.fit_stacked
    before = []

    def at_most_two(fits, drawn):
        assert all(tensor() is None for tensor in before)  # what the attempt before held is free
        held = torch.zeros(1)
        before.append(weakref.ref(held))
        if len(fits) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return real(fits, drawn)

    monkeypatch.setattr(side_by_side, "fit_stacked", at_most_two)
    stacked.clear()
    found = trained(*replies(4, *orders))
    assert stacked == [2, 2]
    assert found.keys() == wanted.keys()


class Ending(Apart):
    """A client step that ends its process."""

    def train(self, context):
        raise SystemExit(7)


def test_a_client_step_that_ends_the_process_ends_it():
    with pytest.raises(SystemExit):
        replies(2, *[work_order(device, local=Ending()) for device in range(2)])


def test_auto_takes_turns_on_a_processor_and_fastest_takes_what_was_faster(stacked, monkeypatch):
    orders = [work_order(device) for device in range(4)]
    wanted = trained(*replies(1, *orders))
    assert trained(*replies("auto", *orders)) == wanted
    assert not stacked
    monkeypatch.setattr(side_by_side, "_paces", {})
    seconds = iter([3.0, 4.0])  # a training in turn, then two at once
    monkeypatch.setattr(side_by_side, "_seconds", lambda do: (do(), next(seconds))[1])
    replies("fastest", *orders)
    assert stacked == [2]
    replies("fastest", *orders)
    assert stacked == [2, 4]
    side_by_side._paces.clear()
    slower = iter([1.0, 4.0, 1.0, 4.0])
    monkeypatch.setattr(side_by_side, "_seconds", lambda do: (do(), next(slower))[1])
    for _ in range(3):
        replies("fastest", *orders)
    assert stacked == [2, 4, 2, 2]  # measured twice, and then in turn


def test_fastest_trains_as_many_at_once_as_the_free_memory_holds(stacked, monkeypatch):
    class Machine:
        memory_available_bytes = 2 * (50 + 2 * 100)

    monkeypatch.setattr(side_by_side, "probe_machine", Machine)
    monkeypatch.setattr(side_by_side, "_do_faster", lambda waiting, name, pace: side_by_side._do(waiting, name))
    monkeypatch.setattr(alike, "price_at_once", lambda *_: (100, 50))
    replies("fastest", *[work_order(device) for device in range(4)])
    assert stacked == [2, 2]


EXITS = LeNet5(input_shape=(1, 8, 8), exits=(1, 2))


@pytest.mark.parametrize(
    "local",
    [
        MaskedTraining(weighting="uniform"),
        ProximalTraining(mu=0.3),
        MutualLearningOfExits(weight=0.5, alpha=0.1, ensemble=True),
        WeightedExits(gamma=0.05, temperature=3.0),
        NormalizedTraining(),
    ],
    ids=lambda local: type(local).__name__,
)
def test_client_steps_of_methods(stacked, local, tmp_path):
    orders = [work_order(device, EXITS, 1.0, local) for device in range(3)]
    how = {"family": EXITS, "each_by_itself": True, "state_dir": str(tmp_path)}
    sent = [packed(EXITS, EXITS.full())]
    wanted, found = (answers(batch(*orders, side_by_side=n, **how), sent) for n in (1, 3))
    assert stacked == [3]
    for one, other in zip(wanted[0].updates, found[0].updates, strict=True):
        assert (one.outcome, one.examples, other.at_once) == ("trained", other.examples, 3)
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        for name in one.payloads:
            torch.testing.assert_close(
                values(found[1][other.payloads[name]]), values(wanted[1][one.payloads[name]]), rtol=1e-3, atol=1e-5
            )
        assert {k: pytest.approx(v) for k, v in one.facts.items()} == other.facts


# Scores


def scores(number, devices=(0, 1, 2, 3), local=Training(), family=EXITS, data="shard", training=None):
    """What devices' models score, each of weights of its own."""
    task, architecture = SHARED.to_json(), family.full()
    sent, returned = local.sent(family, architecture), local.returned(family, architecture)
    arrays, orders = [], []
    for place, device in enumerate(devices):
        arrays.append(pack(initial_weights(family, device), TensorSet.of(family.tensors(architecture)).layout))
        order = {"device": device, "payloads": {"weights": place}, "data": data, "predicted_memory_bytes": 10**6}
        order |= {"architecture": architecture.to_json(), "client_step": local.reference(), "seed": device}
        orders.append(EvaluationOrder(digest=digest(sent, returned), **order))
    asked = {"run": "a run", "round": 1, "task": task, "family": family.spec(), "batch_size": 10}
    content = EvaluationBatch(**asked, training=training, shared_process=True, side_by_side=number, orders=orders)
    reply, _ = work.do("evaluate", content.model_dump_json(), arrays, {})
    return parse(EvaluationReply, reply).scores


@pytest.fixture
def scored_at_once(monkeypatch):
    """How many models were scored at once, each time."""
    seen = []
    real = stack.score_stacked
    monkeypatch.setattr(side_by_side, "score_stacked", lambda asked: (seen.append(len(asked)), real(asked))[1])
    monkeypatch.setattr(flower_log, "_told", set())
    return seen


STATIC = Cnn3(input_shape=(1, 8, 8), norm="static", scaler=True)


@pytest.mark.parametrize("data", ["shard", "test set"])
@pytest.mark.parametrize(
    ("local", "family"),
    [
        (Training(), EXITS),
        (MutualLearningOfExits(weight=0.5, alpha=0.1, ensemble=True), EXITS),
        (MaskedTraining(weighting="uniform"), STATIC),
        (Training(), FAMILIES[1]),
    ],
    ids=["plain", "mean of exits", "masked, with new statistics", "batch norm"],
)
def test_models_are_scored_at_once_as_in_turn(scored_at_once, stacked, caplog, local, family, data):
    how = LocalTraining(batch_size=10, steps=2, learning_rate=0.05) if data == "shard" else None
    wanted = scores(1, local=local, family=family, data=data, training=how)
    assert not scored_at_once
    found = scores(4, local=local, family=family, data=data, training=how)
    assert scored_at_once == [4]
    assert stacked == ([4] if how else [])
    assert not [record for record in caplog.records if "in turn" in record.getMessage()]
    assert (len({each.examples for each in wanted}) > 1) == (data == "shard")
    for one, other in zip(wanted, found, strict=True):
        assert (one.device, one.examples, one.error) == (other.device, other.examples, None)
        assert one.sums == other.sums
        assert other.loss_sum == pytest.approx(one.loss_sum, rel=1e-4)


def test_a_model_that_cannot_be_scored_leaves_the_others_scores(scored_at_once, monkeypatch):
    wanted = scores(3, (0, 2))
    found = scores(3, (0, 99, 2))
    assert [found[0], found[2]] == wanted
    assert found[1].error.startswith("IndexError: device 99")
    real = Scoring.batch
    broken = load_task(SHARED).own_test(1)[0]

    def unreadable(scoring, start):
        if scoring.inputs.shape == broken.shape:
            raise OSError("the card is gone")
        return real(scoring, start)

    monkeypatch.setattr(Scoring, "batch", unreadable)
    found = scores(3, (0, 1, 2))
    assert [found[0], found[2]] == wanted
    assert found[1].error == "OSError: the card is gone"
