"""Both ends: the node's, and deploy/jetson/gpu_trainer.py as a process of its own, here without a GPU.

WILDFLOWER_BOARD_PYTHON names another Python for it, such as one with Python 3.6 and torch 1.10.
WILDFLOWER_BOARD_DEVICE=cuda has it compute on a GPU (`make test-gpu`).
"""

import ast
import copy
import importlib.util
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.client_app.work_orders import CPU, LENET, batch, cut, payload, weights_of, work_order
from wildflower.cli.probe_command import own_report
from wildflower.client_app import board_gpu, context, frames, prepared, work
from wildflower.client_app.board_gpu import Untraceable, trace
from wildflower.client_app.board_link import about
from wildflower.client_app.chance import Chance
from wildflower.client_app.context import DeviceContext, Workplace
from wildflower.client_app.memory import SEGMENTS_BYTES, memory_limit
from wildflower.messages.orders import LocalTraining, NodeReport, Reply, parse
from wildflower.messages.packing import unpack
from wildflower.models.bert import BertTiny
from wildflower.models.cnn import Cnn3, Cnn10
from wildflower.models.densenet import DenseNet121
from wildflower.models.family import make_family
from wildflower.models.lenet import LeNet5
from wildflower.models.resnet import ResNet18
from wildflower.models.vgg import Vgg
from wildflower.models.vit import VitTiny
from wildflower.strategies.depthfl import MutualLearningOfExits
from wildflower.strategies.fedprox import ProximalTraining
from wildflower.strategies.fjord import OrderedDropout
from wildflower.strategies.hypemefed.hypemefed import SumOfExits
from wildflower.strategies.method import Training
from wildflower.strategies.rafl.mutual_learning import MutualLearning
from wildflower.strategies.recipfl.device import TaughtTraining
from wildflower.strategies.scalefl import WeightedExits
from wildflower.strategies.shared_losses import Regularizer
from wildflower.strategies.static_norm import MaskedTraining
from wildflower.strategies.statistics import TakeStatistics
from wildflower.strategies.training_steps import ClassCounts
from wildflower.strategies.wildflower import LevelTraining

BOARD = os.environ.get("WILDFLOWER_BOARD_DEVICE", "cpu")
ITS_NAME = "cpu" if BOARD == "cpu" else torch.cuda.get_device_name()
# A GPU adds up in another order. `make test-gpu` forbids it TF32, which would be a hundred times as far off.
LOOSER = 1 if BOARD == "cpu" else 10
TRAINER = Path(__file__).parents[2] / "deploy" / "jetson" / "gpu_trainer.py"
SMALL = (1, 16, 16)
EXITS = Cnn3(input_shape=SMALL, exits=(1, 2, 3))
LOCALS = [
    Training(),
    MaskedTraining(),
    SumOfExits(),
    MutualLearningOfExits(weight=0.7, alpha=0.0, ensemble=True),
    WeightedExits(gamma=0.5, temperature=3.0),
]
FAMILIES = [
    LeNet5(input_shape=(1, 28, 28)),
    Cnn10(input_shape=SMALL, exits=(5, 10), norm="static"),
    ResNet18(input_shape=SMALL, first_channels=8, scaler=True),
    Vgg(input_shape=(3, 32)),
    VitTiny(input_shape=SMALL),
    BertTiny(),
    DenseNet121(input_shape=SMALL),
    make_family({"name": "own_models:tied", "input_shape": [1, 8, 8], "classes": 10, "levels": [{}]}),
]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    path = tmp_path_factory.mktemp("board") / "gpu.sock"
    python = os.environ.get("WILDFLOWER_BOARD_PYTHON", sys.executable)
    process = subprocess.Popen(
        [python, TRAINER, "--socket", path, "--device", BOARD], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().startswith(f"Training on {BOARD}")
    yield path
    process.terminate()
    process.wait()
    process.stdout.close()


def examples(family, number=3, size=4):
    generator = torch.Generator().manual_seed(1)
    shape = (number, size, *family.input_shape)
    tokens = family.input_dtype == torch.int64
    inputs = torch.randint(0, 10, shape, generator=generator) if tokens else torch.randn(shape, generator=generator)
    return list(zip(inputs, torch.randint(0, family.classes, (number, size), generator=generator), strict=True))


class ByHand(DeviceContext):
    """A device's context with a few made-up batches and without class 1."""

    def __init__(self, family, architecture, training, board=None):
        self.family, self.architecture, self.training = family, architecture, training
        self.place, self.device, self.limits, self.earlier = Workplace(CPU, None, board), CPU, {}, None
        inputs, labels = (torch.cat(tensors) for tensors in zip(*examples(family), strict=True))
        train = SimpleNamespace(inputs=inputs, labels=labels)
        self.task = SimpleNamespace(
            loss=F.cross_entropy,
            answers=lambda outputs: outputs,
            label_kind="classes",
            sums_examples=True,
            train=train,
            batch=lambda *batch, augment: batch,
        )
        self._shard, self._generator = torch.arange(len(labels)), torch.Generator()
        self.class_counts = (torch.arange(family.classes) != 1).long()
        self.chance, self.steps_taken = Chance(1), 0

    def _within_limits(self, picks, *models):
        """The batches in the order in which the trainer gets them."""
        yield from self._shard.split(4)


def trained(trainer, family, architecture, local, training, regularizer=Regularizer(), **given):
    """The model and mean loss of training here, and those of the trainer."""
    torch.manual_seed(1)
    here = family.build(architecture)
    there = copy.deepcopy(here).train()
    torch.manual_seed(given.get("seed", 1))  # of dropout
    by_hand = ByHand(family, architecture, training)
    mean = by_hand.fit(here, local.loss(by_hand, here), regularizer=regularizer, new_statistics=True)
    given = {"seed": 1, "limit_bytes": None, "new_statistics": True, "regularizer": regularizer} | given
    graph = trace(there, local.loss(by_hand, there))
    found, peak, steps = board_gpu.fit(trainer, there, graph, iter(examples(family)), training, **given)
    assert (peak is None) == (BOARD == "cpu")
    assert steps == 3
    return here, mean, there, found


def alike(here, there, tolerance):
    for name, value in there.state_dict().items():
        assert torch.allclose(here.state_dict()[name], value, rtol=0, atol=LOOSER * tolerance), name


@pytest.mark.thorough
@pytest.mark.parametrize("local", LOCALS, ids=lambda local: type(local).__name__)
def test_every_loss_trains_as_on_the_device(trainer, local):
    training = LocalTraining(learning_rate=0.01, momentum=0.9, weight_decay=0.001, clip_norm=1.0)
    here, mean, there, found = trained(trainer, EXITS, EXITS.width(0.5), local, training)
    assert found == pytest.approx(mean, abs=LOOSER * 1e-4)
    alike(here, there, 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("strength", [0.0, 5.0])
def test_every_regularizer_trains_as_on_the_device(trainer, strength, corrected, reported):
    """Also a correction of only some parameters, and one of a layer that the model has not."""
    generator = torch.Generator().manual_seed(3)
    shapes = {n: spec.shape for n, spec in LENET.tensors(LENET.full()).items() if n.endswith("weight")}
    correction = {n: 0.1 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    regularizer = Regularizer(
        strength=strength,
        correction=correction | {"deeper.weight": torch.ones(3)} if corrected else {},
        reported=reported,
    )
    training = LocalTraining(learning_rate=0.01, momentum=0.9, weight_decay=0.001, clip_norm=1.0)
    here, mean, there, found = trained(trainer, LENET, LENET.full(), Training(), training, regularizer)
    assert found == pytest.approx(mean, abs=LOOSER * 1e-4)
    alike(here, there, 1e-5)
    plain, alone, *_ = trained(trainer, LENET, LENET.full(), Training(), training)
    changed = any(not torch.equal(plain.state_dict()[n], here.state_dict()[n]) for n in shapes)
    assert changed == bool(strength or corrected)
    assert (mean > alone + 1e-4) or not (strength and reported)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_trains_as_on_the_device(trainer, family):
    architecture = family.width(0.5)
    here, mean, there, found = trained(trainer, family, architecture, Training(), LocalTraining(learning_rate=0.001))
    assert found == pytest.approx(mean, abs=LOOSER * 1e-3)
    alike(here, there, 1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_every_optimizer_trains_as_on_the_device(trainer, optimizer):
    training = LocalTraining(optimizer=optimizer, betas=(0.8, 0.9), learning_rate=0.001, weight_decay=0.1)
    here, mean, there, found = trained(trainer, LENET, LENET.width(1.0), Training(), training)
    assert found == pytest.approx(mean, abs=LOOSER * 1e-5)
    # On average: Adam's first steps make as much of a gradient that is rounding alone as of any other.
    for name, value in there.state_dict().items():
        if name.endswith("weight"):
            assert (here.state_dict()[name] - value).abs().mean() < LOOSER * 1e-6, name


def test_dropped_layers_and_signals_are_known():
    for family in (Vgg(input_shape=(3, 32)), *FAMILIES):
        model = family.build(family.smallest())
        graph = trace(model, Training().loss(ByHand(family, family.smallest(), LocalTraining()), model))
        named = re.findall(r'"tensor": "([^"]+)"', json.dumps(graph.steps))
        assert set(named) <= set(model.state_dict())
        assert graph.steps[-1]["operator"] == "cross_entropy"
        assert not graph.constants


# A node with a trainer


def answer(folder, order, *, config=(), kind="train", number=1, family=LENET):
    train = kind == "train"
    text = batch(order, round=number, family=family, shared_process=False).model_dump_json() if train else ""
    config = {"partition-id": 1, "state-dir": str(folder)} | dict(config)
    return work.do(kind, text, [payload(family)] if train else [], config)


@pytest.fixture
def regularizers(monkeypatch):
    """The regularizers of what was trained on the board's GPU."""
    seen = []
    fit = board_gpu.fit

    def watched(*arguments, **options):
        seen.append(options["regularizer"])
        return fit(*arguments, **options)

    monkeypatch.setattr(board_gpu, "fit", watched)
    return seen


LEARNING = MutualLearningOfExits(weight=1.0, alpha=2.0, ensemble=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("local", "family", "strength", "reported"),
    [
        (MaskedTraining(), LENET, 0.0, False),
        (ProximalTraining(mu=5.0), LENET, 5.0, True),
        (LEARNING, LENET, 2.0, False),
        (LEARNING, replace(EXITS, input_shape=(1, 8, 8)), 2.0, False),
    ],
    ids=["heterofl", "fedprox", "depthfl with one exit", "depthfl"],
)
def test_a_node_answers_as_without_it(trainer, tmp_path, local, family, strength, reported, regularizers, caplog):
    half = family.width(0.5)

    def twice(folder, **config):
        arrays, loss = [], None
        for number in (1, 2):  # the second time with the correction that the first one left
            order = work_order(1, family, local=local)
            reply, arrays = answer(folder, order, config=config, number=number, family=family)
            assert parse(Reply, reply).updates[0].outcome == "trained"
            loss = parse(Reply, reply).updates[0].loss
        return unpack(arrays[0], weights_of(family, half).layout), loss

    with caplog.at_level(logging.WARNING, "flwr"):
        with_trainer, found = twice(tmp_path / "with", **{"gpu-trainer": str(trainer)})
    assert not caplog.records
    assert [(r.strength, r.reported) for r in regularizers] == [(strength, reported)] * 2
    parameters = {name for name, _ in family.build(half).named_parameters()}
    assert regularizers[0].correction == {}
    assert regularizers[1].correction.keys() == (parameters if local is LEARNING else set())
    without, loss = twice(tmp_path / "without")
    assert len(regularizers) == 2
    assert found == pytest.approx(loss, abs=LOOSER * 1e-5)
    start = cut(family, half)
    assert any(not torch.equal(start[name], without[name]) for name in start)
    for name, value in without.items():
        assert torch.allclose(value, with_trainer[name], rtol=0, atol=LOOSER * 1e-5), name
    kept = [
        [context.DeviceState(str(tmp_path / folder), "a run", 1).load("correction", 3) or {}]
        for folder in ("with", "without")
    ]
    assert kept[0][0].keys() == kept[1][0].keys() == (parameters if local is LEARNING else set())
    assert all(torch.allclose(v, kept[1][0][n], rtol=0, atol=1e-5) for n, v in kept[0][0].items())


@pytest.mark.parametrize(
    ("step", "settings", "why"),
    [
        (OrderedDropout, {"distillation": False}, "the loss is another one for every batch"),
        (LevelTraining, {}, "its trainer has no factors of gradients"),
    ],
    ids=["fjord", "wildflower"],
)
def test_what_the_board_cannot_compute_is_trained_on_the_cpu_and_that_is_said(
    trainer, tmp_path, caplog, step, settings, why
):
    """What comes out are the bits of a node without a trainer: tracing has drawn no width of FjORD's."""
    family = replace(LENET, norm="static")
    order = work_order(1, family, local=step(lower=(family.width(0.25),), **settings))
    name, arrays = order.client_step.name, []
    for config in ({"gpu-trainer": str(trainer)}, {}):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "flwr"):
            reply, returned = answer(tmp_path, order, config=config, family=family)
        assert parse(Reply, reply).updates[0].outcome == "trained"
        assert (f"cannot train {name} ({why})" in caplog.text) == bool(config)
        assert (f"Device 1: {name} is trained on the CPU" in caplog.text) == bool(config)
        arrays.append(returned)
    assert arrays[0] == arrays[1]


def test_a_loop_of_its_own_runs_on_the_cpu_and_that_is_said(trainer, tmp_path, caplog):
    """RaFL's, over two networks; the knowledge network is as large as the personal one here."""
    half = json.dumps(LENET.width(0.5).to_json())
    given = dict.fromkeys(("calibrates", "calibrates_knowledge", "merged"), False)
    local = MutualLearning(knowledge_family="", knowledge=half, first=True, drawn=True, **given)
    with caplog.at_level(logging.WARNING, "flwr"):
        reply, _ = answer(tmp_path, work_order(1, LENET, local=local), config={"gpu-trainer": str(trainer)})
    assert parse(Reply, reply).updates[0].outcome == "trained"
    name = "wildflower.strategies.rafl.mutual_learning:MutualLearning"
    assert f"cannot train {name} (it has a loop of its own, and not one model and one loss)" in caplog.text
    assert caplog.text.count(f"Device 1: {name} is trained on the CPU") == 1


def test_a_loss_that_reads_another_model_is_trained_on_the_cpu_and_that_is_said(
    trainer, tmp_path, caplog, regularizers
):
    """RecipFL's: the larger model is trained on the board, and the smaller one that it teaches here."""
    plain, taught = (TaughtTraining(taught=value) for value in (False, True))
    orders = [work_order(1, local=plain, order=0), work_order(1, local=taught, order=1, after=0)]
    text = batch(*orders, shared_process=False).model_dump_json()
    with caplog.at_level(logging.WARNING, "flwr"):
        config = {"partition-id": 1, "state-dir": str(tmp_path), "gpu-trainer": str(trainer)}
        reply, _ = work.do("train", text, [payload()], config)
    assert [update.outcome for update in parse(Reply, reply).updates] == ["trained", "trained"]
    assert len(regularizers) == 1
    assert "cannot train wildflower.strategies.recipfl.device:TaughtTraining (" in caplog.text
    assert caplog.text.count("wildflower.strategies.recipfl.device:TaughtTraining is trained on the CPU") == 1


@pytest.mark.parametrize(
    ("local", "earlier"),
    [
        (OrderedDropout(lower=(LENET.width(0.5),), distillation=False), False),
        (OrderedDropout(lower=(LENET.width(0.5),), distillation=True), False),
        (TaughtTraining(taught=True), True),
    ],
    ids=["fjord", "fjord with distillation", "recipfl"],
)
def test_losses_that_are_no_graph_of_all_batches_are_untraceable(local, earlier, monkeypatch):
    family = replace(LENET, norm="static")
    by_hand = ByHand(family, family.full(), LocalTraining())
    model = family.build(family.full()).train()
    by_hand.earlier = family.build(family.full()).eval().requires_grad_(False) if earlier else None
    monkeypatch.setattr(Chance, "traced", True)
    loss = local.loss(by_hand, model)
    with pytest.raises(Untraceable):
        trace(model, loss)
    monkeypatch.setattr(Chance, "traced", False)
    [inputs, labels], *_ = examples(family)
    assert bool(torch.isfinite(loss(inputs, labels)))  # what was tried leaves it as it was


def test_what_trains_nothing_needs_no_trainer(tmp_path, caplog):
    config = {"gpu-trainer": str(tmp_path / "none.sock")}
    for local in (TakeStatistics(), ClassCounts()):
        with caplog.at_level(logging.WARNING, "flwr"):
            reply, _ = answer(tmp_path, work_order(1, local=local), config=config)
        assert parse(Reply, reply).updates[0].outcome == "trained"
        assert "trained on the CPU" not in caplog.text


def test_a_node_reports_its_gpu_and_so_does_the_probe(trainer, tmp_path):
    reply, _ = answer(tmp_path, None, config={"gpu-trainer": str(trainer)}, kind="query")
    assert parse(NodeReport, reply).report["accelerator"] == ITS_NAME
    assert own_report(f'gpu-trainer="{trainer}"', tmp_path).accelerator == ITS_NAME


# When something fails


def test_work_fails_where_no_trainer_answers_and_the_report_has_not_its_gpu(tmp_path):
    config = {"gpu-trainer": str(tmp_path / "none.sock")}
    update = parse(Reply, answer(tmp_path, work_order(1), config=config)[0]).updates[0]
    assert update.outcome.startswith("failed: BoardError: the board's GPU trainer at")
    assert "systemctl status wildflower-gpu" in update.outcome
    own = torch.cuda.get_device_name() if torch.cuda.is_available() else None  # what this Python sees by itself
    assert update.report["accelerator"] == own


@contextmanager
def another_trainer(folder, serve):
    """A trainer that does what `serve` does with its listening socket; its address."""
    path = folder / "gpu.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(2)
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        yield path
        thread.join()


def test_a_trainer_without_memory_is_an_overrun(tmp_path):
    def out_of_memory(listener):
        for answer in ({"error": "RuntimeError: CUDA out of memory", "out_of_memory": True}, {"device": "Orin"}):
            link, _ = listener.accept()
            with link:
                frames.receive(link)
                frames.send(link, answer, [])

    with another_trainer(tmp_path, out_of_memory) as path:
        update = parse(Reply, answer(tmp_path, work_order(1), config={"gpu-trainer": str(path)})[0]).updates[0]
    assert update.outcome.startswith("refused: out of memory on the board's GPU, this device has free")
    assert update.outcome.endswith("RuntimeError: CUDA out of memory")
    assert update.overrun
    assert update.report["accelerator"] == "Orin"


LENGTH = struct.Struct("<Q")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(2**40),
        LENGTH.pack(3) + b"{{{",
        LENGTH.pack(2) + b"[]",
        LENGTH.pack(26) + b'{"sizes":[4],"tensors":[]}',
        LENGTH.pack(50) + b'{"sizes":[4],"tensors":[{"type":"pickle"}]}       abcd',
        LENGTH.pack(62) + b'{"sizes":[4],"tensors":[{"type":"float32","shape":[3]}]}      abcd',
    ],
)
def test_garbage_does_not_end_the_trainer(trainer, data):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(trainer))
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        link.settimeout(10)
        with suppress(ConnectionResetError):  # it hangs up before it has read all
            assert link.recv(1) == b""
    assert about(trainer)["device"] == ITS_NAME


def begin(**changes):
    header = {
        "do": "begin",
        "protocol": board_gpu.PROTOCOL,
        "graph": [],
        "roles": [],
        "training": LocalTraining().model_dump(mode="json"),
        "seed": 1,
        "pull": 0.0,
        "pull_is_reported": False,
        "new_statistics": False,
        "memory_bytes": None,
        "tensors": [],
    }
    return header | changes


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (begin(protocol=0), "this trainer speaks protocol"),
        (begin(graph=[{"operator": "system", "arguments": [], "options": {}}]), "there is no operator 'system'"),
        (begin(graph=[{"operator": "add", "arguments": [{"step": 7}], "options": {}}]), "step 2 reads step 7"),
        ({"do": "exec", "tensors": []}, "begin comes before 'exec'"),
        ({"do": "step", "tensors": []}, "begin comes before 'step'"),
    ],
)
def test_what_it_is_wrongly_asked_is_said(trainer, header, words):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(trainer))
        frames.send(link, header, [])
        answer, _ = frames.receive(link)
    assert words in answer["error"]
    assert not answer["out_of_memory"]
    assert about(trainer)["device"] == ITS_NAME


def test_an_operator_it_does_not_know_is_named():
    model = LENET.build(LENET.full())
    with pytest.raises(Untraceable, match=r"has no operator .*softplus"):
        trace(model, lambda inputs, labels: nn.functional.softplus(model(inputs)).sum())
    with pytest.raises(Untraceable, match="does not depend on the batch"):
        trace(model, lambda inputs, labels: model(inputs).sum() + next(model.parameters()).square().sum())


def test_training_that_outgrows_its_order_is_an_overrun(tmp_path):
    def grows(listener):
        link, _ = listener.accept()
        with link:
            frames.receive(link)
            frames.send(link, {"begun": True}, [])
            frames.receive(link)
            frames.send(link, {"loss": 1.0, "peak_bytes": 10**15}, [])
            with suppress(EOFError, ConnectionResetError):
                while True:
                    frames.receive(link)
        listener.close()  # and answers nothing more

    with another_trainer(tmp_path, grows) as path:
        update = parse(Reply, answer(tmp_path, work_order(1), config={"gpu-trainer": str(path)})[0]).updates[0]
    assert update.overrun
    assert update.outcome.endswith(f"training grew to {10**15} bytes")


def test_modules_that_compute_otherwise_are_refused():
    class Odd(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    for layer in (nn.GELU(approximate="tanh"), nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")):
        model = Odd(layer)
        with pytest.raises(Untraceable, match="has no operator"):
            trace(model, lambda inputs, labels, model=model: model(inputs).sum())
    model = Odd(nn.MaxPool2d(3, 2, 1))
    graph = trace(model, lambda inputs, labels: model(inputs).sum())
    assert graph.steps[0]["arguments"] == [{"step": 0}, 3, 2, 1, 1, False]

    def something_behind_it(inputs, labels):
        loss = model(inputs).sum()
        loss.detach()
        return loss

    with pytest.raises(Untraceable, match="not what is computed last"):
        trace(model, something_behind_it)


# On CUDA, which is not here: the calls that have to have the right arguments


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device 0 of 4 GiB as far as limits go; the shares of it that were allowed."""
    allowed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**32))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.9)
    set_fraction = lambda share, device: allowed.append((share, device))  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", set_fraction, raising=False)
    return allowed


def test_both_limits_take_the_device_that_they_get(cuda):
    device = prepared.compute_device()
    with memory_limit(2**30 - SEGMENTS_BYTES, device):
        assert cuda == [(0.5, 0)]
    assert cuda[-1] == (0.9, 0)
    spec = importlib.util.spec_from_file_location("gpu_trainer", TRAINER)
    gpu_trainer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_trainer)
    gpu_trainer.limit(device, 2**30 - SEGMENTS_BYTES)
    gpu_trainer.limit(device, None)
    gpu_trainer.limit(device, 2**40)
    assert cuda[2:] == [(0.5, 0), (1.0, 0), (1.0, 0)]


# An old Python


def test_it_is_python_3_6_and_needs_torch_alone():
    tree = ast.parse(TRAINER.read_text(), feature_version=(3, 6))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported - set(sys.stdlib_module_names) == {"torch"}
    assert "__future__" not in imported  # annotations came with 3.7


def test_both_ends_know_the_same_operators():
    tree = ast.parse(TRAINER.read_text())
    named = {
        t.id: n.value for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    there = {ast.literal_eval(key) for key in named["OPERATORS"].keys}
    sent = set(board_gpu.FUNCTIONS.values()) | board_gpu.METHODS | {name for name, _ in board_gpu.MODULES.values()}
    assert there == sent | {"shape"}
    assert ast.literal_eval(named["PROTOCOL"]) == board_gpu.PROTOCOL
