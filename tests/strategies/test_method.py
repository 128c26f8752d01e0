"""What all client steps share: the plain loss, and how a work order names one with its settings."""

import math
import re

import pytest
import torch
from pydantic import ValidationError

from tests.strategies.by_hand import Logits, loss_of
from wildflower.messages.error import MessageError
from wildflower.messages.orders import StepReference
from wildflower.models.architecture import Architecture
from wildflower.models.lenet import LeNet5
from wildflower.strategies.depthfl import MutualLearningOfExits
from wildflower.strategies.fedprox import ProximalTraining
from wildflower.strategies.fjord import OrderedDropout
from wildflower.strategies.hypemefed.hypemefed import SumOfExits
from wildflower.strategies.local import TrainingAlone
from wildflower.strategies.method import ClientStep, Training, client_step_of
from wildflower.strategies.recipfl.device import TaughtTraining
from wildflower.strategies.scalefl import WeightedExits
from wildflower.strategies.static_norm import MaskedTraining
from wildflower.strategies.statistics import TakeStatistics
from wildflower.strategies.training_steps import ClassCounts

HALVES = [
    Training(),
    Training(weighting="uniform"),
    MaskedTraining(weighting="uniform"),
    ProximalTraining(mu=0.5),
    OrderedDropout(lower=(Architecture((2,)), Architecture((1,))), distillation=True),
    MutualLearningOfExits(weight=0.5, alpha=0.1, ensemble=True),
    WeightedExits(gamma=0.0, temperature=3.0),
    SumOfExits(),
    TaughtTraining(taught=True),
    TrainingAlone(),
    TakeStatistics(),
    ClassCounts(),
]


def test_cross_entropy_is_the_mean_over_the_batch():
    # softmax(ln 2, 0, 0) = (1/2, 1/4, 1/4): the losses of labels 0 and 1 are ln 2 and ln 4.
    loss = loss_of(Training(), Logits(math.log(2), 0.0, 0.0))
    value = loss(torch.zeros(2, 1), torch.tensor([0, 1])).detach()
    assert float(value) == pytest.approx((math.log(2) + math.log(4)) / 2)


def test_the_loss_is_the_tasks():
    """A task may have another one than cross-entropy."""
    model = Logits(1.0, 2.0, 3.0)

    class Task:
        def loss(self, outputs, labels):
            return (outputs.sum(dim=1) - labels).square().mean()

    loss = loss_of(Training(), model, task=Task())
    assert float(loss(torch.zeros(2, 1), torch.tensor([5, 4])).detach()) == pytest.approx((1 + 4) / 2)


# How a client step travels


@pytest.mark.parametrize("local", HALVES, ids=repr)
def test_a_device_half_comes_back_with_its_settings(local):
    sent = StepReference.model_validate_json(local.reference().model_dump_json())
    back = client_step_of(sent)
    assert type(back) is type(local)
    assert back == local
    assert hash(back) == hash(local)  # tensor sets and prices are kept by it
    assert client_step_of(sent) is back  # every order of a round names the same


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Training",
        "wildflower.strategies.method",
        "wildflower.strategies.method:",
        ":Training",
        ".method:Training",
        "../strategies/method:Training",
        "strategies/method:Training",
        "wildflower.strategies.method:Training.sent",
        "wildflower.strategies.method:Training:sent",
        "wildflower.strategies.method:Training()",
        "wildflower.strategies.method:Training\n",
        " wildflower.strategies.method:Training",
        "strategies.m\u00e9thode:Training",
        "os.system('true'):Training",
        "1strategies:Training",
        "wildflower.strategies.method:" + 101 * "T",
    ],
    ids=repr,
)
def test_a_name_that_is_no_reference_is_refused(name):
    words = f"{name!r} must be like 'package.module:Name'"
    with pytest.raises(MessageError, match=re.escape(words)):
        client_step_of(StepReference(name=name))


def test_a_name_is_bounded_before_anything_reads_it():
    with pytest.raises(ValidationError, match="at most 300 characters"):
        StepReference(name="wildflower.strategies.method:" + 300 * "T")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_package:Training", "there is no module 'no_such_package'"),
        ("strategies.no_such:Training", "there is no module 'strategies.no_such'"),
        ("strategies..method:Training", "there is no module 'strategies."),
        ("strategies.:Training", "there is no module 'strategies.'"),
        ("wildflower.strategies.method.Training:sent", "there is no module 'wildflower.strategies.method.Training'"),
        ("wildflower.strategies.method:NoSuch", "wildflower.strategies.method has no NoSuch"),
    ],
)
def test_what_this_device_has_not_is_said(name, why):
    with pytest.raises(MessageError, match=re.escape(f"this device cannot train as it is asked to: {why}")) as error:
        client_step_of(StepReference(name=name))
    assert str(error.value).endswith("Is its app the server's?")


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "os:path",
        "json:loads",
        "builtins:dict",
        "wildflower.strategies.method:Method",
        "wildflower.strategies.method:LEADING",
        "wildflower.strategies.fedprox:FedProx",
        "wildflower.strategies.fedprox:FedProxParams",
        "wildflower.messages.orders:LocalTraining",
        "wildflower.strategies.method:ClientStep",
    ],
)
def test_what_is_no_device_half_is_refused_and_not_called(name):
    words = (
        "this device cannot train as it is asked to: "
        + re.escape(name)
        + " (is .*: the client step of a method is|lacks train)"
    )
    with pytest.raises(MessageError, match=words):
        client_step_of(StepReference(name=name, settings={"command": "true"}))


FINITE = "Input should be a finite number"


@pytest.mark.parametrize(
    ("local", "change", "words"),
    [
        (ProximalTraining, {"mu": math.inf}, f"mu: {FINITE}"),
        (ProximalTraining, {"mu": math.nan}, f"mu: {FINITE}"),
        (ProximalTraining, {"mu": -0.5}, "mu: Input should be greater than or equal to 0"),
        (ProximalTraining, {"mu": "0.5"}, "mu: Input should be a valid number"),
        (ProximalTraining, {"mu": None}, "mu: Input should be a valid number"),
        (ProximalTraining, {"mu": KeyError}, "mu: Field required"),
        (ProximalTraining, {"nu": 0.5}, "nu: Extra inputs are not permitted"),
        (ProximalTraining, {"weighting": "loss"}, "weighting: Input should be 'examples' or 'uniform'"),
        (Training, {"mu": 0.5}, "mu: Extra inputs are not permitted"),
        (TrainingAlone, {"weighting": 1}, "weighting: Input should be 'examples' or 'uniform'"),
        (ClassCounts, {"weighting": "examples"}, "weighting: Extra inputs are not permitted"),
        (TakeStatistics, {"once": True}, "once: Extra inputs are not permitted"),
        (OrderedDropout, {"lower": [[0.5]]}, "lower.0: "),
        (OrderedDropout, {"widths": [0.5, 1.0]}, "widths: Extra inputs are not permitted"),
        (OrderedDropout, {"distillation": 1}, "distillation: Input should be a valid boolean"),
        (OrderedDropout, {"distillation": KeyError}, "distillation: Field required"),
        (MutualLearningOfExits, {"weight": -0.5}, "weight: Input should be greater than or equal to 0"),
        (MutualLearningOfExits, {"weight": "1"}, "weight: Input should be a valid number"),
        (MutualLearningOfExits, {"weight": math.inf}, f"weight: {FINITE}"),
        (MutualLearningOfExits, {"alpha": math.nan}, f"alpha: {FINITE}"),
        (MutualLearningOfExits, {"alpha": -1.0}, "alpha: Input should be greater than or equal to 0"),
        (MutualLearningOfExits, {"ensemble": "yes"}, "ensemble: Input should be a valid boolean"),
        (MutualLearningOfExits, {"gamma": 1.0}, "gamma: Extra inputs are not permitted"),
        (WeightedExits, {"gamma": -1.0}, "gamma: Input should be greater than or equal to 0"),
        (WeightedExits, {"gamma": math.nan}, f"gamma: {FINITE}"),
        (WeightedExits, {"temperature": 0.0}, "temperature: Input should be greater than 0"),
        (WeightedExits, {"temperature": math.inf}, f"temperature: {FINITE}"),
        (WeightedExits, {"weight": 1.0}, "weight: Extra inputs are not permitted"),
        (SumOfExits, {"alpha": 1.0}, "alpha: Extra inputs are not permitted"),
        (TaughtTraining, {"taught": None}, "taught: Input should be a valid boolean"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:40],
)
def test_a_setting_out_of_its_bounds_is_refused_by_its_name(local, change, words):
    reference = next(half for half in HALVES if type(half) is local).reference()
    settings = reference.settings | change
    settings = {key: value for key, value in settings.items() if value is not KeyError}
    # As it comes out of a message: JSON of the device's own reading.
    sent = StepReference.model_construct(name=reference.name, settings=settings)
    with pytest.raises(MessageError, match=re.escape(f"{reference.name}: setting {words}")):
        client_step_of(sent)


# What travels


@pytest.mark.parametrize("local", HALVES, ids=repr)
def test_tensor_sets_follow_from_the_settings_and_the_architecture_alone(local):
    """Server and device derive them, each by itself."""
    family = LeNet5(input_shape=(1, 8, 8))
    back = client_step_of(local.reference())
    for architecture in (family.full(), family.width(0.5)):
        assert back.sent(family, architecture) == local.sent(family, architecture)
        assert back.returned(family, architecture) == local.returned(family, architecture)
        assert back.facts(family) == local.facts(family)


def test_only_what_trains_costs_training_memory():
    assert [type(local) for local in HALVES if not local.trains] == [TakeStatistics, ClassCounts]


def test_a_device_half_is_constant():
    with pytest.raises(ValidationError, match="frozen"):
        ProximalTraining(mu=0.5).mu = 1.0
    with pytest.raises(TypeError, match="abstract"):
        ClientStep()
