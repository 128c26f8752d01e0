import pytest
import torch

from wildflower.models.architecture import Architecture
from wildflower.models.lenet import LeNet5
from wildflower.models.placement import Axis, Placement, chosen, leading, rolling, spread


def place(select, kept, full=(4, 3), repeat=1):
    """A weight of `full` channels in and out, and a classifier behind a flatten with `repeat` positions."""
    out = select("out", full[0], kept[0])
    inner = select("in", full[1], kept[1])
    return Placement(
        {
            "weight": (out, inner),
            "classifier": (slice(None), spread(out, repeat)),
        },
        {
            "weight": (Axis("out"), Axis("in")),
            "classifier": (Axis("classes"), Axis("out", repeat)),
        },
    )


def weights(repeat=1):
    return {
        "weight": torch.arange(12.0).reshape(4, 3),  # rows of 3: 0 1 2 / 3 4 5 / 6 7 8 / 9 10 11
        "classifier": torch.arange(8.0 * repeat).reshape(2, 4 * repeat),
        "elsewhere": torch.ones(5),
    }


def test_leading_gathers_the_upper_left_corner():
    cut = place(leading, (2, 2)).gather(weights())
    assert cut["weight"].tolist() == [[0, 1], [3, 4]]
    assert cut["classifier"].tolist() == [[0, 1], [4, 5]]
    assert list(cut) == ["weight", "classifier"]


def test_gather_copies():
    source = weights()
    for select in (leading, rolling(3), chosen(1)):
        cut = place(select, (2, 3)).gather(source)
        for tensor in cut.values():
            assert tensor.is_contiguous()
            tensor.zero_()
    assert torch.equal(source["weight"], weights()["weight"])
    whole = place(leading, (4, 3)).gather(source)
    whole["weight"].zero_()
    assert torch.equal(source["weight"], weights()["weight"])


def test_rolling_wraps():
    # Rows 3, 0 of 4 and, as 3 modulo 3 is 0, columns 0, 1 of 3.
    assert place(rolling(3), (2, 2)).gather(weights())["weight"].tolist() == [[9, 10], [0, 1]]
    # Without a wrap it is a plain slice.
    assert rolling(1)("out", 4, 2) == slice(1, 3)
    assert rolling(5)("out", 4, 2) == slice(1, 3)
    # A whole group has no window.
    assert rolling(2)("out", 4, 4) == slice(0, 4)


def test_repeat_takes_all_positions_of_a_channel():
    # Channel c of 4 owns the features 2c, 2c + 1.
    cut = place(rolling(3), (2, 3), repeat=2).gather(weights(2))["classifier"]
    assert cut.tolist() == [[6, 7, 0, 1], [14, 15, 8, 9]]
    assert spread(slice(1, 3), 5) == slice(5, 15)


def test_chosen_is_a_sorted_subset_fixed_by_seed_and_group():
    index = chosen(7)("conv1", 100, 30)
    assert index.unique().tolist() == index.tolist()
    assert len(index) == 30
    assert 0 <= index.min() <= index.max() < 100
    assert torch.equal(index, chosen(7)("conv1", 100, 30))
    assert not torch.equal(index, chosen(7)("conv2", 100, 30))
    assert not torch.equal(index, chosen(8)("conv1", 100, 30))
    assert chosen(7)("conv1", 100, 100) == slice(0, 100)


@pytest.mark.parametrize("select", [leading, rolling(3), chosen(0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_add_to_is_the_reverse_of_gather(select, dtype):
    placement = place(select, (2, 2), repeat=2)
    source = {name: tensor.to(dtype) for name, tensor in weights(2).items()}
    totals = {name: torch.full_like(tensor, 5) for name, tensor in source.items()}
    cut = placement.gather(source)
    placement.add_to(totals, cut)
    placement.add_to(totals, cut)
    assert totals["elsewhere"].tolist() == [5] * 5
    for name, tensor in placement.gather(totals).items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, cut[name] * 2 + 5)
    touched = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    placement.add_weight(touched, 1)
    for name, total in totals.items():
        assert torch.equal(total, torch.where(touched[name] == 1, source[name] * 2 + 5, 5))


def test_add_to_keeps_all_64_bits():
    totals = {"weight": torch.full((4, 3), 2**62, dtype=torch.int64)}
    place(chosen(0), (2, 2)).add_to(totals, {"weight": torch.ones(2, 2, dtype=torch.int64)})
    assert sorted(totals["weight"].flatten().tolist()) == [2**62] * 8 + [2**62 + 1] * 4


def test_index_dimensions_that_are_not_neighbors():
    index = torch.tensor([0, 2])
    placement = Placement({"w": (index, slice(0, 2), index)}, {"w": (Axis("a"), Axis("b"), Axis("a"))})
    source = torch.arange(27).reshape(3, 3, 3)
    cut = placement.gather({"w": source})["w"]
    assert cut.tolist() == [[[0, 2], [3, 5]], [[18, 20], [21, 23]]]
    totals = {"w": torch.zeros(3, 3, 3, dtype=torch.int64)}
    placement.add_to(totals, {"w": cut})
    assert totals["w"].tolist() == [
        [[0, 0, 2], [3, 0, 5], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[18, 0, 20], [21, 0, 23], [0, 0, 0]],
    ]


@pytest.mark.parametrize("select", [leading, rolling(3), chosen(0)])
def test_add_weight_counts_every_coordinate_once(select):
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in weights().items()}
    placement = place(select, (2, 2))
    placement.add_weight(counts, 3)
    assert sorted(counts["weight"].flatten().tolist()) == [0] * 8 + [3] * 4
    assert counts["classifier"].sum() == 2 * 2 * 3
    assert counts["elsewhere"].sum() == 0


@pytest.mark.parametrize("select", [leading, rolling(3), chosen(0)])
def test_add_weight_by_class(select):
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in weights().items()}
    place(select, (2, 2)).add_weight(counts, 3, torch.tensor([0, 7]))
    assert counts["weight"].sum() == 4 * 3
    assert counts["classifier"].sum(dim=1).tolist() == [0, 2 * 7]


def test_wrong_tensors_are_refused_before_anything_is_added():
    placement = place(leading, (2, 2))
    totals = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    good = placement.gather(weights())
    with pytest.raises(ValueError, match=r"classifier: values have shape \(1,\), the placement \(2, 2\)"):
        placement.add_to(totals, good | {"classifier": torch.ones(1)})
    with pytest.raises(ValueError, match=r"the sub-model has no tensors \['extra'\]"):
        placement.add_to(totals, good | {"extra": torch.ones(1)})
    with pytest.raises(ValueError, match=r"totals: tensors \['classifier'\] are missing"):
        placement.add_to({"weight": totals["weight"]}, good)
    with pytest.raises(ValueError, match=r"global weights: tensors \['weight'\] are missing"):
        placement.gather({"classifier": weights()["classifier"]})
    with pytest.raises(ValueError, match="2 classes, but class_weight has shape"):
        placement.add_weight(totals, 1, torch.ones(3))
    assert totals["weight"].sum() == 0


def test_half_a_lenet_by_hand():
    family = LeNet5()
    half = family.width(0.5)
    assert half == Architecture((3, 8, 60, 42))
    source = {
        name: torch.arange(spec.shape[0] * 1.0).reshape([-1] + [1] * (len(spec.shape) - 1)).expand(spec.shape)
        for name, spec in family.tensors(family.full()).items()
    }
    cut = family.place(half).gather(source)
    assert cut["block1.conv.bias"].tolist() == [0, 1, 2]
    assert cut["block2.conv.weight"].shape == (8, 3, 5, 5)
    assert cut["head.fc1.weight"].shape == (60, 8 * 16)
    assert cut["head.classifier.weight"][:, 0].tolist() == list(range(10))
    # Feature 16 c + p of the flattened 16 channels x 4 x 4 belongs to channel c.
    columns = {**source, "head.fc1.weight": torch.arange(256.0).expand(120, 256)}
    rolled = family.place(half, rolling(15)).gather(columns)["head.fc1.weight"][0]
    assert rolled.tolist() == [*range(240, 256), *range(7 * 16)]
