"""What is exported says what was scored, and is used without Wildflower."""

import importlib
import json
import shutil
import sys
import textwrap
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.programs import run_python
from tests.small_run import METHODS, simulated_grid, small_config
from wildflower.cli.command import app
from wildflower.cli.predict import predict
from wildflower.launch.python import load
from wildflower.messages import programs as module
from wildflower.messages.programs import FORMATS, MAX_BATCH, Deployed, ExportError, Facts, facts_path, read_program
from wildflower.models.architecture import Architecture
from wildflower.models.family import make_family
from wildflower.models.weights import with_weights
from wildflower.plugins.beside import looked_for_beside
from wildflower.plugins.extras import MissingExtraError
from wildflower.server_app.app import build, run
from wildflower.server_app.export import export, facts_of
from wildflower.server_app.models import ModelError, load_model
from wildflower.server_app.run_folder import read_rounds
from wildflower.tasks.task import TaskSpec, load_task

LEARNING = {"rounds": 2, "evaluate-every": 2, "local-steps": 10, "examples-per-device": 200}
# ExecuTorch is large, and no part of what `make setup` installs: who has it tests it too.
HERE = [name for name in FORMATS if name != "pte" or find_spec("executorch")]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """The folder of a small run, and its task."""
    config = small_config(tmp_path_factory.mktemp("run"), **LEARNING)
    task = load_task(TaskSpec.from_json(build(config)[0].settings.task))
    return run(simulated_grid(), config), task


def said(program, inputs):
    return torch.cat([program(part) for part in inputs.split(MAX_BATCH)])


@pytest.mark.thorough
@pytest.mark.parametrize("file_format", HERE)
@pytest.mark.parametrize("tier", [None, "quarter"])
def test_a_program_says_what_was_scored_of_every_test_image(digits_run, file_format, tier, tmp_path):
    run_dir, task = digits_run
    path = export(run_dir, file_format=file_format, tier=tier, out=tmp_path / f"model.{file_format}")
    program, facts = read_program(path)
    inputs, labels = task.test.inputs, task.test.labels
    model, info = load_model(run_dir, tier=tier)
    with torch.no_grad():
        right = model(task.prepare(inputs, augment=None))
    found = said(program, inputs)
    assert (found - right).abs().max() <= 1e-5
    assert float((found.argmax(1) == labels).double().mean()) == info.model.score == facts.score
    assert facts.labels == list("0123456789")
    scored = read_rounds(run_dir)[-1]
    assert facts.score == (scored.score if tier is None else scored.score_by_tier["quarter"])


PROGRAMS = {
    "pt2": """\
import numpy, torch
from PIL import Image
program = torch.export.load("model.pt2").module()
image = torch.from_numpy(numpy.array(Image.open("image.png")))[None, None]
print(program(image).argmax().item())
""",
    "onnx": """\
import numpy, onnxruntime
from PIL import Image
session = onnxruntime.InferenceSession("model.onnx")
image = numpy.array(Image.open("image.png"))[None, None]
print(session.run(None, {"inputs": image})[0].argmax())
""",
}


@pytest.mark.thorough
@pytest.mark.parametrize("file_format", PROGRAMS)
def test_five_lines_without_wildflower_use_it(digits_run, file_format, tmp_path):
    run_dir, task = digits_run
    export(run_dir, file_format=file_format, out=tmp_path / f"model.{file_format}")
    image = task.test.inputs[7]
    Image.fromarray(image[0].numpy()).save(tmp_path / "image.png")
    code = PROGRAMS[file_format]
    assert "wildflower" not in code
    check = (
        "import sys; assert not any(n.split('.')[0] in ('wildflower', 'models', 'server_app') for n in sys.modules)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = run_python("-c", code + check, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    model, info = load_model(run_dir)
    with torch.no_grad():
        assert int(done.stdout) == int(model(info.prepare(image[None])).argmax())


NAMED = """\
import json, numpy, torch
from PIL import Image
program = torch.export.load("net.pt2").module()
image = torch.from_numpy(numpy.array(Image.open("image.png")))[None, None]
print(json.load(open("net.pt2.json"))["labels"][program(image).argmax()])
"""


@pytest.mark.thorough
def test_labels_that_are_numbers_are_named_by_them(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8)).astype(np.uint8)
    for name in ("train", "test"):
        np.savez(tmp_path / f"{name}.npz", inputs=images, labels=np.arange(60) % 3)
    keys = {"task": "npz", "data-dir": str(tmp_path), "family": "cnn3", "rounds": 1, "examples-per-device": 10}
    run_dir = run(simulated_grid(), small_config(tmp_path, **keys))
    path = export(run_dir, out=tmp_path / "net.pt2")
    assert read_program(path)[1].labels == ["0", "1", "2"]
    Image.fromarray(images[7]).save(tmp_path / "image.png")
    done = run_python("-c", NAMED, folder=tmp_path, environment={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    [of_run] = predict(run_dir, tmp_path)
    assert done.stdout.strip() == of_run.label
    assert of_run.label in ("0", "1", "2")
    _, info = load_model(run_dir)
    assert facts_of(info.model_copy(update={"classes": 1}), "pt2").labels == []  # its one output is a number


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cnn3", "lenet5", "vgg", "resnet18", "vit-tiny", "bert-tiny"])
def test_families_can_be_exported(name, tmp_path):
    family = make_family({"name": name} | ({"input_shape": [3, 32, 32]} if name != "bert-tiny" else {}))
    tokens = family.input_dtype == torch.int64
    torch.manual_seed(0)
    architecture = family.full()
    model = with_weights(family, architecture, family.initial()).eval()
    mean = None if tokens else [120.0] * family.input_shape[0]
    facts = Facts(
        format="pt2",
        task="made",
        input_shape=list(family.input_shape),
        input_dtype="uint8",
        classes=family.classes,
        labels=[],
        mean=mean,
        std=None if tokens else [60.0] * family.input_shape[0],
        family=family.spec(),
        architecture=architecture.to_json(),
        exits="deepest",
        metric="accuracy",
        score=0.5,
        round=1,
    )
    deployed = Deployed(model, facts.mean, facts.std, len(facts.input_shape)).eval()
    path = tmp_path / "model.pt2"
    path.write_bytes(module._pt2(deployed, facts))
    facts_path(path).write_text(facts.model_dump_json())
    program, _ = read_program(path)
    for count in (1, 3):
        inputs = module.examples(facts, count)
        with torch.no_grad():
            assert (program(inputs) - deployed(inputs)).abs().max() < 1e-5


@pytest.mark.parametrize("file_format", ["pt2", "safetensors"])
def test_rows_far_from_zero_keep_their_differences_in_exported_models(tmp_path, file_format):
    rng = np.random.default_rng(0)
    lines = [f"{1.7e9 + when},{x},{'ab'[n % 2]}" for n, (when, x) in enumerate(rng.normal(0, 60, (40, 2)).tolist())]
    (tmp_path / "train.csv").write_text("\n".join(["when,x,label", *lines]))
    made = {"task": "table", "task-arguments": "columns = ['when', 'x']", "data-dir": str(tmp_path), "partition": "iid"}
    config = small_config(tmp_path, **made, family="mlp", **{"family-arguments": "hidden = [8]", "rounds": 1})
    run_dir = run(simulated_grid(), config)
    model, info = load_model(run_dir)
    program, facts = read_program(export(run_dir, file_format=file_format))
    assert facts.input_dtype == "float64"
    rows = torch.tensor([[1.7e9 - 30, 5.0], [1.7e9 + 30, 5.0]], dtype=torch.float64)[..., None]
    with torch.no_grad():
        told, right = program(rows), model(info.prepare(rows))
    assert torch.allclose(told, right, atol=1e-5)
    assert (told[0] - told[1]).abs().max() > 1e-3  # in 32 bits both rows would be one


@pytest.mark.thorough
def test_the_mean_of_exits_is_exported(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, **METHODS["depthfl"] | LEARNING))
    model, info = load_model(run_dir)
    for file_format in ("pt2", "safetensors"):
        program, facts = read_program(export(run_dir, file_format=file_format))
        assert facts.exits == "mean"
        inputs = torch.randint(0, 17, (3, 1, 8, 8), dtype=torch.uint8)
        with torch.no_grad():
            assert torch.allclose(program(inputs), model(info.prepare(inputs)), atol=1e-5)


@pytest.mark.thorough
def test_an_architecture_is_found_by_what_models_json_writes(digits_run, tmp_path):
    run_dir, _ = digits_run
    saved = json.loads((run_dir / "models" / "best" / "models.json").read_text())["models"][-1]["architecture"]
    path = export(run_dir, architecture=Architecture.from_json(saved), out=tmp_path / "one.pt2")
    assert read_program(path)[1].architecture == saved
    with pytest.raises(ModelError, match=r"holds no model of the architecture .* there are"):
        export(run_dir, architecture=Architecture((1, 1, 1)))


# What is wrong is said


def test_what_was_written_wrongly_is_found(digits_run, tmp_path, monkeypatch):
    def other(deployed, facts):
        deployed.mean += 1
        data = right(deployed, facts)
        deployed.mean -= 1
        return data

    right = module._pt2
    monkeypatch.setitem(module._WRITERS, "pt2", other)
    with pytest.raises(ExportError, match="says other things than the model"):
        export(digits_run[0], out=tmp_path / "model.pt2")


def test_what_is_not_installed_is_named(digits_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "executorch.backends.xnnpack.partition.xnnpack_partitioner", None)
    for file_format, extra in (("onnx", "export"), ("pte", "executorch")):
        with pytest.raises(MissingExtraError, match=rf"--editable '\.\[{extra}\]'"):
            export(digits_run[0], file_format=file_format, out=tmp_path / f"model.{file_format}")


@pytest.mark.thorough
def test_files_that_are_no_models_are_refused(digits_run, tmp_path):
    path = export(digits_run[0], out=tmp_path / "model.pt2")
    facts = facts_path(path).read_text()
    with pytest.raises(ExportError, match=r"ends in \.pt2"):
        export(digits_run[0], out=tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="an exported model ends in"):
        read_program(tmp_path / "model.zip")
    with pytest.raises(ExportError, match="is no file"):
        read_program(tmp_path / "other.pt2")
    path.write_bytes(b"nothing")
    with pytest.raises(ExportError, match="cannot be read as pt2"):
        read_program(path)
    facts_path(path).write_text("{}")
    with pytest.raises(ExportError, match="does not hold the facts"):
        read_program(path)
    facts_path(path).write_text(facts.replace('"pt2"', '"onnx"'))
    with pytest.raises(ExportError, match=r"is about a \.onnx file"):
        read_program(path)
    facts_path(path).unlink()
    with pytest.raises(ExportError, match="cannot read"):
        read_program(path)


OWN = {
    "own_export.py": """
        import torch
        from torch import nn

        from own_export_parts import middle

        class Net(nn.Module):
            def __init__(self, classes=10):
                super().__init__()
                self.first, self.last = nn.Linear(64, 8), nn.Linear(8, classes)

            def forward(self, x):
                return self.last(middle(self.first(x.flatten(1))))
    """,
    "own_export_parts.py": """
        import torch

        def middle(x):
            return torch.relu(x)
    """,
}


@pytest.fixture
def run_of_an_own_module(tmp_path):
    """The folder of a run over a module that lay beside the experiment, and that folder."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, text in OWN.items():
        (mine / name).write_text(textwrap.dedent(text))
    keys = {"family": "own_export:Net", "strategy": "fedavg", "below_smallest": "smallest", "rounds": 1}
    keys["family_arguments"] = "levels = [{}]"  # else devices get its graph, and no run needs the module again
    with looked_for_beside(mine):
        run_dir = run(simulated_grid(), small_config(tmp_path, **keys))
    assert "own_export" not in sys.modules  # as in a later command
    return run_dir, mine


def test_a_module_that_lay_beside_the_experiment_is_exported_as_it_was(run_of_an_own_module, tmp_path):
    run_dir, mine = run_of_an_own_module
    inputs = torch.randint(0, 17, (5, 1, 8, 8), dtype=torch.uint8)
    (mine / "own_export_parts.py").write_text("import torch\n\ndef middle(x):\n    return torch.tanh(x)\n")
    paths = [export(run_dir, file_format=name, out=tmp_path / f"m.{name}") for name in ("pt2", "safetensors")]
    tensors = load_file(paths[1])
    _, info = load_model(run_dir)
    prepared = info.prepare(inputs).flatten(1)
    middle = torch.relu(prepared @ tensors["first.weight"].T + tensors["first.bias"])
    right = middle @ tensors["last.weight"].T + tensors["last.bias"]
    program, _ = read_program(paths[0])  # the facts of which the second export left alone
    assert (program(inputs) - right).abs().max() <= 1e-5
    assert "own_export" not in sys.modules


@pytest.mark.thorough
@pytest.mark.parametrize("file_format", HERE)
def test_a_module_that_was_cut_by_itself_is_exported_and_comes_as_its_own_class(file_format, tmp_path):
    keys = {"family": "own_traced:Residual", "strategy": "heterofl", "rounds": 1, "evaluate_every": 1}
    run_dir = run(simulated_grid(), small_config(tmp_path, **keys))
    path = export(run_dir, file_format=file_format, tier="half", out=tmp_path / f"model.{file_format}")
    program, _ = read_program(path)
    own = load(run_dir).model("half")
    assert type(own).__name__ == "Residual"
    _, info = load_model(run_dir, tier="half")
    inputs = torch.randint(0, 17, (5, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        right = own(info.prepare(inputs))
    assert (program(inputs) - right).abs().max() <= 1e-5
    exported = torch.export.export(own, (info.prepare(inputs),)).module()
    assert torch.allclose(exported(info.prepare(inputs)), right, atol=1e-5)


def test_a_module_that_cannot_be_traced_is_told_in_one_line(run_of_an_own_module, tmp_path, monkeypatch):
    run_dir, _ = run_of_an_own_module

    def fails(*_, **__):
        raise RuntimeError("We found a fake tensor\nin the program")

    monkeypatch.setattr(torch.export, "export", fails)
    words = (
        "^own_export:Net cannot be written as pt2: RuntimeError: We found a fake tensor in the program.*safetensors$"
    )
    with pytest.raises(ExportError, match=words):
        export(run_dir, out=tmp_path / "m.pt2")
    assert export(run_dir, file_format="safetensors", out=tmp_path / "m.safetensors").exists()


def test_a_module_that_changed_is_not_exported(run_of_an_own_module):
    run_dir, _ = run_of_an_own_module
    copy = run_dir / "modules" / "own_export_parts.py"
    copy.write_text("raise SystemExit('a copy that changed is not run')\n")
    with pytest.raises(ModelError, match=r"made again: the copy .*own_export_parts\.py changed since the run began"):
        export(run_dir)


def test_a_module_that_the_process_has_in_another_version_is_named(run_of_an_own_module, monkeypatch):
    run_dir, mine = run_of_an_own_module
    (mine / "own_export.py").write_text("Net = None\n")
    monkeypatch.syspath_prepend(mine)
    importlib.import_module("own_export")
    try:
        with pytest.raises(ModelError, match=r"this process has imported another version of 'own_export', .*: start"):
            load_model(run_dir)
    finally:
        del sys.modules["own_export"]


def test_a_package_is_kept_with_all_its_files_and_asked_when_it_imports_late(tmp_path):
    package = tmp_path / "mine" / "own_package"
    package.mkdir(parents=True)
    (package / "size.txt").write_text("8")
    (package / "late.py").write_text("import torch\n\nmiddle = torch.relu\n")
    (package / "__init__.py").write_text(
        textwrap.dedent("""
            from pathlib import Path
            from torch import nn

            SIZE = int((Path(__file__).parent / "size.txt").read_text())

            class Net(nn.Module):
                def __init__(self, classes=10):
                    super().__init__()
                    self.first, self.last = nn.Linear(64, SIZE), nn.Linear(SIZE, classes)

                def forward(self, x):
                    from own_package.late import middle
                    return self.last(middle(self.first(x.flatten(1))))
        """)
    )
    keys = {"family": "own_package:Net", "strategy": "fedavg", "below_smallest": "smallest"}
    keys["family_arguments"] = "levels = [{}]"
    with looked_for_beside(package.parent):
        run_dir = run(simulated_grid(), small_config(tmp_path, rounds=1, **keys))
    images = tmp_path / "images"
    images.mkdir()
    Image.new("L", (8, 8), 5).save(images / "a.png")
    [of_run] = predict(run_dir, images)
    weights = export(run_dir, file_format="safetensors", out=tmp_path / "taken" / "m.safetensors")
    words = r"module belongs beside it: there is no module 'own_package' in .*taken.* --format pt2, needs no module"
    with pytest.raises(ExportError, match=words):
        predict(weights, images)
    shutil.copytree(package, weights.parent / "own_package")
    assert predict(weights, images) == [of_run]
    (run_dir / "modules" / "own_package" / "late.py").write_text("raise SystemExit\n")
    with pytest.raises(ModelError, match="own_package changed since the run began"):
        export(run_dir)


def test_a_model_that_has_diverged_is_not_exported_and_predicts_nothing(digits_run, tmp_path, monkeypatch):
    model, info = load_model(digits_run[0])
    next(model.parameters()).data.fill_(float("nan"))
    for users in ("wildflower.server_app.export", "wildflower.cli.predict"):
        monkeypatch.setattr(f"{users}.load_model", lambda *which: (model, info))
    words = "what the model says are no finite numbers: its training has diverged"
    path = tmp_path / "exported" / "m.pt2"
    with pytest.raises(ExportError, match=words):
        export(digits_run[0], out=path)
    assert not path.parent.exists()
    Image.new("L", (8, 8), 5).save(tmp_path / "a.png")
    with pytest.raises(ExportError, match=words):
        predict(digits_run[0], tmp_path)


@pytest.mark.thorough
def test_the_command(digits_run, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(app, ["export", *map(str, arguments)])

    run_dir, _ = digits_run
    shown = invoke(run_dir, "--tier", "half", "--which", "newest")
    assert shown.exit_code == 0, shown.output
    assert (run_dir / "export" / "newest-half.pt2").is_file()
    facts = json.loads((run_dir / "export" / "newest-half.pt2.json").read_text())
    assert facts["task"] == "digits"
    percent = round(100 * facts["score"], 2)
    assert f"It is the model of tier half as it was in round 2: accuracy {percent:g} %\n" in shown.stdout
    for arguments, told in (
        ((run_dir, "--format", "tflite"), "must be one of"),
        ((run_dir, "--tier", "none"), "no model of a tier 'none'"),
        ((run_dir, "--which", "worst"), "'best' and a 'newest'"),
        ((run_dir, "--architecture", "{"), "--architecture"),
        ((tmp_path,), "is not the folder of a run"),
        ((tmp_path / "nope",), "there is no folder"),
    ):
        shown = invoke(*arguments)
        assert (shown.exit_code, told in shown.stderr) == (1, True), shown.stderr
