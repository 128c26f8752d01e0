"""Workers that several runs share: what becomes of one run's messages, files and end beside the others'."""

import json
import os
import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from flwr.app import Message, MessageType

from wildflower.client_app import simulation, undo
from wildflower.client_app.simulation import fork_server
from wildflower.messages.flower_records import make_records, read_records
from wildflower.server_app.process_grid import LocalGrid

DIED = 8


@pytest.fixture
def grids(tmp_path, monkeypatch):
    """Two runs' grids over one shared worker, which answers messages in its own way."""
    monkeypatch.setattr(simulation, "train_together", answer)
    monkeypatch.setattr(
        "wildflower.client_app.work.do", lambda _, text, arrays, config: answer([(text, arrays)], {})[0]
    )
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "kept").write_text("before")
    process, ends = fork_server(folders)
    with ExitStack() as held:
        found = [held.enter_context(closing(LocalGrid(held.enter_context(closing(end)), 1))) for end in ends]
        yield found, folders
    process.join()
    assert process.exitcode == 0


def answer(messages, config):
    """Write into the folder that each message names, and say how many came together; "die" is done once."""
    for text, _ in messages:
        asked = json.loads(text)
        path = Path(asked["folder"]) / "kept"
        undo.will_write(path, restore=True)
        path.write_text("after")
        died = path.with_name("died")
        if asked["order"] == "die" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return [(f"{len(messages)} in {os.getpid()}", []) for _ in messages]


def push(grid, folder, order=""):
    text = json.dumps({"folder": str(folder), "order": order})
    return list(grid.push_messages([Message(make_records(text), 1, MessageType.TRAIN)]))


def reply_of(grid, ids):
    while not (found := list(grid.pull_messages(ids))):
        grid.wait(ids, 5.0)
    return found[0]


def text_of(reply):
    return read_records(reply.content, "the reply")[0]


def test_a_shared_worker_that_is_killed_costs_each_run_its_message_and_undoes_what_it_wrote(grids):
    (one, two), folders = grids
    ids = [push(one, folders[0]), push(two, folders[1], "die")]
    lost = [reply_of(grid, of) for grid, of in zip((one, two), ids, strict=True)]
    assert [reply.error.code for reply in lost] == [DIED, DIED]
    assert all("was killed" in reply.error.reason for reply in lost)
    assert [(folder / "kept").read_text() for folder in folders] == ["before", "before"]
    ids = [push(one, folders[0]), push(two, folders[1])]
    again = [text_of(reply_of(grid, of)) for grid, of in zip((one, two), ids, strict=True)]
    assert again[0] == again[1]  # one worker in the place of the lost one, for both
    assert again[0].startswith("2 in ")
    assert [(folder / "kept").read_text() for folder in folders] == ["after", "after"]


def test_a_run_that_is_over_leaves_the_worker_to_the_others(grids):
    (one, two), folders = grids
    ids = [push(one, folders[0]), push(two, folders[1])]
    process = {text_of(reply_of(grid, of)) for grid, of in zip((one, two), ids, strict=True)}
    one.close()
    one._fork_server.close()
    for _ in range(2):
        said = text_of(reply_of(two, push(two, folders[1])))
        assert said == process.copy().pop().replace("2 in", "1 in")
    reply = reply_of(two, push(two, folders[1], "die"))
    assert reply.error.code == DIED
    assert text_of(reply_of(two, push(two, folders[1]))).startswith("1 in ")
