"""TensorSets: named sets of tensors that travel between server and devices.

Both sides derive the layout of every tensor set from the work order, and only a digest of the layouts travels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from wildflower.messages.encoding import Wire, encoded_bytes
from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout
from wildflower.messages.sums import ClassSpan
from wildflower.models.architecture import Architecture
from wildflower.models.base import STATISTICS, Family
from wildflower.models.layers import TensorSpec
from wildflower.models.placement import class_dimension

Weights = dict[str, Tensor]
"""Tensors by name."""
TensorSets = dict[str, Weights]
"""Contents of tensor sets by the tensor sets' names."""


@dataclass(frozen=True)
class TensorSet:
    """A named set of tensors that travels as one array.

    Attributes:
        layout: the tensors' names, shapes and types.
        merge: how a node that carries many devices adds their tensor sets up before it answers. None: the server gets
            every device's tensor set by itself. It has no meaning for tensor sets that the server sends.
        class_spans: where the tensors that have a dimension of classes, such as a head's, lie in the flat vector.
        steady: its elements are of the same coordinates in every round, so that a device may add what rounding for the
            wire has lost to what it returns next. False where the device itself chooses which.
    """

    layout: Layout
    merge: Merge | None = None
    class_spans: tuple[ClassSpan, ...] = ()
    steady: bool = True

    @classmethod
    def of(cls, tensors: Mapping[str, TensorSpec], merge: Merge | None = None, *, steady: bool = True) -> TensorSet:
        """Return the set of these tensors, such as those of `Family.tensors`; what is frozen travels by itself, once.

        TypeError where a tensor is described by something else than a `wildflower.models.layers.TensorSpec`.
        """
        if wrong := next((name for name, spec in tensors.items() if not isinstance(spec, TensorSpec)), None):
            raise TypeError(
                f"the tensor {wrong!r} of a tensor set is described by {tensors[wrong]!r}, and must be by a "
                "TensorSpec: ten numbers are wildflower.models.layers.TensorSpec((10,), torch.float32, (None,))"
            )
        tensors = {name: spec for name, spec in tensors.items() if not spec.frozen}
        layout = Layout.of(tensors)
        spans: list[ClassSpan] = []
        start = 0
        for entry in layout.entries:
            if (dimension := class_dimension(tensors[entry.name].axes)) is not None:
                spans.append((start, start + entry.numel, math.prod(entry.shape[dimension + 1 :])))
            start += entry.numel
        return cls(layout, merge, tuple(spans), steady)


def frozen_layout(family: Family, architecture: Architecture) -> Layout:
    """Return the layout of a sub-model's frozen tensors, which a device is sent once."""
    tensors = family.tensors(architecture) if family.freeze else {}
    return Layout.of({name: spec for name, spec in tensors.items() if spec.frozen})


def nbytes(tensor_sets: Mapping[str, TensorSet], wire: Wire = "float32") -> int:
    """Return the bytes of some tensor sets together, as they travel."""
    return sum(encoded_bytes(tensor_set.layout, wire) for tensor_set in tensor_sets.values())


def digest(sent: Mapping[str, TensorSet], returned: Mapping[str, TensorSet]) -> str:
    """Eight bytes, as hex, that differ where server and device disagree about a set's name, tensors or merging."""
    text = "".join(
        f"{way} {name} {tensor_set.layout.digest} {tensor_set.merge.model_dump_json() if tensor_set.merge else ''};"
        for way, tensor_sets in (("sent", sent), ("returned", returned))
        for name, tensor_set in sorted(tensor_sets.items())
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parameters_of(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors that are learned by gradients: all but what is frozen and batch norm's running statistics."""
    return {name: spec for name, spec in tensors.items() if not (spec.frozen or name.endswith(STATISTICS))}
