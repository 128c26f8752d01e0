"""Both ends: the node's, and deploy/jetson/gpu_trainer.py as a process of its own, here without a GPU.

WILDFLOWER_BOARD_PYTHON names another Python for it, such as one with Python 3.6 and torch 1.10.
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
from client_app.objectives import local_loss
from client_app.training import _fit
from messages.layouts import sent_layout
from torch import nn

from client_app import board_gpu, work, worker
from client_app.board_gpu import trace
from client_app.board_link import BoardError, about
from client_app.memory import SEGMENTS_BYTES, MemoryMeter, memory_limit
from messages.orders import LocalTraining, NodeReport, Objective, Reply, parse
from messages.packing import unpack
from models.bert import BertTiny
from models.cnn import Cnn3, Cnn10
from models.densenet import DenseNet121
from models.lenet import LeNet5
from models.resnet import ResNet18
from models.vgg import Vgg
from models.vit import VitTiny
from tests.client_app.work_orders import LENET, batch, payload, work_order
from wildflower.devices import own_report

TRAINER = Path(__file__).parents[2] / "deploy" / "jetson" / "gpu_trainer.py"
SMALL = (1, 16, 16)
EXITS = Cnn3(input_shape=SMALL, exits=(1, 2, 3))
OBJECTIVES = [
    Objective(),
    Objective(kind="masked cross entropy"),
    Objective(kind="sum of exits"),
    Objective(kind="mutual learning of exits", weight=0.7),
    Objective(kind="weighted exits", gamma=0.5, temperature=3.0),
]
FAMILIES = [
    LeNet5(input_shape=(1, 28, 28)),
    Cnn10(input_shape=SMALL, exits=(5, 10), norm="static"),
    ResNet18(input_shape=SMALL, first_channels=8, scaler=True),
    Vgg(input_shape=(3, 32)),
    VitTiny(input_shape=SMALL),
    BertTiny(),
    DenseNet121(input_shape=SMALL),
]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    path = tmp_path_factory.mktemp("board") / "gpu.sock"
    python = os.environ.get("WILDFLOWER_BOARD_PYTHON", sys.executable)
    process = subprocess.Popen(
        [python, TRAINER, "--socket", path, "--device", "cpu"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().startswith("Training on cpu with torch")
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


def trained(trainer, family, architecture, objective, training, **given):
    """The model and mean loss of `_fit`, and those of the trainer."""
    torch.manual_seed(1)
    here = family.build(architecture)
    there = copy.deepcopy(here).train()
    present = torch.arange(family.classes) != 1

    def loss(model):
        return local_loss(objective, model, present, family, architecture, 1)

    meter = MemoryMeter(torch.device("cpu"))
    torch.manual_seed(given.get("seed", 1))  # of dropout
    mean = _fit(here, loss(here), iter(examples(family)), training, meter, {}, new_statistics=True)
    given = {"seed": 1, "limit_bytes": None, "new_statistics": True} | given
    found, peak = board_gpu.fit(trainer, there, loss(there), iter(examples(family)), training, **given)
    assert peak is None  # not on a CPU
    return here, mean, there, found


def alike(here, there, tolerance):
    for name, value in there.state_dict().items():
        assert torch.allclose(here.state_dict()[name], value, rtol=0, atol=tolerance), name


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.kind)
def test_every_objective_trains_as_on_the_device(trainer, objective):
    training = LocalTraining(learning_rate=0.01, momentum=0.9, weight_decay=0.001, clip_norm=1.0)
    here, mean, there, found = trained(trainer, EXITS, EXITS.width(0.5), objective, training)
    assert found == pytest.approx(mean, abs=1e-4)
    alike(here, there, 1e-5)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_trains_as_on_the_device(trainer, family):
    architecture = family.width(0.5)
    here, mean, there, found = trained(trainer, family, architecture, Objective(), LocalTraining(learning_rate=0.001))
    assert found == pytest.approx(mean, abs=1e-3)
    alike(here, there, 1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_every_optimizer_trains_as_on_the_device(trainer, optimizer):
    training = LocalTraining(optimizer=optimizer, betas=(0.8, 0.9), learning_rate=0.001, weight_decay=0.1)
    here, mean, there, found = trained(trainer, LENET, LENET.width(1.0), Objective(), training)
    assert found == pytest.approx(mean, abs=1e-5)
    # On average: Adam's first steps make as much of a gradient that is rounding alone as of any other.
    for name, value in there.state_dict().items():
        if name.endswith("weight"):
            assert (here.state_dict()[name] - value).abs().mean() < 1e-6, name


def test_dropped_layers_and_signals_are_known():
    for family in (Vgg(input_shape=(3, 32)), *FAMILIES):
        model = family.build(family.smallest())
        graph = trace(
            model, local_loss(Objective(), model, torch.ones(family.classes).bool(), family, family.full(), 1)
        )
        named = re.findall(r'"tensor": "([^"]+)"', json.dumps(graph.steps))
        assert set(named) <= set(model.state_dict())
        assert graph.steps[-1]["operator"] == "cross_entropy"
        assert not graph.constants


# A node with a trainer


def answer(folder, order, *, config=(), kind="train", number=1):
    text = batch(order, round=number, shared_process=False).model_dump_json() if kind == "train" else ""
    config = {"partition-id": 1, "state-dir": str(folder)} | dict(config)
    return work.do(kind, text, [payload()] if kind == "train" else [], config)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(kind="masked cross entropy"),
        Objective(kind="proximal", mu=5.0),
        Objective(kind="mutual learning of exits", alpha=2.0),
    ],
    ids=lambda objective: objective.kind,
)
def test_a_node_answers_as_without_it(trainer, tmp_path, objective):
    def twice(folder, **config):
        arrays, loss = [], None
        for number in (1, 2):  # the second time with the correction that the first one left
            reply, arrays = answer(folder, work_order(1, objective=objective), config=config, number=number)
            assert parse(Reply, reply).updates[0].outcome == "trained"
            loss = parse(Reply, reply).updates[0].loss
        return unpack(arrays[0], sent_layout(LENET, LENET.width(0.5))), loss

    with_trainer, found = twice(tmp_path / "with", **{"gpu-trainer": str(trainer)})
    without, loss = twice(tmp_path / "without")
    assert found == pytest.approx(loss, abs=1e-5)
    start = unpack(payload(), sent_layout(LENET, LENET.width(0.5)))
    assert any(not torch.equal(start[name], without[name]) for name in start)
    for name, value in without.items():
        assert torch.allclose(value, with_trainer[name], rtol=0, atol=1e-5), name


def test_what_it_cannot_compute_is_trained_on_the_cpu_and_said(trainer, tmp_path, caplog):
    family = replace(LENET, norm="static")
    order = work_order(1, family, objective=Objective(kind="ordered dropout", widths=(0.25, 0.5)))
    text = batch(order, family=family, shared_process=False).model_dump_json()
    config = {"partition-id": 1, "state-dir": str(tmp_path), "gpu-trainer": str(trainer)}
    with caplog.at_level(logging.WARNING, "flwr"):
        reply, _ = work.do("train", text, [payload(family)], config)
    assert parse(Reply, reply).updates[0].outcome == "trained"
    assert "has no 'ordered dropout': trained on the CPU" in caplog.text


def test_a_node_reports_its_gpu_and_so_does_the_probe(trainer, tmp_path):
    reply, _ = answer(tmp_path, None, config={"gpu-trainer": str(trainer)}, kind="query")
    assert parse(NodeReport, reply).report["accelerator"] == "cpu"
    assert own_report(f'gpu-trainer="{trainer}"', tmp_path).accelerator == "cpu"


# When something fails


def test_work_fails_where_no_trainer_answers_and_the_report_has_no_gpu(tmp_path):
    config = {"gpu-trainer": str(tmp_path / "none.sock")}
    update = parse(Reply, answer(tmp_path, work_order(1), config=config)[0]).updates[0]
    assert update.outcome.startswith("failed: BoardError: the board's GPU trainer at")
    assert "systemctl status wildflower-gpu" in update.outcome
    assert update.report["accelerator"] is None


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
                worker.receive(link)
                worker.send(link, answer, [])

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
    assert about(trainer)["device"] == "cpu"


def begin(**changes):
    header = {
        "do": "begin",
        "protocol": board_gpu.PROTOCOL,
        "graph": [],
        "roles": [],
        "training": LocalTraining().model_dump(mode="json"),
        "seed": 1,
        "pull": 0.0,
        "pull_is_told": False,
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
        worker.send(link, header, [])
        answer, _ = worker.receive(link)
    assert words in answer["error"]
    assert not answer["out_of_memory"]
    assert about(trainer)["device"] == "cpu"


def test_an_operator_it_does_not_know_is_named():
    model = LENET.build(LENET.full())
    with pytest.raises(BoardError, match=r"has no operator .*softplus"):
        trace(model, lambda inputs, labels: nn.functional.softplus(model(inputs)).sum())
    with pytest.raises(BoardError, match="does not depend on the batch"):
        trace(model, lambda inputs, labels: model(inputs).sum() + next(model.parameters()).square().sum())


def test_training_that_outgrows_its_order_is_an_overrun(tmp_path):
    def grows(listener):
        link, _ = listener.accept()
        with link:
            worker.receive(link)
            worker.send(link, {"begun": True}, [])
            worker.receive(link)
            worker.send(link, {"loss": 1.0, "peak_bytes": 10**15}, [])
            with suppress(EOFError, ConnectionResetError):
                while True:
                    worker.receive(link)
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
        with pytest.raises(BoardError, match="has no operator"):
            trace(model, lambda inputs, labels, model=model: model(inputs).sum())
    model = Odd(nn.MaxPool2d(3, 2, 1))
    graph = trace(model, lambda inputs, labels: model(inputs).sum())
    assert graph.steps[0]["arguments"] == [{"step": 0}, 3, 2, 1, 1, False]

    def something_behind_it(inputs, labels):
        loss = model(inputs).sum()
        loss.detach()
        return loss

    with pytest.raises(BoardError, match="not what is computed last"):
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
    device = work.compute_device()
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
