"""Every message of a wrong call says what the argument may be."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import wildflower as wf
from wildflower.plugins.user_error import UserError

X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = np.arange(60) % 3
TENSORS = TensorDataset(torch.tensor(X), torch.tensor(Y))
LOADER = DataLoader(TENSORS, batch_size=8)
TABLE = pd.DataFrame(X, columns=list("abcd"))
PAIR = "must be a pair (x, y) of arrays or tensors, a Dataset of PyTorch"
FLEET = "must be the name of a fleet, a list of memory sizes"
METHOD = "must be a class of wildflower.method.Method, or the name of a method"
MODEL = "must be a class of nn.Module, a function that returns a module"
LOSS = "must be a function of (outputs, labels) that returns the mean"
SEEDS = "seeds must be whole numbers from 0 on, such as 1, 2, 3"
RANGE = "must be two numbers (lowest, highest), such as (0.001, 0.3), or a list of two values or more"
OVER = "must be among rounds, bytes, hours, memory"
WHOLE = "must be a whole number"


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.first(x).relu())


def run(**given):
    return wf.run(**{"data": (X, Y), "rounds": 1, "devices": 4, "devices_per_round": 2, "partition": "iid", **given})


RUNS = [
    ({"rounds": "3"}, f"rounds = '3': {WHOLE} such as 20"),
    ({"rounds": 0}, "rounds = 0: must be at least 1"),
    ({"rounds": None}, "rounds = None: must be a text, a number"),
    ({"learnig_rate": 0.1}, "did you mean 'learning-rate'"),
    ({"widths": "big"}, "must be numbers such as [1, 0.5]"),
    ({"partition": "idd"}, "must be 'iid', 'dirichlet'"),
    ({"devices_per_round": 9}, "more than devices = 4"),
    ({"budget": 2}, "must be at most 1"),
    ({"budget": {"memory": 0.5}}, "did you mean 'budget.memory-fraction'"),
    ({"strategy": "fedprox", "fedprox": {"muu": 1}}, "did you mean 'fedprox.mu'"),
    ({"resume": True}, "resume=True needs the run_name"),
    ({"strategy": "heteroffl"}, "did you mean 'heterofl'"),
    ({"strategy": Net}, METHOD),
    ({"strategy": Net()}, METHOD),
    ({"strategy": 3}, METHOD),
    ({"strategy": ["heterofl"]}, METHOD),
    ({"fleet": 3}, FLEET),
    ({"fleet": []}, FLEET),
    ({"fleet": ["1 MB", 2.0]}, FLEET),
    ({"hooks": 3}, "hooks = 3: must be a list of hooks, such as [EarlyStop(patience=5)]"),
    ({"hooks": [dict]}, "is no value of a class of wildflower.rounds.hooks.RoundHook"),
    ({"model": 3}, MODEL),
    ({"model": dict}, MODEL),
    ({"model": Net, "levels": 3}, "must be a list of the arguments of each size"),
    ({"levels": [{"width": 4}]}, "levels: there is no model that has them: give model="),
    ({"loss": "cross_entropy"}, LOSS),
    ({"loss": nn.CrossEntropyLoss}, LOSS),
    ({"metric": "acuracy"}, "or one of accuracy, f1"),
    ({"metric": 3}, "must be a function of (outputs, labels) that returns a number for each example"),
    ({"data": 3}, PAIR),
    ({"data": "rows.csv"}, "files are read by task='table', 'images' or 'npz' with data_dir="),
    ({"data": X}, "data is numpy.ndarray alone: give (x, y)"),
    ({"data": (X, Y, Y)}, PAIR),
    ({"data": [1, 2, 3]}, PAIR),
    ({"data": {}}, PAIR),
    ({"data": (X, Y[:5])}, "60 inputs and 5 labels: give one for each"),
    ({"data": ([[1, 2], [1]], [0, 1])}, "inputs are a list of several shapes: give an array or a tensor"),
    ({"data": (X[:0], Y[:0])}, "must be one row or more of one number or more"),
    ({"data": (X, np.eye(3)[Y])}, "labels have shape (60, 3) with one 1 in each row: give classes as whole numbers"),
    ({"data": (X, np.eye(3)[Y] / 2)}, "must be one for each example: a class as a whole number or a text"),
    ({"data": (X, None)}, "must be one for each example"),
    ({"data": {0: (X, Y), 2: (X, Y)}}, "number them from 0 to 1, or call them by names"),
    ({"data": {0: (X, Y), 1: X}}, "data[1] is numpy.ndarray alone: give (x, y)"),
    ({"data": {0: (X, Y), 1: (X[:, :2], Y)}}, "devices have inputs of several shapes"),
    ({"data": TABLE}, "which column holds the labels? Give label=, one of a, b, c, d"),
    ({"data": TABLE.assign(y=Y), "label": "z"}, "label = 'z': data has no such column; valid are a, b, c, d, y"),
    ({"data": TABLE.assign(y=Y, e="x")}, "make numbers of it, as pandas.get_dummies"),
    ({"data": TABLE.where(TABLE > -1).assign(y=Y)}, "are missing: fill them in, as TABLE.fillna"),
    ({"data": pd.concat([TABLE, TABLE], axis=1).assign(y=Y)}, "the column 'a' twice: give each a name of its own"),
    ({"data": TABLE.head(0).assign(y=[])}, "must be one row or more"),
    ({"data": TABLE.assign(y=Y), "test": TABLE[list("bacd")].assign(y=Y)}, "its columns are ('b', 'a', 'c', 'd')"),
    ({"label": "y"}, "it names a column of a table, and data is tuple: leave it out"),
    ({"data": None, "test": (X, Y)}, "test: it belongs to data, which is not given: give data="),
    ({"test": X}, "test is numpy.ndarray alone: give (x, y)"),
    ({"test": (X[:, :3], Y)}, "its inputs are (3,), those of data are (4,)"),
    ({"test": (X, Y.astype(str))}, "its labels are U, those of data are i"),
    ({"data": (X, np.eye(3)[Y].astype(int))}, "give classes as whole numbers, y.argmax(1)"),
    ({"data": TENSORS, "train_loader": LOADER}, "train_loader: there is no such argument: give data="),
    ({"val": TENSORS}, "val: there is no such argument: give test="),
    ({"criterion": nn.CrossEntropyLoss()}, "criterion: there is no such argument: give loss="),
    ({"data": DataLoader(TENSORS, collate_fn=list)}, "a DataLoader with a collate_fn or a sampler of its own"),
    ({"data": DataLoader(TENSORS, sampler=WeightedRandomSampler([1.0] * 60, 9))}, "or a sampler of its own"),
    ({"task": "digits"}, "data and task are given: leave one of them out"),
]

OTHERS = [
    (lambda: wf.run(3), "must be the name of an experiment file; a model is given as model="),
    (lambda: wf.run(Net), "must be the name of an experiment file; a model is given as model="),
    (lambda: wf.run("nowhere.toml"), "cannot read the experiment nowhere.toml"),
    (lambda: wf.sweep(data=(X, Y), seeds=["a"]), SEEDS),
    (lambda: wf.sweep(data=(X, Y), seeds=[]), SEEDS),
    (lambda: wf.sweep(data=(X, Y), seeds="1-3"), SEEDS),
    (lambda: wf.sweep(data=(X, Y), grid=["strategy"]), "must be a dict of keys and their values"),
    (lambda: wf.sweep(data=(X, Y), grid={"strategy": "heterofl"}), "must be a list of values"),
    (lambda: wf.sweep(data=(X, Y), grid={"strategy": [Net]}), METHOD),
    (lambda: wf.sweep(data=(X, Y), rows=[{}]), "must be a dict of named settings"),
    (lambda: wf.sweep(data=(X, Y), jobs=0), f"jobs = 0: {WHOLE} from 1 on"),
    (lambda: wf.sweep(data=(X, Y), folder=3), "folder = 3: must be the name of a folder"),
    (lambda: wf.tune(data=(X, Y), search=["learning_rate"]), "must be a dict of keys and their ranges"),
    (lambda: wf.tune(data=(X, Y), search={"learning_rate": (0.3, 0.1)}), RANGE),
    (lambda: wf.tune(data=(X, Y), search={"learning_rate": [0.1, 0.2]}, trials=0), f"trials = 0: {WHOLE} from 1 on"),
    (lambda: wf.load("nowhere"), "is not the folder of a run: it has no config.json"),
    (lambda: wf.load(3), "3 is not the folder of a run: give its name"),
    (lambda: wf.compare([]), "there is nothing to compare: give runs or their folders"),
    (lambda: wf.compare([3]), "3 is neither a run nor a sweep, nor the name of a folder of one"),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("given", "told"), RUNS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_argument_of_a_run(here, given, told):
    with pytest.raises(UserError) as raised:
        run(**given)
    assert told in str(raised.value)
    assert not list(here.glob("runs/*/rounds.jsonl"))


@pytest.mark.parametrize(("call", "told"), OTHERS)
def test_a_wrong_argument_of_something_else(call, told):
    with pytest.raises(UserError) as raised:
        call()
    assert told in str(raised.value)


@pytest.mark.thorough
def test_wrong_questions_to_a_run_and_to_a_comparison():
    numbers = pd.DataFrame(X, columns=[0, 1, 2, 3]).assign(y=Y)  # columns may be numbers
    done = run(data=numbers, fleet=["2 MB"])
    comparison = wf.compare(done)
    wrong = [
        (lambda: done.model("small"), "holds no model of a tier 'small'; there are 2-MB"),
        (lambda: done.model(3), "tier = 3: must be the name of a tier, or None"),
        (lambda: done.model(which="last"), "a run has a 'best' and a 'newest' evaluation"),
        (lambda: done.predict(X[:, :3]), "and must be (examples, 4, 1)"),
        (
            lambda: done.predict(numbers[[0, 2, 3]]),
            "lacks 1 of 4 columns that the model reads: '1'; valid are 0",
        ),
        (lambda: done.predict(numbers.assign(**{"1": "a"}).drop(columns=1)), "the column '1' has no numbers"),
        (lambda: done.predict("a"), "must be numbers, one row per example"),
        (lambda: done.predict(X[:0]), "must be one row or more"),
        (lambda: done.predict((X, Y)), "of several shapes: give an array or a tensor"),
        (lambda: done.predict(torch.ones(2, 4, dtype=torch.int64)), "give x.astype('float32')"),
        (lambda: comparison.plot("round"), OVER),
        (lambda: comparison.plot(3), OVER),
        (lambda: comparison.plot([]), OVER),
        (lambda: wf.compare(done, target="high"), "must be a score that the runs are timed to reach, such as 0.9"),
        (lambda: wf.compare(done, target=90), "a target of 90 is no accuracy, which is between 0 and 1"),
    ]
    for call, told in wrong:
        with pytest.raises(UserError) as raised:
            call()
        assert told in str(raised.value)
    # Columns are taken by name, in whatever order, and others are let be.
    assert done.predict(numbers[["y", 3, 1, 0, 2]]).tolist() == done.predict(X).tolist()
    saved = json.loads((done.folder / "models/newest/models.json").read_text())
    assert saved["columns"] == ["0", "1", "2", "3"]
