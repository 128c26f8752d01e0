"""wildflower/messages/tensor_sets.py, and what it says of the models of families."""

import pytest
import torch

from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout, pack
from wildflower.messages.sums import SCALE, WeightedSum, flatten
from wildflower.messages.tensor_sets import TensorSet, digest, nbytes, parameters_of
from wildflower.models.base import Family
from wildflower.models.cnn import Cnn3, PflCnn
from wildflower.models.cost import cost
from wildflower.models.family import FAMILIES
from wildflower.models.layers import TensorSpec
from wildflower.models.lenet import LeNet5
from wildflower.models.placement import CLASSES, Axis, Placement, whole
from wildflower.models.resnet import ResNet18
from wildflower.models.vgg import Vgg
from wildflower.strategies.method import Training
from wildflower.strategies.statistics import TakeStatistics

SMALL: list[Family] = [LeNet5(), LeNet5(norm="static", scaler=True), Cnn3(), PflCnn(), Vgg()]


@pytest.mark.parametrize("family", SMALL, ids=lambda family: f"{family.name}-{family.norm}")
@pytest.mark.parametrize("width", [1.0, 0.3])
def test_packed_weights_are_exactly_parameters_and_buffers(family, width):
    architecture = family.width(width)
    model = family.build(architecture)
    numbers = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    sent = Training().sent(family, architecture)
    layout = sent["weights"].layout
    assert nbytes(sent) == layout.nbytes == 4 * numbers
    assert len(pack(model.state_dict(), layout)) == 4 * numbers
    returned = Training().returned(family, architecture)
    assert sent.keys() == returned.keys() == {"weights"}
    assert returned["weights"].layout == layout


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in ("choice", "darts")]
)  # whose cost is its members'
def test_the_cost_of_a_payload_is_what_travels(name):
    family = FAMILIES[name]()
    for width in (1.0, 0.1):
        architecture = family.width(width)
        price = cost(family, architecture, batch_size=8, optimizer="sgd")
        assert nbytes(Training().sent(family, architecture)) == price.payload_bytes


def test_batch_norm_statistics_travel_by_themselves():
    family = LeNet5()
    returned = TakeStatistics().returned(family, family.full())
    layout = returned["statistics"].layout
    assert [entry.name for entry in layout.entries] == [
        "block1.norm.running_mean",
        "block1.norm.running_var",
        "block2.norm.running_mean",
        "block2.norm.running_var",
    ]
    assert nbytes(returned) == 4 * 2 * (6 + 16)
    static = LeNet5(norm="static")
    assert not TakeStatistics().returned(static, static.full())["statistics"].layout.entries
    parameters = parameters_of(family.tensors(family.full()))
    assert parameters.keys() | {entry.name for entry in layout.entries} == family.tensors(family.full()).keys()
    assert parameters.keys() == {name for name, _ in family.build(family.full()).named_parameters()}


@pytest.mark.parametrize("family", [LeNet5(classes=7), ResNet18(classes=7)], ids=lambda family: family.name)
def test_class_spans_are_the_rows_of_the_classifier(family):
    tensor_set = TensorSet.of(family.tensors(family.width(0.1)))
    marked = torch.zeros(tensor_set.layout.numel, dtype=torch.bool)
    for start, stop, inner in tensor_set.class_spans:
        assert stop - start == 7 * inner
        marked[start:stop] = True
    start = 0
    for entry in tensor_set.layout.entries:
        assert bool(marked[start : start + entry.numel].all()) == entry.name.startswith("head.classifier.")
        assert bool(marked[start : start + entry.numel].any()) == entry.name.startswith("head.classifier.")
        start += entry.numel


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_what_counts_of_absent_classes_is_the_same_in_sums_and_in_owners_wherever_a_head_has_its_classes(dimension):
    shape = [2, 4, 5]
    shape[dimension] = 3
    axes = tuple(Axis(CLASSES) if d == dimension else None for d in range(3))
    tensors = {
        "body": TensorSpec((2,), torch.float32, (None,)),
        "head": TensorSpec(tuple(shape), torch.float32, axes),
    }
    spans = TensorSet.of(tensors).class_spans
    total = WeightedSum.zeros(TensorSet.of(tensors).layout, classes=3)
    ones = {name: torch.ones(spec.shape) for name, spec in tensors.items()}
    total.add(flatten(ones, TensorSet.of(tensors).layout), 2, torch.tensor([True, True, False]), spans)
    total.add(flatten(ones, TensorSet.of(tensors).layout), 3, torch.tensor([False, True, False]), spans)

    owners = {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in tensors.items()}
    placement = Placement(whole(ones).coordinates, {name: spec.axes for name, spec in tensors.items()})
    placement.add_weight(owners, 5, total.class_weight)
    assert owners["head"].movedim(dimension, 0)[:, 0, 0].tolist() == [2, 5, 0]
    flat = torch.cat([owners["body"].flatten(), owners["head"].flatten()])
    assert torch.equal(total.weight_at(spans), flat)
    assert torch.equal(total.total, flat * SCALE)


def tensor_set(merge=None, **shapes):
    return TensorSet(Layout.of({name: torch.zeros(shape) for name, shape in shapes.items()}), merge)


ONE, OTHER = tensor_set(w=(2, 3)), tensor_set(w=(3, 2))


@pytest.mark.parametrize(
    ("sent", "returned"),
    [
        ({"weights": OTHER}, {"weights": ONE}),
        ({"weights": ONE}, {"weights": OTHER}),
        ({"weights": ONE}, {"update": ONE}),
        ({"weights": ONE}, {}),
        ({}, {"weights": ONE}),
        ({"weights": ONE, "control": ONE}, {"weights": ONE}),
        ({"weights": ONE}, {"weights": tensor_set(Merge(), w=(2, 3))}),
        ({"weights": ONE}, {"weights": tensor_set(Merge(weighting="uniform"), w=(2, 3))}),
        ({"weights": ONE}, {"weights": tensor_set(Merge(present_classes=True), w=(2, 3))}),
        ({"weights": ONE}, {"weights": tensor_set(v=(2, 3))}),
        ({"weights": ONE}, {"weights": tensor_set(w=(2, 3), v=(1,))}),
    ],
)
def test_the_digest_differs_where_both_sides_disagree(sent, returned):
    agreed = digest({"weights": ONE}, {"weights": ONE})
    assert len(bytes.fromhex(agreed)) == 8
    assert digest(sent, returned) != agreed


def test_the_digest_does_not_depend_on_the_order_of_tensor_sets():
    both = {"weights": ONE, "control": OTHER}
    turned = {"control": OTHER, "weights": ONE}
    assert digest(both, both) == digest(turned, turned)
    assert nbytes(both) == 48
