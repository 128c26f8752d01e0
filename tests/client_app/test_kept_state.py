import os
import stat

import pytest
import torch

from wildflower.client_app import kept_state as client_state
from wildflower.client_app.kept_state import DeviceState, folder_name
from wildflower.messages.frozen_parts import Part, name_of


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), value), "b": torch.full((3,), value).half()}


def test_what_is_kept_comes_back(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 3)
    assert state.load("model", 1) is None
    state.save("model", 1, weights(0.5))
    back = DeviceState(str(tmp_path), "a run", 3).load("model", 2)
    assert back.keys() == weights(0.5).keys()
    assert all(torch.equal(back[n], v) and back[n].dtype == v.dtype for n, v in weights(0.5).items())


def test_runs_devices_and_keys_are_apart(tmp_path):
    DeviceState(str(tmp_path), "a run", 3).save("model", 1, weights(1.0))
    assert DeviceState(str(tmp_path), "another", 3).load("model", 2) is None
    assert DeviceState(str(tmp_path), "a run", 4).load("model", 2) is None
    assert DeviceState(str(tmp_path), "a run", 3).load("moments", 2) is None


NAMES = (
    "a/b",
    "a_b",
    "a b",
    "a.b",
    ".a_b",
    "..",
    "...",
    "",
    "\u00e4",
    "\u00f6",
    "a\u0308",
    "A_B",
    "../a_b",
    "worker",
    "links.json",
)
NAMES = (
    *NAMES,
    "x" * 150,
    "x" * 151,
    "x" * 152,
    "a\nb",
    "a\0b",
    folder_name("a/b"),
    folder_name("a/b").replace("~", "-"),
)


def test_every_name_of_a_run_has_a_folder_of_its_own_within_the_state_folder(tmp_path):
    folders = [DeviceState(str(tmp_path), name, 3).folder for name in NAMES]
    assert len({str(folder) for folder in folders}) == len(set(NAMES)) == len(NAMES)
    for folder in folders:
        assert folder.resolve().parent.parent == tmp_path.resolve()
        folder.mkdir(parents=True)
    assert folder_name("heterofl-digits-20260101-120000") == "heterofl-digits-20260101-120000"
    assert folder_name("strategy=heterofl,seed=1") == "strategy=heterofl,seed=1"
    assert not {"worker", "links.json", "speed.json"} & {folder.parent.name for folder in folders}


@pytest.mark.parametrize("key", ["a/b", "../a", ".a", "", "a b", "x" * 201, "a\0"])
def test_a_name_to_keep_under_is_that_of_a_file(key, tmp_path):
    with pytest.raises(ValueError, match="is no name to keep tensors under"):
        DeviceState(str(tmp_path), "a run", 0).save(key, 1, weights(1.0))
    assert not list(tmp_path.iterdir())


def test_what_a_device_keeps_only_its_user_can_read(tmp_path):
    before = os.umask(0)
    try:
        state = DeviceState(str(tmp_path / "state"), "a run", 0)
        state.save("model", 1, weights(1.0))
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state", *(tmp_path / "state").rglob("*"))}
    assert {path.name for path in modes} == {"state", state.folder.parent.name, "device-0", "model.1.safetensors"}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())


def test_a_round_that_is_done_again_starts_from_the_round_before(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    for number in (1, 2, 10):
        state.save("model", number, weights(float(number)))
    assert state.load("model", 10)["w"].unique().tolist() == [2.0]
    assert state.load("model", 11)["w"].unique().tolist() == [10.0]
    state.save("model", 3, weights(3.0))  # a resumed run writes its future anew
    assert state.load("model", 99)["w"].unique().tolist() == [3.0]
    assert len(list(state.folder.iterdir())) == 3


def test_what_a_run_needs_that_goes_on_from_the_oldest_checkpoint_is_kept(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    for number in (1, 4, 6, 7):
        state.save("model", number, weights(float(number)))
        state.save("model-of-another-kind", number, weights(float(number)))
        state.save("lost-model", number, weights(float(number)))
    (state.folder / "notes.safetensors").touch()  # none of ours
    state.forget(5, other_than="lost-")  # rounds 6 and 7 may be done again, before which the newest is that of round 4
    for key in ("model", "model-of-another-kind"):
        assert [state.load(key, number)["w"].unique().item() for number in (6, 7, 8)] == [4, 6, 7]
        assert state.load(key, 4) is None
    assert state.load("lost-model", 4)["w"].unique().item() == 1
    state.forget(6, other_than="lost-")
    assert state.load("model", 6) is None
    state.forget(99, other_than="lost-")
    assert state.load("model", 99)["w"].unique().item() == 7
    assert (state.folder / "notes.safetensors").exists()


def test_a_device_that_has_files_of_later_rounds_only_keeps_nothing_from_before(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    assert state.is_empty(99)
    state.save("model", 5, weights(1.0))
    assert [state.is_empty(before) for before in (4, 5, 6)] == [True, True, False]


def test_what_was_saved_in_a_round_can_be_taken_back(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    for number in (1, 2):
        state.save("model", number, weights(float(number)))
    state.take_back("model", 2)
    state.take_back("nothing", 2)
    assert state.load("model", 99)["w"].unique().item() == 1


def test_a_torn_file_is_an_error_that_says_what_to_do(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    state.save("model", 1, weights(1.0))
    [path] = state.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"not a complete device state .* delete it to start this device anew"):
        state.load("model", 2)


@pytest.mark.parametrize("left", [0, 100])
def test_after_a_power_cut_the_round_before_is_gone_on_with(left, tmp_path, caplog):
    state = DeviceState(str(tmp_path), "a run", 0)
    for number in (1, 2):
        state.save("model", number, weights(float(number)))
    newest = state.folder / "model.2.safetensors"
    newest.write_bytes(newest.read_bytes()[:left])
    assert state.load("model", 3)["w"].unique().tolist() == [1.0]
    assert "model.2.safetensors: not a complete device state" in caplog.text
    assert "going on with model.1.safetensors" in caplog.text
    with pytest.raises(ValueError, match="delete it to start this device anew"):
        state.load("model", 3, since_round=2)


def test_what_a_killed_process_left_is_removed(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    state.folder.mkdir(parents=True)
    for name in ("model.1.77.part", "other.1.77.part"):
        (state.folder / name).write_bytes(b"half a file")
    state.save("model", 1, weights(1.0))
    assert sorted(path.name for path in state.folder.iterdir()) == ["model.1.safetensors", "other.1.77.part"]


def test_a_file_that_was_never_renamed_is_not_read(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    state.folder.mkdir(parents=True)
    (state.folder / "model.1.77.part").write_bytes(b"half a file")
    assert state.load("model", 2) is None


@pytest.mark.parametrize("run", ["../../etc", "..", ".", "/etc/passwd", "a/b", "..\\..\\x", "", "../", "\x00"])
def test_a_runs_name_cannot_lead_out_of_the_folder(tmp_path, run):
    home = tmp_path / "home"
    state = DeviceState(str(home), run, 0)
    state.save("model", 1, weights(1.0))
    assert state.folder.resolve().is_relative_to(home)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_the_second_last_round_of_a_prefix_is_over_all_its_keys(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 3)
    assert state.second_last_round("lost-", 99) == 0
    state.save("model", 5, weights(1.0))
    for key, number in (("lost-a", 1), ("lost-b", 4), ("lost-b", 7)):
        state.save(key, number, weights(1.0))
    assert [state.second_last_round("lost-", before) for before in (1, 2, 5, 8)] == [0, 1, 1, 4]
    state.forget_before("lost-", 4)
    assert sorted(path.name for path in state.folder.iterdir()) == [
        f"{name}.safetensors" for name in ("lost-b.4", "lost-b.7", "model.5")
    ]


def test_the_folder_of_what_is_frozen_is_synced_once_for_all_tensors_and_once_for_their_list(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(client_state, "sync", lambda path: synced.append(path.name.split(".")[0]))
    contents = {name_of(data): memoryview(data) for data in (b"a" * 8, b"b" * 4, b"c" * 8)}
    part = Part(tuple(contents))
    state = DeviceState(str(tmp_path), "a run", 0)
    state.keep_frozen(part, contents)
    assert synced == [*contents, "frozen", part.name, "frozen"]
    # What is there and right is left alone; what is damaged is written again.
    synced.clear()
    state.keep_frozen(part, contents)
    assert synced == []
    damaged = part.tensors[1]
    path = state.folder.parent / "frozen" / f"{damaged}.packed"
    path.write_bytes(b"x" * 4)
    state.keep_frozen(part, contents)
    assert synced == [damaged, "frozen"]
    assert path.read_bytes() == b"b" * 4


def test_a_folder_that_goes_while_old_runs_are_looked_for_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(client_state, "KEPT_RUNS", 2)
    for number in (1, 2):
        DeviceState(str(tmp_path), f"run-{number}", 0).save("w", 1, {"w": torch.ones(2)})
    os.utime(tmp_path / "run-1" / "device-0", ns=(1, 1))
    (tmp_path / "run-2" / "device-1").symlink_to(tmp_path / "gone")  # found in its folder, and not there
    DeviceState(str(tmp_path), "run-3", 0).save("w", 1, {"w": torch.ones(2)})
    assert (tmp_path / "run-3" / "device-0").exists()
    assert not (tmp_path / "run-1").exists()


def test_of_many_runs_a_device_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(client_state, "KEPT_RUNS", 3)
    (tmp_path / "model").mkdir()
    for number in (1, 2, 3):
        DeviceState(str(tmp_path), f"run-{number}", 0).save("w", 1, {"w": torch.ones(2)})
    os.utime(tmp_path / "run-2" / "device-0", ns=(1, 1))  # by a clock that was years behind, and it is the oldest
    DeviceState(str(tmp_path), "run-1", 0).save("w", 2, {"w": torch.ones(2)})
    assert (tmp_path / "run-2").exists()  # no run begins
    DeviceState(str(tmp_path), "run-4", 0).save("w", 1, {"w": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run-1", "run-3", "run-4"]
