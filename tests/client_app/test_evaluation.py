"""Scoring: under the memory of the order, as training is, and of what the client step says."""

import gc
import resource

import pytest
import torch

from tests.client_app.work_orders import CPU, LENET, SPEC, digits, do, packed, work_order
from wildflower.client_app.context import Workplace
from wildflower.client_app.evaluation import evaluation_context, score_order
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.limits import Refusal
from wildflower.client_app.memory import LIBRARY_BYTES
from wildflower.messages.error import MessageError
from wildflower.messages.orders import EvaluationBatch, EvaluationOrder, LocalTraining
from wildflower.messages.tensor_sets import digest
from wildflower.models.cnn import Cnn3
from wildflower.models.network import MeanOfExits
from wildflower.strategies.depthfl import MutualLearningOfExits
from wildflower.strategies.local import TrainingAlone
from wildflower.strategies.method import Training
from wildflower.strategies.static_norm import Masked, MaskedTraining
from wildflower.strategies.training_steps import ClassCounts
from wildflower.tasks import scoring
from wildflower.tasks.task import load_task

HALF = LENET.width(0.5)
LIMIT_BYTES = 16 * 2**20


def scored(
    training=None,
    available_bytes=10**12,
    memory_bytes=LIMIT_BYTES,
    task=SPEC,
    local=Training(),
    family=LENET,
    architecture=HALF,
    state=None,
    round_number=1,
    **of_order,
):
    sent, returned = local.sent(family, architecture), local.returned(family, architecture)
    order = EvaluationOrder(
        device=0,
        architecture=architecture.to_json(),
        payloads={name: index for index, name in enumerate(sent)},
        digest=digest(sent, returned),
        client_step=local.reference(),
        memory_bytes=memory_bytes,
        **{"data": "test set"} | of_order,
    )
    batch = EvaluationBatch(
        run="a run",
        round=round_number,
        task=task.to_json(),
        family=family.spec(),
        batch_size=10,
        training=training,
        shared_process=available_bytes is None,
        orders=[order],
    )
    arrays = [packed(family, architecture)] if sent else []
    state = state or DeviceState("/nowhere", "no run", 0)
    whole, place = load_task(task), Workplace(CPU, available_bytes)
    return score_order(evaluation_context(order, batch, family, whole, arrays, state, place), batch, whole)


@pytest.fixture
def greedy(monkeypatch):
    """Scoring takes far more than the limit allows or than malloc has over, not a page of which is written."""
    beyond_bytes = LIMIT_BYTES + LIBRARY_BYTES + 4 * 2**30
    honest = scoring.score

    def score(*arguments, **more):
        torch.empty(beyond_bytes, dtype=torch.uint8)
        return honest(*arguments, **more)

    monkeypatch.setattr(scoring, "score", score)


@pytest.mark.parametrize(
    ("memory_bytes", "available_bytes", "words"),
    [(LIMIT_BYTES, 10**12, f"the budget is {LIMIT_BYTES} bytes"), (0, LIMIT_BYTES, f"has free {LIMIT_BYTES} bytes")],
)
def test_scoring_that_outgrows_its_memory_is_refused(memory_bytes, available_bytes, words, greedy):
    with pytest.raises(Refusal, match=rf"out of memory after \d+ bytes, .*{words}"):
        scored(memory_bytes=memory_bytes, available_bytes=available_bytes)


def test_in_a_simulation_nobody_can_tell_what_one_device_holds(greedy):
    assert scored(available_bytes=None).examples == len(digits().test)


class Constant(torch.nn.Module):
    """Is sure of a class, and less so of another."""

    def forward(self, inputs):
        return torch.tensor([0.0, 2.0, 1.0, -1.0]).expand(len(inputs), 4)


def test_masked_logits_of_absent_classes_are_zero():
    """The most likely class is absent, and so is the least likely: what is left is class 2, then both zeros."""
    model = Masked(Constant(), torch.tensor([True, False, True, False]))
    assert model(torch.zeros(2, 3)).tolist() == [[0.0, 0.0, 1.0, 0.0]] * 2


class DrawnThere(Training):
    """Devices that have not trained yet draw their models, which never travel."""

    def sent(self, family, architecture):
        return {}

    def model(self, context):
        return context.build()


@pytest.mark.parametrize("data", ["test set", "shard"])
def test_what_an_untrained_device_draws_depends_on_the_order_alone(data):
    found = []
    for before, seed in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(before)
        found.append(scored(local=DrawnThere(), data=data, seed=seed).loss_sum)
    assert found[0] == found[1] != found[2]


EXITS = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
TOGETHER = MutualLearningOfExits(weight=1.0, alpha=0.0, ensemble=True)


@pytest.mark.parametrize(
    ("data", "local", "kind"),
    [
        ("shard", MaskedTraining(), Masked),
        ("shard", Training(), None),
        ("test set", MaskedTraining(), None),
        ("shard", TOGETHER, MeanOfExits),
        ("shard", TOGETHER.model_copy(update={"ensemble": False}), None),
    ],
    ids=["masked", "plain", "masked on the test set", "mean of exits", "deepest exit"],
)
def test_a_device_is_scored_on_its_own_data_as_its_half_says(data, local, kind, monkeypatch):
    seen = []
    honest = scoring.score

    def score(model, *arguments, **more):
        seen.append(type(model))
        return honest(model, *arguments, **more)

    monkeypatch.setattr(scoring, "score", score)
    scored(
        data=data,
        local=local,
        task=SPEC.model_copy(update={"test_fraction": 0.5}),
        family=EXITS,
        architecture=EXITS.up_to(2),
    )
    assert seen == [kind or type(EXITS.build(EXITS.full()))]


def test_scoring_holds_no_gradients_of_the_training_before_it(monkeypatch):
    seen = []
    honest = scoring.score

    def score(model, *arguments, **more):
        seen.extend(p.grad for p in model.parameters())
        return honest(model, *arguments, **more)

    monkeypatch.setattr(scoring, "score", score)
    assert scored(LocalTraining(batch_size=10), memory_bytes=10**9).error is None
    assert seen
    assert all(gradient is None for gradient in seen)


def test_the_model_that_a_device_keeps_is_scored_without_training_or_after_it(tmp_path):
    """The model of the round that is evaluated: one of a later round does not count, and nothing is kept."""
    state = DeviceState(str(tmp_path), "a run", 0)
    with pytest.raises(MessageError, match=r"this device keeps no model of Architecture\("):
        scored(local=TrainingAlone(), state=state)
    for number in (1, 2):
        do(work_order(local=TrainingAlone()), state=state, round_number=number)
    before = {path.name: path.read_bytes() for path in state.folder.iterdir()}
    first, second = (scored(local=TrainingAlone(), state=state, round_number=n).loss_sum for n in (1, 2))
    assert first != second
    trained = scored(LocalTraining(batch_size=10), local=TrainingAlone(), state=state, memory_bytes=10**9)
    assert trained.loss_sum not in (first, second)
    assert {path.name: path.read_bytes() for path in state.folder.iterdir()} == before


def test_work_that_trains_no_model_cannot_be_scored():
    with pytest.raises(
        MessageError, match=r"wildflower\.strategies\.training_steps:ClassCounts trained no model that could be"
    ):
        scored(LocalTraining(batch_size=10), local=ClassCounts(), memory_bytes=10**9)


class Looks(Training):
    """The model as it is scored, after a look at the device's examples."""

    def model(self, context):
        model = super().model(context)
        for _ in context.one_pass(model):
            pass
        return model


def test_a_limit_that_a_device_half_has_taken_batches_under_is_gone_after_the_scoring():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert scored(local=Looks()).examples == len(digits().test)
    gc.collect()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
