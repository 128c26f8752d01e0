"""Accuracy by exit: one pass over the test set scores all exits of the global model."""

import pytest
import torch

from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.by_hand import TwoExits, loss_of
from wildflower.models.cnn import Cnn3
from wildflower.models.lenet import LeNet5
from wildflower.models.weights import with_weights
from wildflower.rounds.evaluation import Scores
from wildflower.strategies.depthfl import MutualLearningOfExits
from wildflower.strategies.hypemefed.hypemefed import SumOfExits
from wildflower.strategies.method import Training
from wildflower.strategies.scalefl import WeightedExits
from wildflower.tasks.scoring import score
from wildflower.tasks.task import TaskSpec, load_task

CPU = torch.device("cpu")
DEEPEST = {"depthfl": {"depthfl.scored": "deepest"}}  # by default its exits are scored together (test_depthfl.py)


@pytest.mark.parametrize("method", ["hypemefed", "depthfl", "scalefl"])
def test_every_exit_is_scored_on_the_test_set(method, tmp_path):
    changes = METHODS[method] | {"evaluate-every": 1} | DEEPEST.get(method, {})
    engine, scorer = started(small_config(tmp_path, **changes))
    record = engine.run_round(simulated_grid(), 1, scorer).record
    task, strategy = load_task(TaskSpec.from_json(engine.settings.task)), engine.method
    found = []
    for exit in (1, 2, 3):  # each by itself
        architecture = strategy.family.up_to(exit)
        weights = strategy.family.place(architecture).gather(strategy.weights)
        model = with_weights(strategy.family, architecture, weights)
        [correct], _, n, _ = score(model, task, task.test.inputs, task.test.labels, batch_size=256, device=CPU)
        found.append(correct / n)
    assert record["score_by_exit"] == found
    assert record["score"] == found[-1]


def test_a_tiers_accuracy_is_that_of_its_exit_without_another_pass(tmp_path):
    config = small_config(
        tmp_path, **METHODS["depthfl"] | DEEPEST["depthfl"] | {"evaluate-every": 1, "devices-per-round": 6}
    )
    engine, _ = started(config)
    strategy = engine.method
    scored = []

    def scorer(model):
        scored.append(model.architecture)
        return Scores(0.75, 1.0, (0.25, 0.5, 0.75))

    record = engine.run_round(simulated_grid(), 1, scorer).record
    exits = {tier: strategy.family.exit_of(a) for tier, a in engine.asking.tier_architectures.items()}
    assert set(exits.values()) == {1, 2, 3}
    assert record["score_by_tier"] == {tier: exit / 4 for tier, exit in exits.items()}
    assert scored == [strategy.family.full()]


def test_levels_that_are_narrower_too_are_scored_by_themselves(tmp_path):
    config = small_config(tmp_path, **METHODS["scalefl"] | {"evaluate-every": 1, "devices-per-round": 6})
    engine, _ = started(config)
    strategy = engine.method
    scored = []

    def scorer(model):
        scored.append(model.architecture)
        return Scores(0.75, 1.0, (0.25, 0.5, 0.75)) if len(scored) == 1 else Scores(0.1 * len(scored), 1.0, (0.9,))

    record = engine.run_round(simulated_grid(), 1, scorer).record
    # The paper's widths leave the two channels of exit 1 whole, and take one of exit 2's four away.
    assert scored == [strategy.family.full(), strategy.candidates[1]]
    assert record["score_by_tier"] == {"whole": 0.75, "half": 0.2, "quarter": 0.25}


def test_a_family_with_one_exit_has_no_accuracy_by_exit(tmp_path):
    engine, scorer = started(small_config(tmp_path, **METHODS["all-large"] | {"evaluate-every": 1}))
    assert engine.run_round(simulated_grid(), 1, scorer).record["score_by_exit"] is None


# The client steps


HALVES = [
    SumOfExits(),
    MutualLearningOfExits(weight=1.0, alpha=0.0, ensemble=True),
    WeightedExits(gamma=1.0, temperature=3.0),
]


@pytest.mark.parametrize("local", HALVES, ids=lambda local: type(local).__name__)
def test_with_one_exit_all_losses_of_exits_are_cross_entropy(local):
    torch.manual_seed(0)
    family = LeNet5(input_shape=(1, 8, 8))
    model = family.build(family.full())
    batch = (torch.rand(4, *family.input_shape), torch.arange(4) % 10)
    assert torch.equal(loss_of(local, model)(*batch), loss_of(Training(), model)(*batch))


@pytest.mark.parametrize("local", HALVES[1:], ids=lambda local: type(local).__name__)
def test_exits_that_are_certain_have_finite_gradients(local):
    model = TwoExits([0.0, 1000.0, 0.0], [1000.0, 0.0, 0.0])
    loss_of(local, model)(torch.zeros(1, 1), torch.tensor([0])).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


@pytest.mark.parametrize("local", HALVES, ids=lambda local: type(local).__name__)
def test_all_heads_of_a_family_with_exits_are_trained(local):
    family = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
    model = family.build(family.up_to(2))
    loss_of(local, model)(torch.rand(4, 1, 8, 8), torch.arange(4)).backward()
    assert all(
        float(parameter.grad.abs().sum()) > 0 for name, parameter in model.named_parameters() if "conv.bias" not in name
    )
    model.zero_grad()
    loss_of(Training(), model)(torch.rand(4, 1, 8, 8), torch.arange(4)).backward()
    assert model.get_submodule("exit1.classifier").weight.grad is None
