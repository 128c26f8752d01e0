import pytest
import torch
from messages.layouts import class_spans, returned_layout, sent_layout

from messages.packing import pack
from models.base import Family
from models.cnn import Cnn3, PflCnn
from models.cost import cost
from models.family import FAMILIES
from models.lenet import LeNet5
from models.resnet import ResNet18
from models.vgg import Vgg

SMALL: list[Family] = [LeNet5(), LeNet5(norm="static", scaler=True), Cnn3(), PflCnn(), Vgg()]


@pytest.mark.parametrize("family", SMALL, ids=lambda family: f"{family.name}-{family.norm}")
@pytest.mark.parametrize("width", [1.0, 0.3])
def test_packed_weights_are_exactly_parameters_and_buffers(family, width):
    architecture = family.width(width)
    model = family.build(architecture)
    numbers = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    layout = sent_layout(family, architecture)
    assert layout.nbytes == 4 * numbers
    assert len(pack(model.state_dict(), layout)) == 4 * numbers
    assert returned_layout(family, architecture, "cross entropy") == layout


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "choice"])  # whose cost is its members'
def test_the_cost_of_a_payload_is_what_travels(name):
    family = FAMILIES[name]()
    for width in (1.0, 0.1):
        architecture = family.width(width)
        price = cost(family, architecture, batch_size=8, optimizer="sgd")
        assert sent_layout(family, architecture).nbytes == price.payload_bytes


def test_batch_norm_statistics_travel_by_themselves():
    family = LeNet5()
    layout = returned_layout(family, family.full(), "batch norm statistics")
    assert [entry.name for entry in layout.entries] == [
        "block1.norm.running_mean",
        "block1.norm.running_var",
        "block2.norm.running_mean",
        "block2.norm.running_var",
    ]
    assert layout.nbytes == 4 * 2 * (6 + 16)
    assert not returned_layout(LeNet5(norm="static"), family.full(), "batch norm statistics").entries


@pytest.mark.parametrize("family", [LeNet5(classes=7), ResNet18(classes=7)], ids=lambda family: family.name)
def test_class_spans_are_the_rows_of_the_classifier(family):
    architecture = family.width(0.1)
    layout = sent_layout(family, architecture)
    marked = torch.zeros(layout.numel, dtype=torch.bool)
    for start, stop in class_spans(family, architecture, layout):
        assert (stop - start) % 7 == 0
        marked[start:stop] = True
    start = 0
    for entry in layout.entries:
        assert bool(marked[start : start + entry.numel].all()) == entry.name.startswith("head.classifier.")
        assert bool(marked[start : start + entry.numel].any()) == entry.name.startswith("head.classifier.")
        start += entry.numel
