"""Trainings in turn come to the same bits with captured steps; what cannot be captured goes without, in words.

A stand-in records a step and takes it again, over the same memory, where a CUDA graph would be replayed: like a graph
it goes on with what it has met in the training that it was captured from. `tests/gpu.py` has the real one.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from torch import nn

from tests.client_app.work_orders import Apart, context_of, work_order
from tests.small_run import METHODS, by_method, same_bits, simulated_grid, small_config, started
from wildflower.client_app import captured_step, fitting
from wildflower.client_app.batches import picks_of
from wildflower.client_app.captured_step import Spoiled, fit_in_turn
from wildflower.client_app.fitting import Fit
from wildflower.client_app.prepared import workplace
from wildflower.client_app.side_by_side import alone
from wildflower.messages.orders import Batch, LocalTraining
from wildflower.models.cnn import Cnn3, PflCnn
from wildflower.models.family import make_family
from wildflower.models.mlp import Mlp
from wildflower.models.weights import trained_parameters, with_weights
from wildflower.plugins import flower_log
from wildflower.strategies.shared_losses import PureLoss, Regularizer
from wildflower.tasks.task import TaskSpec, load_task

CPU = torch.device("cpu")
SPEC = TaskSpec(name="digits", devices=4, seed=1, partition="iid")
SGD = LocalTraining(batch_size=7, epochs=2, learning_rate=0.05, momentum=0.9, weight_decay=1e-3)
ADAM = LocalTraining(batch_size=7, epochs=2, learning_rate=0.01, optimizer="adam")
CNN, STATISTICS, DROPPING = Cnn3(input_shape=(1, 8, 8), norm="static"), Cnn3(input_shape=(1, 8, 8)), PflCnn((1, 8, 8))


OWN_LOOP = {"rafl", "rafl ensemble", "fednas"}  # methods that train no model by `ClientContext.fit`


class Recorder:
    """What captures steps here, and how often these were captured and replayed."""

    def __init__(self, change=None):
        self.captured = self.replayed = 0
        self.change = change

    def __call__(self, step, device):
        self.captured += 1
        value = step().clone()

        def replay():
            self.replayed += 1
            value.copy_(step())
            if self.change is not None:
                self.change(value, self.replayed)

        return value, replay


@pytest.fixture
def capturing(monkeypatch):
    """Let steps be captured on this processor, by what is given."""

    def let(capture, room=True):
        monkeypatch.setattr(captured_step, "CAPTURES", {"cpu": capture})
        monkeypatch.setattr(captured_step, "has_room", lambda device, needed_bytes: room)
        monkeypatch.setattr(captured_step, "_kinds", {})
        monkeypatch.setattr(flower_log, "_told", set())
        return capture

    return let


class Beside(nn.Module):
    """A second term over the parameters of a model."""

    def __init__(self, model):
        super().__init__()
        self.given = lambda: model

    def forward(self, inputs):
        return 0.5 * self.given()(inputs.flip(0))


def of_labels_and_size(task, model, inputs, labels):
    outputs = model(inputs)
    return task.loss(outputs, labels) + 0.1 * outputs.square().mean()


def fits_of(family, training, *, counts=(23, 16, 20, 16), change=None, kind="a step", loss=None, device=CPU, **more):
    """Trainings of devices of one architecture; each has weights of its own, and its last batch is short."""
    task, architecture = load_task(SPEC), family.width(0.25)
    for number, count in enumerate(counts):
        generator = torch.Generator().manual_seed(number)
        weights = {
            name: torch.rand(spec.shape, generator=generator) * 0.4 + 0.05
            for name, spec in family.tensors(architecture).items()
        }
        model = with_weights(family, architecture, weights).to(device)
        shard = torch.randperm(len(task.train), generator=generator)[:count]

        def start(shard=shard, number=number):
            return picks_of(shard, training, torch.Generator().manual_seed(number))

        def examples_of(picked):
            inputs = task.prepare(task.train.inputs[picked], augment=None)
            return inputs.to(device), task.train.labels[picked].to(device)

        if change is not None:
            change(model)
        given = PureLoss(task, model) if loss is None else loss(task, model)
        extra = {name: value(model, generator) for name, value in more.items()}
        yield Fit(model, given, start, examples_of, count, training, device, kind=(kind,), **extra)


def of_each(model, generator):
    return {
        name: torch.rand(p.shape, generator=generator).to(p.device) for name, p in trained_parameters(model).items()
    }


def proximal(model, generator):
    return Regularizer(strength=0.1, reported=True)


def corrected(model, generator):
    return Regularizer(strength=0.05, correction=of_each(model, generator))


def freeze(model):
    next(model.parameters()).requires_grad_(False)


def with_more(task, model):
    return PureLoss(task, model, more=[Beside(model)])


def with_criterion(task, model):
    return PureLoss(task, model, of_labels_and_size)


def with_closure(task, model):
    return PureLoss(task, model, lambda _task, _model, inputs, labels: task.loss(model(inputs), labels))


def results(fits, train):
    """Losses and tensors after each training, which later ones must not change."""
    models = [(train(fit), fit.model) for fit in fits]
    return [(loss, {name: value.cpu().clone() for name, value in model.state_dict().items()}) for loss, model in models]


def assert_same_bits(make):
    """Trainings come to what they come to without."""
    wanted, found = results(make(), lambda fit: fit.alone()), results(make(), fit_in_turn)
    for (one, tensors), (other, others) in zip(wanted, found, strict=True):
        assert one == other
        assert same_bits(tensors, others)


def told(caplog):
    return [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]


CASES = {
    "momentum": (CNN, SGD, {}),
    "running statistics": (STATISTICS, SGD, {}),
    "Adam": (CNN, ADAM, {}),
    "clip": (CNN, SGD.model_copy(update={"clip_norm": 0.1}), {}),
    "micro-batches": (CNN, SGD.model_copy(update={"micro_batch_size": 3}), {}),
    "micro-batches, correction": (CNN, SGD.model_copy(update={"micro_batch_size": 3}), {"regularizer": corrected}),
    "proximal": (CNN, SGD, {"regularizer": proximal}),
    "correction": (STATISTICS, ADAM, {"regularizer": corrected}),
    "terms": (CNN, SGD, {"loss": with_more}),
    "terms, factors, correction": (CNN, SGD, {"loss": with_more, "factors": of_each, "regularizer": corrected}),
    "factors": (STATISTICS, SGD, {"factors": of_each}),
    "factors, micro-batches": (CNN, SGD.model_copy(update={"micro_batch_size": 3}), {"factors": of_each}),
    "frozen": (CNN, SGD, {"change": freeze}),
    "a criterion": (CNN, SGD, {"loss": with_criterion}),
    "a learning rate of their own": (CNN, SGD.model_copy(update={"learning_rates": {"block1": 0.1}}), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_four_devices_of_one_kind_come_to_the_same_bits(case, capturing, caplog):
    family, training, more = CASES[case]
    recorder = capturing(Recorder())
    assert_same_bits(lambda: fits_of(family, training, **more))
    assert recorder.captured == 1
    assert recorder.replayed > 10  # and short batches without
    assert not told(caplog)


@pytest.mark.parametrize("name", ["Dense2", "Residual", "Gated"])
def test_traced_modules_come_to_the_same_bits(name, capturing, caplog):
    family = make_family({"name": f"own_traced:{name}", "input_shape": [1, 8, 8], "classes": 10})
    recorder = capturing(Recorder())
    assert_same_bits(lambda: fits_of(family, SGD))
    assert (recorder.captured, told(caplog)) == (1, [])


def test_kinds_that_take_turns_keep_their_tensors_apart(capturing):
    recorder = capturing(Recorder())

    def make():
        narrow = fits_of(Mlp(input_shape=(1, 8, 8)), SGD, kind="narrow")
        return [fit for pair in zip(fits_of(STATISTICS, SGD), narrow, strict=True) for fit in pair]

    assert_same_bits(make)
    assert recorder.captured == 2


def test_tensors_that_were_handed_out_before_a_training_have_its_result(capturing):
    capturing(Recorder())
    for fit in fits_of(CNN, SGD):
        before = {name: value.data_ptr() for name, value in fit.model.state_dict().items()}
        handed_out = dict(fit.model.state_dict())
        fit_in_turn(fit)
        assert {name: value.data_ptr() for name, value in fit.model.state_dict().items()} == before
        assert same_bits(handed_out, fit.model.state_dict())
        assert all(parameter.grad is None for parameter in fit.model.parameters())


def failing(error):
    def capture(step, device):
        step()
        raise error

    return capture


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"family": DROPPING}, "it draws at random"),
        ({"loss": lambda task, model: lambda inputs, labels: task.loss(model(inputs), labels)}, "no PureLoss"),
        ({"new_statistics": lambda model, generator: True, "family": STATISTICS}, "begin as a mean"),
        (
            {"loss": lambda task, model: PureLoss(task, model, lambda *given: task.loss(model(given[2]), given[3]))},
            "may ",
        ),
    ],
)
def test_what_a_graph_could_not_repeat_is_trained_without(case, words, capturing, caplog):
    recorder = capturing(Recorder())

    def make():
        torch.manual_seed(1)  # for dropout
        yield from fits_of(**{"family": CNN, "training": SGD} | case)

    assert_same_bits(make)
    assert recorder.captured == 0
    [said] = told(caplog)
    assert said.startswith("a step is trained without CUDA graphs: ")
    assert words in said


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        (
            failing(RuntimeError("called a synchronizing CUDA operation\nat line 3")),
            "called a synchronizing CUDA operation",
        ),
        (failing(torch.OutOfMemoryError("CUDA out of memory")), "CUDA out of memory"),
        (failing(Spoiled("the capture failed: invalidated")), "the capture failed: invalidated"),
        (Recorder(lambda value, times: value.add_(1e-3 * times)), "a replayed step has other bits"),
    ],
)
def test_a_capture_that_fails_or_has_other_bits_is_given_up(capture, words, capturing, caplog):
    capturing(capture)
    assert_same_bits(lambda: fits_of(STATISTICS, SGD))
    assert told(caplog) == [f"a step is trained without CUDA graphs: {words}"]


def test_after_a_capture_that_failed_midway_none_is_tried(capturing):
    capturing(failing(Spoiled("the capture failed")))
    results(fits_of(CNN, SGD), fit_in_turn)
    assert captured_step.CAPTURES == {}


def test_what_another_device_computes_differently_is_found(capturing, caplog):
    """A number in the loss that is no tensor is that of the first device: the third training is checked, too."""

    class Scaled(PureLoss):
        def __init__(self, task, model, scale):
            super().__init__(task, model)
            self.scale = scale

        def forward(self, *given):
            return super().forward(*given) * self.scale

    scales = iter([1, 1, 3, 3] * 2)
    capturing(Recorder())
    assert_same_bits(lambda: fits_of(CNN, SGD, loss=lambda task, model: Scaled(task, model, next(scales))))
    assert told(caplog) == ["a step is trained without CUDA graphs: a replayed step has other bits"]


def test_memory_that_ends_in_a_training_frees_all_steps_and_it_begins_again(capturing, caplog):
    seen = []

    def ends(value, times):
        seen.append(times)
        if times == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    capturing(Recorder(ends))
    assert_same_bits(lambda: fits_of(STATISTICS, SGD))
    assert seen == [1, 2, 3, 4]
    assert not any(isinstance(found, captured_step.CapturedStep) for found in captured_step._kinds.values())
    assert told(caplog) == ["a step is trained without CUDA graphs: CUDA out of memory"]


def test_another_error_of_a_training_is_the_devices_own(capturing):
    recorder = capturing(Recorder())
    [fit, _, _, _] = fits_of(CNN, SGD)
    before = {name: value.clone() for name, value in fit.model.state_dict().items()}
    times = iter(range(100))

    def examples_of(picked):
        if next(times) == 3:
            raise OSError("the card is gone")
        return whole(picked)

    whole = fit.examples_of
    object.__setattr__(fit, "examples_of", examples_of)
    with pytest.raises(OSError, match="the card is gone"):
        fit_in_turn(fit)
    assert recorder.captured == 1
    assert same_bits(before, fit.model.state_dict())
    assert [type(found) for found in captured_step._kinds.values()] == [captured_step.CapturedStep]


def test_without_room_nothing_is_captured_and_with_it_again_it_is(capturing, caplog, monkeypatch):
    recorder = capturing(Recorder(), room=False)
    assert_same_bits(lambda: fits_of(CNN, SGD))
    assert recorder.captured == 0
    assert told(caplog) == ["a step is trained without CUDA graphs: less than half of the GPU's memory would be left"]
    monkeypatch.setattr(captured_step, "has_room", lambda device, needed_bytes: True)
    assert_same_bits(lambda: fits_of(CNN, SGD))
    assert recorder.captured == 1


def test_more_kinds_than_are_kept_are_trained_without(capturing, caplog, monkeypatch):
    monkeypatch.setattr(captured_step, "MOST_KINDS", 1)
    recorder = capturing(Recorder())
    assert_same_bits(lambda: [*fits_of(CNN, SGD), *fits_of(STATISTICS, SGD)])
    assert recorder.captured == 1
    assert told(caplog) == ["a step is trained without CUDA graphs: there are more than 1 kinds of steps"]


def test_a_device_with_fewer_examples_than_a_batch_has_none_captured(capturing, caplog):
    recorder = capturing(Recorder())
    assert_same_bits(lambda: fits_of(CNN, SGD, counts=(6, 5)))
    assert (recorder.captured, told(caplog)) == (0, [])


def state_of(folder, method):
    """The tensors and losses of two rounds of six devices in turn, with a short last batch."""
    folder.mkdir()
    more = {"rounds": 2, "evaluate-every": 2, "local-epochs": 1, "local-steps": 0, "batch-size": 10, "workers": 1}
    keys = METHODS[method] | more | {"devices-per-round": 6, "compute.side-by-side": "auto"}
    engine, scorer = started(small_config(folder, **keys))
    grid = simulated_grid(1)
    records = [engine.run_round(grid, number, scorer).record for number in (1, 2)]
    return engine.method.state().tensors, [(record["loss"], record["score"]) for record in records]


@by_method()
def test_every_method_comes_to_the_same_bits(method, capturing, tmp_path):
    wanted, figures = state_of(tmp_path / "without", method)
    recorder = capturing(Recorder())
    found, its_figures = state_of(tmp_path / "with", method)
    assert same_bits(wanted, found)
    assert figures == its_figures
    own_loop = not recorder.captured and not any("CUDA graphs" in words for words in flower_log._told)
    assert own_loop == (method in OWN_LOOP)


def test_a_training_has_a_kind_where_steps_may_be_captured(monkeypatch):
    kinds = []
    monkeypatch.setattr(fitting, "fit_here", lambda fit: kinds.append(fit.kind) or 0.0)
    for captures in (True, False):
        context = context_of(work_order(0), captures=captures)
        model = context.build(context.received["weights"])
        context.fit(model, Apart().loss(context, model))
        context.close()
    assert [kind is None for kind in kinds] == [False, True]


@pytest.mark.parametrize(
    ("shared_process", "side_by_side", "captures"),
    [(True, "auto", True), (True, "fastest", True), (True, 4, True), (True, 1, False), (False, "auto", False)],
)
def test_steps_are_captured_in_simulations_where_side_by_side_is_not_off(shared_process, side_by_side, captures):
    batch = Batch.model_construct(shared_process=shared_process, side_by_side=side_by_side)
    assert workplace(work_order(0), batch, {}, CPU, alone).captures == captures


class PretendedGpu:
    """What `capture_graph` asks of torch.cuda; a capture ends with an error where `ends_with` is one."""

    def __init__(self, monkeypatch, ends_with=None):
        self.done, self.ends_with = [], ends_with
        self.side = SimpleNamespace(wait_stream=lambda other: None)
        generator = SimpleNamespace(clone_state=lambda: "fresh", graphsafe_set_state=self.note("generator"))
        found = {
            "current_stream": lambda device: self,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": self.note("waiting"),
            "stream": self.on,
            "CUDAGraph": lambda: SimpleGraph(self),
            "current_device": lambda: 0,
            "graph_pool_handle": lambda: (0, 1),
            "graph": lambda graph, pool, stream: self.capturing(pool),
            "set_stream": self.note("stream"),
            "default_generators": (generator,),
        }
        for name, value in found.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.note("end"), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.note("release"), raising=False)
        monkeypatch.setattr(captured_step, "_side_stream", lambda device: self.side)
        monkeypatch.setattr(captured_step, "_graphs", WeakSet())

    def wait_stream(self, other):
        self.done.append("joined")

    def note(self, name):
        return lambda *given: self.done.append((name, *given))

    @contextmanager
    def on(self, stream):
        self.done.append("side")
        yield

    @contextmanager
    def capturing(self, pool):
        self.done.append(("capture", pool))
        try:
            yield
        finally:
            if self.ends_with is not None:
                raise self.ends_with


class SimpleGraph:
    def __init__(self, gpu):
        self.replay = gpu.note("replay")

    def pool(self):
        return (0, 1)


def test_a_step_is_warmed_up_beside_and_then_captured_in_a_shared_pool(monkeypatch):
    gpu = PretendedGpu(monkeypatch)
    steps = iter(range(9))
    value, replay = captured_step.capture_graph(lambda: next(steps), CPU)
    assert value == captured_step.WARM_UP
    assert gpu.done == [("waiting", "error"), "side", ("waiting", 0), "joined", ("capture", (0, 1))]
    replay()
    assert gpu.done[-1] == ("replay",)


def test_what_cannot_be_captured_is_met_before_the_capture(monkeypatch):
    gpu = PretendedGpu(monkeypatch)

    def waits():
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        captured_step.capture_graph(waits, CPU)
    assert gpu.done == [("waiting", "error"), "side", ("waiting", 0), "joined"]


def test_after_a_capture_that_failed_stream_generator_and_allocator_are_set_right(monkeypatch):
    gpu = PretendedGpu(monkeypatch, ends_with=RuntimeError("invalidated"))
    steps = iter(range(captured_step.WARM_UP))

    def step():
        for number in steps:
            return number
        raise RuntimeError("not permitted")

    with pytest.raises(Spoiled, match="the capture failed: not permitted"):
        captured_step.capture_graph(step, CPU)
    assert gpu.done[5:] == [("stream", gpu), ("generator", "fresh"), ("end", 0, (0, 1)), ("release", 0, (0, 1))]
