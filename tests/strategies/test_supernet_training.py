import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wildflower.messages.orders import LocalTraining
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import make_family
from wildflower.models.space import Space
from wildflower.models.supernet import Supernet
from wildflower.strategies.predictor import encoded, fit_predictor, rank_correlation
from wildflower.strategies.supernet_training import (
    SupernetParams,
    SupernetTraining,
    accuracy,
    accuracy_of,
    batches_of,
    calibrated,
    sandwich_step,
)
from wildflower.tasks.task import TaskSpec, load_task

torch.set_num_threads(1)

FAMILY = make_family(
    {
        "name": "mobilenet-v3",
        "input_shape": [1, 8, 8],
        "stage_channels": [8, 8, 16, 16, 16, 24],
        "depths": [1, 2],
        "expand_ratios": [2, 3],
        "kernel_sizes": [3, 5],
        "dropout": 0.0,
    }
)
SPACE = ElasticSpace.of(FAMILY)


@pytest.fixture
def supernet():
    torch.manual_seed(0)
    return Supernet(SPACE)


@pytest.fixture(scope="module")
def digits():
    return load_task(TaskSpec(name="digits", devices=1))


def test_the_active_sub_network_computes_what_the_extracted_one_does(supernet):
    rng = np.random.default_rng(0)
    inputs = torch.randn(4, 1, 8, 8)
    for training in (True, False):
        supernet.train(training)
        for _ in range(3):
            architecture = supernet.sample(rng)
            assert supernet.active == architecture
            extracted = supernet.extract()
            assert {n: t.shape for n, t in extracted.state_dict().items()} == {
                n: spec.shape for n, spec in FAMILY.tensors(architecture).items()
            }
            torch.testing.assert_close(supernet(inputs), extracted(inputs))


def test_gradients_arrive_where_the_sub_network_lies(supernet):
    supernet.train()
    architecture = SPACE.smallest()
    supernet.set(architecture)
    inputs = torch.randn(4, 1, 8, 8)
    alone = supernet.extract(architecture)
    supernet(inputs).square().sum().backward()
    alone(inputs).square().sum().backward()
    place = FAMILY.place(architecture)
    gradients = {name: p.grad for name, p in supernet.whole.named_parameters() if p.grad is not None}
    for name, parameter in alone.named_parameters():
        whole = gradients.pop(name)
        assert whole.shape == supernet.whole.get_parameter(name).shape
        torch.testing.assert_close(whole[place.coordinates[name]], parameter.grad)
        outside = whole.clone()
        outside[place.coordinates[name]] = 0
        assert outside.abs().sum() == 0
    assert gradients == {}  # removed blocks have none


def test_what_is_extracted_is_a_copy(supernet):
    before = supernet.whole.state_dict()["stem.conv.weight"].clone()
    network = supernet.extract(SPACE.smallest())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert torch.equal(supernet.whole.state_dict()["stem.conv.weight"], before)


def test_what_is_inserted_is_extracted_again_and_the_rest_stays(supernet):
    architecture = SPACE.smallest()
    before = {name: value.clone() for name, value in supernet.whole.state_dict().items()}
    given = {name: value + 1 for name, value in FAMILY.build(architecture).state_dict().items()}
    supernet.insert(architecture, given)
    for name, value in supernet.extract(architecture).state_dict().items():
        assert torch.equal(value, given[name])
    # The kernel of 3 is the center of the kernel of 5, and the inside the first half of a wider one.
    depthwise = supernet.whole.state_dict()["stage1_0.depthwise.weight"]
    assert torch.equal(
        depthwise[: len(given["stage1_0.depthwise.weight"]), :, 1:4, 1:4], given["stage1_0.depthwise.weight"]
    )
    assert torch.equal(depthwise[:, :, 0], before["stage1_0.depthwise.weight"][:, :, 0])
    assert torch.equal(supernet.whole.state_dict()["stage1_1.expand.weight"], before["stage1_1.expand.weight"])
    with pytest.raises(ValueError, match="has shape"):
        supernet.insert(SPACE.largest(), given)
    with pytest.raises(ValueError, match="has no tensor 'stem'"):
        supernet.insert(architecture, {"stem": torch.zeros(1)})


def test_given_weights_are_copied_and_other_spaces_work():
    family = make_family({"name": "resnet18", "input_shape": [1, 8, 8], "first_channels": 4})
    weights = family.initial()
    supernet = Supernet(Space.of(family, (0, 0.5, 1)), weights)
    supernet.sample(np.random.default_rng(0))
    assert supernet(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    supernet.whole.state_dict()["stem.conv.weight"].zero_()
    assert weights["stem.conv.weight"].abs().sum() > 0
    with pytest.raises(ValueError, match="widths"):
        supernet.set(SPACE.smallest())


def test_the_sandwich_rule_by_hand():
    """Of a network of one linear layer the gradients can be written down: softmax minus target, times the inputs."""

    class OneLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
            self.space = self
            self.asked = []

        def largest(self):
            return 2

        def smallest(self):
            return 1

        def sample(self, rng):
            return int(rng.integers(1, 3))

        def set(self, width):
            self.width = width
            self.asked.append(width)

        def forward(self, inputs):
            return inputs[:, : self.width] @ self.weight[:, : self.width].T

    net = OneLayer()
    inputs, labels = torch.tensor([[1.0, 2.0], [-1.0, 0.5]]), torch.tensor([0, 1])
    value = sandwich_step(net, (inputs, labels), F.cross_entropy, np.random.default_rng(0), random=0)
    assert net.asked == [2, 1]
    weight = net.weight.detach().double().numpy()
    x = inputs.double().numpy()

    def softmax(z):
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    largest = softmax(x @ weight.T)
    smallest = softmax(x[:, :1] @ weight[:, :1].T)
    onehot = np.eye(2)[labels.numpy()]
    gradient = (largest - onehot).T @ x / 2
    gradient[:, :1] += (smallest - largest).T @ x[:, :1] / 2
    np.testing.assert_allclose(net.weight.grad.numpy(), gradient, rtol=1e-5)
    assert value == pytest.approx(-np.log(largest[[0, 1], [0, 1]]).mean(), rel=1e-5)


CNN = Space.of(make_family({"name": "cnn3", "input_shape": [1, 8, 8]}), (0.25, 1))


def a_training(digits, steps=6, optimizer="sgd", examples=80):
    torch.manual_seed(0)
    training = LocalTraining(batch_size=16, learning_rate=0.05, momentum=0.9, optimizer=optimizer)
    if optimizer != "sgd":
        training = training.model_copy(update={"momentum": 0.0, "learning_rate": 0.001})
    params = SupernetParams(steps=steps, random=1)
    return SupernetTraining(Supernet(CNN), digits, torch.arange(examples), training, params, seed=3)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_training_has_the_same_bits(digits, optimizer):
    whole = a_training(digits, optimizer=optimizer)
    losses = [whole.advance() for _ in range(6)]
    first = a_training(digits, optimizer=optimizer)
    for _ in range(3):
        first.advance()
    state = {name: value.clone() for name, value in first.state().items()}
    second = a_training(digits, optimizer=optimizer)
    second.load(3, state)
    assert [second.advance() for _ in range(3)] == losses[3:]
    for name, value in whole.supernet.whole.state_dict().items():
        assert torch.equal(value, second.supernet.whole.state_dict()[name]), name


def test_a_state_of_another_supernet_is_refused(digits):
    training = a_training(digits)
    state = training.state()
    del state["weights.block1.conv.weight"]
    with pytest.raises(ValueError, match="of another supernet"):
        training.load(1, state)


@pytest.mark.thorough
def test_training_helps_the_smallest_and_the_largest(digits):
    training = a_training(digits, steps=100, examples=600)
    held = torch.arange(800, 1100)

    def accuracies():
        calibration = list(batches_of(digits, digits.train, training.examples, 64, limit=5))
        return [
            accuracy_of(training.supernet, arch, calibration, batches_of(digits, digits.train, held, 256))
            for arch in (CNN.smallest(), CNN.largest())
        ]

    before = accuracies()
    for _ in range(100):
        training.advance()
    after = accuracies()
    assert all(b < 0.35 for b in before), before
    assert all(a > 0.6 for a in after), after


def test_calibration_is_the_mean_over_the_batches():
    family = make_family({"name": "cnn3", "input_shape": [1, 8, 8]})
    network = family.build(family.full())
    batches = [(torch.randn(8, 1, 8, 8), torch.zeros(8)) for _ in range(3)]
    first = network.block1.conv
    means = torch.stack([first(inputs).mean(dim=(0, 2, 3)) for inputs, _ in batches])
    calibrated(network, batches)
    torch.testing.assert_close(network.block1.norm.running_mean, means.mean(dim=0))
    assert not network.training
    assert network.block1.norm.momentum == 0.1


def test_static_norms_need_no_calibration():
    family = make_family({"name": "cnn3", "input_shape": [1, 8, 8], "norm": "static"})

    def never():
        raise AssertionError
        yield

    calibrated(family.build(family.full()), never())


def test_accuracy_by_hand():
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]])
    batches = [(logits[:2], torch.tensor([0, 0])), (logits[2:], torch.tensor([0]))]
    assert accuracy(nn.Identity(), batches) == 2 / 3
    with pytest.raises(ValueError, match="at least one example"):
        accuracy(nn.Identity(), [])


@pytest.mark.thorough
def test_a_predictor_learns_an_order_it_has_not_seen():
    rng = np.random.default_rng(0)
    found = list(dict.fromkeys(SPACE.draw(rng) for _ in range(300)))
    names = [decision.name for decision in SPACE.decisions]
    effect = {name: (0.02 if name.endswith("depth") else 0.01) for name in names}
    accuracies = [0.5 + sum(effect[n] * p for n, p in zip(names, picks, strict=True)) for picks in found]
    predictor = fit_predictor(SPACE, found[:250], accuracies[:250], seed=0)
    assert predictor.rank_correlation > 0.9
    said = predictor.score(found[250:])
    assert rank_correlation(torch.tensor(said), torch.tensor(accuracies[250:])) > 0.9
    assert max(abs(a - b) for a, b in zip(said, accuracies[250:], strict=True)) < 0.05
    again = fit_predictor(SPACE, found[:250], accuracies[:250], seed=0)
    assert again.score(found[250:]) == said


def test_what_means_nothing_is_not_encoded():
    depth = [decision.name for decision in SPACE.decisions].index("stage1.depth")
    shallow = SPACE.canonical([0] * len(SPACE.options))
    features = encoded(SPACE, [shallow])[0]
    # 5 depths, and for each first block an expand ratio and a kernel.
    assert features.sum() == 5 + 2 * 5
    deep = list(shallow)
    deep[depth] = 1
    assert encoded(SPACE, [tuple(deep)])[0].sum() == 5 + 2 * 5 + 2


def test_rank_correlation_by_hand():
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(a, torch.tensor([10.0, 20.0, 25.0, 90.0])) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    # Ranks 0, 1.5, 1.5, 3: covariance with 0, 1, 2, 3 is 4.5, norms are sqrt(5) and sqrt(4.5).
    assert rank_correlation(a, torch.tensor([0.0, 1.0, 1.0, 2.0])) == pytest.approx(4.5 / (5 * 4.5) ** 0.5)
    assert np.isnan(rank_correlation(a, torch.ones(4)))


def test_too_little_to_learn_from_is_refused():
    with pytest.raises(ValueError, match="at least 8 pairs"):
        fit_predictor(SPACE, [SPACE.canonical(SPACE.smallest_picks())], [0.5], seed=0)
    with pytest.raises(ValueError, match="finite accuracies"):
        fit_predictor(SPACE, [SPACE.canonical(SPACE.smallest_picks())] * 8, [float("nan")] * 8, seed=0)
