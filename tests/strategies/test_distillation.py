import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from wildflower.models.architecture import Architecture
from wildflower.models.block_family import BlockFamily
from wildflower.models.cnn import Cnn3
from wildflower.models.layers import Block, Channels, Linear
from wildflower.models.lenet import LeNet5
from wildflower.models.resnet import ResNet18
from wildflower.strategies.distillation import Distillation, distill, mutual_information_nats
from wildflower.strategies.noise import Noise
from wildflower.strategies.submodel import initial_weights


@dataclass(frozen=True)
class TwoFeatures(BlockFamily):
    """One hidden unit per channel, no activation: y = V W x."""

    name: ClassVar[str] = "two-features"
    input_shape: tuple[int, ...] = (2,)
    classes: int = 2

    @property
    def groups(self) -> dict[str, int]:
        return {"hidden": 2}

    def blocks(self, arch: Architecture) -> list[Block]:
        inputs, outputs = Channels("input", 2, 2), Channels("classes", 2, 2)
        hidden = self.channels(arch)["hidden"]
        return [Block("body", (Linear("first", inputs, hidden), Linear("second", hidden, outputs)))]


def cut(family, architecture):
    return architecture, family.place(architecture)


def whole(family):
    return cut(family, family.full())


def students(family, *architectures):
    return [cut(family, a) for a in architectures]


def kl(family, weights, architecture, inputs):
    """KL(softmax W(x) || softmax W_i(x)) of a leading cut, mean over inputs."""
    teacher, student = family.build(family.full()), family.build(architecture)
    teacher.load_state_dict(weights)
    student.load_state_dict(family.place(architecture).gather(weights))
    with torch.no_grad():
        p, q = teacher.eval()(inputs).softmax(1), student.eval()(inputs).softmax(1)
    return (p * (p / q).log()).sum(1).mean().item()


def test_one_step_of_adam_by_hand():
    """Adam's first step is -rate * sign(gradient) (up to eps); two students average where they have a coordinate."""
    family = TwoFeatures()
    weights = {
        "body.first.weight": torch.eye(2),
        "body.first.bias": torch.zeros(2),
        "body.second.weight": torch.eye(2),
        "body.second.bias": torch.zeros(2),
    }
    one = family.architecture({"hidden": 1})
    settings = Distillation(steps=1, batch_size=5, learning_rate=0.1)
    result, *_ = distill(family, weights, whole(family), students(family, one, one), settings, seed=3)

    expected = {name: value.clone() for name, value in weights.items()}
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x = torch.randn(5, 2, generator=generator)
        # A student lacks hidden unit 1: its logits are (x1, 0), the teacher's are (x1, x2). The gradient of the mean KL
        # by the student's logits is (softmax(x1, 0) - softmax(x1, x2)) / 5.
        by_logits = (torch.stack([x[:, 0], torch.zeros(5)], 1).softmax(1) - x.softmax(1)) / 5
        by_hidden = by_logits[:, :1]  # back through the second layer's column (1, 0)
        for name, coordinates, gradient in [
            ("body.first.weight", (slice(0, 1), slice(None)), by_hidden.T @ x),
            ("body.first.bias", (slice(0, 1),), by_hidden.sum(0)),
            ("body.second.weight", (slice(None), slice(0, 1)), by_logits.T @ x[:, :1]),
            ("body.second.bias", (slice(None),), by_logits.sum(0)),
        ]:
            expected[name][coordinates] -= 0.1 / 2 * gradient.sign()  # each student is half of the mean
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("reading", ["frozen-teacher", "live-teacher"])
def test_one_adam_on_the_global_weights_by_hand(reading):
    """y = V x, W x being whole; students have hidden unit 1 or both. Adam (betas 0.9, 0.999) by its printed equations.

    The gradient of a step is the mean over the students of that of KL(p || q_i) by the coordinates that i has; that of
    a student is q_i - p, the target p being that of the weights as they came in, or as they are.
    """
    family = TwoFeatures()
    weights = {
        "body.first.weight": torch.tensor([[1.0, -0.5], [0.25, 2.0]]),
        "body.first.bias": torch.tensor([0.1, -0.2]),
        "body.second.weight": torch.tensor([[0.5, 1.0], [-1.0, 0.5]]),
        "body.second.bias": torch.tensor([0.3, 0.0]),
    }
    one = family.architecture({"hidden": 1})
    settings = Distillation(steps=3, batch_size=4, learning_rate=0.05, reading=reading)
    result, _, _ = distill(family, weights, whole(family), students(family, one, one, family.full()), settings, seed=3)

    w = {name: value.clone().double() for name, value in weights.items()}
    came, first, second = dict(w), dict.fromkeys(w, 0.0), dict.fromkeys(w, 0.0)
    generator = torch.Generator().manual_seed(3)
    for step in (1, 2, 3):
        gradients = {name: torch.zeros_like(value) for name, value in w.items()}
        teacher = came if reading == "frozen-teacher" else dict(w)
        for kept in (1, 1, 2):
            if kept == 2 and all(torch.equal(teacher[name], w[name]) for name in w):
                continue  # it says what the teacher says
            x = torch.randn(4, 2, generator=generator).double()
            hidden = x @ teacher["body.first.weight"].T + teacher["body.first.bias"]
            p = (hidden @ teacher["body.second.weight"].T + teacher["body.second.bias"]).softmax(1)
            hidden = (x @ w["body.first.weight"].T + w["body.first.bias"])[:, :kept]
            q = (hidden @ w["body.second.weight"][:, :kept].T + w["body.second.bias"]).softmax(1)
            by_logits = (q - p) / 4 / 3
            by_hidden = by_logits @ w["body.second.weight"][:, :kept]
            gradients["body.first.weight"][:kept] += by_hidden.T @ x
            gradients["body.first.bias"][:kept] += by_hidden.sum(0)
            gradients["body.second.weight"][:, :kept] += by_logits.T @ hidden
            gradients["body.second.bias"] += by_logits.sum(0)
        for name, gradient in gradients.items():
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            unbiased = (second[name] / (1 - 0.999**step)).sqrt()
            w[name] = w[name] - 0.05 * first[name] / (1 - 0.9**step) / (unbiased + 1e-8)
    for name, value in result.items():
        torch.testing.assert_close(value.double(), w[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("reading", ["students", "frozen-teacher", "live-teacher"])
def test_coordinates_that_no_student_has_keep_their_value(reading):
    family = Cnn3(input_shape=(1, 8, 8), norm="static", scaler=True)
    weights = initial_weights(family, 1)
    before = {name: value.clone() for name, value in weights.items()}
    quarter = family.width(0.25)
    result, steps_per_second, _ = distill(
        family,
        weights,
        whole(family),
        students(family, quarter),
        Distillation(steps=2, batch_size=8, reading=reading),
        seed=1,
    )
    assert steps_per_second > 0
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    counts = {name: torch.zeros(value.shape, dtype=torch.int64) for name, value in weights.items()}
    family.place(quarter).add_weight(counts, 1)
    for name, value in result.items():
        assert torch.equal(value[counts[name] == 0], before[name][counts[name] == 0])
    assert not torch.equal(result["head.classifier.bias"], before["head.classifier.bias"])


@pytest.mark.parametrize(
    "family",
    [
        LeNet5(input_shape=(1, 8, 8), norm="static", scaler=True),
        ResNet18(input_shape=(1, 8, 8), first_channels=4, norm="static", activation="relu6"),
    ],
    ids=lambda family: family.name,
)
def test_students_come_nearer_to_the_teacher(family):
    torch.manual_seed(0)
    weights = {name: value + 0.05 * torch.randn_like(value) for name, value in initial_weights(family, 2).items()}
    half = family.architecture({g: math.ceil(w / 2) for g, w in family.groups.items()})
    inputs = torch.randn(64, *family.input_shape)
    result, *_ = distill(
        family,
        weights,
        whole(family),
        students(family, half),
        Distillation(steps=30, batch_size=32, learning_rate=1e-3),
        seed=5,
    )
    # Measured against the old teacher: only the student's coordinates of the result are the student.
    student = family.build(half)
    student.load_state_dict(family.place(half).gather(result))
    teacher = family.build(family.full())
    teacher.load_state_dict(weights)
    with torch.no_grad():
        p, q = teacher.eval()(inputs).softmax(1), student.eval()(inputs).softmax(1)
    assert (p * (p / q).log()).sum(1).mean().item() < 0.7 * kl(family, weights, half, inputs)


@pytest.mark.parametrize("reading", ["students", "live-teacher"])
def test_running_statistics_stay_as_they_are(reading):
    family = Cnn3(input_shape=(1, 8, 8))
    weights = initial_weights(family, 1)
    weights |= {name: value + 0.5 for name, value in weights.items() if name.endswith(("running_mean", "running_var"))}
    result, *_ = distill(
        family,
        weights,
        whole(family),
        students(family, family.width(0.5)),
        Distillation(steps=2, batch_size=8, reading=reading),
        seed=1,
    )
    for name in weights:
        if name.endswith(("running_mean", "running_var")):
            torch.testing.assert_close(result[name], weights[name], rtol=1e-6, atol=0)


def test_the_same_seed_gives_the_same_bits():
    family = LeNet5(input_shape=(1, 8, 8))
    weights = initial_weights(family, 1)
    runs = [
        distill(
            family,
            weights,
            whole(family),
            students(family, family.width(0.5)),
            Distillation(steps=2, batch_size=8),
            seed=9,
        )[0]
        for _ in "ab"
    ]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in weights)


def test_a_distillation_that_diverges_says_so():
    family = LeNet5(input_shape=(1, 8, 8))
    weights = initial_weights(family, 1)
    with pytest.raises(FloatingPointError, match="diverged in block1"):
        distill(
            family,
            weights,
            whole(family),
            students(family, family.width(0.5)),
            Distillation(steps=3, batch_size=8, learning_rate=1e30),
            seed=9,
        )


def test_the_whole_as_a_student_stays_as_it_is_and_counts_in_the_mean():
    """Of (1, 2) a student has the 1 and moves it; with the whole beside it the mean moves half as far."""
    family = LeNet5(input_shape=(1, 8, 8))
    weights = initial_weights(family, 1)
    full, half, settings = family.full(), family.width(0.5), Distillation(steps=2, batch_size=8)
    alone, *measured = distill(family, weights, whole(family), students(family, full), settings, seed=9)
    assert measured == [None, None]
    assert all(torch.equal(alone[name], weights[name]) for name in weights)
    moved, *_ = distill(family, weights, whole(family), students(family, half), settings, seed=9)
    both, *_ = distill(family, weights, whole(family), students(family, half, full), settings, seed=9)
    for name, old in weights.items():
        torch.testing.assert_close(both[name] - old, (moved[name] - old) / 2, rtol=0, atol=1e-7)


def test_noise_takes_the_place_of_token_embeddings():
    from wildflower.models.bert import Bert

    family = Bert(input_shape=(6,), classes=11, hidden=8, depth=2, heads=2, mlp=16)
    model = family.build(family.full()).eval()
    feed = Noise(family, model.state_dict()).reader(model, family.place(family.full()))
    with torch.no_grad():
        assert feed(torch.randn(3, 6, 8)).shape == (3, 11)
        tokens = torch.randint(11, (3, 6))
        # Fed with the embeddings that tokens have, it computes what it computes on the tokens.
        torch.testing.assert_close(feed(model.embedding.tokens.weight[tokens]), model(tokens))
    weights = initial_weights(family, 1)
    result, *_ = distill(
        family, weights, whole(family), students(family, family.width(0.5)), Distillation(steps=2, batch_size=4), seed=1
    )
    assert torch.equal(result["embedding.tokens.weight"], weights["embedding.tokens.weight"])
    assert not torch.equal(result["head.classifier.bias"], weights["head.classifier.bias"])


def test_noise_is_spread_as_the_embeddings_of_all_tokens():
    from wildflower.models.bert import Bert

    family = Bert(input_shape=(6,), classes=3, hidden=2, depth=1, heads=1, mlp=4)
    table = torch.tensor([[1.0, 10.0], [2.0, 10.0], [3.0, 40.0]])  # means 2 and 20, deviations 1 and 300^1/2
    noise = Noise(family, initial_weights(family, 1) | {"embedding.tokens.weight": table})
    drawn = noise.draw(20_000, torch.Generator().manual_seed(1))
    assert drawn.shape == (20_000, 6, 2)
    assert drawn.mean(dim=(0, 1)).tolist() == pytest.approx([2.0, 20.0], rel=0.01)
    assert drawn.std(dim=(0, 1)).tolist() == pytest.approx([1.0, 300**0.5], rel=0.01)
    images = Noise(LeNet5(input_shape=(1, 8, 8)), {}).draw(500, torch.Generator().manual_seed(1))
    assert images.shape == (500, 1, 8, 8)
    assert images.std().item() == pytest.approx(1.0, rel=0.02)


def test_what_is_told_apart_is_the_mutual_information():
    """Two inputs, (0.9, 0.1) and (0.1, 0.9): ln 2 - (0.9 ln(1/0.9) + 0.1 ln(1/0.1)) = 0.693147 - 0.325083."""
    assert mutual_information_nats(torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()) == pytest.approx(0.368064, abs=1e-6)
    # The same of all inputs, however sure.
    assert mutual_information_nats(torch.tensor([[0.9, 0.1]] * 3).log()) == pytest.approx(0, abs=1e-7)
    # Sure of each, and all classes alike: ln 3. A probability of 0 is none of nan.
    assert mutual_information_nats(torch.eye(3).log()) == pytest.approx(math.log(3))


def test_a_distillation_measures_what_its_teacher_tells_apart():
    """With the first layer 0 the teacher says the same of all noise; with a large one it is sure, of one class or the
    other alike: ln 2 but for a few inputs near the boundary."""
    family = TwoFeatures()
    for size, expected, near in ((0.0, 0.0, 1e-6), (1000.0, math.log(2), 0.02)):
        weights = {
            "body.first.weight": size * torch.eye(2),
            "body.first.bias": torch.zeros(2),
            "body.second.weight": torch.eye(2),
            "body.second.bias": torch.zeros(2),
        }
        one = students(family, family.architecture({"hidden": 1}))
        done = distill(family, weights, whole(family), one, Distillation(steps=20, batch_size=50), seed=1)
        assert done.mutual_information_nats == pytest.approx(expected, abs=near)
