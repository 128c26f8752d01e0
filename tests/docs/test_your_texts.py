"""What docs/your-texts.md says is done as it stands there, with a tiny encoder in place of the one that it names."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from tests.small_run import simulated_grid
from tests.tasks.text_files import VOCABULARY, make_tokenizer
from wildflower.cli.command import app
from wildflower.launch.experiment_file import place, resolve
from wildflower.server_app.app import run
from wildflower.server_app.run_folder import read_config, read_rounds

PAGE = (Path(__file__).parents[2] / "docs/your-texts.md").read_text()
NAME = "sentence-transformers/all-MiniLM-L6-v2"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block(kind: str) -> str:
    [found] = blocks(kind)
    return found


@pytest.mark.thorough
def test_the_page_is_typed_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny"
    make_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=64, pad_token_id=0, **sizes)
    transformers.BertModel(config).save_pretrained(folder)

    lines = block("json").splitlines()
    assert all(json.loads(line).keys() == {"text", "label"} for line in lines)
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions/train.jsonl").write_text("\n".join(lines * 20) + "\n")
    experiment, fleet = blocks("toml")
    # The tiny encoder takes that much less memory, with two, four and six layers.
    for amount, tiny in {"250 MB": "900 kB", "200 MB": "600 kB", "120 MB": "300 kB"}.items():
        assert fleet.count(amount) == 1
        fleet = fleet.replace(amount, tiny)
    Path("questions-fleet.toml").write_text(fleet)
    assert experiment.count(NAME) == 2
    Path("questions.toml").write_text(experiment.replace(NAME, str(folder)))

    assert "wildflower run questions.toml\n" in PAGE
    resolved = resolve(Path("questions.toml"), ["rounds=2", "evaluate-every=2", "output-dir=runs"]).config
    run_dir = run(simulated_grid(), place(resolved, Path.cwd(), datetime(2026, 1, 1))[0])
    [*_, record] = read_rounds(run_dir)
    assert record.score is not None
    assert record.devices_replied == 6
    assert record.distinct_architectures > 1
    assert read_config(run_dir).config["fleet"].endswith("questions-fleet.toml")
    shown = CliRunner().invoke(app, ["plan", "questions.toml"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0, shown.output
    words = "--tier weak --out questions.pt2"
    assert f"wildflower export runs/RUN {words}\n" in PAGE
    assert CliRunner().invoke(app, ["export", str(run_dir), *words.split()]).exit_code == 0
    exec(block("python").replace(NAME, str(folder)), {})
    assert capsys.readouterr().out.splitlines()[-1] in {json.loads(line)["label"] for line in lines}
