"""InclusiveFL's server by numbers worked out by hand from Algorithm 1, and heads of the devices' own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.inclusivefl.inclusivefl_controls import RatesByType, SharesAll, check_heads_alike
from tests.encoders import encoder
from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from wildflower.messages.error import MessageError
from wildflower.messages.orders import LocalTraining
from wildflower.messages.sums import WeightedSum, device_weight, flatten
from wildflower.models.family import make_family
from wildflower.models.lenet import LeNet5
from wildflower.models.vit import VitTiny
from wildflower.strategies import inclusivefl
from wildflower.strategies.fedadam import FedAdamParams
from wildflower.strategies.inclusivefl import InclusiveFL, InclusiveFLParams
from wildflower.strategies.method import Contribution, Group, Order, Setup, Trained
from wildflower.strategies.own_layers import TrainingWithOwnLayers
from wildflower.strategies.run_settings import RoundSettings
from wildflower.strategies.types_by_depth import check_alike, layers_of, types_of

VIT = VitTiny(input_shape=(1, 8, 8), hidden=4, depth=3, heads=2, mlp=4)
# The server's Adam makes its step as long as the update, within a millionth: w + eta g / (|g| + tau).
PLAIN = FedAdamParams(betas=(0.0, 0.0), eta=1e6, tau=1e6)


def inclusive(family=VIT, kind=InclusiveFL, adam=PLAIN, initial=None, **params):
    settings = RoundSettings("a run", {"devices": 9}, "made up", 1, 10, 2, 2, LocalTraining())
    made = Setup(family, settings, (1.0,), initial=initial or {}, shared={"fedadam": adam})
    return kind(made, InclusiveFLParams(**params))


def at_zero(method):
    method.weights = {a: {n: torch.zeros_like(v) for n, v in w.items()} for a, w in method.weights.items()}
    return method


def group_of(method, architecture):
    local = method.client_step(Order(0, architecture))
    sent, returned = (way(method.family, architecture) for way in (local.sent, local.returned))
    return Group(architecture, method.selection(0, architecture), sent, returned, method.family.place(architecture))


def a_round(method, changes):
    """Let devices of each type, smallest first, return what they were sent with these numbers added everywhere."""
    trained = []
    for architecture, of_type in zip(reversed(method.candidates), changes, strict=True):
        group = group_of(method, architecture)
        tensor_set = group.returned["weights"]
        for change in of_type:
            device = len(trained)
            weights = method.payload(group)["weights"]
            contents = {e.name: weights[e.name] + change for e in tensor_set.layout.entries}
            total = WeightedSum.zeros(tensor_set.layout)
            total.add(flatten(contents, tensor_set.layout), device_weight(tensor_set.merge, 10 * device + 1))
            method.absorb(Contribution(group, [device], [device], 10 * device + 1, {"weights": total}, {}))
            trained.append(Trained(Order(device, architecture), "a tier", 10 * device + 1, None, {}))
    method.finish_round(trained)


def values(method):
    """Of each type, smallest first: the one value of its embeddings, of each layer, and of its head."""
    found = []
    for architecture in reversed(method.candidates):
        layers, weights = method.layers[architecture], method.weights[architecture]
        parts = [layers.embeddings, *(block.values() for block in layers.blocks), layers.head]
        found.append([sorted({round(float(v), 3) for n in names for v in weights[n].unique()}) for names in parts])
    return [[part[0] if len(part) == 1 else part for part in of_type] for of_type in found]


def test_the_paper_s_types_are_thirds_of_the_depth():
    twelve = make_family(encoder(hidden=4, depth=12, heads=2, mlp=4))
    assert [len(layers_of(twelve, a).blocks) for a in types_of(twelve, (1.0,))] == [12, 8, 4]
    assert [len(layers_of(VIT, a).blocks) for a in types_of(VIT, (1.0, 0.5))] == [3, 2, 1]
    two = make_family(encoder(hidden=4, depth=6, heads=2, mlp=4, depths=(2, 6)))
    assert [len(layers_of(two, a).blocks) for a in types_of(two, (1.0,))] == [6, 2]


def test_every_tensor_is_of_the_embeddings_of_a_layer_or_of_the_head():
    family = make_family(encoder(hidden=4, depth=11, heads=2, mlp=4))
    layers = layers_of(family, family.full())
    assert all(name.startswith("embeddings.") for name in layers.embeddings)
    assert all(name.startswith("classifier.") for name in layers.head)
    assert len(layers.blocks) == 11
    assert layers.blocks[1][".output.dense.weight"] == "encoder.layer.1.output.dense.weight"
    assert layers.blocks[10][".output.dense.weight"] == "encoder.layer.10.output.dense.weight"
    named = {*layers.embeddings, *layers.head, *(name for block in layers.blocks for name in block.values())}
    assert named == set(family.tensors(family.full()))


def test_two_rounds_by_hand():
    """Types a, b, c of 1, 2, 3 layers with 1, 1, 2 devices; beta = 1/2; all weights are 0.

    Round 1: g_a = 1, g_b = 2, g_c = (3 + 5) / 2 = 4, and m_0 = 0. Injected: g_a,1 = 1/2, g_b,2 = 1.
    m_b = (2 + 1) / 2 = 1.5 over layers 1 and 2; m_c = 4 over layers 2 and 3.
    Shared: embeddings (1 + 2 + 2 x 4) / 4 = 2.75; layer 1 of b and c (2 + 2 x 4) / 3; layer 2 of c alone.

    Round 2, where nobody changes anything and one device of each type answers: g_a,1 = m_b / 2 = 0.75,
    g_b,2 = m_c / 2 = 2, all else 0; what is shared is alike in all its owners already. m_b = (0 + 2) / 2 = 1, m_c = 0.
    """
    method = at_zero(inclusive(momentum=0.5))
    a_round(method, [[1.0], [2.0], [3.0, 5.0]])
    third = round(10 / 3, 3)
    assert values(method) == [[2.75, 0.5, 1.0], [2.75, third, 1.0, 2.0], [2.75, third, 4.0, 4.0, 4.0]]
    large, middle, _ = method.candidates
    momenta = [{round(float(v), 3) for t in method.momentum[a].values() for v in t.unique()} for a in (middle, large)]
    assert momenta == [{1.5}, {4.0}]
    a_round(method, [[0.0], [0.0], [0.0]])
    assert values(method) == [[2.75, 1.25, 1.0], [2.75, third, 3.0, 2.0], [2.75, third, 4.0, 4.0, 4.0]]
    assert {round(float(v), 3) for t in method.momentum[middle].values() for v in t.unique()} == {1.0}


def test_without_momentum_types_only_share():
    method = at_zero(inclusive(momentum=0.0))
    a_round(method, [[1.0], [2.0], [3.0, 5.0]])
    third = round(10 / 3, 3)
    assert values(method) == [[2.75, 1.0, 1.0], [2.75, third, 2.0, 2.0], [2.75, third, 4.0, 4.0, 4.0]]


def test_without_sharing_types_hand_down_momentum_only():
    method = at_zero(inclusive(share="none", momentum=0.5))
    a_round(method, [[1.0], [2.0], [3.0, 5.0]])
    assert values(method) == [[1.0, 0.5, 1.0], [2.0, 2.0, 1.0, 2.0], [4.0, 4.0, 4.0, 4.0, 4.0]]


def test_last_layers_and_heads_may_be_shared_too():
    """Types a, b, c of 1, 2, 3 layers become 1, 2 and (3 + 5) / 2 = 4, with 1, 1 and 2 devices.

    Embeddings, layer 1 and the head are all types': (1 + 2 + 2 x 4) / 4 = 2.75. Layer 2 is that of b and c:
    (2 + 2 x 4) / 3. Layer 3 is c's alone.
    """
    method = at_zero(inclusive(kind=SharesAll, momentum=0.0))
    a_round(method, [[1.0], [2.0], [3.0, 5.0]])
    third = round(10 / 3, 3)
    assert values(method) == [[2.75, 2.75, 2.75], [2.75, 2.75, third, 2.75], [2.75, 2.75, third, 4.0, 2.75]]


def test_heads_are_shared_only_where_types_have_the_same():
    class Uneven(VitTiny):
        def tensors(self, arch):
            own = "head" if arch == self.full() else "small.head"
            return {name.replace("head.", f"{own}."): spec for name, spec in super().tensors(arch).items()}

    family = Uneven(input_shape=(1, 8, 8), hidden=4, depth=3, heads=2, mlp=4)
    layers = {a: layers_of(family, a) for a in types_of(family, (1.0,))}
    check_alike(family, layers)
    with pytest.raises(ValueError, match="tensors of other names"):
        check_heads_alike("uneven", layers.values())


def test_what_nobody_trained_is_kept():
    """Only type a answers: its embeddings become everybody's, since n_b = n_c = 0; layers of b and c stay."""
    method = at_zero(inclusive(momentum=0.5))
    a_round(method, [[1.0], [], []])
    assert values(method) == [[1.0, 0.5, 1.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]
    a_round(method, [[], [], []])
    assert values(method)[0] == [1.0, 0.5, 1.0]


def test_the_servers_adam_is_fedadams():
    """g = 2, beta_1 = 0.5, beta_2 = 0.75, eta = 0.1, tau = 1: m = 1, v = 0.75 + 1 = 1.75, step 0.1 / (1.3229 + 1)."""
    method = at_zero(inclusive(share="none", adam=FedAdamParams(betas=(0.5, 0.75), eta=0.1, tau=1.0), momentum=0.0))
    a_round(method, [[], [], [2.0]])
    assert values(method)[2] == [0.043] * 5
    assert values(method)[1] == [0.0] * 4


def test_the_server_may_take_the_mean_update_as_it_is():
    """Types a, b, c get 1, 2 and (3 + 5) / 2 = 4; beta = 1/2 and m_0 = 0, so that last layers of a and b get half."""
    method = at_zero(inclusive(share="none", momentum=0.5, server="mean"))
    a_round(method, [[1.0], [2.0], [3.0, 5.0]])
    assert values(method) == [[1.0, 0.5, 1.0], [2.0, 2.0, 1.0, 2.0], [4.0] * 5]


def test_a_restart_changes_nothing():
    methods = [at_zero(inclusive(adam=FedAdamParams(eta=0.1), momentum=0.5)) for _ in range(2)]
    a_round(methods[0], [[1.0], [2.0], [3.0]])
    methods[1].load(methods[0].state())
    for method in methods:
        a_round(method, [[0.5], [], [1.0]])
    assert same_bits(methods[0].state().tensors, methods[1].state().tensors)
    state = methods[0].state()
    state.tensors.pop("momentum/0/_attention.norm.weight")
    with pytest.raises(ValueError, match="other types of models"):
        methods[1].load(state)


def test_types_begin_with_given_weights():
    name = "block0_mlp.fc1.weight"
    given = {name: torch.full((4, 4), 7.0)}
    method = inclusive(initial=given)
    assert [weights[name].unique().tolist() for weights in method.weights.values()] == [[7.0]] * 3
    assert method.traits(method.params).takes_initial_weights


@pytest.mark.thorough
def test_what_is_frozen_keeps_its_bits(tmp_path):
    """Sharing means over types would round: three thirds of a number are not always the number."""
    keys = METHODS["inclusivefl"] | {"freeze": "embedding, block0_mlp", "devices-per-round": 6}
    engine, scorer = started(small_config(tmp_path, **keys))
    before = {a: dict(w) for a, w in engine.method.weights.items()}
    grid = simulated_grid()
    for number in (1, 2):
        engine.run_round(grid, number, scorer)
    changed = {
        n for a, weights in engine.method.weights.items() for n, v in weights.items() if (v != before[a][n]).any()
    }
    assert changed
    assert not any(name.startswith(("embedding.", "block0_mlp.")) for name in changed)


@pytest.mark.parametrize(
    ("server", "parts"), [("adam", {"weights", "m", "v", "momentum"}), ("mean", {"weights", "momentum"})]
)
def test_adams_moments_are_kept_of_what_it_steps_alone(server, parts):
    state = inclusive(replace(VIT, freeze=("embedding",)), server=server).state().tensors
    assert {name.split("/")[0] for name in state} == parts
    frozen = {name.split("/")[0] for name in state if name.split("/")[-1].startswith("embedding.")}
    assert frozen == {"weights"}


@pytest.mark.parametrize("server", ["adam", "mean"])
def test_momentum_leaves_what_is_frozen_alone(server):
    """The first layer is frozen, and is the last of the smallest type, into which a larger one's momentum goes."""
    method = inclusive(replace(VIT, freeze=("block0_attention", "block0_mlp")), server=server, momentum=0.5)
    before = {name: tensor.clone() for name, tensor in method.frozen_weights().items()}
    assert before
    for _ in range(2):
        a_round(method, [[0.1], [0.2], [0.3]])
    for weights in method.weights.values():
        assert all(torch.equal(weights[name], tensor) for name, tensor in before.items() if name in weights)


def choice(**members):
    return make_family({"name": "choice", "input_shape": [1, 8, 8], "classes": 10, "members": members})


def test_members_of_a_choice_share_the_blocks_with_which_they_begin():
    """LeNets of (6, 16) and (6, 3) channels begin with one block; 1 device of the small type says 1, 3 of the other 5.

    The block is (1 + 3 x 5) / 4 = 4, its running statistics too. No later tensor is alike, and so nothing is handed on.
    """
    family = choice(large={"name": "lenet5"}, small={"name": "lenet5", "conv_channels": [6, 3], "hidden": [84]})
    method = at_zero(inclusive(family, server="mean"))
    assert method.momentum == {method.candidates[0]: {}}
    a_round(method, [[1.0], [5.0, 5.0, 5.0]])
    large, small = (method.weights[a] for a in method.candidates)
    for name, value in {**large, **small}.items():
        if not name.endswith("num_batches_tracked"):
            expected = 4.0 if "block1." in name else 5.0 if name.startswith("large") else 1.0
            assert value.unique().tolist() == [expected], name
    assert any("block1.norm.running_var" in name for name in small)


def test_statistics_are_averaged_where_the_server_has_an_adam():
    family = choice(large={"name": "lenet5"}, small={"name": "lenet5", "conv_channels": [6, 3], "hidden": [84]})
    method = at_zero(inclusive(family, adam=FedAdamParams(eta=0.5)))
    a_round(method, [[3.0], [3.0]])
    weights = method.weights[method.candidates[0]]
    assert weights["large.block2.norm.running_var"].unique().tolist() == [3.0]
    assert 0 < weights["large.block2.norm.weight"].unique().item() < 3.0


def test_deep_blocks_of_a_choice_hand_down_what_has_the_shape_of_the_last_shallow_one():
    """ViTs of three and two blocks, each of attention and MLP: m is the mean over the MLPs of blocks 2 and 3."""
    sizes = {"hidden": 4, "heads": 2, "mlp": 4}
    family = choice(large={"name": "vit-tiny", "depth": 3, **sizes}, small={"name": "vit-tiny", "depth": 2, **sizes})
    method = at_zero(inclusive(family, server="mean", momentum=0.5))
    a_round(method, [[1.0], [4.0]])
    assert {v for t in method.momentum[method.candidates[0]].values() for v in t.unique().tolist()} == {4.0}
    a_round(method, [[0.0], [0.0]])
    for name, value in method.weights[method.candidates[1]].items():
        # What is shared is (1 + 4) / 2; the last MLP has half of its 1 in round 1, and half of m = 4 in round 2.
        assert value.unique().tolist() == [1.0 if ".head." in name else 2.5], name


def test_families_that_share_no_layers_are_refused():
    with pytest.raises(ValueError, match="one stack of layers"):
        inclusive(LeNet5(input_shape=(1, 8, 8)))
    with pytest.raises(ValueError, match="members of choice begin with different ones"):
        inclusive(choice(large={"name": "lenet5"}, small={"name": "lenet5", "conv_channels": [3, 3], "hidden": [84]}))
    with pytest.raises(ValueError, match="several exits: leave out exits or early_exits"):
        inclusive(make_family(encoder(early_exits=True)))
    method = inclusive()
    frozen = replace(VIT, freeze=("head",))
    with pytest.raises(ValueError, match=r"freeze names head\.classifier\.bias: leave the head out"):
        inclusive(frozen, head="own")
    other = Contribution(group_of(method, VIT.width(0.5)), [0], [0], 1, {"weights": None}, {})
    with pytest.raises(MessageError, match="no type's"):
        method.absorb(other)


def test_a_head_that_a_module_defines_first_is_a_head():
    spec = {"name": "own_models:HeadFirst", "input_shape": [1, 8, 8], "classes": 10}
    family = make_family({**spec, "levels": [{"layers": 1}, {"layers": 2}]})
    assert next(iter(family.tensors(family.full()))) == "head.weight"
    layers = layers_of(family, family.full())
    assert layers.head == ("head.weight", "head.bias")
    assert layers.embeddings == ("stem.weight", "stem.bias")
    assert set(inclusive(family, head="own").client_step(Order(0, family.full())).own) == set(layers.head)


def test_a_head_of_ones_own_wants_a_head(monkeypatch):
    monkeypatch.setattr(inclusivefl, "layers_of", lambda *of: replace(layers_of(*of), head=()))
    with pytest.raises(ValueError, match=r"inclusivefl\.head = 'own': .* has no head"):
        inclusive(head="own")


def test_a_head_of_ones_own_stays_on_the_device():
    method = inclusive(head="own")
    architecture = method.candidates[0]
    local = method.client_step(Order(0, architecture))
    heads = {"head.norm.weight", "head.norm.bias", "head.classifier.weight", "head.classifier.bias"}
    assert set(local.own) == heads
    for tensor_sets in (local.sent(VIT, architecture), local.returned(VIT, architecture)):
        assert not heads & {entry.name for entry in tensor_sets["weights"].layout.entries}
    assert not heads & set(method.weights[architecture])
    assert method.models([architecture]) == {}


def test_a_device_trains_its_own_head_and_keeps_it():
    """The head that it kept is what it begins with, and what it has learned is kept and does not travel."""
    architecture = VIT.full()
    head = ("head.classifier.bias",)
    kept = {"own": {"head.classifier.bias": torch.full((10,), 7.0)}}

    def loaded(weights):
        model = VIT.build(architecture)
        model.load_state_dict(weights)
        return model

    def fit(model, loss, rate):
        assert rate == 2.5
        for name, parameter in model.named_parameters():
            if name in head:
                assert parameter.unique().tolist() == [7.0]
            parameter.data += 1
        return 0.5

    received = {n: torch.full(s.shape, 2.0) for n, s in VIT.tensors(architecture).items() if n not in head}
    context = SimpleNamespace(
        task=None,
        received={"weights": received},
        build=lambda weights: loaded(weights),
        family=VIT,
        architecture=architecture,
        kept=kept.get,
        keep=kept.__setitem__,
        fit=fit,
    )
    answer = TrainingWithOwnLayers(weighting="uniform", own=head, rate=2.5).train(context)
    assert kept["own"]["head.classifier.bias"].unique().tolist() == [8.0]
    assert set(answer.tensor_sets["weights"]) == set(received)
    assert answer.tensor_sets["weights"]["embedding.patches.weight"].unique().tolist() == [3.0]


def test_the_smallest_type_may_have_a_rate_of_its_own():
    method = inclusive(kind=RatesByType)
    assert [method.client_step(Order(0, a)).rate for a in method.candidates] == [1.0, 1.0, 2.5]  # largest first


def test_rounds_with_heads_of_the_devices_own(tmp_path):
    keys = METHODS["inclusivefl"] | {"inclusivefl.head": "own", "personal.every": 1, "test-fraction": 0.25}
    engine, scorer = started(small_config(tmp_path, **keys | {"examples-per-device": 60}))
    grid = simulated_grid()
    before = {a: dict(w) for a, w in engine.method.weights.items()}
    results = [engine.run_round(grid, number, scorer) for number in (1, 2)]
    assert all(d["outcome"] == "trained" for r in results for d in r.devices)
    assert results[-1].record["score"] is None
    assert results[-1].record["personal_score"] is not None
    assert any(not torch.equal(before[a][n], w[n]) for a, w in engine.method.weights.items() for n in w)
