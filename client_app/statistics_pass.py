"""One pass over a device's examples for batch norm's statistics: by itself, or of several devices at once.

Devices that are sent the same weights compute the same but for the norms. So one model's other layers take the batches
of all of them as one, which takes far less time where a model is small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from wildflower.client_app.stack import RowError
from wildflower.client_app.stack_operators import InTurn
from wildflower.messages.tensor_sets import STATISTICS, Weights
from wildflower.models.layers import BatchNorm
from wildflower.models.network import Network
from wildflower.strategies.statistics import take_statistics
from wildflower.tasks.inputs import laid_out_for


@dataclass(frozen=True)
class Pass:
    """One pass of a model over a device's examples.

    Attributes:
        sent: the packed weights; passes of one architecture with equal ones have equal models.
        build: returns the model.
        start: returns inputs and labels of every batch for a model, each time from the first one on.
        examples: how many the device has.
        batches: how many batches there are.
    """

    sent: Mapping[str, bytes]
    build: Callable[[], Network]
    start: Callable[[Network], Iterator[tuple[Tensor, Tensor]]]
    examples: int
    batches: int
    device: torch.device

    def alone(self) -> Weights:
        """Return the statistics of this pass and no other."""
        model = self.build()
        take_statistics(model, self.start(model))
        return {name: value for name, value in model.state_dict().items() if name.endswith(STATISTICS)}


def pass_at_once(passes: Sequence[Pass]) -> list[Weights]:
    """Return the statistics of passes of one architecture, of which those with equal weights are made at once.

    Raises:
        InTurn: they cannot be made so.
        RowError: the data of one of them cannot be had.
    """
    found: dict[int, Weights] = {}
    while left := [row for row in range(len(passes)) if row not in found]:
        first = passes[left[0]]
        together = [row for row in left if passes[row].sent == first.sent]
        network = first.build().train()
        _check(network)
        found |= _statistics(network, {row: passes[row] for row in together})
    return [found[row] for row in range(len(passes))]


def _check(network: Network) -> None:
    """Raise InTurn where examples of a batch may have to do with each other in more than batch norms."""
    if type(network) is not Network:
        raise InTurn("nobody knows what its model computes over all examples of a batch")
    for module in network.modules():
        if isinstance(module, _DropoutNd) and module.p:
            raise InTurn("the model draws at random")
        if isinstance(module, _NormBase) and type(module) is not BatchNorm:
            raise InTurn(f"nobody knows what a {type(module).__name__} computes over all examples of a batch")


@torch.no_grad()
def _statistics(network: Network, passes: Mapping[int, Pass]) -> dict[int, Weights]:
    """Return the statistics of some passes, by their places. The network is of use for nothing else afterwards."""
    norms = {name: norm for name, norm in network.named_modules() if isinstance(norm, BatchNorm)}
    found: dict[int, Weights] = {row: {} for row in passes}
    uses: Counter[tuple[int, str]] = Counter()

    def normalized(name: str, norm: BatchNorm, rows: Mapping[int, Tensor], x: Tensor) -> Tensor:
        """Return what a norm makes of the examples of some passes, each by its own statistics."""
        results = []
        for row, of_row in zip(rows, x.split(list(map(len, rows.values()))), strict=True):
            if not uses[row, name] and norm.running_mean is not None and norm.running_var is not None:
                found[row][f"{name}.running_mean"] = norm.running_mean.clone()
                found[row][f"{name}.running_var"] = norm.running_var.clone()
            uses[row, name] += 1  # as of `wildflower.models.layers.mean_statistics`
            mean, variance = (found[row].get(f"{name}.{each}") for each in ("running_mean", "running_var"))
            momentum = 1 / uses[row, name]
            results.append(F.batch_norm(of_row, mean, variance, norm.weight, norm.bias, True, momentum, norm.eps))
        return torch.cat(results)

    batches = {row: each.start(network) for row, each in passes.items()}
    while batches:
        alike: dict[torch.Size, dict[int, Tensor]] = {}
        for row in list(batches):
            try:
                batch = next(batches[row], None)
            except Exception as error:
                raise RowError(row, error) from error
            if batch is None:
                del batches[row]
            else:
                alike.setdefault(batch[0].shape[1:], {})[row] = batch[0]
        for rows in alike.values():
            for name, norm in norms.items():
                norm.forward = partial(normalized, name, norm, rows)  # type: ignore[method-assign]
            network(laid_out_for(network, torch.cat(list(rows.values()))))
    return found
