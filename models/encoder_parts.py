"""Parts of encoders of `transformers`: how each kind calls its own, and adapters, LoRA and heads that are added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Kind:
    """Names in transformers of the parts of one kind of encoder.

    Attributes:
        model: the class.
        where: the module that holds the layers, in names of tensors too.
        rows: the linear layers whose rows are the channels of heads: queries, keys and values.
        columns: the one whose columns are, the last of attention.
        mlp_end: the last linear layer of the MLP.
        attention_dropout: its attribute of the configuration.
        sizes: our argument -> the attribute of the configuration.
    """

    model: str
    where: str
    rows: tuple[str, ...]
    columns: str
    mlp_end: str
    attention_dropout: str
    sizes: Mapping[str, str]

    @property
    def has_types(self) -> bool:
        """Say whether tokens have types."""
        return "token_types" in self.sizes


COMMON = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
    "pad_id": "pad_token_id",
}
BERT = Kind(
    "Bert",
    "encoder",
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "output.dense",
    "attention_probs_dropout_prob",
    COMMON
    | {
        "mlp": "intermediate_size",
        "token_types": "type_vocab_size",
        "dropout": "hidden_dropout_prob",
        "norm_eps": "layer_norm_eps",
        "activation": "hidden_act",
    },
)
KINDS: Mapping[str, Kind] = {
    "bert": BERT,
    "roberta": replace(BERT, model="Roberta"),
    "distilbert": Kind(
        "DistilBert",
        "transformer",
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out_lin",
        "ffn.lin2",
        "attention_dropout",
        COMMON | {"mlp": "hidden_dim", "dropout": "dropout", "activation": "activation"},
    ),
}


def linear_at(layer: nn.Module, path: str) -> nn.Linear:
    """Return the linear layer of a name inside of a module."""
    found = layer.get_submodule(path)
    assert isinstance(found, nn.Linear)
    return found


class Adapted(nn.Linear):
    """A linear layer of a transformer, under its own names, with an adapter behind it."""

    def __init__(self, linear: nn.Linear, channels: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.adapter = Adapter(linear.out_features, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        result: Tensor = self.adapter(super().forward(x))
        return result


class LowRank(nn.Linear):
    """A linear layer, under its own names, to which a product of two small matrices is added: W x + (alpha / r) B A x.

    As `peft` makes it by default: A is drawn as a linear layer's weights are, B is 0, and there is no dropout.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        added: Tensor = self.lora_B(self.lora_A(x))
        return super().forward(x) + added * self.scale


class Adapter(nn.Module):
    """y + up(gelu(down(y))), at first nearly y (Houlsby et al., ICML 2019)."""

    def __init__(self, hidden: int, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(hidden, channels), nn.Linear(channels, hidden)
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=0.01)
            nn.init.zeros_(linear.bias)

    def forward(self, y: Tensor) -> Tensor:
        """(..., hidden), the same out."""
        return y + self.up(F.gelu(self.down(y)))


class Classifier(nn.Module):
    """Dropout and a linear layer; with `dense` a layer and tanh in front, as in transformers' RoBERTa."""

    def __init__(self, hidden: int, classes: int, dropout: float, *, dense: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(hidden, hidden) if dense else None
        self.out_proj = nn.Linear(hidden, classes)
        for linear in (self.dense, self.out_proj):
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., classes)."""
        x = self.dropout(x)
        if self.dense is not None:
            x = self.dropout(torch.tanh(self.dense(x)))
        result: Tensor = self.out_proj(x)
        return result
