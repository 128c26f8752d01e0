"""Layers and blocks of transformers (Vaswani et al. 2017): what vit.py and bert.py share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from wildflower.models.architecture import Architecture
from wildflower.models.block_family import BlockFamily
from wildflower.models.cost import FLOAT_BYTES, Footprint, Shape, table_footprint
from wildflower.models.group_family import check_depths, depth_at
from wildflower.models.layers import Block, Channels, Elementwise, Layer, Linear, Scaler, Stateless, TensorSpec, spec
from wildflower.models.placement import Axis

EMBEDDING_STD = 0.02
"""Standard deviation of the first weights of position and token embeddings, as in ViT and BERT."""


class CutPatches(nn.Module):
    """Cut images into square patches, row by row."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, patches, channels * side * side)."""
        batch, channels, height, width = images.shape
        side = self.side
        rows = images.reshape(batch, channels, height // side, side, width // side, side)
        return rows.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * side * side)


@dataclass(frozen=True)
class Patches(Stateless):
    """Square patches of an image as a sequence; a linear layer behind it is ViT's patch embedding."""

    side: int

    def build(self) -> nn.Module:
        """Return a `CutPatches`."""
        return CutPatches(self.side)

    def output_shape(self, shape: Shape) -> Shape:
        """(channels, height, width) -> (patches, channels * side * side); ValueError where a rest would be left."""
        channels, height, width = shape
        if height % self.side or width % self.side:
            raise ValueError(f"{height}x{width} images cannot be cut into patches of {self.side}x{self.side}")
        return (height // self.side) * (width // self.side), channels * self.side**2

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        # Only images are cut: there is no gradient to make.
        result = FLOAT_BYTES * batch_size * math.prod(result_shape)
        return Footprint(result=result, forward_peak=result)


@dataclass(frozen=True)
class Embedding(Layer):
    """One learned vector per token; which tokens there are is never cut."""

    name: str
    vocabulary: int
    outputs: Channels

    def build(self) -> nn.Module:
        """Return an `nn.Embedding`."""
        embedding = nn.Embedding(self.vocabulary, self.outputs.kept)
        nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
        return embedding

    def output_shape(self, shape: Shape) -> Shape:
        """(positions,) of tokens -> (positions, channels)."""
        return (*shape, self.outputs.kept)

    def tensors(self) -> dict[str, TensorSpec]:
        """Weight (vocabulary, channels)."""
        return {"weight": spec((self.vocabulary, None), (self.outputs.kept, Axis(self.outputs.group)))}

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        # What is saved are the tokens, which stay anyway.
        return table_footprint(self.vocabulary * self.outputs.kept, result_shape, batch_size)


class AddPositions(nn.Module):
    """Add one learned vector per position."""

    def __init__(self, positions: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, channels))
        nn.init.normal_(self.weight, std=EMBEDDING_STD)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, channels) to the same shape."""
        return x + self.weight


@dataclass(frozen=True)
class Positions(Layer):
    """A learned position embedding, added to a sequence of `positions`."""

    name: str
    positions: int
    channels: Channels

    def build(self) -> nn.Module:
        """Return an `AddPositions`."""
        return AddPositions(self.positions, self.channels.kept)

    def tensors(self) -> dict[str, TensorSpec]:
        """Weight (positions, channels)."""
        return {"weight": spec((self.positions, None), (self.channels.kept, Axis(self.channels.group)))}

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        return table_footprint(math.prod(shape), result_shape, batch_size)


@dataclass(frozen=True)
class LayerNorm(Layer):
    """Layer norm over the channels of each position; it keeps no running statistics."""

    name: str
    channels: Channels

    def build(self) -> nn.Module:
        """Return an `nn.LayerNorm`."""
        return nn.LayerNorm(self.channels.kept)

    def tensors(self) -> dict[str, TensorSpec]:
        """Weight and bias."""
        return {name: spec((self.channels.kept, Axis(self.channels.group))) for name in ("weight", "bias")}

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        size = FLOAT_BYTES * batch_size * math.prod(shape)
        statistics = FLOAT_BYTES * 2 * batch_size * shape[0]  # mean and inverse deviation of each position
        # Backward, gradients of weight and bias are summed up in a table per thread.
        return Footprint(
            result=size,
            saves_input=True,
            saves_own=statistics,
            forward_peak=size + statistics,
            gradient=size,
            backward_peak=size + 2 * FLOAT_BYTES * 2 * shape[1],
            parameters=2 * shape[1],
            largest_parameter=shape[1],
        )


@dataclass(frozen=True)
class Gelu(Elementwise):
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016)."""

    module = nn.GELU


class SelfAttention(nn.Module):
    """Multi-head attention of every position to all positions."""

    def __init__(self, channels: int, heads: int, head_size: int, scaler_rate: float | None) -> None:
        super().__init__()
        inner = heads * head_size
        self.head_size = head_size
        self.query = nn.Linear(channels, inner)
        self.key = nn.Linear(channels, inner)
        self.value = nn.Linear(channels, inner)
        self.out = nn.Linear(inner, channels)
        self.scale = nn.Identity() if scaler_rate is None else Scaler(scaler_rate)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, channels) to the same shape."""
        query, key, value = (
            self.scale(linear(x)).unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)  # (batch, heads, positions, head size)
        return self.out(mixed.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Attention(Layer):
    """Multi-head self-attention. The heads are a channel group: cutting it leaves out whole heads.

    With `scaler`, queries, keys and values are divided by the kept share of heads.
    """

    name: str
    channels: Channels
    heads: Channels
    head_size: int
    scaler: bool = False

    def build(self) -> nn.Module:
        """Return a `SelfAttention`."""
        rate = self.heads.kept / self.heads.full if self.scaler and self.heads.kept < self.heads.full else None
        return SelfAttention(self.channels.kept, self.heads.kept, self.head_size, rate)

    def tensors(self) -> dict[str, TensorSpec]:
        """Weights and biases of queries, keys and values (heads * head size, channels) and of the output."""
        inner = (self.heads.kept * self.head_size, Axis(self.heads.group, self.head_size))
        channels = (self.channels.kept, Axis(self.channels.group))
        specs: dict[str, TensorSpec] = {}
        for name in ("query", "key", "value"):
            specs |= {f"{name}.weight": spec(inner, channels), f"{name}.bias": spec(inner)}
        return specs | {"out.weight": spec(channels, inner), "out.bias": spec(channels)}

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        # PyTorch's fused attention on CPUs keeps no scores, only the log of their sums for each head and position.
        # Tiles of scores, some 10 KB per thread, are left out.
        positions, channels = shape
        width = self.heads.kept * self.head_size
        size = FLOAT_BYTES * batch_size * positions * channels
        inner = FLOAT_BYTES * batch_size * positions * width  # queries, keys, values, or what is mixed from the values
        saved = 4 * inner + FLOAT_BYTES * batch_size * positions * self.heads.kept
        weight = channels * width
        into, out = FLOAT_BYTES * (weight + width), FLOAT_BYTES * (weight + channels)
        backward_phases = [
            out + 4 * inner,  # the gradient of the mixed values, and those of queries, keys and values
            # From here on, nothing is saved any more. Three gradients of the input are added up, values first.
            out + 3 * inner + into + size - saved,
            out + 2 * inner + 2 * into + 2 * size - saved,
            out + 1 * inner + 3 * into + 2 * size - saved,
        ]
        return Footprint(
            result=size,
            saves_input=True,
            saves_own=saved,
            forward_peak=saved + size,
            gradient=size,
            backward_peak=max(backward_phases),
            parameters=4 * weight + 3 * width + channels,
            largest_parameter=weight,
            macs=4 * weight * positions,
            score_macs=width * positions**2,
        )


class OverPositions(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, channels) -> (batch, channels)."""
        return x.mean(1)


@dataclass(frozen=True)
class MeanPosition(Stateless):
    """The mean over all positions of a sequence."""

    def build(self) -> nn.Module:
        """Return an `OverPositions`."""
        return OverPositions()

    def output_shape(self, shape: Shape) -> Shape:
        """(positions, channels) -> (channels,)."""
        return shape[1:]


class TakeLast(nn.Module):
    """The last position."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, channels) -> (batch, channels)."""
        return x[:, -1]


@dataclass(frozen=True)
class LastPosition(Stateless):
    """The last position of a sequence."""

    def build(self) -> nn.Module:
        """Return a `TakeLast`."""
        return TakeLast()

    def output_shape(self, shape: Shape) -> Shape:
        """(positions, channels) -> (channels,)."""
        return shape[1:]

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        size = FLOAT_BYTES * batch_size * math.prod(shape)
        return Footprint(gradient=size, backward_peak=size)


@dataclass(frozen=True)
class Transformer(BlockFamily):
    """An encoder of `depth` blocks, each of self-attention and an MLP with GELU, with residual connections.

    What passes between all blocks, the stream, is one channel group of `hidden` channels. The heads of each block and
    the inside of its MLP are groups of their own, `block3.heads` and `block3.mlp`. A head keeps its hidden / heads
    channels in every sub-model. Every block but the first may be left out. There are no batch norms, so that `norm`
    changes nothing, and no dropout.

    `depths` are the numbers of blocks that devices may get, ascending and up to `depth`. Widths then play no part, and
    a width rate is a share of the blocks. With () devices get cuts in width.

    `scaler` divides as HeteroFL does: queries, keys and values by the kept share of heads, the inside
    of an MLP by its own, and what attention and MLP add to the stream by the stream's. Embeddings are not divided:
    what they read is never cut, so they do not shrink as a model does (and in front of a layer norm it would not
    matter).
    """

    hidden: int = 192
    depth: int = 12
    heads: int = 3
    mlp: int = 768
    depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_counts("hidden", "depth", "heads", "mlp")
        if self.hidden % self.heads:
            raise ValueError(f"{self.name}: hidden must be a multiple of heads, {self.hidden} is none of {self.heads}")
        if self.depths != ():
            check_depths(self.name, self.depths, [self.depth])
        super().__post_init__()

    @property
    def block_names(self) -> tuple[str, ...]:
        """Return the blocks in order: block0, block1, ..."""
        return tuple(f"block{number}" for number in range(self.depth))

    @property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Return all blocks are one stack."""
        return {"encoder": self.block_names}

    @cached_property
    def groups(self) -> Mapping[str, int]:
        """Return the stream, then heads and MLP of each block."""
        groups = {"stream": self.hidden}
        for block in self.block_names:
            groups |= {f"{block}.heads": self.heads, f"{block}.mlp": self.mlp}
        return groups

    @cached_property
    def removable(self) -> Mapping[str, tuple[str, ...]]:
        """Return all blocks but the first."""
        return {block: (f"{block}.heads", f"{block}.mlp") for block in self.block_names[1:]}

    def candidates(self, widths: Iterable[float]) -> list[Architecture]:
        """Return the cuts of these width rates, or of `depths` where there are some, largest first."""
        return [self.first_layers(depth) for depth in reversed(self.depths)] or super().candidates(widths)

    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        """Return the cut of a width rate; with `depths`, the first of them that has this share of the blocks."""
        return self.first_layers(depth_at(self.depths, rate)) if self.depths else super().up_to(exit, rate)

    def encoder(self, arch: Architecture, *, norm_first: bool) -> list[Block]:
        """Return the kept blocks, two residual ones for each: attention, then MLP.

        `norm_first`: layer norm in front of attention and MLP, as in ViT, or behind each addition, as in BERT.
        """
        channels = self.channels(arch)
        stream = channels["stream"]
        norm = (LayerNorm("norm", stream),)
        blocks = []
        for name in self.block_names:
            heads, inner = channels[f"{name}.heads"], channels[f"{name}.mlp"]
            if not heads.kept:
                continue
            attention = Attention("attention", stream, heads, self.hidden // self.heads, self.scaler)
            mlp = (Linear("fc1", stream, inner), *self.scaled(inner), Gelu(), Linear("fc2", inner, stream))
            for part, layers in (("attention", (attention,)), ("mlp", mlp)):
                inside: tuple[Layer, ...] = (*layers, *self.scaled(stream))
                if norm_first:
                    blocks.append(Block(f"{name}_{part}", (*norm, *inside), shortcut=()))
                else:
                    blocks.append(Block(f"{name}_{part}", inside, shortcut=(), after=norm))
        return blocks
