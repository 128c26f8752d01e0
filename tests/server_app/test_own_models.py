"""Runs with models that exist already: functions of a level, encoders of transformers, weights from files."""

import logging
import math
import random
import sys
import textwrap

import numpy as np
import own_constants
import own_models
import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.encoders import family_arguments
from tests.small_run import connected_grid, same_bits, simulated_grid, small_config
from wildflower.messages.flower_records import read_records
from wildflower.models.initial import digest_of
from wildflower.models.mobilenet import MobileNetV2
from wildflower.plugins.beside import looked_for_beside
from wildflower.plugins.reference import named
from wildflower.server_app import checkpoint
from wildflower.server_app.app import build, run
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.export import export
from wildflower.server_app.models import load_model
from wildflower.server_app.run_folder import JournalError, read_config, read_rounds
from wildflower.tasks.task import TaskSpec, load_task

MODELS = """
    import torch
    from torch import nn

    class Deep(nn.Module):
        def __init__(self, layers, classes):
            super().__init__()
            self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(layers)])
            self.norm = nn.BatchNorm1d(16)
            self.head = nn.Linear(16, classes)

        def forward(self, images):
            x = self.stem(images)
            for layer in self.layers:
                x = x + torch.relu(layer(x))
            return self.head(self.norm(x))

    class Still(Deep):
        def __init__(self, layers, classes):
            super().__init__(layers, classes)
            self.norm = nn.LayerNorm(16)

    class Constant(Still):
        def __init__(self, layers, classes):
            super().__init__(layers, classes)
            self.register_buffer("scale", torch.full((16,), 0.5), persistent=False)
            self.register_buffer("twice", torch.full((16,), 2.0))

        def forward(self, images):
            return super().forward(images) * (self.scale * self.twice).mean()
"""
TASK = """
    import torch
    from wildflower.tasks.data import Data, DataSet
    from wildflower.tasks.task import Kind

    def load(data_dir):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(2, 40, (300, 9), generator=generator).to(torch.uint8)
        tokens[:, 6:][torch.rand(300, 3, generator=generator) < 0.5] = 1
        labels = (tokens[:, 0] > 20).long()
        return DataSet(Data(tokens[:200], labels[:200]), Data(tokens[200:], labels[200:]), classes=2)

    TASK = Kind(load, "transformers:AutoModel")
"""
LEVELS = "levels = [{layers = 1}, {layers = 2}, {layers = 3}]"


@pytest.fixture
def beside(tmp_path):
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "own_networks.py").write_text(textwrap.dedent(MODELS))
    (folder / "own_texts.py").write_text(textwrap.dedent(TASK))
    with looked_for_beside(folder):
        yield folder


def after(run_dir):
    return {n.removeprefix("weights/"): t for n, t in checkpoint.load(run_dir).state.tensors.items()}


@pytest.mark.parametrize("name", ["Closure", "Twice"])
def test_the_trained_model_says_what_the_users_own_module_says(tmp_path, name):
    """A module that holds constants beside its buffers, or parameters a second time."""
    keys = {"family": f"own_constants:{name}", "family-arguments": "levels = [{}]", "strategy": "fedavg"}
    keys |= {"rounds": 2, "evaluate-every": 2}
    run_dir = run(simulated_grid(), small_config(tmp_path, **keys))
    model, _ = load_model(run_dir)
    own = getattr(own_constants, name)().eval()
    before = own.stem.weight.clone()
    own.load_state_dict(model.state_dict())
    images = torch.randn(9, 1, 8, 8)
    assert torch.equal(model(images), own(images))
    assert not torch.equal(before, own.stem.weight)
    assert export(run_dir).exists()  # which compares what it has written


def test_constants_that_a_file_draws_as_it_is_imported_are_the_same_in_every_process(tmp_path, monkeypatch):
    (tmp_path / "own_draws.py").write_text(
        "import random\nimport numpy as np\nimport torch\n"
        "DRAWN = torch.tensor([*torch.randn(2), *np.random.randn(2), random.random()])\n"
    )
    drawn = []
    with looked_for_beside(tmp_path):
        for _ in range(2):
            _ = torch.rand(3), np.random.rand(3), random.random()  # another process may have drawn other numbers
            monkeypatch.delitem(sys.modules, "own_draws", raising=False)
            drawn.append(named("own_draws:DRAWN", torch.Tensor))
    assert torch.equal(*drawn)


@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated")
def test_spectral_norms_hold_for_the_trained_model(tmp_path):
    levels = "levels = [{width = 8}, {width = 16}]"
    keys = {"family": "own_constants:Spectral", "family-arguments": levels, "below-smallest": "smallest"}
    rounds = {"strategy": "wildflower", "rounds": 2, "evaluate-every": 2}
    run_dir = run(simulated_grid(), small_config(tmp_path, **keys, **rounds))
    assert read_rounds(run_dir)[-1].devices_replied == 4
    model, _ = load_model(run_dir)
    model(torch.zeros(2, 1, 8, 8))  # the older function computes the weight in a pass
    for layer in (model.new, model.old):
        assert float(torch.linalg.matrix_norm(layer.weight.flatten(1), 2)) == pytest.approx(1, abs=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["heterofl", "fedavg", "scaffold", "wildflower", "lotteryfl", "recipfl"])
def test_tied_weights_travel_once_and_stay_tied(tmp_path, strategy):
    levels = "levels = [{layers = 1}, {layers = 2}, {layers = 3}]"
    keys = {"family": "own_models:tied", "family-arguments": levels, "strategy": strategy, "rounds": 2}
    run_dir = run(simulated_grid(), small_config(tmp_path, below_smallest="smallest", **keys))
    assert [r.devices_replied for r in read_rounds(run_dir)] == [4, 4]
    assert all("1.1.weight" not in name and "1.2.weight" not in name for name in after(run_dir))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["heterofl", "fedavg", "scaffold", "fjord"])
def test_levels_of_a_function_train_together(beside, tmp_path, strategy):
    name = "Still" if strategy == "fjord" else "Deep"
    keys = {"family": f"own_networks:{name}", "family-arguments": LEVELS, "strategy": strategy, "rounds": 2}
    config = small_config(tmp_path, below_smallest="smallest", **keys)
    engine, _ = build(config)
    before = engine.method.weights
    run_dir = run(simulated_grid(), config)
    assert all(record.devices_replied == 4 for record in read_rounds(run_dir))
    assert after(run_dir).keys() >= before.keys()
    assert not torch.equal(after(run_dir)["stem.1.weight"], before["stem.1.weight"])
    if strategy == "heterofl":
        assert list(read_config(run_dir).plugins) == ["own_networks"]
        assert set(read_rounds(run_dir)[-1].score_by_tier) <= {"whole", "half", "quarter"}


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["wildflower", "fjord"])
def test_constants_do_not_keep_levels_from_being_trained_in_one_step(beside, tmp_path, strategy):
    """Half of two is one, so that a model with the two constants learns what the one without them does."""
    weights = []
    for name in ("Still", "Constant"):
        keys = {"family": f"own_networks:{name}", "family-arguments": LEVELS, "strategy": strategy, "rounds": 2}
        (tmp_path / name).mkdir()
        run_dir = run(simulated_grid(), small_config(tmp_path / name, below_smallest="smallest", **keys))
        assert [r.devices_replied for r in read_rounds(run_dir)] == [4, 4]
        weights.append({n: tensor for n, tensor in after(run_dir).items() if n.rpartition("/")[2] != "twice"})
    assert same_bits(*weights)


NORMED = "levels = [{width = 2, layers = 1}, {width = 3, layers = 1}, {width = 4}]"
STATIC = NORMED + ", norm = 'static'"


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [("heterofl", NORMED), ("wildflower", NORMED), ("fjord", NORMED), ("fedavg", STATIC)],
)
def test_width_methods_take_an_ordinary_module_with_batch_norm(tmp_path, strategy, arguments):
    """No statistics travel with the weights; the models that are saved are the module itself, with statistics."""
    keys = {"family": "own_models:Normed", "family-arguments": arguments, "strategy": strategy, "rounds": 2}
    config = small_config(tmp_path, below_smallest="smallest", evaluate_every=2, **keys)
    run_dir = run(simulated_grid(), config)
    record = read_rounds(run_dir)[-1]
    assert (record.devices_replied, record.devices_failed) == (4, 0)
    assert not any(name.endswith(("running_mean", "running_var")) for name in after(run_dir))
    network, info = load_model(run_dir)
    own = own_models.Normed(classes=10, width=4).eval()
    missing, unexpected = own.load_state_dict(network.state_dict(), strict=False)
    assert all(name.endswith("num_batches_tracked") for name in missing)
    assert not unexpected
    assert float(own.norm.running_mean.abs().min()) > 0
    test = load_task(TaskSpec(name="digits", devices=6)).test
    outputs = own(info.prepare(test.inputs))
    assert float((outputs.argmax(1) == test.labels).float().mean()) == pytest.approx(record.score, abs=1e-6)
    torch.testing.assert_close(network(info.prepare(test.inputs[:1])), outputs[:1])  # a batch of one


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("fedrolex", "its sub-models are leading slices, and the strategy selects other channels"),
        ("federated-dropout", "its sub-models are leading slices, and the strategy selects other channels"),
        ("anycostfl", "channels are ranked here by the norm of the filters that make them"),
        ("model-search", "needs a family that is cut by channel groups, .* or a module of yours without levels"),
    ],
)
def test_width_methods_that_read_descriptions_of_layers_say_why_they_take_no_module(tmp_path, strategy, words):
    keys = {"family": "own_models:Normed", "family-arguments": NORMED, "strategy": strategy}
    with pytest.raises(ValueError, match=words):
        build(small_config(tmp_path, **keys))


@pytest.mark.parametrize("strategy", ["wildflower", "fjord"])
def test_levels_that_would_mix_their_statistics_end_the_run_before_round_1(tmp_path, strategy):
    """Of a norm that stays in evaluation mode; heterofl averages its constants."""
    levels = "levels = [{width = 2}, {width = 4}]"
    keys = {"family": "own_models:StillNorm", "family-arguments": levels, "strategy": strategy}
    with pytest.raises(ValueError, match=r"would mix their running statistics, such as norm\.running_mean: .* another"):
        build(small_config(tmp_path, **keys))
    engine, _ = build(small_config(tmp_path, **keys | {"strategy": "heterofl"}))
    assert "norm.running_mean" in engine.method.weights


def test_a_module_that_changes_its_input_ends_the_run_before_round_1(tmp_path):
    levels = "levels = [{hidden = 4}, {hidden = 8}], arguments = {how = 'subtract'}"
    keys = {"family": "own_models:Writing", "family-arguments": levels, "strategy": "wildflower"}
    with pytest.raises(ConfigError, match=r"family = 'own_models:Writing' .* Writing changes its input in place"):
        build(small_config(tmp_path, **keys))


def test_levels_that_do_not_go_together_end_the_run_before_round_1(beside, tmp_path):
    keys = {"family": "own_networks:Deep", "family-arguments": "levels = [{layers = 2}, {layers = 1}]"}
    with pytest.raises(
        ConfigError, match=r"level 1 .* has a tensor 'layers\.1\.weight', which the level above has not"
    ):
        build(small_config(tmp_path, **keys))
    with pytest.raises(ConfigError, match="leading slices"):
        build(small_config(tmp_path, **keys | {"family-arguments": LEVELS}, strategy="fedrolex"))
    with pytest.raises(ConfigError, match="has no argument 'level'; did you mean 'levels'"):
        build(small_config(tmp_path, **keys | {"family-arguments": "level = [{layers = 2}]"}))


SMALL = family_arguments(vocab_size=40, pad_token_id=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("heterofl", SMALL + ", depths = [1, 2, 3]"),
        ("fjord", SMALL),
        ("depthfl", SMALL),
        ("scalefl", SMALL),
    ],
)
def test_encoders_train_on_tokens(beside, tmp_path, strategy, arguments):
    config = small_config(
        tmp_path, task="own_texts:TASK", family="", family_arguments=arguments, strategy=strategy, rounds=1,
        **{"optimizer": "adamw", "learning-rate": 1e-3, "below-smallest": "smallest"},
    )  # fmt: skip
    run_dir = run(simulated_grid(), config)
    [record] = read_rounds(run_dir)
    assert (record.devices_replied, record.devices_failed) == (4, 0)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=20,
        max_position_embeddings=16,
        pad_token_id=1,
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "tiny-bert")
    return tmp_path / "tiny-bert"


def test_a_folder_of_weights_says_the_model_too(beside, tmp_path, folder, caplog):
    keys = {"task": "own_texts:TASK", "family": "", "initial.weights": str(folder)}
    config = small_config(
        tmp_path,
        family_arguments=f"model = {{name = '{folder}', num_hidden_layers = 2}}, depths = [1, 2]",
        rounds=1,
        **keys,
    )
    with caplog.at_level(logging.INFO, logger="flwr"):
        engine, _ = build(config)
    theirs = transformers.BertModel.from_pretrained(folder).state_dict()
    name = "encoder.layer.1.output.dense.weight"
    assert torch.equal(engine.method.weights[name], theirs[name])
    assert "drawn at random: classifier.out_proj.weight, classifier.out_proj.bias" in caplog.text
    assert "left over in the file: encoder.layer.2" in caplog.text
    run_dir = run(simulated_grid(), config)
    assert read_config(run_dir).initial == digest_of(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights: neither"):
        build(config)


def test_weights_of_a_file_are_what_devices_begin_with_and_a_run_is_not_resumed_with_others(tmp_path):
    drawn, _ = build(small_config(tmp_path))
    given = {f"net.{name}": torch.full_like(tensor, 0.25) for name, tensor in drawn.method.weights.items()}
    file = tmp_path / "lenet.safetensors"
    save_file(given, file)
    config = small_config(tmp_path, rounds=1, **{"initial.weights": str(file)})
    engine, _ = build(config)
    assert all(torch.equal(tensor, torch.full_like(tensor, 0.25)) for tensor in engine.method.weights.values())
    run_dir = run(simulated_grid(), config)
    again = RunConfig.from_run_config(config.to_dict() | {"resume": True, "rounds": 2})
    save_file({name: tensor + 1 for name, tensor in given.items()}, file)
    with pytest.raises(JournalError, match=r"the file of initial\.weights is not as when the run began"):
        run(simulated_grid(), again)
    save_file(given, file)
    run(simulated_grid(), again)
    assert len(read_rounds(run_dir)) == 2


def test_a_run_begins_with_torchvisions_weights(tmp_path, caplog):
    theirs = MobileNetV2(input_shape=(3, 8, 8), classes=7)
    state = theirs.build(theirs.plain()).state_dict()
    file = tmp_path / "mobilenet.pth"
    torch.save({called: state[name] for name, called in theirs.torchvision_names().items()}, file)
    keys = {"family": "mobilenet-v2", "strategy": "rafl", "seed": 5}
    with caplog.at_level(logging.INFO, logger="flwr"):
        engine, _ = build(small_config(tmp_path, **keys, **{"initial.weights": str(file)}))
    drawn, _ = build(small_config(tmp_path, **keys))
    given, without = engine.method.supernet, drawn.method.supernet
    # The published network's kernel of 3 is the center of the supernet's of 7, and what is around it stays as drawn.
    name = "stage2_2.depthwise.weight"
    expected = without[name].clone()
    expected[:, :, 2:5, 2:5] = state[name]
    assert expected.shape == (192, 1, 7, 7)
    assert torch.equal(given[name], expected)
    assert torch.equal(given["stem.conv.weight"], state["stem.conv.weight"].sum(1, keepdim=True))
    for name in ("head.classifier.weight", "stage2_3.expand.weight"):
        assert torch.equal(given[name], without[name])
    assert "features.0.0.weight is summed over its 3 input channels" in caplog.text
    assert "drawn at random: stage1_2.expand.weight" in caplog.text
    assert "left out: classifier.1.weight, which is for 7 classes and not 10" in caplog.text


STRONG_AND_WEAK = """
[[group]]
name = "strong"
count = 2
training_memory = "1 GB"

[[group]]
name = "weak"
count = 4
fits_width = 0.5
"""


@pytest.mark.thorough
def test_recipfl_writes_adapters_and_heads_and_the_given_encoder_stays(beside, tmp_path, folder):
    (tmp_path / "fleet.toml").write_text(STRONG_AND_WEAK)
    keys = {
        **{"task": "own_texts:TASK", "family": "", "initial.weights": str(folder), "freeze": "embeddings, encoder"},
        **{
            "strategy": "recipfl",
            "recipfl.hidden": 8,
            "recipfl.decoder-hidden": 8,
            "fleet": str(tmp_path / "fleet.toml"),
        },
        **{
            "optimizer": "adamw",
            "learning-rate": 1e-3,
            "devices-per-round": 6,
            "personal.every": 2,
            "test-fraction": 0.2,
        },
        "family-arguments": f"model = {{name = '{folder}', num_hidden_layers = 2}}, arguments = {{adapter = 2}}, "
        "depths = [1, 2]",
    }
    runs = {}
    for name in ("whole", "half"):
        config = small_config(tmp_path, rounds=2 if name == "whole" else 1, **keys, **{"run-name": name})
        runs[name] = run(simulated_grid(), config)
    run(simulated_grid(), RunConfig.from_run_config(config.to_dict() | {"resume": True, "rounds": 2}))
    engine, _ = build(config)
    family, method = engine.method.family, engine.method
    theirs = transformers.BertModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in method.frozen_weights().items())
    records = read_rounds(runs["whole"])
    assert [(record.devices_replied, record.devices_failed) for record in records] == [(6, 0), (6, 0)]
    assert records[-1].personal_score is not None
    # Two strong devices train both models, four weak ones the smaller one. What is frozen travels in round 1 only.
    travels = [
        sum(4 * math.prod(spec.shape) for spec in family.tensors(a).values() if not spec.frozen)
        for a in method.candidates
    ]
    tensors = 2 * travels[0] + 6 * travels[1]
    assert tensors <= records[1].training_bytes_up < 1.5 * tensors + 20_000
    frozen_bytes = sum(tensor.nbytes for tensor in method.frozen_weights().values())
    assert records[0].training_bytes_down - records[1].training_bytes_down >= 6 * frozen_bytes / 2
    state = checkpoint.load(runs["whole"]).state
    assert same_bits(state.tensors, checkpoint.load(runs["half"]).state.tensors)


def test_of_lora_only_its_tensors_and_the_head_travel(beside, tmp_path, folder):
    """Four nodes with a device each. By hand: A and B of rank 2 and 16 channels at two places of three layers are 384
    numbers, and the head of two classes is 34. What is frozen, which travels once, is 53 tensors of 6,444 numbers:
    embeddings of 40 words, 16 positions, two types and a norm (58 x 16 + 32), and three layers of 1,828. Equal tensors
    travel once: a new model has 22 biases of 16 zeros, 7 scales of 16 ones and 3 biases of 20 zeros, so that
    21 x 16 + 6 x 16 + 2 x 20 = 472 numbers do not. Each tensor has a hash of 32 bytes and a flag.
    """
    keys = {"task": "own_texts:TASK", "family": "", "initial.weights": str(folder), "freeze": "embeddings, encoder"}
    learning = {"optimizer": "adamw", "learning-rate": 1e-2, "family-arguments": "arguments = {lora = 2}"}
    sizes = {"strategy": "fedavg", "fedavg.use": "all-large", "fleet": "", "devices": 4, "widths": "1", "rounds": 2}
    config = small_config(tmp_path, **keys, **learning, **sizes)
    grid, replies = connected_grid(4, tmp_path), []

    def spy(message):
        if message.metadata.message_type == "train":
            _, arrays = read_records(message.content, "a reply")
            replies.append([len(data) for data in arrays])
        return message

    grid.tamper = spy
    before = build(config)[0].method.weights
    run_dir = run(grid, config)
    trained = 4 * (384 + 34)
    assert replies == [[trained]] * 8
    first, second = read_rounds(run_dir)
    sent = trained + 4 * (6444 - 472) + 53 * 33
    assert (first.devices_replied, first.training_bytes_up, first.training_bytes_down) == (4, 4 * trained, 4 * sent)
    assert (second.devices_replied, second.training_bytes_up, second.training_bytes_down) == (
        4,
        4 * trained,
        4 * trained,
    )
    state = checkpoint.load(run_dir).state.tensors
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, state[f"weights/{name}"])}
    places = [f"encoder.layer.{layer}.attention.self.{part}" for layer in range(3) for part in ("query", "value")]
    parts = [f"{place}.lora_{matrix}.weight" for place in places for matrix in "AB"]
    assert changed == {*parts, "classifier.out_proj.weight", "classifier.out_proj.bias"}


def test_recipfl_takes_levels_of_a_function(beside, tmp_path):
    keys = {"family": "own_networks:Deep", "family-arguments": LEVELS, "strategy": "recipfl", "rounds": 1}
    small = {"recipfl.hidden": 8, "recipfl.decoder-hidden": 8, "below-smallest": "smallest"}
    [record] = read_rounds(run(simulated_grid(), small_config(tmp_path, **keys | small)))
    assert (record.devices_replied, record.devices_failed) == (4, 0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"initial.weights": "absent.pth"}, "initial.weights = 'absent.pth': there is no file or folder absent.pth"),
        ({"initial.names": "'a' = 'b'"}, "initial.names = \"'a' = 'b'\": says what names"),
        ({"initial.weights": "x", "initial.names": "'a' = 3"}, "'a' = 3: an entry is like"),
        ({"initial.weights": "x", "strategy": "local"}, "has no global model that could begin with given weights"),
    ],
)
def test_weights_that_cannot_be_used_end_the_run_before_round_1(tmp_path, keys, words):
    with pytest.raises(ConfigError) as error:
        build(small_config(tmp_path, **keys))
    assert words in str(error.value)


def test_an_error_about_given_weights_names_their_file_once(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(ConfigError) as error:
        build(small_config(tmp_path, **{"initial.weights": str(file), "initial.names": "'absent' = false"}))
    assert str(error.value).startswith(f"initial.weights = '{file}': initial.names has 'absent'")
