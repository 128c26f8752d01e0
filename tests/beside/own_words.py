"""A family that reads tokens of any vocabulary, for tests: BERT's layers without positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.bert import Bert
from wildflower.models.layers import Block, Linear
from wildflower.models.transformer import Embedding, LastPosition


@dataclass(frozen=True)
class Words(Bert):
    """One layer; the classifier reads the last token."""

    name: ClassVar[str] = "words"

    hidden: int = 16
    depth: int = 1
    heads: int = 2
    mlp: int = 16
    vocabulary: int = 10
    pad_id: int = 0

    def blocks(self, arch: Architecture) -> list[Block]:
        """The embeddings, the layer and the head."""
        stream = self.channels(arch)["stream"]
        embedding = (Embedding("tokens", self.vocabulary, stream),)
        head = (LastPosition(), Linear("classifier", stream, self.outputs))
        return [Block("embedding", embedding), *self.encoder(arch, norm_first=False), Block("head", head)]
