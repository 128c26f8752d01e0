import pytest
import torch

from client_app.state import DeviceState


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
