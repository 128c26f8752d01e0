"""`wildflower supernet`: train a weight-sharing supernet on public data, before any device learns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from rich.console import Console
from safetensors import SafetensorError

from wildflower.launch.terminal import say
from wildflower.models.elastic import ElasticFamily, ElasticSpace
from wildflower.models.family import make_family
from wildflower.models.initial import load_initial
from wildflower.models.supernet import Supernet
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.user_error import UserError
from wildflower.server_app.config import RunConfig
from wildflower.server_app.inline_tables import parse_arguments
from wildflower.server_app.round_settings import local_training
from wildflower.server_app.whole_files import file_written_whole, newest_whole, written_whole
from wildflower.strategies.predictor import MIN_PAIRS, fit_predictor
from wildflower.strategies.supernet_training import (
    CALIBRATION_BATCHES,
    SCORED_TOGETHER,
    SupernetParams,
    SupernetTraining,
    accuracy_of,
    batches_of,
    calibrated,
)
from wildflower.tasks.task import Task, TaskSpec, load_task

# Keys of the experiment that change how devices learn, and that this training does not have.
NOT_HERE = {
    "freeze": "all of a supernet is trained: leave it empty",
    "learning-rates": "all parts of a supernet are trained with learning-rate: leave it empty",
    "compute.layout": "images lie contiguous in a supernet's training: leave it 'contiguous'",
    "micro-batch-size": "a supernet is trained over whole batches: leave it at 0",
    "schedule.kind": "the rate of a supernet's training falls along a cosine: leave it as it is",
    "schedule.decay-rounds": "the rate of a supernet's training falls along a cosine: leave it empty",
    "schedule.decay-factor": "the rate of a supernet's training falls along a cosine: leave it as it is",
    "initial.weights": "the first weights of a supernet's training are those of --initial: name the file there",
    "initial.names": "the file of --initial has torchvision's names or the family's own: leave it empty",
}
CHECKPOINT_STEPS = 100
LINE_STEPS = 100


class SupernetError(UserError):
    """A supernet that cannot be trained; the text says why, and what would be right."""


@dataclass(frozen=True)
class Wanted:
    """The request to the command.

    Attributes:
        output: the safetensors file of the trained supernet; what a resumed training needs lies beside it.
        held_out: share of the public training examples on which sub-networks are scored.
        pairs: sub-networks whose accuracies are measured in the end, which a predictor can learn from.
        initial: a file of weights that the training begins with, such as torchvision's; None: all are drawn.
    """

    output: Path
    params: SupernetParams
    held_out: float
    pairs: int
    initial: Path | None = None


def train(config: RunConfig, wanted: Wanted, console: Console) -> Path:
    """Train, or go on where a training of the same settings was stopped; return the file. Raises SupernetError.

    Beside `output` it leaves `<name>.json`, the family and the sub-networks that were measured
    (`wildflower.strategies.predictor.load_pairs`), and the folder `<name>.checkpoint`, from which it goes on.
    """
    torch.set_num_threads(1)
    _check_keys(config)
    task, supernet = _prepared(config)
    if wanted.initial is not None:
        _pretrained(supernet, wanted.initial, console)
    examples, held = _parted(task, wanted.held_out, config.seed)
    training = SupernetTraining(supernet, task, examples, local_training(config), wanted.params, config.seed)
    settings = {
        "config": {key: value for key, value in config.to_dict().items() if key not in ("output-dir", "run-name")},
        "params": wanted.params.model_dump(),
        "held_out": wanted.held_out,
        "initial": str(wanted.initial),
    }
    checkpoint = wanted.output.with_name(wanted.output.stem + ".checkpoint")
    _check_output(wanted.output)
    _take_up(training, checkpoint, settings, console)
    _advance(training, checkpoint, settings, console)
    with raised_as(SupernetError, "", FloatingPointError):
        training.check_finite()

    calibration = [
        (inputs, labels)
        for inputs, labels in batches_of(task, task.train, examples, config.batch_size, CALIBRATION_BATCHES)
        if len(labels) > 1  # batch norm cannot normalize a single example over a 1x1 map
    ]
    test = list(batches_of(task, task.train, held, SCORED_TOGETHER))
    measured = _measured(supernet, wanted.pairs, config.seed, calibration, test, console)
    supernet.set(supernet.space.largest())
    weights = {n: t.detach().contiguous() for n, t in calibrated(supernet.extract(), calibration).state_dict().items()}
    facts = {"family": supernet.space.family.spec(), "steps": training.step, "measured": measured}
    # The facts first: where there are weights, they are whole.
    _written(wanted.output.with_suffix(".json"), json.dumps(facts).encode())
    _written(wanted.output, safetensors.torch.save(weights))
    return wanted.output


def _check_keys(config: RunConfig) -> None:
    """Raise SupernetError where the experiment has a key of local training that a supernet's training lacks."""
    values, usual = config.to_dict(), RunConfig().to_dict()
    if wrong := [f"{key} = {values[key]!r}: {why}" for key, why in NOT_HERE.items() if values[key] != usual[key]]:
        raise SupernetError("; ".join(wrong))
    if config.batch_size < 2:
        raise SupernetError(f"batch-size = {config.batch_size}: batch norm cannot normalize one example; set 2 or more")


def _check_output(output: Path) -> None:
    """Raise SupernetError where the files of the supernet could not be written in the end, before it is trained."""
    with _told(output):
        for file in (output, output.with_suffix(".json")):
            if file.is_dir():
                raise SupernetError(f"{file} is a folder: name a file by --output, such as supernet.safetensors")
        if output.parent.is_file():
            raise SupernetError(f"{output} cannot be written: {output.parent} is a file: name a folder by --output")
        output.parent.mkdir(parents=True, exist_ok=True)
        check = output.with_name(output.name + ".check")
        check.touch()
        check.unlink()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what goes wrong in writing into a SupernetError that names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise SupernetError(f"{path} cannot be written: {why}: name another --output, or make room there") from None


def _prepared(config: RunConfig) -> tuple[Task, Supernet]:
    data_dir = str(Path(config.data_dir).expanduser().absolute()) if config.data_dir else ""
    with raised_as(SupernetError, "", (ValueError, FileNotFoundError)):
        arguments = config.own_task_arguments()
        task = load_task(
            TaskSpec(name=config.task, devices=1, data_dir=data_dir, seed=config.seed, arguments=arguments)
        )
        spec = {"name": config.family or task.family, **parse_arguments(config.family_arguments)}
        family = make_family({**spec, "input_shape": list(task.input_shape), "classes": task.classes})
    if not isinstance(family, ElasticFamily):
        raise SupernetError(
            f"family = {family.name!r} has no space of once-for-all: use mobilenet-v2, mobilenet-v3 or ofa-resnet50"
        )
    if task.label_kind != "classes":
        raise SupernetError(
            f"task = {config.task!r}: a supernet learns classes, and these labels are {task.label_kind}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return task, Supernet(ElasticSpace.of(family))


def _pretrained(supernet: Supernet, file: Path, console: Console) -> None:
    """Begin with the weights of a file, such as torchvision's, which go into the published sub-network."""
    with raised_as(SupernetError, "--initial "):
        found = load_initial(file, supernet.space.family)
    say(console, f"Initial weights: {found.describe()}")
    supernet.insert(found.architecture, found.tensors)


def _parted(task: Task, held_out: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not 0 < held_out < 1:  # NaN too
        raise SupernetError(f"--held-out {held_out}: give a share between 0 and 1, such as 0.1")
    order = torch.from_numpy(np.random.default_rng([seed, 0, 2]).permutation(len(task.train)))
    count = round(held_out * len(order))
    if not 0 < count < len(order) - 1:
        raise SupernetError(
            f"--held-out {held_out} leaves {count} of {len(order)} examples to be scored on and {len(order) - count} "
            "to learn from: it takes 1 and 2 at least"
        )
    return order[count:], order[:count]


def _take_up(training: SupernetTraining, checkpoint: Path, settings: dict[str, Any], console: Console) -> None:
    folder = newest_whole(checkpoint)
    if folder is None:
        return
    try:
        saved = json.loads((folder / "state.json").read_text())
        if saved["settings"] != json.loads(json.dumps(settings)):
            raise SupernetError(f"{folder} is of a training with other settings: remove it, or name another --output")
        training.load(int(saved["step"]), safetensors.torch.load_file(folder / "state.safetensors"))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise SupernetError(f"{folder} is not a whole checkpoint ({error}): remove it to begin anew") from None
    console.print(f"Going on behind step {training.step}")


def _advance(training: SupernetTraining, checkpoint: Path, settings: dict[str, Any], console: Console) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    steps = training.params.steps
    columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("loss {task.fields[loss]}"))
    bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
    shown: AbstractContextManager[object] = bars if console.is_terminal else nullcontext()
    with shown:
        bar = bars.add_task("", total=steps, completed=training.step, loss="")
        while training.step < steps:
            with raised_as(SupernetError, "", FloatingPointError):
                loss = training.advance()
                saves = training.step % CHECKPOINT_STEPS == 0 or training.step == steps
                if saves:
                    training.check_finite()
            bars.update(bar, completed=training.step, loss=f"{loss:.3f}")
            if not console.is_terminal and training.step % LINE_STEPS == 0:
                console.print(f"step {training.step}/{steps}, loss {loss:.3f}", highlight=False)
            if saves:
                with _told(checkpoint), written_whole(checkpoint) as folder:
                    state = {name: value.contiguous() for name, value in training.state().items()}
                    safetensors.torch.save_file(state, folder / "state.safetensors")
                    values = {"step": training.step, "settings": settings}
                    (folder / "state.json").write_text(json.dumps(values, sort_keys=True))


def _measured(
    supernet: Supernet, pairs: int, seed: int, calibration: list[Any], test: list[Any], console: Console
) -> list[dict[str, Any]]:
    """The accuracies of the largest, the smallest and random sub-networks on held-out examples."""
    space = supernet.space
    assert isinstance(space, ElasticSpace)
    rng = np.random.default_rng([seed, 0, 3])
    largest = tuple(len(options) - 1 for options in space.options)
    chosen = dict.fromkeys([largest, tuple(space.smallest_picks()), *(space.draw(rng) for _ in range(pairs))])
    found: list[dict[str, Any]] = []
    accuracies: list[float] = []
    for number, picks in enumerate(chosen):
        architecture = space.architecture(picks)
        value = accuracy_of(supernet, architecture, calibration, test)
        accuracies.append(value)
        found.append({"picks": list(picks), "architecture": architecture.to_json(), "accuracy": value})
        if number < 2:
            console.print(f"accuracy of the {('largest', 'smallest')[number]}: {value:.4f}", highlight=False)
    if len(found) >= 2 * MIN_PAIRS:
        predictor = fit_predictor(space, list(chosen), accuracies, seed)
        console.print(f"rank correlation of a predictor: {predictor.rank_correlation:.2f}", highlight=False)
    return found


def _written(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there."""
    with _told(path), file_written_whole(path, private=False) as file:
        file.write(content)
