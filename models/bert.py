"""BERT's encoder, for the prediction of the next character."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from wildflower.models.architecture import Architecture
from wildflower.models.layers import Block, Linear
from wildflower.models.transformer import Embedding, LastPosition, LayerNorm, Positions, Transformer


@dataclass(frozen=True)
class Bert(Transformer):
    """BERT (Devlin et al. 2019) over characters: (batch, sequence) tokens -> logits of the character that follows.

    The sizes are BERT-large's; `hidden`, `depth`, `heads` and `mlp` make smaller twins. Tokens and classes are the
    same alphabet of `classes` symbols, and the input shape is (sequence,). Post-norm; no token types, and no pooler or
    transform in front of the classifier.

    The classifier reads the last position. It sees all others through attention, and its own stream holds the character
    in front of the one to be predicted, which says most about it; a mean over positions would blur that character, and
    a class token would have to fetch it first.

    A head has 64 channels at BERT-large's sizes. The model-search paper prints 6 heads at hidden 256, which does not
    divide; with heads of 64 channels, hidden 256 goes with 4 heads: `width(0.25)`.
    """

    name: ClassVar[str] = "bert"
    input_dtype: ClassVar[torch.dtype] = torch.int64

    input_shape: tuple[int, ...] = (80,)
    classes: int = 84
    hidden: int = 1024
    depth: int = 24
    heads: int = 16
    mlp: int = 4096

    def __post_init__(self) -> None:
        if len(self.input_shape) != 1:
            raise ValueError(f"{self.name}: input_shape must be (sequence,) of tokens, not {self.input_shape!r}")
        super().__post_init__()

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the embeddings, the kept blocks and the head."""
        stream = self.channels(arch)["stream"]
        embedding = (
            Embedding("tokens", self.classes, stream),
            Positions("positions", self.input_shape[0], stream),
            LayerNorm("norm", stream),
        )
        head = (LastPosition(), Linear("classifier", stream, self.outputs))
        return [Block("embedding", embedding), *self.encoder(arch, norm_first=False), Block("head", head)]


@dataclass(frozen=True)
class BertTiny(Bert):
    """The sizes of BERT-Tiny (Turc et al. 2019): 428,628 parameters for 80 characters out of 84 symbols."""

    name: ClassVar[str] = "bert-tiny"

    hidden: int = 128
    depth: int = 2
    heads: int = 2
    mlp: int = 512
