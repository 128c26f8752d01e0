"""docs/data-files.md: the example file and the experiment for texts of one's own do what the page says."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.tasks.text_files import make_tokenizer
from wildflower.server_app.config import RunConfig
from wildflower.tasks.task import TASKS, TaskSpec, load_task
from wildflower.tasks.tokens import TextArguments

PAGE = (Path(__file__).parents[2] / "docs" / "data-files.md").read_text(encoding="utf-8")
TASKS_PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Texts of your own")[2]
LINES, EXPERIMENT, SILOS = re.findall(r"```(?:json|toml)\n(.*?)```", SECTION, re.DOTALL)


@pytest.mark.thorough
def test_the_example_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "opinions"
    folder.mkdir()
    (folder / "train.jsonl").write_text(LINES * 10)
    make_tokenizer(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WILDFLOWER_CACHE", str(tmp_path / "cache"))
    config = RunConfig.from_run_config(tomllib.loads(EXPERIMENT))
    spec = TaskSpec(name=config.task, devices=3, data_dir=config.data_dir, arguments=config.own_task_arguments())
    task = load_task(spec)
    assert task.label_names == ("negative", "neutral", "positive")
    assert (len(task.train), len(task.test)) == (21, 9)


def test_the_silos_arguments_are_taken() -> None:
    assert RunConfig.from_run_config(tomllib.loads(SILOS)).own_task_arguments() is not None


def test_the_tables_have_every_argument() -> None:
    for kind in TASKS.values():
        of_texts = kind.arguments is not None and issubclass(kind.arguments, TextArguments)
        for name in kind.arguments.model_fields if kind.arguments else ():
            assert f"`{name}" in (TASKS_PAGE + SECTION if of_texts else TASKS_PAGE + PAGE), name
    assert {"tokenizer", "max_tokens"} == set(TextArguments.model_fields)
