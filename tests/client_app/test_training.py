import pytest
import torch
import torch.nn.functional as F
from client_app.training import Refusal, train

from client_app import training
from client_app.state import DeviceState
from messages.orders import LocalTraining, Objective
from messages.packing import MessageError
from models.lenet import LeNet5
from tests.client_app.work_orders import LENET, close, cut, digits, payload, work_order

CPU = torch.device("cpu")
STATISTICS = Objective(kind="batch norm statistics")


def do(order, how=None, *, family=LENET, data=b"", state=None, available_bytes=None, width=0.5, round_number=1):
    return train(
        order,
        round_number,
        how or LocalTraining(batch_size=10, learning_rate=0.05),
        family,
        digits(),
        payload(family, width) if data == b"" else data,
        state,
        CPU,
        available_bytes,
    )


def no_build(monkeypatch):
    payload(), digits()  # what the server has made

    def build(self, architecture):
        raise AssertionError("a model was built")

    monkeypatch.setattr(LeNet5, "build", build)


def by_hand(device, seed, batches, family=LENET, width=0.5, **sgd):
    """Plain SGD on the batches that the seed shuffles; the mean loss over the examples."""
    task, architecture = digits(), family.width(width)
    model = family.build(architecture)
    model.load_state_dict(cut(family, architecture))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    generator = torch.Generator().manual_seed(seed)
    shard, losses = task.shard(device).train, []
    pieces = []
    while len(pieces) < batches:
        pieces += list(shard[torch.randperm(len(shard), generator=generator)].split(10))
    for picked in pieces[:batches]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(task.prepare(task.train.inputs[picked], augment=None)), task.train.labels[picked])
        loss.backward()
        optimizer.step()
        losses += [float(loss.detach())] * len(picked)
    return model.state_dict(), sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("how", "batches"),
    [({"epochs": 1}, 4), ({"epochs": 3}, 12), ({"epochs": 9, "steps": 3}, 3), ({"steps": 6}, 6)],
    ids=str,
)
def test_epochs_go_through_all_examples_and_steps_are_counted(how, batches):
    # 40 examples, a tenth of them for testing: 36 for training, in batches of 10, 10, 10 and 6.
    settings = LocalTraining(batch_size=10, learning_rate=0.05, momentum=0.5, weight_decay=0.01, **how)
    found = do(work_order(2), settings)
    expected, loss = by_hand(2, 9, batches, lr=0.05, momentum=0.5, weight_decay=0.01)
    assert found.examples == 36
    assert found.loss == pytest.approx(loss, abs=1e-6)
    assert all(close(found.returned[name], value) for name, value in expected.items())
    labels = digits().train.labels[digits().shard(2).train]
    assert found.present.nonzero().flatten().tolist() == labels.unique().tolist()


def test_batches_of_one_example_are_trained_on_where_they_were_asked_for():
    found = do(work_order(0), LocalTraining(batch_size=1, steps=3, learning_rate=0.05))
    assert not close(found.returned["head.fc1.weight"], cut(LENET, LENET.width(0.5))["head.fc1.weight"])


def test_a_last_batch_of_one_example_is_left_out():
    # 36 examples in batches of 7 leave one over, which batch norm cannot normalize over a 1x1 map.
    seen = []
    counted = training.batches_of(
        digits(), digits().shard(0).train, LocalTraining(batch_size=7), torch.Generator(), CPU, once=False
    )
    seen = [len(labels) for _, labels in counted]
    assert seen == [7, 7, 7, 7, 7]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_the_betas_of_adam_are_those_of_the_order(optimizer):
    sent = LocalTraining(optimizer=optimizer, betas=(0.8, 0.7)).model_dump_json()
    received = LocalTraining.model_validate_json(sent)
    assert training._optimizer(torch.nn.Linear(1, 1), received).defaults["betas"] == (0.8, 0.7)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_same_order_gives_the_same_bits_and_another_seed_others(optimizer):
    how = LocalTraining(batch_size=10, optimizer=optimizer, learning_rate=0.01)
    first, again, other = do(work_order(1), how), do(work_order(1), how), do(work_order(1, seed=99), how)
    assert all(torch.equal(first.returned[n], again.returned[n]) for n in first.returned)
    assert not all(torch.equal(first.returned[n], other.returned[n]) for n in first.returned)


def test_gradients_are_clipped_to_the_norm_that_is_asked():
    start = cut(LENET, LENET.width(0.5))
    found = do(work_order(0), LocalTraining(batch_size=10, steps=1, learning_rate=1.0, clip_norm=0.01))
    learned = [name for name in start if "running" not in name]
    moved = torch.cat([(found.returned[n] - start[n]).flatten() for n in learned])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_the_proximal_objective_stays_nearer_to_what_was_received():
    start = cut(LENET, LENET.width(0.5))

    def moved(objective):
        found = do(work_order(0, objective=objective), LocalTraining(batch_size=10, epochs=4, learning_rate=0.05))
        return sum(float((found.returned[n] - start[n]).square().sum()) for n in start if "running" not in n)

    assert moved(Objective(kind="proximal", mu=5.0)) < 0.5 * moved(Objective())


@pytest.mark.parametrize("distillation", [False, True])
def test_ordered_dropout_trains_the_sub_model_that_was_ordered(distillation):
    static = LeNet5(input_shape=(1, 8, 8), norm="static")
    objective = Objective(kind="ordered dropout", widths=(0.25, 0.5), distillation=distillation)
    how = LocalTraining(batch_size=10, epochs=6, learning_rate=0.05)
    found, again = (do(work_order(2, static, objective=objective), how, family=static) for _ in range(2))
    other = do(work_order(2, static, objective=objective, seed=99), how, family=static)
    start = cut(static, static.width(0.5))
    assert {name: value.shape for name, value in found.returned.items()} == {n: v.shape for n, v in start.items()}
    assert all(not torch.equal(found.returned[n], start[n]) for n in start if n.endswith("conv.weight"))
    assert all(torch.equal(found.returned[n], again.returned[n]) for n in start)
    assert not all(torch.equal(found.returned[n], other.returned[n]) for n in start)
    task, shard = digits(), digits().shard(2).train
    inputs, labels = task.prepare(task.train.inputs[shard], augment=None), task.train.labels[shard]
    for width in objective.widths:  # both learned
        architecture = static.width(width)
        losses = []
        for weights in (start, found.returned):
            model = static.build(architecture)
            model.load_state_dict(static.place(architecture).gather(weights))
            losses.append(float(F.cross_entropy(model(inputs), labels).detach()))
        assert losses[1] < losses[0]


def test_masked_training_leaves_the_rows_of_absent_classes_alone():
    static = LeNet5(input_shape=(1, 8, 8), norm="static", scaler=True)
    task = digits()
    task_labels = task.train.labels
    device = next(d for d in range(4) if len(task_labels[task.shard(d).train].unique()) < 10)
    order = work_order(device, static, objective=Objective(kind="masked cross entropy"))
    found = do(order, family=static)
    start, row = cut(static, static.width(0.5)), "head.classifier.weight"
    absent = ~found.present
    assert bool(absent.any())
    assert torch.equal(found.returned[row][absent], start[row][absent])
    assert not torch.equal(found.returned[row][~absent], start[row][~absent])


def test_statistics_are_the_mean_over_the_batches_of_one_pass():
    """First layer, by hand: the convolution's mean and unbiased variance per channel in each batch, then their mean."""
    found = do(work_order(1, objective=STATISTICS), LocalTraining(batch_size=10, epochs=5))
    assert list(found.returned) == [
        "block1.norm.running_mean",
        "block1.norm.running_var",
        "block2.norm.running_mean",
        "block2.norm.running_var",
    ]
    assert found.loss is None
    task, weights = digits(), cut(LENET, LENET.width(0.5))
    shard = task.shard(1).train
    shuffled = shard[torch.randperm(len(shard), generator=torch.Generator().manual_seed(8))]
    means, variances = [], []
    for picked in shuffled.split(10):
        x = task.prepare(task.train.inputs[picked], augment=None)
        y = F.conv2d(x, weights["block1.conv.weight"], weights["block1.conv.bias"], padding=2)
        channels = y.transpose(0, 1).flatten(1)
        means.append(channels.mean(1))
        variances.append(channels.var(1, unbiased=True))
    assert len(means) == 4
    assert close(found.returned["block1.norm.running_mean"], torch.stack(means).mean(0))
    assert close(found.returned["block1.norm.running_var"], torch.stack(variances).mean(0))


@pytest.mark.parametrize(
    ("budget", "available", "words", "overrun"),
    [
        (999_999, None, "training needs about 1000000 bytes, the budget is 999999 bytes", False),
        (999_999, 999_999, "the budget is 999999 bytes", False),
        (0, 999_999, "training needs about 1000000 bytes, this device has free 999999 bytes", False),
        (10**6, 999_999, "this device has free 999999 bytes", True),
        (10**9, 1, "this device has free 1 bytes", True),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_built(budget, available, words, overrun, monkeypatch):
    no_build(monkeypatch)
    with pytest.raises(Refusal, match=words) as refused:
        do(work_order(memory_bytes=budget), available_bytes=available)
    assert refused.value.overrun == overrun


def test_no_gradients_are_left():
    """Of a model that teaches or is scored next they would be held for nothing."""
    assert all(parameter.grad is None for parameter in do(work_order()).model.parameters())


def test_what_just_fits_is_trained():
    assert do(work_order(memory_bytes=10**6)).loss is not None


@pytest.mark.parametrize(
    ("budget", "available", "words"),
    [
        (1_200_000, 10**12, "training grew to 5500000 bytes, the budget is 1200000 bytes"),
        (10**12, 1_300_000, "training grew to 5500000 bytes, this device has free 1300000 bytes"),
        (0, 1_300_000, "training grew to 5500000 bytes, this device has free 1300000 bytes"),
    ],
)
def test_training_that_outgrows_a_limit_is_stopped(budget, available, words, monkeypatch):
    batches = []

    class Growing(training.MemoryMeter):
        def peak_bytes(self) -> int:
            batches.append(1)
            return 4_000_000 + 500_000 * len(batches)

    monkeypatch.setattr(training, "MemoryMeter", Growing)
    monkeypatch.setattr(training, "touched_bytes", lambda model: 4_000_000)
    order = work_order(memory_bytes=budget)
    with pytest.raises(Refusal, match=words):
        do(order, LocalTraining(batch_size=10, epochs=5), available_bytes=available)
    assert len(batches) == 3  # of twenty


def test_memory_that_is_freed_before_the_step_ends_counts(monkeypatch):
    local_loss = training.local_loss

    def greedy(*arguments):
        loss = local_loss(*arguments)

        def loss_of(inputs, labels):
            torch.ones(2**24)  # 64 MiB, every page of them written, and given back at once
            return loss(inputs, labels)

        return loss_of

    do(work_order())  # what the first training of a process loads is none of this one's
    monkeypatch.setattr(training, "local_loss", greedy)
    order = work_order(memory_bytes=40 * 2**20)
    with pytest.raises(Refusal, match=r"training grew to \d+ bytes, the budget is 41943040 bytes"):
        do(order, LocalTraining(batch_size=10, epochs=5), available_bytes=10**12)


def test_in_a_simulation_nobody_can_tell_what_one_device_holds(monkeypatch):
    monkeypatch.setattr(training.MemoryMeter, "peak_bytes", lambda self: 10**15)
    found = do(work_order(memory_bytes=1_200_000))
    assert found.loss is not None
    assert found.measured_memory_bytes is None


def test_on_a_machine_of_its_own_the_peak_is_told(monkeypatch):
    monkeypatch.setattr(training.MemoryMeter, "peak_bytes", lambda self: 1_100_000)
    assert do(work_order(), available_bytes=10**12).measured_memory_bytes == 1_100_000


def test_running_out_of_memory_is_a_refusal(monkeypatch):
    def fit(*arguments, **more):
        raise MemoryError("no more")

    monkeypatch.setattr(training, "_fit", fit)
    with pytest.raises(Refusal, match=r"out of memory after .* bytes: no more"):
        do(work_order())


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ({"widths": [3, 8, 60]}, "3 widths, but there are 4"),
        ({"widths": [7, 8, 60, 42]}, "width of conv1 must be 1 to 6, not 7"),
        ({"widths": [0, 8, 60, 42]}, "width of conv1 must be 1 to 6, not 0"),
        ({"widths": [3, 8, 60, 42], "kernels": [1]}, "1 kernels, but there are 0"),
        ({"blocks": 3}, "unknown keys"),
        ({}, "'widths' is missing"),
    ],
)
def test_an_unknown_architecture_is_refused_before_anything_is_built(architecture, words, monkeypatch):
    no_build(monkeypatch)
    with pytest.raises(ValueError, match=words):
        do(work_order(architecture=architecture), data=b"")


def test_server_and_device_must_agree_about_the_tensors(monkeypatch):
    no_build(monkeypatch)
    with pytest.raises(MessageError, match="server and device disagree about the tensors"):
        do(work_order(digest="0" * 16))


def test_weights_of_another_length_are_refused():
    with pytest.raises(MessageError, match="packed weights have"):
        do(work_order(), data=payload(width=1.0))


def test_a_device_without_weights_in_its_order_goes_on_with_its_own_model(tmp_path):
    state = DeviceState(str(tmp_path), "a run", 0)
    how = LocalTraining(batch_size=10, learning_rate=0.05)
    first = do(work_order(payload=None), how, data=None, state=state, round_number=1)
    second = do(work_order(payload=None), how, data=None, state=state, round_number=2)
    again = do(work_order(payload=None), how, data=None, state=state, round_number=2)
    assert second.loss < first.loss
    assert all(torch.equal(second.returned[n], again.returned[n]) for n in second.returned)
    anew = do(work_order(payload=None), how, data=None, state=state, round_number=1)
    assert all(torch.equal(first.returned[n], anew.returned[n]) for n in first.returned)
