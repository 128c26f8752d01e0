import hashlib
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from wildflower.server_app import checkpoint
from wildflower.server_app.checkpoint import Checkpoint, CheckpointError, load, save
from wildflower.strategies.method import State


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


def test_the_same_state_has_the_same_bytes_in_whichever_order_it_came(tmp_path):
    values = [{"b": {"y": 1, "x": [2]}, "a": 0.5}, {"a": 0.5, "b": {"x": [2], "y": 1}}]
    tensors = [{"w": torch.ones(2), "a": torch.zeros(3)}, {"a": torch.zeros(3), "w": torch.ones(2)}]
    for number in (0, 1):
        save(tmp_path / str(number), Checkpoint(1, 0.5, State(tensors[number], values[number])))
    for name in ("state.json", "state.safetensors", "SHA256SUMS"):
        first, second = ((tmp_path / str(n) / "checkpoint" / "round-1" / name).read_bytes() for n in (0, 1))
        assert first == second


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
    path = tmp_path / "checkpoint" / "round-1" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"round-1 is not a whole checkpoint .*; start the run anew"):
        load(tmp_path)


def spoil(run_dir, number):
    """Turn over one bit of a tensor: the file is read as well as before."""
    path = run_dir / "checkpoint" / f"round-{number}" / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_last_ones_are_kept(tmp_path):
    for number in range(1, 6):
        save(tmp_path, of_round(number), keep=3)
    assert checkpoint.rounds(tmp_path) == [5, 4, 3]
    assert [load(tmp_path, number).round for number in (3, 4, 5)] == [3, 4, 5]
    with pytest.raises(CheckpointError, match=r"checkpoints.resume-from = 2: .* there are those of rounds 3, 4, 5"):
        load(tmp_path, 2)


def test_it_goes_back_to_the_newest_good_one_and_says_so(tmp_path, caplog):
    for number in range(1, 5):
        save(tmp_path, of_round(number), keep=4)
    spoil(tmp_path, 4)
    (tmp_path / "checkpoint" / "round-3" / "SHA256SUMS").write_text("")
    with caplog.at_level(logging.WARNING, logger="flwr"):
        assert round_in(tmp_path) == 2
    told = [record.getMessage() for record in caplog.records]
    assert [text.rpartition(": ")[2] for text in told] == ["going back to the checkpoint of round 2"] * 2
    assert "round-4 is not a whole checkpoint (state.safetensors has not the SHA-256" in told[0]
    with pytest.raises(CheckpointError, match="round-4 is not a whole checkpoint"):
        load(tmp_path, 4)  # which was asked for by name: nothing else will do
    for number in (1, 2):
        spoil(tmp_path, number)
    with pytest.raises(CheckpointError, match=r"has no good checkpoint: .*round-4.*round-1.*; start the run anew"):
        load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_neither_kept_nor_taken(tmp_path, value, caplog, monkeypatch):
    save(tmp_path, of_round(1), keep=2)
    wrong = Checkpoint(2, 0.2, State({"w": torch.tensor([1.0, value])}, {}))
    with caplog.at_level(logging.WARNING, logger="flwr"):
        save(tmp_path, wrong, keep=2)
    assert "Round 2: the state holds values that are not finite (w)" in caplog.text
    assert round_in(tmp_path) == 1
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "not_finite", lambda tensors: "")
        save(tmp_path, wrong, keep=2)
    assert checkpoint.rounds(tmp_path) == [2, 1]
    assert round_in(tmp_path) == 1


def test_sums_are_those_of_sha256sum(tmp_path):
    save(tmp_path, of_round(1))
    folder = tmp_path / "checkpoint" / "round-1"
    files = [folder / name for name in ("state.safetensors", "state.json")]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    assert (folder / "SHA256SUMS").read_text() == "".join(lines)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"round": 1}', '{"round": "x", "now_seconds": 0, "values": {}}']
)
def test_values_that_cannot_be_read_are_a_clear_error(tmp_path, text):
    save(tmp_path, of_round(1))
    folder = tmp_path / "checkpoint" / "round-1"
    (folder / "state.json").write_text(text)
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    (folder / "SHA256SUMS").write_text(f"{sums[0]}\n{hashlib.sha256(text.encode()).hexdigest()}  state.json\n")
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        load(tmp_path)


def test_a_checkpoint_is_no_pickle(tmp_path):
    save(tmp_path, of_round(1))
    folder = tmp_path / "checkpoint" / "round-1"
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "state.json", "state.safetensors"]
    assert json.loads((folder / "state.json").read_text())["round"] == 1
