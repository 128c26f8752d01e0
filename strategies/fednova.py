"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem", NeurIPS 2020): normalized averaging.

Devices that take more local steps pull the mean of FedAvg toward their own minimum. Here every device's change is
divided by its effective number of steps before the changes are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from wildflower.messages.tensor_sets import STATISTICS
from wildflower.models.base import Family
from wildflower.models.weights import trained_parameters
from wildflower.strategies.method import Answer, ClientContext, ClientStep, Order, Trained
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params
from wildflower.strategies.training_steps import ChangesTraining

# The client step ------------------------------------------------------------------------------------------------------


def effective_steps(steps: int, momentum: float) -> float:
    """a_i = ||a_i||_1 of SGD with momentum rho over tau steps: [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho).

    Without momentum these are the steps themselves (Section 4.1 of the paper).
    """
    return float((steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum))


class NormalizedTraining(ChangesTraining):
    """Devices minimize the task's loss, such as L = CE(f(x), y), and return d_i = (x - y_i) / a_i beside a_i.

    x is what was received, y_i what was trained, a_i the effective number of steps. Batch norm's running statistics are
    returned as they are.
    """

    def facts(self, family: Family) -> dict[str, int]:
        """`effective_steps`: a_i."""
        return {"effective_steps": 1}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """A device that trained took a step."""
        if facts["effective_steps"][0] < 1:
            raise ValueError(f"effective_steps must be at least 1, not {facts['effective_steps'][0]}")

    def train(self, context: ClientContext) -> Answer:
        """Train, and divide the change by the effective number of steps."""
        model = self.model(context)
        received = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
        loss = context.fit(model, self.loss(context, model))
        steps = effective_steps(context.steps_taken, context.training.momentum)
        changes = {name: (received[name] - p.detach()) / steps for name, p in trained_parameters(model).items()}
        return self.answer(model, changes, loss, {"effective_steps": [steps]})


# The server half ------------------------------------------------------------------------------------------------------


class FedNova(OneArchitecture[Params]):
    """x <- x - tau_eff sum_i p_i d_i with tau_eff = sum_i p_i a_i and p_i = n_i / n (Eq. 6 and Algorithm 1).

    Every device trains the whole model, by plain SGD or SGD with momentum.
    """

    returns_changes: ClassVar[bool] = True
    parameter_copies: ClassVar[int] = 1  # what was received
    only_sgd: ClassVar[bool] = True

    def client_step(self, order: Order) -> ClientStep:
        """Training whose change is normalized."""
        return NormalizedTraining()

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """One step along the mean of the normalized changes, as long as the devices' steps are in the mean."""
        if not trained:
            return {}
        examples = sum(done.examples for done in trained)
        tau = sum(done.examples * self._steps(done) for done in trained) / examples
        # What nobody returned does not change, and robust means look at how far each device is from that.
        unchanged = {
            name: old if name.endswith(STATISTICS) else torch.zeros_like(old) for name, old in self.weights.items()
        }
        mean = self.mean.mean(unchanged)
        self.weights = {
            name: mean[name] if name.endswith(STATISTICS) else old - tau * mean[name]
            for name, old in self.weights.items()
        }
        return {"effective_steps": tau}

    def _steps(self, done: Trained) -> float:
        """A device's a_i, no more than its examples allow: what a device says must not stretch the server's step."""
        training = self.settings.training
        maximum = training.steps or training.epochs * -(-done.examples // training.batch_size)
        return min(done.facts["effective_steps"][0], effective_steps(maximum, training.momentum))
