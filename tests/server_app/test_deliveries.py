"""Models of a run on their way to its devices, over nodes in this process."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from tests.cli.test_command import invoke
from tests.deployment import ROOT, Deployment
from tests.server_app import fake_runs
from tests.small_run import connected_grid, small_config
from wildflower.client_app import delivered
from wildflower.client_app.delivered import CURRENT, PREVIOUS, ModelFolderError, roll_back, use, version_of
from wildflower.messages.delivery import Delivery
from wildflower.messages.programs import Facts
from wildflower.server_app import deliveries
from wildflower.server_app.app import run
from wildflower.server_app.config import RunConfig
from wildflower.server_app.deliveries import NEWEST, newest, read_delivered, write_programs
from wildflower.server_app.export import export

PROGRAM = "model.pt2"
HARDWARE = {"fleet": "", "devices": 2, "devices-per-round": 2, "rounds": 2, "evaluate-every": 1, "test-fraction": 0.25}
FACTS = Facts(
    format="pt2",
    task="digits",
    input_shape=[1, 8, 8],
    input_dtype="uint8",
    classes=2,
    labels=["no", "yes"],
    mean=[0.0],
    std=[1.0],
    family={},
    architecture={},
    exits="deepest",
    metric="accuracy",
    score=0.5,
    round=1,
)


@pytest.fixture
def delivered_run(tmp_path):
    """A run of two devices that has ended, whose models were delivered then. -> its folder, grid and configuration."""
    grid, config = connected_grid(2, tmp_path), small_config(tmp_path, **HARDWARE)
    run_dir = run(grid, config)
    version = write_programs(run_dir)
    run(grid, config.model_copy(update={"resume": True}))
    return run_dir, grid, config, version


def folders(grid):
    """The folders of models of the devices, by their numbers."""
    return {
        c.node_config["partition-id"]: delivered.Path(c.node_config["state-dir"]) / "model"
        for c in grid.contexts.values()
    }


def test_each_device_uses_the_model_of_its_tier(delivered_run):
    run_dir, grid, _, version = delivered_run
    said = read_delivered(run_dir)
    assert {device: (answer.used, answer.version) for device, answer in said.items()} == {
        0: (True, version),
        1: (True, version),
    }
    assert all(0 <= answer.score <= 1 and answer.before is None for answer in said.values())
    folder, programs = newest(run_dir)
    for place in folders(grid).values():
        assert version_of(place / CURRENT) == version
        facts = json.loads((place / CURRENT / f"{PROGRAM}.json").read_text())
        assert facts["round"] == int(version.split("-")[0])
        program = torch.export.load(place / CURRENT / PROGRAM).module()
        shape, kind = facts["input_shape"], getattr(torch, facts["input_dtype"])
        assert program(torch.zeros((3, *shape), dtype=kind)).shape == (3, facts["classes"])
        assert (place / CURRENT / PROGRAM).read_bytes() in [
            (folder / name).read_bytes() for name in programs.tiers.values()
        ]


@pytest.mark.thorough
def test_a_worse_model_is_not_used(delivered_run, monkeypatch):
    run_dir, grid, config, first = delivered_run
    again = run_dir / "deliver" / "99-0123456789ab"
    shutil.copytree(run_dir / "deliver" / first, again)
    programs = json.loads((again / "tiers.json").read_text()) | {"version": again.name}
    (again / "tiers.json").write_text(json.dumps(programs))
    (run_dir / "deliver" / NEWEST).write_text(again.name)
    scores = {first: 0.9, again.name: 0.8}

    def score_of(place, task, device):
        return next(score for version, score in scores.items() if version in place.resolve().name)

    monkeypatch.setattr(delivered, "score_of", score_of)
    run(grid, config.model_copy(update={"resume": True}))
    answer = read_delivered(run_dir)[0]
    assert (answer.used, answer.score, answer.before) == (False, 0.8, 0.9)
    assert "worse than the model in use" in answer.why
    for place in folders(grid).values():
        assert version_of(place / CURRENT) == first
        assert not (place / again.name).exists()


@pytest.mark.thorough
def test_a_program_that_cannot_be_read_is_not_used(delivered_run):
    run_dir, grid, config, first = delivered_run
    again = run_dir / "deliver" / "99-0123456789ab"
    shutil.copytree(run_dir / "deliver" / first, again)
    (again / "0.pt2").write_bytes(b"no program")
    sha256 = {name: hashlib.sha256((again / name).read_bytes()).hexdigest() for name in ("0.pt2", "0.pt2.json")}
    programs = {"version": again.name, "file_format": "pt2", "tiers": {"": "0.pt2"}, "sha256": sha256}
    (again / "tiers.json").write_text(json.dumps(programs))
    (run_dir / "deliver" / NEWEST).write_text(again.name)
    run(grid, config.model_copy(update={"resume": True}))
    answers = read_delivered(run_dir)
    assert [answer.used for answer in answers.values()] == [False, False]
    assert answers[0].why.startswith("it cannot be used here")
    assert {version_of(place / CURRENT) for place in folders(grid).values()} == {first}


@pytest.fixture
def take(tmp_path, monkeypatch):
    """Gives a model of a version to a device: (version, score or what it raises) -> its answer."""
    task = SimpleNamespace(metric=SimpleNamespace(scale=SimpleNamespace(rank=float)), own_test=lambda device: ([], [1]))
    scores = {}

    def score_of(place, task, device):
        score = scores[(place / PROGRAM).read_bytes()]
        if isinstance(score, Exception):
            raise score
        return score

    def give(version, score):
        program = version.encode()
        scores[program] = score
        delivery = Delivery(
            run="r", device=0, version=version, sha256=hashlib.sha256(program).hexdigest(), file_format="pt2", task={}
        )
        return delivered.take(delivery, program, {}, task, tmp_path / "model")

    monkeypatch.setattr(delivered, "score_of", score_of)
    return give


def test_a_version_in_use_stays_where_it_comes_again_and_cannot_be_read_now(take, tmp_path):
    assert take("1-aaaaaaaaaaaa", 0.5).used
    file = tmp_path / "model" / CURRENT / PROGRAM
    inode = file.stat().st_ino
    assert take("1-aaaaaaaaaaaa", 0.5).used
    assert file.stat().st_ino == inode
    assert not take("1-aaaaaaaaaaaa", MemoryError("no room")).used
    assert file.read_bytes() == b"1-aaaaaaaaaaaa"


def test_a_version_from_before_stays_where_it_comes_again_and_is_worse(take, tmp_path):
    take("1-aaaaaaaaaaaa", 0.5)
    take("2-aaaaaaaaaaaa", 0.6)
    answer = take("1-aaaaaaaaaaaa", 0.5)
    assert (answer.used, answer.before) == (False, 0.6)
    assert roll_back(tmp_path / "model") == "1-aaaaaaaaaaaa"


def test_what_a_killed_process_left_is_in_nobodys_way(take, tmp_path):
    (tmp_path / "model" / f".1-aaaaaaaaaaaa.{os.getpid()}.part").mkdir(parents=True)
    assert take("1-aaaaaaaaaaaa", None).used
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["1-aaaaaaaaaaaa", CURRENT]


@pytest.fixture
def exported(monkeypatch):
    """The files that were exported since."""
    files = []

    def noted(run_dir, *, out, **options):
        files.append(out.name)
        return export(run_dir, out=out, **options)

    monkeypatch.setattr(deliveries, "export", noted)
    return files


def brought(grid):
    return len([m for m in grid.sent if m.metadata.message_type == "query.delivery"])


def test_the_same_models_are_exported_and_sent_once(delivered_run, exported):
    """Though two exports of a model seldom have the same bytes."""
    run_dir, grid, config, version = delivered_run
    before = run_dir / "deliver" / "0-0123456789ab"
    before.mkdir()
    (before / "tiers.json").write_text("of before")
    assert write_programs(run_dir) == version
    assert exported == []
    assert newest(run_dir)[1].version == version
    assert sorted(path.name for path in (run_dir / "deliver").iterdir()) == [version, NEWEST]
    run(grid, config.model_copy(update={"resume": True}))
    assert brought(grid) == 2


@pytest.mark.thorough
def test_a_changed_weight_or_exporter_makes_a_new_version(delivered_run, exported, monkeypatch):
    run_dir, grid, config, version = delivered_run
    folder = run_dir / "models" / "best"
    facts = json.loads((folder / "models.json").read_text())
    [saved] = [model for model in facts["models"] if model["is_global"]]
    weights = safetensors.torch.load((folder / saved["file"]).read_bytes())
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1
    data = safetensors.torch.save(weights)
    (folder / saved["file"]).unlink()  # other folders have the same file
    (folder / saved["file"]).write_bytes(data)
    saved["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "models.json").write_text(json.dumps(facts))
    changed = write_programs(run_dir)
    assert changed != version
    assert "0.pt2" in exported
    program = torch.export.load(newest(run_dir)[0] / "0.pt2")
    assert any(torch.equal(value, weights[name]) for value in program.state_dict.values())
    run(grid, config.model_copy(update={"resume": True}))
    assert brought(grid) == 4
    monkeypatch.setattr(deliveries, "versions", lambda: {"wildflower": "0.1.0", "torch": "0.0.1"})
    assert write_programs(run_dir) not in (version, changed)


@pytest.mark.thorough
def test_a_damaged_file_of_a_version_is_neither_kept_nor_sent(delivered_run, exported, caplog):
    run_dir, grid, config, version = delivered_run
    again = config.model_copy(update={"resume": True})
    for name, gone in (("1.pt2", False), ("1.pt2.json", False), ("1.pt2", True), ("tiers.json", False)):
        exported.clear(), caplog.clear()
        file, sent = run_dir / "deliver" / version / name, brought(grid)
        half = file.read_bytes()[: file.stat().st_size // 2]
        file.unlink() if gone else file.write_bytes(half)
        (run_dir / "delivered.json").unlink()  # as if the devices had not been there
        run(grid, again)
        assert brought(grid) == sent
        assert f"{file}" in caplog.text
        assert "wildflower deliver writes it again" in caplog.text
        assert write_programs(run_dir) == version
        assert exported == ["0.pt2", "1.pt2"]
        run(grid, again)
        assert brought(grid) == sent + 2
        assert all(answer.used for answer in read_delivered(run_dir).values())


def test_a_run_goes_on_without_a_library_that_its_format_needs(delivered_run, caplog, monkeypatch):
    run_dir, _, config, version = delivered_run

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    config = RunConfig.from_run_config(config.to_dict() | {"delivery.format": "onnx"})
    engine = SimpleNamespace(method=SimpleNamespace(round=3))
    deliveries.Deliveries(run_dir, config, engine).write()
    assert "Nothing new is delivered after round 3: the format onnx needs onnxscript" in caplog.text
    assert newest(run_dir)[1].version == version


def test_a_run_that_has_not_ended_is_not_taken_up_by_the_command(tmp_path):
    fake_runs.three_rounds(tmp_path / "run")
    shown = invoke("deliver", tmp_path / "run", "--superlink", "127.0.0.1:1", "--insecure")
    assert shown.exit_code == 1
    assert "has no end yet: type wildflower deliver without --superlink" in shown.output


def test_the_version_before_is_kept_and_can_be_used_again(tmp_path):
    for name in ("1-aaaaaaaaaaaa", "2-aaaaaaaaaaaa", "3-aaaaaaaaaaaa"):
        (tmp_path / "model" / name).mkdir(parents=True)
        (tmp_path / "model" / name / PROGRAM).write_bytes(b"a program")
        facts = FACTS.model_copy(update={"round": int(name[0])})
        (tmp_path / "model" / name / f"{PROGRAM}.json").write_text(facts.model_dump_json())
        use(tmp_path / "model", name)
    assert sorted(path.name for path in (tmp_path / "model").iterdir() if not path.is_symlink()) == [
        "2-aaaaaaaaaaaa",
        "3-aaaaaaaaaaaa",
    ]
    assert "version 3-aaaaaaaaaaaa, round 3" in invoke("model", tmp_path).output
    shown = invoke("model", tmp_path, "--rollback")
    assert "Back at the model 2-aaaaaaaaaaaa" in shown.output
    assert (version_of(tmp_path / "model" / CURRENT), version_of(tmp_path / "model" / PREVIOUS)) == (
        "2-aaaaaaaaaaaa",
        "3-aaaaaaaaaaaa",
    )


def test_without_a_model_there_is_nothing_to_go_back_to(tmp_path):
    with pytest.raises(ModelFolderError, match="holds no model from before"):
        roll_back(tmp_path)
    shown = invoke("model", tmp_path)
    assert shown.exit_code == 1
    assert "wildflower deliver brings one" in shown.output


@pytest.mark.thorough
def test_the_command_brings_models_to_nodes(tmp_path):
    """A SuperLink and two nodes as processes, each with its worker; the run has ended before, on others."""
    run_dir = run(connected_grid(2, tmp_path / "before"), small_config(tmp_path, **HARDWARE))
    deployment = Deployment(tmp_path / "flower")
    try:
        deployment.start_superlink()
        for device in range(2):
            deployment.start_node(device, 2)
        command = [sys.executable, "-m", "wildflower", "deliver", str(run_dir), *deployment.connection]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    finally:
        deployment.close()
    assert done.returncode == 0, done.stdout + done.stderr
    [version] = {answer.version for answer in read_delivered(run_dir).values()}
    for device in range(2):
        place = tmp_path / "flower" / f"node-{device}" / "model"
        assert version_of(place / CURRENT) == version
        assert f"version {version}" in invoke("model", place.parent).output
