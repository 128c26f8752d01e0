"""Python programs of tests. Each runs in a process of its own, forked from one that has loaded PyTorch.

To load PyTorch takes an interpreter nearly two seconds, and tests run about twenty programs. A program finds more
loaded than a new interpreter has: PyTorch and what it loads itself, what multiprocessing needs, and pytest, whose main
module multiprocessing loads into the forked process before the program begins. The modules of the project's tests are
taken out again. So such a program cannot show that a command does not import one of these.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch"])


def run_python(
    *arguments: str,
    folder: Path = Path(__file__).parents[1],
    environment: Mapping[str, str] = os.environ,
    timeout_seconds: float = 300,
) -> CompletedProcess[str]:
    """What `python ARGUMENTS` prints, and its exit code. arguments: "-c", "-m" or a file, as Python takes them.

    folder: the project's by default. environment: all variables that the program has; its PYTHONPATH is searched
    before the installed packages. Raises TimeoutError where the program takes longer.
    """
    with TemporaryDirectory() as beside:
        files = [Path(beside, name) for name in ("out", "err")]
        for file in files:
            file.touch()
        process = _SERVER.Process(target=_program, args=(arguments, str(folder), dict(environment), files))
        process.start()
        process.join(timeout_seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"python {' '.join(arguments)} took longer than {timeout_seconds} s")
        out, err = (file.read_text() for file in files)
        return CompletedProcess(list(arguments), process.exitcode, out, err)


def _program(arguments: Sequence[str], folder: str, environment: Mapping[str, str], files: Sequence[Path]) -> None:
    """In the forked process: become the interpreter that `python ARGUMENTS` would be."""
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    # multiprocessing looks up this function in the tests of the project, which are not the program's.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    what, *rest = arguments
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    searched = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [folder, *searched, *installed]
    if what == "-c":
        code, *rest = rest
        sys.argv[:] = ["-c", *rest]
        main = sys.modules["__main__"].__dict__
        exec(compile(code, "<string>", "exec"), main)
    elif what == "-m":
        module, *rest = rest
        sys.argv[:] = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [what, *rest]
        sys.path[0] = str(Path(folder, what).parent)
        runpy.run_path(str(Path(folder, what)), run_name="__main__")
