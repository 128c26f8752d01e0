from strategies.fedprox import FedProx, FedProxParams
from tests.strategies.by_hand import Devices, OneHidden, no_scores, setup


def test_devices_minimize_with_the_proximal_term_on_the_whole_model(tmp_path):
    family = OneHidden()
    devices = Devices(family, lambda order, w: w)
    FedProx(setup(tmp_path, family), FedProxParams(mu=0.25)).run_round(devices.grid, 1, no_scores)
    assert sorted(devices.orders) == [0, 1, 2]
    for order in devices.orders.values():
        assert (order.objective.kind, order.objective.mu) == ("proximal", 0.25)
        assert order.architecture["widths"] == [4]
