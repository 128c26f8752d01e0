import math
import re
import shutil
import tomllib
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from wildflower.launch.experiment_file import SettingsError, as_overrides, resolve
from wildflower.server_app import keys as keys_of_pyproject
from wildflower.server_app.config import (
    PARTS,
    READ_WITH,
    ConfigError,
    RunConfig,
    all_settings,
    descriptions,
    method_groups,
    run_groups,
)
from wildflower.server_app.keys import block_of_settings, with_block
from wildflower.server_app.listed_keys import listed_keys, missing_keys
from wildflower.server_app.near_keys import OTHER_NAMES
from wildflower.strategies import METHODS
from wildflower.strategies.distillation import Distillation
from wildflower.strategies.fedprox import FedProx
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Numbers, Params, kebab

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def flat(table, prefix=""):
    """Nested tables as Flower flattens them: fedprox.mu."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# Every setting stands once


def test_the_block_of_pyproject_is_made_from_the_settings():
    assert with_block(PYPROJECT.read_text(), block_of_settings()) == PYPROJECT.read_text(), (
        "run `python -m wildflower.server_app.keys`"
    )
    lines, meanings = block_of_settings().splitlines(), descriptions()
    for key, value in RunConfig().to_dict().items():
        assert f"{key} = {keys_of_pyproject.to_toml(value)}  # {meanings[key]}" in lines


def test_the_keys_and_defaults_of_pyproject_are_those_of_the_model():
    table = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    keys = dict(flat(table))
    defaults = RunConfig().to_dict()
    missing = missing_keys(defaults, keys)
    assert not missing, missing
    assert list(keys) == list(defaults)
    assert keys == defaults
    assert {key: type(value) for key, value in keys.items()} == {key: type(value) for key, value in defaults.items()}
    assert RunConfig.from_run_config(keys) == RunConfig()


def test_the_block_is_written_anew_and_nothing_else(tmp_path, monkeypatch):
    there = tmp_path / "pyproject.toml"
    shutil.copy(PYPROJECT, there)
    monkeypatch.setattr(keys_of_pyproject, "PYPROJECT", there)
    there.write_text(with_block(there.read_text(), "rounds = 3\nmine.own = 4  # gone\n\n"))
    assert listed_keys(there) == ("rounds", "mine.own")
    keys_of_pyproject.main()
    assert there.read_bytes() == PYPROJECT.read_bytes()
    with pytest.raises(ValueError, match=r"no table \[tool\.flwr\.app\.config\]"):
        with_block('[project]\nname = "another"\n', block_of_settings())


def test_a_block_has_a_title_over_each_part_and_over_each_methods_keys():
    lines = block_of_settings().splitlines()
    assert lines[0] == f"# {PARTS['task']}"
    titles = [line for line in lines if line.startswith("# ")]
    assert titles[: len(PARTS)] == [f"# {title}" for title in PARTS.values()]
    assert titles[len(PARTS) :] == [f"# Settings of {group}" for group in method_groups()]
    assert lines[lines.index("# Settings of fedprox") + 1].startswith("fedprox.mu = 0.01  # ")
    assert set(PARTS) <= set(RunConfig.model_fields)


def test_the_settings_of_every_method_are_those_of_its_parameters():
    wanted = {}
    for method, kind in METHODS.items():
        for group, params in {method: kind.params_type, **kind.shared_params}.items():
            own = {name: getattr(params(), name) for name in params.model_fields}
            wanted |= {f"{group}.{kebab(name)}": value for name, value in own.items()}
    groups = RunConfig().groups
    found = {f"{group}.{kebab(name)}": value for group, params in groups.items() for name, value in params}
    assert found == wanted
    with_dots = {key for key in RunConfig().to_dict() if "." in key}
    assert {key for key in with_dots if key.partition(".")[0] not in run_groups()} == set(wanted)
    for method, kind in METHODS.items():
        config = RunConfig(strategy=method)
        assert (config.method, type(config.params)) == (kind, kind.params_type)
        assert {name: type(params) for name, params in config.shared.items()} == dict(kind.shared_params)


def test_every_setting_says_what_it_is():
    fields, meanings = all_settings(), descriptions()
    assert meanings.keys() == RunConfig().to_dict().keys()
    for key, text in meanings.items():
        assert text[0].isupper(), (key, text)
        assert not text.endswith("."), (key, text)
        assert "\n" not in text, (key, text)
        assert text == fields[key].description


class MineParams(Params):
    damping: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="Share of the step that is taken")
    widths: Numbers = Field((), description="Widths of the steps")
    the_rule: Literal["mean", "median"] = Field("mean", description="How updates are put together")


class MineShared(Params):
    depth: int = Field(2, ge=1, description="Depth of the shared part")


class Mine(FedProx):
    params_type: ClassVar[type[Params]] = MineParams
    shared_params: ClassVar[dict[str, type[Params]]] = {"my-part": MineShared}


def test_settings_of_a_class_are_those_it_names_or_those_in_the_brackets_of_its_base():
    class InBrackets(OneArchitecture[MineParams]):
        pass

    class Below(InBrackets):
        pass

    class Named(OneArchitecture[Params]):
        params_type: ClassVar[type[Params]] = MineParams

    assert [kind.params_type for kind in (InBrackets, Below, Named)] == [MineParams] * 3


def test_settings_of_a_new_method_are_asked_for_line_by_line(monkeypatch):
    monkeypatch.setitem(METHODS, "my-own", Mine)
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({"strategy": "my-own"})
    where, *lines = str(error.value).splitlines()
    assert where == (
        "pyproject.toml, [tool.flwr.app.config], lacks keys, which Flower would refuse; "
        "`python -m wildflower.server_app.keys` adds:"
    )
    assert lines == ["my-own.damping = 0.5", 'my-own.widths = ""', 'my-own.the-rule = "mean"', "my-part.depth = 2"]


def test_the_settings_of_a_new_method_stand_in_its_own_file_alone(monkeypatch):
    """Keys, defaults, bounds, descriptions and the block in pyproject.toml all come from the fields."""
    monkeypatch.setitem(METHODS, "my-own", Mine)
    monkeypatch.setattr("wildflower.server_app.config.listed_keys", lambda: None)
    config = RunConfig.from_run_config({"strategy": "my-own", "my-own.damping": 1, "my-own.widths": [1, 0.5]})
    assert config.params == MineParams(damping=1.0, widths=(1.0, 0.5))
    assert config.shared == {"my-part": MineShared()}
    assert config.to_dict()["my-own.widths"] == "1, 0.5"
    assert descriptions()["my-own.the-rule"] == "How updates are put together"
    assert "my-own.damping = 0.5  # Share of the step that is taken" in block_of_settings().splitlines()
    assert list(RunConfig(strategy="fedavg", groups=config.groups).ignored()) == ["my-own.damping", "my-own.widths"]
    for key, value, words in (
        ("my-own.damping", 0.0, "must be above 0"),
        ("my-own.the-rule", "mode", "must be 'mean' or 'median'"),
        ("my-part.depth", 0, "must be at least 1"),
        ("my-part.depth", "two", "must be a whole number such as 2"),
    ):
        with pytest.raises(ConfigError) as error:
            RunConfig.from_run_config({"strategy": "my-own", key: value})
        assert str(error.value) == f"{key} = {value!r}: {words}"
    with pytest.raises(ConfigError, match=r"unknown key 'my-own.dampin' = 1: did you mean 'my-own.damping'\?"):
        RunConfig.from_run_config({"my-own.dampin": 1})
    with pytest.raises(ConfigError, match=r"my-part.depth = 3: strategy = 'fedavg' does not .* one of my-own$"):
        RunConfig.from_run_config({"strategy": "fedavg", "my-part.depth": 3})


def test_keys_that_pyproject_lacks_are_told_as_lines_to_add(tmp_path, monkeypatch):
    file = tmp_path / "pyproject.toml"
    left_out = ("strategy", "rounds", "resume", "fedprox.mu")
    lines = PYPROJECT.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if not line.startswith(tuple(f"{key} = " for key in left_out))))
    monkeypatch.setattr("wildflower.server_app.config.listed_keys", lambda: listed_keys(file))
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({})
    assert str(error.value).splitlines() == [
        "pyproject.toml, [tool.flwr.app.config], lacks keys, which Flower would refuse; "
        "`python -m wildflower.server_app.keys` adds:",
        'strategy = "heterofl"',
        "rounds = 20",
        "resume = false",
        "fedprox.mu = 0.01",
    ]


def test_an_installation_without_the_apps_pyproject_is_not_asked(tmp_path):
    assert listed_keys(tmp_path / "pyproject.toml") is None
    another = tmp_path / "another.toml"
    another.write_text('[project]\nname = "another"\n')
    assert listed_keys(another) is None
    assert listed_keys(PYPROJECT) == tuple(RunConfig().to_dict())


# Keys that belong together


@pytest.mark.parametrize(
    "text", ["dp = {epsilon = 4, clip = 2}", "[dp]\nepsilon = 4\nclip = 2", "dp.epsilon = 4\ndp.clip = 2"]
)
def test_a_group_is_written_as_a_table_or_with_dots(tmp_path, text):
    experiment = tmp_path / "one.toml"
    experiment.write_text(f'strategy = "fedavg"\nfamily = "pfl-cnn"\n{text}\n')
    found = resolve(experiment, [])
    assert (found.config.dp.epsilon, found.config.dp.clip) == (4.0, 2.0)
    assert found.sources["dp.epsilon"] == str(experiment)
    content = tomllib.loads(experiment.read_text())
    assert RunConfig.from_run_config(content) == RunConfig.from_run_config(dict(flat(content)))


def test_a_group_is_set_on_the_command_line_and_from_python():
    own = ["strategy=fedavg", "family=pfl-cnn"]
    wanted = resolve(None, [*own, "dp.epsilon=4", "dp.clip=2"])
    as_table = resolve(None, [*own, "dp={epsilon=4, clip=2}"])
    from_python = resolve(None, [*own, *as_overrides({"dp": {"epsilon": 4, "clip": 2}})])
    assert wanted == as_table == from_python
    assert (wanted.config.dp.epsilon, wanted.sources["dp.epsilon"]) == (4.0, "--set")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dp": {"epsilon": 4, "clipp": 2}}, "unknown key 'dp.clipp' = 2: did you mean 'dp.clip'?"),
        ({"dp": 4}, "unknown key 'dp' = 4: it is a table, of "),
        ({"dp": {}}, "unknown key 'dp' = {}: it is a table, of "),
        ({"dp.epsilon": "4"}, "dp.epsilon = '4': must be a number such as 0.0"),
        ({"dp.epsilon": 4, "dp.noise-multiplier": 1}, "dp.noise-multiplier = 1.0: dp.epsilon = 4 says how much noise"),
        ({"secure-aggregation.minimum": 2}, "secure-aggregation.minimum = 2: must be at least 3, or 0: off"),
        ({"public.examples": 3}, "public.task = '': public.data-dir and public.examples say nothing without it"),
        ({"dp.clip": 0.0, "rounds": 0}, "rounds = 0: must be at least 1; dp.clip = 0.0: must be above 0"),
        (
            {"schedule.kind": "cosine", "schedule.decay-rounds": "3"},
            "schedule.decay-rounds = '3': schedule.kind = 'cosine' needs none: leave schedule.decay-rounds empty",
        ),
    ],
)
def test_what_is_wrong_in_a_group_is_told_as_anywhere(values, words):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config(values)
    assert str(error.value).startswith(words)


def keys_counted():
    """How many keys the run and its methods have, where a group of the run is one key."""
    own = set(run_groups())
    names = {key.partition(".")[0] if key.partition(".")[0] in own else key for key in RunConfig().to_dict()}
    of_methods = {name for name in names if "." in name}
    return len(names) - len(of_methods), len(of_methods)


def test_the_run_has_few_keys():
    assert keys_counted()[0] <= 60


@pytest.mark.parametrize("key", [key for key in RunConfig().to_dict() if key.partition(".")[0] in run_groups()])
def test_a_key_of_a_table_is_known_without_it(key, tmp_path):
    written = key.replace(".", "-")
    experiment = tmp_path / "one.toml"
    experiment.write_text(f"{written} = 3\n")
    wanted = f"unknown key '{written}' = 3: did you mean '{key}'?"
    with pytest.raises(ConfigError, match=f"^{re.escape(wanted)}$"):
        RunConfig.from_run_config({written: 3})
    for path, overrides in ((experiment, []), (None, [f"{written}=3"]), (None, as_overrides({written: 3}))):
        with pytest.raises(SettingsError, match=f"{re.escape(wanted)}$"):
            resolve(path, overrides)
    with pytest.raises(ValidationError):
        RunConfig(**{written.replace("-", "_"): 3})


# Values and their bounds


def test_a_configuration_comes_back():
    config = RunConfig.from_run_config(
        {
            "strategy": "fedprox",
            "fedprox.mu": 0.3,
            "widths": "1, 0.3333333333333333, 0.1",
            "schedule.decay-rounds": "40, 80",
            "learning-rate": 1,
            "resume": True,
        }
    )
    assert config.params.mu == config.groups["fedprox"].mu == 0.3
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
    config = RunConfig(widths=tuple(widths), learning_rate=rate, schedule={"decay_rounds": tuple(map(float, rounds))})
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


OF_SHARED_PARTS = [("inclusivefl.eta", "fedadam.eta"), ("inclusivefl.tau", "fedadam.tau")]


@pytest.mark.parametrize(("key", "meant"), [*OTHER_NAMES.items(), ("mu", "fedprox.mu"), *OF_SHARED_PARTS])
def test_what_a_key_is_called_elsewhere_is_understood(key, meant):
    assert key not in RunConfig().to_dict()
    for written in (key, key.upper().replace("-", "_")):
        with pytest.raises(ConfigError, match=rf"unknown key '{written}' = 1: did you mean '{meant}'\?$"):
            RunConfig.from_run_config({written: 1})
    assert meant in RunConfig().to_dict()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("zzz", f"'wildflower config --all' lists all {len(RunConfig().to_dict())}"),
        ("zzz.zzz", f"'wildflower config --all' lists all {len(RunConfig().to_dict())}"),
        ("heterofl.zzz", "heterofl has heterofl.dynamic, heterofl.masked-loss"),
        ("heterofl.statistics-devices", "did you mean 'statistics.devices'?"),
    ],
)
def test_a_key_that_is_near_nothing_is_told_where_to_look(key, words):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({key: 1})
    assert str(error.value) == f"unknown key '{key}' = 1: {words}"


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
        ("learning-rate", 1e39),
        ("momentum", 1.0),
        ("budget.memory-fraction", 0.0),
        ("budget.memory-fraction", 1.5),
        ("deadline-seconds", -1.0),
        ("alpha", 0.0),
        ("test-fraction", 1.0),
        ("seed", -1),
        ("seed", 2**32),
        ("aggregation.over-selection", -0.5),
        ("partition", "random"),
        ("optimizer", "lion"),
        ("below-smallest", "drop"),
        ("fedavg.use", "all-medium"),
        ("fedavg.use", "local"),
        ("fedprox.mu", -1.0),
        ("fedadam.betas", "0.9, 1"),
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
        ("schedule.decay-rounds", "soon"),
        ("distillation.batch-size", 1),
        ("model-search.shares", "0"),
        ("model-search.shares", "1.5"),
        ("model-search.layer-shares", "stem"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(key, value):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({key: value})
    assert str(error.value).startswith(f"{key} = {value!r}: ")


def beyond_bounds():
    """(key, value) of every bound that a field has, and of what no number may be."""
    for key, field in all_settings().items():
        kind = field.annotation
        while get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        for bound in field.metadata:
            if isinstance(bound, Ge):
                yield key, kind(bound.ge - 1)
            elif isinstance(bound, Gt):
                yield key, kind(bound.gt)
            elif isinstance(bound, Le):
                # Adding 1 to the largest number of 32 bits does not change it.
                yield key, kind(max(bound.le + 1, math.nextafter(bound.le, math.inf)))
            elif isinstance(bound, Lt):
                yield key, kind(bound.lt)
        if kind is float:
            yield from ((key, float(text)) for text in ("nan", "inf", "-inf"))
        elif kind is int:
            assert any(isinstance(bound, Ge | Gt) for bound in field.metadata), f"{key} has no lower bound"
        elif get_origin(kind) is Literal:
            yield key, "none of these"


def test_every_bound_is_kept():
    beyond = list(beyond_bounds())
    assert len(beyond) > 300
    for key, value in beyond:
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
        ("schedule.decay-rounds", [{}], "must be numbers such as [1, 0.5] or '1, 0.5'"),
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
        RunConfig.from_run_config({"rounds": 0, "seed": -1, "fedprox.mu": -1.0, "fedadam.eta": "high"})
    told = str(error.value)
    assert all(
        text in told for text in ("rounds = 0: ", "seed = -1: ", "fedprox.mu = -1.0: ", "fedadam.eta = 'high': ")
    )
    assert told.count(";") == 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"strategy": "fedavgg"}, "strategy = 'fedavgg': no such strategy; did you mean 'fedavg'"),
        ({"task": "digit"}, "task = 'digit': no such task; did you mean 'digits'"),
        ({"family": "resnet-18"}, "family = 'resnet-18': no such family; did you mean 'resnet18'"),
        ({"strategy": "quantum"}, "strategy = 'quantum': no such strategy; valid are anycostfl, depthfl, fedadam,"),
        ({"devices-per-round": 21}, "devices-per-round = 21: more than devices = 20"),
        (
            {"devices-per-round": 16, "aggregation.over-selection": 0.5},
            "devices-per-round = 16: more than devices = 20 (aggregation.over-selection = 0.5 asks 24)",
        ),
        ({"widths": ""}, "widths = '': at least one width is needed"),
        ({"widths": "1, 0"}, "widths = '1, 0': every width is above 0 and at most 1"),
        ({"widths": "1.5"}, "widths = '1.5': every width is above 0 and at most 1"),
        ({"widths": "nan"}, "widths = 'nan': every width"),
        (
            {"strategy": "hypemefed", "both-models": True},
            "both-models = True: hypemefed would count a device that trains two models twice in the deep layers, with "
            "its own and with what it guesses for its smaller one: leave it false",
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
        (
            {"strategy": "fedavg", "distillation.steps": 10},
            "distillation.steps = 10: strategy = 'fedavg' does not read it: leave it out, or take one of anycostfl, ",
        ),
        (
            {"strategy": "depthfl", "distillation.batch-size": 8},
            "distillation.batch-size = 8: strategy = 'depthfl' does not read it: leave it out, or take one of anycost",
        ),
        (
            {"strategy": "fedavg", "fedavg.use": "all-small", "both-models": True},
            "both-models = True: with fedavg.use = 'all-small' no device trains two models",
        ),
        (
            {"strategy": "local", "both-models": True},
            "both-models = True: with strategy = 'local' no model travels: leave it false",
        ),
        ({"scalefl.widths": "0, 1"}, "scalefl.widths = '0, 1': every width is above 0 and at most 1"),
        ({"widths": "1, 0.5, 0.5"}, "widths = '1, 0.5, 0.5': a width is listed twice"),
        ({"schedule.decay-rounds": "2.5"}, "schedule.decay-rounds = '2.5': must be numbers of rounds, from 1 on"),
        ({"adam.betas": "0.9"}, "adam.betas = '0.9': must be two numbers from 0 to below 1"),
        ({"adam.betas": "0.9, 1"}, "adam.betas = '0.9, 1': must be two numbers from 0 to below 1"),
        ({"schedule.decay-rounds": "0"}, "schedule.decay-rounds = '0': must be numbers of rounds, from 1 on"),
        ({"schedule.decay-rounds": "inf"}, "schedule.decay-rounds = 'inf': must be numbers of rounds, from 1 on"),
        (
            {"run-name": "a\nb"},
            "run-name = 'a\\nb': the name of a folder has letters that can be printed",
        ),
        (
            {"run-name": "\u00e4" * 101},
            "at most 200 bytes",
        ),
        (
            {"run-name": "../elsewhere"},
            "run-name = '../elsewhere': the name of one folder, without /",
        ),
        (
            {"fleet": "", "aggregation.over-selection": 0.5},
            "aggregation.over-selection = 0.5: needs a fleet or deadline-seconds to tell who is late",
        ),
        (
            {"partition": "natural", "examples-per-device": 50},
            "examples-per-device = 50: partition = 'natural' says itself who holds what",
        ),
        (
            {"partition": "strong-and-weak"},
            "strong.devices = 0: partition = 'strong-and-weak' needs 1 to 19 of the 20 devices",
        ),
        (
            {"partition": "strong-and-weak", "strong.devices": 2, "test-fraction": 0.1},
            "partition = 'strong-and-weak': deals out all examples, and the test set too",
        ),
        (
            {"batch-size": 16, "micro-batch-size": 16},
            "micro-batch-size = 16: it is a part of batch-size = 16: fewer than that, or 0",
        ),
        (
            {"strategy": "recipfl", "recipfl.hidden": 10},
            "recipfl.hidden = 10: a multiple of 8",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_an_impossible_combination_is_named(values, words):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config(values)
    assert words in str(error.value)


def distilling():
    """The methods that read the settings of distillation."""
    found = [name for name, kind in METHODS.items() if kind.shared_params.get("distillation") is Distillation]
    assert {"heterofl", "fedrolex", "federated-dropout", "fjord", "anycostfl", "model-search"} <= set(found)
    return found


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "adamw", "momentum": 0.0},
        {"fleet": "", "devices-per-round": 100},
        {"fleet": "", "aggregation.over-selection": 0.5, "deadline-seconds": 60.0},
        {"partition": "dirichlet", "examples-per-device": 50},
        {"devices-per-round": 20},
        {"batch-size": 16, "micro-batch-size": 4, "strategy": "wildflower"},
        {"widths": 1},
        {"widths": 0.5, "schedule.decay-rounds": 7},
        {"strategy": "federated-dropout", "statistics.devices": 3, "statistics.examples": 0},
        {"strategy": "fedavg", "distillation.steps": -1, "distillation.batch-size": 64},
        *({"strategy": name, "distillation.steps": 10} for name in distilling()),
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
    shares = [{"devices-per-round": 10, "aggregation.over-selection": share} for share in (0.0, 0.3, 1.0)]
    asked = [RunConfig.from_run_config(values).sampled_devices for values in shares]
    assert asked == [10, 13, 20]


def test_links_of_real_devices_may_set_a_budget():
    assert RunConfig.from_run_config({"fleet": "", "budget.transfer-seconds": 10}).budget.transfer_seconds == 10.0


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
        ({"momentum": 0.5, "alpha": 0.1, "local-epochs": 2}, []),
        ({"optimizer": "adam", "momentum": 0.5, "adam.betas": "0.8, 0.9"}, ["momentum"]),
        ({"adam.betas": "0.8, 0.9"}, ["adam.betas"]),
        ({"partition": "iid", "alpha": 0.1}, ["alpha"]),
        ({"partition": "strong-and-weak", "strong.devices": 2, "strong.share": 0.3, "alpha": 0.1}, []),
        ({"strong.devices": 2, "strong.share": 0.3}, ["strong.devices", "strong.share"]),
        ({"local-steps": 5, "local-epochs": 2}, ["local-epochs"]),
        ({"dp.clip": 2.0}, ["dp.clip"]),
        ({"dp.clip": 2.0, "dp.noise-multiplier": 1.0}, []),
        ({"secure-aggregation.minimum": 3}, []),
        ({"schedule.decay-factor": 0.5}, ["schedule.decay-factor"]),
        ({"schedule.decay-factor": 0.5, "schedule.decay-rounds": "3, 7"}, []),
        ({"aggregation.rule": "median", "aggregation.trim": 0.1}, ["aggregation.trim"]),
        ({"aggregation.rule": "trimmed-mean", "aggregation.trim": 0.1}, []),
        ({"personal.epochs": 0, "personal.first-round": 3}, ["personal.epochs", "personal.first-round"]),
        ({"personal.epochs": 0, "personal.every": 2}, []),
        ({"max-examples": 10}, ["max-examples"]),
    ],
)
def test_keys_that_nothing_reads_are_told_from_those_that_are_read(values, ignored):
    assert list(RunConfig.from_run_config(values).ignored()) == ignored


def test_a_warning_says_with_what_a_key_of_the_run_would_be_read():
    config = RunConfig.from_run_config({"strategy": "fedavg", "fedprox.mu": 0.3, "optimizer": "adam", "momentum": 0.5})
    assert config.ignored_text() == (
        "Keys of other methods, which strategy = 'fedavg' does not read: fedprox.mu = 0.3. "
        "Keys that this run does not read: momentum = 0.5 (read with optimizer = 'sgd')"
    )


def test_every_key_that_is_read_with_others_is_a_key_of_the_run():
    assert READ_WITH.keys() <= RunConfig().to_dict().keys()
