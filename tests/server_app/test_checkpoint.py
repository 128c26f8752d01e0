import json
import shutil
from pathlib import Path

import pytest
import torch

from server_app import checkpoint
from server_app.checkpoint import Checkpoint, CheckpointError, load, save
from strategies.method import State


def of_round(number: int) -> Checkpoint:
    tensors = {"weights/w": torch.full((2, 3), float(number)).t(), "m/b": torch.tensor([0.1 * number]).double()}
    return Checkpoint(number, 0.1 * number, State(tensors, {"tiers": {"half": {"widths": [3]}}}))


def round_in(run_dir: Path) -> int:
    found = load(run_dir)
    expected = of_round(found.round)
    assert found.now_seconds == expected.now_seconds
    assert found.state.values == expected.state.values
    assert found.state.tensors.keys() == expected.state.tensors.keys()
    assert all(torch.equal(v, found.state.tensors[n]) for n, v in expected.state.tensors.items())
    return found.round


def test_the_newest_state_comes_back(tmp_path):
    for number in (1, 2, 3):
        save(tmp_path, of_round(number))
        assert round_in(tmp_path) == number
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


class Crash(BaseException):
    pass


def crash_while_saving(run_dir, number, monkeypatch, count) -> bool:
    """Save, but crash after `count` changes of the file system; false where there were no more."""
    done = []

    def counted(original):
        def step(*arguments, **keywords):
            if len(done) == count:
                raise Crash
            done.append(original)
            return original(*arguments, **keywords)

        return step

    with monkeypatch.context() as patch:
        for owner, name in (
            (Path, "rename"),
            (Path, "mkdir"),
            (Path, "write_text"),
            (shutil, "rmtree"),
            (checkpoint.safetensors.torch, "save_file"),
        ):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            save(run_dir, of_round(number))
        except Crash:
            return True
    return False


def test_a_crash_at_any_moment_leaves_the_old_or_the_new_state(tmp_path, monkeypatch):
    crashes = 0
    for count in range(50):
        run_dir = tmp_path / f"{count}"
        save(run_dir, of_round(1))
        if not crash_while_saving(run_dir, 2, monkeypatch, count):
            break
        crashes += 1
        assert round_in(run_dir) in (1, 2)
        save(run_dir, of_round(3))  # and the run goes on
        assert round_in(run_dir) == 3
    assert crashes >= 6


def test_a_crash_after_a_crash_does_too(tmp_path, monkeypatch):
    pairs = 0
    for first in range(8):
        for second in range(8):
            run_dir = tmp_path / f"{first}-{second}"
            save(run_dir, of_round(1))
            if crash_while_saving(run_dir, 2, monkeypatch, first):
                before = round_in(run_dir)
                pairs += crash_while_saving(run_dir, before + 1, monkeypatch, second)
                assert round_in(run_dir) in (before, before + 1)
    assert pairs > 20


def test_a_crash_in_the_first_round_is_a_clear_error(tmp_path, monkeypatch):
    assert crash_while_saving(tmp_path, 1, monkeypatch, 2)
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from; no round was finished"):
        load(tmp_path)


@pytest.mark.parametrize("cut", [1, 40, 10**6])
def test_a_truncated_file_of_tensors_is_a_clear_error(tmp_path, cut):
    save(tmp_path, of_round(1))
    path = tmp_path / "checkpoint" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"checkpoint is not a whole checkpoint .*; start the run anew"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"round": 1}', '{"round": "x", "now_seconds": 0, "values": {}}']
)
def test_values_that_cannot_be_read_are_a_clear_error(tmp_path, text):
    save(tmp_path, of_round(1))
    (tmp_path / "checkpoint" / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        load(tmp_path)


def test_a_checkpoint_is_no_pickle(tmp_path):
    save(tmp_path, of_round(1))
    folder = tmp_path / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["state.json", "state.safetensors"]
    assert json.loads((folder / "state.json").read_text())["round"] == 1
