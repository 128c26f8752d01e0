"""Devices of unequal widths that train at once return what they return in turn."""

import pytest
import torch
from torch import nn

from tests.client_app.test_side_by_side import DOUBLE, assert_alike, fits_of, trained, values
from tests.client_app.work_orders import Apart, answers, batch, packed, work_order
from wildflower.client_app import alike, side_by_side, stack
from wildflower.client_app.widths import can_be_filled
from wildflower.messages.orders import LocalTraining
from wildflower.models.cnn import Cnn3, PflCnn
from wildflower.models.lenet import LeNet5
from wildflower.models.mlp import Mlp
from wildflower.models.mobilenet import MobileNetV2
from wildflower.models.resnet import ResNet18
from wildflower.strategies.shared_losses import Regularizer

SHAPE = (1, 8, 8)
STATIC = Cnn3(input_shape=SHAPE, norm="static", scaler=True)
FAMILIES = [STATIC, Cnn3(input_shape=SHAPE), LeNet5(input_shape=SHAPE), Mlp(input_shape=SHAPE)]
WIDTHS = (0.125, 0.0625, 0.25)
TRAINING = LocalTraining(batch_size=7, epochs=2, learning_rate=0.02, momentum=0.9, weight_decay=1e-3)


def unequal(family, training=TRAINING, **options):
    """Trainings in float64 of devices of several widths, with numbers of examples of their own."""
    counts = (14, 23, 9)
    return [
        fit
        for seed, (count, width) in enumerate(zip(counts, WIDTHS, strict=True))
        for fit in fits_of([count], width, training, family, seed=seed, **options)
    ]


RESIDUAL = pytest.param(ResNet18(input_shape=SHAPE), marks=pytest.mark.thorough)


@pytest.mark.parametrize("family", [*FAMILIES, RESIDUAL], ids=lambda family: family.spec()["name"])
def test_trainings_of_unequal_widths(family):
    assert_alike(lambda: unequal(family))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_with_clipping_regularizers_and_factors(optimizer):
    def regularizers(model, generator):
        drawn = {name: torch.rand(p.shape, generator=generator, dtype=DOUBLE) for name, p in model.named_parameters()}
        return Regularizer(0.7, drawn, drawn, reported=True)

    def factors(model, generator):
        return {name: torch.rand(p.shape, generator=generator) for name, p in model.named_parameters()}

    training = TRAINING.model_copy(update={"optimizer": optimizer, "clip_norm": 0.3})
    assert_alike(lambda: unequal(STATIC, training, regularizers=regularizers, factors=factors))


def test_a_narrow_row_stays_within_its_channels():
    fits = sorted(unequal(STATIC), key=lambda fit: -fit.examples)
    rows = stack._Rows(fits, [torch.get_rng_state()] * 3)
    with rows.layers:
        rows.train()
    for row, fit in enumerate(fits):
        own = sum(p.count_nonzero() for p in fit.model.parameters())
        assert sum(value[row].count_nonzero() for value in rows.whole.values()) <= own


@pytest.mark.parametrize("family", [MobileNetV2(input_shape=(3, 32, 32)), PflCnn(input_shape=SHAPE)])
def test_layers_that_do_not_keep_zeros_are_not_filled(family):
    networks = [family.build(family.width(width)) for width in (0.25, 0.5)]
    assert not can_be_filled(networks)
    assert can_be_filled([STATIC.build(STATIC.width(0.25)), STATIC.build(STATIC.width(0.5))])
    assert not can_be_filled([STATIC.build(STATIC.width(0.25)), nn.Identity()])


@pytest.mark.parametrize("family", [STATIC, PflCnn(input_shape=SHAPE)], ids=["filled", "by widths"])
def test_orders_of_small_widths_are_trained_at_once(family, monkeypatch):
    seen, real = [], stack.fit_stacked
    monkeypatch.setattr(side_by_side, "fit_stacked", lambda fits, drawn: (seen.append(len(fits)), real(fits, drawn))[1])
    monkeypatch.setattr(alike, "JOINED_FLOPS", 10**9)
    widths = (0.0625, 0.125, 0.125, 0.0625)
    orders = [
        work_order(device, family, width, Apart(), payloads={"weights": widths.index(width)})
        for device, width in enumerate(widths)
    ]
    sent = [packed(family, family.width(width)) for width in widths[:2]]
    found = []
    for number in (1, 4):
        reply, arrays = answers(batch(*orders, family=family, side_by_side=number, each_by_itself=True), sent)
        found.append(trained(reply.updates, arrays))
    assert seen == ([4] if family is STATIC else [2, 2])
    assert found[0].keys() == found[1].keys() == {0, 1, 2, 3}
    for device, (weights, loss) in found[0].items():
        assert loss == pytest.approx(found[1][device][1], rel=1e-4)
        torch.testing.assert_close(values(found[1][device][0]), values(weights), rtol=1e-3, atol=1e-5)


def test_an_order_of_no_architecture_concerns_its_device_alone():
    orders = [work_order(device, STATIC, 0.125, Apart()) for device in range(3)]
    orders[1] = orders[1].model_copy(update={"architecture": {"widths": [1, 2]}})
    orders[2] = orders[2].model_copy(update={"architecture": {"shape": []}})
    content = batch(*orders, family=STATIC, side_by_side=4, each_by_itself=True)
    reply, _ = answers(content, [packed(STATIC, STATIC.width(0.125))])
    outcomes = [update.outcome for update in sorted(reply.updates, key=lambda update: update.order)]
    assert outcomes[0] == "trained"
    assert "2 widths, but there are" in outcomes[1]
    assert "unknown keys ['shape']" in outcomes[2]
