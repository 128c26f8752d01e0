"""FedNAS: both steps by hand, the halves, and whole rounds over the search network."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.halves import setup
from wildflower.messages.orders import LocalTraining
from wildflower.models.darts import ALPHAS
from wildflower.strategies import fednas
from wildflower.strategies.fednas import FedNAS, FedNASParams, Searching


class Line(nn.Module):
    """f(x) = w x + a, where a is what mixes."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.alphas = nn.Module()
        self.alphas.a = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    def forward(self, x):
        return self.w * x + self.alphas.a


class ClientContext:
    """f(1) = 0 is trained on, f(2) = 5 is held out; the loss is half the squared error.

    trained, held_out: examples (x, y) with f(x) = y; each is a part of its half's batch.
    """

    def __init__(self, steps, trained=((1.0, 0.0),), held_out=((2.0, 5.0),)):
        self._steps, self.training, self.received = steps, LocalTraining(learning_rate=0.1), {"weights": None}
        self._halves = {(0.0, 0.5): trained, (0.5, 1.0): held_out}
        self.task = SimpleNamespace(loss=lambda outputs, labels: (outputs - labels).square().mean() / 2)

    def build(self, weights):
        self.model = Line()
        return self.model

    def optimizer(self, model):
        learned = [p for p in model.parameters() if p.requires_grad]
        assert len(learned) == 1  # w, and not a
        return torch.optim.SGD(learned, lr=0.1)

    def steps(self, model, share):
        one, half = torch.ones(1, dtype=torch.float64), self._halves[share]
        for _ in range(self._steps):
            yield ((x * one, y * one, 1 / len(half)) for x, y in half)


@pytest.fixture(autouse=True)
def round_steps_of_alpha(monkeypatch):
    monkeypatch.setattr(fednas, "RATE", 0.01)
    monkeypatch.setattr(fednas, "DECAY", 0.0)


@pytest.mark.parametrize(("validation_weight", "a"), [(0.5, 0.01), (0.2, -0.01)])
def test_a_pair_of_steps_by_hand(validation_weight, a):
    """w = 1 - 0.1 (1 + 0 - 0) = 0.9. Then in a: L_train has 0.9, L_val has 1.8 - 5 = -3.2.

    0.9 - 0.5 3.2 = -0.7 and 0.9 - 0.2 3.2 = 0.26: Adam's first step is its rate, downhill.
    """
    half = Searching(validation_weight=validation_weight)
    answer = half.train(ClientContext(1))
    assert float(answer.tensor_sets["weights"]["w"]) == pytest.approx(0.9)
    assert float(answer.tensor_sets["weights"]["alphas.a"]) == pytest.approx(a, rel=1e-5)
    assert answer.loss == pytest.approx(0.5)


@pytest.mark.parametrize(("validation_weight", "a"), [(0.4, -0.01), (0.6, 0.01)])
def test_the_gradients_of_a_batch_in_parts_are_means(validation_weight, a):
    """f(1) = 0 and f(3) = 0: (1 + 9) / 2 = 5 in w, which becomes 0.5.

    In a: (0.5 + 1.5) / 2 = 1 of what is trained on. Held out are f(2) = 5 and f(2) = 1: (-4 + 0) / 2 = -2, so that
    1 - 0.4 2 = 0.2 and 1 - 0.6 2 = -0.2. With a sum in place of one of the means one of the signs would be another.
    """
    context = ClientContext(1, trained=((1.0, 0.0), (3.0, 0.0)), held_out=((2.0, 5.0), (2.0, 1.0)))
    answer = Searching(validation_weight=validation_weight).train(context)
    assert float(answer.tensor_sets["weights"]["w"]) == pytest.approx(0.5)
    assert float(answer.tensor_sets["weights"]["alphas.a"]) == pytest.approx(a, rel=1e-5)
    assert answer.loss == pytest.approx((0.5 + 4.5) / 2)


def test_the_next_step_of_the_weights_knows_the_new_alpha():
    """a = 0.01, w = 0.9: w <- 0.9 - 0.1 (0.9 + 0.01) = 0.809."""
    answer = Searching(validation_weight=0.5).train(ClientContext(2))
    assert float(answer.tensor_sets["weights"]["w"]) == pytest.approx(0.809)


def test_a_family_without_operations_to_mix_is_refused():
    with pytest.raises(ValueError, match="set family = 'darts' without a genotype"):
        FedNAS(setup(), FedNASParams())


def test_whole_rounds_change_weights_and_alphas(tmp_path):
    engine, scorer = started(small_config(tmp_path, **METHODS["fednas"] | {"evaluate-every": 1, "local-steps": 2}))
    first = {name: value.clone() for name, value in engine.method.weights.items()}
    grid = simulated_grid()
    record = engine.run_round(grid, 1, scorer).record
    assert record["score"] is not None
    changed = {name for name, value in engine.method.weights.items() if (value != first[name]).any()}
    assert {f"{ALPHAS}normal", f"{ALPHAS}reduce", "classifier.weight"} <= changed
