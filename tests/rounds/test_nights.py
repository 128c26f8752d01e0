"""Two nights of seven boards in a minute: a clock that only trainings move, and everything that happens to a fleet.

The devices take part from 22 to 6. One is slow, one is hot in the first night, one has an older version that knows no
deliveries until it is updated, one is replaced by another board, one is revoked, and the server is killed in a round.
"""

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.grid import InProcessGrid
from tests.small_run import FakeTime, small_config
from wildflower.client_app import device_report, training_message, work
from wildflower.client_app.app import app as client
from wildflower.client_app.delivered import CURRENT, program_in, score_of, version_of
from wildflower.messages.delivery import Delivery
from wildflower.messages.wire import from_records
from wildflower.rounds.hooks import RoundHook
from wildflower.server_app.app import build, run
from wildflower.server_app.deliveries import FOLDER, ONLY, newest, read_delivered
from wildflower.server_app.run_folder import read_devices, read_rounds, read_summary
from wildflower.tasks.task import TaskSpec, load_task

pytestmark = pytest.mark.thorough
EVENING = datetime(2026, 11, 29, 21, 0)
HOT_UNTIL = datetime(2026, 11, 30, 12, 0)
SLOW, HOT, OLD, REPLACED, REVOKED = 0, 1, 2, 3, 4  # devices; node n carries device n - 1
TRAINING_SECONDS, SLOWLY_SECONDS, STATISTICS_SECONDS = 4800, 9000, 60
DEVICES, ROUNDS = 7, 8


class Killed(BaseException):
    """The server's process is gone: nothing of it runs any more."""


class Fleet(InProcessGrid):
    """The boards: a training takes its time by the clock, and things happen to them."""

    def __init__(self, folder: Path, clock: FakeTime) -> None:
        self.folder, self.clock, self.old, self.kill_in = folder, clock, {OLD + 1}, ""
        self.asked: dict[str, float] = {}  # message -> when it was sent
        self.trains: set[str] = set()
        self.trainings = Counter[tuple[str, int]]()  # by round and node
        super().__init__(self.work, DEVICES, lambda node: self.config(node, node - 1))

    def config(self, node: int, device: int) -> dict:
        folder = self.folder / f"node-{node}"
        speed = {"flop-per-s": 1e6 if device == SLOW else 1e10}
        kind = {"kind": "pi-4-busy" if device == SLOW else ("pi-4" if device % 2 else "pi-5")}
        return {"partition-id": device, "state-dir": str(folder), "hours": "22:00-06:00", "max-temperature": 70.0} | (
            speed | kind
        )

    def work(self, message, context):
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        if kind == "query.delivery" and node in self.old:
            raise ValueError("this version knows no query called delivery")
        if kind == "train":
            if message.metadata.group_id == self.kill_in:
                self.kill_in = ""
                raise Killed
            # Devices work side by side, from when they were asked.
            asked, before = self.asked[message.metadata.message_id], self.clock.now
            seconds = SLOWLY_SECONDS if node == SLOW + 1 else TRAINING_SECONDS
            if message.metadata.message_id not in self.trains:
                seconds = STATISTICS_SECONDS
            self.clock.now, self.clock.end = asked, asked + seconds
            reply = client(message, context)
            self.clock.now, self.clock.end = max(before, self.clock.end), 0.0
            return reply
        return client(message, context)

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        self.asked |= dict.fromkeys(ids, self.clock.now)
        for m in messages:
            if m.metadata.message_type == "train" and "TakeStatistics" not in m.content["wildflower"]["json"]:
                self.trainings[m.metadata.group_id, m.metadata.dst_node_id] += 1
                self.trains.add(m.metadata.message_id)
        return ids

    def gone(self, node: int) -> None:
        self.contexts.pop(node)
        self.silent.add(node)


class Events(RoundHook):
    """What happens to the fleet after its rounds."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def at_end(self, round):
        fleet = self.fleet
        if round.number == 2:  # another board, with a key and a folder of its own, for the same device
            context = fleet.contexts[REPLACED + 1]
            fleet.gone(REPLACED + 1)
            context.node_config = fleet.config(DEVICES + 1, REPLACED)
            fleet.contexts[DEVICES + 1] = context
        if round.number == 3:
            fleet.gone(REVOKED + 1)
        if round.number == 4:
            fleet.old.clear()


@pytest.fixture
def clock(monkeypatch):
    clock = FakeTime()
    start = clock.now

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return EVENING + timedelta(seconds=clock.now - start)

    def rest_of(owner, report, folder, now, *more):
        hot = Path(folder).name == f"node-{HOT + 1}" and now < HOT_UNTIL
        return honest(owner, replace(report, temperature_celsius=80.0 if hot else 50.0), folder, now, *more)

    def report(*arguments, **more):
        clock.now = max(clock.now, clock.end)  # a device reports once its training is done
        return made(*arguments, **more)

    clock.end, honest, made = 0.0, device_report.rest_of, work.device_report
    for module in (work, training_message):
        monkeypatch.setattr(module, "device_report", report)
    monkeypatch.setattr(device_report, "datetime", Clock)
    monkeypatch.setattr(device_report, "rest_of", rest_of)
    for module in ("rounds.connected_devices", "rounds.exchange", "rounds.population", "server_app.deliveries"):
        monkeypatch.setattr(f"wildflower.{module}.time", clock)
    return clock


def deliveries(messages):
    """How often messages bring a version to a node."""
    brought = [m for m in messages if m.metadata.message_type == "query.delivery" and m.has_content()]
    return Counter((m.metadata.dst_node_id, from_records(Delivery, m.content)[0].version) for m in brought)


def test_two_nights_of_seven_boards(clock, tmp_path, caplog):
    fleet = Fleet(tmp_path, clock)
    changes = {"fleet": "", "devices": DEVICES, "devices-per-round": 4, "rounds": ROUNDS, "evaluate-every": 1}
    changes |= {
        "test-fraction": 0.25,
        "delivery.every": 2,
        "budget.round-seconds": 60.0,
        "local-steps": 10,
        "examples-per-device": 100,
        "learning-rate": 0.1,
    }
    config = small_config(tmp_path, strategy="heterofl", **{"below-smallest": "smallest"}, **changes)

    fleet.kill_in = "5"
    with pytest.raises(Killed):
        run(fleet, config, build(config, hooks=[Events(fleet)]))
    before = list(read_rounds(tmp_path / "runs" / "small"))
    assert [record.round for record in before] == [1, 2, 3, 4]
    lost = deliveries(fleet.waiting.values())
    fleet.waiting.clear()  # the SuperLink drops what belongs to the run that was lost
    again = config.model_copy(update={"resume": True})
    run_dir = run(fleet, again, build(again, hooks=[Events(fleet)]))
    (run_dir / FOLDER / ONLY).touch()
    run(fleet, again, build(again, hooks=[Events(fleet)]))  # as wildflower deliver

    # No finished round is lost, and they took two nights.
    rounds = list(read_rounds(run_dir))
    assert [record.round for record in rounds] == list(range(1, ROUNDS + 1))
    assert rounds[:4] == before
    assert read_summary(run_dir).status == "finished"
    assert 24 * 3600 < clock.now - 1000.0 < 60 * 3600

    # Nobody is asked twice in a round, but those of the round in which the server was killed.
    assert {count for (number, _), count in fleet.trainings.items() if number != "5"} == {1}

    # By day and while it was hot no device did anything; the slow one had the smaller model.
    outcomes = Counter(record.outcome for record in read_devices(run_dir))
    assert outcomes.keys() == {"trained"}, outcomes
    of_hot = {int(number) for number, node in fleet.trainings if node == HOT + 1}
    assert of_hot
    assert min(of_hot) > 4

    # Every device that is there uses a checked model of its tier; nobody got a version twice that it had answered.
    folder, programs = newest(run_dir)
    said, task = read_delivered(run_dir), load_task(TaskSpec.from_json(build(again)[0].settings.task))
    left = {device for device in range(DEVICES) if device != REVOKED}
    assert left <= said.keys()
    for device in left:
        node = DEVICES + 1 if device == REPLACED else device + 1
        place = tmp_path / f"node-{node}" / "model" / CURRENT
        answer = said[device]
        assert answer.version == programs.version
        assert score_of(place, task, device) == (answer.score if answer.used else answer.before)
        if answer.used:
            tier = fleet.contexts[node].node_config["kind"]
            assert version_of(place) == programs.version
            assert program_in(place).read_bytes() == (folder / programs.tiers[tier]).read_bytes()
        else:
            assert "worse than the model in use" in answer.why
    twice = {key for key, count in deliveries(fleet.sent).items() if count > 1 + lost[key] and key[0] != OLD + 1}
    assert twice == set()
    assert "knows no query called delivery" in caplog.text
