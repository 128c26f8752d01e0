"""Runs whose devices hold their own data: over nodes, and simulated over folders, with the same bits."""

import json
import logging
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import Message

from tests.encoders import family_arguments
from tests.grid import InProcessGrid
from tests.own_folders import digits, digits_of_devices, image_folder, npz_folder
from tests.small_run import changed_reply, same_bits, simulated_grid
from tests.tasks.text_files import SEP, make_tokenizer, write_lines
from wildflower.cli.plan import PlanError, make_plan
from wildflower.client_app.app import app as client
from wildflower.devices.conditions import Rest
from wildflower.messages.flower_records import read_records
from wildflower.messages.orders import DataAnswer, Score, parse
from wildflower.messages.packing import MessageError
from wildflower.messages.wire import to_records
from wildflower.rounds.scores import federated_score
from wildflower.server_app.app import build, run
from wildflower.server_app.checkpoint import load as load_checkpoint
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.inputs import task_spec
from wildflower.server_app.models import ModelError, load_model
from wildflower.server_app.own_agreement import agree_with_nodes, read_agreed
from wildflower.server_app.run_folder import JournalError, read_devices, read_rounds, read_summary
from wildflower.strategies.statistics import TakeStatistics
from wildflower.tasks.device_data import Agreed
from wildflower.tasks.inspection import server_test
from wildflower.tasks.metrics import Accuracy

DEVICES = 4


def own_config(folder, **changes):
    values = {
        "task": "npz",
        "partition": "own",
        "fleet": "",
        "strategy": "fedavg",
        "fedavg.use": "all-large",
        "family": "lenet5",
        "output-dir": str(folder / "runs"),
        "run-name": "own",
        "devices": DEVICES,
        "devices-per-round": DEVICES,
        "rounds": 2,
        "local-steps": 2,
        "test-fraction": 0.2,
        "seed": 3,
    }
    return RunConfig.from_run_config(
        values | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    )


def nodes_over(folder, devices=DEVICES, **configs):
    """One device per node, each with a data-dir of its own."""

    def config(node):
        device = node - 1
        own = {
            "partition-id": device,
            "num-partitions": devices,
            "state-dir": str(folder / f"state-{node}"),
            "data-dir": str(folder / "devices" / f"{device:04d}"),
        }
        return own

    return InProcessGrid(client, devices, config)


def npz_devices(folder, devices=DEVICES):
    for device, (inputs, labels) in enumerate(digits_of_devices(devices)):
        npz_folder(folder / "devices" / f"{device:04d}", inputs, labels)
    return folder


def fleet_file(folder):
    path = folder / "four.toml"
    path.write_text('[[group]]\nname = "all"\ncount = 4\nmemory = "4 GB"\nlink = "100 Mbit/s"\nspeed = 1.0\n')
    return str(path)


def test_nodes_train_on_their_own_files_and_the_server_scores_on_its_test_set(tmp_path):
    npz_devices(tmp_path)
    _, _, inputs, labels = digits()
    server = npz_folder(tmp_path / "server", inputs[:100], labels[:100], "test")
    with mock.patch("wildflower.server_app.own_agreement.server_test", wraps=server_test) as read:
        run_dir = run(nodes_over(tmp_path), own_config(tmp_path, data_dir=str(server), test_fraction=0.0))
    assert read.call_count == 1
    rounds, devices = list(read_rounds(run_dir)), list(read_devices(run_dir))
    assert [record.devices_replied for record in rounds] == [DEVICES, DEVICES]
    assert {record.examples for record in devices} == {30}
    assert 0 <= rounds[-1].score <= 1
    assert rounds[-1].worst_device is None
    agreed = Agreed.model_validate_json((run_dir / "agreed.json").read_bytes())
    assert agreed.label_names == tuple("0123456789")
    pooled = np.concatenate([x for x, _ in digits_of_devices(DEVICES)]).astype(np.float64)
    assert agreed.mean == pytest.approx([pooled.mean()])
    assert agreed.std == pytest.approx([pooled.std()])


@pytest.mark.thorough
def test_a_simulation_over_folders_gives_the_same_bits(tmp_path):
    npz_devices(tmp_path)
    over_nodes = run(nodes_over(tmp_path), own_config(tmp_path, run_name="nodes"))
    config = own_config(tmp_path, run_name="simulated", fleet=fleet_file(tmp_path), data_dir=str(tmp_path))
    simulated = run(simulated_grid(), config)
    states = [load_checkpoint(run_dir).state.tensors for run_dir in (over_nodes, simulated)]
    assert same_bits(*states)
    scores = [[(r.score, r.loss, r.worst_device) for r in read_rounds(run_dir)] for run_dir in (over_nodes, simulated)]
    assert scores[0] == scores[1]


def test_federated_evaluation_is_the_score_over_all_held_out_examples(tmp_path):
    npz_devices(tmp_path, 3)
    inputs, labels = digits_of_devices(DEVICES)[3]
    npz_folder(tmp_path / "devices" / "0003", inputs[:20], labels[:20])
    npz_folder(tmp_path / "devices" / "0003", inputs[20:], labels[20:], "test")  # its own test set, in place of a share
    run_dir = run(nodes_over(tmp_path), own_config(tmp_path))
    last = list(read_rounds(run_dir))[-1]
    assert last.scored_devices == DEVICES
    # By hand: what the saved model says of the examples that each device held out.
    model, info = load_model(run_dir, "newest")
    right, counts = {}, {}
    for device in range(DEVICES):
        inputs, labels = digits_of_devices(DEVICES)[device]
        order = np.random.default_rng([3, device, 1]).permutation(30)
        held = order[:6] if device < 3 else np.arange(20, 30)
        answers = model(info.prepare(torch.from_numpy(inputs[held]))).argmax(dim=1)
        right[device], counts[device] = int((answers == torch.from_numpy(labels[held])).sum()), len(held)
    assert last.score == pytest.approx(sum(right.values()) / sum(counts.values()))
    # All are of one tier, whose model is the whole one.
    assert (last.delivered_score, last.delivered_devices) == (last.score, DEVICES)
    assert last.delivered_score_by_tier == last.score_by_tier
    worst = min(right, key=lambda device: (right[device] / counts[device], device))
    assert (last.worst_device, last.worst_score) == (worst, pytest.approx(right[worst] / counts[worst]))
    assert info.label_names == list("0123456789")


def test_where_only_devices_have_examples_to_test_on_there_is_no_best_to_choose(tmp_path, caplog):
    npz_devices(tmp_path)
    with caplog.at_level(logging.INFO, logger="flwr"):
        run_dir = run(nodes_over(tmp_path), own_config(tmp_path, deliver="best"))
    assert "a device counts with the model that it would be assigned" in caplog.text
    last = list(read_rounds(run_dir))[-1]
    assert last.delivered_score_by_tier == last.score_by_tier


def test_a_device_that_does_not_fit_is_named_and_the_run_goes_on(tmp_path, caplog):
    npz_devices(tmp_path, 3)
    npz_folder(tmp_path / "devices" / "0003", np.zeros((9, 1, 5, 5), np.uint8), [0, 1, 2] * 3)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run_dir = run(nodes_over(tmp_path), own_config(tmp_path))
    assert "Device 3 does not take part: its examples are 1x5x5 bytes" in caplog.text
    outcomes = {(d.round, d.device): d.outcome for d in read_devices(run_dir)}
    assert outcomes[1, 3] == outcomes[2, 3]
    assert outcomes[1, 3].startswith("refused: its data do not fit: its examples are 1x5x5 bytes")
    assert [outcomes[2, device] for device in range(3)] == ["trained"] * 3
    assert [r.devices_refused for r in read_rounds(run_dir)] == [1, 1]


def fleet_of_two_tiers(folder):
    """Device 0 affords the whole model, devices 1 to 3 half of its width."""
    path = folder / "two.toml"
    group = '[[group]]\nname = "{}"\ncount = {}\nfits_width = {}\nlink = "100 Mbit/s"\nspeed = 1.0\n'
    path.write_text(group.format("large", 1, 1.0) + group.format("tiny", 3, 0.5))
    return str(path)


def of_two_tiers(folder, **changes):
    there = {"fleet": fleet_of_two_tiers(folder), "data_dir": str(folder), "widths": "1, 0.5"}
    return own_config(folder, **there | changes)


def right_answers(run_dir, device, tier=None):
    """By hand: how many of the 6 examples that a device held out a saved model answers right."""
    model, info = load_model(run_dir, "newest", tier)
    inputs, labels = digits_of_devices(DEVICES)[device]
    held = np.random.default_rng([3, device, 1]).permutation(30)[:6]
    answers = model(info.prepare(torch.from_numpy(inputs[held]))).argmax(dim=1)
    return int((answers == torch.from_numpy(labels[held])).sum())


def test_without_the_one_device_that_affords_the_whole_model_the_run_has_its_scores(tmp_path, caplog):
    npz_devices(tmp_path)
    npz_folder(tmp_path / "devices" / "0000", np.zeros((9, 1, 5, 5), np.uint8), [0, 1, 2] * 3)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run_dir = run(simulated_grid(), of_two_tiers(tmp_path, strategy="heterofl", family="cnn3"))
    for record in read_rounds(run_dir):
        assert (record.devices_replied, record.devices_refused) == (3, 1)
        assert None not in (record.score, record.delivered_score)
        assert record.score_by_tier.keys() == {"tiny"}
    assert record.score == pytest.approx(sum(right_answers(run_dir, device) for device in (1, 2, 3)) / 18)
    assert "so any device takes its batch norm statistics" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("server_tests", [False, True])
def test_tiers_are_scored_and_saved_where_the_whole_model_cannot_be(tmp_path, server_tests):
    npz_devices(tmp_path)
    if server_tests:
        _, _, inputs, labels = digits()
        npz_folder(tmp_path, inputs[:50], labels[:50], "test")
    take = TakeStatistics.train

    def refused(local, context):
        if context.architecture == context.family.full():
            raise MessageError("not today")
        return take(local, context)

    # The largest that fits is delivered: else the server gives device 0 the tier's model, which it has scored.
    changes = {"strategy": "heterofl", "family": "cnn3", "deliver": "largest"}
    config = of_two_tiers(tmp_path, **changes, test_fraction=0.0 if server_tests else 0.2)
    with mock.patch.object(TakeStatistics, "train", refused):
        run_dir = run(simulated_grid(), config)
    last = list(read_rounds(run_dir))[-1]
    if server_tests:
        model, info = load_model(run_dir, "newest", "tiny")
        answers = model(info.prepare(torch.from_numpy(inputs[:50]))).argmax(dim=1)
        tiny = int((answers == torch.from_numpy(labels[:50])).sum()) / 50
    else:
        tiny = sum(right_answers(run_dir, device, "tiny") for device in (1, 2, 3)) / 18
        assert (last.scored_devices, last.score_by_device.keys()) == (3, {1, 2, 3})
    assert (last.score, last.loss) == (None, None)
    assert last.score_by_tier == {"tiny": pytest.approx(tiny)}
    # The three devices of the tier get its model. Of what device 0 gets nothing is known.
    assert (last.delivered_score, last.delivered_devices) == (pytest.approx(tiny), 3)
    assert read_summary(run_dir).last_delivered_score == last.delivered_score
    assert read_summary(run_dir).last_score is None
    assert load_model(run_dir, "best", "tiny")[1].round == 2
    with pytest.raises(ModelError, match=r"holds no global model, which could not be scored; of tiers there are tiny$"):
        load_model(run_dir)


def test_a_device_is_scored_by_its_tiers_model_where_its_memory_does_not_hold_the_whole(tmp_path):
    npz_devices(tmp_path)
    config = of_two_tiers(tmp_path, **{"fedavg.use": "affordable", "local-steps": 20, "learning-rate": 0.1})
    run_dir = run(simulated_grid(), config)
    last = list(read_rounds(run_dir))[-1]
    whole = [right_answers(run_dir, device) for device in range(DEVICES)]
    tiny = {device: right_answers(run_dir, device, "tiny") for device in (1, 2, 3)}
    of_device = {0: whole[0]} | tiny
    assert list(of_device.values()) != whole  # or the test could not fail
    assert last.score_by_device == {device: pytest.approx(right / 6) for device, right in of_device.items()}
    worst = min(of_device, key=lambda device: (of_device[device], device))
    assert (last.worst_device, last.worst_score) == (worst, pytest.approx(of_device[worst] / 6))
    assert last.score == pytest.approx(sum(whole) / 24)  # all devices of a simulation score the whole model
    assert last.score_by_tier == {"large": pytest.approx(whole[0] / 6), "tiny": pytest.approx(sum(tiny.values()) / 18)}
    for tier in ("large", "tiny"):
        best = load_model(run_dir, "best", tier)[1]
        by_round = {record.round: record.score_by_tier[tier] for record in read_rounds(run_dir)}
        assert best.model.score == by_round[best.round] == max(by_round.values())


def accuracy_of(right, examples):
    return Score(device=0, sums=[right], loss_sum=1.0, examples=examples)


def test_the_worst_device_is_not_scored_by_a_model_that_its_memory_does_not_hold():
    """Device 1 answers 8 of 8 right by the whole model, which it does not hold, and 5 of 8, 62.5 %, by its tier's."""
    whole = {0: accuracy_of(3.0, 4), 1: accuracy_of(8.0, 8)}
    tiers = {"large": {0: whole[0]}, "tiny": {1: accuracy_of(5.0, 8)}}
    found = federated_score(whole, {0}, tiers, Accuracy())
    assert found.score == 11 / 12
    assert (found.worst_device, found.worst_score, found.scored_devices) == (1, 0.625, 2)
    assert found.score_by_device == {0: 0.75, 1: 0.625}
    # Where no tier is scored, all that is known of it is what the whole model does there.
    for holding in ({0}, set()):
        found = federated_score(whole, holding, {}, Accuracy())
        assert (found.score, found.worst_device, found.worst_score) == (11 / 12, 0, 0.75)
        assert found.score_by_device == {0: 0.75, 1: 1.0}


def spied(grid):
    """All messages that leave nodes of the grid, as their JSON and arrays."""
    seen = []

    def tamper(message: Message) -> Message:
        seen.append((message.metadata.message_type, *read_records(message.content, "a reply")))
        return message

    grid.tamper = tamper
    return seen


def test_no_message_of_a_node_holds_an_example(tmp_path):
    npz_devices(tmp_path)
    grid = nodes_over(tmp_path)
    seen = spied(grid)
    run_dir = run(grid, own_config(tmp_path, personal__every=1))
    model, _ = load_model(run_dir, "newest")
    parameters = sum(value.numel() for value in model.state_dict().values())
    kinds = {kind for kind, _, _ in seen}
    assert kinds == {"query", "query.data", "train", "evaluate"}
    images = [pixels for inputs, _ in digits_of_devices(DEVICES) for pixels in inputs]
    for kind, text, arrays in seen:
        # Of arrays only the weights of a training reply: as many numbers as the model has.
        assert [len(data) for data in arrays] == ([4 * parameters] if kind == "train" else [])
        for data in arrays:
            for pixels in images:
                as_floats = pixels.astype(np.float32)
                assert not any(form in data for form in (pixels.tobytes(), as_floats.tobytes()))
        numbers = sum(1 for value in leaves(json.loads(text)) if isinstance(value, int | float))
        assert numbers < 64  # an image of 8 x 8
    said = [parse(DataAnswer, text).said for kind, text, _ in seen if kind == "query.data"]
    assert {s.device for s in said} == set(range(DEVICES))
    for s in said:
        if s.moments is not None:
            inputs = digits_of_devices(DEVICES)[s.device][0]
            held = np.random.default_rng([3, s.device, 1]).permutation(30)[6:]
            assert s.moments.sums == (float(inputs[held].sum()),)


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["heterofl", "scaffold", "local"])
def test_other_methods(tmp_path, strategy):
    npz_devices(tmp_path)
    run_dir = run(nodes_over(tmp_path), own_config(tmp_path, strategy=strategy))
    last = list(read_rounds(run_dir))[-1]
    assert last.devices_replied == DEVICES
    assert 0 <= last.score <= 1


def test_images_of_folders(tmp_path):
    for device, (inputs, labels) in enumerate(digits_of_devices(DEVICES)):
        image_folder(tmp_path / "devices" / f"{device:04d}", inputs, [f"digit {label}" for label in labels])
    arguments = "color = 'gray'"
    run_dir = run(nodes_over(tmp_path), own_config(tmp_path, task="images", task_arguments=arguments))
    agreed = Agreed.model_validate_json((run_dir / "agreed.json").read_bytes())
    assert agreed.label_names == tuple(f"digit {number}" for number in range(10))
    assert list(read_rounds(run_dir))[-1].devices_replied == DEVICES
    assert load_model(run_dir, "newest")[1].label_names[3] == "digit 3"


def test_what_nodes_left_out_of_their_folders_is_in_the_log(tmp_path, caplog):
    for device, (inputs, labels) in enumerate(digits_of_devices(DEVICES, 6)):
        folder = image_folder(tmp_path / "devices" / f"{device:04d}", inputs, labels)
        (folder / str(labels[0]) / "extra.heic").write_bytes(b"x")
    config = own_config(tmp_path, task="images", task_arguments="color = 'gray'")
    grid = nodes_over(tmp_path)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        own = agree_with_nodes(grid, config, task_spec(config))
        told = "photos that end in .heic, which is not read (save them as .jpg)"
        assert f"Data of devices 0, 1, 2, 3: {told}: 4, such as " in caplog.text
        caplog.clear()
        # One that comes late tells as well.
        refused = mock.Mock(device=2, outcome="refused: its folder has changed")
        own.after_exchange(mock.Mock(assignments=[refused]))
        population = mock.Mock(nodes=lambda grid, devices, budgets: [device + 1 for device in devices], busy=set())
        population.poll_seconds = 0.1
        assert own.admit(grid, [2], population) == {}
        assert f"Data of device 2: {told}: 1, such as " in caplog.text


def test_a_resumed_run_has_what_was_agreed(tmp_path):
    npz_devices(tmp_path)
    whole = run(nodes_over(tmp_path), own_config(tmp_path, run_name="whole"))
    run(nodes_over(tmp_path), own_config(tmp_path, rounds=1))
    grid = nodes_over(tmp_path)
    seen = spied(grid)
    resumed = run(grid, own_config(tmp_path, resume=True))
    assert not any(parse(DataAnswer, text).said.moments for kind, text, _ in seen if kind == "query.data")
    assert same_bits(load_checkpoint(whole).state.tensors, load_checkpoint(resumed).state.tensors)


PRIVATE = {"family-arguments": "norm = 'static'", "dp.noise-multiplier": 1.0, "dp.delta": 1e-3}


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(
    ("server_tests", "arguments", "why"),
    [
        (False, "mean = [4.9], std = [6.0]", "only devices have examples to test on, .*: give the server a test set"),
        (
            True,
            "",
            r"set mean and std in task-arguments; those of the server's test set are mean = \[4\.\d+\], std = \[",
        ),
        (True, "classes = ['0', '1']", "set mean and std in task-arguments"),
    ],
)
def test_a_private_run_takes_no_statistics_of_devices_data(simulated, server_tests, arguments, why, tmp_path):
    """Before any device is asked."""
    npz_devices(tmp_path)
    _, _, inputs, labels = digits()
    if server_tests:
        npz_folder(tmp_path, inputs[:100], labels[:100], "test")
    changes = PRIVATE | {"data-dir": str(tmp_path), "task-arguments": arguments}
    config = own_config(tmp_path, **changes, fleet=fleet_file(tmp_path) if simulated else "")
    grid = nodes_over(tmp_path)
    with (
        mock.patch.object(grid, "push_messages", side_effect=AssertionError("a node was asked")),
        mock.patch("wildflower.server_app.own_agreement.ask_here", side_effect=AssertionError("a folder was read")),
        pytest.raises(ConfigError, match=f"partition = 'own' under differential privacy .*{why}"),
    ):
        run(grid, config)
    assert not (tmp_path / "runs" / "own" / "config.json").exists()


def test_a_private_run_over_declared_statistics_has_no_others(tmp_path):
    npz_devices(tmp_path)
    _, _, inputs, labels = digits()
    server = npz_folder(tmp_path / "server", inputs[:100], labels[:100], "test")
    changes = PRIVATE | {"data-dir": str(server), "task-arguments": "mean = [5.0], std = [6.0]", "test-fraction": 0.0}
    config = own_config(tmp_path, **changes)
    grid = nodes_over(tmp_path)
    seen = spied(grid)
    run_dir = run(grid, config)
    assert {kind for kind, _, _ in seen} == {"query", "query.data", "train"}
    agreed = read_agreed(run_dir)
    assert (agreed.mean, agreed.std, agreed.label_names) == ((5.0,), (6.0,), tuple("0123456789"))
    assert all(parse(DataAnswer, text).said.moments is None for kind, text, _ in seen if kind == "query.data")
    last = read_rounds(run_dir)[-1]
    assert last.score is not None
    assert (last.worst_device, last.scored_devices) == (None, None)
    (server / "test.npz").unlink()
    with pytest.raises(ConfigError, match="only devices have examples to test on"):
        run(nodes_over(tmp_path), config.model_copy(update={"resume": True, "rounds": 3}))


def test_nobody_has_examples_to_test_on(tmp_path):
    npz_devices(tmp_path)
    with pytest.raises(ConfigError, match=r"test-fraction = 0: neither the server nor any device"):
        run(nodes_over(tmp_path), own_config(tmp_path, test_fraction=0.0))


def test_a_plan_knows_what_devices_hold(tmp_path):
    npz_devices(tmp_path)
    config = own_config(tmp_path, fleet=fleet_file(tmp_path), data_dir=str(tmp_path))
    plans = [make_plan(config)]
    run_dir = run(nodes_over(tmp_path), own_config(tmp_path))
    plans.append(make_plan(own_config(tmp_path), run_dir))
    assert [len(plan.devices) for plan in plans] == [DEVICES, DEVICES]
    assert len({device.parameters for plan in plans for device in plan.devices}) == 1
    (run_dir / "agreed.json").unlink()
    with pytest.raises(PlanError, match="does not say what its devices' data are"):
        make_plan(own_config(tmp_path), run_dir)


def test_it_cannot_be_built_before_nodes_are_asked(tmp_path):
    with pytest.raises(ConfigError, match="no node has been asked yet"):
        build(own_config(tmp_path))


def test_a_device_that_lies_about_its_number_of_examples_is_left_out(tmp_path, caplog):
    npz_devices(tmp_path)
    grid = nodes_over(tmp_path)

    def tamper(message: Message) -> Message:
        if message.metadata.message_type == "query.data" and message.metadata.src_node_id == 2:
            answer = parse(DataAnswer, read_records(message.content, "a reply")[0])
            said = answer.said.model_copy(update={"examples": 10**9})
            message.content = to_records(answer.model_copy(update={"said": said}))
        return message

    grid.tamper = tamper
    run_dir = run(grid, own_config(tmp_path))
    assert "Device 1 does not take part: it says that it has 1000000000 examples, max-examples = 1000000" in caplog.text
    outcomes = [d.outcome.split(":")[0] for d in read_devices(run_dir) if d.device == 1]
    assert outcomes == ["refused", "refused"]
    assert list(read_rounds(run_dir))[-1].devices_replied == DEVICES - 1


def test_a_training_reply_of_too_many_examples_is_refused(tmp_path):
    npz_devices(tmp_path)
    grid = nodes_over(tmp_path)

    def change(reply, arrays):
        for update in reply["updates"]:
            if update["device"] == 1:
                update["examples"] = 10**9

    tamper = changed_reply(change)
    grid.tamper = lambda message: tamper(message) if message.metadata.message_type == "train" else message
    run_dir = run(grid, own_config(tmp_path))
    assert [d.outcome for d in read_devices(run_dir) if d.device == 1 and d.outcome == "trained"] == []
    assert list(read_rounds(run_dir))[-1].devices_replied == DEVICES - 1


def test_data_that_change_between_rounds(tmp_path, caplog):
    """More examples are told, other shapes refused, and a folder that is mended takes part again."""
    npz_devices(tmp_path)
    inputs, labels = digits_of_devices(2)[0]
    folders = [tmp_path / "devices" / f"{device:04d}" for device in range(2)]
    grid, rounds = nodes_over(tmp_path), []

    def seen(messages):
        number = {m.metadata.group_id for m in messages if m.metadata.message_type == "train"} - {""}
        if number and number != set(rounds[-1:]):
            rounds.extend(number)
            if rounds[-1] == "2":
                npz_folder(folders[0], np.concatenate([inputs, inputs]), np.concatenate([labels, labels]))
                npz_folder(folders[1], inputs[:, :, :5, :5], labels)
            if rounds[-1] == "4":
                npz_folder(folders[1], inputs, labels)
        return messages

    grid.seen = seen
    run_dir = run(grid, own_config(tmp_path, rounds=6, evaluate_every=6))
    of = {(d.device, d.round): d for d in read_devices(run_dir)}
    assert [of[0, number].examples for number in (1, 2, 3)] == [24, 48, 48]
    assert "Device 0 trained on 48 examples, before it said 24: its data have changed" in caplog.text
    assert of[1, 1].outcome == "trained"
    for number in (2, 3, 4):
        assert "its examples are 1x5x5 bytes" in of[1, number].outcome
        assert of[1, number].outcome.startswith("refused")
    assert of[1, 6].outcome == "trained"
    assert {d.outcome for d in of.values() if d.device > 1} == {"trained"}


def test_a_device_that_comes_late_is_held_to_what_was_agreed(tmp_path):
    npz_devices(tmp_path)
    npz_folder(tmp_path / "devices" / "0003", digits_of_devices(4)[3][0], ["zebra"] * 30)
    grid = nodes_over(tmp_path)
    late = {node: grid.contexts.pop(node) for node in (3, 4)}
    config = own_config(tmp_path, devices_per_round=2, rounds=10, evaluate_every=10)
    came = []

    def seen(messages):
        if messages and messages[0].metadata.group_id == "2" and not came:
            grid.contexts.update(late)
            came.append(True)
        return messages

    grid.seen = seen
    # Two nodes are enough for a round: nobody waits long for the others.
    with mock.patch("wildflower.server_app.own_agreement.REST_SECONDS", 0.0):
        run_dir = run(grid, config)
    outcomes = {device: {d.outcome for d in read_devices(run_dir) if d.device == device} for device in (2, 3)}
    assert outcomes[2] == {"trained"}
    [why] = outcomes[3]
    assert why.startswith("refused: its data do not fit: the run has no label 'zebra': it has '0', '1'")


def test_two_nodes_that_speak_for_one_device_are_not_believed(tmp_path, caplog):
    npz_devices(tmp_path)
    grid = nodes_over(tmp_path)
    grid.contexts[4].node_config["partition-id"] = 0
    run_dir = run(grid, own_config(tmp_path))
    assert "2 nodes speak for device 0: none of them is believed" in caplog.text
    assert Agreed.model_validate_json((run_dir / "agreed.json").read_bytes()).form.input_shape == (1, 8, 8)


def test_a_node_without_a_folder_is_told_so(tmp_path, caplog):
    npz_devices(tmp_path)
    grid = nodes_over(tmp_path)
    del grid.contexts[1].node_config["data-dir"]
    run_dir = run(grid, own_config(tmp_path))
    assert "Device 0 does not take part: its node config has no data-dir" in caplog.text
    assert list(read_rounds(run_dir))[-1].devices_replied == DEVICES - 1


def test_devices_agree_on_what_is_between_the_texts_of_a_pair(tmp_path):
    """Of devices 0 to 2; a server that has no texts of its own learns the separator from them."""
    make_tokenizer(tmp_path / "words")
    for device in range(DEVICES):
        rows = [{"text": "the film", "other": "a plot", "label": "ab"[n % 2]} for n in range(10)]
        (tmp_path / "devices" / f"{device:04d}").mkdir(parents=True)
        write_lines(tmp_path / "devices" / f"{device:04d}" / "train.jsonl", *rows)
    arguments = f"tokenizer = '{tmp_path / 'words'}', max_tokens = 8, pair = 'other'"
    engine, _ = build(
        own_config(
            tmp_path,
            task="text",
            task_arguments=arguments,
            family="transformers:AutoModel",
            family_arguments=family_arguments(hidden=8, depth=1, heads=2, mlp=8),
            data_dir=str(tmp_path),
            fleet=fleet_file(tmp_path),
        )
    )
    assert engine.method.family.separator == SEP
    assert str(engine.own.spec.agreed.form).startswith("8 tokens of 47 in pairs with classes")


@pytest.mark.parametrize("token_types", [1, 2])
def test_a_device_with_a_separator_inside_of_a_text_works_where_the_model_does_not_go_by_it(tmp_path, token_types):
    make_tokenizer(tmp_path / "words")
    for device in range(DEVICES):
        other = "a [SEP] plot" if device == 2 else "a plot"
        rows = [{"text": "the film", "other": other, "label": "ab"[n % 2]} for n in range(10)]
        (tmp_path / "devices" / f"{device:04d}").mkdir(parents=True)
        write_lines(tmp_path / "devices" / f"{device:04d}" / "train.jsonl", *rows)
    sizes = family_arguments(hidden=8, depth=1, heads=2, mlp=8, type_vocab_size=token_types)
    config = own_config(
        tmp_path,
        task="text",
        task_arguments=f"tokenizer = '{tmp_path / 'words'}', max_tokens = 8, pair = 'other'",
        family="transformers:AutoModel",
        family_arguments=sizes,
        data_dir=str(tmp_path),
        fleet=fleet_file(tmp_path),
        test_fraction=0.2,
    )
    outcomes = {d.outcome for d in read_devices(run(simulated_grid(), config)) if d.device == 2}
    if token_types == 1:
        assert outcomes == {"trained"}
    else:
        [why] = outcomes
        assert "its data do not fit: train.jsonl:1: a text of this pair holds the tokenizer's separator" in why


def test_texts_of_devices_that_were_cut_are_in_the_log(tmp_path, caplog):
    """Each of four devices has ten texts. Three of device 0 and four of device 2 have six tokens, and five are allowed.

    The server's test set has two of each, and device 1 has no labels, so that its texts do not count.
    """
    make_tokenizer(tmp_path / "words")
    for device, long in enumerate((3, 10, 4, 0)):
        texts = ["the film was a"] * long + ["the film"] * (10 - long)
        folder = tmp_path / "devices" / f"{device:04d}"
        folder.mkdir(parents=True)
        key = "label" if device != 1 else "none"
        write_lines(folder / "train.jsonl", *({"text": t, key: "ab"[n % 2]} for n, t in enumerate(texts)))
    write_lines(
        tmp_path / "test.jsonl",
        *({"text": t, "label": label} for t in ("the film was a", "the film") for label in "ab"),
    )
    config = own_config(
        tmp_path,
        task="text",
        task_arguments=f"tokenizer = '{tmp_path / 'words'}', max_tokens = 5, test = 'test.jsonl'",
        family="transformers:AutoModel",
        family_arguments=family_arguments(hidden=8, depth=1, heads=2, mlp=8),
        data_dir=str(tmp_path),
        fleet=fleet_file(tmp_path),
    )
    with caplog.at_level(logging.WARNING):
        engine, _ = build(config)
    assert "9 of 34 texts are longer than 5 tokens and were cut: max_tokens of task-arguments" in caplog.text
    # One that comes later tells it for itself.
    text = (tmp_path / "devices" / "0000" / "train.jsonl").read_text()
    (tmp_path / "devices" / "0001" / "train.jsonl").write_text(text)
    caplog.clear()
    assert engine.own.admit(simulated_grid(), [0, 1], engine.population) == {}
    assert "3 of 10 texts are longer than 5 tokens" in caplog.text


def test_texts(tmp_path):
    make_tokenizer(tmp_path / "words")
    for device, label in enumerate(["good", "bad", "good", "bad"]):
        folder = tmp_path / "devices" / f"{device:04d}"
        folder.mkdir(parents=True)
        rows = [{"text": f"the {label} film" + " a plot" * (n % 3), "label": label} for n in range(10)]
        write_lines(folder / "train.jsonl", *rows)
    (tmp_path / "devices" / "0003" / "train.jsonl").write_text('{"text": "a film"}\n')
    run_dir = run(
        nodes_over(tmp_path),
        own_config(
            tmp_path,
            task="text",
            task_arguments=f"tokenizer = '{tmp_path / 'words'}', max_tokens = 8",
            family="own_words:Words",
        ),
    )
    agreed = Agreed.model_validate_json((run_dir / "agreed.json").read_bytes())
    assert (agreed.label_names, agreed.form.input_shape, agreed.mean) == (("bad", "good"), (8,), ())
    [why] = {d.outcome for d in read_devices(run_dir) if d.device == 3}
    assert "train.jsonl:1: no column 'label', there are 'text'" in why
    assert list(read_rounds(run_dir))[-1].devices_replied == 3


def test_what_was_agreed_and_is_damaged_is_told_in_plain_words(tmp_path):
    (tmp_path / "agreed.json").write_text("{}")
    with pytest.raises(JournalError, match=r"agreed\.json cannot be read: the key 'form' is missing$"):
        read_agreed(tmp_path)


def test_where_all_devices_rest_they_are_asked_again_what_their_data_are(tmp_path, monkeypatch):
    """By day nobody looks at its folder; the server waits for as long as the first of them says."""
    npz_devices(tmp_path)
    grid, slept = nodes_over(tmp_path), []
    monkeypatch.setattr("wildflower.server_app.own_agreement.time.sleep", slept.append)
    by_day = Rest("hours = 22:00-06:00, and it is 12:00 there", 7200.0)
    monkeypatch.setattr("wildflower.client_app.work.resting", lambda config: None if slept else by_day)
    config = own_config(tmp_path, rounds=1)
    run_dir = run(grid, config)
    assert slept == [7200.0]
    assert read_rounds(run_dir)[0].devices_replied == DEVICES
