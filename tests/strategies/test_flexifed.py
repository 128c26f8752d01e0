"""FlexiFed: who shares which layer, means worked out by hand, and layers that stay on devices."""

from types import SimpleNamespace

import pytest
import torch

from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from wildflower.messages.orders import LocalTraining
from wildflower.messages.sums import WeightedSum, device_weight, flatten
from wildflower.models.choice import Choice
from wildflower.models.lenet import LeNet5
from wildflower.models.resnet import ResNet18
from wildflower.models.vgg import Vgg
from wildflower.models.vit import VitTiny
from wildflower.strategies.common_layers import alike, common_length
from wildflower.strategies.flexifed import FlexiFed, FlexiFedParams
from wildflower.strategies.method import LEADING, Contribution, Group, Order, Setup, Trained
from wildflower.strategies.own_layers import TrainingWithOwnLayers
from wildflower.strategies.run_settings import RoundSettings

VIT = VitTiny(input_shape=(1, 8, 8), hidden=4, depth=3, heads=2, mlp=4)
SHARED = 3 + 16  # tensors of the embedding and of block0: two norms, attention of four linear layers, an MLP of two


def flexifed(sharing="clustered", family=VIT, widths=(1.0,), initial=None):
    settings = RoundSettings("a run", {"devices": 9}, "made up", 1, 10, 2, 2, LocalTraining())
    return FlexiFed(Setup(family, settings, widths, initial=initial or {}), FlexiFedParams(sharing=sharing))


def at_zero(method):
    method.weights = {key: torch.zeros_like(value) for key, value in method.weights.items()}
    return method


def group_of(method, architecture, device=0):
    local = method.client_step(Order(device, architecture))
    sent, returned = (way(method.family, architecture) for way in (local.sent, local.returned))
    return Group(architecture, LEADING, sent, returned, method.family.place(architecture))


def a_round(method, values):
    """Let devices of each type, smallest first, return tensors that hold these numbers everywhere."""
    trained = []
    for architecture, of_type in zip(reversed(method.candidates), values, strict=True):
        for value in of_type:
            device, examples = len(trained), 10 * len(trained) + 1
            group = group_of(method, architecture, device)
            tensor_set = group.returned["weights"]
            total = WeightedSum.zeros(tensor_set.layout)
            contents = {e.name: torch.full(e.shape, value) for e in tensor_set.layout.entries}
            total.add(flatten(contents, tensor_set.layout), device_weight(tensor_set.merge, examples))
            method.absorb(Contribution(group, [device], [device], examples, {"weights": total}, {}))
            trained.append(Trained(Order(device, architecture), "a tier", examples, None, {}))
    method.finish_round(trained)


def parts(method):
    """Of each type, smallest first: the values of its embedding, of each block, and of its head."""
    found = []
    for architecture in reversed(method.candidates):
        of_type = {}
        for name, key in method.keys[architecture].items():
            part = name.partition(".")[0].partition("_")[0]
            of_type.setdefault(part, set()).update(round(float(v), 3) for v in method.weights[key].unique())
        found.append({part: values.pop() if len(values) == 1 else values for part, values in of_type.items()})
    return found


THIRD = round(10 / 3, 3)


def test_clustered_layers_that_are_not_common_to_all_are_averaged_within_their_type():
    """Types of 1, 2 and 3 layers return 1; 2; 3 and 5: common is (1 + 2 + 3 + 5) / 4, whatever the examples."""
    method = at_zero(flexifed("clustered"))
    a_round(method, [[1.0], [2.0], [3.0, 5.0]])
    assert parts(method) == [
        {"embedding": 2.75, "block0": 2.75, "head": 1.0},
        {"embedding": 2.75, "block0": 2.75, "block1": 2.0, "head": 2.0},
        {"embedding": 2.75, "block0": 2.75, "block1": 4.0, "block2": 4.0, "head": 4.0},
    ]


def test_max_a_layer_is_averaged_over_all_that_begin_alike_up_to_it():
    """The second layer is of the types of 2 and 3 layers, (2 + 3 + 5) / 3; heads stand behind different layers."""
    method = at_zero(flexifed("max"))
    a_round(method, [[1.0], [2.0], [3.0, 5.0]])
    assert parts(method) == [
        {"embedding": 2.75, "block0": 2.75, "head": 1.0},
        {"embedding": 2.75, "block0": 2.75, "block1": THIRD, "head": 2.0},
        {"embedding": 2.75, "block0": 2.75, "block1": THIRD, "block2": 4.0, "head": 4.0},
    ]
    a_round(method, [[8.0], [], []])
    assert parts(method) == [
        {"embedding": 8.0, "block0": 8.0, "head": 8.0},
        {"embedding": 8.0, "block0": 8.0, "block1": THIRD, "head": 2.0},
        {"embedding": 8.0, "block0": 8.0, "block1": THIRD, "block2": 4.0, "head": 4.0},
    ]


def test_basic_only_what_is_common_to_all_is_averaged():
    method = at_zero(flexifed("basic"))
    a_round(method, [[1.0], [2.0], [3.0, 5.0]])
    common = {"embedding": 2.75, "block0": 2.75}
    assert [of_type | common for of_type in parts(method)] == parts(method)
    assert all(value == 0.0 for of_type in parts(method) for part, value in of_type.items() if part not in common)


def test_a_round_without_devices_changes_nothing():
    method = flexifed("max")
    before = dict(method.weights)
    a_round(method, [[], [], []])
    assert same_bits(before, method.weights)


def test_who_begins_alike_by_hand():
    """a b x; a b y z; a c: "a" is of all, "b" of the first two, and behind a difference nothing is alike."""
    layers = ["abx", "abyz", "ac", "abyq"]
    signatures = [[(letter, ()) for letter in found] for found in layers]
    assert alike(signatures) == [[0, 0, 0], [0, 0, 1, 1], [0, 2], [0, 0, 1, 3]]
    assert common_length(signatures) == 1
    again = [[("a", (2,)), ("b", ())], [("a", (3,)), ("b", ())]]  # of another shape is another layer
    assert alike(again) == [[0, 0], [1, 1]]
    assert common_length(again) == 0


def test_members_of_a_choice_share_layers_under_their_own_names():
    deep, flat = VIT, VitTiny(input_shape=(1, 8, 8), hidden=4, depth=1, heads=2, mlp=4)
    method = at_zero(flexifed("max", Choice((1, 8, 8), members=(("deep", deep), ("flat", flat)))))
    large, small = method.candidates
    assert method.keys[large]["deep.embedding.patches.weight"] == method.keys[small]["flat.embedding.patches.weight"]
    assert method.keys[large]["deep.head.norm.weight"] != method.keys[small]["flat.head.norm.weight"]
    assert method.common == len(deep.block_names[:1]) * 16 + 3 == SHARED
    a_round(method, [[1.0], [2.0]])
    model = method.models([small])[small]
    assert model.weights["flat.block0_mlp.fc1.weight"].unique().tolist() == [1.5]
    assert model.weights["flat.head.norm.weight"].unique().tolist() == [1.0]


def test_types_begin_with_given_weights():
    given = {"block1_mlp.fc1.weight": torch.full((4, 4), 7.0)}
    method = flexifed("clustered", initial=given)
    models = method.models(method.candidates)
    has = [
        m.weights["block1_mlp.fc1.weight"].unique().tolist()
        for a, m in models.items()
        if "block1_mlp.fc1.weight" in m.weights
    ]
    assert has == [[7.0], [7.0]]


def test_layers_of_its_own_travel_to_a_device_once():
    """In a device's first round with a type; then common tensors only, both ways."""
    method = flexifed("basic")
    whole = method.candidates[0]
    first = method.client_step(Order(3, whole))
    sent, returned = first.sent(VIT, whole), first.returned(VIT, whole)
    assert [len(sent[name].layout.entries) for name in ("weights", "own")] == [SHARED, len(VIT.tensors(whole)) - SHARED]
    assert len(returned["weights"].layout.entries) == SHARED
    everything = sum(tensor_set.layout.nbytes for tensor_set in sent.values())
    assert method.cost(whole).payload_bytes == everything == 4 * method.cost(whole).parameters
    payload = method.payload(group_of(method, whole, 3))
    assert {name: list(tensors) for name, tensors in payload.items()} == {
        name: [e.name for e in tensor_set.layout.entries] for name, tensor_set in sent.items()
    }
    method.finish_round([Trained(Order(3, whole), "a tier", 1, None, {})])
    assert method.client_step(Order(3, whole)).sent(VIT, whole).keys() == {"weights"}
    assert method.client_step(Order(3, method.candidates[1])).sent(VIT, method.candidates[1]).keys() == {
        "weights",
        "own",
    }
    assert method.client_step(Order(4, whole)).sent(VIT, whole).keys() == {"weights", "own"}
    assert method.cost(whole).payload_bytes == everything  # whoever has begun
    assert method.scored_on_devices() == [(3, whole, LEADING)]
    assert method.models([whole]) == {}


def test_a_device_goes_on_with_its_own_layers():
    """What it keeps counts before what it is sent; a head of 7 is trained to 8 and stays, the rest goes from 2 to 3."""
    architecture = VIT.full()
    kept = {}
    built = []

    def fit(model, loss, rate):
        built.append({name: p.unique().tolist() for name, p in model.named_parameters()})
        for parameter in model.parameters():
            parameter.data += 1
        return 0.5

    def build(weights=None):
        model = VIT.build(architecture)
        model.load_state_dict(weights)
        return model

    names = list(VIT.tensors(architecture))
    value = {n: 2.0 if i < SHARED else 7.0 for i, n in enumerate(names)}
    tensors = {n: torch.full(VIT.tensors(architecture)[n].shape, value[n]) for n in names}
    received = {"weights": {n: tensors[n] for n in names[:SHARED]}, "own": {n: tensors[n] for n in names[SHARED:]}}
    context = SimpleNamespace(
        received=received,
        build=build,
        kept=kept.get,
        keep=kept.__setitem__,
        fit=fit,
        family=VIT,
        architecture=architecture,
        task=None,
    )
    own = tuple(names[SHARED:])
    answer = TrainingWithOwnLayers(weighting="uniform", own=own, begins=True).train(context)
    assert built[0] == {n: [value[n]] for n in names}
    assert set(kept["own"]) == set(names[SHARED:])
    assert answer.tensor_sets["weights"]["embedding.patches.weight"].unique().tolist() == [3.0]
    received["own"]["head.norm.weight"] = torch.zeros(4)
    TrainingWithOwnLayers(weighting="uniform", own=own, begins=True).train(context)
    assert built[1]["head.norm.weight"] == [8.0]


def test_rounds_with_layers_of_the_devices_own(tmp_path):
    keys = METHODS["flexifed"] | {"flexifed.sharing": "basic", "devices-per-round": 6, "evaluate-every": 1}
    engine, scorer = started(small_config(tmp_path, **keys))
    grid = simulated_grid()
    first, second = (engine.run_round(grid, number, scorer) for number in (1, 2))
    for result in (first, second):
        assert [d["outcome"] for d in result.devices] == ["trained"] * 6
        assert result.record["score"] is not None
    method = engine.method
    own = sum(method.cost(d_arch).payload_bytes for _, d_arch, _ in method.scored_on_devices())
    assert first.record["training_bytes_down"] == own
    assert (
        second.record["training_bytes_down"]
        == second.record["training_bytes_up"]
        == first.record["training_bytes_up"]
        < own
    )
    again, _ = started(small_config(tmp_path, **keys))
    again.load(engine.state())
    assert again.method.scored_on_devices() == method.scored_on_devices()
    other, _ = started(small_config(tmp_path, **keys | {"flexifed.sharing": "max"}))
    with pytest.raises(ValueError, match=r"another flexifed\.sharing"):
        other.load(engine.state())


@pytest.mark.parametrize(
    ("family", "sharing", "words"),
    [
        (ResNet18(input_shape=(1, 8, 8), first_channels=4), "max", "begin with the same layers, and those of resnet18"),
        (Vgg(input_shape=(1, 8, 8), block_channels=(2, 4), exits=(0, 1)), "max", "several exits"),
        (
            Choice(
                (1, 8, 8),
                members=(
                    ("large", VIT),
                    ("middle", VitTiny(input_shape=(1, 8, 8), hidden=4, depth=1, heads=2, mlp=4)),
                    ("small", LeNet5(input_shape=(1, 8, 8), conv_channels=(2, 2), hidden=(4,))),
                ),
            ),
            "clustered",
            "no layer with which all types",
        ),
    ],
)
def test_architectures_that_do_not_begin_alike_are_refused(family, sharing, words):
    with pytest.raises(ValueError, match=words):
        flexifed(sharing, family, widths=(1.0, 0.5))
