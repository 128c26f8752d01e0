"""Vision transformer for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.layers import Block, Channels, Linear
from wildflower.models.transformer import LayerNorm, MeanPosition, Patches, Positions, Transformer


@dataclass(frozen=True)
class VitTiny(Transformer):
    """ViT-Tiny (Dosovitskiy et al. 2021, with the sizes of Touvron et al. 2021) with patches of 4x4 for 32x32 images.

    5,362,378 parameters for 3x32x32 images and 10 classes. Pre-norm. The classifier reads the mean over all
    positions, not a class token: that does no worse (Dosovitskiy et al. 2021, appendix D.3) and leaves the sequence at
    64 positions.
    Sides of images must be multiples of `patch`; `hidden`, `depth`, `heads`, `mlp` and `patch` make smaller twins.
    """

    name: ClassVar[str] = "vit-tiny"

    input_shape: tuple[int, ...] = (3, 32, 32)
    patch: int = 4

    def __post_init__(self) -> None:
        if len(self.input_shape) != 3:
            raise ValueError(f"{self.name}: input_shape must be (channels, height, width), not {self.input_shape!r}")
        self._check_counts("patch")
        super().__post_init__()

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the patch embedding, the kept blocks and the head."""
        stream = self.channels(arch)["stream"]
        positions, pixels = Patches(self.patch).output_shape(self.input_shape)
        patches = Linear("patches", Channels("pixels", pixels, pixels), stream)
        embedding = (Patches(self.patch), patches, Positions("positions", positions, stream))
        head = (LayerNorm("norm", stream), MeanPosition(), Linear("classifier", stream, self.outputs))
        return [Block("embedding", embedding), *self.encoder(arch, norm_first=True), Block("head", head)]
