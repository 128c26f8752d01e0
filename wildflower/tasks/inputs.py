"""Inputs as stored to what a model reads: normalized, augmented, in the memory layout that is fastest."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from wildflower.tasks.data import Vocabulary


def readable(
    inputs: Tensor, normalization: tuple[Tensor, Tensor] | None, vocabulary: Vocabulary | None = None
) -> Tensor:
    """Turn inputs as stored into what a model reads.

    Images and signals become float32, normalized per channel by mean and deviation. Tokens, which have no
    normalization, become int64; with a vocabulary they are texts, which are cut to the longest of the batch.
    """
    if vocabulary is not None:
        used = (inputs != vocabulary.pad_id).any(dim=0).nonzero()
        inputs = inputs[:, : int(used.max()) + 1 if len(used) else 1]
    if normalization is None:
        return inputs.to(torch.int64, copy=True)  # what is done to it must not be done to the data set
    per_channel = (-1, *[1] * (inputs.dim() - 2))
    mean, std = (value.view(per_channel).to(inputs.device) for value in normalization)
    if inputs.dtype == torch.float64:  # of tables: what is common to all values is taken away before they are rounded
        return ((inputs - mean) / std).float()
    return (inputs.float() - mean).div_(std)


def crop_and_flip(images: Tensor, generator: Generator, *, padding: int, flip: bool) -> Tensor:
    """Crop every image at random, padded by `padding` zeros, to its own size; with `flip` mirror half of them.

    `images` are (batch, channels, height, width). All images are gathered at once, from row and column numbers.
    """
    batch, channels, height, width = images.shape
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, batch, 1), generator=generator, device=generator.device)
    rows = tops + torch.arange(height, device=generator.device)
    columns = lefts + torch.arange(width, device=generator.device)
    if flip:
        mirrored = torch.rand((batch, 1), generator=generator, device=generator.device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    return padded[
        torch.arange(batch, device=images.device)[:, None, None, None],
        torch.arange(channels, device=images.device)[:, None, None],
        rows.to(images.device)[:, None, :, None],
        columns.to(images.device)[:, None, None, :],
    ]


def channels_last(inputs: Tensor) -> Tensor:
    """Return images (batch, channels, height, width) with a pixel's channels side by side; other inputs as they are.

    Convolutions give their outputs the layout of their inputs, so that the activations of a whole network have it.
    Weights and gradients stay as they are.
    """
    if inputs.dim() != 4 or not inputs.is_floating_point():
        return inputs
    # Of images of one channel `contiguous` would return the same tensor, by which convolutions do not know the layout.
    return torch.empty_like(inputs, memory_format=torch.channels_last).copy_(inputs)


def in_layout(inputs: Tensor, layout: str) -> Tensor:
    """Return inputs in the run's `layout`: "channels-last" as of `channels_last`, "contiguous" as they are."""
    return channels_last(inputs) if layout == "channels-last" else inputs


def laid_out_for(model: object, inputs: Tensor) -> Tensor:
    """Return inputs as a model computes fastest without gradients: images take half the time with `channels_last`.

    That is so for the project's networks, which say so. A module of somebody else's may call `view`, for which its
    inputs and what comes of them must be contiguous.
    """
    return channels_last(inputs) if getattr(model, "takes_channels_last", False) else inputs
