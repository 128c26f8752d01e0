"""The memory of devices that are trained at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from wildflower.client_app.row_layers import RowLayers, takes_rows
from wildflower.client_app.stack import for_rows
from wildflower.messages.orders import LocalTraining
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import OPTIMIZERS, cost
from wildflower.models.network import Network

ROWS = 2  # devices whose step is followed
# What a process keeps of the convolutions of a stack. Measured: 3 to 10 MB in networks of 2 to 6 of them.
CONVOLUTIONS_BYTES = 6 * 10**6
log = logging.getLogger("flwr")  # what Flower's own log is called


class _Loss(nn.Module):
    """Cross-entropy of all exits, for labels of 0."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        from wildflower.models.trace import loss_of, outputs_of

        logits = outputs_of(self.network, inputs)
        size = logits[-1].shape  # (batch, classes), or (batch, classes, positions)
        return loss_of(logits, torch.zeros((size[0], *size[2:]), dtype=torch.int64))


def price_at_once(
    family: Family, architecture: Architecture, training: LocalTraining, order_bytes: int
) -> tuple[int, int]:
    """Return the bytes of each device that trains in a stack, and what they take together beside these.

    order_bytes: what one device's order takes. What is above training the model alone comes on top, for each.
    """
    size, optimizer = training.examples_at_once, training.priced_optimizer
    try:
        alone_bytes = cost(family, architecture, batch_size=size, optimizer=optimizer).peak_training_memory_bytes
        each_bytes, beside_bytes = stack_bytes(family, architecture, size, optimizer)
    except Exception as error:  # of any kind: a model is any Python, and one without a stack is trained in turn
        log.debug("A stack of %s has no price: %s", architecture, error)
        return order_bytes, 0
    return each_bytes + max(0, order_bytes - alone_bytes), beside_bytes


@lru_cache(maxsize=256)
def stack_bytes(family: Family, architecture: Architecture, batch_size: int, optimizer: str) -> tuple[int, int]:
    """Return what each device takes in a stack, and what a stack takes beside its devices.

    A step of two devices is taken on zeros, and its tensors are followed from their making to their release. Each
    device has its model beside its row of the stack, and the row's gradients and optimizer state.

    Raises an error of any kind where the model cannot be trained in a stack.

    Args:
        batch_size: examples that a device computes with at once.
        optimizer: one of `wildflower.models.cost.OPTIMIZERS`.
    """
    from wildflower.models.trace import Storages

    with torch.random.fork_rng(devices=[]):  # what a process draws does not depend on what it has priced
        loss = _Loss(family.build(architecture).train())
    trained = {name: p for name, p in loss.named_parameters() if p.requires_grad}
    frozen = {name: p for name, p in loss.named_parameters() if not p.requires_grad}
    rows = {name: nn.Parameter(p.detach().expand(ROWS, *p.shape).contiguous()) for name, p in trained.items()}
    buffers = {name: b.expand(ROWS, *b.shape).contiguous() for name, b in loss.named_buffers()}

    def compute(rows: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        found: Tensor = functional_call(loss, {**rows, **buffers, **frozen}, (inputs,))
        return found

    def computed(inputs: Tensor) -> Tensor:
        network = loss.network
        if type(network) is not Network or network.early or not takes_rows(network):
            with for_rows(loss, None):
                return vmap(compute, randomness="different")(rows, buffers, inputs)
        shared = {name: p.expand(ROWS, *p.shape) for name, p in frozen.items()}
        with RowLayers(loss, {}) as layers:
            outputs = layers.outputs(network, {**rows, **buffers, **shared}, inputs).flatten(0, 1)
        return F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.int64))

    storages = Storages([*rows.values(), *buffers.values(), *loss.parameters(), *loss.buffers()])
    with torch.random.fork_rng(devices=[]), storages:
        batches = [torch.zeros(max(2, batch_size), *family.input_shape, dtype=family.input_dtype) for _ in range(ROWS)]
        computed(torch.stack(batches)).sum().backward()
    kept = OPTIMIZERS[optimizer]
    held_bytes = sum(tensor.nbytes for tensor in (*loss.parameters(), *loss.buffers()))
    weights_bytes = sum(p.nbytes for p in trained.values())
    largest_bytes = max(p.nbytes for p in trained.values())
    held_bytes += kept.copies * weights_bytes + sum(b.nbytes for b in loss.buffers())
    step_bytes = max(storages.peak_bytes // ROWS, weights_bytes + kept.temporary * largest_bytes)
    return held_bytes + step_bytes, CONVOLUTIONS_BYTES if storages.convolutions else 0
