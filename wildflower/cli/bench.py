"""`wildflower bench`: the recorded benchmarks of a clone, listed and started."""

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import wildflower
from wildflower.cli.options import print_table
from wildflower.plugins.nearest import did_you_mean
from wildflower.plugins.user_error import UserError

MAIN = "run"  # the file that stands for its whole folder


class BenchError(UserError):
    """A benchmark that is not there; the text says which ones are."""


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The benchmark; without one they are listed.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The benchmark's own, such as --jobs 2.")
    ] = None,
) -> None:
    """Run a recorded benchmark of this clone: what its results lack, as the page in its folder says.

    Its figures and tables are written beside it. It runs in the project's folder.
    """
    project = Path(wildflower.__file__).parents[1]
    if name is None:
        print_table(["benchmark", "what it is about"], benchmarks_of(project).items())
    else:
        start(project, name, arguments or [])


def benchmarks_of(project: Path) -> dict[str, str]:
    """The benchmarks of a project's folder: name -> the first sentence about it.

    `fashion_mnist` is benchmarks/fashion_mnist/run.py, and `hypemefed.cka` is benchmarks/hypemefed/cka.py. Nothing is
    imported. Raises BenchError where the folder has none, as an installation without a clone.
    """
    found = {}
    for path in sorted((project / "benchmarks").glob("*/*.py")):
        tree = ast.parse(path.read_bytes())
        if any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body):
            name = path.parent.name if path.stem == MAIN else f"{path.parent.name}.{path.stem}"
            lines = (ast.get_docstring(tree) or "").partition("\n\n")[0].splitlines()
            found[name] = " ".join(lines).partition("; ")[0]
    if not found:
        raise BenchError(f"{project} has no folder of benchmarks: they belong to a clone of the project")
    return dict(sorted(found.items()))


def start(project: Path, name: str, arguments: Sequence[str]) -> NoReturn:
    """Let a benchmark take this process's place, in the project's folder, as its page says: `python -m benchmarks...`.

    Raises:
        BenchError: there is none of that name.
    """
    known = benchmarks_of(project)
    if name not in known:
        meant = did_you_mean(name, known) or "`wildflower bench` lists them"
        raise BenchError(f"there is no benchmark {name!r}: {meant}")
    module = f"benchmarks.{name}" if "." in name else f"benchmarks.{name}.{MAIN}"
    os.chdir(project)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
