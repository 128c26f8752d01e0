import json
import math
from unittest import mock

import own_models
import pytest
import torch
from own_models import Deep

from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import make_family as made_family
from wildflower.models.frozen import check_freeze
from wildflower.models.initial import load_initial
from wildflower.models.placement import rolling
from wildflower.models.weights import with_weights
from wildflower.strategies.statistics import take_statistics

torch.set_num_threads(1)

OWN = "own_models"
THREE = {
    "name": f"{OWN}:Deep",
    "input_shape": [1, 8, 8],
    "classes": 5,
    "levels": [{"layers": 1, "width": 0.5}, {"layers": 2}, {"layers": 4}],
}


def make_family(spec):
    """Of the whole module where a spec names no levels."""
    return made_family({"levels": [{}]} | spec)


def test_a_family_of_levels_round_trips_through_json():
    family = make_family(THREE)
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    assert family.spec()["name"] == f"{OWN}:Deep"
    assert hash(family) == hash(make_family(THREE))
    assert family != make_family(THREE | {"arguments": {"hidden": 16}})


def test_architectures_are_levels_and_candidates_go_from_large_to_small():
    family = make_family(THREE)
    assert [arch.widths for arch in family.candidates([0.5])] == [(3,), (2,), (1,)]
    assert (family.full().widths, family.smallest().widths) == ((3,), (1,))
    assert [family.width(rate).widths for rate in (1, 2 / 3, 0.5, 1 / 3, 0.01)] == [(3,), (2,), (2,), (1,), (1,)]
    for wrong in ((0,), (4,), (1, 1)):
        with pytest.raises(ValueError, match="an architecture is a level, 1 to 3"):
            family.validate(Architecture(wrong))


def test_tensors_are_those_of_the_module_and_classes_are_known():
    family = make_family(THREE)
    for level, arguments in enumerate([{"layers": 1, "width": 0.5}, {"layers": 2}, {"layers": 4}], start=1):
        own = {n: t for n, t in Deep(**arguments, classes=5).state_dict().items() if t.is_floating_point()}
        specs = family.tensors(Architecture((level,)))
        assert {name: spec.shape for name, spec in specs.items()} == {n: tuple(t.shape) for n, t in own.items()}
    axes = {name: spec.axes for name, spec in specs.items()}
    assert [name for name, found in axes.items() if any(found)] == ["head.weight", "head.bias"]
    assert axes["head.weight"][0].group == "classes"


def test_sub_models_are_leading_slices_and_compute_what_the_module_does():
    family, arch = make_family(THREE), Architecture((1,))
    torch.manual_seed(0)
    weights = family.initial()
    model = with_weights(family, arch, family.place(arch).gather(weights)).eval()
    alone = Deep(layers=1, width=0.5, classes=5).eval()
    cuts = {name: weights[name][tuple(slice(size) for size in t.shape)] for name, t in model.state_dict().items()}
    alone.load_state_dict(cuts, strict=False)
    inputs = torch.rand(4, 1, 8, 8)
    assert torch.equal(model(inputs), alone(inputs))
    assert torch.equal(model.exits(inputs)[0], alone(inputs))
    model.train()
    model(inputs)
    assert model.training
    assert not torch.equal(model.norm.running_mean, cuts["norm.running_mean"][:0].new_zeros(16))


def test_lists_of_blocks_that_grow_with_the_level_are_stacks():
    assert make_family(THREE).stacks == {"layers": tuple(f"layers.{number}" for number in range(4))}
    assert make_family({**THREE, "levels": [{}]}).stacks == {}


def test_any_module_works_whole():
    family = make_family({"name": "torch.nn:Linear", "input_shape": [6], "classes": 3, "arguments": {
        "in_features": 6, "out_features": 3}})  # fmt: skip
    assert family.candidates([1, 0.5]) == [family.full()] == [family.smallest()]
    assert family.build(family.full())(torch.rand(2, 6)).shape == (2, 3)
    assert cost(family, family.full(), batch_size=4, optimizer="sgd").parameters == 21


TIED = {"input_shape": [1, 8, 8], "classes": 10}


@pytest.mark.parametrize(
    ("name", "own", "further"),
    [
        ("tied", ["1.0.weight", "1.0.bias", "1.1.bias", "2.weight", "2.bias"], ["1.1.weight"]),
        (
            "Twice",
            [
                *(f"first.0.{part}" for part in ("weight", "bias")),
                *(f"first.1.{part}" for part in ("weight", "bias", "running_mean", "running_var")),
                *("head.weight", "head.bias"),
            ],
            [f"second.{part}" for part in ("0.weight", "0.bias", "1.weight", "1.running_mean")],
        ),
    ],
)
def test_tied_weights_are_one_tensor_and_learn_as_such(name, own, further):
    """Against the module by itself: its state, three steps of SGD, and what it answers then."""
    family = make_family(TIED | {"name": f"{OWN}:{name}"})
    assert list(family.tensors(family.full())) == own
    torch.manual_seed(0)
    alone = getattr(own_models, name)(classes=10)
    whole = alone.state_dict()
    model = with_weights(family, family.full(), {part: whole[part].clone() for part in own})
    assert list(model.state_dict()) == own
    assert set(further) < set(whole)
    for part in further:
        first = part.replace("second", "first").replace("1.1.weight", "1.0.weight")
        assert tensor_of(model, part) is tensor_of(model, first)
    assert cost(family, family.full(), batch_size=4, optimizer="sgd").parameters == sum(
        p.numel() for p in alone.parameters()
    )
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    for network in (alone, model):
        steps = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(network.train()(images), labels).backward()
            steps.step()
    assert torch.equal(model.eval()(images), alone.eval()(images))
    again = family.build(family.full())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(images), alone(images))


def tensor_of(model, name):
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    return module._parameters.get(own, module._buffers.get(own))


def test_a_buffer_that_two_modules_share_and_no_state_has():
    family = make_family(TIED | {"name": f"{OWN}:Masked"})
    weights = family.initial()
    assert list(weights) == ["first.weight", "first.bias", "head.weight", "head.bias"]
    alone = own_models.Masked(classes=10)
    alone.load_state_dict(weights)
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(with_weights(family, family.full(), weights)(images), alone(images))


def test_a_norm_that_is_used_twice_takes_the_mean_of_both_uses():
    """Batch by batch by hand: four inputs of the one norm, each with the statistics of its own."""
    torch.manual_seed(0)
    model = own_models.Twice(classes=10)
    seen = []
    norm = model.first[1]
    hook = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    batches = [(torch.randn(8, 1, 8, 8), torch.zeros(8)) for _ in range(2)]
    take_statistics(model, batches)
    hook.remove()
    assert len(seen) == 4
    torch.testing.assert_close(norm.running_mean, torch.stack([x.mean(dim=0) for x in seen]).mean(dim=0))
    torch.testing.assert_close(norm.running_var, torch.stack([x.var(dim=0) for x in seen]).mean(dim=0))
    assert norm.momentum == 0.1


def test_a_part_that_holds_a_further_name_alone_is_refused():
    family = make_family(TIED | {"name": f"{OWN}:tied", "freeze": ("1.1",)})
    with pytest.raises(ValueError, match=r"the part '1.1' holds 1.1.weight, which is one tensor with 1.0.weight"):
        check_freeze(family)
    check_freeze(make_family(TIED | {"name": f"{OWN}:tied", "freeze": ("1",)}))
    check_freeze(make_family(TIED | {"name": f"{OWN}:tied", "freeze": ("1.0",)}))


@pytest.mark.parametrize("kept", [("1.0.weight",), ("1.1.weight",), ("1.0.weight", "1.1.weight")])
def test_a_file_may_have_any_name_of_a_tied_tensor(kept, tmp_path):
    family = make_family(TIED | {"name": f"{OWN}:tied"})
    state = own_models.tied(classes=10).state_dict()
    torch.save({n: t for n, t in state.items() if "weight" not in n or n in (*kept, "2.weight")}, tmp_path / "w.pth")
    found = load_initial(tmp_path / "w.pth", family)
    assert (found.missing, found.left_over) == ((), ())
    assert torch.equal(found.tensors["1.0.weight"], state["1.0.weight"])


def test_a_file_with_two_tensors_for_one_is_refused(tmp_path):
    family = make_family(TIED | {"name": f"{OWN}:tied"})
    state = own_models.tied(classes=10).state_dict()
    torch.save(state | {"1.1.weight": state["1.1.weight"] + 1}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"1.1.weight and 1.0.weight are one tensor in the model, and differ in the"):
        load_initial(tmp_path / "w.pth", family)
    found = load_initial(tmp_path / "w.pth", family, {"1.1.weight": False})
    assert torch.equal(found.tensors["1.0.weight"], state["1.0.weight"])


def test_levels_may_be_tied():
    family = make_family(TIED | {"name": f"{OWN}:tied", "levels": [{"layers": 1}, {"layers": 3}]})
    small, large = (family.tensors(arch) for arch in (family.smallest(), family.full()))
    assert set(large) - set(small) == {"1.1.bias", "1.2.bias"}


def test_the_price_of_a_small_network_by_hand():
    family = make_family({"name": "torch.nn:Linear", "input_shape": [6], "classes": 3, "arguments": {
        "in_features": 6, "out_features": 3}})  # fmt: skip
    found = cost(family, family.full(), batch_size=4, optimizer="adam")
    assert found.payload_bytes == 4 * 21
    # Forward and the weight's gradient, a multiplication and an addition each; the inputs need no gradient.
    assert found.training_flops == 2 * 2 * 18
    # Weights and adam's state; in the update the batch (inputs, labels), gradients and three copies of the weight.
    assert found.peak_training_memory_bytes == 4 * 21 * 3 + 4 * (4 * 6) + 8 * 4 + 4 * 21 + 4 * 3 * 18


def test_pricing_allocates_nothing(monkeypatch):
    levels = [{"layers": 1}, {"layers": 3}]
    family = make_family({**THREE, "levels": levels, "arguments": {"hidden": 60_000}})
    found = cost(family, family.full(), batch_size=4, optimizer="sgd")  # 43 GB of weights
    assert found.parameters == 60_000 * (64 + 1 + 2 + 5) + 5 + 3 * (60_000**2 + 60_000)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"name": f"{OWN}:named", "levels": [{"name": "a"}, {"name": "b"}]},
            "has a tensor 'a.weight', which the level",
        ),
        ({"name": f"{OWN}:sized", "levels": [{"hidden": 9}, {"hidden": 4}]}, "1.weight has shape"),
        ({"name": f"{OWN}:overlapping"}, "1.0.weight and 1.1.weight share memory, and are not one tensor"),
        ({"name": f"{OWN}:broken", "levels": [{"layers": 1}]}, "fails: KeyError: 'layers'"),
        ({"name": f"{OWN}:number", "levels": [{"layers": 1}]}, "returns int, not an nn.Module"),
        ({"name": f"{OWN}:Deep", "levels": [{"layer": 1}]}, "unexpected keyword argument 'layer'"),
        ({"name": f"{OWN}:Deep", "levels": [2, 4]}, "levels must be like"),
        ({"name": f"{OWN}:Deep", "levels": []}, "there must be 1 to 1000 levels, not 0"),
        ({"name": "torch.nn:Flatten"}, "has no tensors to train"),
        ({"name": f"{OWN}:math"}, "has no math"),
        ({"name": f"{OWN}:lazy"}, "has a lazy layer .* no shape before its first batch: say its sizes"),
        ({"name": f"{OWN}:Deep", "norm": "layer"}, "norm must be 'batch' or 'static', not 'layer'"),
        ({"name": f"{OWN}:Dep"}, "has no Dep; did you mean 'Deep'"),
        ({"name": f"{OWN}:passed_on"}, "missing .* 'classes'.*only what the function itself names .* is filled in"),
    ],
)
def test_what_is_no_family_of_levels_says_why(spec, words):
    with pytest.raises(ValueError, match=words):
        make_family({"input_shape": [1, 8, 8], "classes": 10} | spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": f"{OWN}:sized", "levels": [{"hidden": 4}], "classes": 7}, r"returns \(4, 10\) for a batch of 4"),
        ({"name": f"{OWN}:sized", "levels": [{"hidden": 4}], "input_shape": [3]}, "does not take a batch of 3 inputs"),
        ({"name": f"{OWN}:pairs"}, "returns tuple for a batch of 4"),
        ({"name": f"{OWN}:Branching"}, r"depends on the values of a tensor .*may depend on their shapes alone"),
        (
            {"name": f"{OWN}:Shuffled", "levels": [{"momentum": None}]},
            r"norm has momentum = None, .* does not travel: give it a momentum, .* \"norm = 'static'\"",
        ),
        (
            {"name": f"{OWN}:NormedByHand", "norm": "static"},
            "has no attribute 'view' .norm = 'static', .* running_mean and running_var of its batch norms are None",
        ),
        *(
            ({"name": f"{OWN}:Writing", "arguments": {"how": how}}, "^Writing changes its input in place, .* x.clone")
            for how in ("subtract", "rectify", "fill", "out", "view", "data", "no grad")
        ),
    ],
)
def test_a_network_that_does_not_go_with_the_task_is_found_when_it_is_priced(spec, words):
    family = make_family({"input_shape": [1, 8, 8], "classes": 10} | spec)
    with pytest.raises(ValueError, match=words):
        cost(family, family.full(), batch_size=4, optimizer="sgd")


NORMED = {"name": f"{OWN}:Normed", "input_shape": [1, 8, 8], "classes": 10}


@pytest.mark.parametrize("how", ["subtract", "rectify", "fill", "view", "no grad", "evaluation"])
def test_a_network_that_changes_its_input_in_any_mode_is_an_error_when_it_computes(how):
    family = make_family(NORMED | {"name": f"{OWN}:Writing", "arguments": {"how": how}})
    with pytest.raises(ValueError, match="Writing changes its input in place"):
        family.build(family.full()).eval()(torch.rand(2, 1, 8, 8))


def test_a_network_that_changes_a_copy_of_its_input_is_priced_and_computes():
    family = make_family(NORMED | {"name": f"{OWN}:Writing", "arguments": {"how": "copy"}})
    cost(family, family.full(), batch_size=4, optimizer="sgd")
    images = torch.rand(2, 1, 8, 8)
    before = images.clone()
    family.build(family.full())(images)
    assert torch.equal(images, before)


RUNNING = ("running_mean", "running_var")


@pytest.mark.parametrize(
    "norm", [{}, {"affine": False}, {"momentum": None}, {"momentum": None, "affine": False}], ids=str
)
def test_static_norms_of_any_module_keep_no_statistics_and_take_them_afterwards(norm):
    """Against the module by itself, in one pass over two batches with a cumulative average."""
    own = own_models.Normed(10, **norm | {"momentum": None})
    tracked = [name for name in own.state_dict() if name.endswith(RUNNING)]
    family = make_family(NORMED | {"arguments": norm, "norm": "static"})
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    weights = family.initial()
    assert set(weights) == {n for n in own.state_dict() if not n.endswith((*RUNNING, "num_batches_tracked"))}
    assert len(tracked) == 8
    own.load_state_dict(weights, strict=False)
    batches = [torch.rand(6, 1, 8, 8) for _ in range(2)]

    model = with_weights(family, family.full(), weights)
    for mode in (True, False):
        assert torch.equal(model.train(mode)(batches[0]), own.train()(batches[0]))
    assert model.state_dict().keys() == weights.keys()

    own = own_models.Normed(10, **norm | {"momentum": None})
    own.load_state_dict(weights, strict=False)
    scored = family.with_statistics
    assert (scored.norm, scored.with_statistics) == ("batch", scored)
    zeros = {name: torch.zeros(4) for name in tracked}
    model = with_weights(scored, scored.full(), weights | zeros)
    take_statistics(model, [(batch, torch.zeros(6)) for batch in batches])
    for batch in batches:
        own.train()(batch)
    for name in tracked:
        torch.testing.assert_close(model.state_dict()[name], own.state_dict()[name])
    one = batches[0][:1]
    torch.testing.assert_close(model.eval()(one), own.eval()(one))


def test_static_instance_norms_take_their_statistics_afterwards():
    family = make_family(NORMED | {"name": f"{OWN}:ByInstance", "norm": "static"})
    assert not any(name.endswith(RUNNING) for name in family.tensors(family.full()))
    scored, images = family.with_statistics, torch.rand(6, 1, 8, 8)
    found = with_weights(scored, scored.full(), scored.initial())
    take_statistics(found, [(images, torch.zeros(6))] * 2)
    stem = found.get_submodule("stem")(images)
    torch.testing.assert_close(found.state_dict()["norm.running_mean"], stem.mean((0, 2, 3)))
    torch.testing.assert_close(found.state_dict()["norm.running_var"], stem.var((2, 3)).mean(0))


def test_norms_without_statistics_and_those_in_evaluation_mode_stay_as_they_are():
    without = make_family(NORMED | {"arguments": {"track_running_stats": False}, "norm": "static"})
    assert without.with_statistics is without
    family = make_family(NORMED | {"name": f"{OWN}:StillNorm", "norm": "static"})
    kept = [name for name in family.tensors(family.full()) if name.endswith(RUNNING)]
    assert kept == ["norm.running_mean", "norm.running_var"]


def test_other_selections_than_leading_ones_are_refused():
    family = make_family(THREE)
    with pytest.raises(ValueError, match="leading slices"):
        family.place(family.full(), rolling(1))
    assert math.prod(family.tensors(family.full())["stem.weight"].shape) == 32 * 64


def test_what_a_module_writes_in_place_leaves_the_tensors_beside_it_alone():
    """The tensors of a message are views of one."""
    family = make_family(TIED | {"name": f"{OWN}:RunningMean"})
    first = family.initial()
    flat = torch.cat([tensor.flatten() for tensor in first.values()])
    parts = flat.split([tensor.numel() for tensor in first.values()])
    views = {name: part.view(first[name].shape) for name, part in zip(first, parts, strict=True)}
    network = with_weights(family, family.full(), views).train()
    images = torch.rand(4, 1, 8, 8)
    network(images).sum().backward()
    assert network.get_parameter("second.weight").grad is not None
    hidden = torch.relu(images.flatten(1) @ first["first.weight"].T + first["first.bias"])
    means = (hidden @ first["second.weight"].T + first["second.bias"]).mean(0)
    assert torch.allclose(network.state_dict()["mean"], 0.5 * means, atol=1e-6)
    assert network.state_dict()["mean"].data_ptr() == views["mean"].data_ptr()  # not copied


def test_what_is_drawn_at_random_and_does_not_travel_is_the_same_everywhere():
    family = make_family({"name": f"{OWN}:Shuffled", "input_shape": [1, 8, 8], "classes": 10})
    weights = family.build(family.full()).state_dict()
    assert not {"order", "mask"} & set(weights)
    torch.manual_seed(1)
    with mock.patch("torch.cuda.manual_seed_all") as of_gpus:
        one = with_weights(family, family.full(), weights)
    of_gpus.assert_not_called()
    after = torch.rand(1)
    torch.manual_seed(2)
    other = with_weights(family, family.full(), weights)
    assert torch.equal(one.order, other.order)
    assert torch.equal(one.mask, other.mask)
    assert sorted(one.order.tolist()) == list(range(64))
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))  # nothing else is drawn otherwise for it


def test_initializers_that_draw_again_are_priced():
    family = make_family(TIED | {"name": f"{OWN}:truncated"})
    assert cost(family, family.full(), batch_size=2, optimizer="sgd").parameters == 64 * 10 + 10
    assert 0 < float(family.initial()["1.weight"].abs().max()) < 0.2


def test_a_constructor_that_asks_for_values_of_parameters_is_refused_in_words():
    with pytest.raises(ValueError, match="must not read the values of parameters, which have none then"):
        make_family(TIED | {"name": f"{OWN}:by_value"})


def test_a_module_may_keep_a_part_in_evaluation_mode_and_some_parameters_as_they_are():
    family = make_family(TIED | {"name": f"{OWN}:FrozenNorm", "freeze": ["mid"]})
    network = family.build(family.full()).train()
    assert network.training
    assert network.get_submodule("head").training
    assert not network.get_submodule("norm").training
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {"head.weight", "head.bias", "norm.weight", "norm.bias"}
    frozen = {name for name, spec in family.tensors(family.full()).items() if spec.frozen}
    assert frozen == {"mid.weight", "mid.bias"}


def test_a_head_under_the_name_of_a_layer_is_refused():
    family = make_family(TIED | {"name": f"{OWN}:in_sequence", "levels": [{"layers": 1}, {"layers": 2}]})
    words = r"the tensor 2\.weight is of a head, .* in this one and not in the largest one, .* give the head a name"
    with pytest.raises(ValueError, match=words):
        family.tensors(family.smallest())


@pytest.mark.parametrize(
    ("order", "of_classes"),
    [("none", ["head.weight", "head.bias"]), ("log", ["head.weight", "head.bias"]), ("flip", [])],
)
@pytest.mark.parametrize("classes", [2, 5])
def test_channels_as_many_as_classes_are_no_classes(order, of_classes, classes):
    spec = {"name": f"{OWN}:ClassWide", "input_shape": [1, 8, 8], "classes": classes, "arguments": {"order": order}}
    family = make_family(spec)
    assert [name for name, spec in family.tensors(family.full()).items() if spec.of_classes] == of_classes


def test_a_module_of_just_these_classes_has_no_head_that_is_known(caplog):
    family = make_family(TIED | {"name": f"{OWN}:ten_classes"})
    assert not any(spec.of_classes for spec in family.tensors(family.full()).values())
    assert caplog.text.count(f"No tensor of {OWN}:ten_classes counts as its head: for one class more, ") == 1


def test_a_module_that_moves_itself_is_told_what_to_leave_out():
    with pytest.raises(ValueError, match=r"leave \.to\(device\) out, the run moves the network to its device"):
        make_family(TIED | {"name": f"{OWN}:on_a_device"})
