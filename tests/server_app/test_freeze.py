"""Parts of a model that are not trained: they travel to a device once, and cost no gradient and no optimizer state."""

import json
import math
import shutil

import pytest
import torch

from tests.encoders import encoder
from tests.small_run import connected_grid, same_bits, simulated_grid, small_config
from wildflower.messages.orders import LocalTraining
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.rounds.frozen import Frozen
from wildflower.server_app import checkpoint
from wildflower.server_app.app import build, run
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.run_folder import read_rounds
from wildflower.strategies.method import LEADING, Selection, of_one_device

MEMBERS = "members = { large = { name = 'cnn3' }, small = { name = 'mlp', hidden = [4] } }"
ALL_PARTS = "large.block1, large.block2, large.block3, large.head, small.head"
FREEZE = {"freeze": "block1, block2.conv"}


def names(family):
    return {name for name, spec in family.tensors(family.full()).items() if spec.frozen}


def test_what_is_frozen_is_named_by_parts_and_statistics_go_on():
    family = make_family({"name": "lenet5", "freeze": ["block1", "block2.conv"]})
    assert names(family) == {
        *("block1.conv.weight", "block1.conv.bias", "block1.norm.weight", "block1.norm.bias"),
        *("block2.conv.weight", "block2.conv.bias"),
    }
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    model = family.build(family.full())
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == names(family)


@pytest.mark.thorough
def test_frozen_parts_cost_no_gradients_and_no_optimizer_state():
    spec = encoder(vocabulary=5000, hidden=32, mlp=64)
    whole, frozen = (make_family(spec | more) for more in ({}, {"freeze": ["embeddings"]}))
    before, after = (cost(f, f.full(), batch_size=2, optimizer="adam") for f in (whole, frozen))
    embeddings = sum(math.prod(s.shape) for n, s in frozen.tensors(frozen.full()).items() if n.startswith("embeddings"))
    assert before.parameters == after.parameters
    # Adam's two states and the gradient of the embeddings, at least: 12 of the 16 bytes of each of their entries.
    saved = before.peak_training_memory_bytes - after.peak_training_memory_bytes
    assert saved >= 4 * 3 * embeddings
    assert after.training_flops < before.training_flops or embeddings == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "strategy",
    ["fedavg", "heterofl", "fedprox", "scaffold", "fednova", "q-fedavg", "fedadam", "anycostfl", "lotteryfl"],
)
def test_frozen_parts_stay_what_they_were_and_travel_once(tmp_path, strategy):
    keys = {"strategy": strategy, "rounds": 4, "below-smallest": "smallest", "widths": "1"}
    config = small_config(tmp_path, **keys, **FREEZE)
    engine, _ = build(config)
    family, before = engine.method.family, engine.method.weights
    run_dir = run(simulated_grid(), config)
    after = {n.removeprefix("weights/"): t for n, t in checkpoint.load(run_dir).state.tensors.items()}
    assert all(torch.equal(before[name], after[name]) for name in names(family))
    assert not torch.equal(before["head.classifier.weight"], after["head.classifier.weight"])
    records = read_rounds(run_dir)
    assert all(record.devices_replied == 4 for record in records)
    # Beside its bytes, each of the six tensors takes 32 of its hash and one that says that it is there.
    frozen_bytes = 4 * sum(before[name].numel() for name in names(family)) + 33 * 6
    # Each of the six devices is sent the frozen parts once.
    values = checkpoint.load(run_dir).state.values["frozen"]["held"]
    once = sum(record.training_bytes_down for record in records) - sum(record.training_bytes_up for record in records)
    if strategy in ("fedavg", "fedprox"):  # others send more than they return, or a model to take statistics of
        assert once == frozen_bytes * len(values)
    assert {len(held) for held in values.values()} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "freeze"),
    [
        *(
            (strategy, part)
            for strategy in ("fedavg", "heterofl", "scaffold", "lotteryfl")
            for part in ("", "head", "stem")
        ),
        ("local", ""),
    ],
)
def test_what_a_module_itself_does_not_train_stays_whatever_is_frozen(tmp_path, strategy, freeze):
    """Its stem; freeze = "stem" spares its way as well."""
    keys = {"strategy": strategy, "rounds": 2, "below-smallest": "smallest", "family-arguments": "", "freeze": freeze}
    if strategy == "local":
        keys |= {"personal.every": 2, "test-fraction": 0.2}
    config = small_config(tmp_path, **keys, family="own_models:FrozenNorm")
    engine, _ = build(config)
    run_dir = run(simulated_grid(), config)
    assert all(record.devices_replied == 4 for record in read_rounds(run_dir))
    if strategy == "local":
        return
    before = engine.method.weights
    after = {n.removeprefix("weights/"): t for n, t in checkpoint.load(run_dir).state.tensors.items()}
    assert not torch.equal(before["mid.weight"], after["mid.weight"])
    torch.testing.assert_close(after["stem.weight"], before["stem.weight"], atol=1e-7, rtol=0)
    assert torch.equal(before["head.weight"], after["head.weight"]) == (freeze == "head")


def test_a_resumed_run_sends_nothing_again_and_has_the_same_bits(tmp_path):
    keys = {"strategy": "fedavg", "below-smallest": "smallest", "widths": "1", **FREEZE}
    whole = run(simulated_grid(), small_config(tmp_path, rounds=4, **keys, **{"run-name": "whole"}))
    config = small_config(tmp_path, rounds=2, **keys, **{"run-name": "half"})
    run(simulated_grid(), config)
    half = run(simulated_grid(), RunConfig.from_run_config(config.to_dict() | {"resume": True, "rounds": 4}))
    assert same_bits(checkpoint.load(whole).state.tensors, checkpoint.load(half).state.tensors)
    assert [r.training_bytes_down for r in read_rounds(whole)] == [r.training_bytes_down for r in read_rounds(half)]


@pytest.mark.thorough
@pytest.mark.parametrize("simulated", [True, False])
def test_a_device_that_has_lost_it_is_sent_it_again(tmp_path, simulated):
    changes = {} if simulated else {"fleet": ""}
    keys = {"strategy": "fedavg", "devices-per-round": 6, "rounds": 3, "widths": "1", "below-smallest": "smallest"}
    config = small_config(tmp_path, **keys, **changes, **FREEZE)
    (tmp_path / "nodes").mkdir()
    grid = simulated_grid() if simulated else connected_grid(6, tmp_path / "nodes")
    engine, scorer = build(config)
    engine.start()
    first = engine.run_round(grid, 1, scorer).record
    assert first["devices_replied"] == 6
    kept = [path for path in tmp_path.rglob("frozen") if path.is_dir()]
    assert len(kept) == (1 if simulated else 6)
    second = engine.run_round(grid, 2, scorer).record
    assert second["training_bytes_down"] < first["training_bytes_down"]
    shutil.rmtree(kept[0])
    hit = 6 if simulated else 1
    result = engine.run_round(grid, 3, scorer)
    refused = [d["outcome"] for d in result.devices if d["outcome"] != "trained"]
    assert len(refused) == hit
    assert all("has lost what is frozen of its model" in outcome for outcome in refused)
    fourth = engine.run_round(grid, 4, scorer).record
    assert fourth["devices_replied"] == 6
    assert (
        fourth["training_bytes_down"] - second["training_bytes_down"]
        == hit * (first["training_bytes_down"] - second["training_bytes_down"]) / 6
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"freeze": "blok1"}, "freeze = 'blok1': lenet5 has no part 'blok1'; did you mean 'block1'"),
        ({"freeze": "block1, block2, head", "strategy": "fedavg"}, "nothing is left to train"),
        (
            {
                **{"strategy": "depthfl", "family": "cnn3", "family-arguments": "exits = [1, 2, 3]"},
                "freeze": "block1, exit1",
            },
            # The first block, 32 x 3 x 3 + 32 and a norm of 64, and its exit over 4 x 4 positions, 512 x 10 + 10.
            "nothing is left to train of the model of 5,514 parameters",
        ),
        ({"family": "choice", "family-arguments": MEMBERS, "freeze": ALL_PARTS}, "nothing is left to train"),
        (
            {"family": "choice", "family-arguments": MEMBERS, "freeze": "small.head"},
            # 64 x 4 + 4 and 4 x 10 + 10
            "nothing is left to train of the model of 310 parameters",
        ),
        ({"family": "choice", "family-arguments": MEMBERS, "freeze": "smal.head"}, "did you mean 'small.head'"),
        ({"freeze": "block1", "strategy": "local"}, "has no global model, of which parts could be frozen"),
        ({"freeze": "xyz"}, "freeze = 'xyz': lenet5 has no part 'xyz'; its outermost parts are block1, block2, head"),
        ({"learning-rates": "hed = 10"}, "learning-rates = 'hed = 10': lenet5 has no part 'hed'; did you mean 'head'"),
        ({"learning-rates": "head"}, """must be like "classifier = 10, 'encoder.layer.0' = 0.1"""),
        ({"learning-rates": "head = 2, head.classifier = 3"}, """like "classifier = 10, 'encoder.layer.0' = 0.1"""),
        ({"freeze": "block1", "learning-rates": "block1.conv = 2"}, "block1.conv is frozen, so that no learning rate"),
        ({"learning-rates": "head = -1"}, "every entry is a part and a multiple, such as classifier = 10"),
        ({"learning-rates": "head = 1e40"}, "every entry is a part and a multiple, such as classifier = 10"),
        ({"learning-rates": f"head = {10**400}"}, "every entry is a part and a multiple, such as classifier = 10"),
        (
            {"learning-rates": "head = 100", "learning-rate": 1e37},
            "times learning-rate = 1e+37 it is more than a number of 32 bits can be",
        ),
    ],
)
def test_parts_that_are_not_there_end_the_run_before_round_1(tmp_path, keys, words):
    with pytest.raises(ConfigError) as error:
        build(small_config(tmp_path, **keys))
    assert words in str(error.value)


def test_a_part_has_the_learning_rate_of_the_longest_name_that_fits():
    training = LocalTraining(learning_rates={"head": 10.0, "head.classifier": 0.0})
    assert training.rate_of("head.fc1.weight") == 10
    assert training.rate_of("head.classifier.weight") == 0
    assert training.rate_of("header.weight") == 1


def test_a_learning_rate_of_zero_leaves_a_part_where_it_was(tmp_path):
    keys = {"strategy": "fedavg", "rounds": 1, "widths": "1", "below-smallest": "smallest"}
    config = small_config(tmp_path, **keys, **{"learning-rates": "block1.conv = 0, head = 3", "weight-decay": 0.0})
    before = build(config)[0].method.weights
    run_dir = run(simulated_grid(), config)
    after = {n.removeprefix("weights/"): t for n, t in checkpoint.load(run_dir).state.tensors.items()}
    torch.testing.assert_close(after["block1.conv.weight"], before["block1.conv.weight"], atol=1e-7, rtol=0)
    assert (after["block2.conv.weight"] - before["block2.conv.weight"]).abs().max() > 1e-5


def test_devices_that_are_groups_of_their_own_share_what_is_frozen():
    family = make_family({"name": "lenet5", "freeze": ["block1", "block2.conv"]})
    frozen = Frozen(family, family.initial())
    found = {frozen.name(family.full(), Selection(of_one_device, device)) for device in range(3)}
    assert found == {frozen.name(family.full(), LEADING)}
    assert len(frozen._names) == 1


@pytest.mark.thorough
def test_a_part_of_any_member_of_a_choice_can_be_frozen(tmp_path):
    keys = {"strategy": "heterofl", "family": "choice", "family-arguments": MEMBERS, "freeze": "small.head.fc1"}
    engine, _ = build(small_config(tmp_path, **keys))
    family = engine.method.family
    assert {n for n in family.tensor_names() if family.is_frozen(n)} == {"small.head.fc1.weight", "small.head.fc1.bias"}


def test_every_member_of_a_choice_begins_with_a_file_of_its_own(tmp_path):
    keys = {"strategy": "fedavg", "fedavg.use": "affordable", "family": "choice", "family-arguments": MEMBERS}
    family = build(small_config(tmp_path, **keys))[0].method.family
    sources = []
    for number, (prefix, member) in enumerate(family.alternatives.items(), start=1):
        ones = {n: torch.full(s.shape, float(number)) for n, s in member.tensors(member.full()).items()}
        torch.save(ones, tmp_path / f"{number}.pth")
        sources.append(f"{prefix[:-1]} = '{tmp_path}/{number}.pth'")
    keys["freeze"] = "large.block1, small.head.fc1"
    method = build(small_config(tmp_path, **keys, **{"initial.weights": ", ".join(sources)}))[0].method
    assert {float(v.unique()) for n, v in method.weights.items() if n.startswith("large.")} == {1.0}
    assert {float(v.unique()) for n, v in method.weights.items() if n.startswith("small.")} == {2.0}
    for wrong, message in (
        (f"{tmp_path}/1.pth", r"choice takes large = '...', small = '...'"),
        ("tiny = 'a.pth'", "choice takes large"),
        ("large = 'a.pth', small = 3", "must be like"),
    ):
        with pytest.raises(ValueError, match=message):
            build(small_config(tmp_path, **keys, **{"initial.weights": wrong}))
