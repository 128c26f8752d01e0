"""Parts that are added to a model of `transformers`: adapters, LoRA, and a head where it has none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

# Parts that are trained in layers that are frozen, by their names inside of a layer.
ADDED = (".adapter.", ".lora_A.", ".lora_B.")


class Added(BaseModel):
    """The parts that are added to a model.

    Attributes:
        adapter: channels inside of adapters, behind the layers of `adapter_behind`; 0: none. A width does not cut them.
        adapter_behind: patterns of names of linear layers: the last of attention and of the MLP in BERT, RoBERTa and
            DistilBERT.
        lora: rank of what is added to the weights W of the layers of `lora_of`, which then are W + (lora_alpha / lora)
            B A, at first W (LoRA, Hu et al. 2022); 0: nothing. A width does not cut the rank.
        lora_alpha: the numerator of that; 8 as in `peft`, whose names the tensors have as well.
        lora_of: patterns of names of linear layers: queries and values.
        pooling: what of a sequence the added head reads: the "mean" over the tokens that are no padding, or the first,
            "cls".
        head: "linear", or "dense" with a layer and tanh in front, as RoBERTa's own.
        labels: whether the added head answers for a "sequence" or for its "tokens"; the task says it.
        separator: the token behind each text of a pair; -1: texts come alone. The second text and the separator behind
            it are then of token type 1, as BERT's tokenizer has it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    adapter: int = Field(0, ge=0)
    adapter_behind: list[str] = ["*.output.dense", "*.attention.out_lin", "*.ffn.lin2"]
    lora: int = Field(0, ge=0)
    lora_alpha: float = Field(8.0, gt=0, lt=math.inf)
    lora_of: list[str] = ["*.query", "*.value", "*.q_lin", "*.v_lin", "*.q_proj", "*.v_proj"]
    pooling: Literal["mean", "cls"] = "mean"
    head: Literal["linear", "dense"] = "linear"
    labels: Literal["sequence", "tokens"] = "sequence"
    separator: int = Field(-1, ge=-1)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Added:
        """Return what some arguments say; ValueError with the first that is wrong."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where} = {first['input']!r}: {first['msg']}") from None

    def put_into(self, model: nn.Module) -> None:
        """Add adapters and LoRA to the linear layers of a model; ValueError if there are none of these names."""
        for wanted, patterns in ((self.adapter, self.adapter_behind), (self.lora, self.lora_of)):
            layers = [
                (path, part)
                for path, part in model.named_modules()
                if isinstance(part, nn.Linear) and any(fnmatchcase(path, pattern) for pattern in patterns)
            ]
            if wanted and not layers:
                raise ValueError(f"no linear layer has a name such as {patterns[0]}: say others in arguments")
            for path, linear in layers if wanted else ():
                if patterns is self.adapter_behind:
                    model.set_submodule(path, Adapted(linear, wanted))
                else:
                    model.set_submodule(path, LowRank(linear, wanted, self.lora_alpha))

    def classifier(self, hidden: int, classes: int, dropout: float) -> nn.Module:
        """Return a head for a model that has none."""
        return Classifier(hidden, classes, dropout, dense=self.head == "dense")

    def read(self, head: nn.Module, states: Tensor, real: Tensor) -> Tensor:
        """Return what a head says of (batch, sequence, hidden), where `real` is 1 at tokens that are no padding."""
        if self.labels == "tokens":
            answers: Tensor = head(states)
            return answers.transpose(1, 2)
        weight = real.unsqueeze(2).to(states.dtype)
        pooled = states[:, 0] if self.pooling == "cls" else (states * weight).sum(1) / weight.sum(1).clamp(min=1)
        result: Tensor = head(pooled)
        return result


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
