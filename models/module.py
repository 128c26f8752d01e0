"""Families whose networks are any modules: known by building them without memory, and priced by tracing a step."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import OPTIMIZERS, Convolution, Cost
from wildflower.models.held import fill_held, from_first_weights, held_tensors, lacks_values, move_held
from wildflower.models.layers import Network, TensorSpec
from wildflower.models.placement import CLASSES, Axis, Coordinates, Placement, Select, Window, leading
from wildflower.models.skeleton import parameters_without_memory
from wildflower.models.spectral import find_vectors, leave_vectors_out
from wildflower.plugins.draws import same_draws
from wildflower.plugins.reference import PluginError

if TYPE_CHECKING:
    from wildflower.models.trace import Step

log = logging.getLogger("flwr")  # what Flower's own log is called


class AnyNetwork(Network):
    """Any module as a network with one exit: its own parameters, buffers and children, under their own names.

    Buffers of whole numbers, such as batch norm's counters, do not travel: they are left out of the state. Nor do the
    vectors of spectral norms, which follow from the weights. Of tied weights, that is one tensor under several names,
    the state has the first name alone.

    Attributes:
        ties: each further name of a tied tensor -> its first name.
        held: tensors that the module holds outside of its tables, where `find_held` has looked for them.
    """

    held: tuple[Tensor, ...] = ()

    def __init__(self, module: nn.Module) -> None:
        super().__init__([])
        # One set of tables for both, so that what replaces a tensor here replaces it there.
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._inside = (module,)  # in a tuple, or it would be a child of its own
        for part in module.modules():
            # It plays no part under a fixed momentum, but a SyncBatchNorm insists on it.
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
                part.num_batches_tracked = None
            for name, buffer in part._buffers.items():
                if buffer is not None and not buffer.is_floating_point():
                    part._non_persistent_buffers_set.add(name)
        leave_vectors_out(module)
        first: dict[int, str] = {}  # tensor -> its first name
        names = [(n, first.setdefault(id(tensor), n)) for n, tensor in super().state_dict(keep_vars=True).items()]
        self.ties = {name: of for name, of in names if name != of}

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self._inside[0]

    def find_held(self) -> None:
        """Note what the module holds outside of its tables, so that it moves with it to another device."""
        self.held = tuple(held_tensors(self.module).values())

    def settle(self) -> None:
        """Compute what follows from the weights, once they are there."""
        find_vectors(self.module)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AnyNetwork:
        """As of `nn.Module`, also for what is held outside of the tables."""
        with move_held(self.module, self.held, fn):
            super()._apply(fn, recurse)
        return self

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """As of `nn.Module`, but for further names of tied weights."""
        state = super().state_dict(*arguments, **options)
        for name in self.ties:
            state.pop(options.get("prefix", "") + name, None)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of `nn.Module`; ties stay, and their further names need not be there."""
        if not self.ties:
            return super().load_state_dict(state_dict, strict, assign)
        if assign:
            raise ValueError("tied weights are loaded in place: assign = True would give each name a tensor of its own")
        whole = OrderedDict(state_dict)
        whole.update({name: state_dict[of] for name, of in self.ties.items() if of in state_dict})
        whole._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]  # PyTorch's versions
        return super().load_state_dict(whole, strict)

    def forward(self, x: Tensor) -> Tensor:
        """What the module returns: (batch, *input shape) -> (batch, classes); PluginError where it changes `x`."""
        before = _version(x)
        result: Tensor = self._inside[0](x)
        if _version(x) != before:
            raise PluginError(changed_input(self))
        return result

    def exits(self, x: Tensor) -> list[Tensor]:
        """The one exit."""
        return [self(x)]

    def train(self, mode: bool = True) -> AnyNetwork:
        """Call the module's own `train`, which may keep some of its parts in evaluation mode."""
        self._inside[0].train(mode)
        self.training = mode
        return self


def _version(x: Tensor) -> int:
    """How often a tensor has been changed in place; 0 where that is not counted, or a graph is made with a stand-in."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def changed_input(network: nn.Module) -> str:
    """What is wrong with a network that changes its input, and what would be right."""
    module = network._inside[0] if isinstance(network, AnyNetwork) else network
    return (
        f"{type(module).__name__} changes its input in place, so that whatever else passes the same batch on, such as "
        "other levels, would read what it leaves: make a new tensor of it, as x = x - mean in place of x -= mean or "
        "nn.ReLU() in place of nn.ReLU(inplace=True), or begin its forward with x = x.clone()"
    )


@dataclass(frozen=True)
class ModuleFamily(Family):
    """A family that says how the network of an architecture is built, and no more.

    A sub-model's tensors are leading slices of the tensors of the same name in the largest one.
    """

    @abstractmethod
    def network(self, arch: Architecture) -> Network:
        """Return the sub-model of a valid architecture, initialized, on the current default device."""

    def build(self, arch: Architecture) -> Network:
        """See `Family.build`."""
        self.validate(arch)
        return self._with_frozen(self.network(arch))

    def without_memory(self, arch: Architecture) -> Network:
        """See `Family.without_memory`. All but parameters has the values that it has on every device and when scored.

        Constants that are drawn at random are the same for an architecture.
        """
        with same_draws(), parameters_without_memory():
            network = self.build(arch)
        if isinstance(network, AnyNetwork) and _holds(self, arch):
            fill_held(network.module, lambda: self.drawn(arch))
            network.find_held()
        return network

    def from_first_weights(self, arch: Architecture) -> list[str]:
        """Return the names of constants of a sub-model that come from its first weights (`wildflower.models.held`)."""
        with same_draws(), parameters_without_memory():
            skeleton = self.build(arch)
        if not isinstance(skeleton, AnyNetwork) or not lacks_values(skeleton.module):
            return []
        return from_first_weights(skeleton.module, self.drawn(arch), self.drawn(arch, 1))

    def drawn(self, arch: Architecture, seed: int = 0) -> nn.Module:
        """The module with memory, the same each time."""
        with same_draws(seed):
            network = self.build(arch)
        return network.module if isinstance(network, AnyNetwork) else network

    def tensors(self, arch: Architecture) -> Mapping[str, TensorSpec]:
        """See `Family.tensors`; the network is built once, on the meta device."""
        return _tensors(self, arch)

    def further_names(self) -> Mapping[str, str]:
        """See `Family.further_names`."""
        return _further_names(self)

    def place(self, arch: Architecture, select: Select = leading) -> Placement:
        """See `Family.place`: leading slices, the only cut there is."""
        if select is not leading:
            raise ValueError(
                f"{self.name}: its sub-models are leading slices, and the strategy selects other channels: take one "
                "that does not, such as heterofl or fedavg, or a family of described layers (docs/families.md)"
            )
        return _placement(self, arch)

    def coordinates(self, name: str, spec: TensorSpec) -> tuple[Coordinates, ...]:
        """Where a sub-model's tensor lies in the global one of its name: the leading entries."""
        return tuple(slice(0, size) for size in spec.shape)

    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        """See `Family.price`: one training step is followed on fake tensors."""
        step = _step(self, arch, batch_size, accumulates=OPTIMIZERS[optimizer].accumulates)
        return step.cost(batch_size, optimizer)

    def convolutions(self, arch: Architecture) -> set[Convolution]:
        """Those that a step computes."""
        return _step(self, arch, 2, accumulates=False).convolutions

    def answer(self, arch: Architecture, batch_size: int) -> tuple[int, ...]:
        """The shape of what the sub-model returns for each example: (outputs,) or (outputs, positions)."""
        return _step(self, arch, batch_size, accumulates=False).answer


@lru_cache(maxsize=256)
def _holds(family: ModuleFamily, arch: Architecture) -> bool:
    """Whether a module has tensors outside of its tables, or buffers that got no memory and do not travel."""
    with same_draws(), parameters_without_memory():
        network = family.build(arch)
    if not isinstance(network, AnyNetwork):
        return False
    return bool(held_tensors(network.module)) or lacks_values(network.module)


@lru_cache(maxsize=256)
def _step(family: ModuleFamily, arch: Architecture, batch_size: int, *, accumulates: bool) -> Step:
    from wildflower.models.trace import follow  # only a server prices, and a device should not load PyTorch's tracer

    shape, dtype = family.input_shape, family.input_dtype
    return follow(lambda: family.build(arch), batch_size, shape, dtype, family.classes, accumulates=accumulates)


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

    return family._marked({name: TensorSpec(tuple(t.shape), t.dtype, axes(name, t)) for name, t in found.items()})


@lru_cache(maxsize=64)
def _further_names(family: ModuleFamily) -> dict[str, str]:
    network = family.without_memory(family.full())
    return network.ties if isinstance(network, AnyNetwork) else {}


@lru_cache(maxsize=64)
def _one_more(family: ModuleFamily) -> ModuleFamily | None:
    """The family for one class more, or None where it has just these classes, which the log says."""
    try:
        return replace(family, classes=family.classes + 1)
    except PluginError as error:
        log.warning("No tensor of %s counts as its head: for one class more, %s", family.spec()["name"], error)
        return None


@lru_cache(maxsize=64)
def _of_full(family: ModuleFamily) -> dict[str, int]:
    return _class_dimensions(family, family.full(), meta_state(family, family.full()))


def _class_dimensions(family: ModuleFamily, arch: Architecture, mine: Mapping[str, Tensor]) -> dict[str, int]:
    """The dimension of classes of every tensor that has one: the one that grows where there is one class more.

    None has one where the network cannot be built for one class more.

    Args:
        mine: the sub-model's `meta_state`.
    """
    one_more = _one_more(family)
    if one_more is None:
        return {}
    grown = meta_state(one_more, arch)
    return {
        name: dimension
        for name, tensor in mine.items()
        for dimension, size in enumerate(tensor.shape)
        if grown[name].shape[dimension] == size + 1
    }


def meta_state(family: Family, arch: Architecture) -> dict[str, Tensor]:
    """What an architecture's state dict holds, without memory."""
    return family.without_memory(arch).state_dict()


@lru_cache(maxsize=256)
def _placement(family: ModuleFamily, arch: Architecture) -> Placement:
    specs = family.tensors(arch)
    return Placement(
        {name: family.coordinates(name, spec) for name, spec in specs.items()},
        {name: spec.axes for name, spec in specs.items()},
    )
