import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_app.meanings import MEANINGS

from server_app.config import OTHER_NAMES, ConfigError, RunConfig, sampled_devices
from server_app.keys import listed_keys, missing_keys
from strategies import STRATEGIES
from strategies.fedprox import FedProx

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def flat(table, prefix=""):
    """Nested tables as Flower flattens them: fedprox.mu."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def test_the_keys_and_defaults_of_pyproject_are_those_of_the_model():
    table = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    keys = dict(flat(table))
    defaults = RunConfig().to_dict()
    missing = missing_keys(defaults, keys)
    assert not missing, missing
    unknown = [key for key in keys if key not in defaults]
    assert not unknown, f"pyproject.toml, [tool.flwr.app.config], has keys that RunConfig lacks: {unknown}"
    assert list(keys) == list(defaults)
    assert keys == defaults
    assert {key: type(value) for key, value in keys.items()} == {key: type(value) for key, value in defaults.items()}
    assert RunConfig.from_run_config(keys) == RunConfig()


def test_the_settings_of_every_method_are_those_of_its_parameters():
    defaults = {
        f"{method.replace('-', '_')}__{setting.name}": setting.default
        for method, (_, params) in STRATEGIES.items()
        for setting in fields(params)
    }
    found = {name: field.default for name, field in RunConfig.model_fields.items() if "__" in name}
    assert {name: found[name] for name in found if not name.startswith("distillation__")} == defaults


@dataclass(frozen=True)
class MineParams:
    damping: float = 0.5
    widths: tuple[float, ...] = ()
    rule: Literal["mean", "median"] = "mean"


def test_settings_of_a_new_method_are_asked_for_line_by_line(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "my-own", (FedProx, MineParams))
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({"strategy": "my-own"})
    where, *lines = str(error.value).splitlines()
    assert where == "server_app/config.py, class RunConfig, lacks settings of a method; add:"
    assert [line.partition("  #")[0] for line in lines] == [
        "    my_own__damping: float = 0.5",
        "    my_own__widths: Numbers = ()",
        "    my_own__rule: Literal['mean', 'median'] = 'mean'",
    ]


def test_keys_that_pyproject_lacks_are_told_as_lines_to_add(tmp_path, monkeypatch):
    file = tmp_path / "pyproject.toml"
    left_out = ("strategy", "rounds", "resume", "fedprox.mu")
    lines = PYPROJECT.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if not line.startswith(tuple(f"{key} = " for key in left_out))))
    monkeypatch.setattr("server_app.config.listed_keys", lambda: listed_keys(file))
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({})
    assert str(error.value).splitlines() == [
        "pyproject.toml, [tool.flwr.app.config], lacks keys, which Flower would refuse; add:",
        'strategy = "heterofl"',
        "rounds = 20",
        "fedprox.mu = 0.01",
        "resume = false",
    ]


def test_an_installation_without_the_apps_pyproject_is_not_asked(tmp_path):
    assert listed_keys(tmp_path / "pyproject.toml") is None
    another = tmp_path / "another.toml"
    another.write_text('[project]\nname = "another"\n')
    assert listed_keys(another) is None
    assert listed_keys(PYPROJECT) == tuple(RunConfig().to_dict())


def test_what_keys_mean_stands_beside_them_in_pyproject_as_well():
    section = PYPROJECT.read_text().partition("[tool.flwr.app.config]\n")[2].partition("\n[")[0]
    lines = [
        re.fullmatch(r"(\S+) = (?:\"[^\"]*\"|[^\"#]*?) *# (.+)", line) for line in section.splitlines() if "=" in line
    ]
    assert {line[1]: line[2] for line in lines} == MEANINGS
    assert list(MEANINGS) == list(RunConfig().to_dict())


def test_a_configuration_comes_back():
    config = RunConfig.from_run_config(
        {
            "strategy": "fedprox",
            "fedprox.mu": 0.3,
            "widths": "1, 0.3333333333333333, 0.1",
            "decay-rounds": "40, 80",
            "learning-rate": 1,
            "resume": True,
        }
    )
    assert config.fedprox__mu == 0.3
    assert config.widths == (1.0, 0.3333333333333333, 0.1)
    assert config.learning_rate == 1.0
    assert RunConfig.from_run_config(config.to_dict()) == config
    assert all(isinstance(value, str | int | float | bool) for value in config.to_dict().values())
    assert config.to_dict()["widths"] == "1, 0.3333333333333333, 0.1"


@given(
    st.lists(st.floats(1e-6, 1), min_size=1, max_size=5, unique=True),
    st.floats(1e-9, 1e3),
    st.lists(st.integers(1, 10**6), max_size=4),
)
def test_no_number_loses_a_digit_on_the_way(widths, rate, rounds):
    config = RunConfig(widths=tuple(widths), learning_rate=rate, decay_rounds=tuple(map(float, rounds)))
    assert RunConfig.from_run_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "learning-rate"),
        ("learningrate", "learning-rate"),
        ("num-server-rounds", "rounds"),
        ("device", "devices"),
        ("fedprox.m", "fedprox.mu"),
        ("fedprox-mu", "fedprox.mu"),
        ("heterofl.dynamics", "heterofl.dynamic"),
    ],
)
def test_an_unknown_key_is_named_with_its_value_and_the_nearest(key, meant):
    with pytest.raises(ConfigError, match=f"unknown key '{key}' = 3: did you mean .*'{meant}'"):
        RunConfig.from_run_config({key: 3})


@pytest.mark.parametrize("key", OTHER_NAMES)
def test_what_a_key_is_called_elsewhere_is_understood(key):
    assert key not in RunConfig().to_dict()
    for written in (key, key.upper().replace("-", "_")):
        with pytest.raises(ConfigError, match=rf"unknown key '{written}' = 1: did you mean '{OTHER_NAMES[key]}'\?$"):
            RunConfig.from_run_config({written: 1})
    assert OTHER_NAMES[key] in RunConfig().to_dict()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("zzz", "'wildflower config' lists all 99"),
        ("zzz.zzz", "'wildflower config' lists all 99"),
        ("heterofl.zzz", "heterofl has heterofl.dynamic, heterofl.statistics-devices"),
    ],
)
def test_a_key_that_is_near_nothing_is_told_where_to_look(key, words):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({key: 1})
    assert str(error.value) == f"unknown key '{key}' = 1: {words.replace('99', str(len(RunConfig.model_fields)))}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rounds", "ten"),
        ("rounds", "10"),
        ("rounds", 2.5),
        ("rounds", True),
        ("rounds", 0),
        ("devices", -1),
        ("workers", 0),
        ("devices-per-round", 0),
        ("batch-size", 0),
        ("local-steps", -1),
        ("resume", "true"),
        ("resume", 1),
        ("strategy", 3),
        ("learning-rate", "0.1"),
        ("learning-rate", 0.0),
        ("learning-rate", -0.1),
        ("learning-rate", float("nan")),
        ("learning-rate", float("inf")),
        ("momentum", 1.0),
        ("memory-fraction", 0.0),
        ("memory-fraction", 1.5),
        ("deadline-seconds", -1.0),
        ("alpha", 0.0),
        ("test-fraction", 1.0),
        ("seed", -1),
        ("seed", 2**32),
        ("over-selection", -0.5),
        ("partition", "random"),
        ("optimizer", "lion"),
        ("below-smallest", "drop"),
        ("fedavg.use", "all-medium"),
        ("fedprox.mu", -1.0),
        ("fedadam.beta-2", 1.0),
        ("heterofl.dynamic", "yes"),
        ("depthfl.ramp-rounds", -1),
        ("depthfl.alpha", -0.1),
        ("hypemefed.guess", "both"),
        ("scalefl.gamma", -0.5),
        ("scalefl.temperature", 0.0),
        ("scalefl.widths", "1, half"),
        ("widths", "1, half"),
        ("widths", "1; 0.5"),
        ("widths", True),
        ("widths", [1, "half"]),
        ("widths", [1, True]),
        ("widths", [10**400]),
        ("widths", {}),
        ("decay-rounds", "soon"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(key, value):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({key: value})
    assert str(error.value).startswith(f"{key} = {value!r}: ")


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("rounds", "ten", "must be a whole number such as 20"),
        ("rounds", 2.5, "must be a whole number such as 20"),
        ("learning-rate", "high", "must be a number such as 0.05"),
        ("resume", "yes", "must be true or false"),
        ("strategy", 3, "must be a text such as 'heterofl'"),
        ("run-name", 3, "must be a text in quotes"),
        ("widths", "1, half", "must be numbers such as [1, 0.5] or '1, 0.5'"),
        ("decay-rounds", [{}], "must be numbers such as [1, 0.5] or '1, 0.5'"),
    ],
)
def test_a_value_of_another_type_ends_with_what_would_be_right(key, value, right):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({key: value})
    assert str(error.value) == f"{key} = {value!r}: {right}"


@pytest.mark.parametrize("written", ["1, 0.5", "[1, 0.5]", [1, 0.5], [1.0, 0.5]], ids=str)
def test_a_list_may_be_written_as_a_list_or_as_text(written):
    config = RunConfig.from_run_config({"widths": written})
    assert config.widths == (1.0, 0.5)
    assert config.to_dict()["widths"] == "1, 0.5"


@pytest.mark.parametrize("key", ["partition", "optimizer", "below-smallest", "fedavg.use"])
def test_the_right_values_are_told(key):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({key: "wrong"})
    assert repr(RunConfig().to_dict()[key]) in str(error.value)


def test_all_wrong_values_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({"rounds": 0, "seed": -1})
    assert "rounds = 0" in str(error.value)
    assert "seed = -1" in str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"strategy": "fedavgg"}, "strategy = 'fedavgg': no such strategy; did you mean 'fedavg'"),
        ({"task": "digit"}, "task = 'digit': no such task; did you mean 'digits'"),
        ({"family": "resnet-18"}, "family = 'resnet-18': no such family; did you mean 'resnet18'"),
        ({"strategy": "quantum"}, "strategy = 'quantum': no such strategy; valid are anycostfl, depthfl, fedadam,"),
        ({"devices-per-round": 21}, "devices-per-round = 21: more than devices = 20"),
        (
            {"devices-per-round": 16, "over-selection": 0.5},
            "devices-per-round = 16: more than devices = 20 (over-selection = 0.5 asks 24)",
        ),
        ({"widths": ""}, "widths = '': at least one width is needed"),
        ({"widths": "1, 0"}, "widths = '1, 0': every width is above 0 and at most 1"),
        ({"widths": "1.5"}, "widths = '1.5': every width is above 0 and at most 1"),
        ({"widths": "nan"}, "widths = 'nan': every width"),
        (
            {"strategy": "hypemefed", "both-models": True},
            "both-models = True: hypemefed would count a device that trains two models twice in the deep layers, with "
            "its own and with what hypemefed.fill = 'hypernetwork' adds for its smaller one: false, or set that to "
            "'owners'",
        ),
        (
            {"strategy": "recipfl", "both-models": True},
            "both-models = True: recipfl says itself what strong devices train: leave it false, and see "
            "recipfl.transfer",
        ),
        (
            {"strategy": "depthfl", "both-models": True, "depthfl.alpha": 0.1},
            "both-models = True: with depthfl.alpha = 0.1 a device corrects the training of one model, not of two: "
            "leave it false, or set depthfl.alpha = 0",
        ),
        ({"scalefl.widths": "0, 1"}, "scalefl.widths = '0, 1': every width is above 0 and at most 1"),
        ({"widths": "1, 0.5, 0.5"}, "widths = '1, 0.5, 0.5': a width is listed twice"),
        ({"decay-rounds": "2.5"}, "decay-rounds = '2.5': round numbers from 1"),
        ({"betas": "0.9"}, "betas = '0.9': two numbers in [0, 1)"),
        ({"betas": "0.9, 1"}, "betas = '0.9, 1': two numbers in [0, 1)"),
        ({"decay-rounds": "0"}, "decay-rounds = '0': round numbers from 1"),
        ({"decay-rounds": "inf"}, "decay-rounds = 'inf': round numbers from 1"),
        (
            {"run-name": "../elsewhere"},
            "run-name = '../elsewhere': the name of one folder, without /",
        ),
        (
            {"fleet": "", "over-selection": 0.5},
            "over-selection = 0.5: needs a fleet or deadline-seconds to tell who is late",
        ),
        (
            {"partition": "natural", "examples-per-device": 50},
            "examples-per-device = 50: partition = 'natural' says itself who holds what",
        ),
        (
            {"partition": "strong-and-weak"},
            "strong-devices = 0: partition = 'strong-and-weak' needs 1 to 19 of the 20 devices",
        ),
        (
            {"partition": "strong-and-weak", "strong-devices": 2, "test-fraction": 0.1},
            "partition = 'strong-and-weak': deals out all examples, and the test set too",
        ),
        (
            {"strategy": "recipfl", "recipfl.hidden": 10},
            "recipfl.hidden = 10: a multiple of 4",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_an_impossible_combination_is_named(values, words):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config(values)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "adamw", "momentum": 0.0},
        {"fleet": "", "devices-per-round": 100},
        {"fleet": "", "over-selection": 0.5, "deadline-seconds": 60.0},
        {"partition": "dirichlet", "examples-per-device": 50},
        {"devices-per-round": 20},
        {"widths": 1},
        {"widths": 0.5, "decay-rounds": 7},
        {"strategy": "federated-dropout", "federated-dropout.statistics-devices": 3},
    ],
    ids=str,
)
def test_what_is_possible_is_taken(values):
    config = RunConfig.from_run_config(values)
    assert RunConfig.from_run_config(config.to_dict()) == config


def test_over_selection_is_told_only_where_it_is_set():
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({"devices-per-round": 21})
    assert str(error.value) == "devices-per-round = 21: more than devices = 20"


def test_over_selection_asks_more():
    assert [sampled_devices(10, share) for share in (0.0, 0.3, 1.0)] == [10, 13, 20]


def test_links_of_real_devices_may_set_a_budget():
    assert RunConfig.from_run_config({"fleet": "", "transfer-seconds": 10}).transfer_seconds == 10.0


@pytest.mark.parametrize(
    ("values", "ignored"),
    [
        ({}, []),
        ({"strategy": "fedprox", "fedprox.mu": 0.3}, []),
        ({"strategy": "fedavg", "fedprox.mu": 0.3}, ["fedprox.mu"]),
        ({"strategy": "fedavg", "fedprox.mu": 0.01}, []),  # its default
        ({"strategy": "fedavg", "rounds": 7, "widths": 1}, []),
        ({"distillation.batch-size": 8}, ["distillation.batch-size"]),
        ({"distillation.steps": 1, "distillation.batch-size": 8}, []),
        ({"strategy": "model-search", "heterofl.dynamic": True, "model-search.epsilon": 0.5}, ["heterofl.dynamic"]),
    ],
)
def test_keys_of_other_methods_are_told_from_those_that_are_read(values, ignored):
    assert list(RunConfig.from_run_config(values).ignored()) == ignored
