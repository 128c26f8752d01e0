import importlib
import inspect
import itertools
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common.constant import Status
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.start_client_internal import RunNotRunningException, _pull_and_store_message

from tests.small_run import FakeTime
from wildflower.client_app import supernode
from wildflower.client_app.supernode import (
    FLOWERS_POLL_SECONDS,
    LONGEST_POLL_SECONDS,
    answering_for_killed,
    asking_less,
    kept_in,
    lasting,
    letting_go,
    port_trouble,
)

RUN = 7


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


STARTED = ["wildflower-node", "--insecure", "--port", str(free_port()), "--node-config", "partition-id=0"]


def order(monkeypatch):
    for name, value in {"_run_id": RUN, "_task_id": 1, "_node_id": 2}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    message = Message(RecordDict({"weights": ArrayRecord()}), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@pytest.fixture
def node():
    store = ObjectStoreFactory().store()
    state = NodeStateFactory(ObjectStoreFactory()).state()
    state.set_node_id(1)
    state.store_run(Run.create_empty(RUN))
    return state, store


def pull(function, node, message):
    """Pull a message whose run ends before its contents have come."""

    def pull_object(run_id, object_id):
        raise RunNotRunningException

    state, store = node
    return function(
        state=state,
        object_store=store,
        node_config={},
        receive=lambda: (message, get_object_tree(message)),
        get_run=None,
        get_fab=None,
        pull_object=pull_object,
        confirm_message_received=lambda run_id, message_id: None,
        trusted_entities=None,
    )


def test_flower_keeps_a_message_whose_run_ended_while_it_came(node, monkeypatch):
    """If this fails, Flower has mended it, and `letting_go` can go."""
    assert pull(_pull_and_store_message, node, order(monkeypatch)) is None
    state, store = node
    assert len(state.msg_store) == 1
    assert len(store) > 0
    assert [task.status.status for task in state.task_store.values()] == [Status.PENDING]


def test_a_message_whose_run_ended_while_it_came_is_let_go(node, monkeypatch):
    assert pull(letting_go(_pull_and_store_message, []), node, order(monkeypatch)) is None
    state, store = node
    assert state.msg_store == {}
    assert len(store) == 0
    assert [task.status.status for task in state.task_store.values()] == [Status.FINISHED]


def test_flower_itself_waits_three_seconds_between_requests_for_a_message():
    """If this fails, `asking_less` waits for another time than it should."""
    assert f"time.sleep({FLOWERS_POLL_SECONDS:g})" in inspect.getsource(start_client_internal)


def test_a_node_without_messages_asks_less_often_and_is_quick_again_once_one_came():
    clock, asked, came = FakeTime(), [], [None] * 100 + [RUN] + [None] * 5

    def pull_one():
        asked.append(clock.now)
        return came[len(asked) - 1]

    ask = asking_less(pull_one, clock.sleep, clock.monotonic, lambda least, most: 1.0)
    for number in range(len(came)):
        if ask() is None:
            clock.sleep(FLOWERS_POLL_SECONDS)
        else:
            clock.sleep(600)  # of work
        assert len(asked) == number + 1
    pauses = [later - at for at, later in itertools.pairwise(asked)]
    assert pauses[0] == pauses[5] == FLOWERS_POLL_SECONDS
    assert all(
        pause <= max(FLOWERS_POLL_SECONDS, 0.1 * (at - asked[0]) + 0.01)
        for at, pause in zip(asked, pauses[:100], strict=False)
    )
    assert pauses[99] == LONGEST_POLL_SECONDS
    assert pauses[101:] == [FLOWERS_POLL_SECONDS] * 4


def replies_for_killed(state, expired, monkeypatch):
    """What a node says of a message whose process was killed before it had read it."""
    state.store_message(order(monkeypatch))
    expired(state, [Task(run_id=RUN, type=TaskType.CLIENT_APP)])
    return state.get_messages_legacy(is_reply=True)


def test_flower_forgets_a_message_whose_process_was_killed_before_it_read_it(node, monkeypatch):
    """If this fails, Flower has mended it, and `answering_for_killed` can go."""
    assert replies_for_killed(node[0], type(node[0])._on_task_tokens_expired, monkeypatch) == []


def test_a_message_whose_process_was_killed_before_it_read_it_is_answered(node, monkeypatch):
    [reply] = replies_for_killed(node[0], answering_for_killed(type(node[0])._on_task_tokens_expired), monkeypatch)
    assert reply.has_error()
    assert node[0].get_message_processing_duration(reply.metadata.reply_to_message_id) >= 0


def test_a_node_ends_when_the_process_ends_that_starts_its_work(node, capsys):
    pulled, told = [], []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    started = []
    pull_or_let_go = letting_go(lambda **others: pulled.append(others), started)
    state, store = node
    child = kept_in(started).Popen(["sleep", "60"])
    other = os.posix_spawnp("true", ["true"], os.environ)
    try:
        # A worker that was left behind ends, and nobody waits for it.
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
        pull_or_let_go(state=state, object_store=store)
        assert len(pulled) == 1
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert pull_or_let_go(state=state, object_store=store) is None
        assert (len(pulled), told) == (1, [signal.SIGTERM])
        assert "the process that starts this node's work has ended" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)
        child.kill()
        child.wait()
        os.waitpid(other, 0)


def test_flower_is_started_with_the_function_replaced_and_the_size_of_pieces(monkeypatch):
    started = []

    def flower_supernode():
        assert start_client_internal._pull_and_store_message is not _pull_and_store_message
        # The list that `letting_go` looks at is the one that Flower's own call of Popen fills.
        assert start_client_internal.subprocess.Popen is not subprocess.Popen
        start_client_internal.subprocess.Popen(["true"]).wait()
        asking = inspect.getclosurevars(start_client_internal._pull_and_store_message)
        watched = inspect.getclosurevars(asking.nonlocals["pull"]).nonlocals["started"]
        assert [process.args for process in watched] == [["true"]]
        started.append(os.environ["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"])

    from flwr.supernode import fleet_http_connection

    for holder, name in (
        (fleet_http_connection, "flwr_exit"),
        (fleet_http_connection.FleetHttpClient, "ActivateNode"),
        (fleet_http_connection, "HeartbeatSender"),
        (fleet_http_connection, "make_simple_http_retry_invoker"),
    ):
        monkeypatch.setattr(holder, name, getattr(holder, name))
    # The package has the function under the module's name.
    command = importlib.import_module("flwr.supernode.cli.flower_supernode")
    monkeypatch.setattr(command, "flower_supernode", flower_supernode)
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", _pull_and_store_message)
    monkeypatch.setattr(start_client_internal, "subprocess", subprocess)
    monkeypatch.setenv("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", "")
    monkeypatch.delenv("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE")
    monkeypatch.setattr(supernode.sys, "argv", STARTED)
    supernode.main()
    assert started == [str(supernode.PIECE_BYTES)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--node-config", 'partition-id=1 memory-limit-bytes="1 GB"'], "node config: memory-limit-bytes = '1 GB'"),
        (["--node-config", "partition-id=1 memory-limit=100000"], "did you mean 'memory-limit-bytes'"),
        (["--node-config", 'kind="board"'], "node config partition-id = None: a whole number from 0"),
        ([], "node config partition-id = None: a whole number from 0"),
        (["--node-config", "partition-id=1 data-dir=/srv/photos"], "'data-dir=/srv/photos' is neither a number"),
        (["--node-config", 'partition-id=1 state-dir=""'], "node config: state-dir = ''"),
        (["--node-config", "partition-id=1 flop-per-s=0"], "node config: flop-per-s = 0"),
        (["--node-config", "missing.toml"], "No such file"),
    ],
)
def test_a_node_that_is_told_wrong_things_does_not_start(options, words, monkeypatch):
    command = importlib.import_module("flwr.supernode.cli.flower_supernode")
    monkeypatch.setattr(command, "flower_supernode", lambda: pytest.fail("it has started"))
    monkeypatch.setattr(supernode, "draw_instance", lambda: None)
    monkeypatch.setenv("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", "1")
    monkeypatch.setattr(supernode.sys, "argv", ["wildflower-node", "--insecure", *options])
    with pytest.raises(SystemExit) as ended:
        supernode.main()
    assert str(ended.value.code).startswith("Error: ")
    assert words in str(ended.value.code)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_trouble("127.0.0.1", port).startswith(f"port {port} of 127.0.0.1 is taken")
    assert port_trouble("127.0.0.1", port) == ""
    assert "--host and --port" in port_trouble("192.0.2.1", port)  # an address that no machine has


def test_images_send_pieces_of_the_same_size():
    dockerfile = (Path(__file__).parents[2] / "deploy/Dockerfile").read_text()
    assert re.findall(r"FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE=(\d+)", dockerfile) == [str(supernode.PIECE_BYTES)]


# A process that adopts what its descendants leave behind, as the first one of a container does. Its child leaves an
# orphan behind, waits until that is collected, and asks for the end of the whole.
FIRST_PROCESS = """
import ctypes, os, signal, sys
import psutil
from wildflower.client_app.supernode import collect_until_it_ends

assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
child = os.fork()
if child:
    sys.exit(collect_until_it_ends(child))
first = os.getppid()
read, write = os.pipe()
if not (middle := os.fork()):
    if orphan := os.fork():
        os.write(write, str(orphan).encode())
    os._exit(0)
orphan = int(os.read(read, 20))
os.waitpid(middle, 0)
try:
    psutil.Process(orphan).wait(30)
except psutil.NoSuchProcess:
    pass
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
os.kill(first, signal.SIGTERM)
signal.pause()
"""


def test_the_first_process_of_a_container_collects_what_it_adopts_and_passes_signals_on():
    done = subprocess.run([sys.executable, "-c", FIRST_PROCESS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr


def test_the_first_process_of_a_container_stays_small():
    code = (
        "import sys, wildflower.client_app.supernode; print(*{'pydantic', 'psutil', 'flwr', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_the_first_process_of_a_container_starts_a_node_as_its_child(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "fork", lambda: 41)
    monkeypatch.setattr(supernode, "collect_until_it_ends", lambda child: child + 1)
    with pytest.raises(SystemExit) as ended:
        supernode.main()
    assert ended.value.code == 42


def answering(status):
    """A heartbeat whose server answers with this status."""

    def heartbeat():
        request = httpx.Request("POST", "https://server/v1/fleet/send-node-heartbeat")
        httpx.Response(status, request=request).raise_for_status()
        return True

    return heartbeat


def test_a_heartbeat_outlives_errors_of_the_server(capfd):
    assert lasting(answering(500), [])() is False  # which Flower tries again
    assert "WARNING: The server answers with an error of its own (500)" in capfd.readouterr().err
    assert lasting(answering(200), [])() is True
    with pytest.raises(httpx.HTTPStatusError):
        lasting(answering(403), [])()
    assert capfd.readouterr().err == ""


def test_a_node_whose_key_is_revoked_ends_with_a_code_of_its_own(monkeypatch, capsys):
    ends = []
    with pytest.raises(httpx.HTTPStatusError):
        lasting(answering(401), ends)()
    assert ends == [75]
    assert "its key was revoked, this machine's clock is wrong" in capsys.readouterr().err


def test_a_node_is_started_with_a_heartbeat_and_with_retries_that_last(monkeypatch):
    from flwr.supernode import fleet_http_connection

    flowers = importlib.import_module("flwr.supernode.cli.flower_supernode")
    for module, name in (
        (fleet_http_connection, "HeartbeatSender"),
        (fleet_http_connection, "make_simple_http_retry_invoker"),
        (fleet_http_connection, "flwr_exit"),
        (fleet_http_connection.FleetHttpClient, "ActivateNode"),
        (start_client_internal, "subprocess"),
        (start_client_internal, "_pull_and_store_message"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(supernode.sys, "argv", STARTED)
    monkeypatch.setattr(flowers, "flower_supernode", lambda: None)
    monkeypatch.setenv("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", "1")
    monkeypatch.setattr(supernode, "draw_instance", lambda: None)
    supernode.main()
    sender = fleet_http_connection.HeartbeatSender(answering(500))
    assert sender.heartbeat_fn() is False
    closed = httpx.ReadError("TLS/SSL connection has been closed (EOF)")
    closed.__cause__ = ssl.SSLZeroReturnError("TLS/SSL connection has been closed (EOF)")
    assert not fleet_http_connection.make_simple_http_retry_invoker().should_giveup(closed)
