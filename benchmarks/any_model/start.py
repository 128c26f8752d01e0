"""Seconds and memory before round 1: of built-in networks, described and traced, and of models of transformers.

    python -m benchmarks.any_model.start [--models NAME ...]

Prints CPU seconds for making the family and five prices, and the most resident memory, each in a fresh process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from wildflower.models.cost import cost
from wildflower.models.family import make_family

WORKER = """
import resource, sys, time, warnings
warnings.simplefilter("ignore")
from benchmarks.any_model.start import price
begin = time.process_time()
price(sys.argv[1], traced=sys.argv[2] == "traced")
seconds = time.process_time() - begin
print(f"{sys.argv[1]:12} {sys.argv[2]:10} {seconds:5.1f} s, "
      f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")
"""

OF_TRANSFORMERS = {
    "minilm-l6": {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "roberta-base": {
        **{"model_type": "roberta", "vocab_size": 50_265},
        **{"max_position_embeddings": 514, "type_vocab_size": 1},
    },
}


def network(spec: Mapping[str, Any]) -> nn.Module:
    """Return the whole network of a built-in family as a module."""
    family = make_family(spec)
    return family.build(family.full())


def price(name: str, *, traced: bool) -> None:
    """Price five widths of a network."""
    tokens = name.startswith("bert")
    spec = {"name": name, "input_shape": [80] if tokens else [3, 32, 32], "classes": 84 if tokens else 10}
    if name in OF_TRANSFORMERS:
        spec |= {"name": "transformers:AutoModel", "model": OF_TRANSFORMERS[name], "input_shape": [80], "tokens": True}
    elif traced:
        by_reference = {"name": "benchmarks.any_model.start:network", "arguments": {"spec": dict(spec)}}
        spec |= by_reference | {"tokens": tokens}
    family = make_family(spec)
    for width in (1, 0.5, 0.25, 0.125, 0.0625):
        cost(family, family.width(width), batch_size=20, optimizer="sgd-momentum")


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["cnn3", "resnet18", "densenet121", "vit-tiny", "bert-tiny", *OF_TRANSFORMERS]
    parser.add_argument("--models", nargs="*", default=models, metavar="NAME")
    for model in parser.parse_args().models:
        for kind in ("traced",) if model in OF_TRANSFORMERS else ("described", "traced"):
            subprocess.run([sys.executable, "-c", WORKER, model, kind], check=True)


if __name__ == "__main__":
    main()
