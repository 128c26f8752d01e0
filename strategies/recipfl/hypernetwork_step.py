"""RecipFL's step of the hypernetwork: what devices learned, through its Jacobian, and Adam (Eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch
from torch import Tensor, nn

from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import Weights
from wildflower.plugins.flower_log import log
from wildflower.strategies.recipfl.graph_hypernetwork import Hypernetwork

# Gradients are added up in whole multiples of 2^-30, so that the order of replies does not matter: sums of whole
# numbers below 2^53 are exact in float64, and what is lost below 1e-9 means nothing to Adam. Float32, exact below 2^24
# only, would not do. A round holds 8 bytes per parameter of the hypernetwork for the sum, beside 4 each for weights,
# one device's gradient and Adam's two moments.
STEPS_PER_UNIT = 2**30
BYTES_PER_PARAMETER = 24
CLIP_NORM = 50.0  # the largest norm of the hypernetwork's gradient, as in the published code
MAX_GRADIENT = 2**10  # of one device in one coordinate: 2^13 such devices are still exact


class HypernetworkStep:
    """One step of Adam in each round along the sum over devices of J^T (sent - returned).

    by_weight: whether the sum is divided by the devices' weights, and so a mean.
    """

    def __init__(self, hypernetwork: Hypernetwork, eta: float) -> None:
        self.parameters = dict(hypernetwork.named_parameters())
        self.adam = torch.optim.Adam(self.parameters.values(), lr=eta)
        self.clip_norm, self.clipped_rounds = CLIP_NORM, 0
        # Of the round that runs: the gradient so far, and the devices' weight in it.
        self.gradient: dict[str, Tensor] = {}
        self.weight = 0.0
        self.by_weight = False

    def add(self, device: int, sent: Weights, returned: Weights, weight: float) -> None:
        """Add a device's share to the gradient; MessageError where its weights went too far from what it was sent.

        Args:
            sent: what the hypernetwork writes for the device, with its graph of operations.
        """
        product = torch.stack([((value.detach() - returned[name]) * value).sum() for name, value in sent.items()]).sum()
        found = torch.autograd.grad(product, list(self.parameters.values()), allow_unused=True)
        gradients = {n: gradient for n, gradient in zip(self.parameters, found, strict=True) if gradient is not None}
        largest = torch.stack([gradient.abs().max() for gradient in gradients.values()])  # whose maximum keeps a NaN
        maximum = weight * float(largest.max())
        if not maximum <= MAX_GRADIENT:
            raise MessageError(
                f"device {device}: its weights went too far from what it was sent (gradient {maximum:g})"
            )
        for name, gradient in gradients.items():
            steps = (gradient * (weight * STEPS_PER_UNIT)).round_()
            if name in self.gradient:
                self.gradient[name] += steps
            else:
                self.gradient[name] = steps.double()
        self.weight += weight

    def take(self, round_number: int) -> None:
        """Take the step, where a device added to it; `by_weight` it is along the mean, else along the sum."""
        gradient, share = self.gradient, self.weight if self.by_weight else 1.0
        self.gradient, self.weight = {}, 0.0
        if not gradient:
            return
        self.adam.zero_grad(set_to_none=True)
        for name, steps in gradient.items():
            self.parameters[name].grad = (steps / (STEPS_PER_UNIT * share)).float()
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.clip_norm))
        if norm > self.clip_norm:
            self.clipped_rounds += 1
            text = "Round %s: the hypernetwork's gradient had norm %.1f and is clipped to %g (%s rounds so far)"
            log.warning(text, round_number, norm, self.clip_norm, self.clipped_rounds)
        self.adam.step()

    def state(self) -> dict[str, Tensor]:
        """Return the hypernetwork and Adam's moments."""
        tensors = {f"hypernetwork/{name}": value.detach() for name, value in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for moment, value in self.adam.state.get(parameter, {}).items():
                tensors[f"adam/{name}/{moment}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state`; ValueError where the hypernetwork is another."""
        found = {name.partition("/")[2]: v for name, v in tensors.items() if name.startswith("hypernetwork/")}
        if {n: v.shape for n, v in found.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise ValueError("the checkpoint's hypernetwork is another than the configuration's")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(found[name])
        self.adam.state.clear()
        for name, value in tensors.items():
            if name.startswith("adam/"):
                of, _, moment = name.removeprefix("adam/").rpartition("/")
                self.adam.state[self.parameters[of]][moment] = value.clone()


def check_memory(hypernetwork: Hypernetwork, tile: int) -> None:
    """Raise ValueError where this machine could never hold what a round takes of a hypernetwork.

    hypernetwork: on the meta device.
    """
    parameters = sum(parameter.numel() for parameter in hypernetwork.parameters())
    needed_bytes, total_bytes = BYTES_PER_PARAMETER * parameters, psutil.virtual_memory().total
    if needed_bytes > total_bytes:
        sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in hypernetwork.decoders.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"recipfl.tile = {tile}: the hypernetwork would have {parameters:,} parameters, {sizes[largest]:,} of them "
            f"to make the tensor {largest!r}, and take {needed_bytes / 1e9:.0f} GB of this machine's "
            f"{total_bytes / 1e9:.0f}: freeze what need not be trained, or take smaller tiles, such as 64"
        )
