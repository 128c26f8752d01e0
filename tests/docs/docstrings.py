"""The first word of public docstrings of modules, functions and classes: a verb or a noun, no What, Whether, How or Of.

`python -m tests.docs.docstrings` lists what breaks the rule.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("client_app", "models", "server_app", "strategies", "wildflower")
REFUSED = ("What", "Whether", "How", "Of", "Which", "Who")


def modules() -> list[Path]:
    """Return the modules of the package, each once."""
    found = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if path.resolve() == path)


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of a module and of every public class and function in it."""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield name or "the module", text
            for child in node.body:
                inner = getattr(child, "name", "_")
                if not inner.startswith("_"):
                    yield from inside(child, f"{name}.{inner}".strip("."))

    yield from inside(ast.parse(source), "")


def broken(source: str) -> list[str]:
    """Return the names in a module whose docstrings begin with a refused word."""
    return [name for name, text in docstrings(source) if text.split()[0].strip(",:") in REFUSED]


if __name__ == "__main__":
    for path in modules():
        for name in broken(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(ROOT)}: {name}")
