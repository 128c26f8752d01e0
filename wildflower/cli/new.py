"""`wildflower new`: a first file of a method of one's own, which runs at once, and its test."""

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from wildflower.plugins.user_error import UserError

METHOD = '''"""{title}: what it does, in one sentence.

wildflower run EXPERIMENT.toml --set strategy={module}:{name} --set {key}.part=0.3
"""

from collections.abc import Mapping, Sequence

import torch

from wildflower.method import (
    ClientContext,
    ClientStep,
    Field,
    Fraction,
    Loss,
    Network,
    Order,
    Params,
    SubModelMethod,
    Trained,
    Training,
)


class {name}Training(Training):
    """What a device does."""

    def loss(self, context: ClientContext, model: Network) -> Loss:
        return lambda inputs, labels: context.task.loss(model(inputs), labels)


class {name}Params(Params):
    """The settings: their keys are {key}.NAME."""

    part: Fraction = Field(0.5, description="Part of the way that the model goes to the devices' mean")


class {name}(SubModelMethod[{name}Params]):
    """What the server does. Other functions to override: docs/recipes.md."""

    def client_step(self, order: Order) -> ClientStep:
        return {name}Training()

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        before = self.weights
        super().finish_round(trained)  # the mean of what devices return
        self.weights = {{name: torch.lerp(old, self.weights[name], self.params.part) for name, old in before.items()}}
        return {{}}  # figures for the journal
'''

TEST = '''"""{title} runs, and a run that was stopped goes on with the same bits."""

import wildflower as wf
from {module} import {name}


def test_it_runs_and_goes_on(tmp_path):
    given = {{"strategy": {name}, "task": "digits", "devices_per_round": 4, "workers": 1, "output_dir": tmp_path}}
    whole = wf.run(**given, rounds=2, run_name="whole")
    wf.run(**given, rounds=1, run_name="part")
    again = wf.run(**given, rounds=2, run_name="part", resume=True)
    assert list(again.rounds["loss"]) == list(whole.rounds["loss"])
'''

new = typer.Typer(no_args_is_help=True, help="Write a first file of your own, which runs at once.")


@new.callback()
def _what() -> None:
    pass


@new.command()
def method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the method is called, such as my-method.")],
    folder: Annotated[Path, typer.Option(help="Where the files are written.")] = Path(),
) -> None:
    """Write a method of your own and its test: NAME.py and test_NAME.py."""
    for path in write_method(name, folder):
        typer.echo(f"Wrote {path}")
    module = module_of(name)
    typer.echo(f"wildflower run EXPERIMENT.toml --set strategy={module}:{class_of(module)}")


def module_of(name: str) -> str:
    """Return the module of a method of this name; UserError where it cannot have one."""
    from wildflower.strategies import METHODS

    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}", module) or keyword.iskeyword(module):
        raise UserError(f"NAME = {name!r}: must be letters, digits and hyphens, such as my-method")
    if module.replace("_", "-") in METHODS:
        raise UserError(f"NAME = {name!r}: there is a method of this name: take another")
    return module


def class_of(module: str) -> str:
    """Return what the class in a method's module is called."""
    return "".join(part.capitalize() for part in module.split("_") if part)


def write_method(name: str, folder: Path) -> list[Path]:
    """Write a method and its test, and return their files; UserError where one is there already."""
    module = module_of(name)
    words = {
        "module": module,
        "name": class_of(module),
        "key": module.replace("_", "-"),
        "title": module.replace("_", " ").capitalize(),
    }
    files = {folder / f"{module}.py": METHOD, folder / f"test_{module}.py": TEST}
    if there := next((file for file in files if file.exists()), None):
        raise UserError(f"{there} is there already, and is not overwritten: take another name or --folder")
    for file, text in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(**words), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from None
    return list(files)
