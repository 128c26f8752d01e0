"""`wildflower check`: what can be known of a run before its first round, on a page for a person.

A run takes the same steps before it begins (`wildflower.launch.before`) and stops at the first one that fails. The page
goes on with what does not depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

from wildflower.cli.plan import plan_of, plan_tables
from wildflower.launch.before import Deployment, check_buildable, check_disk, check_same_files, steps_of_start
from wildflower.launch.forked_server import told_later
from wildflower.launch.terminal import say, tables_of
from wildflower.models.base import Family
from wildflower.models.levels import Levels
from wildflower.rounds.delivery import evenly_spread
from wildflower.rounds.engine import Engine
from wildflower.rounds.secure_aggregation import block_count
from wildflower.server_app.app import start
from wildflower.server_app.config import RunConfig
from wildflower.server_app.inputs import check_files, task_spec
from wildflower.server_app.round_settings import privacy_of
from wildflower.server_app.run_folder import JournalError, is_run, read_rounds
from wildflower.server_app.units import counted
from wildflower.strategies.method import Method
from wildflower.tasks.inspection import inspect_device, inspect_whole
from wildflower.tasks.remarks import Remark, by_kind
from wildflower.tasks.task import Task, TaskSpec, load_task

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_CLASSES, MAX_DEVICES, MAX_NAMES = 20, 50, 6
SOMEWHERE = Deployment("the SuperLink", None)


@dataclass
class Page:
    """Findings, in the order in which it is read.

    Attributes:
        sections: a title and what stands below it: lines, and tables.
        warnings: what a person should look at; the run begins all the same.
        problems: why the run would not begin, each with what would be right.
    """

    sections: list[tuple[str, list[str | Table]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, title: str, *content: str | Table) -> None:
        """Add a section, unless it has nothing to say."""
        if content:
            self.sections.append((title, list(content)))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note why a `with` block fails, and go on behind it."""
        try:
            yield
        except (ValueError, OSError, JournalError) as error:
            if (why := str(error)) not in self.problems:
                self.problems.append(why)

    def print(self, console: Console) -> None:
        """Print the page, and in its last line whether the run can begin."""
        for title, content in self.sections:
            console.print(f"[bold]{title}[/]", highlight=False)
            for part in content:
                if isinstance(part, str):
                    say(console, f"  {part}")
                else:
                    console.print(part)
        for kind, color, lines in (("Warning", "yellow", self.warnings), ("Error", "bold red", self.problems)):
            for line in dict.fromkeys(lines):
                say(console, line, f"{kind}: ", color)
        if self.problems:
            console.print(f"The run cannot begin: {counted(len(self.problems), 'error')}.")
        else:
            console.print("The run can begin.", highlight=False)


def check(config: RunConfig, run_dir: Path, width: int) -> Page:
    """Look at everything that can be known of a run before its first round. Nothing is written.

    Args:
        config: of the run, with absolute paths.
        run_dir: where it would lie.
        width: of the terminal, in letters.
    """
    page = Page()
    real = not config.fleet or config.engine == "nodes"
    _experiment(page, config, run_dir)
    for step in steps_of_start(config, run_dir, SOMEWHERE if real else None):
        with page.noting():
            step()
    if ignored := config.ignored_text():
        page.warnings.append(ignored)
    if config.partition == "own" and not config.fleet:
        page.add("Data", "on the devices: what is left out there is told when they are asked, before round 1")
        page.add("Model", "its inputs and classes follow from what devices agree on, when they are asked")
        page.add("Devices", "real ones, which `wildflower run` reaches with --superlink: fleet = '' simulates none")
        _resumed(page, config, run_dir, None)
        return page
    engine = None
    with told_later() as said, page.noting():
        engine, _ = check_buildable(config)
    _data(page, config, engine, width)
    if engine is None:
        # What is wrong beside that for which the run could not be built, such as with its fleet.
        for look in (lambda: check_files(config, {}), lambda: privacy_of(config)):
            with told_later(), page.noting():
                look()
    else:
        with told_later() as later, page.noting():
            start(engine, config)
        said += later
        _model(page, engine)
        _devices(page, engine, config)
        with page.noting():
            page.warnings += check_disk(engine, config, run_dir)
        _resumed(page, config, run_dir, engine)
    told = [record.getMessage() for record in said if INFO <= record.levelno < WARNING]
    page.add("Told as the run is built", *dict.fromkeys(told))  # a method from outside is begun twice
    page.warnings += [record.getMessage() for record in said if record.levelno >= WARNING]
    return page


def _experiment(page: Page, config: RunConfig, run_dir: Path) -> None:
    lines = [
        f"{config.strategy} on {config.task}, {counted(config.rounds, 'round')}, {config.devices_per_round} of "
        f"{config.devices} devices per round, seed {config.seed}"
    ]
    before = len(read_rounds(run_dir)) if config.resume and run_dir.is_dir() else 0
    lines.append(f"will write to {run_dir}" + (f", which goes on after {counted(before, 'round')}" if before else ""))
    page.add("Run", *lines)


def _resumed(page: Page, config: RunConfig, run_dir: Path, engine: Engine | None) -> None:
    """Note what of a run to be resumed is not as it was when it began."""
    if config.resume and is_run(run_dir):
        with page.noting():
            check_same_files(run_dir, config, engine)


def _data(page: Page, config: RunConfig, engine: Engine | None, width: int) -> None:
    """What there is to train and to test on: by class, by device, and what was left out."""
    if config.partition == "own":
        _own_data(page, config, engine, width)
        return
    task = None
    with page.noting():
        task = load_task(task_spec(config))
    if task is None:
        return
    found = inspect_whole(task)
    shape = "x".join(map(str, task.input_shape))
    lines: list[str | Table] = [
        f"{len(task.train):,} examples to train on, {len(task.test):,} to test on, inputs {shape}",
        *_by_device(task, config.devices),
        *_classes(found.counts, width),
    ]
    page.add("Data", *lines)
    page.warnings += [
        f"class {name!r} has no example to train on" for name, (train, _) in found.counts.items() if not train
    ]


def _own_data(page: Page, config: RunConfig, engine: Engine | None, width: int) -> None:
    """Add the same of simulated devices that have folders of their own.

    What is left out there is among the warnings, unless devices agree on nothing.
    """
    spec = task_spec(config)
    if engine is not None:
        spec = TaskSpec.from_json(engine.settings.task)
    counts: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    rows: list[list[str]] = []
    left_out: dict[int, tuple[Remark, ...]] = {}
    for device in evenly_spread(range(config.devices), MAX_DEVICES):
        found = inspect_device(spec, device)
        for name, (train, test) in found.counts.items():
            counts[name] += train
            tests[name] += test
        if not found.problem:  # which tells what was left out
            left_out[device] = found.remarks
        by_class = ", ".join(f"{name} {train}" for name, (train, _) in found.counts.items() if train)
        rows.append([str(device), found.problem or by_class or ("none" if found.counts else "numbers as labels")])
    both = {name: (counts[name], tests[name]) for name in sorted(counts)}
    tables = tables_of("", ["device", "examples to train on"], rows, width)
    share = f"each device keeps {config.test_fraction:.0%} of them for its own test"
    page.add("Data", *_classes(both, width), *tables, *([share] if config.test_fraction else []))
    if engine is None:
        page.warnings += [f"Data of {line}" for line in by_kind(left_out)]


def _classes(counts: Mapping[str, tuple[int, int]], width: int) -> list[Table]:
    """A table of examples by class; of many classes the largest and the smallest ones."""
    names = sorted(counts, key=lambda name: -counts[name][0]) if len(counts) > MAX_CLASSES else list(counts)
    rows = [[name, f"{counts[name][0]:,}", f"{counts[name][1]:,}"] for name in names]
    if len(rows) > MAX_CLASSES:
        half = MAX_CLASSES // 2
        rows[half:-half] = [[f"{len(rows) - 2 * half} more classes", "...", "..."]]
    return tables_of("", ["class", "to train on", "to test on"], rows, width) if rows else []


def _by_device(task: Task, devices: int) -> Iterator[str]:
    """How many examples devices hold, and of how many classes, of at most so many devices."""
    looked_at = evenly_spread(range(devices), MAX_DEVICES)
    holds = [task.training_examples(device) for device in looked_at]
    of = f"devices hold {_span(holds)} examples to train on (median {median_low(holds):,})"
    if task.label_kind == "classes":
        kinds = [len(task.train.labels[task.shard(device).train].unique()) for device in looked_at]
        of += f", of {_span(kinds)} of the {task.classes} classes"
    yield of + (f"; {len(looked_at)} of {devices:,} devices were looked at" if len(looked_at) < devices else "")
    if empty := sum(not count for count in holds):
        yield f"{counted(empty, 'device')} of them {'have' if empty > 1 else 'has'} nothing to train on"


def _span(counts: list[int]) -> str:
    """The smallest and the largest count, or the one that all are."""
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _model(page: Page, engine: Engine) -> None:
    method = engine.method
    whole = method.cost(method.family.full()).parameters
    smallest = method.cost(method.smallest_architecture)
    page.add(
        "Model",
        f"{method.family.spec()['name']}, {whole:,} parameters as a whole",
        f"the smallest that {method.name()} gives has {smallest.parameters:,} parameters and takes "
        f"{smallest.peak_training_memory_bytes / 1e6:.3g} MB of memory in training",
        *_levels(method),
        *_buffers(method.family),
    )


def _levels(method: Method) -> Iterator[str]:
    """How many levels a user's function has, where there are several."""
    family = method.family
    if isinstance(family, Levels) and len(family.levels) > 1:
        small, large = (method.cost(level).parameters for level in (family.smallest(), family.full()))
        yield f"{len(family.levels)} levels, each a part of the next, of {small:,} to {large:,} parameters"


def _buffers(family: Family) -> Iterator[str]:
    """Which buffers of the largest model are averaged, and which are as the constructor makes them."""
    network = family.without_memory(family.full()).train()
    state = network.state_dict().keys()
    travel = state - dict(network.named_parameters()).keys()
    buffers = [name for name, _ in network.named_buffers()]
    if averaged := [name for name in buffers if name in travel]:
        yield f"buffers that travel and are averaged: {_some(averaged)}"
    if stay := [name for name in buffers if name not in state]:
        yield f"buffers that do not travel and are made anew in every round: {_some(stay)}"


def _some(names: Sequence[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def _devices(page: Page, engine: Engine, config: RunConfig) -> None:
    """Who gets which model, as `wildflower plan` has it; of real devices nothing is known yet."""
    if not engine.population.simulated:
        page.add(
            "Devices",
            "are asked when they connect; after a run of one round `wildflower plan --run` shows what each gets",
        )
        minimum = config.secure_aggregation.minimum
        if minimum and block_count(config.devices_per_round, minimum) == 1:
            page.warnings.append(
                f"secure-aggregation.minimum = {minimum} with devices-per-round = "
                f"{config.devices_per_round}: the devices of a round are a single block. If a sum is lost and then "
                "one of its devices leaves, the others train no more from these weights: ask for more devices "
                "(docs/privacy.md)"
            )
        return
    plan = plan_of(engine, config)
    page.add("Devices", *plan_tables(plan, by_node=False))
    page.warnings += plan.warnings
    if plan.epsilon is not None:
        page.add("Privacy", f"the run costs epsilon {plan.epsilon:.3g} with delta {plan.delta:g} (docs/privacy.md)")
    if config.secure_aggregation.is_on and len(plan.devices) == sum(plan.counts.values()):
        for parameters, count in Counter(device.parameters for device in plan.devices if device.parameters).items():
            if count < config.secure_aggregation.minimum:
                page.warnings.append(
                    f"secure-aggregation.minimum = {config.secure_aggregation.minimum}: only "
                    f"{counted(count, 'device')} can get the model of {parameters:,} parameters, so that "
                    "what they learn never counts: fewer candidates (widths), or a smaller secure-aggregation.minimum"
                )
