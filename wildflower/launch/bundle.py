"""The app's folder for one run: what it has beside the experiment, and the keys of its settings, are in it.

Flower sends every node the files that pyproject.toml lists, and refuses keys that are not listed there. So a run with a
method, a family or a task of its own is submitted from a copy of the app, and the app's own folder stays as it is. All
of the app is in `wildflower/` there, as where it is installed, so that a user's own may be called `models` or `tasks`.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

from wildflower.launch.experiment_file import SettingsError
from wildflower.plugins.beside import NAME, OUTSIDE, files_of
from wildflower.server_app.keys import block_of_settings, with_block

_INCLUDE = re.compile(r"fab-include = \[[^\]]*\]")


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
    if not patterns or len(_INCLUDE.findall(text)) != 1:
        raise SettingsError(f"{pyproject} does not list in one fab-include = [...] which files nodes need")
    included = []
    for pattern in patterns:
        outside = (app_dir / NAME).is_dir() and pattern.partition("/")[0] in OUTSIDE
        included.append(f"{NAME}/{pattern}" if outside else pattern)
        for path in app_dir.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                _copy(path, folder / (NAME if outside else "") / path.relative_to(app_dir))
    travelling = {name: file for module in modules.values() for name, file in files_of(module).items()}
    for name, file in travelling.items():
        _copy(file, folder / name)
    listed = "".join(f"\n    {json.dumps(name)}," for name in (*travelling, *included))
    text = _INCLUDE.sub(lambda _: f"fab-include = [{listed}\n]", text)
    (folder / "pyproject.toml").write_text(with_block(text, block_of_settings(strategy)), encoding="utf-8")
    return folder


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)
