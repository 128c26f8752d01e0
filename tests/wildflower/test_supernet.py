import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from models.elastic import ElasticSpace
from models.family import make_family
from models.mobilenet import MobileNetV2
from models.supernet import Supernet
from strategies.predictor import load_pairs
from strategies.supernet import SupernetTraining
from wildflower import supernet as module
from wildflower.command import app

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x.pt"], "must end with .safetensors"),
        (["--output", "x.safetensors", "--set", "family=resnet18", "--set", "family-arguments="], "no space of once"),
        (["--output", "x.safetensors", "--held-out", "0"], "leaves 0 of"),
        (["--output", "x.safetensors", "--set", "family-arguments=depth = 3"], "no argument 'depth'"),
    ],
)
def test_what_cannot_be_trained_is_told(experiment, arguments, message):
    result = invoke(experiment, *arguments)
    assert result.exit_code == 1
    assert message in result.output
