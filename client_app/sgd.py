"""Plain SGD that starts at once: PyTorch's own optimizers load its compiler first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Sgd(torch.optim.Optimizer):
    """The steps of `torch.optim.SGD` on the CPU, with momentum and weight decay, bit for bit.

    The first optimizer of a process makes PyTorch import its compiler, which takes 1 to 2 seconds of CPU time and
    70 MB. That is more than a small round takes. The two methods that do it are replaced here. Its steps have no hooks,
    and no names in PyTorch's profiler, which take a twentieth of a small network's step.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, momentum: float, weight_decay: float) -> None:
        super().__init__(groups, {"momentum": momentum, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, "params", with a learning rate of their own, "lr"."""
        self.param_groups.append({**self.defaults, **param_group})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or set them to zero."""
        for parameter in self._parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient against it; `closure` computes the loss anew, as in PyTorch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moved:
                continue
            # All at once, which takes less time where they are small. In place, because the gradients have no other
            # use, and copies of all would be held together.
            directions = [parameter.grad for parameter in moved]
            if group["weight_decay"]:
                torch._foreach_add_(directions, moved, alpha=group["weight_decay"])
            if group["momentum"]:
                directions = self._with_momentum(moved, directions, group["momentum"])
            torch._foreach_add_(moved, directions, alpha=-group["lr"])
        return loss

    def _with_momentum(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], momentum: float
    ) -> list[torch.Tensor]:
        states = [self.state[parameter] for parameter in parameters]
        known = [(state["momentum_buffer"], each) for state, each in zip(states, gradients, strict=True) if state]
        if known:
            buffers, added = zip(*known, strict=True)
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, added)
        for state, gradient in zip(states, gradients, strict=True):
            if not state:
                state["momentum_buffer"] = gradient.detach().clone()
        return [state["momentum_buffer"] for state in states]

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


Sgd.step.hooked = True  # type: ignore[attr-defined]  # or PyTorch puts a function around it that has hooks and a name
