"""Every method comes to the same whether its devices are trained side by side or in turn."""

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from wildflower.client_app import fitting, side_by_side, stack
from wildflower.client_app.context import DeviceContext
from wildflower.plugins import flower_log

# FjORD draws a width for every batch, and ReCipFL's batch norms begin with a mean over the first batches. The others
# step two sets of weights, each by a rule of its own.
IN_TURN = {"fjord", "fjord without distillation", "recipfl", "fednas", "rafl", "rafl ensemble"}
DOUBLE = torch.float64
FIT_HERE, BEGIN = fitting.fit_here, DeviceContext.__init__


def doubled(fit):
    """The same training in float64."""
    if isinstance(fit.loss, nn.Module):
        fit.loss.double()
    fit.model.double()
    regularizer = fit.regularizer
    if regularizer is not None:
        toward = regularizer.toward and {name: value.to(DOUBLE) for name, value in regularizer.toward.items()}
        correction = {name: value.to(DOUBLE) for name, value in regularizer.correction.items()}
        regularizer = replace(regularizer, toward=toward, correction=correction)

    def examples_of(picked):
        inputs, labels = fit.examples_of(picked)
        return inputs.to(DOUBLE) if inputs.is_floating_point() else inputs, labels

    return replace(fit, examples_of=examples_of, regularizer=regularizer)


def halved(fits):
    """Leave the models of trainings in float32 again."""
    for fit in fits:
        if isinstance(fit.loss, nn.Module):
            fit.loss.float()
        fit.model.float()


def fit_in_turn(fit):
    try:
        return FIT_HERE(doubled(fit))
    finally:
        halved([fit])


def fit_at_once(fits, drawn):
    try:
        return stack.fit_stacked([doubled(fit) for fit in fits], drawn)
    finally:
        halved(fits)


def unequal(context, *arguments, **more):
    """A device leaves out as many of its examples as its number says."""
    BEGIN(context, *arguments, **more)
    context._shard = context._shard[context.order.device :]


def one_round(folder, method, at_once, caplog, **changes):
    """The state after a round whose trainings compute in float64, its result, and what was told."""
    caplog.clear()
    keys = METHODS[method] | {"evaluate-every": 1, "workers": 1, "devices-per-round": 6} | changes
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "flwr"):
        patch.setattr(side_by_side, "fit_stacked", fit_at_once)
        patch.setattr(fitting, "fit_here", fit_in_turn)
        patch.setattr(flower_log, "_told", set())
        patch.setattr(DeviceContext, "__init__", unequal)
        engine, scorer = started(small_config(folder, **keys | {"compute.side-by-side": at_once}))
        result = engine.run_round(simulated_grid(1), 1, scorer)
    return engine.state(), result, [r.getMessage() for r in caplog.records if "is trained in turn" in r.getMessage()]


def figures(result):
    """What a round's journal says, but for times and how many were trained at once."""
    lines = [{k: v for k, v in line.items() if k not in ("seconds", "at_once")} for line in result.devices]
    return {key: result.record[key] for key in ("score", "loss", "score_by_tier", "delivered_score")}, lines


def assert_close(found, wanted):
    """Values, lists or tables of them are the same but for rounding."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_close(found[key], value)
    elif isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif isinstance(wanted, torch.Tensor) and wanted.is_floating_point():
        assert torch.linalg.norm(found - wanted) <= 1e-5 * torch.linalg.norm(wanted)
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    else:
        assert found == (pytest.approx(wanted, rel=1e-5, abs=1e-8) if isinstance(wanted, float) else wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_weights_and_figures_are_those_in_turn(method, tmp_path_factory, caplog):
    @settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])  # to shrink takes minutes
    @given(
        examples=st.integers(35, 40),  # one batch on some devices, two on others
        steps=st.integers(0, 3),
        widths=st.sampled_from(["1, 0.5, 0.25", "1, 0.25", "1, 0.75, 0.5, 0.25"]),
        at_once=st.integers(2, 6),
    )
    def compare(examples, steps, widths, at_once):
        changes = {"examples-per-device": examples, "local-steps": steps, "widths": widths}
        wanted, in_turn, told = one_round(tmp_path_factory.mktemp("turn"), method, "off", caplog, **changes)
        assert not told
        found, beside, told = one_round(tmp_path_factory.mktemp("beside"), method, str(at_once), caplog, **changes)
        assert "trained" in {line["outcome"] for line in beside.devices}
        assert_close(figures(beside), figures(in_turn))
        assert_close(found.values, wanted.values)
        assert_close(found.tensors, wanted.tensors)
        assert len(told) == (method in IN_TURN)
        if all(line["at_once"] == 1 for line in beside.devices):
            assert same_bits(found.tensors, wanted.tensors)
            assert figures(beside)[1] == figures(in_turn)[1]  # models may have been scored at once all the same

    compare()


@pytest.mark.thorough
def test_dropout_of_a_traced_module_is_drawn_by_each_device(tmp_path_factory, caplog):
    changes = {"family": "own_kinds:Dropping", "local-steps": 3}
    wanted, in_turn, _ = one_round(tmp_path_factory.mktemp("turn"), "heterofl", "off", caplog, **changes)
    found, beside, told = one_round(tmp_path_factory.mktemp("beside"), "heterofl", "4", caplog, **changes)
    assert not told
    assert max(line["at_once"] for line in beside.devices) > 1
    assert_close(figures(beside), figures(in_turn))
    assert_close(found.tensors, wanted.tensors)


@pytest.mark.thorough
def test_a_module_that_draws_otherwise_is_trained_in_turn(tmp_path, caplog):
    _, result, told = one_round(tmp_path, "heterofl", "4", caplog, family="own_kinds:Noisy")
    assert {line["at_once"] for line in result.devices} == {1}
    assert len(told) == 1
    assert told[0].endswith("is trained in turn: the model or its loss draws at random, other than by nn.Dropout")
