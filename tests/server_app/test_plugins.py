"""Methods, families and tasks from outside, in this process: over connected nodes and simulated ones, and bad ones."""

import itertools
import json
import random
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.grid import InProcessGrid
from tests.small_run import METHODS, by_method, connected_grid, same_bits, simulated_grid, small_config, started
from wildflower.messages.tensor_sets import Weights
from wildflower.models.cost import ACCUMULATED
from wildflower.models.family import family_class, make_family
from wildflower.plugins.beside import looked_for_beside
from wildflower.plugins.reference import PluginError
from wildflower.rounds.layout_check import DryRunError
from wildflower.server_app import checkpoint
from wildflower.server_app.app import build, run, start
from wildflower.server_app.config import ConfigError, RunConfig, all_settings, defaults, descriptions, unread
from wildflower.server_app.dry_run import dry_run_step
from wildflower.server_app.journal import Journal
from wildflower.server_app.resuming import check_resumable
from wildflower.server_app.run_folder import JournalError, read_config, read_rounds, read_summary
from wildflower.strategies.fedprox import FedProx
from wildflower.strategies.run_settings import RoundSettings
from wildflower.tasks.task import TaskSpec, load_task

ROOT = Path(__file__).parents[2]
HEAD = """
    from __future__ import annotations
    from dataclasses import dataclass
    from functools import cached_property
    from typing import ClassVar
    import torch
    from pydantic import Field
    from wildflower.messages.tensor_sets import TensorSet
    from wildflower.models.layers import Block, Flatten, Linear, Relu, TensorSpec
    from wildflower.models.block_family import ImageFamily
    from wildflower.strategies.method import Answer, ClientStep, Model, State, Training
    from wildflower.strategies.params import Numbers, Params
    from wildflower.strategies.submodel import SubModelMethod
    from wildflower.tasks.data import Data, make_data_set
    from wildflower.tasks.task import Kind
"""
METHOD = """
    class Half(Training):
        share: float = 0.0

        def facts(self, family):
            return {"largest": 1}

        def loss(self, context, model):
            return lambda inputs, labels: (1 + self.share) * context.task.loss(model(inputs), labels)

        def train(self, context):
            answer = super().train(context)
            answer.facts["largest"] = [max(float(value.max()) for value in answer.tensor_sets["weights"].values())]
            return answer


    class Settings(Params):
        damping: float = Field(0.5, gt=0, le=1, description="The part of the way that is gone")
        rule: str = Field("mean", description="A text")
        rates: Numbers = Field((1.0,), description="Some numbers")


    class Mine(SubModelMethod):
        params_type: ClassVar = Settings

        def __init__(self, setup, params):
            super().__init__(setup, params)
            self.params = params

        def client_step(self, order):
            return Half()

        def finish_round(self, trained):
            before = self.weights
            super().finish_round(trained)
            self.weights = {n: torch.lerp(old, self.weights[n], self.params.damping) for n, old in before.items()}
            return {"largest": max(done.facts["largest"][0] for done in trained)}
"""
FAMILY = """
    @dataclass(frozen=True)
    class Narrow(ImageFamily):
        name: ClassVar[str] = "narrow"
        hidden: int = 12

        @cached_property
        def groups(self):
            return {"fc": self.hidden}

        def blocks(self, arch):
            fc = self.channels(arch)["fc"]
            first = Linear("fc", self.inputs, fc, positions=self.input_shape[1] * self.input_shape[2])
            return [Block("all", (Flatten(), first, Relu(), Linear("out", fc, self.outputs)))]
"""
TASK = """
    def load(data_dir):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(400) % 10
        images = torch.randint(0, 50, (400, 1, 8, 8), generator=generator)
        images[torch.arange(400), 0, 0, labels % 8] += 200
        images = images.to(torch.uint8)
        return make_data_set(Data(images[:300], labels[:300]), Data(images[300:], labels[300:]))

    TASK = Kind(load, "{module}:Narrow")
"""
_numbers = itertools.count()


class Beside:
    """A folder where modules are looked for first, and the modules that a test writes there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, *parts: str, name: str = "") -> str:
        """Write a module; its name, which no other test has."""
        name = name or f"plug_in_{next(_numbers)}"
        text = "".join(textwrap.dedent(part) for part in (HEAD, *parts)).replace("{module}", name)
        (self.folder / f"{name}.py").write_text(text)
        return name


@pytest.fixture
def beside(tmp_path):
    folder = tmp_path / "beside"
    folder.mkdir()
    with looked_for_beside(folder):
        yield Beside(folder)


def weights_after(folder: Path, grid: InProcessGrid, **changes) -> Weights:
    folder.mkdir()
    run_dir = run(grid, small_config(folder, **changes))
    return checkpoint.load(run_dir).state.tensors


CONNECTED = {"fleet": "", "below-smallest": "smallest"}


@pytest.mark.thorough
def test_a_method_from_outside_trains_on_connected_nodes_as_on_simulated_ones(beside, tmp_path):
    name = beside.module(METHOD)
    settings = {"strategy": f"{name}:Mine", f"{name.replace('_', '-')}.damping": 1.0, "rounds": 2, "widths": "1"}
    keys = {key: value for key, value in settings.items()} | {"devices_per_round": 6, "below-smallest": "smallest"}
    simulated = weights_after(tmp_path / "simulated", simulated_grid(), **keys)
    (tmp_path / "nodes").mkdir()
    connected = weights_after(tmp_path / "connected", connected_grid(6, tmp_path / "nodes"), **(keys | CONNECTED))
    assert same_bits(simulated, connected)
    plain = {key: value for key, value in keys.items() if name.replace("_", "-") not in key}
    mean = weights_after(tmp_path / "mean", simulated_grid(), **(plain | {"strategy": "fedavg"}))
    assert same_bits(simulated, mean)  # with damping 1, and a loss that is the task's


def test_a_method_from_outside_goes_a_part_of_the_way(beside, tmp_path):
    name = beside.module(METHOD)
    key = f"{name.replace('_', '-')}.damping"
    after = {}
    for damping in (0.25, 1.0):
        folder = tmp_path / str(damping)
        folder.mkdir()
        changes = {"strategy": f"{name}:Mine", key: damping, "below-smallest": "smallest"}
        engine, scorer = started(small_config(folder, **changes))
        before = engine.method.weights
        record = engine.run_round(simulated_grid(), 1, scorer).record
        after[damping] = engine.method.weights
        assert record["strategy"] == name.replace("_", "-")
        assert set(record["metrics"]) == {"largest"}
    for tensor, old in before.items():
        torch.testing.assert_close(after[0.25][tensor], 0.75 * old + 0.25 * after[1.0][tensor])


def test_a_method_from_outside_trains_what_is_not_frozen(beside, tmp_path):
    name = beside.module(METHOD)
    config = small_config(
        tmp_path, strategy=f"{name}:Mine", rounds=1, freeze="block1", **{"below-smallest": "smallest"}
    )
    engine, _ = started(config)
    before = engine.method.weights
    [record] = read_rounds(run(simulated_grid(), config))
    assert record.devices_replied == 4
    after = checkpoint.load(tmp_path / "runs/small").state.tensors
    there = {key for key in before if f"weights/{key}" in after and "running" not in key}  # which go on being updated
    moved = {key for key in there if not torch.equal(before[key], after[f"weights/{key}"])}
    assert moved
    assert {key for key in moved if key.startswith("block1")} == set()


PRIVATE = """
    class Mine(SubModelMethod):
        def client_step(self, order):
            return Training()

        def finish_round(self, trained):
            if {skips}:
                return {{}}
            return super().finish_round(trained)
"""
NOISE = {
    "dp.noise-multiplier": 1.0,
    "dp.clip": 0.5,
    "dp.delta": 1e-3,
    "rounds": 1,
    "family-arguments": "norm = 'static'",
}


@pytest.mark.thorough
def test_a_private_method_from_outside_must_not_tell_that_nobody_came(beside, tmp_path):
    for skips, why in (("not trained", "no device came.*self.mean.empty"), ("self.mean.empty", "")):
        name = beside.module(PRIVATE.format(skips=skips))
        (tmp_path / name).mkdir()
        config = small_config(tmp_path / name, strategy=f"{name}:Mine", **NOISE)
        if why:
            with pytest.raises(ValueError, match=why):
                run(simulated_grid(), config)
        else:
            [record] = read_rounds(run(simulated_grid(), config))
            assert record.noised_releases == 1  # and none of what was tried in a dry run


def test_a_family_and_a_task_from_outside_are_made_by_nodes_too(beside, tmp_path):
    name = beside.module(FAMILY, TASK)
    (tmp_path / "nodes").mkdir()
    grid = connected_grid(6, tmp_path / "nodes")
    config = small_config(tmp_path, task=f"{name}:TASK", strategy="heterofl", rounds=1, **CONNECTED)
    config = RunConfig.from_run_config(config.to_dict() | {"family": "", "run-name": ""})
    run_dir = run(grid, config)
    assert run_dir.name.startswith(f"heterofl-{name.replace('_', '-')}-")
    [record] = read_rounds(run_dir)
    assert (record.task, record.devices_replied) == (f"{name}:TASK", 4)
    sent = [m.content["wildflower"]["json"] for m in grid.sent if "train" in m.metadata.message_type]
    assert {json.loads(text)["family"]["name"] for text in sent} == {f"{name}:Narrow"}


def test_a_package_is_kept_without_the_runs_that_lie_in_it(beside, tmp_path):
    package = beside.folder / "plug_in_with_runs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (beside.folder / f"{beside.module(FAMILY, TASK, name='own')}.py").rename(package / "own.py")
    text = (package / "own.py").read_text()
    (package / "own.py").write_text(text.replace('"own:Narrow"', '"plug_in_with_runs.own:Narrow"'))
    folders = {"output-dir": str(package / "runs")}
    config = small_config(tmp_path, task="plug_in_with_runs.own:TASK", family="", rounds=1, **folders)
    run_dir = run(simulated_grid(), config)
    kept = run_dir / "modules" / "plug_in_with_runs"
    assert {file.name for file in kept.iterdir()} == {"__init__.py", "own.py"}


def test_a_family_from_outside_is_a_value_and_takes_arguments(beside, tmp_path):
    name = beside.module(FAMILY)
    family = make_family({"name": f"{name}:Narrow", "input_shape": [1, 8, 8], "hidden": 5})
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    assert family.full().widths == (5,)
    config = small_config(tmp_path, family=f"{name}:Narrow", **{"family-arguments": "hidden = 7"})
    assert build(config)[0].method.family.full().widths == (7,)
    config = small_config(tmp_path, family=f"{name}:Narrow", **{"family-arguments": "hiden = 7"})
    with pytest.raises(ConfigError, match="has no argument 'hiden'; did you mean 'hidden'"):
        build(config)


def test_members_of_a_choice_may_be_from_outside(beside, tmp_path):
    name = beside.module(FAMILY)
    members = f"members = {{large = {{name = '{name}:Narrow'}}, small = {{name = '{name}:Narrow', hidden = 3}}}}"
    config = small_config(tmp_path, family="choice", strategy="fedavg", **{"family-arguments": members})
    assert config.references() == [f"{name}:Narrow"]
    assert build(config)[0].method.family.members[1][1].hidden == 3
    with pytest.raises(ConfigError, match=f"{name} has no Nrrow; did you mean 'Narrow'"):
        small_config(tmp_path, family="choice", **{"family-arguments": members.replace("Narrow", "Nrrow")})


# Settings ------------------------------------------------------------------------------------------------------------


def test_settings_of_a_method_from_outside_are_keys_like_all_others(beside, tmp_path):
    name = beside.module(METHOD)
    strategy, key = f"{name}:Mine", name.replace("_", "-")
    config = RunConfig.from_run_config({"strategy": strategy, f"{key}.damping": 1, f"{key}.rates": [1, 0.5]})
    assert config.groups[key].damping == 1.0
    own = {k: v for k, v in config.to_dict().items() if k.startswith(key)}
    assert own == {f"{key}.damping": 1.0, f"{key}.rule": "mean", f"{key}.rates": "1, 0.5"}
    assert RunConfig.from_run_config(config.to_dict()) == config
    assert defaults(strategy)[f"{key}.damping"] == 0.5
    assert all_settings(strategy).keys() == config.to_dict().keys()
    assert descriptions(strategy)[f"{key}.damping"] == "The part of the way that is gone"
    assert f"{key}.damping" not in unread(config.to_dict())
    assert "fedprox.mu" in unread(config.to_dict())
    assert not config.ignored()
    for settings, words in (
        ({f"{key}.dampng": 1}, f"unknown key '{key}.dampng' = 1: did you mean '{key}.damping'?"),
        ({f"{key}.damping": 2.0}, f"{key}.damping = 2.0: must be at most 1"),
        ({f"{key}.damping": "much"}, f"{key}.damping = 'much': must be a number such as 0.5"),
    ):
        with pytest.raises(ConfigError) as error:
            RunConfig.from_run_config({"strategy": strategy} | settings)
        assert str(error.value) == words


def test_settings_of_a_method_from_outside_in_one_key_for_plain_flwr_run(beside):
    name = beside.module(METHOD)
    strategy, key = f"{name}:Mine", name.replace("_", "-")
    given = RunConfig().to_dict() | {"strategy": strategy}  # as Flower hands over the project's own keys
    text = "damping = 0.3, rule = 'median'"
    config = RunConfig.from_run_config(given | {"strategy-settings": text})
    assert config == RunConfig.from_run_config({"strategy": strategy, f"{key}.damping": 0.3, f"{key}.rule": "median"})
    assert config.strategy_settings == ""
    for settings, words in (
        ({"strategy": "fedprox", "strategy-settings": "mu = 1"}, "is the project's own, and has keys such as fedprox."),
        ({"strategy": "", "strategy-settings": "mu = 1"}, "'heterofl' is the project's own"),
        ({"strategy-settings": text, f"{key}.damping": 0.5}, f"{key}.damping is given twice: there, and as a key"),
        ({"strategy-settings": "damping 0.3"}, 'must be like "damping = 0.3, steps = 2"'),
        ({"strategy-settings": "dampin = 0.3"}, f"unknown key '{key}.dampin' = 0.3: did you mean '{key}.damping'?"),
        ({"strategy-settings": "damping = 3"}, f"{key}.damping = 3: must be at most 1"),
    ):
        with pytest.raises(ConfigError) as error:
            RunConfig.from_run_config(given | settings)
        assert words in str(error.value)


SHARED = """
    from wildflower.strategies.distillation import Distillation

    class Own(Params):
        depth: int = Field(2, description="How deep")

    class Sharing(SubModelMethod):
        shared_params: ClassVar = {"distillation": Distillation, "my-part": Own}

        def __init__(self, setup, params):
            super().__init__(setup, params)
            self.depth, self.steps = setup.shared["my-part"].depth, setup.shared["distillation"].steps

        def client_step(self, order):
            return Training()
"""


def test_parts_that_a_method_from_outside_shares_and_brings(beside, tmp_path):
    name = beside.module(SHARED)
    settings = {"strategy": f"{name}:Sharing", "my-part.depth": 3, "distillation.steps": 1}
    method = build(small_config(tmp_path, **settings))[0].method
    assert (method.depth, method.steps) == (3, 1)


def test_a_run_is_read_where_its_method_is_not_imported():
    values = RunConfig().to_dict() | {"strategy": "nowhere_at_all:Mine", "nowhere-at-all.damping": 0.3}
    assert "nowhere-at-all.damping" not in descriptions(values["strategy"])
    assert descriptions(values["strategy"])["rounds"]
    assert "fedprox.mu" in unread(values)
    assert not {"nowhere-at-all.damping", "distillation.steps", "rounds"} & set(unread(values))


def test_of_a_task_from_outside_the_folder_is_taken_for_the_data(beside, tmp_path):
    name = beside.module(FAMILY, TASK)
    config = small_config(tmp_path, task=f"{name}:TASK")
    run_dir = tmp_path / "runs/small"
    Journal.open(run_dir, config.to_dict(), False)
    with pytest.raises(JournalError, match="data-dir was '' and is '/elsewhere'"):
        check_resumable(run_dir, config.to_dict() | {"data-dir": "/elsewhere"})


# What must not change ------------------------------------------------------------------------------------------------


def test_a_run_with_a_method_from_outside_resumes_with_the_same_bits_and_notices_another_file(beside, tmp_path):
    name = beside.module(METHOD)
    keys = {"strategy": f"{name}:Mine", "evaluate-every": 1}
    whole = weights_after(tmp_path / "whole", simulated_grid(), **keys, rounds=3)
    weights_after(tmp_path / "parted", simulated_grid(), **keys, rounds=1)
    config = small_config(tmp_path / "parted", **keys, rounds=3, resume=True)
    run_dir = run(simulated_grid(), config)
    assert same_bits(checkpoint.load(run_dir).state.tensors, whole)
    assert list(read_config(run_dir).plugins) == [name]
    file = beside.folder / f"{name}.py"
    file.write_text(file.read_text() + "\n# another word\n")
    with pytest.raises(JournalError, match=f"{name} from outside the project is not as when the run began"):
        run(simulated_grid(), small_config(tmp_path / "parted", **keys, rounds=4, resume=True))
    assert len(read_rounds(run_dir)) == 3


def test_a_run_without_anything_from_outside_has_no_hashes_of_it(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1))
    assert read_config(run_dir).plugins == {}
    assert "plugins" not in (run_dir / "config.json").read_text()


@by_method()
def test_a_dry_run_leaves_every_method_and_all_chance_as_they_were(method, tmp_path):
    engine, _ = started(small_config(tmp_path, **METHODS[method]))
    before = engine.state()
    chance = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    engine.start()
    after = engine.state()
    assert same_bits(before.tensors, after.tensors)
    assert before.values == after.values
    assert torch.equal(chance[0], torch.get_rng_state())
    assert chance[1:] == (random.getstate(), str(np.random.get_state()))


@by_method()
def test_every_method_trains_with_micro_batches(method, tmp_path, monkeypatch):
    """It is priced like one that trains with batches of the parts' size, and adds up gradients."""
    engine, _ = started(small_config(tmp_path, **METHODS[method] | {"micro-batch-size": 3}))
    dry_run_step(engine, load_task(TaskSpec.from_json(engine.settings.task)))
    name = engine.settings.optimizer
    assert name.endswith(ACCUMULATED)
    monkeypatch.setattr(RoundSettings, "optimizer", name)
    other, _ = started(small_config(tmp_path, **METHODS[method] | {"batch-size": 3}))
    for architecture in {engine.method.scored_architecture, engine.method.smallest_architecture}:
        expected, found = other.method.cost(architecture), engine.method.cost(architecture)
        if method == "fednas":  # which goes through a batch of 16 twice: 13 inputs of 8x8 are held beside the part's
            more_bytes = 13 * 64 * 4
            assert found.peak_training_memory_bytes == expected.peak_training_memory_bytes + more_bytes
            found = replace(found, peak_training_memory_bytes=expected.peak_training_memory_bytes)
        assert found == expected


DRAWS = """
    class Draws(SubModelMethod):
        def client_step(self, order):
            return Training()

        def payload(self, group):
            torch.rand(3)
            self.asked = getattr(self, "asked", 0) + 1
            return super().payload(group)
"""


def test_a_step_is_rehearsed_on_a_copy_with_chance_of_its_own(beside, tmp_path):
    name = beside.module(DRAWS)
    config = small_config(tmp_path, strategy=f"{name}:Draws")
    engine, _ = started(config)
    weights, chance = engine.method.weights, torch.get_rng_state()
    start(engine, config)
    assert engine.method.asked == 1
    assert all(weights[n] is value for n, value in engine.method.weights.items())
    assert same_bits(engine.method.mean.mean(weights), weights)  # nothing was absorbed
    assert torch.equal(chance, torch.get_rng_state())


# What is wrong -------------------------------------------------------------------------------------------------------


def refused(values: dict) -> str:
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config(values)
    return str(error.value)


def test_references_that_name_nothing_say_what_was_looked_for_where(beside):
    name = beside.module(METHOD, FAMILY, TASK)
    for key, attribute in (("strategy", "Mine"), ("family", "Narrow"), ("task", "TASK")):
        said = refused({key: f"{name}x:{attribute}"})
        where = f"there is no module '{name}x' in {beside.folder} or among the installed packages of "
        assert said.startswith(f"{key} = '{name}x:{attribute}': {where}")
        assert said.endswith(f"; did you mean '{name}'?")
        said = refused({key: f"{name}:{attribute[:-1]}"})
        assert said == f"{key} = '{name}:{attribute[:-1]}': {name} has no {attribute[:-1]}; did you mean {attribute!r}?"
        assert refused({key: f"{name}:{attribute}!"}).endswith("must be like 'package.module:Name'")
    assert refused({"strategy": f"{name}:Nobody"}).endswith("; it has Mine")
    assert "did you mean 'my_own:Method'?" in refused({"strategy": "my_own.Method"})


def test_without_an_experiment_the_error_says_where_files_of_ones_own_lie():
    said = refused({"strategy": "nowhere_at_all:Mine"})
    assert "a file of one's own lies beside the experiment, and is run by 'wildflower run'" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_at_all", "{name} imports 'nowhere_at_all', which is not there: ModuleNotFoundError: "),
        ("1 / 0", "{name} cannot be imported: ZeroDivisionError: division by zero ({file}, line 16)"),
        ("def f(:", "{name} cannot be imported: SyntaxError: invalid syntax ({file}, line 16)"),
        ("raise SystemExit(3)", "{name} cannot be imported: SystemExit: 3 ({file}, line 16)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_line(beside, text, words):
    name = beside.module(text)
    words = words.format(name=name, file=beside.folder / f"{name}.py")
    assert words in refused({"strategy": f"{name}:Mine"})


NO_METHOD = """
    class NotAtAll:
        pass

    class Half(Training):
        pass

    class Lacking(SubModelMethod):
        pass

    NUMBER = 5

    class NoDefault(Params):
        rate: float

    class NoNumber(Params):
        table: dict = {}

    def mine(settings, shared={}, own_name=None):
        class Mine(SubModelMethod):
            params_type = settings
            shared_params = shared

            def client_step(self, order):
                return Training()

            if own_name:
                @classmethod
                def name(cls):
                    return own_name
        return Mine

    WithoutDefault, WithTable, WithoutSettings = mine(NoDefault), mine(NoNumber), mine(dict)
    Clash, OtherPart = mine(Params, {"fedprox": Params}), mine(Params, {"distillation": Params})
    LikeHeterofl, Odd = mine(Params, own_name="heterofl"), mine(Params, own_name="a.b")
    from wildflower.strategies.fedavg import FedAvg

    class Good(Params):
        rate: float = 1.0

    LikeAKey = mine(Good, own_name="alpha")
"""


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("NotAtAll", "is a class of builtins.object: a method is a class of wildflower.strategies.method.Method"),
        ("NUMBER", "is an int: a method is a class of wildflower.strategies.method.Method"),
        ("Half", "lacks a server half: it is a client step (wildflower.strategies.method.ClientStep)"),
        ("Lacking", "lacks client_step, which every class of wildflower.strategies.method.Method has"),
        ("WithoutDefault", "the settings NoDefault need a default that is valid: rate"),
        ("WithTable", "the setting table of NoNumber is no number, text or truth value"),
        ("WithoutSettings", "its settings are <class 'dict'>, and no class of wildflower.strategies.params.Params"),
        ("Clash", "the project has other settings called fedprox.*"),
        ("OtherPart", "the project has other settings called distillation.*"),
        ("LikeHeterofl", "the project has settings called heterofl.*: give its file another name"),
        ("Odd", "its name(), with which its keys begin, is 'a.b': letters, digits and -"),
        ("FedAvg", "is the project's own: set strategy = 'fedavg'"),
        ("LikeAKey", "its keys would be called alpha.*, and alpha is a key of every run: rename its file"),
    ],
)
def test_what_is_no_method_is_told(beside, attribute, words):
    name = beside.module(NO_METHOD)
    said = refused({"strategy": f"{name}:{attribute}"})
    assert said.startswith(f"strategy = '{name}:{attribute}': ")
    assert words in said


def test_what_is_no_family_or_no_task_is_told(beside):
    nameless = FAMILY.replace('name: ClassVar[str] = "narrow"', "pass")
    lacking = """
    @dataclass(frozen=True)
    class Lacking(ImageFamily):
        name: ClassVar[str] = "lacking"
    """
    name = beside.module(METHOD, nameless, lacking)
    assert refused({"family": f"{name}:Mine"}).endswith(
        ": a family, where it is no function and no nn.Module, is a class of wildflower.models.base.Family"
    )
    assert "has no name: give the class one" in refused({"family": f"{name}:Narrow"})
    assert "lacks blocks and groups, which every class of wildflower.models.base.Family has" in refused(
        {"family": f"{name}:Lacking"}
    )
    assert refused({"task": f"{name}:Mine"}).endswith(": a task is a value of wildflower.tasks.spec.Kind")
    with pytest.raises(PluginError, match="a family, where it is no function"):
        family_class(f"{name}:Settings")


def test_a_family_and_a_task_that_fail_are_named(beside, tmp_path):
    broken = FAMILY.replace("fc = self.channels(arch)", "fc = self.channel(arch)")
    tasks = """
    TYPO = Kind(lambda data_dir: torch.rand(3)[7], "lenet5")
    NOTHING = Kind(lambda data_dir: None, "lenet5")
    NO_FAMILY = Kind(lambda data_dir: None, "{module}:Nobody")
    """
    name = beside.module(broken, tasks)
    with pytest.raises(ConfigError, match=rf"family = '{name}:Narrow': AttributeError: .*channel.*{name}\.py, line"):
        build(small_config(tmp_path, family=f"{name}:Narrow"))
    with pytest.raises(PluginError, match=rf"the data of {name}:TYPO cannot be loaded: IndexError: .*{name}\.py, line"):
        build(small_config(tmp_path, task=f"{name}:TYPO"))
    with pytest.raises(PluginError, match=r"must return a wildflower\.tasks\.data\.DataSet, not <class 'NoneType'>"):
        load_task(TaskSpec(name=f"{name}:NOTHING", devices=2))
    assert f"{name} has no Nobody" in refused({"task": f"{name}:NO_FAMILY"})


def changed(old: str, new: str) -> str:
    assert METHOD.count(old) == 1, old
    return METHOD.replace(old, new)


def with_function(text: str) -> str:
    return METHOD + textwrap.indent(textwrap.dedent(text), " " * 8)


LESS = "return {p: dict(list(t.items())[1:]) for p, t in super().payload(group).items()}"
WRONG_HALVES = {
    "no client step": (changed("return Half()", "return None"), "lacks a client step: `local` returns None"),
    "a class for a client step": (
        changed("return Half()", "return Half"),
        "lacks a client step: `local` returns <class",
    ),
    "a client step inside a function": (
        changed("return Half()", "class Inner(Half):\n                pass\n            return Inner()"),
        "cannot travel: this device cannot train as it is asked to",
    ),
    "a client step without train": (
        changed("return Half()", "class Inner(ClientStep):\n                pass\n            return Inner()"),
        "Can't instantiate abstract class Inner",
    ),
    "a tensor set too few": (
        with_function("def payload(self, group):\n    return {}"),
        "`payload` holds the tensor sets [], and `sent` of {name}:Half lists ['weights']",
    ),
    "a tensor too few": (
        with_function(f"def payload(self, group):\n    {LESS}"),
        "the tensor set 'weights' of `payload` is not the one that `sent` of {name}:Half lists: missing tensor ",
    ),
    "another shape": (
        with_function(
            "def payload(self, group):\n"
            "    return {'weights': {n: v[None] for n, v in super().payload(group)['weights'].items()}}"
        ),
        "has shape [1, ",
    ),
    "a payload that fails": (
        with_function("def payload(self, group):\n    return self.nothing"),
        "AttributeError: 'Mine' object has no attribute 'nothing'",
    ),
    "a client step that returns another tensor set": (
        changed("return answer", "answer.tensor_sets['more'] = {}\n            return answer"),
        "{name}:Half returns tensor sets ['more', 'weights'], but lists ['weights']",
    ),
    "a client step that returns a tensor too few": (
        changed("return answer", "answer.tensor_sets['weights'].popitem()\n            return answer"),
        "{name}:Half ",
    ),
    "a fact that is not listed": (
        changed('return {"largest": 1}', 'return {"least": 1}'),
        "{name}:Half returns facts {{'largest': 1}}, but lists {{'least': 1}}",
    ),
    "a client step that fails": (
        changed("answer = super().train(context)", "answer = super().trian(context)"),
        "AttributeError: 'super' object has no attribute 'trian' ",
    ),
    "a server half that wants another tensor set": (
        with_function("def absorb(self, contribution):\n    contribution.sum_of('gradient')"),
        "the update holds no sum of the tensor set 'gradient'",
    ),
    "an absorb that wants sums and own tensor sets at once": (
        changed(
            "        def loss(self, context, model):",
            """        def returned(self, family, architecture):
            own = TensorSet.of({"seen": TensorSpec((2,), torch.float32, (None,))})
            return super().returned(family, architecture) | {"own": own}

        def loss(self, context, model):""",
        ).replace("return answer", 'answer.tensor_sets["own"] = {"seen": torch.ones(2)}\n            return answer')
        + textwrap.indent(
            "def absorb(self, contribution):\n    contribution.own('own')\n    super().absorb(contribution)\n",
            " " * 8,
        ),
        "`absorb` must take the sums and one device's own tensor sets as two contributions too",
    ),
    "a tensor set of something else than specs": (
        changed(
            "        def loss(self, context, model):",
            """        def returned(self, family, architecture):
            return {"own": TensorSet.of({"seen": (2,)})}

        def loss(self, context, model):""",
        ),
        "the tensor 'seen' of a tensor set is described by (2,), and must be by a TensorSpec",
    ),
    "a client step that returns no answer": (
        changed("return answer", "return None"),
        "`train` of {name}:Half must return a wildflower.strategies.method.Answer, not a NoneType",
    ),
    "figures that are none": (
        changed('return {"largest": max', 'return {"largest": lambda: max'),
        "`finish_round` must return numbers by name: 'largest' is no number but a function",
    ),
    "figures that are tensors": (
        changed('return {"largest": max', 'return self.weights or {"largest": max'),
        "is no number but a Tensor",
    ),
    "weights of other shapes after a round": (
        changed("torch.lerp(old, self.weights[n], self.params.damping)", "self.weights[n][None]"),
        "the weights that `finish_round` leaves are not those of the model ",
    ),
    "weights that are lost in a round": (
        changed("for n, old in before.items()}", "for n, old in list(before.items())[1:]}"),
        "Mine",
    ),
    "a state that is no JSON": (
        with_function("def state(self):\n    return State(super().state().tensors, {'seen': {1, 2}})"),
        "`state` holds values that are no JSON: ",
    ),
    "a state of another kind": (
        with_function("def state(self):\n    return self.weights"),
        "`state` must return a wildflower.strategies.method.State",
    ),
    "a method that cannot be made": (
        changed("self.params = params", "self.params = params.nothing"),
        "AttributeError: 'Settings' object has no attribute 'nothing'",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", WRONG_HALVES)
def test_halves_that_do_not_go_together_end_the_run_before_round_1(beside, tmp_path, wrong):
    text, words = WRONG_HALVES[wrong]
    name = beside.module(text)
    grid = simulated_grid()
    with pytest.raises(ConfigError) as error:
        run(grid, small_config(tmp_path, strategy=f"{name}:Mine"))
    assert str(error.value).startswith(f"strategy = '{name}:Mine': ")
    assert words.format(name=name) in str(error.value)
    assert grid.sent == []
    if (summary := read_summary(tmp_path / "runs/small")) is not None:  # else there is no run yet
        assert (summary.status, summary.error) == ("failed", str(error.value))


def test_a_method_that_cannot_be_copied_runs_all_the_same(beside, tmp_path):
    name = beside.module(changed("self.params = params", "self.params, self.lock = params, (n for n in (1,))"))
    [record] = read_rounds(run(simulated_grid(), small_config(tmp_path, strategy=f"{name}:Mine", rounds=1)))
    assert record.devices_replied == 4


def test_methods_of_the_project_are_rehearsed_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(FedProx, "payload", lambda self, group: {"weights": {}})
    grid = simulated_grid()
    with pytest.raises(
        ConfigError, match=r"strategy = 'fedprox': the tensor set 'weights' of `payload` .* missing tensor"
    ):
        run(grid, small_config(tmp_path, strategy="fedprox"))
    assert grid.sent == []
    engine, _ = build(small_config(tmp_path, strategy="fedprox", **{"run-name": "another"}))
    with pytest.raises(DryRunError):
        engine.start()


def test_a_node_without_the_module_says_which_it_lacks(beside, tmp_path):
    name = beside.module(FAMILY)
    config = small_config(tmp_path, family=f"{name}:Narrow", strategy="fedavg", rounds=1)
    engine, scorer = build(config)
    grid = simulated_grid()
    client = grid.app

    def elsewhere(message, context):
        message.content["wildflower"]["json"] = message.content["wildflower"]["json"].replace(name, f"{name}_else")
        return client(message, context)

    grid.app = elsewhere
    result = engine.run_round(grid, 1, scorer)
    assert result.record["devices_failed"] == 4
    assert f"there is no module '{name}_else'" in result.devices[0]["outcome"]
