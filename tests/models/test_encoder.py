import json
import math

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.tasks.text_files import PAD, SEP, VOCABULARY
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.initial import load_initial, weights_file
from wildflower.models.weights import with_weights

torch.set_num_threads(1)

ROBERTA = {
    "name": "encoder",
    "input_shape": [128],
    "classes": 2,
    "kind": "roberta",
    "vocabulary": 50265,
    "hidden": 768,
    "depth": 12,
    "mlp": 3072,
    "positions": 514,
    "token_types": 1,
    "pad_id": 1,
    "head": "dense",
}
SMALL = {
    "name": "encoder",
    "input_shape": [9],
    "classes": 3,
    "vocabulary": 40,
    "hidden": 16,
    "heads": 4,
    "depth": 3,
    "mlp": 20,
    "positions": 16,
    "pad_id": 1,
    "dropout": 0.0,
}
KINDS = ("bert", "roberta", "distilbert")


def small(**changes):
    return make_family({**SMALL, **changes})


def parameters(family, arch):
    return sum(math.prod(spec.shape) for spec in family.tensors(arch).values())


@pytest.mark.thorough
def test_roberta_base_has_the_published_numbers_of_parameters():
    family = make_family({**ROBERTA, "depths": [4, 8, 12]})
    assert [parameters(family, arch) for arch in family.candidates([1])] == [124_647_170, 96_295_682, 67_944_194]
    # HeteroFL's: hidden sizes 624 and 456 in 12 heads, while the inside of the MLP stays 3,072.
    family = make_family({**ROBERTA, "cut_mlp": False})
    cuts = family.candidates([0.59375, 1, 0.8125])
    assert [parameters(family, arch) for arch in cuts] == [124_647_170, 96_879_794, 67_052_906]
    assert family.tensors(cuts[1])["embeddings.word_embeddings.weight"].shape == (50265, 624)


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_round_trips_and_its_layers_are_one_stack(kind):
    family = small(kind=kind)
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    layers = family.stacks["encoder"]
    assert len(layers) == 3
    names = set(family.tensors(family.full()))
    inside = [{name for name in names if name.startswith(f"{layer}.")} for layer in layers]
    assert len({len(found) for found in inside}) == 1
    rest = names - set().union(*inside)
    assert {name.partition(".")[0] for name in rest} == {"embeddings", "classifier"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_says_what_transformers_does(kind):
    """Hidden states behind the last layer, with the mask, are those of the library's own model."""
    torch.manual_seed(0)
    family = small(kind=kind, classes=16, pooling="cls")
    network = family.build(family.full()).eval()
    network.classifier = torch.nn.Identity()
    tokens = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 1, 1]])
    name = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}[kind]
    common = {"vocab_size": 40, "max_position_embeddings": 16, "pad_token_id": 1}
    own = (
        {"dim": 16, "n_layers": 3, "n_heads": 4, "hidden_dim": 20}
        if kind == "distilbert"
        else {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 20}
    )
    theirs = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**common, **own)).eval()
    theirs.load_state_dict(network.state_dict(), strict=False)
    states = theirs(input_ids=tokens, attention_mask=(tokens != 1).long()).last_hidden_state
    torch.testing.assert_close(network(tokens), states[:, 0])


def test_a_pair_has_the_token_types_that_the_tokenizer_gives_it(tmp_path):
    """Padded pairs of several lengths, against transformers' model with all that BERT's own tokenizer returns."""
    torch.manual_seed(0)
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    firsts, seconds = ["the film", "a", "we saw it and"], ["good plot .", "bad film not great", "a"]
    batch = tokenizer(firsts, seconds, padding=True, return_tensors="pt")
    assert batch["token_type_ids"].sum(1).tolist() == [4, 5, 2]  # of the second text's tokens and a separator each
    family = small(vocabulary=len(VOCABULARY), pad_id=PAD, separator=SEP, classes=16, pooling="cls")
    network = family.build(family.full()).eval()
    network.classifier = torch.nn.Identity()
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 20}
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY), max_position_embeddings=16, pad_token_id=PAD, type_vocab_size=2, **sizes
    )
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    theirs.load_state_dict(network.state_dict(), strict=False)
    torch.testing.assert_close(network(batch["input_ids"]), theirs(**batch).last_hidden_state[:, 0])
    # Without the types, which is what single texts have, it is something else.
    without = theirs(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state[:, 0]
    assert (network(batch["input_ids"]) - without).abs().max() > 0.001
    # Single texts are to the bit what a family without a separator says.
    alone = tokenizer([*firsts, "the film [PAD] was [PAD]"], padding=True, return_tensors="pt")["input_ids"]
    plain = small(vocabulary=len(VOCABULARY), pad_id=PAD, classes=16, pooling="cls")
    other = plain.build(plain.full()).eval()
    other.classifier = torch.nn.Identity()
    other.load_state_dict(network.state_dict())
    assert torch.equal(network(alone), other(alone))


@pytest.mark.parametrize("changes", [{"token_types": 1}, {"kind": "roberta", "token_types": 1}, {"kind": "distilbert"}])
def test_a_model_of_one_token_type_or_none_takes_pairs_as_they_are(changes):
    torch.manual_seed(0)
    family, plain = small(separator=3, **changes), small(**changes)
    network, other = family.build(family.full()).eval(), plain.build(plain.full()).eval()
    other.load_state_dict(network.state_dict())
    tokens = torch.tensor([[2, 5, 3, 6, 7, 3, 1], [2, 5, 6, 7, 3, 8, 3]])
    assert torch.equal(network(tokens), other(tokens))


@pytest.mark.parametrize("separator", [-2, 40, True])
def test_a_separator_is_a_token(separator):
    with pytest.raises(ValueError, match=r"separator.* must be|separator must be 0 to 39, or -1 for none"):
        small(separator=separator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", ["sequence", "tokens"])
def test_padding_changes_nothing(kind, labels):
    torch.manual_seed(0)
    family = small(kind=kind, labels=labels)
    network = family.build(family.full()).eval()
    tokens = torch.randint(2, 40, (2, 5))
    padded = torch.cat([tokens, torch.ones(2, 4, dtype=torch.int64)], dim=1)
    said, with_padding = network(tokens), network(padded)
    if labels == "tokens":
        assert said.shape == (2, 3, 5)
        with_padding = with_padding[:, :, :5]
    torch.testing.assert_close(said, with_padding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_width_takes_the_leading_channels_of_every_head(kind):
    family = small(kind=kind)
    arch = family.width(0.5)
    assert arch == Architecture((2, 10, 3))
    weights = {name: torch.arange(tensor.numel()).view(tensor.shape) * 1.0 for name, tensor in family.initial().items()}
    cut = family.place(arch).gather(weights)
    query = "transformer.layer.0.attention.q_lin" if kind == "distilbert" else "encoder.layer.0.attention.self.query"
    out = "transformer.layer.2.attention.out_lin" if kind == "distilbert" else "encoder.layer.2.attention.output.dense"
    rows = [0, 1, 4, 5, 8, 9, 12, 13]  # two of the four channels of each of four heads
    assert torch.equal(cut[f"{query}.weight"], weights[f"{query}.weight"][rows][:, :8])
    assert torch.equal(cut[f"{query}.bias"], weights[f"{query}.bias"][rows])
    assert torch.equal(cut[f"{out}.weight"], weights[f"{out}.weight"][:8][:, rows])
    assert torch.equal(cut[f"{out}.bias"], weights[f"{out}.bias"][:8])
    network = with_weights(family, arch, cut)
    assert network(torch.randint(2, 40, (2, 9))).shape == (2, 3)


def test_whole_heads_are_the_other_cut():
    family = small(cut="heads", cut_mlp=False)
    arch = family.width(0.5)
    assert arch == Architecture((2, 3))
    weights = family.initial()
    name = "encoder.layer.1.attention.self.key.weight"
    assert torch.equal(family.place(arch).gather(weights)[name], weights[name][:8, :8])


def test_depths_are_what_devices_get():
    family = small(depths=[1, 2])
    assert [arch.widths for arch in family.candidates([1, 0.5])] == [(4, 20, 2), (4, 20, 1)]
    assert family.full().widths == (4, 20, 2)
    assert family.smallest() == family.width(0.5) == Architecture((4, 20, 1))
    assert "encoder.layer.1.output.dense.weight" not in family.tensors(family.smallest())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_early_exits_are_heads_behind_the_depths(kind):
    torch.manual_seed(0)
    family = small(kind=kind, depths=[1, 2, 3], early_exits=True, pooling="cls")
    assert list(family.segments) == ["exit1", "exit2", "classifier"]
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    weights = family.initial()
    tokens = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 1, 1]])
    network = with_weights(family, family.full(), weights).eval()
    said = network.exits(tokens)
    assert len(said) == 3
    assert torch.equal(network(tokens), said[2])
    for exit in (1, 2, 3):
        cut = family.up_to(exit)
        assert cut == Architecture((4, 20, exit))
        assert family.exit_of(cut) == exit
        heads = {name.partition(".")[0] for name in family.tensors(cut)} & set(family.segments)
        assert heads == set(list(family.segments)[:exit])
        shorter = with_weights(family, cut, family.place(cut).gather(weights)).eval()
        assert [torch.equal(*pair) for pair in zip(shorter.exits(tokens), said, strict=False)] == [True] * exit
        # The same layers with one head alone, which is the one behind them.
        alone = small(kind=kind, depths=[exit], pooling="cls")
        head = list(family.segments)[exit - 1]
        kept = {name: weights[name.replace("classifier.", f"{head}.")] for name in alone.tensors(alone.full())}
        assert torch.equal(with_weights(alone, alone.full(), kept).eval()(tokens), said[exit - 1])
    assert family.up_to(2, 0.5) == Architecture((2, 10, 2))


@pytest.mark.thorough
def test_the_cost_of_early_exits_is_that_of_training_all_heads():
    one, several = small(depths=[1, 2]), small(depths=[1, 2], early_exits=True)
    assert parameters(several, several.full()) - parameters(one, one.full()) == 16 * 3 + 3
    flops = [cost(family, family.full(), batch_size=2, optimizer="sgd").training_flops for family in (one, several)]
    assert flops[1] - flops[0] == 3 * 2 * 16 * 3  # one more linear layer, forward and for both of its gradients


@pytest.mark.parametrize("depths", [[], [2]])
def test_early_exits_need_two_depths(depths):
    with pytest.raises(ValueError, match="two numbers of layers or more"):
        small(depths=depths, early_exits=True)


def test_with_early_exits_a_network_ends_at_one():
    family = small(depths=[1, 3], early_exits=True)
    with pytest.raises(ValueError, match=r"layers must be one of \[1, 3\], not 2"):
        family.first_layers(2)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_lie_behind_attention_and_mlp_and_are_trained_where_the_rest_is_frozen(kind):
    torch.manual_seed(0)
    where = "transformer" if kind == "distilbert" else "encoder"
    plain, family = small(kind=kind), small(kind=kind, adapter=3, freeze=["embeddings", where])
    specs = family.tensors(family.full())
    added = {name: spec.shape for name, spec in specs.items() if name not in plain.tensors(plain.full())}
    shapes = {"down.weight": (3, 16), "down.bias": (3,), "up.weight": (16, 3), "up.bias": (16,)}
    paths = ("attention.out_lin", "ffn.lin2") if kind == "distilbert" else ("attention.output.dense", "output.dense")
    assert added == {
        f"{where}.layer.{layer}.{path}.adapter.{name}": shape
        for layer in range(3)
        for path in paths
        for name, shape in shapes.items()
    }
    trained = {name for name, spec in specs.items() if not spec.frozen}
    assert trained == {*added, "classifier.out_proj.weight", "classifier.out_proj.bias"}
    # An adapter that adds nothing is no adapter.
    network, other = family.build(family.full()).eval(), plain.build(plain.full()).eval()
    other.load_state_dict({name: tensor for name, tensor in network.state_dict().items() if name not in added})
    tokens = torch.randint(2, 40, (2, 5))
    assert not torch.equal(network(tokens), other(tokens))
    for name, parameter in network.named_parameters():
        if ".adapter.up." in name:
            torch.nn.init.zeros_(parameter)
    torch.testing.assert_close(network(tokens), other(tokens))


def test_an_adapter_is_frozen_by_its_own_name_and_cut_with_what_it_lies_behind():
    name = "encoder.layer.0.output.dense.adapter"
    family = small(adapter=3, freeze=["encoder", name])
    frozen = {name for name, spec in family.tensors(family.full()).items() if spec.frozen and ".adapter." in name}
    assert frozen == {f"{name}.{part}" for part in ("down.weight", "down.bias", "up.weight", "up.bias")}
    arch = family.width(0.5)
    assert family.tensors(arch)[f"{name}.up.weight"].shape == (8, 3)
    network = with_weights(family, arch, family.place(arch).gather(family.initial()))
    assert network(torch.randint(2, 40, (2, 9))).shape == (2, 3)
    with pytest.raises(ValueError, match="adapter must be a number of channels, or 0 for none, not -1"):
        small(adapter=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_adds_to_queries_and_values_and_is_trained_where_the_rest_is_frozen(kind):
    """Its tensors have the names that `peft` gives them in a file, but for the prefix base_model.model."""
    torch.manual_seed(0)
    where = "transformer" if kind == "distilbert" else "encoder"
    plain, family = small(kind=kind), small(kind=kind, lora=3, freeze=["embeddings", where])
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    specs = family.tensors(family.full())
    added = {name: spec.shape for name, spec in specs.items() if name not in plain.tensors(plain.full())}
    paths = (
        ("attention.q_lin", "attention.v_lin")
        if kind == "distilbert"
        else ("attention.self.query", "attention.self.value")
    )
    assert added == {
        f"{where}.layer.{layer}.{path}.{name}.weight": shape
        for layer in range(3)
        for path in paths
        for name, shape in {"lora_A": (3, 16), "lora_B": (16, 3)}.items()
    }
    trained = {name for name, spec in specs.items() if not spec.frozen}
    assert trained == {*added, "classifier.out_proj.weight", "classifier.out_proj.bias"}
    network = family.build(family.full()).eval()
    assert {name for name, parameter in network.named_parameters() if parameter.requires_grad} == trained
    # B is 0 at first, so that the network says what it would without.
    weights = network.state_dict()
    other = plain.build(plain.full()).eval()
    other.load_state_dict({name: weights[name] for name in plain.tensors(plain.full())})
    tokens = torch.randint(2, 40, (2, 5))
    assert torch.equal(network(tokens), other(tokens))
    # Else it is the network whose weights are W + (alpha / r) B A.
    merged = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for name in added:
        torch.nn.init.normal_(weights[name])
    for layer in range(3):
        for path in paths:
            part = f"{where}.layer.{layer}.{path}"
            merged[f"{part}.weight"] += 8 / 3 * weights[f"{part}.lora_B.weight"] @ weights[f"{part}.lora_A.weight"]
    other.load_state_dict(merged)
    torch.testing.assert_close(network(tokens), other(tokens), atol=1e-5, rtol=1e-4)


def test_lora_is_what_peft_computes():
    """The numbers are those of peft 0.21.2 over transformers' BertModel (5.23.0, PyTorch's own attention, eval).

    They are the first token's states of `get_peft_model(model, LoraConfig(r=2))` (alpha 8, queries and values), with
    all tensors filled as here under the same names. Typed in once: the project needs no peft. Without the adapter the
    first number is 0.3843307.
    """
    sizes = {"classes": 4, "vocabulary": 10, "hidden": 4, "heads": 2, "depth": 2, "mlp": 4, "positions": 8}
    family = small(input_shape=[4], pooling="cls", lora=2, **sizes)
    network = family.build(family.full()).eval()
    network.classifier = torch.nn.Identity()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = torch.arange(parameter.numel(), dtype=torch.float32) + len(name)
            parameter.copy_(0.5 * torch.sin(values).view(parameter.shape))
    states = torch.tensor([[0.3597882, 0.3165033, 0.5689790, 0.7245677], [0.3393714, 0.3479678, 0.5630537, 0.7780917]])
    torch.testing.assert_close(network(torch.tensor([[2, 3, 4, 5], [6, 7, 1, 1]])), states, atol=2e-6, rtol=0)


def test_a_file_of_peft_is_told_from_others_by_its_names(tmp_path):
    """What `save_pretrained` of a peft model writes: LoRA's tensors alone, behind base_model.model."""
    torch.manual_seed(0)
    family = small(lora=3)
    drawn = {name: torch.randn_like(tensor) for name, tensor in family.initial().items() if ".lora_" in name}
    save_file({f"base_model.model.{name}": tensor for name, tensor in drawn.items()}, tmp_path / "adapter.safetensors")
    found = load_initial(tmp_path / "adapter.safetensors", family, {"base_model.model": ""})
    assert found.left_over == ()
    assert found.tensors.keys() == drawn.keys()
    with pytest.raises(ValueError, match=r"has no tensor of encoder: it has .*lora_A\.weight"):
        load_initial(tmp_path / "adapter.safetensors", small(), {"base_model.model": ""})


@pytest.mark.parametrize("cut", ["channels", "heads"])
def test_a_cut_of_lora_is_the_cut_of_the_weights_that_it_makes(cut):
    torch.manual_seed(0)
    family, plain = small(lora=3, lora_alpha=5, cut=cut), small(cut=cut)
    weights = {name: torch.randn_like(tensor) for name, tensor in family.initial().items()}
    part = "encoder.layer.2.attention.self.value"
    merged = {name: weights[name].clone() for name in plain.tensors(plain.full())}
    merged[f"{part}.weight"] += 5 / 3 * weights[f"{part}.lora_B.weight"] @ weights[f"{part}.lora_A.weight"]
    arch = family.width(0.5)
    small_parts = family.place(arch).gather(weights)
    assert small_parts[f"{part}.lora_A.weight"].shape == (3, 8)
    made = small_parts[f"{part}.weight"] + 5 / 3 * (
        small_parts[f"{part}.lora_B.weight"] @ small_parts[f"{part}.lora_A.weight"]
    )
    torch.testing.assert_close(made, plain.place(arch).gather(merged)[f"{part}.weight"])
    assert with_weights(family, arch, small_parts)(torch.randint(2, 40, (2, 9))).shape == (2, 3)


def test_lora_goes_with_its_layers_and_is_frozen_by_its_own_name():
    name = "encoder.layer.0.attention.self.query.lora_A"
    family = small(lora=2, adapter=3, depths=[1, 3], freeze=["encoder", name])
    specs = family.tensors(family.smallest())
    assert {n for n in specs if ".lora_" in n} == {
        f"encoder.layer.0.attention.self.{part}.{matrix}.weight"
        for part in ("query", "value")
        for matrix in ("lora_A", "lora_B")
    }
    assert {n for n, spec in specs.items() if spec.frozen and ".lora_" in n} == {f"{name}.weight"}
    assert not any(spec.frozen for n, spec in specs.items() if ".adapter." in n)


@pytest.mark.thorough
def test_the_price_of_lora_is_that_of_what_is_trained():
    freeze = ["embeddings", "encoder"]
    whole, family = small(), small(lora=2, freeze=freeze)
    prices = [cost(f, f.full(), batch_size=4, optimizer="adam") for f in (whole, family)]
    added = 3 * 2 * 2 * 2 * 16  # layers, queries and values, A and B, rank, channels
    assert prices[1].parameters - prices[0].parameters == added
    assert prices[1].payload_bytes - prices[0].payload_bytes == 4 * added
    assert prices[1].peak_training_memory_bytes < prices[0].peak_training_memory_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": -1}, "lora must be a rank of 1 to hidden = 16, or 0, not -1"),
        ({"lora": 17}, "lora must be a rank of 1 to hidden = 16, or 0, not 17"),
        ({"lora": 2, "lora_alpha": 0}, "lora_alpha must be a finite number above 0, not 0"),
        ({"lora": 2, "lora_alpha": math.inf}, "lora_alpha must be a finite number above 0, not inf"),
    ],
)
def test_a_rank_and_an_alpha_that_make_no_sense_are_errors(changes, words):
    with pytest.raises(ValueError, match=words):
        small(**changes)


@pytest.mark.thorough
def test_a_step_keeps_no_attention_scores():
    """Twice the sequence is twice the activations: with scores it would be four times as much."""
    short, long = (
        small(input_shape=[length], positions=512, depth=2, hidden=32, mlp=32, vocabulary=1000) for length in (128, 256)
    )
    peaks = [cost(f, f.full(), batch_size=8, optimizer="sgd").peak_training_memory_bytes for f in (short, long)]
    assert peaks[1] < 2.05 * peaks[0]
    dropped = small(
        input_shape=[256], positions=512, depth=2, hidden=32, mlp=32, vocabulary=1000, attention_dropout=0.1
    )
    scores = 4 * 8 * 4 * 256 * 256  # of one layer
    found = cost(dropped, dropped.full(), batch_size=8, optimizer="sgd").peak_training_memory_bytes
    assert found > peaks[1] + 2 * scores


@pytest.fixture
def folder(tmp_path):
    """A folder as `save_pretrained` writes it, with a pooler."""
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
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(tmp_path / "tiny-bert")
    return tmp_path / "tiny-bert"


def test_a_folder_says_the_sizes_and_holds_the_weights(folder):
    arguments = {"name": "encoder", "input_shape": [9], "classes": 3, "model": str(folder), "depths": [1, 2]}
    family = make_family(arguments)
    sizes = {"kind": "bert", "vocabulary": 40, "hidden": 16, "depth": 3, "heads": 4, "mlp": 20, "pad_id": 1}
    assert {key: family.spec()[key] for key in sizes} == sizes
    assert family.spec()["model"] == ""  # nodes need no folder
    found = load_initial(weights_file(str(folder)), family, {"classifier": False})
    assert found.missing == ("classifier.out_proj.weight", "classifier.out_proj.bias")
    theirs = transformers.BertModel.from_pretrained(folder)
    name = "encoder.layer.1.output.dense.weight"
    assert torch.equal(found.tensors[name], theirs.state_dict()[name])
    assert {left.partition(".")[0] for left in found.left_over} == {"pooler", "encoder"}  # the third layer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": 4}, "depth = 4, but .* has 3 layers"),
        ({"depths": [2, 4]}, "end at most at depth = 3"),
        ({"hidden": 32}, "hidden = 32, but .* has 16: leave it out"),
        ({"input_shape": [17]}, "at most 16 tokens"),
        ({"pooling": "max"}, "pooling must be one of mean, cls, not 'max'"),
        ({"pad_id": 40}, "pad_id = 40, but"),
        ({"dropout": 1.0}, "dropout must be"),
    ],
)
def test_what_a_folder_cannot_give_is_an_error(folder, changes, words):
    with pytest.raises(ValueError, match=words):
        make_family({"name": "encoder", "input_shape": [9], "classes": 3, "model": str(folder), **changes})


def test_a_folder_of_another_kind_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="is of kind 'gpt2', and there are bert, roberta, distilbert"):
        make_family({"name": "encoder", "model": str(tmp_path)})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no configuration of a model"):
        make_family({"name": "encoder", "model": str(tmp_path / "empty")})
