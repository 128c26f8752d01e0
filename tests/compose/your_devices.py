"""docs/your-devices.md with a SuperLink and nodes as processes: its configs, its runs, and a board that does not fit.

Not part of `make test`, because most of its time is waiting: `make test-compose` names this file.
"""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.deployment import Deployment
from tests.small_run import same_bits, simulated_grid
from wildflower.launch.experiment_file import resolve
from wildflower.server_app.app import run
from wildflower.server_app.checkpoint import load
from wildflower.server_app.run_folder import read_devices, read_rounds

PAGE = (Path(__file__).parents[2] / "docs" / "your-devices.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
LINES = [shlex.split(line) for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


def config_of(words, folder):
    """The texts of a line's --node-config, with whole paths."""
    [config] = [word for before, word in pairwise(words) if before == "--node-config"]
    pairs = dict(pair.split("=", 1) for pair in shlex.split(config))
    return {key: str(folder / value) for key, value in pairs.items() if not value.isdecimal()}


@pytest.mark.flower
@pytest.mark.worker
def test_three_boards_with_photos_and_one_with_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(next(text for kind, text in BLOCKS if kind == "python"), {})
    experiment = next(text for kind, text in BLOCKS if kind == "toml")
    # One device more than on the page, whose photos nobody else has.
    experiment = experiment.replace("= 3\n", "= 4\n").replace("size = [16, 16], ", "")
    (tmp_path / "photos.toml").write_text(experiment)
    other = tmp_path / "photos" / "devices" / "0003" / "digit-1"
    other.mkdir(parents=True)
    for number in range(5):
        Image.fromarray(np.zeros((20, 30), np.uint8)).save(other / f"{number}.png")
    (tmp_path / "boards.toml").write_text('[[group]]\nname = "any"\ncount = 4\nmemory = "8 GB"\nspeed = 1.0\n')
    nodes = [words for words in LINES if words[0] == "wildflower-node"]
    [words] = [words for words in LINES if words[:2] == ["wildflower", "run"] and "--superlink" in words]
    assert words[2] == "photos.toml"
    deployment = Deployment(tmp_path / "flower")
    try:
        deployment.start_superlink()
        for device, line in enumerate(nodes):
            deployment.start_node(device, of=4, **config_of(line, tmp_path))
        deployment.start_node(3, of=4, **{"data-dir": str(other.parent)})
        arguments = ["--set", f"output-dir={tmp_path}", "--set", "rounds=2"]
        done = deployment.run(str(tmp_path / "photos.toml"), *arguments)
        said = done.communicate()[0]
        assert done.returncode == 0, said
    finally:
        deployment.close()
    refused = {d.outcome for d in read_devices(tmp_path / "photos") if d.device == 3}
    assert len(refused) == 1
    assert next(iter(refused)).startswith("refused: its data do not fit: its examples are 1x20x30 bytes")
    rounds = read_rounds(tmp_path / "photos")
    assert [(r.devices_replied, r.devices_refused, r.scored_devices) for r in rounds] == [(3, 1, 3)] * 2
    # The dry run has the same bits.
    overrides = [f"output-dir={tmp_path}", "rounds=2", "run-name=dry-run", "fleet=boards.toml", "data-dir=photos"]
    simulated = run(simulated_grid(), resolve(tmp_path / "photos.toml", overrides).config)
    assert [r.score for r in read_rounds(simulated)] == [r.score for r in rounds]
    assert same_bits(load(simulated).state.tensors, load(tmp_path / "photos").state.tensors)
