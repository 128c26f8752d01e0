"""Weights of once-for-all's published MobileNetV3 supernets (Cai et al. 2020), as sub-networks of the family here.

Once-for-all has learned matrices in every block, by which a kernel becomes a smaller one: the middle of the 7x7 kernel,
as a vector of 25, times a matrix of 25x25 is the 5x5 kernel, and the middle of that times one of 9x9 the 3x3 kernel.
Leading slices of global tensors cannot say that, so the matrices are applied when a sub-network is taken out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.mobilenet import MobileNetV3

EPSILON = 1e-5  # that once-for-all's norms add to variances
# What the repository mit-han-lab/once-for-all calls the parts of a network, and of a block.
NETWORK = {
    "stem.conv": "first_conv.conv",
    "stem.norm": "first_conv.bn",
    "features.conv": "final_expand_layer.conv",
    "features.norm": "final_expand_layer.bn",
    "head.fc": "feature_mix_layer.conv",
    "head.classifier": "classifier.linear",
}
BLOCK = {
    "expand": "inverted_bottleneck.conv",
    "norm1": "inverted_bottleneck.bn",
    "depthwise": "depth_conv.conv",
    "norm2": "depth_conv.bn",
    "gate.fc1": "depth_conv.se.fc.reduce",
    "gate.fc2": "depth_conv.se.fc.expand",
    "project": "point_linear.conv",
    "norm3": "point_linear.bn",
}


def once_for_all(state: Mapping[str, Tensor], family: MobileNetV3, architecture: Architecture) -> dict[str, Tensor]:
    """Return the weights of a sub-network, from the state dict of a published file (its "state_dict").

    The network then answers as once-for-all's does, with the file's batch norm statistics, which are those of the whole
    supernet.

    Raises:
        ValueError: the file lacks a tensor of the whole family or a matrix of kernels, or has it in another shape.
    """
    theirs = {_short(name): tensor for name, tensor in state.items()}
    blocks = ["first", *(block for blocks in family.stages.values() for block in blocks)]
    parts = dict(NETWORK)
    for number, block in enumerate(blocks):
        parts |= {f"{block}.{part}": f"blocks.{number}.{path}" for part, path in BLOCK.items()}
    whole = {}
    for name, spec in family.tensors(family.full()).items():
        part, _, kind = name.rpartition(".")
        if name == "head.fc.bias":  # which once-for-all has not
            whole[name] = torch.zeros(spec.shape)
            continue
        given = _get(theirs, f"{parts[part]}.{kind}")
        whole[name] = given.flatten(1) if name == "head.fc.weight" else given
        if whole[name].shape != spec.shape:
            raise ValueError(
                f"{parts[part]}.{kind} has the shape {tuple(given.shape)}, and {name} of the family {spec.shape}: its "
                "width_multiplier, depths, expand_ratios and kernel_sizes must be those of the file's name"
            )
    found = family.place(architecture).gather(whole)
    for block, side in zip(family.kernels, architecture.kernels, strict=True):
        if (name := f"{block}.depthwise.weight") in found:
            kernel = whole[name][: len(found[name])]
            for larger, smaller in pairwise(sorted(family.kernel_sizes, reverse=True)):
                if larger > side:
                    called = f"{parts[f'{block}.depthwise']}.{larger}to{smaller}_matrix"
                    matrix = _get(theirs, called)
                    if matrix.shape != (smaller**2, smaller**2):
                        raise ValueError(f"{called} has the shape {tuple(matrix.shape)}, not {(smaller**2,) * 2}")
                    kernel = transformed(kernel, matrix)
            found[name] = kernel
    for name in [name for name in found if name.endswith("running_var")]:
        norm, variance = name.removesuffix("running_var"), found[name]
        found[f"{norm}weight"] = found[f"{norm}weight"] * ((variance + family.EPSILON) / (variance + EPSILON)).sqrt()
    return found


def transformed(kernel: Tensor, matrix: Tensor) -> Tensor:
    """Return a smaller kernel: the middle of a kernel (channels, 1, side, side), row by row, times a matrix."""
    side = round(len(matrix) ** 0.5)
    edge = (kernel.shape[-1] - side) // 2
    middle = kernel[..., edge : edge + side, edge : edge + side]
    return (middle.flatten(2) @ matrix.T).reshape(middle.shape)


def _short(name: str) -> str:
    """Return a name without what differs between once-for-all's versions, and between layers that are cut or not."""
    name = re.sub(r"^(blocks\.\d+)\.(mobile_inverted_conv|conv)\.", r"\1.", name)
    return re.sub(r"\.(conv|bn|linear)\.\1\.", r".\1.", name)


def _get(theirs: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in theirs:
        raise ValueError(f"once-for-all's file has no {name}: take the state_dict of one of its MobileNetV3 supernets")
    return theirs[name].detach().float()
