"""Write down objects of a notebook or a script as Python files, from which every process makes them again.

A class or a function that stands in a module of its own is imported from there; a module that is no installed package
is copied with what it imports. What stands in a notebook's cell, in `__main__` or inside of a function is written down
with everything that it uses. Nothing is pickled: what has no source, and is no plain value, is refused in words.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import functools
import inspect
import linecache
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from wildflower.launch.experiment_file import SettingsError
from wildflower.plugins.beside import with_imported

MAX_NUMBERS = 1000
"""Of a tensor or an array that is written down as a constant."""

MAX_SHOWN = 60
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF")
_CAN_BE = (
    "a function, a class, a module, a number, a text, a list, a dict, or an array or a tensor of at most "
    f"{MAX_NUMBERS} numbers"
)


class Source:
    """One Python file that grows by what is added to it.

    Attributes:
        what: the argument that the objects were given as, with which errors begin.
        pieces: what it defines, in order.
        copied: modules that are imported from beside the file: name -> file or package folder.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.copied: dict[str, Path] = {}
        self._imports: set[str] = set()
        self.pieces: list[str] = []
        self._bound: dict[str, object] = {}
        self._future = False

    def text(self, title: str) -> str:
        """Return the file, which begins with a title."""
        head = [f'"""{title}"""']
        if self._future:
            head.append("from __future__ import annotations")
        if self._imports:
            head.append("\n".join(sorted(self._imports, key=lambda line: (line.startswith("from"), line))))
        return "\n\n".join(head) + "".join(f"\n\n\n{piece}" for piece in self.pieces) + "\n"

    def add(self, name: str, value: object) -> None:
        """Bind a name of the file to a value, with all that the value uses."""
        if name in self._bound:
            if self._bound[name] is not value and not _alike(self._bound[name], value):
                raise SettingsError(
                    f"{self.what}: two things are called {name!r}: {_shown(self._bound[name])} and {_shown(value)}: "
                    "rename one of them"
                )
            return
        self._bound[name] = value
        if isinstance(value, ModuleType):
            self._import_module(name, value)
        elif isinstance(value, type | FunctionType) and not self._imported(name, value):
            self._define(name, value)
        elif not isinstance(value, type | FunctionType) and not self._imported(name, value):
            self.pieces.append(f"{name} = {self.expression(value, name)}")

    def append(self, text: str) -> None:
        """Add lines that use what was added."""
        self.pieces.append(text)

    def need(self, line: str) -> None:
        """Add an import."""
        self._imports.add(line)

    def expression(self, value: object, where: str) -> str:
        """Return Python that makes a value; SettingsError says of which name `where` it is, and what it may be."""
        if isinstance(value, type | FunctionType) or reference_of(value):
            name = str(getattr(value, "__name__", ""))
            self.add(name, value)
            return name
        if isinstance(value, ModuleType):
            name = value.__name__.replace(".", "_")
            self.add(name, value)
            return name
        if isinstance(value, np.generic):
            return self.expression(value.item(), where)
        if value is None or value is ... or isinstance(value, bool | int | str | bytes):
            return repr(value)
        if isinstance(value, float | complex):
            return repr(value) if np.isfinite(value) else f'float("{value}")'
        if isinstance(value, torch.Size):
            return self.expression(tuple(value), where)
        if type(value) in (list, tuple, set, frozenset):
            return self._several(value, where)
        if isinstance(value, Mapping) and type(value).__name__ in ("dict", "OrderedDict"):
            pairs = (f"{self.expression(k, where)}: {self.expression(v, where)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice | range):
            ends = ", ".join(self.expression(end, where) for end in (value.start, value.stop, value.step))
            return f"{type(value).__name__}({ends})"
        if isinstance(value, torch.dtype | torch.device):
            self.need("import torch")
            return f"torch.{value!r}" if isinstance(value, torch.device) else repr(value)
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._numbers(value, where)
        if isinstance(value, PurePath):
            self.need("from pathlib import Path")
            return f"Path({str(value)!r})"
        if isinstance(value, functools.partial):
            self.need("from functools import partial")
            given = [self.expression(part, where) for part in (value.func, *value.args)]
            given += [f"{key}={self.expression(part, where)}" for key, part in value.keywords.items()]
            return f"partial({', '.join(given)})"
        raise SettingsError(
            f"{self.what} uses {where} = {_shown(value)}, a value of {kind_of_value(value)}, which cannot be written "
            f"down: it must be {_CAN_BE}"
        )

    def _several(self, value: Any, where: str) -> str:
        parts = [self.expression(part, where) for part in value]
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        if isinstance(value, tuple):
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        return f"{type(value).__name__}([{', '.join(sorted(parts))}])"

    def _numbers(self, value: torch.Tensor | np.ndarray, where: str) -> str:
        tensor = isinstance(value, torch.Tensor)
        count = value.numel() if isinstance(value, torch.Tensor) else value.size
        if count > MAX_NUMBERS:
            raise SettingsError(
                f"{self.what} uses {where}, {kind_of_value(value)} of {count} numbers: at most {MAX_NUMBERS} are "
                "written down; make it in the function or the class itself, or give it as data"
            )
        numbers = self.expression(value.tolist(), where)
        self.need("import torch" if tensor else "import numpy")
        if tensor:
            return f"torch.tensor({numbers}, dtype={value.dtype})"
        return f"numpy.array({numbers}, dtype={str(value.dtype)!r})"

    def _import_module(self, name: str, module: ModuleType) -> None:
        full = module.__name__
        if full == "__main__":
            raise SettingsError(f"{self.what} uses {name}, which is the script itself: import what is needed of it")
        self._copy(full)
        self.need(f"import {full}" if full == name else f"import {full} as {name}")

    def _imported(self, name: str, value: object) -> bool:
        """Import what stands in a module, and say whether it does."""
        found = reference_of(value)
        if found is None:
            return False
        module, attribute = found
        self._copy(module)
        self.need(f"from {module} import {attribute}" + (f" as {name}" if attribute != name else ""))
        return True

    def _copy(self, module: str) -> None:
        """Note a module's files as to be copied, unless it is an installed package."""
        top = module.partition(".")[0]
        origin = getattr(sys.modules.get(top), "__file__", None) or ""
        if top == "wildflower" or top in sys.stdlib_module_names or not origin or origin.startswith(_INSTALLED):
            return
        path = Path(origin).parent if Path(origin).name == "__init__.py" else Path(origin)
        self.copied |= with_imported(top, path)

    def _define(self, name: str, value: type | FunctionType) -> None:
        if value.__name__ == "<lambda>":
            raise SettingsError(f"{self.what}: a lambda cannot be written down: write it as def NAME(...)")
        text = _source_of(value, self.what)
        for used, found in self._used(value, text):
            self.add(used, found)
        self.pieces.append(text)
        if value.__name__ != name:
            self.pieces.append(f"{name} = {value.__name__}")

    def _used(self, value: type | FunctionType, text: str) -> Iterator[tuple[str, object]]:
        """Yield the names that the source of a class or a function takes from outside, and what they stand for."""
        there, future = _names_around(value)
        self._future = self._future or future
        flags = __future__.annotations.compiler_flag if future else 0
        code = compile(text, "<source>", "exec", flags=flags, dont_inherit=True)
        names = list(dict.fromkeys([*_loaded(code), *_annotated(text)]))
        for used in names:
            if used == value.__name__:
                continue
            if used in there:
                yield used, there[used]
            elif not hasattr(builtins, used) and not future:
                raise SettingsError(
                    f"{self.what}: {value.__name__} uses {used!r}, which is not there: define it in a cell or at the "
                    f"top of the script, or within {value.__name__}"
                )


def _alike(one: object, other: object) -> bool:
    return type(one) is type(other) and isinstance(one, bool | int | float | str) and one == other


def reference_of(value: object) -> tuple[str, str] | None:
    """Return the module and the name under which something can be imported; None where it cannot."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "builtins"):
        return _public(value) if callable(value) else None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else _public(value)


def _public(value: object) -> tuple[str, str] | None:
    """Return where PyTorch has a function of its own that does not say its module, such as torch.relu."""
    name = getattr(value, "__name__", "")
    for module in ("torch", "torch.nn.functional", "math"):
        if name and getattr(sys.modules.get(module), name, None) is value:
            return module, name
    return None


def _loaded(code: CodeType) -> Iterator[str]:
    """Yield the global names that a piece of code and the code in it read, but for those that it binds itself."""
    instructions = list(dis.get_instructions(code))
    bound = {step.argval for step in instructions if step.opname in ("STORE_NAME", "DELETE_NAME")}
    own = {"__name__", "__qualname__", "__module__", "__class__", *bound}
    for step in instructions:
        if step.opname in _LOADS and step.argval not in own:
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant)


def _annotated(text: str) -> Iterator[str]:
    """Yield the names in annotations, which code does not hold under `from __future__ import annotations`."""
    for node in ast.walk(ast.parse(text)):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(annotation) if isinstance(annotation, ast.AST) else ():
                if isinstance(part, ast.Name):
                    yield part.id


def _functions(value: type | FunctionType) -> list[FunctionType]:
    """Return a function, or those that stand in the body of a class."""
    if isinstance(value, FunctionType):
        return [value]
    found: list[FunctionType] = []
    for member in vars(value).values():
        inside = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        inside = getattr(inside, "func", inside)  # of a cached property
        inside = inspect.unwrap(inside) if callable(inside) else inside
        if isinstance(inside, FunctionType) and inside.__qualname__.startswith(f"{value.__qualname__}."):
            found.append(inside)
    return found


def _names_around(value: type | FunctionType) -> tuple[dict[str, object], bool]:
    """Return what names stand for around a class or a function, and whether its annotations are texts."""
    functions = [inspect.unwrap(function) for function in _functions(value)]
    module = sys.modules.get(value.__module__)
    there: dict[str, object] = dict(vars(module)) if module is not None else {}
    for function in functions:
        there |= function.__globals__
        free = function.__code__.co_freevars
        for name, cell in zip(free, function.__closure__ or (), strict=True):
            try:
                there[name] = cell.cell_contents
            except ValueError:
                continue  # it has no value yet, as a function that calls itself
    if isinstance(value, type):
        there |= {base.__name__: base for base in value.__bases__ if base.__name__ not in there}
    flag = __future__.annotations.compiler_flag
    return there, any(function.__code__.co_flags & flag for function in functions)


def _source_of(value: type | FunctionType, what: str) -> str:
    """Return the text that defines a class or a function, also one of a notebook's cell."""
    for function in _functions(value):
        code = function.__code__
        linecache.checkcache(code.co_filename)
        lines = linecache.getlines(code.co_filename, function.__globals__)
        if text := _definition(lines, value.__name__, type(value) is not FunctionType, code.co_firstlineno):
            return text
    try:
        return textwrap.dedent(inspect.getsource(value)).rstrip()
    except (OSError, TypeError):
        raise SettingsError(
            f"{what}: the source of {value.__name__} is not to be found, as of what is typed at Python's prompt or "
            "made by exec: write it into a file or a notebook's cell"
        ) from None


def _definition(lines: list[str], name: str, is_class: bool, line: int) -> str:
    """Return the text of the innermost definition of a name around a line; "" where there is none."""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # such as a cell with a line for the shell
        return ""
    kinds = (ast.ClassDef,) if is_class else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = ""
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first <= line <= (node.end_lineno or node.lineno):
                found = textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
    return found


def kind_of_value(value: object) -> str:
    """Return the class of a value, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
