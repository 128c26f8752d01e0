import json

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from wildflower.cli import supernet as module
from wildflower.cli.command import app
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import make_family
from wildflower.models.mobilenet import MobileNetV2
from wildflower.models.supernet import Supernet
from wildflower.strategies.predictor import load_pairs
from wildflower.strategies.supernet_training import SupernetTraining

TINY = (
    "stage_channels = [8, 8, 8, 8, 8, 8], depths = [1, 2], expand_ratios = [2], kernel_sizes = [3], dropout = 0.0, "
    "halvings = 3"
)


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "public.toml"
    path.write_text(
        f'task = "digits"\nfamily = "mobilenet-v3"\nfamily-arguments = "{TINY}"\n'
        "batch-size = 16\nlearning-rate = 0.05\n"
    )
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, ["supernet", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.thorough
def test_a_stopped_training_goes_on_and_ends_with_the_same_weights(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHECKPOINT_STEPS", 2)
    options = ["--steps", 4, "--random", 1, "--pairs", 3]
    result = invoke(experiment, "--output", tmp_path / "whole.safetensors", *options)
    assert result.exit_code == 0, result.output
    assert "accuracy of the largest" in result.output

    advance, made = SupernetTraining.advance, []

    def stopped(training):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(training.step)
        return advance(training)

    monkeypatch.setattr(SupernetTraining, "advance", stopped)
    assert invoke(experiment, "--output", tmp_path / "parts.safetensors", *options).exit_code == 130
    monkeypatch.setattr(SupernetTraining, "advance", advance)
    again = invoke(experiment, "--output", tmp_path / "parts.safetensors", *options)
    assert again.exit_code == 0, again.output
    assert "Going on behind step 2" in again.output
    whole, parts = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "parts"))
    assert all((whole[name] == parts[name]).all() for name in whole)
    facts = json.loads((tmp_path / "parts.json").read_text())
    family = make_family(facts["family"])
    assert set(parts) == set(family.tensors(family.full()))
    picks, accuracies = load_pairs(tmp_path / "parts.json", ElasticSpace.of(family))
    assert picks[0] == tuple(len(options) - 1 for options in ElasticSpace.of(family).options)
    assert len(picks) == len(accuracies) >= 3
    other = make_family(facts["family"] | {"depths": [1, 3]})
    with pytest.raises(ValueError, match="of another space"):
        load_pairs(tmp_path / "parts.json", ElasticSpace.of(other))

    changed = invoke(experiment, "--output", tmp_path / "parts.safetensors", "--steps", 5)
    assert changed.exit_code == 1
    assert "other settings" in changed.output


@pytest.mark.thorough
def test_pretrained_weights_of_other_classes_begin_the_published_sub_network(tmp_path, capsys):
    family = MobileNetV2(input_shape=(1, 8, 8), classes=10, depths=(1, 4), expand_ratios=(6,), kernel_sizes=(3,))
    names = family.torchvision_names()
    theirs = MobileNetV2(input_shape=(1, 8, 8), classes=7)
    state = theirs.build(theirs.plain()).state_dict()
    save_file({names[name]: value.clone() for name, value in state.items()}, tmp_path / "theirs.safetensors")
    supernet = Supernet(ElasticSpace.of(family))
    module._pretrained(supernet, tmp_path / "theirs.safetensors", Console())
    assert "left out: classifier.1.weight, which is for 7 classes and not 10" in capsys.readouterr().out
    found = supernet.extract(family.plain()).state_dict()
    assert torch.equal(found["stage3_2.project.weight"], state["stage3_2.project.weight"])
    assert found["head.classifier.weight"].shape == (10, 1280)
    (tmp_path / "bad.pth").write_bytes(b"no weights")
    for file in ("bad.pth", "none.safetensors"):
        with pytest.raises(module.SupernetError, match=f"--initial .*{file} cannot be read"):
            module._pretrained(supernet, tmp_path / file, Console())


def test_pretrained_weights_of_another_width_are_refused_before_anything_changes(tmp_path):
    family = MobileNetV2(input_shape=(1, 8, 8), classes=10, depths=(1, 4), expand_ratios=(6,), kernel_sizes=(3,))
    names = family.torchvision_names()
    wide = MobileNetV2(input_shape=(1, 8, 8), classes=10, width_multiplier=1.4)
    state = wide.build(wide.plain()).state_dict()
    save_file({names[name]: value.clone() for name, value in state.items()}, tmp_path / "wide.safetensors")
    supernet = Supernet(ElasticSpace.of(family))
    before = {name: value.clone() for name, value in supernet.whole.state_dict().items()}
    # Channels of the stem: 32 times 1.4, rounded to a multiple of 8.
    words = r"--initial .*wide\.safetensors: .* has shape .*: are these weights of another width or model\?"
    with pytest.raises(module.SupernetError, match=words):
        module._pretrained(supernet, tmp_path / "wide.safetensors", Console())
    assert all(torch.equal(value, before[name]) for name, value in supernet.whole.state_dict().items())


def test_a_single_example_that_is_left_over_is_not_calibrated_on(experiment, tmp_path):
    # 1,294 = 3 x 431 + 1 examples, and maps of 1x1 at the end, over which batch norm cannot normalize one.
    settings = ["--set", "batch-size=431", "--set", f"family-arguments={TINY.replace('halvings = 3', 'halvings = 5')}"]
    result = invoke(experiment, "--output", tmp_path / "one.safetensors", "--steps", 0, "--held-out", 0.1, *settings)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "one.safetensors").exists()


def test_a_last_step_that_diverges_leaves_no_weights(experiment, tmp_path, monkeypatch):
    advance = SupernetTraining.advance

    def diverging(training):
        value = advance(training)
        next(training.supernet.parameters()).data.fill_(float("inf"))
        return value

    monkeypatch.setattr(SupernetTraining, "advance", diverging)
    output = tmp_path / "far.safetensors"
    result = invoke(experiment, "--output", output, "--steps", 1)
    assert result.exit_code == 1
    assert "diverged in step 1: lower learning-rate" in result.output
    assert [path.name for path in tmp_path.iterdir()] == [experiment.name]


@pytest.mark.thorough
def test_no_steps_leave_the_weights_as_they_begin(experiment, tmp_path):
    written = [tmp_path / "first.safetensors", tmp_path / "again.safetensors"]
    assert invoke(experiment, "--output", written[0], "--steps", 0).exit_code == 0
    assert not (tmp_path / "first.checkpoint").exists()
    # A file of the supernet's own names begins the whole of it.
    result = invoke(experiment, "--output", written[1], "--steps", 0, "--initial", written[0], "--set", "seed=9")
    assert result.exit_code == 0, result.output
    first, again = map(load_file, written)
    assert "Initial weights" in result.output
    statistics = ("running_mean", "running_var")  # which are taken on examples that the seed parts anew
    assert all(torch.equal(first[name], again[name]) for name in first if not name.endswith(statistics))


@pytest.mark.thorough
def test_the_tasks_own_arguments_are_read(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(8):
            picture = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / "pictures" / name / f"{number}.png")
    path = tmp_path / "public.toml"
    path.write_text(
        f'task = "images"\ndata-dir = "{tmp_path}/pictures"\ntask-arguments = "size = [12, 12], color = \'gray\'"\n'
        f'family = "mobilenet-v3"\nfamily-arguments = "{TINY}"\nbatch-size = 4\n'
    )
    result = invoke(path, "--output", tmp_path / "small.safetensors", "--steps", 1, "--held-out", 0.3)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "small.json").read_text())["family"]["input_shape"] == [1, 12, 12]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("public.toml/x.safetensors", "public.toml is a file: name a folder by --output"),
        ("public.toml/deeper/x.safetensors", "x.safetensors cannot be written: Not a directory: name another --output"),
        ("folder.safetensors", "folder.safetensors is a folder: name a file by --output"),
        ("named.safetensors", "named.json is a folder: name a file by --output"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_the_training(
    place, message, experiment, tmp_path, monkeypatch
):
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "named.json").mkdir()
    monkeypatch.setattr(SupernetTraining, "advance", lambda training: pytest.fail("it is trained"))
    result = invoke(experiment, "--output", tmp_path / place, "--steps", 2)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.glob("*.check"))


@pytest.mark.thorough
def test_a_disk_that_fills_up_meanwhile_is_told_without_a_traceback(experiment, tmp_path, monkeypatch):
    def full(_, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "file_written_whole", full)
    result = invoke(experiment, "--output", tmp_path / "x.safetensors", "--steps", 1)
    assert result.exit_code == 1
    assert "x.json cannot be written: No space left on device: name" in " ".join(result.output.split())
    monkeypatch.setattr(module, "written_whole", full)
    result = invoke(experiment, "--output", tmp_path / "y.safetensors", "--steps", 1)
    assert result.exit_code == 1
    assert "y.checkpoint cannot be written: No space left on device" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("freeze=stem", "freeze = 'stem': all of a supernet is trained"),
        ("learning-rates=head = 10", "learning-rates = 'head = 10': all parts of a supernet are trained with"),
        ("compute.layout=channels-last", "compute.layout = 'channels-last': images lie contiguous"),
        ("micro-batch-size=2", "micro-batch-size = 2: a supernet is trained over whole batches"),
        ("schedule.decay-rounds=3", "falls along a cosine: leave it empty"),
        ("initial.weights=w.pth", "initial.weights = 'w.pth': the first weights of a supernet's training are those of"),
        ("initial.names='a' = 'b'", "the file of --initial has torchvision's names or the family's own"),
    ],
)
def test_keys_that_this_training_lacks_are_refused(key, message, experiment, tmp_path):
    first = ["--set", "initial.weights=w.pth"] if key.startswith("initial.names") else []
    sets = [*first, "--set", key, "--set", "optimizer=adam"]
    result = invoke(experiment, "--output", tmp_path / "x.safetensors", "--steps", 0, *sets)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x.pt"], "must end with .safetensors"),
        (["--output", "x.safetensors", "--set", "family=resnet18", "--set", "family-arguments="], "no space of once"),
        (["--output", "x.safetensors", "--held-out", "0"], "--held-out 0.0: give a share between 0 and 1"),
        (["--output", "x.safetensors", "--held-out", "nan"], "--held-out nan: give a share between 0 and 1"),
        (["--output", "x.safetensors", "--held-out", "0.0001"], "leaves 0 of 1438 examples to be scored on and 1438"),
        (["--output", "x.safetensors", "--held-out", "0.9993"], "leaves 1437 of 1438 examples"),
        (["--output", "x.safetensors", "--set", "batch-size=1"], "batch-size = 1: batch norm cannot normalize one"),
        (["--output", "x.safetensors", "--set", "family-arguments=depth = 3"], "no argument 'depth'"),
    ],
)
def test_what_cannot_be_trained_is_told(experiment, arguments, message):
    result = invoke(experiment, *arguments)
    assert result.exit_code == 1
    assert message in result.output
