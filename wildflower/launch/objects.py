"""An experiment of objects in Python, written into a folder as an experiment file with what it names.

The folder holds `experiment.toml` and, of what was given as objects, `own_model.py`, `own_data.py`, a file for a
method, `data.safetensors`, `weights.safetensors` and `fleet.toml`. From there on it is an experiment like any other.
"""

from __future__ import annotations

import filecmp
import functools
import inspect
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from wildflower.launch.experiment_file import SettingsError, inline, nested_toml
from wildflower.plugins.beside import with_imported
from wildflower.plugins.raised_as import raised_as
from wildflower.server_app.inline_tables import to_toml
from wildflower.server_app.run_folder import is_run

FOLDER, EXPERIMENT = "experiment", "experiment.toml"
MODEL, DATA, FLEET, WEIGHTS = "own_model", "own_data", "fleet.toml", "weights.safetensors"
USUAL_FLEET = "five-memories"
"""Of data of one's own, for any number of devices."""

NOT_WRITTEN = ("resume", "resume-from", "run-name", "output-dir", "workers")
"""Keys that say where and how a run goes on, and are no part of an experiment."""

MODEL_CAN_BE = (
    "must be a class of nn.Module, a function that returns a module, a module itself, or the name of a family such as "
    "'cnn3'"
)


@dataclass(frozen=True)
class Objects:
    """Arguments of `wf.run` beside settings; see there.

    methods: further classes of methods, which a sweep compares.
    """

    model: object = None
    data: object = None
    label: str | None = None
    test: object = None
    loss: object = None
    metric: object = None
    levels: object = None
    methods: tuple[type, ...] = ()

    def __bool__(self) -> bool:
        """Whether any is given."""
        own = (self.model, self.data, self.label, self.test, self.loss, self.metric, self.levels)
        return bool(self.methods) or any(value is not None for value in own)


def are_objects(objects: Objects, settings: Mapping[str, Any]) -> bool:
    """Return whether an experiment must be written down: whether anything in it is no setting's value."""
    fleet = settings.get("fleet", "")
    return bool(objects) or isinstance(settings.get("strategy"), type) or not isinstance(fleet, str)


@contextmanager
def written_down(
    base: Mapping[str, Any], objects: Objects, settings: Mapping[str, Any], beside: Path, folder: Path
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Write an experiment into a folder, from which a `with` block starts it; yields its file and its settings.

    What is there already must be the same, if there are runs of it. A folder that is new is removed again if the block
    fails before a run has left anything beside it.

    Args:
        base: keys of an experiment file that the objects are laid over.
        beside: where modules lie that the keys name.
        folder: of the run or the sweep; the experiment lies in a folder of its own in it.

    Raises SettingsError.
    """
    target = folder / FOLDER
    with tempfile.TemporaryDirectory(prefix="wildflower-") as made:
        _copy_named(Path(made), {**base, **settings}, beside)
        keys = _write(Path(made), target, base, objects, settings)
        if target.exists() and (is_run(folder) or any(is_run(run) for run in folder.iterdir())):
            _check_same(Path(made), target)
        elif target.exists():
            shutil.rmtree(target)
        first = next((parent for parent in reversed([target, *target.parents]) if not parent.exists()), None)
        try:
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in sorted(Path(made).iterdir()):
                if file.is_dir():
                    shutil.copytree(file, target / file.name, dirs_exist_ok=True)
                else:
                    shutil.copyfile(file, target / file.name)
            yield target / EXPERIMENT, keys
        except BaseException:
            if first is not None and [*folder.iterdir()] == [target]:
                shutil.rmtree(first)
            raise


def _copy_named(made: Path, keys: Mapping[str, Any], beside: Path) -> None:
    """Copy the modules that lie beside an experiment and are named in it."""
    for value in keys.values():
        for name in re.findall(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*", value) if isinstance(value, str) else ():
            path = next((p for p in (beside / name, beside / f"{name}.py") if p.exists()), None)
            if path is not None and (path.is_file() or (path / "__init__.py").is_file()):
                _copy_all(made, with_imported(name, path).values())


def _check_same(made: Path, there: Path) -> None:
    """Raise SettingsError where an earlier call wrote other objects; settings may differ as a run's may."""
    for file in sorted(made.rglob("*")):
        other = there / file.relative_to(made)
        same = file.name == EXPERIMENT or file.is_dir() or (other.is_file() and filecmp.cmp(file, other, shallow=False))
        if not same:
            raise SettingsError(
                f"{other} is of other objects than these: give the same model, data and fleet again to go on, or "
                "another run_name or folder"
            )


def _write(
    made: Path, target: Path, base: Mapping[str, Any], objects: Objects, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write everything into `made`, as it will lie in `target`; returns the settings."""
    from wildflower.server_app.config import RunConfig

    keys = {**base, **settings}
    for name in ("label", "test", "loss", "metric"):
        if objects.data is None and getattr(objects, name) is not None:
            raise SettingsError(f"{name}: it belongs to data, which is not given: give data=, or name a task of yours")
    if objects.data is not None:
        _refuse(keys, "data", ("task", "data-dir", "task-arguments"))
        keys |= _data(made, target, objects, keys)
        keys.setdefault("fleet", USUAL_FLEET)
    if objects.model is not None:
        _refuse(keys, "model", ("family", "family-arguments"))
        keys |= _model(made, target, objects)
    elif objects.levels is not None:
        raise SettingsError("levels: there is no model that has them: give model=")
    for kind in objects.methods:
        _write_method(made, kind)
    if isinstance(keys.get("strategy"), type):
        _write_method(made, keys["strategy"])
        keys["strategy"] = method_reference(keys["strategy"])
    if not isinstance(keys.get("fleet", ""), str):
        keys |= _fleet(made, target, keys["fleet"], keys)
    asked = RunConfig.model_fields["devices_per_round"].default
    if "devices-per-round" not in keys and isinstance(keys.get("devices"), int):
        keys["devices-per-round"] = min(asked, keys["devices"])
    if isinstance(keys.get("budget"), int | float):
        keys["budget"] = {"memory-fraction": keys["budget"]}
    text = nested_toml({key: value for key, value in keys.items() if key not in NOT_WRITTEN})
    (made / EXPERIMENT).write_text(text, encoding="utf-8")
    return keys


def _refuse(keys: Mapping[str, Any], given: str, others: Sequence[str]) -> None:
    if both := next((key for key in others if key in keys), None):
        raise SettingsError(f"{given} and {both.replace('-', '_')} are given: leave one of them out")


# The model ------------------------------------------------------------------------------------------------------------


def _model(made: Path, target: Path, objects: Objects) -> dict[str, Any]:
    from torch import nn

    from wildflower.launch.instance import add_instance, save_weights
    from wildflower.launch.source import Source
    from wildflower.models.base import Family

    model, arguments = objects.model, _levels(objects)
    if isinstance(model, str):
        return {"family": model} | _family_arguments(arguments)
    if isinstance(model, functools.partial):
        if model.args:
            raise SettingsError("model: a partial with values by place cannot be written down: give them by name")
        arguments["arguments"] = dict(model.keywords)
        model = model.func
    found: dict[str, Any] = {}
    source = Source("model")
    if isinstance(model, nn.Module):
        if arguments.get("levels", [{}]) != [{}]:
            raise SettingsError(
                "levels: a module that is made already has one size: give its class as model=, or levels=[{}] to give "
                "every device the whole module"
            )
        name = "model"
        add_instance(source, name, model)
        save_weights(model, made / WEIGHTS)
        found["initial"] = {"weights": str(target / WEIGHTS)}
    elif isinstance(model, type | FunctionType):
        if isinstance(model, type) and not issubclass(model, nn.Module | Family):
            raise SettingsError(f"model = {model.__qualname__}: {MODEL_CAN_BE}")
        name = model.__name__
        if not (isinstance(model, type) and issubclass(model, Family)):
            _check_arguments(model, arguments)
        source.add(name, model)
    else:
        raise SettingsError(f"model = {model!r}: {MODEL_CAN_BE}")
    _write_source(made, MODEL, source, "The model that `wf.run` was given.")
    return found | {"family": f"{MODEL}:{name}"} | _family_arguments(arguments)


def _check_arguments(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise SettingsError where a model has arguments that nobody gives."""
    given = {"classes", "num_classes", "input_shape", *arguments.get("arguments", {})}
    given |= {key for level in arguments.get("levels", []) for key in level}
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in given
    ]
    if missing:
        raise SettingsError(
            f"model: {model.__name__} needs {', '.join(missing)}: give them by functools.partial({model.__name__}, "
            f"{missing[0]}=...), as defaults, or by levels=[{{{missing[0]!r}: ...}}, ...]; classes and input_shape are "
            "filled in"
        )


def _levels(objects: Objects) -> dict[str, Any]:
    levels = objects.levels
    if levels is None:
        return {}
    if not isinstance(levels, list | tuple) or not levels or not all(isinstance(level, Mapping) for level in levels):
        raise SettingsError(
            f"levels = {levels!r}: must be a list of the arguments of each size, from the smallest to the largest, "
            "such as [{'width': 8}, {'width': 16}]"
        )
    return {"levels": [dict(level) for level in levels]}


def _family_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"family-arguments": inline(arguments)} if arguments else {}
    except TypeError:
        raise SettingsError(
            f"model: its arguments must be numbers, texts, True, False, or lists or dicts of these, not {arguments!r}"
        ) from None


# The data -------------------------------------------------------------------------------------------------------------


def _data(made: Path, target: Path, objects: Objects, keys: Mapping[str, Any]) -> dict[str, Any]:
    from wildflower.launch.given_data import data_set_of
    from wildflower.launch.source import Source
    from wildflower.tasks.data import write_data_set
    from wildflower.tasks.given import FILE

    own_model = objects.model is not None and not isinstance(objects.model, str)
    data, devices = data_set_of(objects.data, objects.label, objects.test, flat=own_model)
    write_data_set(data, made / FILE)
    source = Source("loss")
    source.need("from wildflower.tasks.given import given_task")
    shape = data.train.inputs.shape
    family = "mlp" if len(shape) == 2 or (len(shape) == 3 and shape[-1] == 1) else "cnn3"
    arguments = [to_toml(family)]
    if objects.loss is not None:
        arguments.append(f"loss={_loss(source, objects.loss)}")
    source.what = "metric"
    if objects.metric is not None:
        arguments.append(f"metric={_metric(source, objects.metric)}")
    source.append(f"TASK = given_task({', '.join(arguments)})")
    _write_source(made, DATA, source, "The data that `wf.run` was given, with their loss and metric.")
    found: dict[str, Any] = {"task": f"{DATA}:TASK", "data-dir": str(target)}
    if devices:
        if keys.get("partition", "natural") != "natural":
            raise SettingsError(f"partition = {keys['partition']!r}: data are given by device: leave it out")
        if keys.get("devices", devices) != devices:
            raise SettingsError(f"devices = {keys['devices']}: data are given for {devices} devices: leave it out")
        found |= {"partition": "natural", "devices": devices}
    elif "partition" not in keys:
        found["partition"] = "iid" if data.train.label_kind != "classes" else "dirichlet"
    return found


def _loss(source: Any, loss: object) -> str:
    from torch import nn

    from wildflower.launch.instance import add_instance

    if isinstance(loss, nn.Module):
        if list(loss.parameters()):
            raise SettingsError("loss: a module with parameters is no loss: make it a part of the model")
        add_instance(source, "loss", loss)
        return "loss()"
    if not callable(loss) or isinstance(loss, type):
        raise SettingsError(
            f"loss = {loss!r}: must be a function of (outputs, labels) that returns the mean over a batch, such as "
            "torch.nn.functional.cross_entropy, or a module such as nn.CrossEntropyLoss()"
        )
    return str(source.expression(loss, "loss"))


def _metric(source: Any, metric: object) -> str:
    from wildflower.tasks.metrics import METRICS, Metric

    if isinstance(metric, str) and metric in METRICS:
        return repr(metric)
    if isinstance(metric, str) or not (callable(metric) or isinstance(metric, Metric)):
        raise SettingsError(
            f"metric = {metric!r}: must be a function of (outputs, labels) that returns a number for each example, or "
            f"their mean, the higher the better; or one of {', '.join(METRICS)}"
        )
    if isinstance(metric, Metric):
        return f"{source.expression(type(metric), 'metric')}()"
    return str(source.expression(metric, "metric"))


# The method -----------------------------------------------------------------------------------------------------------


def method_reference(kind: object) -> str:
    """Return how a run names a class of a method, once the class is written down."""
    from wildflower.launch.source import reference_of
    from wildflower.strategies.method import Method

    if not isinstance(kind, type) or not issubclass(kind, Method):
        raise SettingsError(
            f"strategy = {getattr(kind, '__qualname__', kind)}: must be a class of wildflower.method.Method, or the "
            "name of a method such as 'heterofl'"
        )
    if kind.__module__.startswith("wildflower."):
        return kind.name()
    if reference_of(kind) is not None:  # it has a file of its own, after which its keys are called
        return f"{kind.__module__}:{kind.__name__}"
    return f"{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', kind.__name__).lower()}:{kind.__name__}"


def _write_method(folder: Path, kind: type) -> None:
    from wildflower.launch.source import Source

    module, _, name = method_reference(kind).partition(":")
    if not name:
        return
    source = Source("strategy")
    source.add(name, kind)
    if source.pieces:
        _write_source(folder, module, source, f"The method that `wf.run` was given: {name}.")
    else:
        _copy_all(folder, source.copied.values())


def _write_source(folder: Path, name: str, source: Any, title: str) -> None:
    (folder / f"{name}.py").write_text(source.text(title), encoding="utf-8")
    _copy_all(folder, source.copied.values())


def _copy_all(folder: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)


# The fleet ------------------------------------------------------------------------------------------------------------


def _fleet(made: Path, target: Path, fleet: object, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Write a fleet of memory sizes, or of tables as a fleet file has them."""
    can_be = (
        f"fleet = {fleet!r}: must be the name of a fleet, a list of memory sizes such as ['2 GB', '512 MB'], a dict of "
        "names and sizes, or a list of tables such as {'name': 'phone', 'memory': '2 GB', 'share': 0.5} "
        "(docs/fleets.md)"
    )
    top: dict[str, Any] = {}
    if isinstance(fleet, Mapping) and "group" in fleet:
        top = {key: value for key, value in fleet.items() if key != "group"}
        fleet = fleet["group"]
    if not (groups := _groups(fleet)):
        raise SettingsError(can_be)
    if not any("count" in group or "share" in group for group in groups):
        groups = [{**group, "share": 1 / len(groups)} for group in groups]
    with raised_as(SettingsError, "fleet: ", SettingsError):
        text = nested_toml({**top, "group": groups})
    (made / FLEET).write_text(text, encoding="utf-8")
    found: dict[str, Any] = {"fleet": str(target / FLEET)}
    counts = [group.get("count") for group in groups]
    if all(isinstance(count, int) for count in counts) and "devices" not in keys:
        found["devices"] = sum(counts)
    return found


def _groups(fleet: object) -> list[dict[str, Any]]:
    """Return the groups of a fleet as tables; [] for what is none."""
    if isinstance(fleet, Mapping):
        tables = {name: value if isinstance(value, Mapping) else {"memory": value} for name, value in fleet.items()}
        return [{"name": str(name), **table} for name, table in tables.items()]
    if not isinstance(fleet, list | tuple):
        return []
    if all(isinstance(size, str) for size in fleet):
        shares = {size: count / len(fleet) for size, count in Counter(fleet).items()}
        return [{"name": size.replace(" ", "-"), "memory": size, "share": share} for size, share in shares.items()]
    if all(isinstance(group, Mapping) for group in fleet):
        return [{"name": f"group-{place}", **group} for place, group in enumerate(fleet, start=1)]
    return []
