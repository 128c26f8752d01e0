"""Any module as a network of a family."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from wildflower.models.held import move_held
from wildflower.models.network import Network
from wildflower.models.spectral import find_vectors, leave_vectors_out
from wildflower.plugins.reference import PluginError


class AnyNetwork(Network):
    """Any module as a network with one exit: its own parameters, buffers and children, under their own names.

    Buffers of whole numbers, such as batch norm's counters, do not travel: they are left out of the state. Nor do the
    vectors of spectral norms, which follow from the weights. Of tied weights, that is one tensor under several names,
    the state has the first name alone.

    Attributes:
        ties: each further name of a tied tensor -> its first name.
        held: tensors that the module holds outside of its tables, where it was built to be given weights.
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
        """Return the module itself."""
        return self._inside[0]

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
        """Return what the module returns: (batch, *input shape) -> (batch, classes); PluginError where it changes
        `x`."""
        before = _version(x)
        result: Tensor = self._inside[0](x)
        if _version(x) != before:
            raise PluginError(changed_input(self))
        return result

    def exits(self, x: Tensor) -> list[Tensor]:
        """Return the one exit."""
        return [self(x)]

    def train(self, mode: bool = True) -> AnyNetwork:
        """Call the module's own `train`, which may keep some of its parts in evaluation mode."""
        self._inside[0].train(mode)
        self.training = mode
        return self


def _version(x: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if that is not counted, or a graph is made with a stand-in."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def changed_input(network: nn.Module) -> str:
    """Return what is wrong with a network that changes its input, and what would be right."""
    module = network._inside[0] if isinstance(network, AnyNetwork) else network
    return (
        f"{type(module).__name__} changes its input in place, so that whatever else passes the same batch on, such as "
        "other levels, would read what it leaves: make a new tensor of it, as x = x - mean in place of x -= mean or "
        "nn.ReLU() in place of nn.ReLU(inplace=True), or begin its forward with x = x.clone()"
    )
