"""Parcels: named sets of tensors that travel between server and devices.

Both sides derive the layout of every parcel from the work order, and only a digest of the layouts travels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from wildflower.messages.encoding import Wire, encoded_bytes
from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout
from wildflower.models.architecture import Architecture
from wildflower.models.base import STATISTICS, Family
from wildflower.models.layers import TensorSpec
from wildflower.models.placement import CLASSES, Axis

Weights = dict[str, Tensor]
"""Tensors by name."""
Parcels = dict[str, Weights]
"""Contents of parcels by the parcels' names."""


@dataclass(frozen=True)
class Parcel:
    """A named set of tensors that travels as one array.

    Attributes:
        layout: the tensors' names, shapes and types.
        merge: how a node that carries many devices adds their parcels up before it answers. None: the server gets
            every device's parcel by itself. It has no meaning for parcels that the server sends.
        class_spans: (start, stop) in the flat vector of every tensor whose first dimension is the classes.
        steady: its elements are of the same coordinates in every round, so that a device may add what rounding for the
            wire has lost to what it returns next. False where the device itself chooses which.
    """

    layout: Layout
    merge: Merge | None = None
    class_spans: tuple[tuple[int, int], ...] = ()
    steady: bool = True

    @classmethod
    def of(cls, tensors: Mapping[str, TensorSpec], merge: Merge | None = None, *, steady: bool = True) -> Parcel:
        """The parcel of these tensors, such as those of `Family.tensors`; what is frozen travels by itself, once.

        TypeError where a tensor is described by something else than a `wildflower.models.layers.TensorSpec`.
        """
        if wrong := next((name for name, spec in tensors.items() if not isinstance(spec, TensorSpec)), None):
            raise TypeError(
                f"the tensor {wrong!r} of a parcel is described by {tensors[wrong]!r}, and must be by a "
                "TensorSpec: ten numbers are wildflower.models.layers.TensorSpec((10,), torch.float32, (None,))"
            )
        tensors = {name: spec for name, spec in tensors.items() if not spec.frozen}
        layout = Layout.of(tensors)
        spans: list[tuple[int, int]] = []
        start = 0
        for entry in layout.entries:
            axes = tensors[entry.name].axes
            if axes and isinstance(axes[0], Axis) and axes[0].group == CLASSES:
                spans.append((start, start + entry.numel))
            start += entry.numel
        return cls(layout, merge, tuple(spans), steady)


def frozen_layout(family: Family, architecture: Architecture) -> Layout:
    """The layout of a sub-model's frozen tensors, which a device is sent once."""
    tensors = family.tensors(architecture) if family.freeze else {}
    return Layout.of({name: spec for name, spec in tensors.items() if spec.frozen})


def nbytes(parcels: Mapping[str, Parcel], wire: Wire = "float32") -> int:
    """Bytes of some parcels together, as they travel."""
    return sum(encoded_bytes(parcel.layout, wire) for parcel in parcels.values())


def digest(sent: Mapping[str, Parcel], returned: Mapping[str, Parcel]) -> str:
    """Eight bytes, as hex, that differ where server and device disagree about a parcel's name, tensors or merging."""
    text = "".join(
        f"{way} {name} {parcel.layout.digest} {parcel.merge.model_dump_json() if parcel.merge else ''};"
        for way, parcels in (("sent", sent), ("returned", returned))
        for name, parcel in sorted(parcels.items())
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parameters_of(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors that are learned by gradients: all but what is frozen and batch norm's running statistics."""
    return {name: spec for name, spec in tensors.items() if not (spec.frozen or name.endswith(STATISTICS))}
