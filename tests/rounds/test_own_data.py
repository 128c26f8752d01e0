"""Devices that train on data of their own: simulated and on nodes, with the same bits, and refused where unfit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from client_app.app import app as client
from messages.records import read_records
from server_app.config import ConfigError
from tasks.own import OwnDataError, device_folder
from tasks.task import TaskSpec, load_task
from tests.grid import InProcessGrid
from tests.small_run import same_bits, simulated_grid, small_config, started

DEVICES = 3
SIZES = (12, 20, 28)


def images(count, seed, side=8):
    """Gray images of four classes: class c is brightest in row 2 c."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 4
    inputs = rng.integers(0, 60, (count, 1, side, side))
    inputs[np.arange(count), 0, 2 * labels % side] += 180
    return {"inputs": inputs.astype(np.uint8), "labels": labels}


@pytest.fixture
def folder(tmp_path):
    """The server's folder, with one for each device."""
    data = tmp_path / "data"
    data.mkdir()
    np.savez(data / "train.npz", **images(40, 100))
    np.savez(data / "test.npz", **images(24, 101))
    for device, size in enumerate(SIZES):
        own = device_folder(str(data), device)
        own.mkdir(parents=True)
        np.savez(own / "train.npz", **images(size, device))
    return data


KEYS = {"task": "npz", "partition": "own", "strategy": "fedavg", "examples-per-device": 0, "local-steps": 3}
KEYS |= {"devices-per-round": DEVICES, "devices": DEVICES, "evaluate-every": 2}
FLEET = '[[group]]\nname = "all"\ncount = 3\nmemory = "8 GB"\n'


def config(tmp_path, folder, name, *, fleet=True, **changes):
    where = tmp_path / name
    where.mkdir()
    chosen = {"fleet": ""}
    if fleet:
        (where / "three.toml").write_text(FLEET)
        chosen = {"fleet": str(where / "three.toml")}
    return small_config(where, **KEYS | chosen | {"data-dir": str(folder)} | changes)


def nodes(tmp_path, where):
    """Three nodes, each with the folder of its device; node n carries device n - 1."""
    return InProcessGrid(
        client,
        DEVICES,
        lambda node: {
            "partition-id": node - 1,
            "num-partitions": DEVICES,
            "state-dir": str(tmp_path / f"state-{node}"),
            "data-dir": str(where[node - 1]),
        },
    )


def without_devices(folder, tmp_path):
    """The server's folder as it is where devices have theirs elsewhere; and theirs."""
    apart = tmp_path / "devices"
    (folder / "devices").rename(apart)
    return [apart / f"{device:04d}" for device in range(DEVICES)]


def two_rounds(config, grid):
    engine, scorer = started(config)
    return engine, [engine.run_round(grid, number, scorer) for number in (1, 2)]


def outcomes(result):
    return [line["outcome"] for line in sorted(result.devices, key=lambda line: line["device"])]


def test_a_device_has_what_its_folder_holds(folder):
    task = load_task(TaskSpec("npz", devices=DEVICES, data_dir=str(folder), partition="own", seed=3))
    for device, size in enumerate(SIZES):
        mine = task.train.inputs[task.shard(device).train]
        wanted = torch.from_numpy(images(size, device)["inputs"])
        assert {tuple(x.flatten().tolist()) for x in mine} == {tuple(x.flatten().tolist()) for x in wanted}
        assert task.training_examples(device) == size
    assert len(task.test) == 24  # the server's


def test_a_simulation_and_nodes_come_to_the_same_bits(folder, tmp_path):
    simulated, first = two_rounds(config(tmp_path, folder, "simulated"), simulated_grid(2))
    assert [outcomes(result) for result in first] == [["trained"] * 3] * 2
    where = without_devices(folder, tmp_path)
    deployed, second = two_rounds(config(tmp_path, folder, "deployed", fleet=False), nodes(tmp_path, where))
    assert [outcomes(result) for result in second] == [["trained"] * 3] * 2
    assert same_bits(simulated.state().tensors, deployed.state().tensors)
    assert first[1].record["score"] == second[1].record["score"] is not None


def test_devices_test_on_what_they_keep_or_bring(folder, tmp_path):
    where = without_devices(folder, tmp_path)
    np.savez(where[1] / "test.npz", **images(10, 55))
    keys = {"personal-every": 2, "personal-epochs": 0, "test-fraction": 0.25}
    _, [_, result] = two_rounds(config(tmp_path, folder, "one", fleet=False, **keys), nodes(tmp_path, where))
    assert (result.record["personal_devices"], result.record["personal_failed"]) == (3, 0)
    agreed = load_task(TaskSpec("npz", DEVICES, str(folder), "own")).agreed
    spec = TaskSpec("npz", DEVICES, str(where[1]), "own", agreed=agreed, test_fraction=0.25)
    task = load_task(spec)
    assert (task.training_examples(1), task.test_examples(1)) == (20, 10)  # it brought a test set, and keeps no part
    spec = TaskSpec("npz", DEVICES, str(where[2]), "own", agreed=agreed, test_fraction=0.25)
    assert (load_task(spec).training_examples(2), load_task(spec).test_examples(2)) == (21, 7)


def unfit(where):
    np.savez(where / "train.npz", **images(9, 5, side=12))


def of_other_classes(where):
    changed = images(9, 5)
    np.savez(where / "train.npz", **changed | {"labels": changed["labels"] + 1})


def empty(where):
    (where / "train.npz").unlink()


def torn(where):
    (where / "train.npz").write_bytes(b"PK torn")


def too_many(where):
    np.savez(where / "train.npz", **images(60, 5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfit, "its inputs are uint8 of shape 1x12x12, the run's are uint8 of shape 1x8x8"),
        (of_other_classes, "its largest label is 4, the run has 4 classes"),
        (empty, "no file train.npz"),
        (torn, "cannot be read"),
        (too_many, "it has 60 examples, at most 50 are taken"),
    ],
)
def test_a_device_whose_data_do_not_fit_is_refused_and_the_others_go_on(change, words, folder, tmp_path):
    where = without_devices(folder, tmp_path)
    change(where[1])
    run = config(tmp_path, folder, "one", fleet=False, **{"max-examples": 50})
    _, results = two_rounds(run, nodes(tmp_path, where))
    for result in results:
        first, why, last = outcomes(result)
        assert (first, last) == ("trained", "trained")
        assert why.startswith("refused: ")
        assert words in why
    assert results[1].record["score"] is not None


def test_one_class_only_is_enough(folder, tmp_path):
    where = without_devices(folder, tmp_path)
    only = images(16, 5)
    np.savez(where[1] / "train.npz", inputs=only["inputs"][only["labels"] == 2], labels=only["labels"][:4] * 0 + 2)
    _, results = two_rounds(config(tmp_path, folder, "one", fleet=False), nodes(tmp_path, where))
    assert outcomes(results[1]) == ["trained"] * 3


def test_data_that_change_between_rounds_are_read_again(folder, tmp_path):
    where = without_devices(folder, tmp_path)
    engine, scorer = started(config(tmp_path, folder, "one", fleet=False))
    grid = nodes(tmp_path, where)
    assert outcomes(engine.run_round(grid, 1, scorer)) == ["trained"] * 3
    np.savez(where[0] / "train.npz", **images(40, 77))
    result = engine.run_round(grid, 2, scorer)
    assert {line["device"]: line["examples"] for line in result.devices} == {0: 40, 1: 20, 2: 28}


def test_a_node_without_a_folder_is_refused(folder, tmp_path):
    where = without_devices(folder, tmp_path)
    grid = nodes(tmp_path, where)
    del grid.contexts[2].node_config["data-dir"]
    _, [first, _] = two_rounds(config(tmp_path, folder, "one", fleet=False), grid)
    assert outcomes(first)[1] == (
        "refused: this node's configuration has no data-dir, and devices train on their own data"
    )


def test_nothing_of_a_devices_data_is_in_any_message(folder, tmp_path):
    """No run of 64 bytes of any image, as stored or as floats, in whatever a node answers."""
    where = without_devices(folder, tmp_path)
    grid = nodes(tmp_path, where)
    answers = []

    def look(reply):
        if reply.has_content():
            text, arrays = read_records(reply.content, "the reply")
            answers.append(text.encode() + b"".join(arrays))
        return reply

    grid.tamper = look
    two_rounds(config(tmp_path, folder, "one", fleet=False), grid)
    assert len(answers) >= 2 * DEVICES
    for device, size in enumerate(SIZES):
        for image in images(size, device)["inputs"]:
            for stored in (image, image.astype(np.float32)):
                assert not any(stored.tobytes() in answer for answer in answers)


def test_a_simulated_device_without_a_folder_ends_the_run_before_it_begins(folder, tmp_path):
    (device_folder(str(folder), 2) / "train.npz").unlink()
    with pytest.raises((ConfigError, OwnDataError), match=r"no file train\.npz"):
        started(config(tmp_path, folder, "one"))


def test_settings_that_do_not_go_together_are_told(folder, tmp_path):
    with pytest.raises(ConfigError, match="devices train on what they have: set it to 0"):
        config(tmp_path, folder, "one", **{"examples-per-device": 5})
    with pytest.raises(ConfigError, match="needs the server's folder"):
        config(tmp_path, folder, "two", **{"data-dir": ""})
