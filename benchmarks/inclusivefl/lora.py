"""A BERT with LoRA's adapters, by the package `peft`, as a family of levels: what travel.py compares with.

Models of `transformers` have LoRA of their own (`lora`), which computes the same. The recorded figures are of this
function, which is one of the user's own as docs/your-model.md describes them. Its base is frozen by the run's key
`freeze`, so that it travels to a device once. Adapters and head are trained.
"""

from __future__ import annotations

from torch import nn

from benchmarks.minilm import MINILM
from wildflower.models.of_transformers import CONFIG, made_from

RANK, TARGETS = 8, ("query", "value")  # LoRA's usual targets; alpha is twice the rank


def adapted(layers: int, classes: int, rank: int = RANK) -> nn.Module:
    """The first layers of a network of MiniLM-L6's sizes, with adapters at the queries and values of attention."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModel

    network = made_from(AutoModel, {CONFIG: MINILM | {"num_hidden_layers": layers}}, classes)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS))
    inject_adapter_in_model(config, network)
    # `peft` freezes all but its adapters; what is trained is said by `freeze`, which leaves the head out.
    network.requires_grad_(True)
    return network


def base(layers: int) -> tuple[str, ...]:
    """All but adapters and head, by the beginnings of names."""
    parts = ("attention.self.key", "attention.output", "intermediate", "output")
    parts += tuple(f"attention.self.{target}.base_layer" for target in TARGETS)
    return ("embeddings", *(f"encoder.layer.{number}.{part}" for number in range(layers) for part in parts))
