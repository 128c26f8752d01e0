"""Models of transformers that are made from a configuration and cut by themselves."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.encoders import encoder, model
from tests.tasks.text_files import PAD, SEP, VOCABULARY
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.initial import load_initial, weights_file
from wildflower.models.levels import Levels
from wildflower.models.of_transformers import types_of
from wildflower.models.traced.own_module import own_module
from wildflower.models.weights import with_weights

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
BERT = {"model_type": "bert", **SIZES}
AUTO = "transformers:AutoModelForSequenceClassification"


def family_of(name=AUTO, model=BERT, **more):
    spec = {"name": name, "model": model, "input_shape": [6], "classes": 3, "tokens": True, "pad_id": 1}
    return make_family(spec | {"vocabulary": 20} | more)


def test_a_table_of_settings_makes_a_model_of_the_tasks_tokens_and_classes():
    family = family_of()
    assert family.tensors(family.full())["bert.embeddings.word_embeddings.weight"].shape == (20, 16)
    assert family.tensors(family.full())["classifier.weight"].shape == (3, 16)
    assert {"bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.0.intermediate.dense"} <= set(
        family.groups
    )
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    assert "model" not in family.spec()
    assert family.pad_id == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "depths", "parameters"),
    [
        # RecipFL, Table 2: 110M and 67M.
        ({"model_type": "bert"}, [], [109_484_547]),
        ({"model_type": "distilbert"}, [], [66_955_779]),
        # InclusiveFL's strong, medium and weak devices: 12, 8 and 4 layers of RoBERTa-base.
        (
            {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1},
            [4, 8, 12],
            [124_647_939, 96_296_451, 67_944_963],
        ),
    ],
)
def test_models_of_papers_have_the_published_numbers_of_parameters(settings, depths, parameters):
    vocabulary = {"roberta": 50_265}.get(settings["model_type"], 30_522)
    family = family_of(model=settings, input_shape=[8], vocabulary=vocabulary, depths=depths)
    found = [sum(math.prod(spec.shape) for spec in family.tensors(arch).values()) for arch in family.candidates([1])]
    assert found == parameters


def test_padding_plays_no_part():
    family = family_of()
    torch.manual_seed(0)
    weights = family.initial()
    network = with_weights(family, family.full(), weights).eval()
    config = transformers.BertConfig(vocab_size=20, num_labels=3, **SIZES)
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.load_state_dict(weights, strict=False)
    tokens = torch.tensor([[2, 7, 9, 4, 1, 1], [3, 3, 8, 5, 1, 1]])
    with torch.no_grad():
        assert torch.allclose(network(tokens), theirs(tokens[:, :4]).logits, atol=1e-5)


def test_a_cut_comes_as_the_class_of_transformers():
    family = family_of(
        "transformers:DistilBertForSequenceClassification", {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    )
    arch = family.width(0.5)
    torch.manual_seed(0)
    network = with_weights(family, arch, family.place(arch).gather(family.initial())).eval()
    found = own_module(family, arch, network)
    assert type(found) is transformers.DistilBertForSequenceClassification
    tokens = torch.tensor([[2, 7, 9, 4, 1, 1]])
    with torch.no_grad():
        assert torch.allclose(found(tokens), network(tokens), atol=1e-5)


def test_a_label_of_every_token_is_an_answer_of_classes_by_positions():
    family = family_of("transformers:AutoModelForTokenClassification")
    assert family.build(family.smallest())(torch.ones(2, 6, dtype=torch.int64)).shape == (2, 3, 6)


def test_a_folder_has_sizes_and_weights_also_those_of_the_encoder_alone(tmp_path):
    torch.manual_seed(0)
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=22, pad_token_id=1, **SIZES))
    encoder.save_pretrained(tmp_path)
    family = family_of(model=str(tmp_path))
    assert family.tensors(family.full())["bert.embeddings.word_embeddings.weight"].shape == (22, 16)
    found = load_initial(weights_file(str(tmp_path)), family)
    name = "encoder.layer.1.attention.self.key.weight"
    assert torch.equal(found.tensors[f"bert.{name}"], encoder.state_dict()[name])
    assert set(found.missing) == {"classifier.weight", "classifier.bias"}


def test_levels_by_hand_are_made_from_a_configuration_too():
    levels = [{"config": {**BERT, "vocab_size": 20, "num_hidden_layers": layers}} for layers in (1, 2)]
    family = make_family({"name": AUTO, "levels": levels, "input_shape": [6], "classes": 3, "tokens": True})
    assert isinstance(family, Levels)
    small, large = (set(family.tensors(family.width(rate))) for rate in (0.5, 1.0))
    assert small < large
    assert not any(".layer.1." in name for name in small)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", r"is made from a configuration: family-arguments = .*, or a folder with its config\.json"),
        ({"hidden_size": 16}, "model has no model_type, such as 'bert'"),
        ({"model_type": "brt"}, "model_type = 'brt'.*did you mean 'bert'"),
        ("/nowhere/at/all", "no configuration in /nowhere/at/all"),
        ({**BERT, "hidden_size": 15}, r"fails: ValueError: The hidden size \(15\)"),
    ],
)
def test_a_configuration_that_is_missing_or_wrong_is_said(model, words):
    with pytest.raises(ValueError, match=words):
        family_of(model=model)


KINDS = ("bert", "roberta", "distilbert")


def small(kind="bert", **changes):
    return make_family(encoder(kind, **changes))


@pytest.fixture(scope="module")
def adapted():
    """Of each kind a model with adapters and LoRA, of which the rest is frozen."""
    frozen = {kind: ["embeddings", "transformer" if kind == "distilbert" else "encoder"] for kind in KINDS}
    return {kind: small(kind, adapter=3, lora=2, lora_alpha=5, freeze=frozen[kind]) for kind in KINDS}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_a_head_gets_one_and_is_else_that_of_transformers(kind):
    """Hidden states behind the last layer, with the mask, are those of the library's own model."""
    torch.manual_seed(0)
    family = small(kind, classes=4, pooling="cls", input_shape=[5])
    weights = family.initial()
    network = with_weights(family, family.full(), weights).eval()
    tokens = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 1, 1]])
    config = transformers.AutoConfig.for_model(**model(kind), vocab_size=40, pad_token_id=1)
    theirs = transformers.AutoModel.from_config(config).eval()
    theirs.load_state_dict(weights, strict=False)
    states = theirs(input_ids=tokens, attention_mask=(tokens != 1).long()).last_hidden_state[:, 0]
    head = (weights[f"classifier.out_proj.{name}"] for name in ("weight", "bias"))
    torch.testing.assert_close(network(tokens), torch.nn.functional.linear(states, *head))


def test_a_pair_has_the_token_types_that_the_tokenizer_gives_it(tmp_path):
    """Padded pairs of several lengths, against all that BERT's own tokenizer returns."""
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(
        ["the film", "a", "we saw it and"],
        ["good plot .", "bad film not great", "a"],
        padding=True,
        return_tensors="pt",
    )
    assert batch["token_type_ids"].sum(1).tolist() == [4, 5, 2]  # of the second text's tokens and a separator each
    tokens = batch["input_ids"]
    assert torch.equal(types_of(tokens, SEP) * (tokens != PAD), batch["token_type_ids"])
    alone = tokenizer(["the film", "a"], padding=True, return_tensors="pt")["input_ids"]
    assert not (types_of(alone, SEP) * (alone != PAD)).any()


@pytest.mark.thorough
def test_a_model_goes_by_token_types_if_it_has_several():
    family = small(depth=1, separator=3, input_shape=[5])
    network = family.build(family.full()).eval()
    weights = network.state_dict()
    tokens = torch.tensor([[5, 3, 6, 7, 3]])
    before = network(tokens)
    weights["embeddings.token_type_embeddings.weight"][1].normal_()
    assert (family.pair_separator, small(depth=1, separator=3, type_vocab_size=1).pair_separator) == (3, -1)
    assert not torch.allclose(before, network(tokens))
    assert make_family(json.loads(json.dumps(family.spec()))) == family


@pytest.mark.thorough
def test_a_model_without_a_head_answers_for_every_token_if_the_task_labels_them():
    family = small(depth=1, labels="tokens")
    network = family.build(family.full()).eval()
    tokens = torch.randint(2, 40, (2, 9))
    padded = torch.where(torch.arange(9) < 5, tokens, 1)
    assert network(tokens).shape == (2, 3, 9)
    shorter = small(depth=1, labels="tokens", input_shape=[5])
    other = with_weights(shorter, shorter.full(), network.state_dict()).eval()
    torch.testing.assert_close(network(padded)[:, :, :5], other(tokens[:, :5]))


@pytest.mark.thorough
def test_depths_are_what_devices_get():
    family = small(depths=[1, 3])
    assert [len(layers(family, arch)) for arch in family.candidates([1, 0.5])] == [3, 1]
    assert family.width(0.3) == family.candidates([1])[1]
    assert family.width(0.5) == family.full()
    for depths, words in (([1, 2], "end with depth = 3"), ([0, 3], "numbers of blocks such as"), ([3, 1], "ascend")):
        with pytest.raises(ValueError, match=words):
            small(depths=depths)
    with pytest.raises(ValueError, match="depths are of one stack of blocks, and there are 0"):
        small(depths=[1, 3], early_exits=True)


def layers(family, arch):
    return {name.split(".")[2] for name in family.tensors(arch) if ".layer." in name}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_is_trained_where_the_rest_is_frozen(kind, adapted):
    """LoRA's tensors have the names that `peft` gives them in a file, but for the prefix base_model.model."""
    where, family = "transformer" if kind == "distilbert" else "encoder", adapted[kind]
    ends = ("attention.out_lin", "ffn.lin2") if kind == "distilbert" else ("attention.output.dense", "output.dense")
    queries = ("attention.q_lin", "attention.v_lin")
    queries = queries if kind == "distilbert" else ("attention.self.query", "attention.self.value")
    shapes = {"down.weight": (3, 16), "down.bias": (3,), "up.weight": (16, 3), "up.bias": (16,)}
    added = {f"{end}.adapter.{name}": shape for end in ends for name, shape in shapes.items()}
    matrices = {"lora_A.weight": (2, 16), "lora_B.weight": (16, 2)}
    added |= {f"{query}.{name}": shape for query in queries for name, shape in matrices.items()}
    expected = {f"{where}.layer.{n}.{name}": shape for n in range(3) for name, shape in added.items()}
    specs = family.tensors(family.full())
    trained = {name: spec.shape for name, spec in specs.items() if not spec.frozen and "classifier" not in name}
    assert trained == expected
    # A width cuts what it lies behind, and neither an adapter's channels nor a rank.
    half = family.tensors(family.width(0.5))
    assert half[f"{where}.layer.0.{ends[0]}.adapter.up.weight"].shape == (8, 3)
    assert half[f"{where}.layer.0.{queries[0]}.lora_A.weight"].shape == (2, 8)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_lora_is_a_product_that_is_added_to_weights_and_an_adapter_begins_as_nothing(kind, adapted):
    torch.manual_seed(0)
    family, plain = adapted[kind], small(kind)
    network, other = family.build(family.full()).eval(), plain.build(plain.full()).eval()
    weights = {name: torch.randn_like(t) if ".lora_" in name else t for name, t in family.initial().items()}
    for name, tensor in weights.items():
        if ".adapter.up." in name:
            tensor.zero_()
    network.load_state_dict(weights)
    merged = {name: weights[name].clone() for name in plain.tensors(plain.full())}
    for name in [name for name in weights if ".lora_A." in name]:
        part = name.removesuffix(".lora_A.weight")
        merged[f"{part}.weight"] += 5 / 2 * weights[f"{part}.lora_B.weight"] @ weights[name]
    other.load_state_dict(merged)
    tokens = torch.randint(2, 40, (2, 9))
    torch.testing.assert_close(network(tokens), other(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
def test_lora_is_what_peft_computes():
    """The numbers are those of peft 0.21.2 over transformers' BertModel (5.23.0, PyTorch's own attention, eval).

    They are the first token's states of `get_peft_model(model, LoraConfig(r=2))` (alpha 8, queries and values), with
    all tensors filled as here under the same names. Typed in once: the project needs no peft. Without the adapter the
    first number is 0.3843307.
    """
    sizes = {"vocabulary": 10, "hidden": 4, "heads": 2, "depth": 2, "mlp": 4}
    spec = encoder(input_shape=[4], classes=4, pooling="cls", lora=2, **sizes)
    spec["model"]["max_position_embeddings"] = 8
    family = make_family(spec)
    network = family.build(family.full()).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = torch.arange(parameter.numel(), dtype=torch.float32) + len(name)
            parameter.copy_(0.5 * torch.sin(values).view(parameter.shape))
        network.get_parameter("classifier.out_proj.weight").copy_(torch.eye(4))
        network.get_parameter("classifier.out_proj.bias").zero_()
    states = torch.tensor([[0.3597882, 0.3165033, 0.5689790, 0.7245677], [0.3393714, 0.3479678, 0.5630537, 0.7780917]])
    torch.testing.assert_close(network(torch.tensor([[2, 3, 4, 5], [6, 7, 1, 1]])), states, atol=2e-6, rtol=0)


@pytest.mark.thorough
def test_what_is_added_is_frozen_by_its_own_name(adapted):
    name = "encoder.layer.0.output.dense.adapter"
    family = replace(adapted["bert"], freeze=("encoder", name))
    frozen = {n for n, spec in family.tensors(family.full()).items() if spec.frozen and ".adapter." in n}
    assert frozen == {f"{name}.{part}" for part in ("down.weight", "down.bias", "up.weight", "up.bias")}


@pytest.mark.thorough
def test_a_file_of_peft_is_told_from_others_by_its_names(tmp_path, adapted):
    """What `save_pretrained` of a peft model writes: LoRA's tensors alone, behind base_model.model."""
    family = adapted["bert"]
    drawn = {name: torch.randn_like(tensor) for name, tensor in family.initial().items() if ".lora_" in name}
    save_file({f"base_model.model.{name}": tensor for name, tensor in drawn.items()}, tmp_path / "adapter.safetensors")
    found = load_initial(tmp_path / "adapter.safetensors", family, {"base_model.model": ""})
    assert found.left_over == ()
    assert found.tensors.keys() == drawn.keys()


@pytest.mark.thorough
def test_hidden_sizes_are_those_of_inclusivefls_heterofl():
    """768, 624 and 456 channels of RoBERTa, while the inside of the MLP stays 3,072."""
    sizes = {"hidden": 768, "depth": 1, "heads": 12, "mlp": 3072, "type_vocab_size": 1}
    family = make_family(encoder("roberta", **sizes, keep=["*.intermediate"]))
    cuts = [family.tensors(family.width(rate)) for rate in (1, 13 / 16, 19 / 32)]
    assert [cut["embeddings.word_embeddings.weight"].shape[1] for cut in cuts] == [768, 624, 456]
    assert {cut["encoder.layer.0.intermediate.dense.bias"].shape for cut in cuts} == {(3072,)}


@pytest.mark.thorough
def test_a_step_keeps_no_attention_scores_unless_they_are_dropped():
    """Twice the sequence is twice the activations, and a mask: with scores it would be four times as much."""

    def peak(length, dropout):
        spec = encoder(input_shape=[length], depth=2, hidden=32, mlp=32, vocabulary=1000)
        spec["model"] |= {"max_position_embeddings": 512, "attention_probs_dropout_prob": dropout}
        family = make_family(spec)
        return cost(family, family.full(), batch_size=8, optimizer="sgd").peak_training_memory_bytes

    scores = 4 * 8 * 4 * 256 * 256  # of one layer, of 4 heads
    assert peak(256, 0.0) < 2.05 * peak(128, 0.0) + scores / 4
    assert peak(256, 0.1) > peak(256, 0.0) + 2 * scores


@pytest.mark.thorough
def test_a_folder_may_have_other_settings_on_top(tmp_path):
    config = transformers.BertConfig(vocab_size=22, pad_token_id=1, **SIZES)
    config.save_pretrained(tmp_path)
    one = family_of(model={"name": str(tmp_path), "num_hidden_layers": 1, "hidden_dropout_prob": 0.0})
    assert not any(".layer.1." in name for name in one.tensor_names())
    with pytest.raises(ValueError, match="model has 'num_hiden_layers'; did you mean 'num_hidden_layers'"):
        family_of(model={"name": str(tmp_path), "num_hiden_layers": 1})


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"lora": -1}, "lora = -1: Input should be greater than or equal to 0"),
        ({"lora": 2, "lora_alpha": 0}, "lora_alpha = 0: Input should be greater than 0"),
        ({"lora": 2, "lora_alpha": math.inf}, "lora_alpha = inf: Input should be less than inf"),
        ({"adapter": 2.5}, "adapter = 2.5: Input should be a valid integer"),
        ({"pooling": "max"}, "pooling = 'max': Input should be 'mean' or 'cls'"),
        ({"adaptor": 2}, "adaptor = 2: Extra inputs are not permitted"),
        ({"lora": 2, "lora_of": ["*.querry"]}, r"no linear layer has a name such as \*\.querry"),
    ],
)
def test_what_cannot_be_added_is_said(added, words):
    with pytest.raises(ValueError, match=words):
        family_of("transformers:AutoModel", arguments=added)


def test_a_batch_that_is_cut_to_its_longest_text_is_padded_again():
    """Tasks cut batches, and a graph has one length of texts."""
    family = small(depth=1, labels="tokens")
    network = family.build(family.full()).eval()
    tokens = torch.randint(2, 40, (2, 9))
    tokens[:, 5:] = 1
    assert torch.equal(network(tokens)[:, :, :5], network(tokens[:, :5]))
    assert network.exits(tokens[:, :5])[0].shape == (2, 3, 5)
