"""Few nested architectures of a search, and what is trained beside a device's own."""

import pytest
import torch

from benchmarks.methods_that_win.nested_search import NestedSearch, NestedSearchParams, SandwichTraining
from tests.small_run import simulated_grid, small_config, started
from tests.strategies.by_hand import CLASSIFIER, CLASSIFIER_BIAS, FC, FC_BIAS, OneHidden, loss_of, setup
from wildflower.devices.budget import Budget
from wildflower.models.cnn import Cnn3
from wildflower.models.cost import cost
from wildflower.models.resnet import ResNet18
from wildflower.strategies.method import Order
from wildflower.strategies.pricing import Means, fits


def search(folder, **changes):
    family = ResNet18(input_shape=(1, 8, 8), first_channels=4, norm="static", scaler=True)
    params = NestedSearchParams(**{"shares": (0.0, 0.5, 1.0), "searcher": "exact", "masked_loss": True} | changes)
    return NestedSearch(setup(folder, family), params)


def priced(strategy, arch):
    return cost(strategy.family, arch, batch_size=2, optimizer=strategy.settings.optimizer)


def fleet_of_two(strategy):
    """Budgets of three devices that afford something in between, and of one that affords the whole network."""
    small, large = priced(strategy, strategy.space.smallest()), priced(strategy, strategy.space.largest())
    middle_bytes = (small.peak_training_memory_bytes + large.peak_training_memory_bytes) // 2
    middle = Budget(
        middle_bytes, (small.payload_bytes + large.payload_bytes) // 2, (small.payload_bytes + large.payload_bytes) // 2
    )
    return [middle] * 3 + [
        Budget(2 * large.peak_training_memory_bytes, 2 * large.payload_bytes, 2 * large.payload_bytes)
    ]


@pytest.mark.parametrize("criterion", ["parameters", "flops", "balanced"])
def test_few_architectures_are_nested_and_every_budget_is_rounded_down_to_one(criterion, tmp_path):
    strategy = search(tmp_path, architectures=2, criterion=criterion, tolerance=0.0)
    budgets = fleet_of_two(strategy)
    strategy.survey(map(Means, budgets))
    larger, smaller = strategy.chosen
    assert larger == strategy.space.largest()
    assert all(a <= b for a, b in zip(smaller.widths, larger.widths, strict=True))
    assert [strategy.assign(device, budget) for device, budget in enumerate(budgets)] == [smaller] * 3 + [larger]
    # In later rounds there are the same two, whatever the budgets are.
    between = Budget(
        budgets[0].memory_bytes * 11 // 10, budgets[0].both_ways_bytes * 11 // 10, budgets[0].both_ways_bytes * 11 // 10
    )
    strategy.round = 7
    assert strategy.assign(0, between) == smaller
    assert strategy.deliverable == [larger, smaller]
    again = search(tmp_path, architectures=2, criterion=criterion)
    again.load(strategy.state())
    assert again.chosen == strategy.chosen
    assert again.assign(0, between) == smaller


def test_sub_models_of_one_step_keep_no_batch_norm_statistics(tmp_path):
    with pytest.raises(ValueError, match=r"sandwich = 'own' needs nested-search\.norm = 'static'"):
        NestedSearch(setup(tmp_path, Cnn3(input_shape=(1, 8, 8), norm="batch")), NestedSearchParams(sandwich="own"))


@pytest.mark.parametrize(("sandwich", "few"), [("own", False), ("labels", False), ("labels", True)])
def test_what_is_assigned_fits_with_all_that_is_trained_beside_it(sandwich, few, tmp_path):
    strategy = search(tmp_path, sandwich=sandwich, architectures=3 if few else 0)
    budgets = fleet_of_two(strategy)
    strategy.survey(map(Means, budgets))
    for device, budget in enumerate(budgets):
        architecture = strategy.assign(device, budget)
        assert fits(strategy.cost(architecture), budget)
        alone, beside = priced(strategy, architecture), strategy.cost(architecture)
        local = strategy.client_step(Order(device, architecture))
        assert isinstance(local, SandwichTraining) == (
            architecture != (strategy.chosen or [strategy.space.smallest()])[-1]
        )
        if isinstance(local, SandwichTraining):
            assert beside.training_flops == alone.training_flops + sum(
                priced(strategy, a).training_flops for a in local.lower
            )
            assert local.lower[-1] == (strategy.chosen[-1] if few else strategy.space.smallest())


def test_smaller_cuts_learn_from_the_devices_own_answers_or_from_the_labels():
    """One input of 1, four hidden channels of value 1; the first class's logit is ln 2 for channels 0, 1 and 3 each.

    The whole says softmax (8, 1, 1) / 10, its first quarter (2, 1, 1) / 4. The gradient of the quarter's cross-entropy
    by its logits is (2/4 - 8/10, 1/4 - 1/10, 1/4 - 1/10) with the whole's answers, and (2/4 - 1, 1/4, 1/4) with the
    label; that of the whole is (8/10 - 1, 1/10, 1/10). Classifier weights of channel 0, whose value is 1, get the sum.
    """
    family, ln2 = OneHidden(), 0.6931471805599453
    wanted = {"own": [-0.2 - 0.3, 0.1 + 0.15, 0.1 + 0.15], "labels": [-0.2 - 0.5, 0.1 + 0.25, 0.1 + 0.25]}
    for teacher, gradient in wanted.items():
        model = family.build(family.full())
        weights = {FC: torch.ones(4, 1), FC_BIAS: torch.zeros(4), CLASSIFIER_BIAS: torch.zeros(3)}
        weights[CLASSIFIER] = torch.tensor([[ln2, ln2, 0.0, ln2], [0.0] * 4, [0.0] * 4])
        model.load_state_dict(weights)
        local = SandwichTraining(lower=(family.width(0.25),), teacher=teacher, masked=False)
        loss_of(local, model.train(), family=family)(torch.ones(2, 1, 1, 1), torch.tensor([0, 0])).backward()
        found = dict(model.named_parameters())[CLASSIFIER].grad
        assert found[:, 0].tolist() == pytest.approx(gradient, abs=1e-6)
        assert found[:, 2].tolist() == pytest.approx([-0.2, 0.1, 0.1], abs=1e-6)


def test_few_architectures_are_trained_in_a_run(tmp_path):
    keys = {"strategy": "benchmarks.methods_that_win.nested_search:NestedSearch", "family": "resnet18"}
    keys |= {"family-arguments": "first_channels = 4", "nested-search.shares": "0, 0.25, 0.5, 1"}
    keys |= {"nested-search.searcher": "exact", "nested-search.norm": "static", "nested-search.architectures": 2}
    engine, scorer = started(small_config(tmp_path, **keys, **{"nested-search.sandwich": "labels"}))
    record = engine.run_round(simulated_grid(), 1, scorer).record
    assert record["devices_replied"] > 0
    assert len(engine.method.chosen) <= 2
