"""Families whose networks are any modules: known by building them without memory, and priced by tracing a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from typing_extensions import override

from wildflower.models.any_network import AnyNetwork
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.class_dimensions import growing, of_classes
from wildflower.models.frozen import marked, without_gradients
from wildflower.models.held import fill_held, from_first_weights, held_tensors, lacks_values
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.models.placement import CLASSES, Axis, Coordinates, Placement, Select, Window, leading
from wildflower.models.skeleton import parameters_without_memory
from wildflower.plugins.draws import inputs_like, same_draws
from wildflower.plugins.flower_log import log
from wildflower.plugins.reference import PluginError


@dataclass(frozen=True)
class ModuleFamily(Family):
    """A family that says how the network of an architecture is built, and no more.

    A sub-model's tensors are leading slices of the tensors of the same name in the largest one.
    """

    @abstractmethod
    def network(self, arch: Architecture) -> Network:
        """Return the sub-model of a valid architecture, initialized, on the current default device."""

    @override
    def build(self, arch: Architecture) -> Network:
        self.validate(arch)
        return without_gradients(self, self.network(arch))

    def without_memory(self, arch: Architecture) -> Network:
        """Return the sub-model to be given weights; all but parameters has the values that it has on every device.

        Constants that are drawn at random are the same for an architecture.
        """
        network = _skeleton(self, arch)
        if isinstance(network, AnyNetwork) and _holds(self, arch):
            fill_held(network.module, lambda: self.drawn(arch))
            network.held = tuple(held_tensors(network.module).values())
        return network

    def from_first_weights(self, arch: Architecture) -> list[str]:
        """Return the names of constants of a sub-model that come from its first weights (`wildflower.models.held`)."""
        skeleton = _skeleton(self, arch)
        if not isinstance(skeleton, AnyNetwork) or not lacks_values(skeleton.module):
            return []
        return from_first_weights(skeleton.module, self.drawn(arch), self.drawn(arch, 1))

    def drawn(self, arch: Architecture, seed: int = 0) -> nn.Module:
        """Return the module with memory, the same each time."""
        with same_draws(seed):
            network = self.build(arch)
        return network.module if isinstance(network, AnyNetwork) else network

    @override
    def tensors(self, arch: Architecture) -> Mapping[str, TensorSpec]:
        return _tensors(self, arch)

    @override
    def further_names(self) -> Mapping[str, str]:
        return _further_names(self)

    def place(self, arch: Architecture, select: Select = leading) -> Placement:
        """Return the leading slices, the only cut there is."""
        if select is not leading:
            raise ValueError(
                f"{self.name}: its sub-models are leading slices, and the strategy selects other channels: take one "
                "that does not, such as heterofl or fedavg, or a family with channel groups (docs/families.md)"
            )
        return _placement(self, arch)

    def coordinates(self, name: str, spec: TensorSpec) -> tuple[Coordinates, ...]:
        """Return where a sub-model's tensor lies in the global one of its name: the leading entries."""
        return tuple(slice(0, size) for size in spec.shape)


@lru_cache(maxsize=256)
def _holds(family: ModuleFamily, arch: Architecture) -> bool:
    """Say whether a module has tensors outside of its tables, or buffers that got no memory and do not travel."""
    network = _skeleton(family, arch)
    return isinstance(network, AnyNetwork) and (bool(held_tensors(network.module)) or lacks_values(network.module))


def _skeleton(family: ModuleFamily, arch: Architecture) -> Network:
    with same_draws(), parameters_without_memory():
        return family.build(arch)


@lru_cache(maxsize=256)
def _tensors(family: ModuleFamily, arch: Architecture) -> dict[str, TensorSpec]:
    found = meta_state(family, arch)
    classes, of_full = _class_dimensions(family, arch, found), _of_full(family)
    if other := next((name for name in found if classes.get(name) != of_full.get(name)), None):
        one, another = ("this one", "the largest one") if other in classes else ("the largest one", "this one")
        raise ValueError(
            f"{family.spec()['name']}: in the sub-model {arch.to_json()} the tensor {other} is of a head, which grows "
            f"with the classes, in {one} and not in {another}, so that it would be averaged with something else: give "
            "the head a name that is the same at every level, such as self.head, and the layers an nn.ModuleList of "
            "their own"
        )

    def axes(name: str, tensor: Tensor) -> tuple[Axis | Window | None, ...]:
        return tuple(Axis(CLASSES) if classes.get(name) == d else None for d in range(tensor.dim()))

    return marked(family, {name: TensorSpec(tuple(t.shape), t.dtype, axes(name, t)) for name, t in found.items()})


@lru_cache(maxsize=64)
def _further_names(family: ModuleFamily) -> dict[str, str]:
    network = family.without_memory(family.full())
    return network.ties if isinstance(network, AnyNetwork) else {}


@lru_cache(maxsize=64)
def _one_more(family: ModuleFamily) -> ModuleFamily | None:
    """Return the family for one class more, or None where it has just these classes, which the log says."""
    try:
        return replace(family, classes=family.classes + 1)
    except PluginError as error:
        log.warning("No tensor of %s counts as its head: for one class more, %s", family.spec()["name"], error)
        return None


@lru_cache(maxsize=64)
def _of_full(family: ModuleFamily) -> dict[str, int]:
    return _class_dimensions(family, family.full(), meta_state(family, family.full()))


def _class_dimensions(family: ModuleFamily, arch: Architecture, mine: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the dimension of classes of every tensor that has one, as `wildflower.models.class_dimensions` finds it.

    None has one where the network cannot be built for one class more.

    Args:
        mine: the sub-model's `meta_state`.
    """
    one_more = _one_more(family)
    if one_more is None:
        return {}
    candidates = growing(mine, meta_state(one_more, arch), family.classes)

    def build() -> Network:
        with same_draws():
            return one_more.build(arch)

    inputs = inputs_like((2, *family.input_shape), family.input_dtype, torch.Generator().manual_seed(0))
    return of_classes(candidates, mine, build, inputs)


def meta_state(family: Family, arch: Architecture) -> dict[str, Tensor]:
    """Return what an architecture's state dict holds, without memory."""
    return family.without_memory(arch).state_dict()


@lru_cache(maxsize=256)
def _placement(family: ModuleFamily, arch: Architecture) -> Placement:
    specs = family.tensors(arch)
    return Placement(
        {name: family.coordinates(name, spec) for name, spec in specs.items()},
        {name: spec.axes for name, spec in specs.items()},
    )
