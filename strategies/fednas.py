"""FedNAS (He, Annavaram and Avestimehr, 2020, "Towards Non-I.I.D. and Invisible Data with FedNAS").

Devices train the search network of DARTS and the numbers that mix its operations together; the server averages both.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from pydantic import Field

from wildflower.models.architecture import Architecture
from wildflower.models.cost import OPTIMIZERS, Cost
from wildflower.models.darts import ALPHAS
from wildflower.strategies.method import Answer, ClientContext, ClientStep, Order, Setup, Training
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params, Rate
from wildflower.strategies.pricing import with_parameter_copies

# The client step ------------------------------------------------------------------------------------------------------

RATE, DECAY, BETAS = 3e-4, 1e-3, (0.5, 0.999)  # of the Adam that learns alpha, as in DARTS


class Searching(Training):
    """Devices minimize the task's loss in w and alpha by turns, and hold half of their examples back:

    w <- w - eta_w grad_w L_train(w, alpha);  alpha <- Adam on grad_alpha (L_train(w, alpha) + lambda L_val(w, alpha)).

    validation_weight: lambda.
    """

    validation_weight: float = Field(ge=0)

    def train(self, context: ClientContext) -> Answer:
        """Learn w and alpha by turns, over batches of both halves."""
        model = self.model(context).train()
        alphas = [p for name, p in model.named_parameters() if name.startswith(ALPHAS)]
        for alpha in alphas:
            alpha.requires_grad_(False)
        weights = context.optimizer(model)
        for alpha in alphas:
            alpha.requires_grad_(True)
        learned = [p for group in weights.param_groups for p in group["params"]]
        mixing = torch.optim.Adam(alphas, lr=RATE, betas=BETAS, weight_decay=DECAY)
        loss, seen, total = context.task.loss, 0, 0.0
        train, held_out = context.steps(model, share=(0.0, 0.5)), context.steps(model, share=(0.5, 1.0))
        for batch in train:
            parts = list(batch)  # both steps take gradients on them
            held_parts = next(held_out, None)
            if held_parts is None:
                break
            model.zero_grad(set_to_none=True)
            for x, y, weight in parts:
                value = loss(model(x), y)
                (weight * value).backward()
                seen, total = seen + len(y), total + float(value.detach()) * len(y)
            if context.training.clip_norm:
                torch.nn.utils.clip_grad_norm_(learned, context.training.clip_norm)
            weights.step()
            model.zero_grad(set_to_none=True)
            # One after the other, so that one graph is held at a time.
            for x, y, weight in parts:
                (weight * loss(model(x), y)).backward()
            for x, y, weight in held_parts:
                (weight * self.validation_weight * loss(model(x), y)).backward()
            mixing.step()
            del parts  # two batches would be held while the next one is made
        model.zero_grad(set_to_none=True)
        return Answer(model, {"weights": dict(model.state_dict())}, total / max(1, seen))


# The server half ------------------------------------------------------------------------------------------------------


class FedNASParams(Params):
    """FedNAS's settings."""

    validation_weight: Rate = Field(
        1.0, description="Weight of the loss over the held-out half of a device's examples (lambda)"
    )


class FedNAS(OneArchitecture[FedNASParams]):
    """w <- sum_k (n_k / n) w_k and alpha <- sum_k (n_k / n) alpha_k, over the family `darts`."""

    def __init__(self, setup: Setup, params: FedNASParams) -> None:
        super().__init__(setup, params)
        if not any(name.startswith(ALPHAS) for name in self.weights):
            raise ValueError(
                f"fednas searches in mixed operations, and {self.family.name} has none: set family = 'darts' without a "
                "genotype"
            )

    def client_step(self, order: Order) -> ClientStep:
        """Steps of weights and alphas in turn."""
        return Searching(validation_weight=self.params.validation_weight)

    def training_cost(self, architecture: Architecture) -> Cost:
        """Three times forward and backward per pair of steps, in place of once; gradients are held through two.

        In epochs, a pair of steps goes through twice as many examples, each half of the device's. With micro-batches
        the inputs of a whole batch are held all the same, because both steps go through them.
        """
        training = self.settings.training
        # Where gradients are added up, their sum is in the price already.
        copies = 0 if OPTIMIZERS[self.settings.optimizer].accumulates else 1
        price = with_parameter_copies(super().training_cost(architecture), copies)
        example_bytes = math.prod(self.family.input_shape) * self.family.input_dtype.itemsize
        inputs_bytes = (training.batch_size - training.examples_at_once) * example_bytes
        flops = 3 * price.training_flops if training.steps else 3 * price.training_flops // 2
        memory_bytes = price.peak_training_memory_bytes + inputs_bytes
        return replace(price, training_flops=flops, peak_training_memory_bytes=memory_bytes)
