"""Ensemble distillation by hand: what teachers say together, and what a student learns of it."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from torch import nn

from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from tests.strategies.by_hand import CLASSIFIER_BIAS, Logits, OneHidden
from tests.strategies.halves import FAMILY, setup
from wildflower.messages.error import MessageError
from wildflower.models.family import make_family
from wildflower.server_app.config import ConfigError
from wildflower.strategies import ensemble
from wildflower.strategies.ensemble import Ensemble, Teachers, logits_of, require_public, teach
from wildflower.strategies.fedavg import FedAvg
from wildflower.strategies.feddf import FedDF
from wildflower.strategies.method import Contribution, Group, Order
from wildflower.strategies.params import Params
from wildflower.tasks.public import PublicData

PUBLIC = PublicData(torch.arange(20.0).view(20, 1, 1, 1), (torch.tensor([9.5]), torch.tensor([5.0])))
SAID = torch.tensor([0.0, log(3), 0.0]).expand(20, -1)  # p = (1/5, 3/5, 1/5)
ONE = OneHidden()
ZERO = {name: torch.zeros(spec.shape) for name, spec in ONE.tensors(ONE.full()).items()}
DIVERGENCE = 0.6 * log(9 / 5) + 0.4 * log(3 / 5)  # KL(p || uniform) over three classes


def settings(**changes):
    return Ensemble(**({"steps": 300, "batch_size": 4, "learning_rate": 0.05} | changes))


def test_teachers_say_the_mean_of_their_logits():
    """Eq. 8: not the mean of their probabilities."""
    teachers = Teachers(PUBLIC, 3)
    for logits in ([0.0, 3.0, 0.0], [2.0, 1.0, 0.0]):
        teachers.add(Logits(*logits))
    assert teachers.count == 2
    assert teachers.take_mean().unique(dim=0).tolist() == [[1.0, 2.0, 0.0]]
    assert teachers.count == 0


def test_a_teacher_that_says_no_numbers_is_refused():
    teachers = Teachers(PUBLIC, 3)
    teachers.add(Logits(1.0, 0.0, 0.0))
    with pytest.raises(MessageError, match="finite"):
        teachers.add(Logits(float("nan"), 0.0, 0.0))
    assert teachers.take_mean()[0].tolist() == [1.0, 0.0, 0.0]


def test_a_student_of_zeros_says_all_classes_alike_and_learns_what_the_teachers_say():
    """Eq. 9: KL(ens || k), which is 0.148 at first; KL(k || ens) would be 0.128."""
    weights, figures = teach(ONE, ONE.full(), ZERO, SAID, PUBLIC, settings(), 1, "contiguous")
    assert figures["ensemble_loss_before_nats"] == pytest.approx(DIVERGENCE, abs=1e-6)
    assert figures["ensemble_loss_after_nats"] < 1e-3
    bias = weights[CLASSIFIER_BIAS]
    assert bias.softmax(dim=0).tolist() == pytest.approx([0.2, 0.6, 0.2], abs=0.02)
    assert all((value == 0).all() for value in ZERO.values())


def test_the_first_step_is_adams(monkeypatch):
    """A step of Adam is as long as its learning rate, against the gradient's sign: (1/3 - p) in the bias."""
    monkeypatch.setattr(ensemble, "HELD_OUT", 0.0)
    weights, _ = teach(ONE, ONE.full(), ZERO, SAID, PUBLIC, settings(steps=1), 1, "contiguous")
    assert weights[CLASSIFIER_BIAS].tolist() == pytest.approx([-0.05, 0.05, -0.05], abs=1e-6)


def test_it_stops_where_the_held_out_examples_gain_nothing():
    """Who says already what the teachers say begins with the least loss there is, and stays."""
    perfect = ZERO | {CLASSIFIER_BIAS: SAID[0].clone()}
    _, figures = teach(ONE, ONE.full(), perfect, SAID, PUBLIC, settings(steps=5000, patience=200), 1, "contiguous")
    assert figures["ensemble_steps"] <= 400
    assert figures["ensemble_loss_after_nats"] == pytest.approx(0.0, abs=1e-6)


def test_the_same_seed_gives_the_same_student():
    said = SAID * PUBLIC.inputs.view(20, 1)
    first, second, other = (
        teach(ONE, ONE.full(), ONE.initial() | ZERO, said, PUBLIC, settings(), seed, "contiguous")[0]
        for seed in (1, 1, 2)
    )
    assert all((first[name] == value).all() for name, value in second.items())
    assert any((first[name] != value).any() for name, value in other.items())


def test_a_student_that_diverges_leaves_the_average(caplog):
    broken = ZERO | {CLASSIFIER_BIAS: torch.full((3,), float("nan"))}
    weights, figures = teach(ONE, ONE.full(), broken, SAID, PUBLIC, settings(), 1, "contiguous")
    assert weights is broken
    assert figures["ensemble_steps"] == 0
    assert "diverged" in caplog.text


def test_public_data_must_be_there():
    with pytest.raises(ValueError, match=r"feddf learns from public data, and the run has none: set public\.task"):
        require_public("feddf", None)
    with pytest.raises(ValueError, match="too few"):
        require_public("feddf", replace(PUBLIC, inputs=PUBLIC.inputs[:3]))


def test_a_student_with_dropout_learns_the_same_whatever_was_drawn_before():
    family = make_family({"name": "vgg", "input_shape": [1, 8, 8], "block_channels": [2, 4, 32]})
    public = PublicData(torch.arange(8 * 64).view(8, 1, 8, 8) % 17, (torch.tensor([8.0]), torch.tensor([5.0])))
    torch.manual_seed(0)
    weights, said = family.initial(), torch.randn(8, 10)
    found = []
    for drawn in (1, 2):
        torch.manual_seed(drawn)
        taught, _ = teach(family, family.full(), weights, said, public, settings(steps=4), 7, "contiguous")
        found.append(taught)
    assert same_bits(*found)


# FedDF


def test_feddf_averages_by_examples_before_it_distills():
    """30 examples say 0.6 and 10 say 1.0: the student begins with 0.7. With a rate of almost nothing it ends there."""
    public = PublicData(torch.arange(8 * 64).view(8, 1, 8, 8) % 17, (torch.tensor([8.0]), torch.tensor([5.0])))
    shared = {"ensemble": Ensemble(steps=1, learning_rate=1e-12)}
    method = FedDF(replace(setup(), shared=shared, public=public), Params())
    whole = FAMILY.full()
    tensor_sets = method.client_step(Order(0, whole)).returned(FAMILY, whole)
    assert tensor_sets["weights"].merge is None
    group = Group(whole, method.selection(0, whole), {}, tensor_sets, FAMILY.place(whole))
    for device, (examples, value) in enumerate([(30, 0.6), (10, 1.0)]):
        weights = {name: torch.full(spec.shape, value) for name, spec in FAMILY.tensors(whole).items()}
        method.absorb(Contribution(group, [device], [device], examples, {}, {"weights": weights}))
    method.finish_round([])
    learned = [name for name in method.weights if "running" not in name]
    assert all(method.weights[name].unique().tolist() == pytest.approx([0.7], abs=1e-5) for name in learned)


def test_feddf_teaches_over_frozen_parts(tmp_path):
    engine, scorer = started(small_config(tmp_path, **METHODS["feddf"] | {"freeze": "block1"}))
    result = engine.run_round(simulated_grid(), 1, scorer)
    assert {line["outcome"] for line in result.devices} == {"trained"}
    assert result.record["metrics"]["ensemble_steps"] == 3


def test_feddf_without_the_whole_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="feddf teaches the whole model, so 1 must be among them"):
        started(small_config(tmp_path, **METHODS["feddf"] | {"widths": "0.5"}))


def test_feddf_runs(tmp_path):
    engine, scorer = started(small_config(tmp_path, **METHODS["feddf"]))
    record = engine.run_round(simulated_grid(), 1, scorer).record
    assert record["metrics"]["ensemble_steps"] == 3


# Public data


def test_a_public_task_of_another_shape_is_refused_before_the_first_round(tmp_path):
    data = tmp_path / "rgb"
    data.mkdir()
    images = np.zeros((8, 3, 9, 9), np.uint8)
    images[::2] = 200
    for part in ("train", "test"):
        np.savez(data / f"{part}.npz", inputs=images, labels=np.arange(8) % 2)
    keys = METHODS["feddf"] | {"public.task": "npz", "public.data-dir": str(data), "public.examples": 0}
    with pytest.raises(
        ConfigError, match=r"public\.task = 'npz': its inputs are 3x9x9, and the run's models read 1x8x8"
    ):
        started(small_config(tmp_path, **keys))


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/no/such", "public.task = 'npz': public.data-dir '/no/such' of the task 'npz' does not exist; it must be a"),
        ("", "public.task = 'npz': the task 'npz' needs public.data-dir: the folder of your train.npz and test.npz"),
    ],
)
def test_what_is_wrong_with_the_public_data_names_their_own_key(folder, message, tmp_path):
    keys = METHODS["feddf"] | {"public.task": "npz", "public.data-dir": folder}
    with pytest.raises(ConfigError, match=message):
        started(small_config(tmp_path, **keys))


def test_more_public_examples_than_there_are_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"has 1438 training inputs, and public\.examples asks for 5000"):
        started(small_config(tmp_path, **METHODS["feddf"] | {"public.examples": 5000}))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("rafl", r"strategy = 'rafl' learns from public data with rafl\.fusion = 'ensemble' only: set that, or leave"),
        (
            "fedavg",
            r"strategy = 'fedavg' does not learn from public data: leave .*, or take one of feddf, rafl with rafl",
        ),
        ("tests.strategies.test_ensemble:Deaf", r".* or take one of .*, or set public_when in its traits"),
    ],
)
def test_public_data_that_nothing_reads_are_refused_before_the_first_round(strategy, message, tmp_path):
    with pytest.raises(ConfigError, match=f"public.task = 'digits': {message}"):
        small_config(tmp_path, **{"strategy": strategy, "public.task": "digits"})


class Deaf(FedAvg):
    """A method of one's own that reads no public data."""


def test_keys_of_public_data_need_the_task(tmp_path):
    with pytest.raises(ConfigError, match="say nothing without it"):
        small_config(tmp_path, **{"public.examples": 5})
    with pytest.raises(ConfigError, match=r"no such public\.task"):
        small_config(tmp_path, **{"public.task": "digit"})


def test_the_runs_layout_is_that_of_the_students_steps():
    """Passes without gradients have the layout that is fastest, whatever the run says; sums differ by rounding."""
    family = make_family({"name": "cnn3", "input_shape": [3, 8, 8]})
    public = PublicData(torch.arange(8 * 192).view(8, 3, 8, 8) % 17, (torch.full((3,), 8.0), torch.full((3,), 5.0)))
    torch.manual_seed(0)
    weights, said = family.initial(), torch.randn(8, 10)
    found, seen = {}, []

    def note(module, inputs):
        if isinstance(module, nn.Conv2d) and module.in_channels == 3:
            seen.append((torch.is_grad_enabled(), inputs[0].is_contiguous()))

    with nn.modules.module.register_module_forward_pre_hook(note):
        logits_of(family.build(family.full()), public)
        assert set(seen) == {(False, False)}
        for layout, contiguous in (("contiguous", True), ("channels-last", False)):
            seen.clear()
            found[layout], _ = teach(family, family.full(), weights, said, public, settings(steps=4), 7, layout)
            assert set(seen) == {(False, False), (True, contiguous)}
    for name, value in found["contiguous"].items():
        torch.testing.assert_close(found["channels-last"][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "module"), [("feddf", "feddf"), ("rafl ensemble", "rafl.two_networks")])
def test_methods_pass_the_runs_layout_on(name, module, tmp_path, monkeypatch):
    seen = []

    def note(*arguments):
        seen.append(arguments[-1])
        return teach(*arguments)

    monkeypatch.setattr(f"wildflower.strategies.{module}.teach", note)
    engine, scorer = started(small_config(tmp_path, **METHODS[name] | {"compute.layout": "channels-last"}))
    engine.run_round(simulated_grid(), 1, scorer)
    assert seen == ["channels-last"]
