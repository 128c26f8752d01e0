"""Modules that lie beside an experiment: found there without hiding any other, and what travels with them.

The experiment's folder is not put on Python's path, where any file in it might hide a package: only modules that a run
names are found there, and those of the same folder that they import. The same modules travel in the run's bundle.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import wildflower

NAME = "wildflower"
APP = Path(wildflower.__file__).resolve().parents[1]
# Packages of `wildflower` that lie beside it in a checkout.
OUTSIDE = ("client_app", "models", "server_app", "strategies")
# What Flower takes into a bundle, and what it leaves out of one whatever the app says.
TRAVELS = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}
LEFT_OUT = {"build", "eggs", "lib", "lib64", "parts", "env", "venv", "ENV"}


class _Finder(MetaPathFinder):
    """Finds the modules that `look_for` has found beside an experiment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, Path] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = self.modules.get(name)
        if found is None:
            return None
        if found.is_dir():
            inside = [str(found)]
            return importlib.util.spec_from_file_location(
                name, found / "__init__.py", submodule_search_locations=inside
            )
        return importlib.util.spec_from_file_location(name, found)


_finder: _Finder | None = None


@contextmanager
def looked_for_beside(folder: Path) -> Iterator[Mapping[str, Path]]:
    """For the time of a `with` block, look for the modules that references name in a folder first.

    Yields the modules that were found there: name -> file or package folder. It grows as references are resolved.
    """
    global _finder
    if _finder is not None and _finder.folder == folder.absolute():
        yield _finder.modules
        return
    before, _finder = _finder, _Finder(folder.absolute())
    sys.meta_path.insert(0, _finder)
    try:
        yield _finder.modules
    finally:
        sys.meta_path.remove(_finder)
        own = {name for name, path in _finder.modules.items() if _imported_from(name) == path}
        for name in list(sys.modules):
            if name.partition(".")[0] in own:
                del sys.modules[name]
        _finder = before


def experiment_folder() -> Path | None:
    """Where modules are looked for first; None outside `looked_for_beside`."""
    return _finder.folder if _finder is not None else None


def look_for(module_name: str) -> None:
    """Let a module be imported from beside the experiment, with what it imports from there, if it is there.

    What is the app's own is not looked for: the experiment may lie in another copy of the project. ValueError where it
    would hide another module, or could not travel.
    """
    name = module_name.partition(".")[0]
    if _finder is None or name in _finder.modules or _is_of_the_app(module_name):
        return
    path = _source(_finder.folder, name)
    if path is None:
        return
    if path.name in OUTSIDE and path.resolve() == APP / path.name:  # the experiment lies in this very checkout
        raise ValueError(f"{module_name} is the app's own: write {NAME}.{module_name}")
    found = with_imported(name, path)
    for module, file in found.items():
        what = f"{file.name} beside the experiment"
        if module == NAME:
            raise ValueError(f"{what} would hide the app's own {module!r}: give it another name")
        if module in sys.stdlib_module_names:
            raise ValueError(f"{what} would hide the module {module!r} of Python itself: give it another name")
        if module in sys.modules and module not in _finder.modules and not _is_imported(module, file):
            raise ValueError(f"{what} would hide the package {module!r}, which the app uses: give it another name")
        if _left_out(file) or module in LEFT_OUT:
            raise ValueError(f"{what} would not travel: Flower leaves such names out of bundles; give it another name")
    _finder.modules |= found


def with_imported(name: str, path: Path) -> dict[str, Path]:
    """A module, and those of the same folder that it imports, directly or by others: name -> file or package folder."""
    found: dict[str, Path] = {}
    wanted = [(name, path)]
    while wanted:
        module, file = wanted.pop()
        found[module] = file
        for imported in sorted(_imports(file)):
            other = _source(path.parent, imported)
            taken = imported in found or imported == NAME or imported in sys.stdlib_module_names
            if other is not None and not taken:
                wanted.append((imported, other))
    return dict(sorted(found.items()))


def files_of(path: Path) -> dict[str, Path]:
    """The files of a module that travel: their paths in a bundle -> where they are."""
    if path.is_file():
        return {path.name: path}
    inside = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in TRAVELS)
    return {f"{path.name}/{file.relative_to(path).as_posix()}": file for file in inside if not _left_out(file)}


def digests(names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files of top-level modules from outside, and of those that they import from the same folder.

    The modules are imported already. What is the app's own is left out.
    """
    return {name: _digest(path) for name, path in sorted(_from_outside(names).items())}


def keep(names: Iterable[str], folder: Path) -> None:
    """Copy modules that lie beside the experiment into a folder, from which `looked_for_beside` finds them again.

    On a server to which a run was submitted they lie in the app's folder. What can be imported in any case, as an
    installed package, is not copied.
    """
    found = {} if _finder is None else _finder.modules
    for module, path in _from_outside(names).items():
        if found.get(module) != path and path.parent != APP:
            continue
        folder.mkdir(mode=0o700, exist_ok=True)  # as the run's folder
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
        else:  # whole: what does not travel may be read from the folder all the same
            shutil.copytree(path, folder / path.name, ignore=_not_copied(folder), dirs_exist_ok=True)


def _not_copied(into: Path) -> Callable[[str, list[str]], list[str]]:
    """Name what `keep` leaves out of a package: compiled modules, and the runs that lie inside of it."""
    runs = [into.resolve(), *into.resolve().parents]
    return lambda at, names: [n for n in names if n == "__pycache__" or (Path(at) / n).resolve() in runs]


def check_kept(folder: Path, expected: Mapping[str, str]) -> None:
    """Raise ValueError where a copy in a folder has another hash than expected, or this process another version of it.

    Copies that are not there are passed over. Nothing is imported.
    """
    for name, digest in expected.items():
        path = _source(folder, name)
        if path is None:
            continue
        if _digest(path) != digest:
            raise ValueError(f"the copy {path} changed since the run began")
        origin = _imported_from(name)
        if origin is not None and _digest(origin) != digest:
            raise ValueError(f"this process has imported another version of {name!r}, {origin}: start Python anew")


def _from_outside(names: Iterable[str]) -> dict[str, Path]:
    """Top-level modules, and those that they import from the same folder: name -> file or package folder."""
    found: dict[str, Path] = {}
    for name in names:
        path = _imported_from(name)
        if path is not None and name != NAME:
            installed = str(path.parent) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
            found |= {name: path} if installed else with_imported(name, path)
    return found


def _digest(path: Path) -> str:
    total = hashlib.sha256()
    for name, file in files_of(path).items():
        content = file.read_bytes()
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()


def _imported_from(name: str) -> Path | None:
    """The file, or the package folder, that a top-level module was imported from."""
    origin = getattr(sys.modules.get(name), "__file__", None)
    if origin is None:
        return None
    file = Path(origin)
    return file.parent if file.name == "__init__.py" else file


def _is_imported(name: str, path: Path) -> bool:
    """Whether a module is imported from this file or package folder, or from another one with the same contents."""
    origin = _imported_from(name)
    return origin == path or (origin is not None and _digest(origin) == _digest(path))


def _source(folder: Path, name: str) -> Path | None:
    """The package or the file of a module in a folder, if there is one."""
    if (folder / name / "__init__.py").is_file():
        return folder / name
    file = folder / f"{name}.py"
    return file if file.is_file() else None


def _is_of_the_app(module_name: str) -> bool:
    """Whether this very app has a module of this dotted name."""
    if not module_name.startswith(f"{NAME}."):
        return False
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:
        return False


def is_code_of_the_app(file: Path) -> bool:
    """Return whether a file is the app's own code, wherever the app's packages lie."""
    inside = APP / NAME
    beside = [APP / name for name in OUTSIDE if (inside / name).resolve() == APP / name or not (inside / name).is_dir()]
    return any(file.resolve().is_relative_to(folder) for folder in (inside, *beside))


def _left_out(file: Path) -> bool:
    """Whether Flower leaves a file out of bundles by its name."""
    hidden = "__pycache__" in file.parts or file.name == "pyproject.toml"
    return hidden or file.name.startswith("test_") or file.name.endswith("_test.py")


def _imports(path: Path) -> set[str]:
    """The top-level modules that a file, or the files of a package, import."""
    files = [path] if path.is_file() else path.rglob("*.py")
    return {name for file in files for name in _imports_of(file, file.stat().st_mtime_ns)}


@lru_cache(maxsize=4096)
def _imports_of(file: Path, changed_ns: int) -> frozenset[str]:
    """The top-level modules that a file imports, as it was when it was changed last: a large package takes seconds."""
    found: set[str] = set()
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return frozenset()  # importing it says so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return frozenset(found)
