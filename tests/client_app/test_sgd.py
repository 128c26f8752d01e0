"""Plain SGD: PyTorch's bits without its compiler."""

import pytest
import torch
from torch import nn

from tests.programs import run_python
from wildflower.client_app.sgd import Sgd


def trained(make) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3))
    unused = nn.Parameter(torch.ones(2))  # has no gradient in any step
    groups = [
        {"params": [*model[0].parameters(), unused], "lr": 0.3},
        {"params": list(model[2].parameters()), "lr": 0.1},
    ]
    optimizer = make(groups)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 2, 5, 5)).square().mean().backward()
        optimizer.step()
    return [*(parameter.detach() for parameter in model.parameters()), unused.detach()]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_its_steps_are_those_of_torch(momentum, weight_decay):
    ours = trained(lambda groups: Sgd(groups, momentum=momentum, weight_decay=weight_decay))
    theirs = trained(lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=momentum, weight_decay=weight_decay))
    for one, other in zip(ours, theirs, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_a_closure_is_called_with_gradients():
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = Sgd([{"params": [weight], "lr": 0.5}], momentum=0.0, weight_decay=0.0)

    def closure():
        optimizer.zero_grad(set_to_none=False)
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert (optimizer.step(closure), weight.item()) == (4.0, 0.0)
    assert (optimizer.step(closure), weight.item()) == (0.0, 0.0)


def test_a_schedule_of_torch_moves_its_rate():
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = Sgd([{"params": [weight], "lr": 0.5}], momentum=0.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in range(2):
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        schedule.step()
    assert weight.item() == pytest.approx(2.0 - 0.5 - 0.05)


def test_a_step_does_not_load_the_compiler():
    program = """if True:
        import sys, torch
        from wildflower.client_app.sgd import Sgd
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = Sgd([{"params": [weight], "lr": 0.5}], momentum=0.9, weight_decay=0.1)
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        print("torch._dynamo" in sys.modules)"""
    done = run_python("-c", program)
    assert done.stdout == "False\n", done.stderr
