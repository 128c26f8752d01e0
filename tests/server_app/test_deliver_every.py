"""Models that reach devices while their run goes on, in all formats, and those that devices have of their own."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
from flwr.app import Message

from tests.small_run import METHODS, connected_grid, small_config
from wildflower.client_app.delivered import CURRENT, program_in, score_of, version_of
from wildflower.messages.delivery import Delivered, Delivery
from wildflower.messages.programs import read_program
from wildflower.messages.wire import from_records, to_records
from wildflower.plugins.extras import MissingExtraError
from wildflower.rounds.hooks import RoundHook
from wildflower.server_app.app import build, run
from wildflower.server_app.deliveries import FOLDER, ONLY, newest, read_delivered, write_programs
from wildflower.server_app.run_folder import read_rounds, read_summary
from wildflower.tasks.task import TaskSpec, load_task

HARDWARE = {"fleet": "", "devices": 3, "devices-per-round": 3, "rounds": 3, "evaluate-every": 1, "test-fraction": 0.25}
PERSONAL = ("local", "spatl", "rafl", "recipfl", "lotteryfl")


def config_of(tmp_path, **changes):
    return small_config(tmp_path, **{**HARDWARE, **changes})


def deliveries(grid):
    """The messages that brought a model, as (node, delivery)."""
    sent = [m for m in grid.sent if m.metadata.message_type == "query.delivery"]
    return [(m.metadata.dst_node_id, from_records(Delivery, m.content)[0]) for m in sent if m.has_content()]


def state_of(grid, node):
    return Path(grid.contexts[node].node_config["state-dir"])


@pytest.mark.thorough
def test_every_k_rounds_the_devices_of_the_round_get_the_newest_models(tmp_path):
    grid, config = connected_grid(3, tmp_path), config_of(tmp_path, **{"delivery.every": 2, "local-steps": 4})
    run_dir = run(grid, config)
    version = newest(run_dir)[1].version
    assert int(version.split("-")[0]) <= 2  # the best of the rounds up to the second
    assert {answer.version for answer in read_delivered(run_dir).values()} == {version}
    assert sorted(node for node, _ in deliveries(grid)) == [1, 2, 3]
    for node in (1, 2, 3):
        assert version_of(state_of(grid, node) / "model" / CURRENT) == version


@pytest.mark.thorough
def test_nobody_waits_for_a_device_that_checks_its_model(tmp_path):
    """A device that has not answered yet is asked for its training meanwhile, and its answer counts when it comes."""
    grid, config = connected_grid(3, tmp_path), config_of(tmp_path, **{"delivery.every": 1, "rounds": 2})
    trained = []

    def seen(messages: list[Message]) -> list[Message]:
        trained.extend(m for m in messages if m.metadata.message_type == "train")
        slow = [m for m in messages if m.metadata.message_type == "query.delivery" and len(trained) <= 3]
        return [m for m in messages if m not in slow]

    grid.seen = seen
    run_dir = run(grid, config)
    assert [record.devices_replied for record in read_rounds(run_dir)] == [3, 3]
    assert sorted(read_delivered(run_dir)) == [0, 1, 2]


@pytest.mark.thorough
def test_a_delivery_asks_no_node_that_is_not_drawn(tmp_path):
    """One device per round of five: after the first delivery a round asks one node, and not all five."""
    changes = {"devices": 5, "devices-per-round": 1, "rounds": 4, "delivery.every": 1, "deliver": "largest"}
    asked = []
    for every in (0, 1):
        folder = tmp_path / str(every)
        folder.mkdir()
        grid = connected_grid(5, folder)
        run(grid, config_of(folder, **{**changes, "delivery.every": every}))
        asked.append(len([m for m in grid.sent if m.metadata.message_type == "query"]))
    assert asked[0] == asked[1]


class Ends(RoundHook):
    """Ends the run after its second round."""

    def at_end(self, round):
        if round.number == 2:
            round.stop("it is good enough")


@pytest.mark.thorough
def test_a_run_that_a_hook_ended_is_delivered_and_trains_no_further(tmp_path):
    grid, config = connected_grid(3, tmp_path), config_of(tmp_path, rounds=5)
    run_dir = run(grid, config, build(config, hooks=[Ends()]))
    assert read_summary(run_dir).status == "finished"
    version = write_programs(run_dir)
    (run_dir / FOLDER / ONLY).touch()
    again = config.model_copy(update={"resume": True})
    run(grid, again, build(again))
    assert len(read_rounds(run_dir)) == 2
    assert {answer.version for answer in read_delivered(run_dir).values()} == {version}
    assert len(deliveries(grid)) == 3
    run(grid, again, build(again))  # not asked to deliver alone, it goes on
    assert len(read_rounds(run_dir)) == 5


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs the extra export")
@pytest.mark.thorough
def test_a_model_arrives_as_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    grid = connected_grid(3, tmp_path)
    run_dir = run(grid, config_of(tmp_path, **{"delivery.every": 3, "delivery.format": "onnx"}))
    assert all(answer.used for answer in read_delivered(run_dir).values())
    file = state_of(grid, 1) / "model" / CURRENT / "model.onnx"
    facts = json.loads(file.with_name("model.onnx.json").read_text())
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    image = numpy.zeros((1, *facts["input_shape"]), facts["input_dtype"])
    assert session.run(None, {"inputs": image})[0].shape == (1, facts["classes"])


@pytest.mark.parametrize(("file_format", "library"), [("onnx", "onnxscript"), ("pte", "executorch")])
def test_a_library_that_a_format_needs_is_named_before_round_1(file_format, library, tmp_path, monkeypatch):
    monkeypatch.setattr("wildflower.plugins.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"the format {file_format} needs {library}"):
        build(config_of(tmp_path, **{"delivery.every": 1, "delivery.format": file_format}))


@pytest.mark.thorough
def test_a_device_without_the_library_says_so_and_goes_on_with_its_model(tmp_path, monkeypatch):
    grid, config = connected_grid(3, tmp_path), config_of(tmp_path, **{"delivery.every": 3, "delivery.format": "onnx"})
    real = read_program

    def reads(path):
        if "node-" in str(path):
            raise MissingExtraError("the format onnx needs onnxruntime, which is not installed")
        return real(path)

    monkeypatch.setattr("wildflower.client_app.delivered.read_program", reads)
    run_dir = run(grid, config)
    said = read_delivered(run_dir)
    assert [answer.used for answer in said.values()] == [False, False, False]
    assert "needs onnxruntime" in said[0].why


@pytest.mark.thorough
@pytest.mark.parametrize("method", PERSONAL)
def test_a_personal_model_becomes_the_devices_own_and_does_not_travel(method, tmp_path):
    grid = connected_grid(3, tmp_path)
    changes = {**METHODS[method], "delivery.every": 2, "rounds": 2, "below-smallest": "smallest", "local-steps": 4}
    config = config_of(tmp_path, **changes)
    arrays_back = []
    grid.tamper = lambda reply: arrays_back.append(_arrays_of_deliveries(reply)) or reply
    run_dir = run(grid, config)
    said = read_delivered(run_dir)
    assert {device: answer.used for device, answer in said.items()} == dict.fromkeys(range(3), True), said
    assert sum(arrays_back) == 0
    task = load_task(TaskSpec.from_json(build(config.model_copy(update={"run_name": "x"}))[0].settings.task))
    weights = []
    for node in (1, 2, 3):
        place = state_of(grid, node) / "model" / CURRENT
        program, facts = read_program(program_in(place))
        assert facts.score == said[node - 1].score == score_of(place, task, node - 1)
        assert facts.round == 2
        weights.append(program(task.test.inputs[:8]))
    if method != "lotteryfl":  # whose tickets are alike until a device prunes
        assert not torch.equal(weights[0], weights[1])


def _arrays_of_deliveries(reply: Message) -> int:
    return len(list(reply.content.array_records)) if reply.metadata.message_type == "query.delivery" else 0


@pytest.mark.thorough
@pytest.mark.parametrize("changed", [{"run": "another"}, {"device": 2}, {"version": "9-0123456789ab"}])
def test_an_answer_to_another_delivery_is_not_believed(changed, tmp_path, caplog):
    grid, config = connected_grid(3, tmp_path), config_of(tmp_path, **{"delivery.every": 1, "rounds": 1})

    def tamper(reply):
        if reply.metadata.message_type == "query.delivery" and reply.metadata.src_node_id == 1:
            answer, _ = from_records(Delivered, reply.content)
            reply.content = to_records(answer.model_copy(update=changed))
        return reply

    grid.tamper = tamper
    run_dir = run(grid, config)
    assert sorted(read_delivered(run_dir)) == [1, 2]
    assert "did not reach device 0: it speaks of another delivery" in caplog.text


@pytest.mark.thorough
def test_a_device_that_has_not_trained_has_no_personal_model(tmp_path):
    grid = connected_grid(3, tmp_path)
    config = config_of(tmp_path, **{"strategy": "local", "delivery.every": 1, "devices-per-round": 1, "rounds": 1})
    run_dir = run(grid, config)
    assert len(read_delivered(run_dir)) == len(deliveries(grid)) == 1
