import pytest
import torch

from tests.small_run import simulated_grid, small_config, started
from wildflower.strategies import distillation
from wildflower.strategies.distillation import Distilled

DISTILLED = {
    "distillation.steps": 1,
    "distillation.batch-size": 2,
    "distillation.learning-rate": 0.5,
    "schedule.decay-rounds": "1",
    "schedule.decay-factor": 0.1,
}


@pytest.mark.thorough
@pytest.mark.parametrize("widths", ["1, 0.5, 0.25", "0.5, 0.25"])
@pytest.mark.parametrize("method", ["heterofl", "model-search", "anycostfl", "fedrolex"])
@pytest.mark.parametrize("kind", ["random", "with-smallest", "with-whole"])
def test_what_is_distilled_takes_the_place_of_the_mean(kind, method, widths, tmp_path, monkeypatch):
    """As many sub-models as a round has devices, those that are always among them first."""
    asked = []

    def distill(family, weights, taught_by, students, settings, seed):
        asked.append((weights, taught_by[0], [architecture for architecture, _ in students], settings))
        for architecture, placement in [taught_by, *students]:  # which channels they have may follow from the mean
            found, select = placement.gather(weights), strategy.scored_selection(architecture).select
            expected = strategy.family.place(architecture, select).gather(weights)
            assert all(torch.equal(expected[name], value) for name, value in found.items())
        return Distilled({name: value + 1 for name, value in weights.items()}, 7.0, 0.5)

    schedule = "constant" if kind == "random" else "as-training"
    of_students = {"distillation.students": kind, "distillation.schedule": schedule}
    engine, scorer = started(small_config(tmp_path, strategy=method, widths=widths, **DISTILLED, **of_students))
    strategy = engine.method
    monkeypatch.setattr(distillation, "distill", distill)
    grid = simulated_grid()
    for number in (1, 2):
        record = engine.run_round(grid, number, scorer).record
        mean, whole, students, settings = asked[-1]
        assert all(torch.equal(strategy.weights[name], value + 1) for name, value in mean.items())
        assert whole == strategy.scored_architecture
        assert len(students) == strategy.settings.devices_per_round
        if kind != "random":
            assert students[0] == strategy.smallest_architecture
        if kind == "with-whole":
            assert students[1] == whole
        falls = schedule == "as-training" and number == 2
        assert settings.learning_rate == pytest.approx(0.05 if falls else 0.5)
        told = {"distillation_steps_per_second": 7.0, "distillation_mutual_information_nats": 0.5}
        assert record["metrics"].items() >= told.items()
        assert record["server_seconds"]["distill"] > 0


def test_one_device_per_round_still_has_the_smallest_and_the_whole_model_among_the_students(tmp_path):
    config = small_config(tmp_path, strategy="heterofl", **{"devices-per-round": 1})
    strategy = started(config)[0].method
    for kind, expected in (
        ("with-smallest", [strategy.smallest_architecture]),
        ("with-whole", [strategy.smallest_architecture, strategy.scored_architecture]),
    ):
        students = strategy.students(strategy.rng(5), kind)
        assert [architecture for architecture, _ in students] == expected


def test_random_students_are_all_random(tmp_path):
    """Of 200 students of three widths each width has its share, the smallest no more than the others."""
    config = small_config(tmp_path, strategy="heterofl", widths="1, 0.5, 0.25", **{"devices-per-round": 5})
    strategy = started(config)[0].method
    found = [a for n in range(40) for a, _ in strategy.students(strategy.rng(5, n), "random")]
    counts = [found.count(architecture) for architecture in strategy.candidates]
    assert sum(counts) == 200
    assert all(45 <= count <= 90 for count in counts)


def test_a_distillation_that_diverges_leaves_the_mean(tmp_path, monkeypatch, caplog):
    means = []

    def distill(family, weights, *others):
        means.append(weights)
        raise FloatingPointError("in-place distillation diverged in fc: lower its learning rate")

    engine, scorer = started(small_config(tmp_path, strategy="heterofl", **DISTILLED))
    monkeypatch.setattr(distillation, "distill", distill)
    with caplog.at_level("WARNING", "flwr"):
        record = engine.run_round(simulated_grid(), 1, scorer).record
    assert engine.method.weights is means[0]
    assert record["metrics"] == {}
    assert "Round 1: in-place distillation diverged in fc: lower its learning rate" in caplog.text
    assert "the round's weights stay undistilled" in caplog.text
