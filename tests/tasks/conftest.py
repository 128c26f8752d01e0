from collections.abc import Iterator
from pathlib import Path

import pytest
import text_files

from wildflower.tasks.task import load_task


@pytest.fixture(autouse=True)
def _tasks_are_loaded_anew() -> Iterator[None]:
    load_task.cache_clear()
    yield
    load_task.cache_clear()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("WILDFLOWER_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer of a few words."""
    return str(text_files.make_tokenizer(tmp_path_factory.mktemp("tokenizer")))
