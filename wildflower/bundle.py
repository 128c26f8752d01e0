"""The app's folder for one run: what it has beside the experiment, and the keys of its settings, are in it.

Flower sends every node the files that pyproject.toml lists, and refuses keys that are not listed there. So a run with a
method, a family or a task of its own is submitted from a copy of the app, and the app's own folder stays as it is.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

from plugins.beside import files_of
from server_app.keys import block_of_settings, with_block
from wildflower.settings import SettingsError

_INCLUDE = "fab-include = ["


def make_bundle(app_dir: Path, folder: Path, strategy: str, modules: Mapping[str, Path]) -> Path:
    """Make the app's folder for a run; returns `folder`. Raises SettingsError where the app does not list its files.

    Args:
        app_dir: the app.
        folder: is made.
        strategy: of the run, whose settings are listed.
        modules: those that travel: name -> file or package folder.
    """
    pyproject = app_dir / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    patterns = tomllib.loads(text).get("tool", {}).get("flwr", {}).get("app", {}).get("fab-include", [])
    if not patterns or text.count(_INCLUDE) != 1:
        raise SettingsError(f"{pyproject} does not list in one fab-include = [...] which files nodes need")
    for pattern in patterns:
        for path in app_dir.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                _copy(path, folder / path.relative_to(app_dir))
    travelling = {name: file for module in modules.values() for name, file in files_of(module).items()}
    for name, file in travelling.items():
        _copy(file, folder / name)
    text = text.replace(_INCLUDE, _INCLUDE + "".join(f"\n    {json.dumps(name)}," for name in travelling))
    (folder / "pyproject.toml").write_text(with_block(text, block_of_settings(strategy)), encoding="utf-8")
    return folder


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)
