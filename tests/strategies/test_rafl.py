"""RaFL's equations by hand, what travels and when, and which personal model a device gets."""

import json
import random
import shutil
from dataclasses import replace
from math import log
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.client_app.work_orders import context_of, work_order
from tests.models.whole_space import all_of, all_picks
from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.by_hand import Logits
from tests.strategies.halves import FAMILY, came_back, setup
from wildflower.devices.budget import Budget
from wildflower.messages.orders import LocalTraining
from wildflower.messages.tensor_sets import STATISTICS
from wildflower.models.cost import cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import make_family
from wildflower.models.lenet import LeNet5
from wildflower.models.mlp import Mlp
from wildflower.models.weights import with_weights
from wildflower.strategies.ensemble import Ensemble
from wildflower.strategies.method import Order
from wildflower.strategies.pricing import tensor_set_bytes
from wildflower.strategies.rafl import RaFL, RaFLParams, learn_mutually, mutual_losses
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.public import PublicData
from wildflower.tasks.task import TaskSpec, load_task

SHARES = RaFLParams(shares=(0.25, 0.5, 1.0))


def rafl(params=SHARES, **changes):
    made = replace(setup(batch_size=16), shared={"ensemble": Ensemble(steps=1)}, **changes)
    return RaFL(made, params)


def plain(architecture):
    return cost(FAMILY, architecture, batch_size=16, optimizer="sgd")


def budget(memory_bytes, payload_bytes=None):
    return Budget(memory_bytes, payload_bytes, payload_bytes)


# Eqs. 3 to 6


def test_the_losses_of_both_networks_by_hand():
    """p_l = (1/4, 3/4), p_k = (1/2, 1/2), the label is the second class.

    CE(l) = -ln 3/4, CE(k) = ln 2; KL(k || l) = 1/2 ln 2 + 1/2 ln 2/3; KL(l || k) = 1/4 ln 1/2 + 3/4 ln 3/2.
    """
    personal, knowledge = torch.tensor([[0.0, log(3)]]), torch.tensor([[0.0, 0.0]])
    label = torch.tensor([1])
    losses = mutual_losses(personal, knowledge, (F.cross_entropy(personal, label), F.cross_entropy(knowledge, label)))
    assert losses[0].item() == pytest.approx(-log(3 / 4) + log(2) / 2 + log(2 / 3) / 2)
    assert losses[1].item() == pytest.approx(log(2) + log(1 / 2) / 4 + 3 * log(3 / 2) / 4)


def test_divergences_are_means_over_the_batch():
    """Beside the example above one on which both say the same: half of its divergences."""
    personal, knowledge = torch.tensor([[0.0, log(3)], [1.0, 1.0]]), torch.zeros(2, 2)
    zero = torch.zeros(())
    losses = mutual_losses(personal, knowledge, (zero, zero))
    assert losses[0].item() == pytest.approx((log(2) / 2 + log(2 / 3) / 2) / 2)
    assert losses[1].item() == pytest.approx((log(1 / 2) / 4 + 3 * log(3 / 2) / 4) / 2)


class MutualContext:
    """Batches of two examples, by default of the second class and in a single part, and plain SGD with rate 1."""

    def __init__(self, steps, parts=((1, 1),)):
        self.training, self._steps = LocalTraining(steps=steps, learning_rate=1.0), steps
        self._parts = parts
        self.task = SimpleNamespace(loss=F.cross_entropy, label_kind="classes")
        self.device, self.chance = torch.device("cpu"), random.Random(0)

    def steps(self, *models):
        for _ in range(self._steps):
            yield [(torch.zeros(len(part), 1), torch.tensor(part), len(part) / 2) for part in self._parts]

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)


def test_both_networks_predict_before_either_steps_and_hold_each_other_fixed():
    """The gradient in a network's own logits is (p - y) + (p - q), q being what the other says.

    l: (1/4, -1/4) + (-1/4, 1/4) = 0. k: (1/2, -1/2) + (1/4, -1/4) = (3/4, -3/4). Had k moved before l saw it, or did a
    gradient reach the other network, l would have moved.
    """
    personal, knowledge = Logits(0.0, log(3)), Logits(0.0, 0.0)
    loss = learn_mutually(MutualContext(1), personal, knowledge)
    assert personal.values.tolist() == pytest.approx([0.0, log(3)], abs=1e-6)
    assert knowledge.values.tolist() == pytest.approx([-0.75, 0.75], abs=1e-6)
    assert loss == pytest.approx(log(2) + log(1 / 2) / 4 + 3 * log(3 / 2) / 4)


def test_the_second_step_sees_what_the_first_one_changed():
    """After the first step k says q = (1/(1+e^1.5), ...); l then moves by -((p - y) + (p - q)), p = (1/4, 3/4)."""
    personal, knowledge = Logits(0.0, log(3)), Logits(0.0, 0.0)
    learn_mutually(MutualContext(2), personal, knowledge)
    q = 1 / (1 + torch.tensor(1.5).exp().item())
    moved = -(0.25 + 0.25 - q)
    assert personal.values.tolist() == pytest.approx([moved, log(3) - moved], abs=1e-6)


@pytest.mark.parametrize("parts", [((0, 1),), ((0,), (1,))], ids=["whole", "in parts"])
def test_the_gradients_of_a_batch_in_parts_are_those_of_the_batch(parts):
    """An example of each class, so that y is 1/2 in the mean. The gradients are (p - y) + (p - q).

    l: (-1/4, 1/4) + (-1/4, 1/4) = (-1/2, 1/2). k: 0 + (1/4, -1/4). L_k is ln 2 + KL(l || k).
    """
    personal, knowledge = Logits(0.0, log(3)), Logits(0.0, 0.0)
    loss = learn_mutually(MutualContext(1, parts), personal, knowledge)
    assert personal.values.tolist() == pytest.approx([0.5, log(3) - 0.5], abs=1e-6)
    assert knowledge.values.tolist() == pytest.approx([-0.25, 0.25], abs=1e-6)
    assert loss == pytest.approx(log(2) + log(1 / 2) / 4 + 3 * log(3 / 2) / 4)


@pytest.mark.parametrize("most", [1, 3, 4])
def test_mutual_learning_in_parts_is_that_of_whole_batches(most):
    """On a device, over batches of 10, 10, 10 and 6, clipped; without batch norm, which knows what is in a batch."""
    family = Mlp(input_shape=(1, 8, 8))

    def learned(micro_batch_size):
        torch.manual_seed(0)
        networks = [family.build(family.width(width)) for width in (1.0, 0.5)]
        how = {"batch_size": 10, "learning_rate": 0.1, "clip_norm": 0.5}
        loss = learn_mutually(
            context_of(work_order(2), LocalTraining(**how, micro_batch_size=micro_batch_size)), *networks
        )
        return loss, [value for network in networks for value in network.state_dict().values()]

    (whole_loss, whole), (loss, parts) = learned(0), learned(most)
    assert loss == pytest.approx(whole_loss, abs=1e-6)
    assert all(torch.allclose(part, value, atol=1e-6) for part, value in zip(parts, whole, strict=True))


# Eq. 7


def test_knowledge_networks_are_averaged_by_examples():
    """30 examples say 0.6 and 10 say 1.0: 0.7."""
    method = rafl()
    trained = [
        came_back(method, 30, {"weights": 0.6}, device=0, personal=[1.0]),
        came_back(method, 10, {"weights": 1.0}, device=1, personal=[1.0]),
    ]
    method.finish_round(trained)
    assert all(value.unique().tolist() == pytest.approx([0.7], abs=1e-6) for value in method.knowledge.weights.values())


def test_a_round_without_answers_changes_nothing():
    method = rafl()
    before = method.knowledge.weights
    method.finish_round([])
    assert method.knowledge.weights is before


# Networks and what travels


def test_the_knowledge_network_is_cut_out_of_the_supernet():
    method = rafl()
    wanted = FAMILY.place(FAMILY.width(0.25)).gather(method.supernet)
    assert method.scored_architecture == FAMILY.width(0.25)
    assert all((method.knowledge.weights[name] == wanted[name]).all() for name in wanted)


def test_both_networks_begin_with_the_weights_that_the_run_is_given():
    """The first layer's are ones, the others are drawn as without any."""
    given = {"block1.conv.weight": torch.ones(FAMILY.tensors(FAMILY.full())["block1.conv.weight"].shape)}
    drawn, method = rafl(), rafl(initial=given)
    assert method.traits(method.params).takes_initial_weights
    assert (method.supernet["block1.conv.weight"] == 1).all()
    assert (method.knowledge.weights["block1.conv.weight"] == 1).all()
    assert all((method.supernet[name] == value).all() for name, value in drawn.supernet.items() if name not in given)


def test_nothing_is_frozen():
    with pytest.raises(ValueError, match="freeze = 'block1': rafl trains all of both networks"):
        rafl(family=LeNet5(input_shape=(1, 8, 8), freeze=("block1",)))


def test_it_may_be_of_a_family_of_its_own():
    method = rafl(RaFLParams(shares=(0.5, 1.0), knowledge_family="lenet5, conv_channels = [2, 2], hidden = [8]"))
    assert method.knowledge.family.groups == {"conv1": 2, "conv2": 2, "fc1": 8}
    local = method.client_step(Order(0, FAMILY.full()))
    names = [entry.name for entry in local.returned(FAMILY, FAMILY.full())["weights"].layout.entries]
    assert names == list(method.knowledge.weights)


def test_it_may_be_larger_than_personal_models_where_both_fit():
    """Shares of a quarter and a half of LeNet-5 beside a whole one: what that needs is left to neither."""
    method = rafl(RaFLParams(shares=(0.25, 0.5), knowledge_family="lenet5"))
    whole, quarter = (plain(FAMILY.width(share)).peak_training_memory_bytes for share in (1.0, 0.25))
    assert method.assign(0, budget(whole + quarter)) == FAMILY.width(0.25)
    assert method.assign(0, budget(whole + quarter - 1)) is None


def test_its_own_family_need_not_have_a_kind_of_norm():
    arguments = "channels = 2, cells = 3, nodes = 1"
    found = rafl(RaFLParams(shares=(1.0,), knowledge_family=f"darts, {arguments}"))
    assert (found.knowledge.family.name, found.knowledge.family.classes) == ("darts", FAMILY.classes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            (
                {"knowledge_family": f"lenet5, {given}, hidden = [8]"},
                f"{name} cannot be chosen",
            )
            for name, given in {
                "classes": "classes = 3",
                "freeze": "freeze = ['conv1']",
                "input_shape": "input_shape = [3, 9, 9]",
                "name": "name = 'mlp'",
                "norm": "norm = 'static'",
            }.items()
        ),
        ({"shares": (1e-12, 1.0)}, "rafl.shares = "),
        ({"knowledge_family": "resnet99"}, "rafl.knowledge-family = 'resnet99'"),
        ({"knowledge_family": "lenet5, hidden"}, "must be like"),
        ({"fusion": "ensemble"}, "set public.task"),
    ],
)
def test_what_cannot_be_is_said_before_the_first_round(changes, said):
    with pytest.raises(ValueError, match=said):
        rafl(SHARES.model_copy(update=changes))


def test_the_personal_model_travels_once_and_the_knowledge_network_always():
    method = rafl()
    architecture = FAMILY.width(0.5)
    order = Order(0, architecture)
    small, personal = plain(FAMILY.width(0.25)).payload_bytes, plain(architecture).payload_bytes
    assert tensor_set_bytes(method.client_step(order), FAMILY, architecture) == (small + personal, small)
    assert method.order_cost(order).payload_bytes == small + personal
    method.finish_round([replace(came_back(method, 4, {"weights": 1.0}, personal=[1.0]), order=order)])
    assert tensor_set_bytes(method.client_step(order), FAMILY, architecture) == (small, small)
    assert method.order_cost(order).payload_bytes == small
    assert method.cost(architecture).payload_bytes == small + personal  # what a newcomer would need


def test_memory_and_computation_are_those_of_both_networks():
    method = rafl()
    both = method.cost(FAMILY.full())
    parts = [plain(FAMILY.full()), plain(FAMILY.width(0.25))]
    assert both.peak_training_memory_bytes == sum(part.peak_training_memory_bytes for part in parts)
    assert both.training_flops == sum(part.training_flops for part in parts)
    assert both.parameters == parts[0].parameters


# Setting (c): batch norm's statistics after a cut

NORMED = make_family(
    {"name": "resnet18", "input_shape": [1, 8, 8], "classes": 10, "first_channels": 8, "norm": "batch", "scaler": False}
)


def given():
    """A supernet whose statistics are those of nobody: means of 100 and variances of 1000."""
    weights = initial_weights(NORMED, 1)
    other = {"running_mean": 100.0, "running_var": 1000.0}
    return {
        name: torch.full_like(value, other[name.rsplit(".", 1)[-1]]) if name.endswith(STATISTICS) else value
        for name, value in weights.items()
    }


class FirstContact:
    """A device with two batches of four images, which it has no time to train on: `steps` are none by default."""

    def __init__(self, method, architecture, kept=None, steps=0):
        group = SimpleNamespace(placement=NORMED.place(architecture), sent=("weights", "personal"))
        self.received = {name: {n: v.clone() for n, v in w.items()} for name, w in method.payload(group).items()}
        self.family, self.architecture, self.keeps = NORMED, architecture, True
        self.training, self.task = (
            LocalTraining(learning_rate=0.1),
            SimpleNamespace(loss=F.cross_entropy, label_kind="classes"),
        )
        self.device, self.chance = torch.device("cpu"), random.Random(0)
        self.images = torch.randn(2, 4, 1, 8, 8, generator=torch.Generator().manual_seed(5))
        self.passes, self.how_many, self.kept_tensors = 0, steps, kept

    def build(self, weights):
        return with_weights(self.family, self.architecture, weights)

    def kept(self, name):
        return self.kept_tensors

    def keep(self, name, tensors):
        self.kept_tensors = {key: value.clone() for key, value in tensors.items()}

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.training.learning_rate)

    def one_pass(self, *models):
        self.passes += 1
        for images in self.images:
            yield images, torch.tensor([0, 1, 2, 3])

    def steps(self, *models):
        for images in self.images[: self.how_many]:
            yield [(images, torch.tensor([0, 1, 2, 3]), 1.0)]


def first_convolution(weights, images):
    """What the first batch norm sees: each channel's mean and variance, the mean over both batches."""
    [name] = [n for n, v in weights.items() if v.dim() == 4 and v.shape[1] == 1]
    seen = [F.conv2d(batch, weights[name], padding=1) for batch in images]
    means = torch.stack([x.mean(dim=(0, 2, 3)) for x in seen]).mean(dim=0)
    return means, torch.stack([x.var(dim=(0, 2, 3)) for x in seen]).mean(dim=0)


def first_norm(weights):
    prefix = next(name for name in weights if name.endswith("running_mean")).removesuffix("running_mean")
    return weights[f"{prefix}running_mean"], weights[f"{prefix}running_var"]


def test_at_first_contact_networks_cut_from_given_weights_take_statistics_of_their_own():
    method = rafl(RaFLParams(), family=NORMED, initial=given())
    architecture = NORMED.width(0.5)
    half, context = method.client_step(Order(0, architecture)), FirstContact(method, architecture)
    sent = {name: {n: v.clone() for n, v in w.items()} for name, w in context.received.items()}
    answer = half.train(context)
    for before, after in ((sent["personal"], context.kept_tensors), (sent["weights"], answer.tensor_sets["weights"])):
        assert (first_norm(before)[0] == 100).all()
        for found, wanted in zip(first_norm(after), first_convolution(before, context.images), strict=True):
            torch.testing.assert_close(found, wanted)
        # Without a step of training nothing but statistics has changed, and all of those have.
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {name for name in before if name.endswith(STATISTICS)}
    assert {m.momentum for m in answer.model.modules() if hasattr(m, "momentum")} == {0.1}


def test_a_personal_model_that_is_scored_before_it_was_trained_has_its_own_statistics_too():
    method = rafl(RaFLParams(), family=NORMED, initial=given())
    architecture = NORMED.width(0.5)
    context = FirstContact(method, architecture)
    model = method.client_step(Order(0, architecture)).model(context)
    wanted = first_convolution(context.received["personal"], context.images)
    torch.testing.assert_close(first_norm(model.state_dict())[0], wanted[0])
    assert not model.training


def test_what_the_device_keeps_has_its_statistics_already():
    method = rafl(RaFLParams(), family=NORMED, initial=given())
    architecture = NORMED.width(0.5)
    kept = {n: torch.full_like(v, 0.5) for n, v in NORMED.place(architecture).gather(given()).items()}
    context = FirstContact(method, architecture, kept)
    mean, _ = first_norm(method.client_step(Order(0, architecture)).train(context).model.state_dict())
    assert (mean == 0.5).all()
    assert context.passes == 1  # that of the knowledge network


def test_a_device_that_lost_its_personal_model_calibrates_the_knowledge_network_alone():
    method = rafl(RaFLParams(), family=NORMED, initial=given())
    architecture = NORMED.width(0.5)
    half = method.client_step(Order(0, architecture)).model_copy(update={"first": False, "calibrates": False})
    context = FirstContact(method, architecture)
    del context.received["personal"]
    context.fit = lambda model, loss: 0.0
    before = {name: value.clone() for name, value in context.received["weights"].items()}
    answer = half.train(context)
    torch.testing.assert_close(
        first_norm(answer.tensor_sets["weights"])[0], first_convolution(before, context.images)[0]
    )
    assert answer.facts == {"personal": [0.0]}


def test_a_step_begins_with_the_new_statistics():
    """One step moves running means by a tenth toward the first batch's, from the mean over both."""
    method = rafl(RaFLParams(), family=NORMED, initial=given())
    architecture = NORMED.width(0.5)
    context = FirstContact(method, architecture, steps=1)
    sent = {name: value.clone() for name, value in context.received["personal"].items()}
    method.client_step(Order(0, architecture)).train(context)
    both, first = (first_convolution(sent, images)[0] for images in (context.images, context.images[:1]))
    torch.testing.assert_close(first_norm(context.kept_tensors)[0], 0.9 * both + 0.1 * first)


def test_drawn_weights_are_trained_as_they_come():
    method = rafl(RaFLParams(), family=NORMED)
    architecture = NORMED.width(0.5)
    half, context = method.client_step(Order(0, architecture)), FirstContact(method, architecture)
    half.train(context)
    assert (half.calibrates, half.calibrates_knowledge, context.passes) == (False, False, 0)


def test_a_family_without_statistics_has_nothing_to_calibrate():
    family = Mlp(input_shape=(1, 8, 8), hidden=(8, 8))
    half = rafl(family=family, initial=family.initial()).client_step(Order(0, family.full()))
    assert (half.calibrates, half.calibrates_knowledge) == (False, False)


def test_a_knowledge_network_of_a_family_of_its_own_is_drawn():
    params = RaFLParams(knowledge_family="lenet5, conv_channels = [2, 2], hidden = [8]")
    half = rafl(params, family=NORMED, initial=given()).client_step(Order(0, NORMED.full()))
    assert (half.calibrates, half.calibrates_knowledge) == (True, False)


@pytest.mark.thorough
def test_the_knowledge_network_is_calibrated_until_its_statistics_were_averaged():
    method, resumed = (rafl(RaFLParams(), family=NORMED, initial=given()) for _ in range(2))
    order = Order(1, NORMED.full())
    method.finish_round([])  # nobody has answered
    resumed.load(method.state())
    assert resumed.client_step(order).calibrates_knowledge
    tensor_set = method.client_step(order).returned(NORMED, NORMED.full())["weights"]
    method.knowledge.total.add([torch.ones(e.shape).flatten() for e in tensor_set.layout.entries], 4)
    method.finish_round([])
    resumed.load(method.state())
    for one in (method, resumed):
        assert (one.client_step(order).calibrates, one.client_step(order).calibrates_knowledge) == (True, False)


def test_the_pass_at_first_contact_has_its_price():
    """A forward pass over all examples is a third of an epoch, and so of two epochs a sixth."""
    architecture, order = NORMED.width(0.5), Order(0, NORMED.width(0.5))
    for epochs, share in ((1, 3), (2, 6)):
        made = replace(setup(batch_size=16, epochs=epochs), shared={"ensemble": Ensemble(steps=1)}, family=NORMED)
        drawn, method = RaFL(made, RaFLParams()), RaFL(replace(made, initial=given()), RaFLParams())
        flops = [
            cost(NORMED, a, batch_size=16, optimizer="sgd").training_flops for a in (architecture, NORMED.width(0.25))
        ]
        assert drawn.order_cost(order).training_flops == sum(flops)
        assert method.order_cost(order).training_flops == pytest.approx(sum(flops) * (1 + 1 / share), abs=2)
        method.knowledge.cut = False
        assert method.cost(architecture).training_flops == pytest.approx(flops[0] * (1 + 1 / share) + flops[1], abs=2)
        method.kept[0] = [architecture]
        assert method.order_cost(order).training_flops == sum(flops)


def test_a_search_leaves_time_for_the_pass():
    """What the whole network takes with it is enough, a little less is not, and brings the other one of the pool."""
    method = rafl(RaFLParams(searcher="pool"), family=NORMED, initial=given())
    flops = method.cost(NORMED.full()).training_flops
    for taken, found in ((0.999999, NORMED.full()), (1.000001, NORMED.width(0.25))):
        budget = Budget(10**12, round_seconds=1.0, seconds_per_flop=taken / flops)
        assert method.search.find(0, budget, grows=False) == found


# Search


def owner_of(method, device, architecture):
    done = came_back(method, 4, {"weights": 1.0}, device=device, personal=[1.0])
    method.finish_round([replace(done, order=Order(device, architecture))])


def test_a_device_gets_what_fits_beside_the_knowledge_network():
    method = rafl()
    exactly = method.cost(FAMILY.full()).peak_training_memory_bytes
    assert method.assign(0, budget(exactly)) == FAMILY.full()
    found = method.assign(0, budget(exactly - 1))
    assert plain(found).parameters < plain(FAMILY.full()).parameters
    assert method.cost(found).peak_training_memory_bytes < exactly
    assert method.assign(0, budget(method.cost(FAMILY.width(0.25)).peak_training_memory_bytes - 1)) is None


def test_the_first_transfer_fits_the_link():
    method = rafl()
    roomy = method.cost(FAMILY.full())
    found = method.assign(0, budget(roomy.peak_training_memory_bytes, roomy.payload_bytes - 1))
    assert method.cost(found).payload_bytes <= roomy.payload_bytes - 1
    owner_of(method, 0, FAMILY.full())
    link = plain(FAMILY.width(0.25)).payload_bytes  # now only the knowledge network travels
    assert method.assign(0, budget(roomy.peak_training_memory_bytes, link)) == FAMILY.full()


def test_a_slow_uplink_bounds_the_knowledge_network_alone():
    method = rafl()
    roomy, small = method.cost(FAMILY.full()), plain(FAMILY.width(0.25)).payload_bytes
    assert (roomy.download_bytes, roomy.upload_bytes) == (small + plain(FAMILY.full()).payload_bytes, small)
    memory_bytes = roomy.peak_training_memory_bytes
    assert method.assign(0, Budget(memory_bytes, roomy.download_bytes, small)) == FAMILY.full()
    assert method.assign(0, Budget(memory_bytes, roomy.download_bytes, small - 1)) is None
    # 10 s down and 80 s up leave time for it; as if it traveled both ways it would take ten times as long.
    seconds_per_byte = {"seconds_per_byte_down": 10 / roomy.download_bytes, "seconds_per_byte_up": 80 / small}
    in_time = Budget(memory_bytes, round_seconds=91.0, **seconds_per_byte)
    assert method.assign(0, in_time) == FAMILY.full()
    found = method.assign(0, replace(in_time, round_seconds=89.0))
    assert found is not None
    assert method.cost(found).download_bytes < roomy.download_bytes


def test_a_model_that_the_device_draws_is_bounded_by_memory_alone():
    method = rafl(SHARES.model_copy(update={"first": "drawn"}))
    roomy, small = method.cost(FAMILY.full()), plain(FAMILY.width(0.25)).payload_bytes
    assert roomy.payload_bytes == small
    # A link over which the knowledge network takes 90 of 100 seconds, both ways together.
    seconds = {"round_seconds": 100.0, "seconds_per_byte_down": 30 / small, "seconds_per_byte_up": 60 / small}
    slow = Budget(roomy.peak_training_memory_bytes, small, small, **seconds)
    assert method.assign(0, slow) == FAMILY.full()
    assert method.assign(0, replace(slow, download_bytes=small - 1)) is None
    assert method.assign(0, replace(slow, upload_bytes=small - 1)) is None
    with pytest.raises(ValueError, match=r"set rafl\.first = 'sent', or leave initial.weights out"):
        rafl(SHARES.model_copy(update={"first": "drawn"}), initial=FAMILY.initial())


def test_a_device_keeps_its_model_while_it_fits_and_gets_a_smaller_one_where_it_does_not():
    method = rafl()
    owner_of(method, 0, FAMILY.width(0.5))
    plenty, half = (method.cost(a).peak_training_memory_bytes for a in (FAMILY.full(), FAMILY.width(0.5)))
    assert method.assign(0, budget(plenty)) == FAMILY.width(0.5)  # the paper searches once
    smaller = method.assign(0, budget(half - 1))
    assert plain(smaller).parameters < plain(FAMILY.width(0.5)).parameters
    owner_of(method, 0, smaller)
    assert method.assign(0, budget(half - 1)) == smaller
    assert method.assign(0, budget(plenty)) == FAMILY.width(0.5)  # which is still there
    assert not method.client_step(Order(0, FAMILY.width(0.5))).first


def test_a_device_that_is_given_the_smallest_all_the_same_trains_it_at_every_contact():
    method = rafl(below_smallest="smallest")
    smallest = method.below_the_smallest
    assert smallest is not None
    assert method.assign(0, budget(1)) == smallest
    owner_of(method, 0, smallest)
    assert method.assign(0, budget(1)) == smallest
    assert method.personal(0, budget(1))[0] == smallest


# Once-for-all spaces

TINY = {
    "stage_channels": [8, 8, 16, 16, 24, 24],
    "depths": [1, 2],
    "expand_ratios": [3, 6],
    "kernel_sizes": [3, 5],
}
ELASTIC = make_family({"name": "mobilenet-v3", "input_shape": [1, 8, 8], "norm": "batch"} | TINY | {"depths": [1]})
ONCE = ElasticSpace.of(ELASTIC)
ONCE_FOR_ALL = RaFLParams(space="once-for-all")
EVOLVED = RaFLParams(space="once-for-all", searcher="evolution")


def test_once_for_all_personal_models_are_the_supernets_sub_networks():
    """The largest number of parameters among all of them under the memory that the knowledge network leaves."""
    method = rafl(ONCE_FOR_ALL, family=ELASTIC)
    assert method.knowledge.architecture == ONCE.smallest()
    prices = {a: cost(ELASTIC, a, batch_size=16, optimizer="sgd") for a in all_of(ONCE)}
    beside = prices[ONCE.smallest()].peak_training_memory_bytes
    memory = sorted({price.peak_training_memory_bytes for price in prices.values()})
    for limit in (memory[0], memory[len(memory) // 2], memory[-1]):
        found = method.assign(0, budget(limit + beside))
        fitting = [p.parameters for p in prices.values() if p.peak_training_memory_bytes <= limit]
        assert found in prices
        assert prices[found].peak_training_memory_bytes <= limit
        assert 0.98 * max(fitting) <= prices[found].parameters <= max(fitting)
    assert method.assign(0, budget(memory[0] + beside - 1)) is None


@pytest.mark.thorough
def test_what_travels_as_int8_fits_the_link_and_little_of_it_is_given_away():
    """The smallest network of this space does not have the most scales for its weights, as those of others do."""
    method = rafl(ONCE_FOR_ALL, family=ELASTIC)
    method.networks.settings = replace(method.networks.settings, wire="int8")
    prices = {a: method.cost(a) for a in all_of(ONCE)}
    sizes = sorted(price.download_bytes for price in prices.values())
    memory_bytes = max(price.peak_training_memory_bytes for price in prices.values())
    for limit_bytes in sizes[:: len(sizes) // 60]:
        found = method.assign(0, budget(memory_bytes, limit_bytes))
        fitting = [p.parameters for p in prices.values() if p.download_bytes <= limit_bytes]
        assert prices[found].download_bytes <= limit_bytes
        assert prices[found].parameters >= 0.98 * max(fitting)
    assert method.assign(0, budget(memory_bytes, sizes[0] - 1)) is None


@pytest.mark.thorough
def test_evolution_without_accuracies_finds_the_most_multiplications():
    method = rafl(EVOLVED, family=ELASTIC)
    prices = {a: cost(ELASTIC, a, batch_size=16, optimizer="sgd") for a in all_of(ONCE)}
    beside = prices[ONCE.smallest()].peak_training_memory_bytes
    memory = sorted(price.peak_training_memory_bytes for price in prices.values())
    for limit in (memory[len(memory) // 2], memory[-1]):
        found = method.assign(3, budget(limit + beside))
        fitting = [a for a, price in prices.items() if price.peak_training_memory_bytes <= limit]
        assert ELASTIC.inference_macs(found) == max(ELASTIC.inference_macs(a) for a in fitting)
        assert method.assign(3, budget(limit + beside)) == found


def beside_weights(folder, picks, accuracy):
    """A weights file's neighbor, as `wildflower supernet` writes it."""
    measured = [
        {"picks": list(p), "architecture": ONCE.architecture(p).to_json(), "accuracy": accuracy(p)} for p in picks
    ]
    (folder / "w.json").write_text(json.dumps({"measured": measured}))
    return folder / "w.safetensors"


@pytest.mark.thorough
def test_evolution_finds_the_best_predicted_accuracy(tmp_path):
    """Here the less a sub-network computes, the better it is: the smallest of all is best, whatever the budget."""
    file = beside_weights(tmp_path, all_picks(ONCE), lambda p: 1.0 - sum(p) / 20)
    plenty = budget(10**12)
    assert rafl(EVOLVED, family=ELASTIC, initial_file=file).assign(0, plenty) == ONCE.smallest()
    assert rafl(EVOLVED, family=ELASTIC).assign(0, plenty) == ONCE.largest()


def test_too_few_accuracies_predict_nothing_and_those_of_another_space_are_refused(tmp_path, caplog):
    file = beside_weights(tmp_path, [ONCE.smallest_picks()], lambda p: 0.5)
    few = rafl(EVOLVED, family=ELASTIC, initial_file=file)
    with caplog.at_level("INFO", logger="flwr"):
        few.start()
    assert "accuracies of 1 sub-networks lie beside the weights, and a predictor needs 8: measure more" in caplog.text
    assert "no accuracies of sub-networks" not in caplog.text
    plenty = budget(10**12)
    assert few.assign(0, plenty) == rafl(EVOLVED, family=ELASTIC).assign(0, plenty)
    other = make_family({"name": "mobilenet-v3", "input_shape": [1, 8, 8], "norm": "batch"} | TINY)
    with pytest.raises(ValueError, match=r"rafl.searcher = 'evolution': .*w.json is of another space"):
        rafl(EVOLVED, family=other, initial_file=file)
    file.with_suffix(".json").write_text("{}")
    with pytest.raises(ValueError, match=r"w.json is no file of a supernet's training"):
        rafl(EVOLVED, family=ELASTIC, initial_file=file)
    rafl(ONCE_FOR_ALL, family=ELASTIC, initial_file=file)  # which the exact search does not read


def test_accuracies_of_the_once_for_all_space_are_refused_where_shares_are_searched(tmp_path):
    file = beside_weights(tmp_path, all_picks(ONCE), lambda p: 0.5)
    evolved = EVOLVED.model_copy(update={"space": "shares"})
    with pytest.raises(
        ValueError, match=r"w.json are of .* once-for-all space, .*: set rafl.space = 'once-for-all', or"
    ):
        rafl(evolved, family=ELASTIC, initial_file=file)
    rafl(evolved.model_copy(update={"searcher": "exact"}), family=ELASTIC, initial_file=file)  # which does not read it
    file.with_suffix(".json").write_text('{"model": "of somebody else"}')
    assert rafl(evolved, family=ELASTIC, initial_file=file).search.pairs == ([], [])


def test_an_accuracy_that_is_no_number_and_options_that_are_none_are_told_with_the_file(tmp_path):
    file = beside_weights(tmp_path, all_picks(ONCE), lambda p: float("nan") if sum(p) == 1 else 0.5)
    with pytest.raises(
        ValueError, match=r"'evolution': .*w.json: measured\[1\] has the accuracy nan, which is no number from 0 to 1"
    ):
        rafl(EVOLVED, family=ELASTIC, initial_file=file)
    file = beside_weights(tmp_path, all_picks(ONCE), lambda p: 0.5)
    facts = json.loads(file.with_suffix(".json").read_text())
    facts["measured"][0]["picks"][0] = 99
    file.with_suffix(".json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"rafl.searcher = 'evolution': .*w.json is of another space"):
        rafl(EVOLVED, family=ELASTIC, initial_file=file)


@pytest.mark.thorough
def test_a_predictor_that_is_no_better_than_chance_is_warned_of(tmp_path, caplog):
    """Accuracies that are all alike have no order to learn."""
    file = beside_weights(tmp_path, all_picks(ONCE), lambda p: 0.5)
    rafl(EVOLVED, family=ELASTIC, initial_file=file).start()
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "rank correlation of nan: the predictor orders sub-networks no better than chance does" in warning
    assert "Measure more sub-networks, as with wildflower supernet --pairs 200" in warning
    caplog.clear()
    file = beside_weights(tmp_path, all_picks(ONCE), lambda p: 1.0 - sum(p) / 20)
    rafl(EVOLVED, family=ELASTIC, initial_file=file).start()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_shares_are_refused_in_a_once_for_all_space(tmp_path):
    keys = {"strategy": "rafl", "family": "mobilenet-v3", "family-arguments": "", "rafl.shares": "0.5, 1"}
    small_config(tmp_path, **keys)
    with pytest.raises(ValueError, match=r"rafl.shares = '0.5, 1': rafl.space = 'once-for-all' does not read it"):
        small_config(tmp_path, **keys | {"rafl.space": "once-for-all"})


def test_a_family_without_a_space_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"lenet5 has no space of its own: use one of mobilenet-v2, mobilenet-v3, ofa"):
        rafl(ONCE_FOR_ALL)


def test_multiplications_may_be_limited_for_each_device():
    """Between 60 and 80 % of the whole model's: each device has a limit of its own, which its model nearly uses up."""
    most = FAMILY.inference_macs(FAMILY.full())
    limits = (0.6 * most, 0.8 * most)
    params = SHARES.model_copy(update={"searcher": "evolution", "macs": limits})
    method = rafl(params)
    found = [method.assign(device, budget(10**9)) for device in range(4)]
    macs = [FAMILY.inference_macs(architecture) for architecture in found]
    own = [method.search.max_macs(device) for device in range(4)]
    assert len(set(own)) == 4
    assert all(0.8 * limit < has <= limit for has, limit in zip(macs, own, strict=True))
    assert all(limits[0] <= limit <= limits[1] for limit in own)
    assert rafl(params.model_copy(update={"macs": (1.0,)})).assign(0, budget(10**9)) is None
    for wrong, said in (
        ({"macs": (3.0, 2.0)}, "the least and the most"),
        ({"macs": (1.0, 2.0, 3.0)}, "must be one number"),
        ({"macs": (5e6,), "searcher": "exact"}, "does not limit multiplications"),
    ):
        with pytest.raises(ValueError, match=said):
            RaFLParams(**params.model_dump() | wrong)


def test_evolution_searches_shares_too():
    method = rafl(SHARES.model_copy(update={"searcher": "evolution"}))
    assert method.assign(0, budget(method.cost(FAMILY.full()).peak_training_memory_bytes)) == FAMILY.full()


@pytest.mark.thorough
def test_a_run_from_a_supernet_searches_by_the_accuracies_beside_its_weights(tmp_path):
    """Two rounds over real nodes: the smallest is said to be the best, and every device gets it."""
    options = ", ".join(f"{key} = {value}" for key, value in (TINY | {"depths": [1]}).items())
    keys = {"strategy": "rafl", "family": "mobilenet-v3", "family-arguments": options, "evaluate-every": 9}
    keys |= {"rafl.space": "once-for-all", "rafl.searcher": "evolution"}
    (tmp_path / "plenty.toml").write_text('[[group]]\nname = "roomy"\ncount = 6\nmemory = "1 GB"\n')
    keys["fleet"] = str(tmp_path / "plenty.toml")
    drawn, _ = started(small_config(tmp_path, **keys))
    file = beside_weights(tmp_path, all_picks(ONCE), lambda p: 1.0 - sum(p) / 20)
    save_file({**drawn.method.supernet}, file)
    engine, scorer = started(small_config(tmp_path, **keys | {"initial.weights": str(file)}))
    first, second = run(engine, scorer, (1, 2), simulated_grid())
    assert (first["devices_replied"], second["devices_replied"]) == (4, 4)
    smallest = ElasticSpace.of(engine.method.family).smallest()
    assert {a for kept in engine.method.kept.values() for a in kept} == {smallest}
    assert drawn.method.assign(0, engine.assignments[0].budget) == ElasticSpace.of(engine.method.family).largest()


def test_a_device_is_scored_with_the_personal_model_that_it_has_or_would_be_sent():
    method = rafl()
    plenty = budget(method.cost(FAMILY.full()).peak_training_memory_bytes)
    assert method.personal(0, plenty)[0] == FAMILY.full()
    assert method.client_step(Order(0, FAMILY.full())).first
    owner_of(method, 0, FAMILY.width(0.5))
    assert method.personal(0, plenty)[0] == FAMILY.width(0.5)
    assert [device for device, _, _ in method.scored_on_devices()] == [0]


def test_the_state_is_the_knowledge_network_and_who_has_what():
    first, second = rafl(), rafl()
    owner_of(first, 3, FAMILY.width(0.5))
    second.load(first.state())
    assert second.kept == {3: [FAMILY.width(0.5)]}
    assert all((second.knowledge.weights[name] == value).all() for name, value in first.knowledge.weights.items())


# Whole rounds


def run(engine, scorer, numbers, grid):
    return [engine.run_round(grid, number, scorer).record for number in numbers]


def test_only_the_knowledge_network_travels_once_all_devices_have_their_models(tmp_path):
    engine, scorer = started(small_config(tmp_path, **METHODS["rafl"] | {"devices-per-round": 6, "evaluate-every": 9}))
    grid = simulated_grid()
    first, second = run(engine, scorer, (1, 2), grid)
    family, method = engine.method.family, engine.method
    small = sum(4 * value.numel() for value in method.knowledge.weights.values())
    models = [kept[0] for kept in method.kept.values()]
    personal = sum(4 * sum(torch.Size(spec.shape).numel() for spec in family.tensors(a).values()) for a in models)
    assert len(models) == 6
    assert (first["training_bytes_down"], first["training_bytes_up"]) == (6 * small + personal, 6 * small)
    assert (second["training_bytes_down"], second["training_bytes_up"]) == (6 * small, 6 * small)


def tear(folder):
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("lose", [shutil.rmtree, tear], ids=["deleted", "torn"])
def test_a_device_that_lost_its_model_helps_without_it_and_is_sent_the_supernets_again(lose, tmp_path):
    keys = METHODS["rafl"] | {"devices-per-round": 6, "evaluate-every": 9, "local-steps": 2}
    engine, scorer = started(small_config(tmp_path, **keys))
    grid = simulated_grid()
    run(engine, scorer, (1,), grid)
    [folder] = (tmp_path / "runs").rglob("device-2")
    lose(folder)
    second, third = run(engine, scorer, (2, 3), grid)
    assert (second["devices_state_lost"], second["metrics"]["personal_models_lost"]) == (1, 1)
    assert second["devices_replied"] == 6
    # The loss is counted once: the device kept nothing in the second round that it could lose again.
    assert (third["devices_state_lost"], third["metrics"]["personal_models_lost"]) == (0, 0)
    assert third["training_bytes_down"] > second["training_bytes_down"]
    assert engine.method.lost_models == 1
    assert 2 in engine.method.kept


def test_devices_that_draw_their_models_are_sent_the_knowledge_network_alone(tmp_path):
    keys = METHODS["rafl"] | {"devices-per-round": 6, "evaluate-every": 9, "rafl.first": "drawn"}
    drawn = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        engine, scorer = started(small_config(tmp_path / name, **keys))
        grid = simulated_grid()
        records = run(engine, scorer, (1, 2), grid)
        small = sum(4 * value.numel() for value in engine.method.knowledge.weights.values())
        assert [(r["training_bytes_down"], r["training_bytes_up"]) for r in records] == [(6 * small, 6 * small)] * 2
        assert len(engine.method.kept) == 6
        files = sorted((tmp_path / name / "runs").rglob("personal-*"))
        drawn.append([file.read_bytes() for file in files])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == len(drawn[0]) >= 6

    [folder] = (tmp_path / "second" / "runs").rglob("device-2")
    shutil.rmtree(folder)
    third, fourth = run(engine, scorer, (3, 4), grid)
    assert third["metrics"]["personal_models_lost"] == 1
    assert fourth["metrics"]["personal_models_lost"] == 0
    assert 2 in engine.method.kept  # and it was drawn anew


def test_the_global_score_is_the_knowledge_networks_and_tiers_score_their_own(tmp_path):
    keys = METHODS["rafl"] | {"evaluate-every": 1, "local-steps": 20, "local-epochs": 1}
    engine, scorer = started(small_config(tmp_path, **keys))
    record = run(engine, scorer, (1,), simulated_grid())[0]
    [model] = engine.evaluation.scored.values()
    assert record["score"] == scorer(model).score
    assert all((model.weights[name] == value).all() for name, value in engine.method.knowledge.weights.items())
    assert record["score_by_tier"].keys() == {engine.population.tier(d) for d in engine.method.kept}


@pytest.mark.parametrize("epochs", [0, 2])
def test_devices_score_the_knowledge_network_on_their_own_examples(epochs, tmp_path):
    """As it was sent, or as they have trained it for the score: here done again by hand."""
    keys = METHODS["rafl"] | {"personal.every": 1, "personal.epochs": epochs, "test-fraction": 0.25}
    keys |= {"momentum": 0.0, "weight-decay": 0.0, "batch-size": 1000, "learning-rate": 0.1}
    engine, scorer = started(small_config(tmp_path, **keys | {"evaluate-every": 9, "devices-per-round": 6}))
    record = run(engine, scorer, (1,), simulated_grid())[0]
    method, device_state = engine.method, tmp_path / "runs" / "small" / "device-state"
    task = load_task(TaskSpec.from_json(engine.settings.task))
    shares = []
    for device, [architecture] in sorted(method.kept.items()):
        weights = {name: value.clone() for name, value in method.knowledge.weights.items()}
        own = with_weights(method.knowledge.family, method.knowledge.architecture, weights)
        if epochs:
            personal = method.family.build(architecture)
            [kept] = device_state.rglob(f"device-{device}/*.safetensors")
            personal.load_state_dict(load_file(kept))
            train = task.shard(device).train
            images, labels = task.prepare(task.train.inputs[train], augment=None), task.train.labels[train]
            networks = (personal, own)
            steps = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
            for _ in range(epochs):
                said = [network.train()(images) for network in networks]
                both = mutual_losses(*said, tuple(F.cross_entropy(each, labels) for each in said))
                for step, loss in zip(steps, both, strict=True):
                    step.zero_grad()
                    loss.backward(retain_graph=True)
                for step in steps:
                    step.step()
        test_images, test_labels = task.own_test(device)
        with torch.no_grad():
            answers = own.eval()(task.prepare(test_images, augment=None)).argmax(dim=1)
        shares.append((answers == test_labels).double().mean().item())
    assert record["personal_score_by_network"] == {"knowledge network": pytest.approx(sum(shares) / 6)}


def test_ensemble_distillation_goes_on_from_the_average(tmp_path):
    """The teachers' mean is what a student learns that begins with the average (Eqs. 8 and 9)."""
    public = PublicData(torch.arange(4 * 64).view(4, 1, 8, 8) % 17, (torch.tensor([8.0]), torch.tensor([5.0])))
    method = rafl(SHARES.model_copy(update={"fusion": "ensemble"}), public=public)
    assert method.client_step(Order(0, FAMILY.full())).returned(FAMILY, FAMILY.full())["weights"].merge is None
    engine, scorer = started(small_config(tmp_path, **METHODS["rafl ensemble"]))
    record = run(engine, scorer, (1,), simulated_grid())[0]
    assert record["metrics"]["ensemble_steps"] == 3
    assert "distill" in record["server_seconds"]


@pytest.mark.thorough
def test_a_run_from_given_weights_calibrates_in_its_first_round(tmp_path):
    """Two rounds over real nodes; what personal models are scored with lies on the devices, or is cut for them."""
    keys = {"strategy": "rafl", "family": "resnet18", "family-arguments": "first_channels = 4", "personal.every": 1}
    keys |= {"test-fraction": 0.2}
    file = tmp_path / "supernet.safetensors"
    drawn, _ = started(small_config(tmp_path, **keys))
    save_file({**drawn.method.supernet}, file)
    keys |= {"personal.epochs": 0, "initial.weights": str(file), "evaluate-every": 1, "devices-per-round": 3}
    engine, scorer = started(small_config(tmp_path, **keys))
    assert engine.method.knowledge.cut
    first, second = run(engine, scorer, (1, 2), simulated_grid())
    assert not engine.method.knowledge.cut
    assert (first["devices_replied"], second["devices_replied"]) == (3, 3)
    assert (first["personal_devices"], first["personal_failed"]) == (6, 0)
