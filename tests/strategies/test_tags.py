"""Methods over tags: tokens without a label, padding among them, are neither in the loss nor in what is trained."""

import math
import random
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.any_model import zoo
from tests.small_run import simulated_grid, small_config, started
from tests.strategies.by_hand import a_context, task_with
from tests.tasks import made_tasks
from wildflower.messages.orders import LocalTraining
from wildflower.models.family import make_family
from wildflower.models.weights import with_weights
from wildflower.server_app.app import run
from wildflower.server_app.run_folder import read_devices, read_rounds
from wildflower.strategies.depthfl import MutualLearningOfExits
from wildflower.strategies.ensemble import Ensemble, Teachers, teach
from wildflower.strategies.feddf import TeacherTraining
from wildflower.strategies.fjord import OrderedDropout, training_cost
from wildflower.strategies.hypemefed.hypemefed import SumOfExits
from wildflower.strategies.own_layers import TrainingWithOwnLayers
from wildflower.strategies.rafl.mutual_learning import learn_mutually
from wildflower.strategies.recipfl.device import TaughtTraining
from wildflower.strategies.scalefl import WeightedExits
from wildflower.strategies.tickets import TicketTraining, score
from wildflower.tasks.data import Vocabulary
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.losses import token_cross_entropy
from wildflower.tasks.metrics import EntityF1, TokenAccuracy
from wildflower.tasks.public import PublicData

PAD = 0


class Words(nn.Module):
    """A label for each token, from that token alone, behind each of two exits."""

    def __init__(self, classes, hidden=4):
        super().__init__()
        self.words, self.shallow = nn.Embedding(9, hidden), nn.Linear(hidden, classes)
        self.deep = nn.Linear(hidden, classes)

    def exits(self, tokens):
        read = self.words(tokens)
        return [self.shallow(read.tanh()).transpose(1, 2), self.deep(read).transpose(1, 2)]

    def forward(self, tokens):
        return self.exits(tokens)[-1]


class Word(Words):
    """The same for a single token, which is all of an input."""

    def exits(self, tokens):
        read = self.words(tokens[:, 0])
        return [self.shallow(read.tanh()), self.deep(read)]


def family(kind, positions):
    name, levels = f"{kind.__module__}:{kind.__name__}", [{"hidden": 2}, {"hidden": 4}]
    spec = {"name": name, "levels": levels, "input_shape": [positions], "classes": 3, "tokens": True}
    return make_family(spec)


def tagged(positions, tokens_without_label=(7, 8, 8, 7, 7, 8)):
    """Two texts, of which one has one labeled token and the other three; other tokens stand where there is no label."""
    tokens = torch.tensor(tokens_without_label).view(2, 3)
    tokens = torch.cat([tokens, tokens.flip(1)], dim=1)[:, :positions].clone()
    labels = torch.full((2, positions), NO_LABEL)
    tokens[0, 1], labels[0, 1] = 1, 2
    tokens[1, :3], labels[1, :3] = torch.tensor([2, 3, 4]), torch.tensor([0, 1, 2])
    return tokens, labels


ONE_BY_ONE = [  # the labeled tokens of either text, as examples
    (torch.tensor([[1]]), torch.tensor([2])),
    (torch.tensor([[2], [3], [4]]), torch.tensor([0, 1, 2])),
]
TAGS = task_with(token_cross_entropy, "classes of tokens", sums_examples=False)
CLASSES = task_with(F.cross_entropy)


def drawn(model, seed):
    """A model of which each weight follows from the seed and its place in the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def by_loss(step):
    """Value and gradients of a client step's loss."""

    def trained(kind, task, inputs, labels):
        known = family(kind, inputs.shape[1])
        model = drawn(known.build(known.full()) if isinstance(step, OrderedDropout) else kind(3), 1)
        if isinstance(step, OrderedDropout):
            model.train()
        context = a_context(known, task=task, earlier=drawn(kind(3), 2).requires_grad_(False), chance=random.Random(1))
        value = step.loss(context, model)(inputs, labels)
        value.backward()
        return float(value.detach()), [p.grad for p in model.parameters() if p.grad is not None]

    return trained


def by_mutual_learning(kind, task, inputs, labels):
    """The loss of RaFL's knowledge network, and what a step of both networks changes."""
    networks = [drawn(kind(3), seed) for seed in (1, 2)]
    parameters = [p for network in networks for p in network.parameters()]
    before = [p.detach().clone() for p in parameters]
    context = SimpleNamespace(
        task=task,
        training=LocalTraining(steps=1, learning_rate=1.0),
        steps=lambda *models: [[(inputs, labels, 1.0)]],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    )
    loss = learn_mutually(context, *networks)
    return loss, [(new - old).detach() for new, old in zip(parameters, before, strict=True)]


STEPS = {
    "fjord": by_loss(OrderedDropout(lower=(family(Words, 3).smallest(),), distillation=True)),
    "rafl": by_mutual_learning,
    "recipfl": by_loss(TaughtTraining(taught=True)),
    "feddf": by_loss(TeacherTraining()),
    "depthfl": by_loss(MutualLearningOfExits(weight=0.5, alpha=0.0, ensemble=True)),
    "scalefl": by_loss(WeightedExits(gamma=2.0, temperature=3.0)),
    "hypemefed": by_loss(SumOfExits()),
    "inclusivefl and flexifed": by_loss(TrainingWithOwnLayers()),
}


@pytest.mark.parametrize("method", STEPS)
def test_a_text_counts_as_the_mean_of_its_labeled_tokens(method):
    """That is what the method makes of these tokens as examples of one class each; texts count alike."""
    trained = STEPS[method]
    alone = [trained(Word, CLASSES, *text) for text in ONE_BY_ONE]
    loss = sum(value for value, _ in alone) / 2
    changes = [torch.stack(found).mean(dim=0) for found in zip(*(changes for _, changes in alone), strict=True)]
    assert any(bool(change.any()) for change in changes)
    for tokens, labels in (tagged(3), tagged(5), tagged(5, (5, 6, 5, 6, 5, 6))):
        found, found_changes = trained(Words, TAGS, tokens, labels)
        assert found == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found_changes, changes, rtol=1e-4, atol=1e-6)


def test_the_loss_of_fjord_is_of_a_cut():
    """Else the test above says nothing of what the cut learns from the whole."""
    known = family(Words, 3)
    model = drawn(known.build(known.full()), 1)
    whole = float(token_cross_entropy(model(tagged(3)[0]), tagged(3)[1]).detach())
    assert STEPS["fjord"](Words, TAGS, *tagged(3))[0] > whole + 0.1


def test_what_classifiers_read_is_left_out_unless_it_is_read_for_each_token():
    class Pooled(Words):
        """Its last linear layer reads the mean over tokens, and adds to each token's answer."""

        def __init__(self, classes):
            super().__init__(classes)
            self.of_all = nn.Linear(4, classes)

        def forward(self, tokens):
            return super().forward(tokens) + self.of_all(self.words(tokens).mean(1)).unsqueeze(2)

    student, teacher = drawn(Pooled(3), 1), drawn(Pooled(3), 2)
    tokens, labels = tagged(3)
    value = TaughtTraining(taught=True).loss(a_context(task=TAGS, earlier=teacher), student)(tokens, labels)
    said = teacher(tokens).softmax(1)
    soft = -(said * student(tokens).log_softmax(1)).sum(1)
    of_teacher = (soft[0, 1] + soft[1].mean()) / 2
    expected = float((token_cross_entropy(student(tokens), labels) + of_teacher).detach())
    assert float(value.detach()) == pytest.approx(expected, rel=1e-5)


def test_fjord_is_charged_for_what_the_whole_says_of_every_token():
    """The target of distillation: 4 bytes for each of 2 examples, 3 classes, and 6 tokens in place of 1."""
    charged = []
    for positions in (1, 6):
        known = family(Words, positions)
        both = [training_cost(known, known.full(), (known.smallest(),), on, 2, "sgd") for on in (True, False)]
        charged.append(both[0].peak_training_memory_bytes - both[1].peak_training_memory_bytes)
    assert charged[1] - charged[0] == 4 * 2 * 3 * 5


def test_exits_of_a_traced_tagger_see_no_padding():
    """Each exit says the same of a text, and learns the same, with more padding; the last says what the module does."""
    name, model = zoo.TAGGERS["bert_tagger"][0], tomllib.loads(zoo.TAGGERS["bert_tagger"][1])["model"]
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    texts = {"tokens": True, "vocabulary": 9, "pad_id": PAD, "labels": "tokens", "input_shape": [7], "classes": 3}
    known = make_family({"name": name, "model": model | dropped, "early_exits": True, **texts})
    torch.manual_seed(0)
    weights = known.initial()
    short, labels = torch.tensor([[1, 2, 3, 4], [5, 6, PAD, PAD]]), torch.tensor([[0, 1, 2, 0], [1, 2, -100, -100]])

    def learned(tokens, labels):
        network = with_weights(known, known.full(), {name: value.clone() for name, value in weights.items()}).train()
        loss = SumOfExits().loss(a_context(known, task=TAGS), network)
        value = loss(tokens, labels)
        value.backward()
        return network.exits(tokens), float(value.detach()), [p.grad for p in network.parameters()]

    exits, loss, gradients = learned(short, labels)
    assert len(exits) > 1
    longer, longer_loss, longer_gradients = learned(F.pad(short, (0, 3), value=PAD), F.pad(labels, (0, 3), value=-100))
    assert longer_loss == pytest.approx(loss)
    torch.testing.assert_close(longer_gradients, gradients)
    for exit, other in zip(exits, longer, strict=True):
        torch.testing.assert_close(other[..., :4], exit)
    alone = known.own()
    alone.load_state_dict(weights, strict=False)
    torch.testing.assert_close(exits[-1][1:, :, :2], alone.train()(short[1:, :2]))


# LotteryFL: when a device prunes


def a_ticket_scores(metric, rows, labels):
    """What tickets score on texts in two batches, whose answers stand in their first column of tokens."""
    answers = F.one_hot(torch.tensor(rows), 3).float().transpose(1, 2)
    task = SimpleNamespace(label_kind="classes of tokens", metric=metric, classes=3, answers=lambda logits: logits)
    batches = [(answers[:1], torch.tensor(labels[:1])), (answers[1:], torch.tensor(labels[1:]))]
    return score(SimpleNamespace(task=task, one_pass=lambda model: batches), nn.Identity())


def test_a_ticket_over_tags_is_scored_by_the_tasks_metric_over_all_labeled_tokens():
    """Of four labeled tokens three are right: not the mean over texts, and whatever is said of padding."""
    labels = [[2, NO_LABEL, NO_LABEL], [0, 1, 2]]
    assert a_ticket_scores(TokenAccuracy(), [[2, 0, 0], [0, 1, 1]], labels) == 3 / 4
    assert a_ticket_scores(TokenAccuracy(), [[2, 1, 2], [0, 1, 1]], labels) == 3 / 4
    # Entities of the labels: a B-a alone; B-a I-a. Found: both, of which the second ends too early.
    labels, tags = [[1, NO_LABEL, NO_LABEL], [1, 2, 0]], ("O", "B-a", "I-a")
    assert a_ticket_scores(EntityF1(tags), [[1, 2, 2], [1, 0, 0]], labels) == 1 / 2


def test_a_ticket_prunes_by_that_score(monkeypatch):
    """Three of four labeled tokens are right: above 0.7 and below 0.8."""
    model = Words(3)
    with torch.no_grad():
        model.words.weight.zero_()
        for token, answer in ((1, 2), (2, 0), (3, 1), (4, 1)):
            model.words.weight[token, answer] = 1.0
        model.deep.weight.copy_(torch.eye(3, 4))
        model.deep.bias.zero_()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    specs = {
        name: SimpleNamespace(shape=value.shape, dtype=value.dtype, frozen=False) for name, value in weights.items()
    }
    task = SimpleNamespace(**vars(TAGS) | {"metric": TokenAccuracy(), "classes": 3})

    def kept(threshold):
        known = SimpleNamespace(tensors=lambda architecture: specs)
        step = TicketTraining(prunings=0, begins=True, pruned=0.5, threshold=threshold, target=0.1)
        sent = {name: value.flatten() if value.dim() > 1 else value for name, value in weights.items()}
        context = SimpleNamespace(
            family=known,
            architecture=None,
            device=torch.device("cpu"),
            received={"weights": sent, "initial": weights},
            keep=lambda name, tensors: None,
            keeps=True,
            task=task,
            build=lambda found: (
                model.load_state_dict({n: v.view(weights[n].shape) for n, v in found.items()}) and model
            ),
            one_pass=lambda model: [tagged(5)],
            fit=lambda model, loss, factors: 0.0,
        )
        packed = step.train(context).tensor_sets["still_kept"]["deep.weight"]
        return sum(int(byte).bit_count() for byte in packed)

    assert kept(0.7) == 12 - math.ceil(0.5 * 11)
    assert kept(0.8) == 12


# FedDF, and RaFL's setting (b): what the server learns of public texts

TEXTS = [[1, 2, 3], [4, PAD, PAD], [5, 6, PAD], [7, 8, 1]]


def public(positions):
    inputs = torch.tensor([[*text, *[PAD] * (positions - 3)] for text in TEXTS], dtype=torch.int32)
    return PublicData(inputs, None, Vocabulary(9, PAD), of_tokens=True)


def taught(positions, said_of_padding):
    """What two teachers say, and a student after two steps; its figures."""
    known, data = family(Words, positions), public(positions)
    models = [drawn(known.build(known.full()), seed) for seed in (1, 2, 3)]
    teachers = Teachers(data, 3)
    for number, model in enumerate(models):
        words = next(p for name, p in model.named_parameters() if name.endswith("words.weight"))
        with torch.no_grad():
            words[PAD] = said_of_padding * (number + 1)
        if number < 2:
            teachers.add(model)
    student = {name: value.clone() for name, value in models[2].state_dict().items()}
    how = Ensemble(steps=2, batch_size=2, learning_rate=0.05)
    weights, figures = teach(known, known.full(), student, teachers.take_mean(), data, how, 1, "contiguous")
    return models, student, weights, figures


def test_the_server_learns_of_public_texts_without_their_padding():
    """The divergence is the mean over texts of the mean over their tokens, from the teachers' mean logits."""
    models, student, weights, figures = taught(3, 0.0)
    with torch.no_grad():
        of_texts = []
        for text in TEXTS:
            tokens = torch.tensor([[token for token in text if token != PAD]])
            first, second, own = (model(tokens)[0].T for model in models)
            p, q = ((first + second) / 2).softmax(1), own.softmax(1)
            of_texts.append(float((p * (p / q).log()).sum(1).mean()))
    assert figures["ensemble_loss_before_nats"] == pytest.approx(sum(of_texts) / 4, rel=1e-4)
    [words] = [name for name in weights if name.endswith("words.weight")]
    assert torch.equal(weights[words][PAD], student[words][PAD])
    assert not torch.equal(weights[words][1:], student[words][1:])
    for positions, of_padding in ((5, 0.0), (5, 3.0)):
        _, _, others, other_figures = taught(positions, of_padding)
        assert other_figures == figures
        others[words][PAD] = weights[words][PAD]
        assert all(torch.equal(others[name], value) for name, value in weights.items())


def test_a_teacher_may_say_anything_of_padding():
    """Even what would be refused elsewhere; what is added up is 0 there."""
    known, data = family(Words, 3), public(3)
    model = drawn(known.build(known.full()), 1)
    words = next(p for name, p in model.named_parameters() if name.endswith("words.weight"))
    with torch.no_grad():
        words[PAD] = float("inf")
    teachers = Teachers(data, 3)
    teachers.add(model)
    mean = teachers.take_mean()
    assert mean.shape == (4, 3, 3)
    assert not mean[1, :, 1:].any()
    assert torch.isfinite(mean).all()


def test_public_inputs_that_are_no_texts_have_no_padding():
    signals = PublicData(torch.zeros(5, 2, 7), (torch.zeros(2), torch.ones(2)), of_tokens=True)
    assert signals.positions == (7,)
    assert signals.tags(torch.arange(2)).tolist() == [[0] * 7] * 2
    assert replace(signals, of_tokens=False).tags(torch.arange(2)) is None


# Whole runs


PUBLIC = {"public.task": "parities", "public.examples": 20, "ensemble.steps": 4, "ensemble.batch-size": 8}
RUNS = {  # FedDF and LotteryFL give all devices one architecture
    "fjord": {"strategy": "fjord", "distillation.steps": 1},
    "rafl": {"strategy": "rafl", "rafl.searcher": "pool"},
    "rafl ensemble": {"strategy": "rafl", "rafl.searcher": "pool", "rafl.fusion": "ensemble"} | PUBLIC,
    "recipfl": {"strategy": "recipfl", "recipfl.hidden": 8, "recipfl.decoder-hidden": 8, "recipfl.tile": 8},
    "feddf": {"strategy": "feddf"} | PUBLIC,
    "lotteryfl": {"strategy": "lotteryfl", "lotteryfl.threshold": 0.0},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", RUNS)
def test_devices_of_several_widths_train_a_tagger(method, tmp_path, monkeypatch):
    made_tasks.of_tokens(monkeypatch)
    keys = {"task": "parities", "family": "own_traced:Reader", "partition": "iid", "examples-per-device": 0}
    keys |= {"rounds": 1, "evaluate-every": 1, "devices-per-round": 6, "below-smallest": "smallest"}
    folder = run(simulated_grid(), small_config(tmp_path, **keys, **RUNS[method]))
    devices = list(read_devices(folder))
    assert {device.outcome for device in devices} == {"trained"}
    sizes = {"fjord": 3, "recipfl": 3, "rafl": 2}.get(method.split()[0], 1)
    assert len({device.parameters for device in devices}) == sizes
    assert read_rounds(folder)[-1].metric == "token_accuracy"


def test_a_knowledge_network_that_answers_once_for_an_input_is_refused(tmp_path, monkeypatch):
    made_tasks.of_tokens(monkeypatch)
    keys = {"task": "parities", "family": "own_traced:Reader", "partition": "iid", "examples-per-device": 0}
    with pytest.raises(ValueError, match=r"rafl\.knowledge-family = 'bert-tiny': it answers for an input as a whole"):
        started(small_config(tmp_path, **keys, **RUNS["rafl"] | {"rafl.knowledge-family": "bert-tiny"}))


def test_a_device_counts_its_tokens_of_each_class(monkeypatch):
    task = made_tasks.of_tokens(monkeypatch)
    examples = task.shard(0).train
    labels = [label for row in task.train.labels[examples].tolist() for label in row]
    assert task.class_counts(examples).tolist() == [labels.count(0), labels.count(1)]
    assert len(labels) > labels.count(0) + labels.count(1)
