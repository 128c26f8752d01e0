"""Coders of RecipFL's hypernetwork, which read tensors and make them: digests and their encoder, decoders and tiles."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from wildflower.strategies.recipfl.graph import Graph, Node

DIGEST = 128  # values by which a tensor of any size is read


class ParameterEncoder(nn.Module):
    """Reads digests of tensors: every value by itself, a Transformer layer and a layer norm over them, the mean.

    The paper does not print it: the layers are those of the published code, but for the dropout.
    """

    positions: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.value = nn.Linear(1, hidden)
        self.layer = nn.TransformerEncoderLayer(hidden, 4, 64, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(hidden)
        angles = torch.arange(DIGEST)[:, None] * torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000) / hidden))
        self.register_buffer(
            "positions", torch.stack([angles.sin(), angles.cos()], dim=2).reshape(DIGEST, hidden), persistent=False
        )

    def forward(self, digests: Tensor, counts: Tensor) -> Tensor:
        """(tensors, DIGEST), of which the first `counts` (tensors,) values are meant -> (tensors, hidden)."""
        digests = digests[:, : int(counts.max())]
        absent = torch.arange(digests.shape[1]) >= counts[:, None]
        encoded = self.layer(
            self.value(digests[:, :, None]) + self.positions[: digests.shape[1]], src_key_padding_mask=absent
        )
        return self.norm(encoded).masked_fill(absent[:, :, None], 0.0).sum(1) / counts[:, None]


class Decoder(nn.Module):
    """The MLP of one operator: (nodes, reads) -> (nodes, *tile), the tile being as large as all of `parts` together.

    Where none of them is as large, as with weights of 32 x 384 and 384 x 32, the MLP makes only the entries that one of
    them has; the others are 0. The first `states` values that are read vary by about 1 / `wanted`, the others by 1.
    """

    made: Tensor

    def __init__(
        self, reads: int, hidden: int, parts: Collection[tuple[int, ...]], states: int = 0, wanted: float = 1
    ) -> None:
        super().__init__()
        self.tile = tuple(max(sizes) for sizes in zip(*parts, strict=True))
        self.whole = self.tile in parts
        made = torch.empty(0, dtype=torch.int64)
        if not self.whole:
            needed = torch.zeros(self.tile, dtype=torch.bool, device="cpu")  # where their number is, if all is on meta
            for part in parts:
                needed[tuple(slice(size) for size in part)] = True
            made = needed.flatten().nonzero().flatten()
        self.register_buffer("made", made, persistent=False)
        entries = math.prod(self.tile) if self.whole else len(made)
        first, last = nn.Linear(reads, hidden), nn.Linear(hidden, entries)
        # So that what comes out varies by about 1 whatever the size of the tile, as `normalized` wants it.
        nn.init.kaiming_normal_(first.weight, nonlinearity="relu")
        first.weight.detach()[:, :states].mul_(wanted)
        nn.init.kaiming_normal_(last.weight, nonlinearity="linear")
        nn.init.zeros_(first.bias)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(first, nn.ReLU(), last)

    def forward(self, states: Tensor) -> Tensor:
        """One tile per row."""
        values: Tensor = self.layers(states)
        if not self.whole:
            values = values.new_zeros(len(values), math.prod(self.tile)).index_copy(1, self.made, values)
        return values.reshape(-1, *self.tile)


def digest(tensor: Tensor) -> Tensor:
    """The DIGEST values by which the hypernetwork reads a tensor, zeros behind a shorter one's end.

    Of more values, the means of DIGEST stretches of equal length; a rest at the end is dropped.
    """
    values = tensor.detach().float().flatten()
    if len(values) >= DIGEST:
        length = len(values) // DIGEST
        return values[: length * DIGEST].reshape(DIGEST, length).mean(1)
    return torch.cat([values, values.new_zeros(DIGEST - len(values))])


def digests(graph: Graph, weights: Mapping[str, Tensor]) -> Tensor:
    """The digests of the tensors of a graph: (tensors, DIGEST)."""
    return torch.stack([digest(weights[node.tensor]) for node in graph.tensors])


def tiled(tile: Tensor, shape: Sequence[int], positions: int = 1) -> Tensor:
    """A tensor of `shape`: the tile cut to it, or repeated along output and then input channels.

    Where `positions` inputs belong to one channel, whole channels repeat.
    """
    cut = tile[tuple(slice(size) for size in shape)]
    if len(shape) > 1 and cut.shape[1] < shape[1]:
        cut = cut[:, : cut.shape[1] // positions * positions]
    times = [-(-size // have) for size, have in zip(shape, cut.shape, strict=True)]
    if max(times, default=1) > 1:
        cut = cut.repeat(times)[tuple(slice(size) for size in shape)]
    return cut


def normalized(values: Tensor, operator: str, scale: float = 1.0) -> Tensor:
    """Generated values of about unit variance as parameters of an operator.

    Weights w sqrt(2 / fan in), 1 in place of 2 for depthwise kernels and those wider than high; a norm's weight 2
    sigmoid(w / 2), which is about 1; biases tanh(b / 5). All but a norm's `scale` times that.
    """
    if operator.startswith("norm"):
        return 2 * torch.sigmoid(values / 2)
    if values.dim() > 1:
        depthwise = values.dim() == 4 and (values.shape[1] == 1 or values.shape[2] < values.shape[3])
        return values * (scale * math.sqrt((1 if depthwise else 2) / values[0].numel()))
    return torch.tanh(values / 5) * scale


def tiles_of(operator: str, nodes: Sequence[Node], maximum: int) -> set[tuple[int, ...]]:
    """Return what the tensors of an operator have of its tile.

    That is as large as the largest of them in every dimension, of which channels of weights are bounded, classes never.
    """
    bounded = [list(node.shape) for node in nodes]
    if maximum:
        for node, sizes in zip(nodes, bounded, strict=True):
            if len(sizes) > 1:
                sizes[1] = min(sizes[1], maximum * node.positions)
                if not operator.startswith("classifier"):
                    sizes[0] = min(sizes[0], maximum)
    tile = tuple(max(sizes) for sizes in zip(*bounded, strict=True))
    return {tuple(map(min, node.shape, tile)) for node in nodes}
