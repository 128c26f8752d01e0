import math

import pytest
import torch
from client_app.objectives import local_loss
from torch import nn

from messages.orders import Objective
from messages.packing import MessageError
from models.cnn import Cnn3
from models.lenet import LeNet5
from tests.client_app.work_orders import LENET
from tests.strategies.by_hand import CLASSIFIER, CLASSIFIER_BIAS, FC, FC_BIAS, OneHidden

EVERYTHING = torch.tensor([True, True, True])


class Logits(nn.Module):
    """Ignores its input: the logits are its parameter, the same for every example."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, inputs):
        return self.values.expand(len(inputs), -1).clone()


def loss_of(objective, model, present=EVERYTHING):
    return local_loss(objective, model, present, LENET, LENET.full(), seed=0)


def test_cross_entropy_is_the_mean_over_the_batch():
    # softmax(ln 2, 0, 0) = (1/2, 1/4, 1/4): the losses of labels 0 and 1 are ln 2 and ln 4.
    loss = loss_of(Objective(), Logits(math.log(2), 0.0, 0.0))
    value = loss(torch.zeros(2, 1), torch.tensor([0, 1])).detach()
    assert float(value) == pytest.approx((math.log(2) + math.log(4)) / 2)


def test_masked_cross_entropy_sets_absent_logits_to_zero_and_keeps_them_in_the_softmax():
    # Logits (ln 2, ln 9, 0) without class 1 are (ln 2, 0, 0): p = (1/2, 1/4, 1/4), not (2/3, 0, 1/3).
    model = Logits(math.log(2), math.log(9), 0.0)
    loss = loss_of(Objective(kind="masked cross entropy"), model, torch.tensor([True, False, True]))
    value = loss(torch.zeros(1, 1), torch.tensor([0]))
    assert float(value.detach()) == pytest.approx(math.log(2))
    value.backward()
    # Gradient p - onehot on what is present, nothing on what is absent.
    assert model.values.grad.tolist() == pytest.approx([-0.5, 0.0, 0.25])


class TwoExits(nn.Module):
    """Ignores its input: every exit's logits are a parameter, the same for every example."""

    def __init__(self, shallow, deep, between=()):
        super().__init__()
        self.shallow = nn.Parameter(torch.tensor(shallow))
        self.deep = nn.Parameter(torch.tensor(deep))
        self.between = between

    def exits(self, inputs):
        middle = [torch.tensor(logits) for logits in self.between]
        return [logits.expand(len(inputs), -1) for logits in (self.shallow, *middle, self.deep)]


def test_the_sum_of_exits_adds_the_cross_entropies_of_all_exits():
    # softmax(ln 2, 0, 0) = (1/2, 1/4, 1/4) and softmax(ln 8, 0, 0) = (8, 1, 1) / 10. Labels 0 and 1 cost ln 2 and ln 4
    # at the first exit, ln(10/8) and ln 10 at the second.
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0])
    value = loss_of(Objective(kind="sum of exits"), model)(torch.zeros(2, 1), torch.tensor([0, 1]))
    shallow, deep = (math.log(2) + math.log(4)) / 2, (math.log(10 / 8) + math.log(10)) / 2
    assert float(value.detach()) == pytest.approx(shallow + deep)
    # Each exit's gradient is its own mean of p - onehot, with weight 1.
    value.backward()
    assert model.shallow.grad.tolist() == pytest.approx([0.5 - 0.5, 0.25 - 0.5, 0.25])
    assert model.deep.grad.tolist() == pytest.approx([0.8 - 0.5, 0.1 - 0.5, 0.1])


def test_with_one_exit_all_objectives_of_exits_are_cross_entropy():
    torch.manual_seed(0)
    model = LENET.build(LENET.full())
    batch = (torch.rand(4, *LENET.input_shape), torch.arange(4) % 10)
    plain = loss_of(Objective(), model)(*batch)
    for kind in ("sum of exits", "mutual learning of exits", "weighted exits"):
        assert torch.equal(loss_of(Objective(kind=kind), model)(*batch), plain)


def test_in_mutual_learning_every_exit_learns_what_the_other_says():
    # p = (2, 1, 1) / 4 and q = (8, 1, 1) / 10, as above. The first exit learns KL(q || p) = .8 ln(8/5) + .2 ln(2/5),
    # the second KL(p || q) = .5 ln(5/8) + .5 ln(5/2), each from a constant.
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0])
    objective = Objective(kind="mutual learning of exits", weight=0.5)
    value = loss_of(objective, model)(torch.zeros(2, 1), torch.tensor([0, 1]))
    own = (math.log(2) + math.log(4)) / 2 + (math.log(10 / 8) + math.log(10)) / 2
    first = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    second = 0.5 * math.log(5 / 8) + 0.5 * math.log(5 / 2)
    assert float(value.detach()) == pytest.approx(own + 0.5 * (first + second))
    # Gradients: the mean of p - onehot, and 0.5 (p - q); of the other exit with p and q the other way round.
    value.backward()
    assert model.shallow.grad.tolist() == pytest.approx([0.0 - 0.15, -0.25 + 0.075, 0.25 + 0.075])
    assert model.deep.grad.tolist() == pytest.approx([0.3 + 0.15, -0.4 - 0.075, 0.1 - 0.075])


def test_in_mutual_learning_an_exit_learns_the_mean_over_the_others():
    # The first exit says p = (2, 1, 1) / 4, the two others q = (8, 1, 1) / 10 both: KL(q || p) once for the first, and
    # for each of the others half of KL(p || q) and half of nothing.
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0], between=[[math.log(8), 0.0, 0.0]])
    objective = Objective(kind="mutual learning of exits", weight=1.0)
    value = loss_of(objective, model)(torch.zeros(1, 1), torch.tensor([0]))
    first = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    second = 0.5 * math.log(5 / 8) + 0.5 * math.log(5 / 2)
    own = math.log(2) + 2 * math.log(10 / 8)
    assert float(value.detach()) == pytest.approx(own + first + 2 * second / 2)


def test_weighted_exits_count_by_their_number():
    # (1 ln 2 + 2 ln(10/8)) / 3, with gradients 1/3 and 2/3 of p - onehot.
    model = TwoExits([math.log(2), 0.0, 0.0], [math.log(8), 0.0, 0.0])
    value = loss_of(Objective(kind="weighted exits"), model)(torch.zeros(1, 1), torch.tensor([0]))
    assert float(value.detach()) == pytest.approx((math.log(2) + 2 * math.log(10 / 8)) / 3)
    value.backward()
    assert model.shallow.grad.tolist() == pytest.approx([-0.5 / 3, 0.25 / 3, 0.25 / 3])
    assert model.deep.grad.tolist() == pytest.approx([-0.4 / 3, 0.2 / 3, 0.2 / 3])


def test_early_weighted_exits_learn_from_the_last_one_which_learns_from_that():
    # At T = 3 logits (3 ln 2, 0, 0) and (3 ln 8, 0, 0) are p = (2, 1, 1) / 4 and q = (8, 1, 1) / 10, without it
    # (8, 1, 1) / 10 and (512, 1, 1) / 514. The first exit learns gamma 9 KL(q || p).
    model = TwoExits([3 * math.log(2), 0.0, 0.0], [3 * math.log(8), 0.0, 0.0])
    objective = Objective(kind="weighted exits", gamma=2.0, temperature=3.0)
    value = loss_of(objective, model)(torch.zeros(1, 1), torch.tensor([0]))
    divergence = 0.8 * math.log(8 / 5) + 0.2 * math.log(2 / 5)
    expected = (math.log(10 / 8) + 18 * divergence + 2 * math.log(514 / 512)) / 3
    assert float(value.detach()) == pytest.approx(expected)
    # d KL / d first logits = (p - q) / T, d KL / d last logits = q (ln(q / p) - KL) / T.
    value.backward()
    first = [(-0.2 + 6 * -0.3) / 3, (0.1 + 6 * 0.15) / 3, (0.1 + 6 * 0.15) / 3]
    assert model.shallow.grad.tolist() == pytest.approx(first)
    pulls = [0.8 * (math.log(8 / 5) - divergence), 0.1 * (math.log(2 / 5) - divergence)]
    own = [-4 / 514, 2 / 514]
    last = [(6 * pulls[0] + own[0]) / 3, (6 * pulls[1] + own[1]) / 3]
    assert model.deep.grad.tolist() == pytest.approx([last[0], last[1], last[1]], rel=1e-5)


@pytest.mark.parametrize("kind", ["mutual learning of exits", "weighted exits"])
def test_exits_that_are_certain_have_finite_gradients(kind):
    settings = {"weight": 1.0} if kind == "mutual learning of exits" else {"gamma": 1.0, "temperature": 3.0}
    model = TwoExits([0.0, 1000.0, 0.0], [1000.0, 0.0, 0.0])
    loss_of(Objective(kind=kind, **settings), model)(torch.zeros(1, 1), torch.tensor([0])).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_all_heads_of_a_family_with_exits_are_trained():
    family = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
    model = family.build(family.up_to(2))
    loss = local_loss(Objective(kind="sum of exits"), model, EVERYTHING, family, family.up_to(2), seed=0)
    loss(torch.rand(4, 1, 8, 8), torch.arange(4)).backward()
    assert all(
        float(parameter.grad.abs().sum()) > 0 for name, parameter in model.named_parameters() if "conv.bias" not in name
    )
    plain = loss_of(Objective(), model)
    model.zero_grad()
    plain(torch.rand(4, 1, 8, 8), torch.arange(4)).backward()
    assert model.get_submodule("exit1.classifier").weight.grad is None


def test_the_proximal_term_pulls_towards_the_weights_that_were_received():
    # Received w = (ln 2, 0, 0), now w' = w + (0, 0, ln 2): p = (2, 1, 2) / 5. With mu = 3 and label 0:
    # loss = ln(5/2) + 3/2 (ln 2)^2, gradient = p - onehot + 3 (w' - w) = (-3/5, 1/5, 2/5 + 3 ln 2).
    model = Logits(math.log(2), 0.0, 0.0)
    loss = loss_of(Objective(kind="proximal", mu=3.0), model)
    with torch.no_grad():
        model.values[2] += math.log(2)
    value = loss(torch.zeros(1, 1), torch.tensor([0]))
    assert float(value.detach()) == pytest.approx(math.log(5 / 2) + 1.5 * math.log(2) ** 2)
    value.backward()
    assert model.values.grad.tolist() == pytest.approx([-0.6, 0.2, 0.4 + 3 * math.log(2)])


def test_before_the_first_step_the_proximal_term_is_nothing():
    model = Logits(0.5, -0.5, 0.0)
    plain, proximal = loss_of(Objective(), model), loss_of(Objective(kind="proximal", mu=9.0), model)
    batch = (torch.zeros(3, 1), torch.tensor([0, 1, 2]))
    assert torch.equal(plain(*batch), proximal(*batch))


# Ordered dropout, by hand: one input of 1, four hidden channels of value 1, three classes. The logits of the first
# class add ln 2 for each of channels 0, 1 and 3; the other classes' are 0. Of width 1/4 the softmax is (2, 1, 1) / 4,
# of width 1 it is (8, 1, 1) / 10.
LN2 = math.log(2)


def one_hidden(width=1.0):
    family = OneHidden()
    model = family.build(family.width(width))
    kept = round(4 * width)
    model.load_state_dict(
        {
            FC: torch.ones(kept, 1),
            FC_BIAS: torch.zeros(kept),
            CLASSIFIER: torch.tensor([[LN2, LN2, 0.0, LN2], [0.0] * 4, [0.0] * 4])[:, :kept],
            CLASSIFIER_BIAS: torch.zeros(3),
        }
    )
    return family, model.train()


def ordered_step(distillation, wanted):
    """Gradients and loss of the first seed that draws the wanted width; label 0."""
    for seed in range(20):
        family, model = one_hidden()
        objective = Objective(kind="ordered dropout", widths=(0.25, 1.0), distillation=distillation)
        loss = local_loss(objective, model, EVERYTHING, family, family.full(), seed)
        value = loss(torch.ones(2, 1, 1, 1), torch.tensor([0, 0]))
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        drawn_narrow = not bool(torch.equal(gradients[CLASSIFIER][:, 0], gradients[CLASSIFIER][:, 1]))
        if drawn_narrow == (wanted < 1):
            return float(value.detach()), gradients
    raise AssertionError("no seed draws it")


def columns(*values):
    return [pytest.approx([column[row] for column in values], abs=1e-6) for row in range(3)]


def test_a_cut_of_ordered_dropout_trains_the_leading_channels_alone():
    # p - onehot = (-1/2, 1/4, 1/4) in the first column and the bias; channel 0's own weight gets ln 2 * -1/2.
    value, gradients = ordered_step(False, 0.25)
    assert value == pytest.approx(math.log(2))
    nothing = (0.0, 0.0, 0.0)
    assert gradients[CLASSIFIER].tolist() == columns((-0.5, 0.25, 0.25), nothing, nothing, nothing)
    assert gradients[CLASSIFIER_BIAS].tolist() == pytest.approx([-0.5, 0.25, 0.25])
    assert gradients[FC].flatten().tolist() == pytest.approx([-0.5 * math.log(2), 0, 0, 0])
    assert gradients[FC].flatten()[1:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("distillation", [False, True])
def test_the_whole_of_ordered_dropout_trains_everything_and_has_nothing_to_learn_from_itself(distillation):
    value, gradients = ordered_step(distillation, 1.0)
    assert value == pytest.approx(math.log(10 / 8))
    assert gradients[CLASSIFIER].tolist() == columns(*[(-0.2, 0.1, 0.1)] * 4)
    assert gradients[FC].flatten().tolist() == pytest.approx([-0.2 * math.log(2)] * 2 + [0, -0.2 * math.log(2)])


def test_with_distillation_the_cut_learns_what_the_whole_says():
    # ln(10/8) of the whole, and -(8 ln(1/2) + 2 ln(1/4)) / 10 = 1.2 ln 2 of the cut to the whole's softmax q.
    # Gradients: (-0.2, 0.1, 0.1) everywhere, and p - q = (-0.3, 0.15, 0.15) in the cut; q itself is constant.
    value, gradients = ordered_step(True, 0.25)
    assert value == pytest.approx(math.log(10 / 8) + 1.2 * math.log(2))
    beyond = (-0.2, 0.1, 0.1)
    assert gradients[CLASSIFIER].tolist() == columns((-0.5, 0.25, 0.25), beyond, beyond, beyond)
    assert gradients[CLASSIFIER_BIAS].tolist() == pytest.approx([-0.5, 0.25, 0.25])
    expected = [-0.5 * math.log(2), -0.2 * math.log(2), 0, -0.2 * math.log(2)]
    assert gradients[FC].flatten().tolist() == pytest.approx(expected)


def drawn_losses(seed, batches):
    family, model = one_hidden()
    objective = Objective(kind="ordered dropout", widths=(0.25, 0.5, 1.0))
    loss = local_loss(objective, model, EVERYTHING, family, family.full(), seed)
    return [round(float(loss(torch.ones(1, 1, 1, 1), torch.tensor([0])).detach()), 4) for _ in range(batches)]


def test_widths_are_drawn_alike_for_every_batch_and_follow_from_the_seed():
    losses = drawn_losses(3, 600)
    # Softmaxes (2, 1, 1) / 4, (4, 1, 1) / 6 and (8, 1, 1) / 10.
    counts = [losses.count(round(math.log(x), 4)) for x in (2, 6 / 4, 10 / 8)]
    assert sum(counts) == 600
    assert all(150 < count < 250 for count in counts)
    assert drawn_losses(3, 600) == losses
    assert drawn_losses(4, 600) != losses


def test_a_cut_computes_what_a_sub_model_of_its_own_does():
    family = LeNet5(input_shape=(1, 8, 8), norm="static")
    widths = (0.5, 1.0)
    half = family.width(0.5)
    torch.manual_seed(0)
    model = family.build(family.full()).train()
    own = family.build(half).train()
    own.load_state_dict(family.place(half).gather(model.state_dict()))
    inputs, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    wanted = torch.nn.functional.cross_entropy(own(inputs), labels)
    wanted.backward()
    classes = torch.ones(10, dtype=torch.bool)
    for seed in range(20):
        model.zero_grad()
        loss = local_loss(
            Objective(kind="ordered dropout", widths=widths), model, classes, family, family.full(), seed
        )(inputs, labels)
        if torch.equal(loss.detach(), wanted.detach()):
            break
    else:
        raise AssertionError("no seed draws the half")
    loss.backward()
    gradients = family.place(half).gather({name: p.grad for name, p in model.named_parameters()})
    for name, parameter in own.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-6), name
    inside = sum(float(g.abs().sum()) for g in gradients.values())
    assert sum(float(p.grad.abs().sum()) for p in model.parameters()) == pytest.approx(inside)


def test_ordered_dropout_of_another_architecture_is_refused():
    family, model = one_hidden(0.5)
    objective = Objective(kind="ordered dropout", widths=(0.25, 1.0))
    with pytest.raises(MessageError, match=r"ordered dropout up to width 1.0 is not training of Architecture"):
        local_loss(objective, model, EVERYTHING, family, family.width(0.5), 0)


def test_running_statistics_are_not_mixed_by_ordered_dropout():
    objective = Objective(kind="ordered dropout", widths=(0.5, 1.0))
    with pytest.raises(MessageError, match="use norm = 'static'"):
        local_loss(objective, LENET.build(LENET.full()), EVERYTHING, LENET, LENET.full(), 0)


class Reader(nn.Module):
    """What its classifier reads is the same for every example; its logits are that, three times over."""

    def __init__(self, *reads, times=1.0):
        super().__init__()
        self.reads = nn.Parameter(torch.tensor(reads))
        self.classifier = nn.Linear(len(reads), 3, bias=False)
        self.classifier.weight = nn.Parameter(times * torch.eye(3, len(reads)), requires_grad=False)

    def forward(self, inputs):
        return self.classifier(self.reads.expand(len(inputs), -1))


def taught(student, teacher, divergence="student || teacher"):
    objective = Objective(kind="taught", divergence=divergence)
    loss = local_loss(objective, student, EVERYTHING, LENET, LENET.full(), seed=0, teacher=teacher)
    return loss(torch.zeros(2, 1), torch.tensor([0, 0]))


def test_what_a_taught_model_minimizes_by_hand():
    """Student: read and logits (ln 2, 0, 0), p = (1/2, 1/4, 1/4). Teacher: reads (0, 0, 0), uniform, in both."""
    student, teacher = Reader(math.log(2), 0.0, 0.0), Reader(0.0, 0.0, 0.0)
    own, soft = math.log(2), (math.log(2) + 2 * math.log(4)) / 3
    printed = math.log(3 / 2) / 2 + math.log(3 / 4) / 2  # sum of p log(p / (1/3))
    other = (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3  # sum of (1/3) log((1/3) / p)
    assert float(taught(student, teacher).detach()) == pytest.approx(own + soft + printed, rel=1e-5)
    value = taught(student, teacher, "teacher || student")
    assert float(value.detach()) == pytest.approx(own + soft + other, rel=1e-5)
    value.backward()
    assert student.reads.grad.abs().sum() > 0
    assert teacher.reads.grad is None


def test_what_classifiers_read_is_compared_only_where_it_has_the_same_size():
    student, teacher = Reader(math.log(2), 0.0, 0.0), Reader(0.0, 0.0, 0.0, 0.0)
    expected = math.log(2) + (math.log(2) + 2 * math.log(4)) / 3
    for divergence in ("student || teacher", "teacher || student"):
        assert float(taught(student, teacher, divergence).detach()) == pytest.approx(expected, rel=1e-5)


def test_a_taught_model_needs_a_teacher():
    with pytest.raises(MessageError, match="needs a teacher, and the work order names none"):
        loss_of(Objective(kind="taught"), Reader(0.0, 0.0, 0.0))


def test_divergence_belongs_to_taught():
    with pytest.raises(ValueError, match="divergence belongs to taught, not to cross entropy"):
        Objective(divergence="teacher || student")
