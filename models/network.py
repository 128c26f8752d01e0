"""Networks of blocks of described layers as modules, and what makes them cheaper to run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wildflower.models.layers import BatchNorm, Block, Halve, Layer, Pool, Relu, Scaler
from wildflower.models.max_pool import MaxOfFour

# Convolutions of fewer output channels, and their norms, take longer with the channels of a pixel side by side: cnn3
# and ResNet-18 from 1.1 to 1.9 times as long in training mode, and 0.5 to 0.9 times as long with 8 channels and more.
LEAST_CHANNELS_LAST = 8


class BlockModule(nn.Module):
    """The module of a `Block`. Where a max-pool follows a ReLU it comes first, see `_pools_first`."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.order = [_add_layer(self, layer) for layer in _pools_first(block.layers)]
        self.shortcut = None if block.shortcut is None else _sequence(block.shortcut)
        self.after = _sequence(block.after)
        self.concat = block.concat

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *input shape) -> (batch, *output shape)."""
        y = x
        for name in self.order:
            y = getattr(self, name)(y)
        if self.concat:
            return torch.cat([x, y], dim=1)
        if self.shortcut is not None:
            y = y + self.shortcut(x)
        return self.after(y)


def _pools_first(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with every ReLU moved behind a max-pool that follows it, where it has fewer values to change.

    All bits stay the same. The largest of some ReLUs is the ReLU of the largest. Where that is 0 no gradient comes back
    in either order, and elsewhere the same value of a window takes it. The price is that of the order in the
    description, whose way back takes more memory. Pools over signals stay where they are: what they return is a view,
    which a ReLU in place would copy on the way back.
    """
    found = [*layers]
    for place in range(1, len(found)):
        before, layer = found[place - 1 : place + 1]
        over_signals = isinstance(layer, Pool) and layer.dimensions == 1
        if isinstance(before, Relu) and isinstance(layer, Pool | Halve) and layer.kind == "max" and not over_signals:
            found[place - 1 : place + 1] = layer, before
    return found


def _add_layer(module: nn.Module, layer: Layer) -> str:
    # Layers without tensors are numbered: no state depends on their names.
    name = layer.name or f"{type(layer).__name__.lower()}{len(module._modules)}"
    module.add_module(name, layer.build())
    return name


def _sequence(layers: tuple[Layer, ...]) -> nn.Sequential:
    sequence = nn.Sequential()
    for layer in layers:
        _add_layer(sequence, layer)
    return sequence


class Network(nn.Module):
    """Blocks one after another: (batch, *input shape) -> (batch, classes); the last one is the deepest head.

    No layer asks for contiguous tensors. `takes_channels_last` says whether passes are faster without them.
    """

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.early = {block.name for block in blocks[:-1] if block.exit}
        for block in blocks:
            self.add_module(block.name, BlockModule(block))
        widths = [layer.out_channels for layer in self.modules() if isinstance(layer, nn.Conv2d)]
        self.takes_channels_last = min(widths, default=0) >= LEAST_CHANNELS_LAST

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the deepest head, one row per example; no other head is computed."""
        for name, block in self.named_children():
            if name not in self.early:
                x = block(x)
        return x

    def settle(self) -> None:
        """Compute what follows from the weights once they are there: of described layers nothing."""

    def exits(self, x: Tensor) -> list[Tensor]:
        """Return the logits of all heads, from the shallowest to the deepest: a list of one without early exits."""
        logits = []
        for name, block in self.named_children():
            if name in self.early:
                logits.append(block(x))
            else:
                x = block(x)
        return [*logits, x]


def pool_by_slices(network: nn.Module) -> None:
    """Let a network that is not trained pool by slices, which takes less time and gives the same bits.

    Networks that are not described by blocks stay as they are.
    """
    for block in network.modules():
        if isinstance(block, BlockModule):
            for name in block.order:
                if _halves(block.get_submodule(name)):
                    block.add_module(name, MaxOfFour())


def _halves(layer: nn.Module) -> bool:
    """Say whether a layer is `nn.MaxPool2d(2)`."""
    return isinstance(layer, nn.MaxPool2d) and (
        (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode) == (2, 2, 0, 1, False)
    )


def lighten(network: nn.Module) -> None:
    """Make the passes of a network shorter that is scored and then dropped: `fold_norms` and `pool_by_slices`."""
    fold_norms(network)
    pool_by_slices(network)


def fold_norms(network: nn.Module) -> None:
    """Fold batch norms, and scalers in front of them, into the convolutions before them, which saves their passes.

    Changes a network that is scored and then dropped. Its function in evaluation mode stays the same but for rounding,
    (w x + b) / r -> (w s / r) x + (b / r - mean) s + shift with s = scale / sqrt(variance + epsilon); in training mode
    it would be another one. Batch norms without running statistics stay, and so do networks that are not described by
    blocks.
    """
    for module in network.modules():
        if isinstance(module, BlockModule):
            _fold(module, module.order)
            for part in (module.shortcut, module.after):
                if part is not None:
                    _fold(part, list(part._modules))


def _fold(parent: nn.Module, order: Sequence[str]) -> None:
    """Fold within layers of a module that follow each other in this order."""
    layers = [parent.get_submodule(name) for name in order]
    for place, conv in enumerate(layers):
        rate, norm_at = 1.0, place + 1
        if norm_at < len(layers) and isinstance(scaler := layers[norm_at], Scaler):
            rate, norm_at = scaler.rate, place + 2
        norm = layers[norm_at] if norm_at < len(layers) else None
        if not isinstance(conv, nn.Conv1d | nn.Conv2d) or not isinstance(norm, BatchNorm) or norm.running_mean is None:
            continue
        assert norm.running_var is not None
        with torch.no_grad():
            by_channel = norm.weight * (norm.running_var + norm.eps).rsqrt()
            bias = norm.bias - norm.running_mean * by_channel
            if conv.bias is not None:
                bias = bias + conv.bias * by_channel / rate
            weight = conv.weight * (by_channel / rate).reshape(-1, *[1] * (conv.weight.dim() - 1))
        conv.weight, conv.bias = nn.Parameter(weight), nn.Parameter(bias)
        for name in order[place + 1 : norm_at + 1]:
            parent.add_module(name, nn.Identity())


class MeanOfExits(nn.Module):
    """A network that says the mean of its exits' logits."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.model = model
        self.takes_channels_last = getattr(model, "takes_channels_last", False)  # which an encoder does not say

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, *input shape) -> (batch, classes)."""
        return torch.stack(self.model.exits(inputs)).mean(dim=0)
