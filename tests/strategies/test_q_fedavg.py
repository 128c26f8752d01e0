import pytest

from tests.strategies.halves import HandContext, came_back, filled, setup
from wildflower.strategies.q_fedavg import FairTraining, QFedAvg, QFedAvgParams


@pytest.mark.parametrize(
    ("label", "delta", "h"),
    [
        (0.0, 0.5, 6.0),  # F = 1/2; w_k = 0.9; Dw = 10 0.1 = 1; Delta = 1/2 1; h = 1 + 10 1/2
        (-1.0, 4.0, 24.0),  # F = 2; w_k = 0.8; Dw = 2; Delta = 2 2; h = 4 + 10 2
    ],
)
def test_what_a_device_returns_by_hand(label, delta, h):
    """q = 1, w = 1, rate 0.1, so L = 10; one step."""
    answer = FairTraining(q=1.0).train(HandContext(1.0, label, steps=1, learning_rate=0.1))
    assert answer.tensor_sets["changes"]["w"].tolist() == pytest.approx([delta])
    assert answer.facts == {"h": [pytest.approx(h)]}


def test_one_step_of_the_server_by_hand():
    """The two devices above: w <- 1 - (0.5 + 4) / (6 + 24) = 0.85, whatever their examples."""
    method = QFedAvg(setup(), QFedAvgParams(q=1.0))
    filled(method, 1.0)
    trained = [
        came_back(method, 30, {"changes": 0.5, "statistics": 2.0}, device=0, h=[6.0]),
        came_back(method, 10, {"changes": 4.0, "statistics": 4.0}, device=1, h=[24.0]),
    ]
    assert method.finish_round(trained) == {"curvature": pytest.approx(15.0)}
    for name, value in method.weights.items():
        assert value.unique().tolist() == pytest.approx([3.0 if "running" in name else 0.85], abs=1e-6)


def test_without_fairness_it_is_the_mean_of_the_devices():
    """q = 0: Delta = L (w - w_k), h = L, so that w - sum Delta / sum h = mean w_k = (0.9 + 0.8) / 2."""
    method = QFedAvg(setup(), QFedAvgParams(q=0.0))
    filled(method, 1.0)
    trained = []
    for device, label in enumerate((0.0, -1.0)):
        answer = FairTraining(q=0.0).train(HandContext(1.0, label, steps=1, learning_rate=0.1))
        changes = float(answer.tensor_sets["changes"]["w"])
        trained.append(came_back(method, 10, {"changes": changes, "statistics": 1.0}, device, h=answer.facts["h"]))
    method.finish_round(trained)
    assert method.weights["head.fc1.bias"].unique().tolist() == pytest.approx([0.85], abs=1e-6)


@pytest.mark.parametrize("h", [0.0, -1.0])
def test_a_curvature_that_cannot_be_is_refused(h):
    with pytest.raises(ValueError, match="h must be above 0"):
        FairTraining(q=1.0).check_facts({"h": [h]}, examples=10)


def test_learning_rates_of_parts_are_refused():
    with pytest.raises(ValueError, match="leave learning-rates out"):
        QFedAvg(setup(learning_rates={"head": 3.0}), QFedAvgParams())
