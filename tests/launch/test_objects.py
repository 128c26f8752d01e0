"""Experiments of objects in Python: what is written of them, and what cannot be."""

import linecache
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wildflower as wf
from wildflower.launch.before import check_buildable
from wildflower.launch.experiment_file import beside, resolve
from wildflower.launch.instance import add_instance
from wildflower.launch.source import Source
from wildflower.server_app.inputs import task_spec
from wildflower.strategies.heterofl import HeteroFL
from wildflower.tasks.task import load_task

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 12)).astype(np.float32), np.arange(60) % 3
PAIR = (X, Y)


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def net_class():
    class Net(nn.Module):
        def __init__(self, width: int = 8, classes: int = 3):
            super().__init__()
            self.first, self.head = nn.Linear(12, width), nn.Linear(width, classes)

        def forward(self, x):
            return self.head(self.first(x).relu())

    return Net


def net_function():
    def make(classes):
        return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, classes))

    return make


def tied():
    module = nn.Sequential(
        *(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 12)),
        *(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3)),  # which can be cut, as most of it must be
    )
    module[2].weight = module[0].weight
    return module


def built(file):
    """What the run of an experiment file would train: its task and its first global model."""
    with beside(file):
        config = resolve(file, []).config
        engine, _ = check_buildable(config)
        return load_task(task_spec(config)), engine.method


@pytest.mark.parametrize(
    ("model", "widths"),
    [
        (net_class(), {"first.weight": (8, 12), "first.bias": (8,), "head.weight": (3, 8), "head.bias": (3,)}),
        (partial(net_class(), width=5), {"first.weight": (5, 12), "head.weight": (3, 5)}),
        (net_function(), {"0.weight": (8, 12), "2.bias": (3,)}),
        (tied(), {"0.weight": (12, 12), "1.running_mean": (12,), "2.bias": (12,), "3.weight": (40, 12)}),
    ],
    ids=["class", "partial", "function", "instance"],
)
def test_a_model_of_any_form_is_written_as_an_experiment(model, widths, runs):
    whole = [{}] if isinstance(model, nn.Module) else None  # tied weights are not cut
    fleet = ["2 GB", "1 GB", "2 GB"]
    run = wf.run(model=model, levels=whole, data=PAIR, strategy="fedavg", fleet=fleet, rounds=2, devices=6)
    task, method = built(run.folder / "experiment/experiment.toml")
    shapes = {name: tuple(tensor.shape) for name, tensor in method.weights.items()}
    assert widths.items() <= shapes.items()
    assert (task.classes, task.input_shape, len(task.train), len(task.test)) == (3, (12,), 48, 12)
    assert run.experiment == (run.folder / "experiment/experiment.toml").read_text()
    assert 'strategy = "fedavg"' in run.experiment
    assert "2-GB" in (run.folder / "experiment/fleet.toml").read_text()
    if isinstance(model, nn.Module):  # an instance's weights are the first ones
        assert torch.equal(method.weights["0.weight"], model[0].weight)
        assert "2.weight" not in method.weights  # it is tied to 0.weight


def test_levels_are_sizes_of_a_class(runs):
    run = wf.run(model=net_class(), levels=[{"width": 4}, {"width": 8}], data=PAIR, fleet="five-memories", devices=6)
    _, method = built(run.folder / "experiment/experiment.toml")
    assert [arch.widths for arch in method.family.candidates([1])] == [(2,), (1,)]


def test_the_same_call_goes_on_and_one_of_other_objects_does_not(runs):
    runs.waits = True
    Net, given = net_class(), {"data": PAIR, "fleet": ["2 GB"], "rounds": 2, "devices": 6, "run_name": "one"}
    with pytest.raises(KeyboardInterrupt, match="1 of 2 rounds are in"):
        wf.run(model=Net, **given)
    runs.waits = False
    with pytest.raises(wf.SettingsError, match=r"own_model\.py is of other objects than these: give the same model"):
        wf.run(model=net_function(), **given, resume=True)
    run = wf.run(model=Net, **given, resume=True)
    assert (run.status, len(run.rounds)) == ("finished", 2)


def test_a_sweep_over_methods_of_ones_own(runs):
    class Half(HeteroFL):
        pass

    swept = wf.sweep(
        model=net_class(), data=PAIR, fleet=["2 GB"], devices=6, seeds=[1, 2], grid={"strategy": [Half, "fedavg"]}
    )
    assert swept.folder == Path("runs/net-sweep").absolute()
    assert list(swept.table["strategy"]) == ["half:Half", "fedavg"] * 2
    assert "class Half(HeteroFL)" in (swept.folder / "experiment/half.py").read_text()
    assert swept.runs[0].experiment.startswith("fleet = ")
    again = wf.sweep(
        model=net_class(), data=PAIR, fleet=["2 GB"], devices=6, seeds=[1, 2], grid={"strategy": [Half, "fedavg"]}
    )
    assert len(again.runs) == len(runs.asked) == 4
    rows = {"mine": {"strategy": Half}, "theirs": {"strategy": "heterofl"}}
    assert len(wf.sweep(model=net_class(), data=PAIR, rows=rows, seeds=[1], folder="rows").runs) == 2


def test_objects_over_an_experiment_file(runs):
    Path("mine.py").write_text("from wildflower.strategies.heterofl import HeteroFL\nclass Mine(HeteroFL): pass\n")
    Path("exp.toml").write_text('strategy = "mine:Mine"\nrounds = 2\nwidths = [1, 0.5]\n[fedprox]\nmu = 0.5\n')
    run = wf.run("exp.toml", model=net_class(), data=PAIR, devices=6, fleet="five-memories")
    assert (run.config["strategy"], run.config["widths"], run.config["fedprox.mu"]) == ("mine:Mine", "1, 0.5", 0.5)
    assert (run.folder / "experiment/mine.py").is_file()


@pytest.mark.parametrize(
    ("fleet", "words", "devices"),
    [
        ({"phone": "2 GB", "board": {"memory": "512 MB", "speed": 0.5}}, ['name = "phone"', "speed = 0.5"], 20),
        ([{"memory": "2 GB", "count": 2}, {"name": "b", "memory": "1 GB", "count": 3}], ['"group-1"', "count = 3"], 5),
        ({"reference": "20 GFLOP/s", "group": [{"memory": "2 GB"}]}, ['reference = "20 GFLOP/s"'], 20),
    ],
)
def test_fleets(fleet, words, devices, runs):
    run = wf.run(model=net_class(), data=PAIR, fleet=fleet, partition="iid", budget=0.5)
    text = (run.folder / "experiment/fleet.toml").read_text()
    assert all(word in text for word in words)
    assert (run.config["devices"], run.config["budget.memory-fraction"]) == (devices, 0.5)


def late(outputs, labels):
    return (outputs - labels).abs().mean()


HALF = 0.5


def close(outputs, labels):
    return ((outputs - labels).abs() < HALF).float()


def test_a_loss_and_a_metric(runs):
    numbers = X.sum(axis=1)
    run = wf.run(model=net_class(), data=(X, numbers), loss=own(late), metric=own(close), devices=3, fleet=["2 GB"])
    file = run.folder / "experiment/experiment.toml"
    with beside(file):
        task = load_task(task_spec(resolve(file, []).config))
        outputs, labels = torch.tensor([[0.0], [2.0]]), torch.tensor([1.0, 2.25])
        assert task.loss(outputs, labels) == pytest.approx(0.625)
        assert task.summed_loss(outputs, labels) == pytest.approx(1.25)
        assert task.metric.name == "close"
        assert task.metric.value(task.metric.sums(outputs, labels), 2) == 0.5
    module = wf.run(model=net_class(), data=PAIR, loss=nn.CrossEntropyLoss(label_smoothing=0.5), devices=3)
    file = module.folder / "experiment/experiment.toml"
    with beside(file):
        task = load_task(task_spec(resolve(file, []).config))
        logits = torch.tensor([[3.0, 0.0, 0.0]])
        expected = nn.functional.cross_entropy(logits, torch.tensor([0]), label_smoothing=0.5)
        assert task.loss(logits, torch.tensor([0])) == expected
    named = wf.run(model=net_class(), data=PAIR, metric="matthews", devices=3)
    assert "'matthews'" in (named.folder / "experiment/own_data.py").read_text()


def own(function):
    """A copy that stands in no module, as of a notebook."""
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__module__ = "__main__"
    return copy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "there is nothing to run: give an experiment file, or model= and data="),
        ({"experiment": net_class()}, "experiment = <class .*: must be the name of an experiment file"),
        ({"model": dict}, "model = dict: must be a class of nn.Module, a function that returns a module"),
        ({"model": 3}, "model = 3: must be a class of nn.Module"),
        ({"model": lambda: nn.Linear(12, 3)}, "model: a lambda cannot be written down: write it as def"),
        ({"model": partial(net_class(), 4)}, "a partial with values by place cannot be written down"),
        ({"model": nn.Linear}, "Linear needs in_features, out_features: give them by functools.partial"),
        ({"model": nn.Linear(12, 3), "levels": [{"a": 1}]}, "levels: a module that is made already has one size"),
        ({"model": net_class(), "levels": 3}, "levels = 3: must be a list of the arguments of each size"),
        ({"model": net_class(), "family": "cnn3"}, "model and family are given: leave one of them out"),
        ({"levels": [{}], "data": PAIR}, "levels: there is no model that has them"),
        ({"data": PAIR, "task": "digits"}, "data and task are given"),
        ({"data": X}, r"data is numpy.ndarray alone: give \(x, y\)"),
        ({"data": 3}, "data is int: must be a pair"),
        ({"data": (X, Y, Y)}, "data is a tuple of 3: must be a pair"),
        ({"data": (X, Y[:-1])}, "data: 60 inputs and 59 labels"),
        ({"data": [1, 2]}, "data is a list of 2 values: must be a pair"),
        ({"data": {0: PAIR, 2: PAIR}}, "number them from 0 to 1, or call them by names"),
        ({"data": {}}, "data = {}: must be a pair"),
        ({"data": (X * np.nan, Y)}, "60 of 60 inputs hold values that are not finite"),
        ({"data": (np.zeros((9, 8, 8, 3), np.uint8), Y[:9])}, "with channels last"),
        ({"data": (X, np.eye(3)[Y])}, r"labels have shape \(60, 3\) with one 1 in each row"),
        ({"data": (X, 0 * Y)}, "all labels are alike"),
        ({"data": [PAIR, (X[:, :3], Y)]}, "devices have inputs of several shapes"),
        ({"data": [PAIR, PAIR], "partition": "iid"}, "partition = 'iid': data are given by device"),
        ({"data": [PAIR, PAIR], "devices": 3}, "devices = 3: data are given for 2 devices"),
        ({"data": PAIR, "test": (X[:, :3], Y)}, r"test: its inputs are \(3,\), those of data are \(12,\)"),
        ({"test": PAIR, "model": net_class()}, "test: it belongs to data, which is not given"),
        ({"data": PAIR, "loss": 3}, "loss = 3: must be a function of .outputs, labels."),
        ({"data": PAIR, "metric": "precision"}, "metric = 'precision': must be a function .* or one of accuracy, f1"),
        ({"data": PAIR, "strategy": dict}, "strategy = dict: must be a class of wildflower.method.Method"),
        (
            {"data": PAIR, "fleet": 3},
            r"fleet = 3: must be the name of a fleet, .* sizes such as \['2 GB'",
        ),
        ({"data": PAIR, "fleet": ["2 GB", 3]}, "must be the name of a fleet, a list of memory sizes"),
        ({"data": PAIR, "resume": True}, "needs the run_name"),
        ({"data": PAIR, "rounds": "3"}, "rounds = '3': must be a whole number"),
    ],
)
def test_a_wrong_call_says_what_the_argument_may_be(arguments, words, runs):
    with pytest.raises(wf.SettingsError, match=words):
        wf.run(**arguments)
    assert runs.asked == []
    assert not Path("runs").exists()


# Data -----------------------------------------------------------------------------------------------------------------


def arrays(run):
    found = load_file(run.folder / "experiment/data.safetensors")
    return {name: found[name] for name in ("train_inputs", "train_labels", "test_inputs", "test_labels")}


def test_all_forms_of_the_same_data_are_the_same(runs):
    import pandas as pd
    from datasets import Dataset, DatasetDict

    table = pd.DataFrame(X, columns=[f"c{number:02}" for number in range(12)]).assign(kind=Y)
    rows = Dataset.from_dict({"row": X.tolist(), "label": Y.tolist()})
    forms = [
        {"data": PAIR, "test": PAIR},
        {"data": (torch.tensor(X), torch.tensor(Y)), "test": (X.astype(np.float64), Y[:, None])},
        {"data": TensorDataset(torch.tensor(X), torch.tensor(Y)), "test": list(zip(X, Y, strict=True)) and PAIR},
        {"data": DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=7, shuffle=True), "test": PAIR},
        {"data": table, "test": table, "label": "kind"},
        {"data": rows, "test": rows},
        {"data": DatasetDict({"train": rows, "test": rows})},
        {"data": {"train": PAIR, "test": PAIR}},
    ]
    found = [arrays(wf.run(model=net_class(), **form, devices=6, run_name=f"{n}")) for n, form in enumerate(forms)]
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(other[name], tensor), name


def test_data_of_each_device_stay_with_it(runs):
    parts = {
        name: (X[rows] + number, Y[rows])
        for number, (name, rows) in enumerate(
            {"north": slice(0, 30), "south": slice(30, 50), "west": slice(50, 60)}.items()
        )
    }
    run = wf.run(model=net_class(), data=parts, test=PAIR, fleet=["2 GB"], seed=3)
    file = run.folder / "experiment/experiment.toml"
    with beside(file):
        config = resolve(file, []).config
        task = load_task(task_spec(config))
    assert (config.devices, config.devices_per_round, config.partition) == (3, 3, "natural")
    for device, (inputs, _) in enumerate(parts.values()):
        mine = task.train.inputs[task.shard(device).train]
        assert torch.equal(mine.sort(dim=0).values, torch.tensor(inputs).sort(dim=0).values)


def test_labels_that_are_names_and_images(runs):
    names = np.array(["cat", "dog", "owl"])[Y]
    images = RNG.integers(0, 256, (60, 8, 8), dtype=np.uint8)
    run = wf.run(model="cnn3", data=(images, names), devices=3)
    file = run.folder / "experiment/experiment.toml"
    with beside(file):
        task = load_task(task_spec(resolve(file, []).config))
    assert (task.label_names, task.input_shape, task.family) == (("cat", "dog", "owl"), (1, 8, 8), "cnn3")
    assert "cnn3" in run.experiment


def test_tokens_stay_whole(runs):
    class Words(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 4), nn.Linear(4, classes)

        def forward(self, x):
            return self.head(self.words(x).mean(dim=1))

    tokens = RNG.integers(0, 50, (60, 7))
    run = wf.run(model=Words, data=(tokens, Y), devices=3, strategy="fedavg")
    task, method = built(run.folder / "experiment/experiment.toml")
    assert method.weights["words.weight"].shape == (50, 4)
    assert task.prepare(task.test.inputs[:2], augment=None).dtype == torch.int64


# Source ---------------------------------------------------------------------------------------------------------------

CELLS = [
    "import torch.nn.functional as F\nfrom torch import nn\nimport numpy as np\nx = np.zeros(10**6)\nSCALE = 2.0",
    "def act(v):\n    return F.relu(v) * SCALE",
    "class Base(nn.Module):\n    def forward(self, x):\n        return self.head(act(x))",
    "class Net(Base):\n    def __init__(self, n=3):\n        super().__init__()\n        self.head = nn.Linear(12, n)",
]


def notebook(cells):
    """The names of a notebook whose cells were run, as IPython runs them."""
    main = types.ModuleType("__main__")
    for number, cell in enumerate(cells):
        name = f"/tmp/ipykernel_1/{number}.py"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), vars(main))
    return main


def test_a_class_of_a_notebook_is_written_with_what_it_uses(monkeypatch):
    main = notebook(CELLS)
    monkeypatch.setitem(sys.modules, "__main__", main)
    source = Source("model")
    source.add("Net", main.Net)
    text = source.text("A model.")
    made: dict = {}
    exec(text, made)
    assert made["Net"]()(torch.ones(1, 12)).shape == (1, 3)
    assert made["act"](torch.tensor([-1.0, 3.0])).tolist() == [0, 6]
    assert "zeros" not in text  # the notebook's own x is not what forward calls x


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            "file = open('/dev/null')\ndef make():\n    return file",
            "uses file = <_io.TextIOWrapper.* must be a function",
        ),
        ("def make():\n    return nothing_of_that_name", "make uses 'nothing_of_that_name', which is not there"),
        ("import numpy as np\ntable = np.zeros(5000)\ndef make():\n    return table", "of 5000 numbers: at most 1000"),
    ],
)
def test_what_cannot_be_written_down_is_told(cell, words, monkeypatch):
    main = notebook([cell])
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(wf.SettingsError, match=words):
        Source("model").add("make", main.make)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_module_is_written_down(kind):
    module, made, x = kind(3, 5, 2, bidirectional=True), {}, torch.ones(4, 2, 3)
    source = Source("model")
    add_instance(source, "model", module)
    exec(source.text("A model."), made)
    again = made["model"]()
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x)[0], module(x)[0])


def test_a_module_with_hooks_or_large_constants_is_refused(runs):
    hooked = nn.Linear(12, 3)
    hooked.register_forward_hook(lambda *_: None)
    large = nn.Linear(12, 3)
    large.register_buffer("table", torch.arange(5000))
    for module, words in ((hooked, "has hooks, which"), (large, "model.table is a buffer of 5000 numbers")):
        with pytest.raises(wf.SettingsError, match=f"{words}.*give the class, or a function"):
            wf.run(model=module, data=PAIR)


SCRIPT = """
import numpy as np
import wildflower as wf
from torch import nn

WIDTH = 8

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.head(self.first(x).relu())

rng = np.random.default_rng(0)
x = rng.normal(size=(90, 12)).astype(np.float32)
run = wf.run(model=Net, data=(x, x[:, :3].argmax(1)), fleet=["2 GB"], devices=3, devices_per_round=3, rounds=2,
             partition="iid", workers=1, strategy="fedavg", run_name="one")
assert run.summary.rounds == 2, run
"""


@pytest.mark.thorough
def test_a_script_runs_and_its_experiment_runs_again_with_the_same_bits():
    Path("script.py").write_text(SCRIPT)
    run = partial(subprocess.run, check=True, env={**__import__("os").environ, "PYTHONPATH": str(ROOT)})
    run([sys.executable, "script.py"])
    again = wf.run("runs/one/experiment/experiment.toml", run_name="two", workers=1)
    first = wf.load("runs/one")
    assert list(again.rounds["loss"]) == list(first.rounds["loss"])
    # The models come out in memory with the names of the class's tensors, and read what the run was given.
    tensors = first.model("2-GB").state_dict()
    net_class()().load_state_dict(tensors)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "first.weight": (8, 12),
        "first.bias": (8,),
        "head.weight": (3, 8),
        "head.bias": (3,),
    }
    inputs = np.random.default_rng(0).normal(size=(90, 12)).astype(np.float32)
    answers = first.predict(inputs, "2-GB")
    assert (answers.shape, set(answers.tolist()) <= {0, 1, 2}) == ((90,), True)
    right = float((answers == inputs[:, :3].argmax(axis=1)).mean())
    assert right > 0.4
    with pytest.raises(wf.SettingsError, match=r"inputs have shape \(2, 3\), and must be \(examples, 12\)"):
        first.predict(np.zeros((2, 3)))
    assert list(first.overview.columns)[:3] == ["delivered_score, %", "score, %", "loss"]
    assert len(first.overview.columns) <= 12
    assert first.overview.loc[2, "score, %"] == pytest.approx(100 * first.rounds.loc[2, "score"], abs=0.01)
