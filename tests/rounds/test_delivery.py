"""What devices would be given now, and what that is worth, on fleets and scores worked out by hand."""

from dataclasses import replace

import pytest
import torch

from tests.grid import InProcessGrid
from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from tests.strategies.by_hand import OneHidden, engine_of, setup
from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost
from wildflower.rounds import delivery, scores
from wildflower.rounds.asking import MESSAGE_COPIES
from wildflower.rounds.delivery import (
    Recipient,
    delivered_models,
    delivered_on_devices,
    evenly_spread,
    represented,
    scores_of_devices,
)
from wildflower.rounds.evaluation import Scores
from wildflower.server_app.server_scoring import scorer as server_scorer
from wildflower.strategies.fedavg import FedAvg, FedAvgParams
from wildflower.strategies.heterofl import HeteroFL, HeteroFLParams
from wildflower.strategies.local import LocalOnly
from wildflower.strategies.method import Order
from wildflower.strategies.params import Params
from wildflower.strategies.pricing import fits
from wildflower.tasks.metrics import ACCURACY, MeanAbsoluteError, Pearson
from wildflower.tasks.scoring import test_part as part_of_test
from wildflower.tasks.task import TaskSpec, load_task

GRID = InProcessGrid(lambda message, context: message, 1)
BY_WIDTH = {4: 0.9, 2: 0.6, 1: 0.3}  # hidden channels -> the score of the model


def delivered(devices, given, values, nothing=0.0):
    return delivered_models(devices, given, scores_of_devices(devices, given, values, nothing))


def by_width(model):
    hidden = model.weights["all.fc.weight"].shape[0]
    return Scores(BY_WIDTH[hidden], 1.0)


def test_the_mean_is_over_all_devices_also_those_that_were_never_sampled(tmp_path):
    """Three devices of widths 1, 1/2 and 1/4: (0.9 + 0.6 + 0.3) / 3 = 0.6, before any of them has trained."""
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden()), HeteroFLParams()), tmp_path)
    found = engine.evaluation.evaluate(GRID, by_width)
    assert found.score == 0.9
    assert found.score_by_tier == {}  # nobody has been given anything yet
    assert found.delivered.score == pytest.approx(0.6)
    assert found.delivered.score_by_tier == {"whole": 0.9, "half": 0.6, "quarter": 0.3}
    assert (found.delivered.devices, found.delivered.without, found.delivered.beyond) == (3, 0, 0)
    assert found.score_by_device == {0: 0.9, 1: 0.6, 2: 0.3}


def test_of_many_devices_the_journal_does_not_have_each(tmp_path, monkeypatch):
    monkeypatch.setattr(scores, "MAX_TOLD", 2)
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden()), HeteroFLParams()), tmp_path)
    found = engine.evaluation.evaluate(GRID, by_width)
    assert found.score_by_device is None
    assert found.delivered.devices == 3


def test_a_device_that_is_given_nothing_counts_as_0_and_is_told(tmp_path):
    """Only the first of three devices affords the whole model: 0.9 / 3 = 0.3."""
    engine = engine_of(FedAvg(setup(tmp_path, OneHidden()), FedAvgParams(use="exclusive")), tmp_path)
    found = engine.evaluation.evaluate(GRID, by_width).delivered
    assert found.score == pytest.approx(0.3)
    assert found.score_by_tier == {"whole": 0.9, "half": 0.0, "quarter": 0.0}
    assert (found.devices, found.without) == (3, 2)


def test_what_no_budget_allows_is_told(tmp_path):
    engine = engine_of(FedAvg(setup(tmp_path, OneHidden()), FedAvgParams(use="all-large")), tmp_path)
    found = engine.evaluation.evaluate(GRID, by_width).delivered
    assert (found.score, found.without, found.beyond) == (pytest.approx(0.9), 0, 2)


def test_each_model_is_scored_once(tmp_path):
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden()), HeteroFLParams()), tmp_path)
    engine.asking.tier_architectures = {"half": OneHidden().width(0.5), "quarter": OneHidden().width(0.5)}
    asked = []
    engine.evaluation.evaluate(GRID, lambda model: asked.append(model.architecture) or by_width(model))
    assert sorted(a.to_json()["widths"] for a in asked) == [[1], [2], [4]]


def test_the_model_of_a_tier_is_the_one_that_it_would_be_given(tmp_path):
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden()), HeteroFLParams()), tmp_path)
    engine.asking.tier_architectures = {"quarter": OneHidden().full(), "gone": OneHidden().width(0.5)}
    engine.evaluation.evaluate(GRID, by_width)
    assert engine.evaluation.models_of_tiers == {
        "whole": OneHidden().full(),
        "half": OneHidden().width(0.5),
        "quarter": OneHidden().width(0.25),
        "gone": OneHidden().width(0.5),
    }


def test_without_tiers_nothing_is_looked_up(tmp_path):
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden(), evaluate_tiers=False), HeteroFLParams()), tmp_path)
    assert engine.evaluation.evaluate(GRID, by_width).delivered is None


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["heterofl dynamic", "model-search pool", "rafl"])
def test_the_run_learns_the_same_however_often_it_is_asked(method, tmp_path):
    found = []
    for name, tiers in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        changes = METHODS[method] | {"evaluate-every": 1, "evaluate-tiers": tiers}
        engine, scorer = started(small_config(tmp_path / name, **changes))
        grid = simulated_grid(2)
        for number in (1, 2):
            engine.run_round(grid, number, scorer)
        found.append(engine.state())
    assert same_bits(found[0].tensors, found[1].tensors)
    assert {**found[0].values, "own_by_tier": 0} == {**found[1].values, "own_by_tier": 0}


# Few models stand for many ----------------------------------------------------------------------------------------


def price(parameters):
    return Cost(parameters, 4 * parameters, 4 * parameters, 10 * parameters, 1)


def model(size):
    return Architecture((size,))


def cost_of(architecture):
    return price(architecture.widths[0])


def recipient(device, size, memory=None, tier="a tier"):
    return Recipient(device, tier, model(size), Budget(10 * size if memory is None else memory))


def test_models_of_nearly_as_many_parameters_have_one_that_stands_for_them():
    """1,000 fits 1,040 and has 96 % of it; 1,000 does not fit 990, which is chosen and stands for 995."""
    devices = [recipient(0, 1000), recipient(1, 1040), recipient(2, 990), recipient(3, 995)]
    given = represented(devices, [model(1000)], cost_of)
    assert given == {0: model(1000), 1: model(1000), 2: model(990), 3: model(990)}


def test_one_that_needs_more_than_a_device_has_does_not_stand_for_its_model():
    """Of as many parameters, but the device has memory for 900 only."""
    devices = [Recipient(0, "a tier", model(950), Budget(9000))]
    assert represented(devices, [model(1000)], cost_of) == {0: model(950)}


def test_of_many_different_models_few_are_scored_and_all_fit():
    devices = [recipient(d, 100 * 2**d) for d in range(12)]
    given = represented(devices, [], cost_of)
    assert len(set(given.values())) <= delivery.MAX_MODELS
    assert all(given[r.device].widths[0] <= r.architecture.widths[0] for r in devices)
    assert given[0] == model(100)


def test_known_models_are_taken_as_they_are():
    devices = [recipient(0, 1000), recipient(1, 999), Recipient(2, "a tier")]
    assert represented(devices, [model(1000), model(999)], cost_of) == {0: model(1000), 1: model(999), 2: None}


def test_very_many_devices_are_looked_at_evenly():
    assert evenly_spread([1, 2, 3], 3) == [1, 2, 3]
    assert evenly_spread(range(10), 4) == [0, 2, 5, 7]
    # A tier of one percent is there with one percent.
    assert sum(device >= 99_000 for device in evenly_spread(range(100_000), 500)) == 5


# Models that live on devices --------------------------------------------------------------------------------------


def test_a_device_with_a_model_of_its_own_counts_as_its_tier():
    """Two strong at 0.8, three weak at 0.4, one of which has no model yet: (1.6 + 0.8 + 0) / 5 = 0.48."""
    devices = [recipient(d, 10, tier="strong") for d in (0, 1)] + [recipient(d, 5, tier="weak") for d in (2, 3, 4)]
    found = delivered_on_devices(devices, {"strong": 0.8, "weak": 0.4}, lambda device: device != 4, 0.0)
    assert found.score == pytest.approx(0.48)
    assert found.score_by_tier == pytest.approx({"strong": 0.8, "weak": 0.8 / 3})
    assert (found.devices, found.without) == (5, 1)


def test_a_tier_that_was_never_scored_is_left_out():
    devices = [recipient(0, 10, tier="strong"), recipient(1, 5, tier="weak")]
    found = delivered_on_devices(devices, {"weak": 0.4}, lambda device: True, 0.0)
    assert (found.score, found.devices) == (0.4, 1)
    assert delivered_on_devices(devices, {}, lambda device: True, 0.0) is None


def test_who_trains_alone_has_nothing_before(tmp_path):
    """Device 0 scores 0.6, the two others have not trained: 0.6 / 3 = 0.2."""
    method = LocalOnly(setup(tmp_path, OneHidden()), Params())
    engine = engine_of(method, tmp_path)
    method.trained = {0: OneHidden().full()}
    assert [method.has_model(device) for device in range(3)] == [True, False, False]
    engine.evaluation.own_by_tier = {"whole": 0.6}
    found = engine.evaluation._delivered_there(engine.evaluation._recipients(GRID), None)
    assert (found.score, found.without) == (pytest.approx(0.2), 2)


def test_the_newest_scores_of_tiers_outlive_a_restart(tmp_path):
    engine = engine_of(LocalOnly(setup(tmp_path, OneHidden()), Params()), tmp_path)
    engine.evaluation.own_by_tier = {"whole": 0.6}
    state = engine.state()
    again = engine_of(LocalOnly(setup(tmp_path, OneHidden()), Params()), tmp_path)
    again.load(state)
    assert again.evaluation.own_by_tier == {"whole": 0.6}


# What no model is worth -------------------------------------------------------------------------------------------


def test_who_has_no_model_knows_nothing():
    labels = torch.tensor([0.0, 1.0, 5.0])
    assert ACCURACY.without_model(labels) == 0.0
    assert Pearson().without_model(labels) == 0.0
    # Always 1, the median: (1 + 0 + 4) / 3.
    assert MeanAbsoluteError().without_model(labels) == pytest.approx(5 / 3)
    devices = [recipient(0, 10), Recipient(1, "a tier")]
    found = delivered(devices, {0: model(10), 1: None}, {model(10): 0.5}, MeanAbsoluteError().without_model(labels))
    assert found.score == pytest.approx((0.5 + 5 / 3) / 2)


def test_a_model_that_could_not_be_scored_counts_for_nobody():
    devices = [recipient(0, 10), recipient(1, 5)]
    found = delivered(devices, {0: model(10), 1: model(5)}, {model(5): 0.5})
    assert (found.score, found.devices) == (0.5, 1)
    assert delivered(devices, {0: model(10), 1: model(5)}, {}) is None


# The best that fits -----------------------------------------------------------------------------------------------


def by_parts(held_out, rest):
    """A scorer by hidden channels: on held-out examples, and on the others."""

    def scorer(model):
        hidden = model.weights["all.fc.weight"].shape[0]
        return Scores(0.5, 1.0, held_out=held_out[hidden], rest=rest[hidden])

    return scorer


def test_a_device_gets_the_best_that_fits_and_counts_with_what_it_was_not_chosen_by(tmp_path):
    """By the held-out examples the middle one is best, and second the smallest, which alone fits the last device.

    On the others they score 0.6 and 0.4: (0.6 + 0.6 + 0.4) / 3.
    """
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden(), deliver="best"), HeteroFLParams()), tmp_path)
    found = engine.evaluation.evaluate(GRID, by_parts({4: 0.2, 2: 0.9, 1: 0.8}, {4: 0.7, 2: 0.6, 1: 0.4})).delivered
    assert found.score_by_tier == {"whole": 0.6, "half": 0.6, "quarter": 0.4}
    assert found.score == pytest.approx(1.6 / 3)
    half, quarter = OneHidden().width(0.5), OneHidden().width(0.25)
    assert engine.evaluation.models_of_tiers == {"whole": half, "half": half, "quarter": quarter}


def test_of_equally_good_models_a_device_gets_the_largest(tmp_path):
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden(), deliver="best"), HeteroFLParams()), tmp_path)
    same = dict.fromkeys((4, 2, 1), 0.5)
    engine.evaluation.evaluate(GRID, by_parts(same, same))
    assert engine.evaluation.models_of_tiers["whole"] == OneHidden().full()


@pytest.mark.parametrize(
    ("deliver", "both", "by_tier", "without"),
    [
        ("best", False, {"whole": 0.7, "half": 0.0, "quarter": 0.0}, 2),
        ("best", True, {"whole": 0.9, "half": 0.9, "quarter": 0.9}, 0),
        ("largest", True, {"whole": 0.7, "half": 0.0, "quarter": 0.0}, 2),
    ],
)
def test_the_smallest_model_that_is_trained_beside_is_for_whoever_affords_it(deliver, both, by_tier, without, tmp_path):
    """Only the first of three devices affords the whole model of "exclusive"; the others would be assigned nothing."""
    made = replace(setup(tmp_path, OneHidden(), deliver=deliver), both_models=both)
    engine = engine_of(FedAvg(made, FedAvgParams(use="exclusive")), tmp_path)
    parts = {4: 0.7, 1: 0.9}

    def scorer(model):
        found = by_parts(parts, parts)(model)
        return found._replace(score=found.rest)

    found = engine.evaluation.evaluate(GRID, scorer)
    assert found.delivered.score_by_tier == by_tier
    assert found.delivered.score == pytest.approx(sum(by_tier.values()) / 3)
    assert (found.delivered.devices, found.delivered.without, found.delivered.beyond) == (3, without, 0)
    if without == 0:
        assert engine.evaluation.models_of_tiers == dict.fromkeys(("whole", "half", "quarter"), OneHidden().width(0.25))


@pytest.mark.parametrize(("allowed", "score", "without"), [(1.0, 0.9, 0), (0.99, 0.0, 1)])
def test_who_does_not_even_afford_the_smallest_model_gets_nothing(allowed, score, without):
    """A budget that just holds the smallest of two models, and one that just does not."""
    small = Budget(int(allowed * 1000))
    devices = [recipient(0, 1000, tier="strong"), Recipient(1, "weak", budget=small)]
    values = {model(1000): 0.7, model(100): 0.9}
    given = delivery.best_that_fit(devices, {0: model(1000), 1: None}, values, ACCURACY.scale, cost_of)
    found = delivered(devices, given, values)
    assert (found.score_by_tier, found.without) == ({"strong": 0.9, "weak": score}, without)


def test_a_device_without_an_order_holds_the_message_of_what_it_is_delivered_in_its_memory(tmp_path, monkeypatch):
    """A node whose memory holds the training of the smallest model alone cannot be sent it besides; more memory can."""
    made = replace(setup(tmp_path, OneHidden(), deliver="best"), both_models=True)
    engine = engine_of(FedAvg(made, FedAvgParams(use="exclusive")), tmp_path)
    smallest = OneHidden().width(0.25)
    training = engine.method.cost(smallest).peak_training_memory_bytes
    message = MESSAGE_COPIES * engine.asking.sent_bytes(Order(2, smallest))
    monkeypatch.setattr(engine.asking, "_trains_beside_message", lambda device: True)
    for memory, affords in ((training, False), (training + message, True)):
        monkeypatch.setattr("wildflower.rounds.asking.budget_in_round", lambda *_, memory=memory: Budget(memory))
        budget = engine.evaluation._recipients(GRID)[2].budget
        assert fits(engine.method.cost(smallest), budget) == affords


def test_devices_do_not_score_what_only_held_out_examples_can_choose(tmp_path, monkeypatch):
    """`wildflower.server_app.app.build` refuses such a run before; no engine passes over it in silence."""
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden(), deliver="best"), HeteroFLParams()), tmp_path)
    monkeypatch.setattr(engine.evaluation, "own", object())
    with pytest.raises(ValueError, match="needs a test set on the server"):
        engine.evaluation.evaluate(GRID, None)


def test_a_scorer_without_held_out_examples_is_refused(tmp_path):
    engine = engine_of(HeteroFL(setup(tmp_path, OneHidden(), deliver="best"), HeteroFLParams()), tmp_path)
    with pytest.raises(ValueError, match="deliver = 'best' needs a scorer"):
        engine.evaluation.evaluate(GRID, by_width)


def test_the_parts_of_the_test_set_are_a_fifth_and_the_others(tmp_path):
    engine, scorer = started(small_config(tmp_path, deliver="best", **METHODS["all-large"]))
    task = load_task(TaskSpec.from_json(engine.settings.task))
    parts = [part_of_test(task, part)[1] for part in ("held out", "rest")]
    assert [len(labels) for labels in parts] == [len(task.test) // 5, len(task.test) - len(task.test) // 5]
    assert torch.equal(torch.cat(parts).sort().values, task.test.labels.sort().values)
    model = engine.method.models([engine.method.scored_architecture])[engine.method.scored_architecture]
    found = scorer(model)
    right = [value * len(labels) for value, labels in zip((found.held_out, found.rest), parts, strict=True)]
    assert found.score * len(task.test) == pytest.approx(sum(right))
    assert found.score == pytest.approx(server_scorer(task)(model).score)
