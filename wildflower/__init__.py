"""Wildflower in Python: `wf.run`, `wf.load`, `wf.sweep`, `wf.tune` and `wf.compare` (docs/python.md); and the command.

Nothing is imported before it is used: `import wildflower` takes milliseconds.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wildflower.launch.experiment_file import SettingsError
    from wildflower.launch.python import RunError, compare, load, run, sweep, tune
    from wildflower.launch.results import Run, Sweep
    from wildflower.launch.tuning import Tuned
    from wildflower.server_app.compare import Comparison
    from wildflower.server_app.run_folder import JournalError

__all__ = [
    "Comparison",
    "JournalError",
    "Run",
    "RunError",
    "SettingsError",
    "Sweep",
    "Tuned",
    "compare",
    "load",
    "run",
    "sweep",
    "tune",
]

# In a checkout `client_app`, `models`, `server_app` and `strategies` lie beside this folder, with links to them in it.
# A bundle that Flower makes of a checkout has no links, and neither has a checkout under Windows.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "models")):
    __path__.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from wildflower.launch import python

    return getattr(python, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
