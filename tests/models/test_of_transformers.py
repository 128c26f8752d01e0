"""Models of transformers that are made from a configuration and cut by themselves."""

import json

import pytest
import torch
import transformers

from wildflower.models.family import make_family
from wildflower.models.initial import load_initial, weights_file
from wildflower.models.levels import Levels
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
