from dataclasses import replace

import pytest
import torch
from torch import nn

from wildflower.models.bert import Bert
from wildflower.models.family import make_family
from wildflower.models.layers import Channels
from wildflower.models.placement import chosen, leading
from wildflower.models.transformer import Attention, CutPatches, Patches
from wildflower.models.vit import VitTiny

torch.set_num_threads(1)

SMALL = VitTiny(input_shape=(1, 8, 8), hidden=24, depth=3, heads=4, mlp=16)


def test_attention_is_that_of_the_formula():
    torch.manual_seed(0)
    layer = Attention("attention", Channels("stream", 6, 6), Channels("heads", 3, 3), head_size=4)
    module = layer.build()
    x = torch.randn(2, 5, 6)
    mixed = []
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        query, key, value = (
            nn.functional.linear(x, linear.weight[rows], linear.bias[rows])
            for linear in (module.query, module.key, module.value)
        )
        mixed.append((query @ key.transpose(1, 2) / 2.0).softmax(2) @ value)
    torch.testing.assert_close(module(x), module.out(torch.cat(mixed, 2)))


@pytest.mark.parametrize("select", [leading, chosen(1)])
def test_cutting_heads_cuts_whole_heads(select):
    """A sub-model that lacks heads computes what the whole one does with those heads' share of the output at zero."""
    family = VitTiny(input_shape=(1, 8, 8), hidden=24, depth=1, heads=4, mlp=16)
    torch.manual_seed(0)
    whole = family.build(family.full()).eval()
    arch = family.architecture({"block0.heads": 2})
    placement = family.place(arch, select)
    model = family.build(arch).eval()
    model.load_state_dict(placement.gather(whole.state_dict()))
    kept = torch.zeros(24, dtype=torch.bool)
    kept[placement.coordinates["block0_attention.attention.query.weight"][0]] = True
    assert kept.sum() == 12
    assert kept.reshape(4, 6).all(1).sum() == 2
    whole.get_submodule("block0_attention.attention.out").weight.data[:, ~kept] = 0
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(model(images), whole(images))


@pytest.mark.parametrize("family", [SMALL, Bert(input_shape=(6,), classes=9, hidden=24, depth=3, heads=4, mlp=16)])
def test_names_of_kept_blocks_do_not_change(family):
    all_names = set(family.tensors(family.full()))
    without = set(family.tensors(family.architecture(without=["block1"])))
    assert all_names - without == {name for name in all_names if name.startswith("block1_")}
    assert family.removable == {f"block{n}": (f"block{n}.heads", f"block{n}.mlp") for n in (1, 2)}
    smallest = family.smallest()
    assert smallest.widths == (1, 1, 1, 0, 0, 0, 0)
    with pytest.raises(ValueError, match=r"widths of block1.heads, block1.mlp must all be 0 or none"):
        family.validate(type(smallest)((24, 4, 16, 4, 0, 4, 16)))
    with pytest.raises(ValueError, match=r"width of block0.heads must be 1 to 4, not 0"):
        family.validate(type(smallest)((24, 0, 0, 4, 16, 4, 16)))


def test_a_removed_block_is_the_identity():
    torch.manual_seed(0)
    whole = SMALL.build(SMALL.full()).eval()
    arch = SMALL.architecture(without=["block1"])
    model = SMALL.build(arch).eval()
    model.load_state_dict(SMALL.place(arch).gather(whole.state_dict()))
    for part in ("block1_attention.attention.out", "block1_mlp.fc2"):
        nn.init.zeros_(whole.get_submodule(part).weight)
        nn.init.zeros_(whole.get_submodule(part).bias)
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(model(images), whole(images))


def test_the_scaler_divides_what_is_cut_whether_it_trains_or_is_scored():
    family = VitTiny(input_shape=(1, 8, 8), hidden=24, depth=1, heads=4, mlp=16, scaler=True)
    arch = family.architecture({"stream": 6, "block0.heads": 2, "block0.mlp": 4})
    torch.manual_seed(0)
    scaled = family.build(arch)
    plain_family = VitTiny(input_shape=(1, 8, 8), hidden=24, depth=1, heads=4, mlp=16)
    plain = plain_family.build(arch)
    plain.load_state_dict(scaled.state_dict())
    images = torch.randn(3, 1, 8, 8)
    # The same by hand: queries, keys and values by 2/4, the inside by 4/16, what is added to the stream by 6/24.
    attention, mlp = plain.get_submodule("block0_attention.attention"), plain.get_submodule("block0_mlp")
    with torch.no_grad():
        for linear, rate in ((attention.query, 1 / 2), (attention.key, 1 / 2), (attention.value, 1 / 2)):
            linear.weight /= rate
            linear.bias /= rate
        for linear, rate in ((attention.out, 1 / 4), (mlp.fc1, 1 / 4), (mlp.fc2, 1 / 4)):
            linear.weight /= rate
            linear.bias /= rate
    torch.testing.assert_close(scaled.train()(images), plain(images))
    torch.testing.assert_close(scaled.eval()(images), plain.eval()(images))


def test_patches_are_cut_row_by_row():
    images = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    patches = CutPatches(2)(images)
    assert patches.shape == (2, *Patches(2).output_shape((3, 4, 6))) == (2, 6, 12)
    assert torch.equal(patches[1, 4], images[1, :, 2:4, 2:4].flatten())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 0}, "hidden must be a number >= 1, not 0"),
        ({"depth": 1.5}, "depth must be a number >= 1, not 1.5"),
        ({"heads": 5}, "hidden must be a multiple of heads, 192 is none of 5"),
        ({"mlp": True}, "mlp must be a number >= 1, not True"),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        VitTiny(**sizes)


def test_depths_take_the_place_of_widths():
    """Of 1, 2 and 3 blocks: a rate is a share of the blocks, rounded up to a depth that there is."""
    family = replace(SMALL, depths=(1, 3))
    whole, one = family.candidates((1.0, 0.5, 0.25))
    assert (whole, one) == (family.full(), family.first_layers(1))
    assert {name.partition("_")[0].partition(".")[0] for name in family.tensors(one)} == {"embedding", "block0", "head"}
    assert [family.width(rate) for rate in (0.2, 0.34, 0.5, 1.0)] == [one, whole, whole, whole]
    assert make_family(family.spec()) == family
    assert SMALL.candidates((1.0, 0.5)) == [SMALL.full(), SMALL.width(0.5)]


@pytest.mark.parametrize("depths", [(3, 1), (1, 2), (0, 3), (1, 4), (1, 1, 3), ("1", 3)])
def test_depths_must_be_numbers_of_blocks_up_to_all(depths):
    with pytest.raises(ValueError, match="depths must"):
        replace(SMALL, depths=depths)
