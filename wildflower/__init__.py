"""Wildflower in Python: `wf.run`, `wf.load`, `wf.sweep` and `wf.compare` (docs/python.md); and the command.

Nothing is imported before it is used: `import wildflower` takes milliseconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server_app.compare import Comparison
    from server_app.run_folder import JournalError
    from wildflower.python import Run, RunError, Sweep, compare, load, run, sweep
    from wildflower.settings import SettingsError

__all__ = [
    "Comparison",
    "JournalError",
    "Run",
    "RunError",
    "SettingsError",
    "Sweep",
    "compare",
    "load",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from wildflower import python

    return getattr(python, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
