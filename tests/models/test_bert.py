import pytest
import torch
from torch import nn

from wildflower.models.bert import Bert, BertTiny
from wildflower.models.cost import cost

torch.set_num_threads(1)


def parameters(family, arch):
    return cost(family, arch, batch_size=1, optimizer="sgd").parameters


def test_parameters_are_those_of_bert_large():
    family = Bert()
    block = 2 * 2 * 1024 + 4 * (1024 * 1024 + 1024) + (1024 * 4096 + 4096) + (4096 * 1024 + 1024)
    assert block == 12_596_224  # as in BERT-large
    outside = 84 * 1024 + 80 * 1024 + 2 * 1024 + (1024 * 84 + 84)
    assert parameters(family, family.full()) == 24 * block + outside == 302_565_460


def test_bert_tiny_is_bert_with_other_sizes():
    tiny, same = BertTiny(), Bert(hidden=128, depth=2, heads=2, mlp=512)
    assert parameters(tiny, tiny.full()) == parameters(same, same.full()) == 428_628


def test_hidden_256_goes_with_four_heads():
    family = Bert()
    arch = family.width(0.25)
    assert arch.widths[:3] == (256, 4, 1024)
    six_blocks = family.architecture(
        dict(zip(family.groups, arch.widths, strict=True)), [f"block{n}" for n in range(6, 24)]
    )
    with torch.device("meta"):
        model = family.build(six_blocks)
    assert model.get_submodule("block0_attention.attention.query").weight.shape == (256, 256)
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters(family, six_blocks) == 4_802_644


def test_the_next_character_follows_from_any_position():
    torch.manual_seed(0)
    family = Bert(input_shape=(6,), classes=9, hidden=24, depth=1, heads=2, mlp=16)
    model = family.build(family.full()).eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for position in range(6):
        changed = tokens.clone()
        changed[0, position] = 7
        assert not torch.allclose(model(tokens), model(changed), atol=1e-6), position
    assert not torch.allclose(model(tokens), model(tokens[:, [1, 0, 2, 3, 4, 5]]), atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [(torch.optim.SGD, 0.05), (torch.optim.AdamW, 3e-3)])
def test_it_learns_to_repeat_a_character_seen_earlier(optimizer):
    torch.manual_seed(0)
    family = Bert(input_shape=(4,), classes=5, hidden=24, depth=1, heads=2, mlp=32)
    model = family.build(family.full())
    make, rate = optimizer
    optim = make(model.parameters(), lr=rate)
    for _ in range(250):
        tokens = torch.randint(5, (32, 4))
        loss = nn.functional.cross_entropy(model(tokens), tokens[:, 1])
        optim.zero_grad()
        loss.backward()
        optim.step()
    tokens = torch.randint(5, (200, 4))
    assert (model(tokens).argmax(1) == tokens[:, 1]).float().mean() > 0.95


def test_images_are_refused():
    with pytest.raises(ValueError, match=r"bert: input_shape must be \(sequence,\) of tokens, not \(1, 28, 28\)"):
        Bert(input_shape=(1, 28, 28))
