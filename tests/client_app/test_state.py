import pytest
import torch

from client_app import state as client_state
from client_app.state import DeviceState
from messages.frozen import Part, name_of


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


def test_a_round_that_is_done_again_starts_from_the_round_before(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    for number in (1, 2, 10):
        state.save("model", number, weights(float(number)))
    assert state.load("model", 10)["w"].unique().tolist() == [2.0]
    assert state.load("model", 11)["w"].unique().tolist() == [10.0]
    state.save("model", 3, weights(3.0))  # a resumed run writes its future anew
    assert state.load("model", 99)["w"].unique().tolist() == [3.0]
    assert len(list(state.folder.iterdir())) == 2


def test_only_the_last_two_rounds_are_kept(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    for number in range(1, 12):
        state.save("model", number, weights(float(number)))
    assert sorted(path.name for path in state.folder.iterdir()) == ["model.10.safetensors", "model.11.safetensors"]


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


def test_of_a_prefix_only_what_this_round_and_the_one_before_have_saved_stays(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 3)

    def names():
        return sorted(path.name.removesuffix(".safetensors") for path in state.folder.iterdir())

    def saved(key, number):
        state.save(key, number, weights(1.0))
        state.forget_older("lost-", number)
        return names()

    state.save("model", 1, weights(1.0))
    assert saved("lost-a", 1) == ["lost-a.1", "model.1"]
    assert saved("lost-b", 4) == ["lost-a.1", "lost-b.4", "model.1"]  # the device was not drawn in between
    for _ in range(2):  # a run that resumes does round 7 again
        assert saved("lost-b", 7) == ["lost-b.4", "lost-b.7", "model.1"]
    for _ in range(2):
        assert saved("lost-c", 8) == ["lost-b.4", "lost-b.7", "lost-c.8", "model.1"]
    assert saved("lost-a", 9) == ["lost-a.9", "lost-c.8", "model.1"]


def test_the_folder_of_what_is_frozen_is_synced_once_for_all_tensors_and_once_for_their_list(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(client_state, "_sync", lambda path: synced.append(path.name.split(".")[0]))
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
