"""What docs/supernets.md shows in Python does what the page says."""

import re
from pathlib import Path

import pytest
import torch

from tests.models.test_once_for_all import FAMILY, published
from wildflower.models.cost import cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import make_family

torch.set_num_threads(1)

PAGE = (Path(__file__).parents[2] / "docs/supernets.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.thorough
def test_the_verbs_and_the_search():
    verbs, _, _, search = BLOCKS
    names = {}
    exec(verbs, names)
    assert names["logits"].shape == (8, 10)
    family, network = names["family"], names["network"]
    assert sum(p.numel() for p in network.parameters()) < 7_000_000
    # Few generations: the page's search takes some seconds.
    exec(search.replace('optimizer="sgd")', 'optimizer="sgd", population=10, generations=2)'), names)
    found = names["found"]
    price = cost(family, found, batch_size=32, optimizer="sgd")
    assert price.peak_training_memory_bytes <= 600_000_000
    assert price.payload_bytes <= 20_000_000
    assert 0.95 * 60_000_000 <= family.inference_macs(found) <= 60_000_000


def test_published_weights_become_a_sub_network(monkeypatch):
    names = {"torch": torch, "make_family": lambda spec: FAMILY, "architecture": FAMILY.smallest()}
    monkeypatch.setattr(torch, "load", lambda *file, **options: {"state_dict": published()})
    exec(BLOCKS[2], names)
    assert names["network"](torch.rand(2, 3, 32, 32)).shape == (2, 5)


def test_the_counts_of_sub_networks():
    rows = re.findall(r"^\| `([\w-]+)` .* \| ([\d.e]+) \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == ["mobilenet-v3", "mobilenet-v2", "ofa-resnet50"]
    for name, count in rows:
        assert f"{ElasticSpace.of(make_family({'name': name})).size:.1e}".replace("+", "") == count
