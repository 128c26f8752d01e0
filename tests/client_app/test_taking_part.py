"""The conditions of a device's owner hold for every message that costs the device something."""

import pytest

from tests.small_run import connected_grid, small_config
from wildflower.client_app import prepared, training_message, work
from wildflower.client_app.limits import Refusal
from wildflower.devices.conditions import Rest
from wildflower.messages.delivery import Delivery
from wildflower.messages.orders import DataAnswer, DataQuestion, parse
from wildflower.server_app.app import run
from wildflower.server_app.no_progress import NoProgressError
from wildflower.server_app.run_folder import read_rounds

TASK = {"name": "digits"}


@pytest.fixture
def config(tmp_path):
    return {"partition-id": 0, "state-dir": str(tmp_path), "hours": "22:00-06:00"}


@pytest.fixture
def rests(monkeypatch):
    """The device takes no part now."""
    for module in (work, prepared, training_message):
        monkeypatch.setattr(
            module, "resting", lambda config: Rest("hours = 22:00-06:00, and it is 12:00 there", 36000.0)
        )


def test_a_question_about_its_data_is_not_answered_by_reading_them(config, rests, monkeypatch):
    monkeypatch.setattr(work, "describe", lambda *_, **__: pytest.fail("its data were read"))
    question = DataQuestion(run="r", task=TASK, moments=False)
    said = parse(DataAnswer, work.do("data", question.model_dump_json(), [], config)[0]).said
    assert said.problem == "the device takes no part now: hours = 22:00-06:00, and it is 12:00 there"
    assert said.resting_seconds == 36000.0


def test_a_model_to_use_is_refused(config, rests):
    delivery = Delivery(run="r", device=0, version="1-aaaaaaaaaaaa", file_format="pt2", task=TASK, sha256="0" * 64)
    with pytest.raises(Refusal, match="the device takes no part now"):
        work.do("delivery", delivery.model_dump_json(), [b"x"], config)


def test_models_are_neither_trained_nor_scored(tmp_path, rests, monkeypatch):
    """Reports are made elsewhere, so that the server does not know that the device rests."""
    monkeypatch.setattr(work, "score_order", lambda *_: pytest.fail("a model was scored"))
    grid = connected_grid(2, tmp_path)
    changes = {"fleet": "", "devices": 2, "devices-per-round": 2, "rounds": 1, "test-fraction": 0.25}
    with pytest.raises(NoProgressError):
        run(grid, small_config(tmp_path, **changes, **{"personal.every": 1}))
    assert [record.devices_replied for record in read_rounds(tmp_path / "runs" / "small")] == [0]
