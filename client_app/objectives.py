"""Local objectives: what a device minimizes, as functions of (model, inputs, labels)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from messages.orders import Objective

Loss = Callable[[Tensor, Tensor], Tensor]  # (inputs, labels) -> mean loss of the batch


def local_loss(objective: Objective, model: nn.Module, present: Tensor) -> Loss:
    """The loss function of a work order.

    Args:
        model: with the weights as they were received (FedProx keeps a copy of them).
        present: the classes that the device holds (bool, one per class).
    """
    match objective.kind:
        case "cross entropy" | "batch norm statistics":
            return lambda inputs, labels: F.cross_entropy(model(inputs), labels)
        case "masked cross entropy":
            # The original sets absent logits to 0, not to minus infinity: absent classes still take part in softmax.
            absent = ~present
            return lambda inputs, labels: F.cross_entropy(model(inputs).masked_fill(absent, 0.0), labels)
        case "proximal":
            received = [p.detach().clone() for p in model.parameters()]

            def proximal(inputs: Tensor, labels: Tensor) -> Tensor:
                pairs = zip(model.parameters(), received, strict=True)
                distance = torch.stack([(p - r).square().sum() for p, r in pairs]).sum()
                return F.cross_entropy(model(inputs), labels) + objective.mu / 2 * distance

            return proximal
    raise ValueError(f"no objective is called {objective.kind!r}")
