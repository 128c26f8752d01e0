"""LotteryFL: pruning, rewinding and training under a mask by hand, the server's mean, and what travels."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.halves import FAMILY, filled, setup
from wildflower.client_app.fitting import Fit, fit_here
from wildflower.messages.error import MessageError
from wildflower.messages.orders import LocalTraining
from wildflower.messages.tensor_sets import nbytes
from wildflower.models.layers import TensorSpec
from wildflower.strategies.lotteryfl import LotteryFL, LotteryFLParams
from wildflower.strategies.method import Contribution, Group, Order, Trained
from wildflower.strategies.tickets import TicketTraining, kept_after, pack_bits, prune, unpack_bits


def test_a_pruning_drops_what_lies_below_the_percentile():
    """As published code counts: what is smaller than NumPy's percentile of the magnitudes that are kept."""
    magnitudes = np.random.default_rng(0).permutation(np.arange(1, 60) ** 1.5)
    for count in range(1, 60):
        alive = magnitudes[:count]
        for share in (0.1, 0.2, 0.5):
            below = int((alive < np.percentile(alive, 100 * share)).sum())
            assert kept_after(count, 1, share) == count - below
    assert [kept_after(11, prunings, 0.1) for prunings in range(4)] == [11, 10, 9, 8]


def test_the_smallest_of_what_is_kept_are_dropped():
    """Of 3, -1, 2, 0.5 half of 4 - 1 is 1.5, so two: 0.5 and -1. Then of 3 and 2 half of 2 - 1 is 0.5, so one: 2."""
    weight = torch.tensor([[3.0, -1.0], [2.0, 0.5]])
    once = prune(weight, torch.ones(2, 2, dtype=torch.bool), 0.5)
    assert once.tolist() == [[True, False], [True, False]]
    assert prune(weight, once, 0.5).tolist() == [[True, False], [False, False]]


def test_masks_are_packed_as_bits():
    mask = torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.bool)
    assert pack_bits(mask).tolist() == [129, 128]
    assert unpack_bits(pack_bits(mask), 9).tolist() == mask.tolist()


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)


SPECS = {
    "layer.weight": TensorSpec((1, 2), torch.float32, (None, None)),
    "layer.bias": TensorSpec((1,), torch.float32, (None,)),
}
LAYER = SimpleNamespace(tensors=lambda architecture: SPECS)


def context(received, kept=None, keeps=True, xs=(1,)):
    """One example (1, 1), whose one class is right by necessity; L = (f - 4)^2 / 2, one step of 0.1.

    xs: of the examples (x, x) of the step, each of which is a part of the batch.
    """
    tensors, inputs = dict(kept or {}), torch.tensor(xs, dtype=torch.float32).view(-1, 1) * torch.ones(1, 2)
    training = LocalTraining(batch_size=len(xs), micro_batch_size=1, learning_rate=0.1, momentum=0.9)

    def fit(model, loss, factors):
        def examples_of(picked):
            return inputs[picked], torch.zeros(len(picked), dtype=torch.int64)

        def start():
            return iter([torch.arange(len(xs))])

        return fit_here(Fit(model, loss, start, examples_of, len(xs), training, torch.device("cpu"), factors=factors))

    def build(weights):
        model = Linear()
        model.load_state_dict(weights)
        return model

    return SimpleNamespace(
        received=received,
        family=LAYER,
        architecture=None,
        device=torch.device("cpu"),
        keeps=keeps,
        training=training,
        fit=fit,
        task=SimpleNamespace(
            answers=lambda outputs: outputs,
            loss=lambda outputs, labels: (outputs - 4).square().mean() / 2,
            label_kind="classes",
            classes=1,
        ),
        build=build,
        kept=tensors.get,
        keep=tensors.__setitem__,
        tensors=tensors,
        one_pass=lambda model: [(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))],
    )


def ticket(**changes):
    settings = {"prunings": 0, "begins": True, "pruned": 0.5, "threshold": 0.5, "target": 0.25}
    return TicketTraining(**settings | changes)


def sent():
    return {
        "weights": {"layer.weight": torch.tensor([3.0, 2.0]), "layer.bias": torch.tensor([1.0])},
        "initial": {"layer.weight": torch.tensor([[1.0, 1.0]]), "layer.bias": torch.tensor([0.0])},
    }


def returned(answer):
    weights = answer.tensor_sets["weights"]
    return [round(v, 5) for v in (*weights["layer.weight"].flatten().tolist(), *weights["layer.bias"].tolist())]


def test_a_device_prunes_rewinds_and_trains_what_is_left():
    """Of 3 and 2 the 2 goes. From w_0 = (1, 0), b = 0: f = 1, its gradient -3; w = (1.3, 0), b = 0.3."""
    where = context(sent())
    answer = ticket().train(where)
    assert returned(answer) == [1.3, 0.0, 0.3]
    assert answer.tensor_sets["still_kept"]["layer.weight"].tolist() == [0b10000000]
    assert where.tensors["initial"]["layer.weight"].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    "half", [ticket(threshold=1.0), ticket(begins=False)], ids=["accuracy is not above 1", "w_0 is lost"]
)
def test_a_device_that_does_not_prune_goes_on_from_the_global_model(half):
    """f = 3 + 2 + 1 = 6, its gradient 2: every number falls by 0.2."""
    received = sent()
    if not half.begins:
        del received["initial"]
    answer = half.train(context(received))
    assert returned(answer) == [2.8, 1.8, 0.8]
    assert answer.tensor_sets["still_kept"]["layer.weight"].tolist() == [0b11000000]


def test_the_gradients_of_a_batch_in_parts_are_added_up():
    """Examples (1, 1) and (2, 2): f = 6 and 11, gradients 2 and 7. In the mean (2 + 14) / 2 = 8 in w and 4.5 in b."""
    answer = ticket(threshold=1.0).train(context(sent(), xs=(1, 2)))
    assert returned(answer) == [2.2, 1.2, 0.55]
    assert answer.loss == pytest.approx((2**2 + 7**2) / 4)


def test_a_device_begins_from_first_weights_that_it_kept():
    received, kept = {"weights": sent()["weights"]}, {"initial": sent()["initial"]}
    assert returned(ticket(begins=False).train(context(received, kept))) == [1.3, 0.0, 0.3]


def test_in_an_evaluation_nothing_is_pruned():
    assert returned(ticket().train(context(sent(), keeps=False))) == [2.8, 1.8, 0.8]


def test_pruned_weights_stay_0_and_do_not_travel():
    """The mask keeps the second weight, 2: f = 2 + 1 = 3, its gradient -1. A half is left, which is the target."""
    half = ticket(prunings=1, begins=False, target=0.5)
    received = {
        "weights": {"layer.weight": torch.tensor([2.0]), "layer.bias": torch.tensor([1.0])},
        "mask": {"layer.weight": torch.tensor([0b01000000], dtype=torch.uint8)},
    }
    answer = half.train(context(received))
    assert returned(answer) == [2.1, 1.1]
    assert answer.model.layer.weight.tolist() == [[0.0, pytest.approx(2.1)]]
    assert answer.tensor_sets.keys() == half.returned(LAYER, None).keys() == {"weights"}
    assert half.sent(LAYER, None).keys() == {"weights", "mask"}
    # Two numbers of four bytes each, and one bit per weight.
    assert (nbytes(half.sent(LAYER, None)), nbytes(half.returned(LAYER, None))) == (9, 8)
    received["mask"]["layer.weight"] = torch.tensor([0b11000000], dtype=torch.uint8)
    with pytest.raises(MessageError, match="keeps 2 weights, not 1"):
        half.train(context(received))


# The server half


def lottery(**params):
    method = LotteryFL(setup(), LotteryFLParams(**{"pruned": 0.5, "target": 0.2} | params))
    filled(method, 1.0)
    return method


def came_back(method, device, value, kept=None):
    """A device returns one value everywhere, and the first `kept(n)` of n weights of every tensor are still kept."""
    architecture = method.architecture
    half = method.client_step(Order(device, architecture))
    sent, returned = half.sent(FAMILY, architecture), half.returned(FAMILY, architecture)
    group = Group(architecture, method.selection(device, architecture), sent, returned, FAMILY.place(architecture))
    weights = {e.name: torch.full(e.shape, value) for e in returned["weights"].layout.entries}
    still = {n: pack_bits(torch.arange(len(weights[n])) < (kept or len)(weights[n])) for n in method.counts}
    each = {"weights": weights, "still_kept": still} if "still_kept" in returned else {"weights": weights}
    method.begin_round([Order(device, architecture)])
    method.absorb(Contribution(group, [device], [device], 5, {}, each))
    return Trained(Order(device, architecture), "a tier", 5, None, {})


def halves(weights):
    return kept_after(len(weights), 1, 0.5)


def values(method, name):
    """The values of the first half of a tensor, as far as one pruning keeps it, and of the other."""
    flat = method.weights[name].flatten()
    half = kept_after(len(flat), 1, 0.5)
    return flat[:half].unique().tolist(), flat[half:].unique().tolist()


def test_the_mean_over_the_devices_that_keep_a_weight():
    """Device 0 returns 3 and keeps half, device 1 returns 5: (3 + 5) / 2 and 5. Then device 0 alone returns 6."""
    method = lottery()
    figures = method.finish_round([came_back(method, 0, 3.0, halves), came_back(method, 1, 5.0)])
    assert all(values(method, name) == ([4.0], [5.0]) for name in method.counts)
    assert all(v.unique().tolist() == [4.0] for name, v in method.weights.items() if name not in method.counts)
    whole, half = sum(method.counts.values()), sum(kept_after(n, 1, 0.5) for n in method.counts.values())
    assert figures == {"kept_share": pytest.approx((half / whole + 1) / 2)}
    payload = method.payload(group_of(method, 0))
    assert payload.keys() == {"weights", "mask", "initial"}
    for name, count in method.counts.items():
        assert payload["weights"][name].tolist() == [4.0] * kept_after(count, 1, 0.5)
        assert unpack_bits(payload["mask"][name], count).sum() == kept_after(count, 1, 0.5)
    method.finish_round([came_back(method, 0, 6.0)])
    assert all(values(method, name) == ([6.0], [5.0]) for name in method.counts)
    assert method.prunings == {0: 1}
    method.finish_round([came_back(method, 0, 7.0, halves)])
    assert method.prunings == {0: 2}


def group_of(method, device):
    architecture = method.architecture
    half = method.client_step(Order(device, architecture))
    sent, returned = half.sent(FAMILY, architecture), half.returned(FAMILY, architecture)
    return Group(architecture, method.selection(device, architecture), sent, returned, FAMILY.place(architecture))


def test_a_mask_that_is_not_one_pruning_further_is_refused():
    method = lottery()
    for wrong in (lambda w: len(w) - 1, lambda w: 0, lambda w: kept_after(len(w), 2, 0.5)):
        with pytest.raises(MessageError, match="and one pruning further than before it keeps"):
            came_back(method, 0, 9.0, wrong)
    before = dict(method.weights)
    method.finish_round([])
    assert all(torch.equal(before[name], value) for name, value in method.weights.items())
    assert method.prunings == method.masks == {}


def test_first_weights_travel_once_and_again_where_they_are_lost():
    method = lottery()
    whole = method.architecture
    parameters = sum(value.numel() for value in method.initial.values())
    first = method.client_step(Order(0, whole))
    assert first.sent(FAMILY, whole).keys() == {"weights", "initial"}
    assert method.cost(whole).payload_bytes == nbytes(first.sent(FAMILY, whole))
    assert nbytes(first.sent(FAMILY, whole)) == first.sent(FAMILY, whole)["weights"].layout.nbytes + 4 * parameters
    method.finish_round([came_back(method, 0, 3.0)])
    assert method.client_step(Order(0, whole)).sent(FAMILY, whole).keys() == {"weights"}
    assert method.client_step(Order(1, whole)).begins
    # A device that says in a later round that its state is gone.
    done = came_back(method, 0, 3.0)
    method.lost(0)
    method.finish_round([done])
    assert method.client_step(Order(0, whole)).begins


def test_a_restart_goes_on_with_all_masks():
    first, second = lottery(), lottery()
    first.finish_round([came_back(first, 0, 3.0, halves), came_back(first, 1, 5.0)])
    second.load(first.state())
    assert (second.prunings, second.begun) == ({0: 1}, {0, 1} & first.begun)
    mine, other = (method.payload(group_of(method, 0))["weights"] for method in (first, second))
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    state = first.state()
    state.tensors["mask/0"][0] ^= 1 << 7
    with pytest.raises(ValueError, match=r"after 1 prunings of lotteryfl\.pruned = 0\.5"):
        second.load(state)
    with pytest.raises(ValueError, match="mask of device 0 is of another model, or missing"):
        second.load(replace(state, tensors={n: t for n, t in state.tensors.items() if n != "mask/0"}))


def test_rounds_in_which_all_prune_bring_fewer_bytes_each_time(tmp_path):
    """(1 - 0.5)^r > 0.2 holds for r = 0, 1 and 2: three prunings, after which masks stay and are not returned."""
    keys = METHODS["lotteryfl"] | {"lotteryfl.pruned": 0.5, "lotteryfl.target": 0.2, "devices-per-round": 6}
    config = small_config(tmp_path, rounds=5, **keys | {"local-steps": 3, "personal.every": 5, "test-fraction": 0.25})
    engine, scorer = started(config)
    # All tickets answer something right on 18 examples, once they have trained.
    grid = simulated_grid()
    results = [engine.run_round(grid, number, scorer) for number in range(1, 6)]
    assert all(d["outcome"] == "trained" for r in results for d in r.devices)
    method = engine.method
    assert max(method.prunings.values()) == 3
    up = [result.record["training_bytes_up"] for result in results]
    assert up == sorted(up, reverse=True)
    assert up[-1] < 0.5 * up[0]
    assert results[-1].record["personal_score"] is not None
    shares = [result.record["metrics"]["kept_share"] for result in results]
    assert shares == sorted(shares, reverse=True)
