"""Modules that are cut by themselves in depth and at exits: what may be left out, and where heads are."""

import own_traced
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models.traced_weights import lively
from tests.small_run import simulated_grid, small_config
from tests.tasks import made_tasks
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.trace import follow
from wildflower.models.traced.graph import write_graph
from wildflower.models.weights import with_weights
from wildflower.plugins.reference import PluginError
from wildflower.server_app.app import run
from wildflower.server_app.config import ConfigError
from wildflower.server_app.run_folder import read_devices

STACKED = {"Dense": "layers.2", "Residual": "layer2.1", "Patches": "blocks.1", "RootMeans": "blocks.2"}


def family_of(name, **more):
    tokens = name in ("Words", "Tied")
    shape = [6] if tokens else [1, 8, 8]
    return make_family({"name": f"own_traced:{name}", "input_shape": shape, "classes": 7, "tokens": tokens} | more)


class Nothing(nn.Module):
    """In place of attention or an MLP: adds nothing."""

    def forward(self, x):
        return torch.zeros_like(x)


def without_its_last_block(name, module):
    """The module with its last block taken out by hand."""
    if name == "Dense":
        del module.layers[2]
    elif name == "Residual":
        module.layer2[1] = nn.Identity()
    elif name == "RootMeans":
        del module.blocks[2]
    else:
        module.blocks[1]["attention"] = Nothing()
        module.blocks[1]["mlp"] = Nothing()
    return module


def test_blocks_are_those_of_the_network():
    assert dict(family_of("Residual").stacks) == {
        "layer1": ("layer1.0", "layer1.1"),
        "layer2": ("layer2.0", "layer2.1"),
    }
    assert dict(family_of("Residual").removable) == {"layer1.1": ("layer1.1.conv1",), "layer2.1": ("layer2.1.conv1",)}
    assert dict(family_of("Patches").removable) == {"blocks.1": ("blocks.1.attention.qkv", "blocks.1.mlp.0")}
    # Layers without channels of their own are there or not by a group that no tensor has.
    assert dict(family_of("Dense").removable) == {"layers.1": ("layers.1",), "layers.2": ("layers.2",)}
    # Where a block checks the type of its input, the check reads it and computes nothing.
    assert dict(family_of("RootMeans").stacks) == {"blocks": ("blocks.0", "blocks.1", "blocks.2")}
    for name in ("Separable", "Dense2", "Words", "Tied"):
        assert not family_of(name).removable


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("training", [False, True])
def test_a_network_without_a_block_is_the_module_without_it(name, training):
    family = family_of(name)
    arch = family.architecture(without=[STACKED[name]])
    weights = lively(family)
    cut = with_weights(family, arch, family.place(arch).gather(weights)).train(training)
    module = getattr(own_traced, name)(7)
    module.load_state_dict(weights, strict=False)
    module = without_its_last_block(name, module).train(training)
    inputs = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    answers = []
    for network in (module, cut):
        torch.manual_seed(5)
        answers.append(network(inputs))
    assert torch.equal(*answers)
    assert not any(tensor.startswith(f"{STACKED[name]}.") for tensor in cut.state_dict())
    answers[1].square().sum().backward()
    assert all(parameter.grad is not None for parameter in cut.parameters())


@pytest.mark.parametrize("name", STACKED)
def test_a_shorter_and_narrower_network_costs_what_its_step_takes(name):
    family = family_of(name)
    kept = {group: -(-full // 2) for group, full in family.groups.items()}
    arch = family.architecture(kept, without=[STACKED[name]])
    step = follow(lambda: family.build(arch), 6, family.input_shape, family.input_dtype, 7)
    found = family.step(arch, 6, accumulates=False)
    assert found.peak_bytes == pytest.approx(step.peak_bytes, rel=0.01)
    assert (found.parameters, found.flops) == (step.parameters, step.flops)
    whole = cost(family, family.architecture(kept), batch_size=6, optimizer="sgd")
    assert cost(family, arch, batch_size=6, optimizer="sgd").parameters < whole.parameters


def test_depth_names_what_may_be_left_out():
    assert list(family_of("Dense", depth=["layers.2"]).removable) == ["layers.2"]
    whole = family_of("Dense", depth=[])
    assert not whole.removable
    assert not whole.stacks
    assert dict(whole.groups) == {"stem.1": 12}
    with pytest.raises(ValueError, match=r"depth has 'layers\.0', and no such block may be left out; did you mean"):
        family_of("Dense", depth=["layers.0"])


def test_groups_become_one_by_together():
    assert dict(family_of("Residual", together=["layer1.*"]).groups) == {
        "conv1": 8,
        "layer1.0.conv1": 8,
        "layer2.0.conv1": 12,
        "layer2.0.conv2": 12,
        "layer2.1.conv1": 12,
        "layer1.1": 1,  # which has no channels of its own any more, and may be left out
    }


@pytest.mark.parametrize("name", ["Dense", "Residual", "Separable", "Dense2", "Patches", "Words", "Tied"])
def test_exits_are_found(name):
    family = family_of(name, early_exits=True)
    names = list(family.segments)
    assert len(names) > 1
    assert not family.stacks
    assert sorted(group for groups in family.segments.values() for group in groups) == sorted(family.groups)
    whole = with_weights(family, family.full(), lively(family)).eval()
    inputs = torch.randint(0, 7, (3, 6)) if name in ("Words", "Tied") else torch.randn(3, 1, 8, 8)
    exits = whole.exits(inputs)
    assert torch.equal(exits[-1], whole(inputs))
    for number, expected in enumerate(exits, start=1):
        arch = family.up_to(number)
        assert family.exit_of(arch) == number
        model = with_weights(family, arch, family.place(arch).gather(whole.state_dict())).eval()
        assert all(torch.equal(a, b) for a, b in zip(model.exits(inputs), exits[:number], strict=True))
        assert torch.equal(model(inputs), expected)
        trained = family.build(arch).train()
        torch.stack(trained.exits(inputs)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in trained.parameters())


def test_an_exit_is_a_mean_and_a_linear_head():
    family = family_of("Residual", exits=["layer1"])
    assert list(family.segments) == ["exit1", "fc"]
    weights = lively(family)
    module = own_traced.Residual(7).eval()
    module.load_state_dict(weights, strict=False)
    inputs = torch.randn(4, 1, 8, 8)
    x = module.layer1(torch.relu(module.bn1(module.conv1(inputs))))
    by_hand = F.linear(x.mean((2, 3)), weights["exit1.weight"], weights["exit1.bias"])
    network = with_weights(family, family.full(), weights).eval()
    with torch.no_grad():
        assert torch.equal(network.exits(inputs)[0], by_hand)
        assert torch.equal(network.exits(inputs)[1], module(inputs))
    # First weights are those of nn.Linear, within 1 / sqrt(channels).
    assert 0.2 < family.initial()["exit1.weight"].abs().max() < 8**-0.5
    assert family.tensors(family.full())["exit1.weight"].of_classes


def test_an_exit_of_positions_is_their_mean():
    family = family_of("Patches", exits=["blocks.0"])
    weights = lively(family)
    module = own_traced.Patches(7).eval()
    module.load_state_dict(weights, strict=False)
    inputs = torch.randn(4, 1, 8, 8)
    x = torch.cat([module.token.expand(4, -1, -1), module.patch(inputs).flatten(2).transpose(1, 2)], 1) + module.place
    x = x + module.blocks[0]["attention"](module.blocks[0]["norm1"](x))
    x = x + module.blocks[0]["mlp"](module.blocks[0]["norm2"](x))
    with torch.no_grad():
        found = with_weights(family, family.full(), weights).eval().exits(inputs)[0]
        assert torch.equal(found, F.linear(x.mean(1), weights["exit1.weight"], weights["exit1.bias"]))


@pytest.mark.parametrize(
    ("exits", "words"),
    [
        (["layer3"], "exits has 'layer3', and the module has no such part; did you mean"),
        (["layer2.0", "layer1"], "exits must be in the order of computing, and 'layer1'"),
    ],
)
def test_exits_that_cannot_be_are_refused(exits, words):
    with pytest.raises(ValueError, match=words):
        family_of("Residual", exits=exits)


def test_a_graph_from_the_wire_names_nodes_and_groups_that_it_has():
    graph = family_of("Residual", exits=["layer1"]).read
    for answers, groups, words in (([10**6, 1], ["conv1"], "nodes that are missing"), ([1, 1], ["no"], "are missing")):
        exit = graph.exits["exit1"].model_copy(update={"answers": answers, "groups": groups})
        spec = family_of("Residual").spec()
        spec["graph"] = write_graph(graph.model_copy(update={"exits": {"exit1": exit}}))
        with pytest.raises(ValueError, match=words):
            make_family(spec)


def test_half_a_network_is_refused():
    family = family_of("Residual", early_exits=True)
    with pytest.raises(ValueError, match="must all be 0 or none, they are fc"):
        family.validate(Architecture((8, 8, 8, 12, 12, 0)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Residual", "Patches"])
@pytest.mark.parametrize("method", ["depthfl", "scalefl", "hypemefed", "wildflower", "model-search", "fjord"])
def test_methods_that_train_exits_or_depths_train_a_module(name, method, tmp_path):
    more = {"hypemefed": {"hypemefed.epochs": 1}}.get(method, {})
    keys = {"family": f"own_traced:{name}", "strategy": method, "rounds": 1, "evaluate-every": 1}
    run(simulated_grid(), small_config(tmp_path, **keys, **more))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "name"),
    [("inclusivefl", "Patches"), ("inclusivefl", "Dense"), ("flexifed", "Patches"), ("flexifed", "Dense")],
)
def test_methods_that_take_one_stack_train_a_module(name, method, tmp_path):
    keys = {"family": f"own_traced:{name}", "strategy": method, "rounds": 1, "evaluate-every": 1}
    run(simulated_grid(), small_config(tmp_path, **keys))


def tagger(name, **more):
    return make_family({"name": f"own_traced:{name}", "input_shape": [6], "classes": 7, "tokens": True} | more)


def test_exits_leave_out_the_padding_of_a_text():
    family = tagger("MaskedWords", early_exits=True, pad_id=0)
    assert list(family.segments) == ["exit1", "exit2", "exit3", "head"]
    weights = lively(family)
    whole = with_weights(family, family.full(), weights).eval()
    texts = torch.tensor([[5, 3, 2, 0, 0, 0], [1, 2, 3, 4, 0, 0]])
    with torch.no_grad():
        exits, shorter = whole.exits(texts), whole.exits(texts[:, :4])
    for one, other in zip(exits, shorter, strict=True):
        torch.testing.assert_close(one, other)
    # Behind the embedding there is nothing but it: its mean over three tokens and over four.
    means = torch.stack([weights["words.weight"][texts[row, :count]].mean(0) for row, count in enumerate((3, 4))])
    torch.testing.assert_close(exits[0], F.linear(means, weights["exit1.weight"], weights["exit1.bias"]))


def test_of_an_exit_that_counts_padding_it_is_told(caplog):
    tagger("MaskedWords", early_exits=True, pad_id=0, arguments={"halved": True})
    assert "the mean of exit3 counts the padding behind a text" in caplog.text
    caplog.clear()
    tagger("MaskedWords", early_exits=True, arguments={"halved": True})
    assert "padding" not in caplog.text


@pytest.mark.parametrize("name", ["Labels", "Signals", "Reader"])
def test_an_exit_of_a_tagger_answers_for_each_position(name):
    family = tagger(name, early_exits=True)
    assert len(family.segments) > 1
    weights = lively(family)
    whole = with_weights(family, family.full(), weights).eval()
    inputs = torch.randint(0, 7, (3, 6))
    changed = inputs.index_fill(1, torch.tensor([5]), 19)
    with torch.no_grad():
        exits, others = whole.exits(inputs), whole.exits(changed)
    assert [exit.shape for exit in exits] == [(3, 7, 6)] * len(family.segments)
    # Nothing in front of the first exit looks ahead: another last token changes the last answer alone.
    assert (exits[0] != others[0]).any(1).any(0).tolist() == [False] * 5 + [True]
    for number, expected in enumerate(exits, start=1):
        arch = family.up_to(number)
        with torch.no_grad():
            model = with_weights(family, arch, family.place(arch).gather(weights)).eval()
            assert torch.equal(model(inputs), expected)
        trained = family.build(arch).train()
        torch.stack(trained.exits(inputs)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in trained.parameters())


def test_an_exit_of_a_tagger_is_a_linear_head():
    family = tagger("Signals", exits=["first"])
    weights = lively(family)
    module = own_traced.Signals(7).eval()
    module.load_state_dict(weights, strict=False)
    inputs = torch.randint(0, 7, (4, 6))
    with torch.no_grad():
        x = module.first(module.words(inputs).transpose(1, 2))
        by_hand = F.linear(x.transpose(1, 2), weights["exit1.weight"], weights["exit1.bias"]).transpose(1, 2)
        exits = with_weights(family, family.full(), weights).eval().exits(inputs)
    torch.testing.assert_close(exits[0], by_hand)
    torch.testing.assert_close(exits[1], module(inputs))


def test_a_part_that_has_other_positions_than_the_answer_is_no_exit():
    with pytest.raises(
        PluginError, match=r"exits has 'every_second', and .* all positions if the module answers for each"
    ):
        tagger("Signals", exits=["every_second"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Signals", "Reader"])
@pytest.mark.parametrize("method", ["depthfl", "scalefl", "hypemefed"])
def test_methods_that_train_exits_train_a_tagger(name, method, tmp_path, monkeypatch):
    made_tasks.of_tokens(monkeypatch)
    more = {"hypemefed": {"hypemefed.epochs": 1}}.get(method, {})
    keys = {"task": "parities", "family": f"own_traced:{name}", "partition": "iid", "strategy": method, "rounds": 1}
    keys["evaluate-every"] = 1
    folder = run(simulated_grid(), small_config(tmp_path, **keys, **{"below-smallest": "smallest"}, **more))
    assert {device.outcome for device in read_devices(folder)} == {"trained"}


def test_numbers_have_no_exits_that_learn_from_each_other(tmp_path, monkeypatch):
    made_tasks.regression(monkeypatch)
    keys = {"task": "brightness", "family": "own_traced:Dense", "partition": "iid", "strategy": "depthfl"}
    with pytest.raises(ConfigError, match="needs one class per example"):
        run(simulated_grid(), small_config(tmp_path, **keys))
