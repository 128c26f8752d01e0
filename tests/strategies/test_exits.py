"""Accuracy by exit: one pass over the test set scores all exits of the global model."""

import pytest
import torch
from strategies.base import Scores

from tasks.scoring import score
from tasks.task import TaskSpec, load_task
from tests.small_run import METHODS, simulated_grid, small_config, started

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["hypemefed", "depthfl", "scalefl"])
def test_every_exit_is_scored_on_the_test_set(method, tmp_path):
    strategy, scorer = started(small_config(tmp_path, **METHODS[method] | {"evaluate-every": 1}))
    record = strategy.run_round(simulated_grid(), 1, scorer).record
    task = load_task(TaskSpec.from_json(strategy.settings.task))
    found = []
    for exit in (1, 2, 3):  # each by itself
        cut = strategy.leading_cut(strategy.family.up_to(exit))
        model = strategy.family.build(cut.architecture)
        model.load_state_dict(cut.weights)
        [correct], _, n = score(model, task, task.test.inputs, task.test.labels, batch_size=256, device=CPU)
        found.append(correct / n)
    assert record["score_by_exit"] == found
    assert record["score"] == found[-1]


def test_a_tiers_accuracy_is_that_of_its_exit_without_another_pass(tmp_path):
    config = small_config(tmp_path, **METHODS["depthfl"] | {"evaluate-every": 1, "devices-per-round": 6})
    strategy, _ = started(config)
    scored = []

    def scorer(model):
        scored.append(model.architecture)
        return Scores(0.75, 1.0, (0.25, 0.5, 0.75))

    record = strategy.run_round(simulated_grid(), 1, scorer).record
    exits = {tier: strategy.family.exit_of(a) for tier, a in strategy.tier_architectures.items()}
    assert set(exits.values()) == {1, 2, 3}
    assert record["score_by_tier"] == {tier: exit / 4 for tier, exit in exits.items()}
    assert scored == [strategy.family.full()]


def test_levels_that_are_narrower_too_are_scored_by_themselves(tmp_path):
    config = small_config(tmp_path, **METHODS["scalefl"] | {"evaluate-every": 1, "devices-per-round": 6})
    strategy, _ = started(config)
    scored = []

    def scorer(model):
        scored.append(model.architecture)
        return Scores(0.75, 1.0, (0.25, 0.5, 0.75)) if len(scored) == 1 else Scores(0.1 * len(scored), 1.0, (0.9,))

    record = strategy.run_round(simulated_grid(), 1, scorer).record
    # The paper's widths leave the two channels of exit 1 whole, and take one of exit 2's four away.
    assert scored == [strategy.family.full(), strategy.candidates[1]]
    assert record["score_by_tier"] == {"whole": 0.75, "half": 0.2, "quarter": 0.25}


def test_a_family_with_one_exit_has_no_accuracy_by_exit(tmp_path):
    strategy, scorer = started(small_config(tmp_path, **METHODS["all-large"] | {"evaluate-every": 1}))
    assert strategy.run_round(simulated_grid(), 1, scorer).record["score_by_exit"] is None
