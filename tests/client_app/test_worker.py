import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.client_app.work_orders import answers, batch, context, message, payload, report_query, work_order
from wildflower.client_app import worker
from wildflower.client_app.app import app
from wildflower.client_app.frames import MAX_HEADER_BYTES, receive, send
from wildflower.client_app.worker import WorkerError, cause_of_end, oom_kills
from wildflower.devices.conditions import Use
from wildflower.messages.orders import NodeReport, Reply, parse
from wildflower.models.resnet import ResNet18

CONFIG = {"partition-id": 1}
WIDE = ResNet18(input_shape=(1, 8, 8), first_channels=32)
LENGTH = struct.Struct("<Q")


def order(**changes):
    return batch(work_order(1, **changes), shared_process=False).model_dump_json()


def ask(folder, text, **config):
    reply, arrays = worker.ask("train", text, [payload()], CONFIG | {"state-dir": str(folder)} | config)
    return parse(Reply, reply).updates[0], arrays


def test_paths_of_the_node_config_are_from_where_the_node_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    config = {"partition-id": 1, "data-dir": "photos/0", "state-dir": "~/state", "gpu-trainer": "", "kind": "photos"}
    assert worker._with_whole_paths(config) == config | {
        "data-dir": str(tmp_path / "photos" / "0"),
        "state-dir": "/home/me/state",
    }


# Messages


def linked():
    return socket.socketpair(socket.AF_UNIX)


def test_a_message_arrives_as_it_was_sent():
    here, there = linked()
    send(here, {"kind": "train", "text": "{}"}, [b"", b"abc", bytes(1000)])
    assert receive(there) == ({"kind": "train", "text": "{}"}, [b"", b"abc", bytes(1000)])


@pytest.mark.parametrize("timeout_seconds", [None, 60.0])
def test_a_message_larger_than_what_a_link_holds_arrives_in_order(timeout_seconds):
    """With a timeout, `recv` returns what is there, which is a part of it."""
    here, there = linked()
    there.settimeout(timeout_seconds)
    array = bytes(range(256)) * 20_000
    threading.Thread(target=send, args=(here, {"kind": "train"}, [array, b"end"]), daemon=True).start()
    assert receive(there) == ({"kind": "train"}, [array, b"end"])


@pytest.mark.parametrize(
    ("data", "error", "what"),
    [
        (b"", EOFError, "after 0 of 8 bytes"),
        (LENGTH.pack(10) + b"{}", EOFError, "after 2 of 10 bytes"),
        (LENGTH.pack(MAX_HEADER_BYTES + 1), ValueError, "a header of"),
        (LENGTH.pack(2) + b"{}", ValueError, "sizes of the arrays"),
        (LENGTH.pack(2) + b"[]", ValueError, "sizes of the arrays"),
        (LENGTH.pack(3) + b"{{{", ValueError, "property name"),
        (LENGTH.pack(14) + b'{"sizes":[-1]}', ValueError, "sizes of the arrays"),
        (LENGTH.pack(25) + b'{"sizes":[9999999999999]}', ValueError, "arrays of 9999999999999 bytes"),
    ],
)
def test_what_is_no_message_is_refused(data, error, what):
    here, there = linked()
    here.sendall(data)
    here.close()
    with pytest.raises(error, match=what):
        receive(there)


# Why a child ended


@pytest.mark.parametrize(
    ("code", "kills", "limited", "why", "overrun"),
    [
        (-9, 1, True, "the kernel killed the work because this device's memory was used up", True),
        (-9, 0, True, "the process that did the work was ended by SIGKILL", False),
        (-9, None, False, "the work was killed; this kernel does not say why: taken to be for memory", True),
        (-6, 3, False, "the process that did the work was ended by SIGABRT", False),
        (-6, 0, True, "memory was refused to the process that did the work, which SIGABRT then ended", True),
        (-11, 0, True, "memory was refused to the process that did the work, which SIGSEGV then ended", True),
        (-11, 0, False, "the process that did the work was ended by SIGSEGV", False),
        (-64, 0, True, "the process that did the work was ended by SIGRTMAX", False),
        (1, 1, True, "the process that did the work ended with code 1 and no answer", False),
    ],
)
def test_an_end_is_told_by_its_code_its_limit_and_the_kernels_counters(code, kills, limited, why, overrun):
    assert cause_of_end(code, kills, limited) == (why, overrun)


def test_the_kernels_count_is_that_of_the_nearest_control_group(tmp_path):
    files = {
        "proc/vmstat": "oom_kill 5\npgfault 77\n",
        "proc/self/cgroup": "4:memory:/a\n0::/b\n",
        "proc/self/mountinfo": (
            "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "31 23 0:28 / /cg2 rw - cgroup2 cgroup rw\n"
        ),
        "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "cg2/memory.events": "oom_kill 7\n",
        "cg2/b/memory.events": "low 0\noom 9\noom_kill 1\noom_group_kill 0\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for nearest, left in (
        (2, "sys/fs/cgroup/memory/a/memory.oom_control"),
        (1, "cg2/b/memory.events"),
        (7, "cg2/memory.events"),
        (5, "proc/vmstat"),
    ):
        assert oom_kills(tmp_path) == nearest
        (tmp_path / left).unlink()
    assert oom_kills(tmp_path) is None


def test_a_kernel_that_does_not_count_says_nothing(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("pgfault 77\n")
    assert oom_kills(tmp_path) is None


def test_work_that_was_lost_is_answered_for_every_order():
    text = batch(work_order(1), work_order(1, order=5), shared_process=False).model_dump_json()
    killed = parse(Reply, worker.lost(text, "killed", overrun=True))
    assert [(u.order, u.device, u.outcome, u.overrun) for u in killed.updates] == [
        (1, 1, "refused: killed", True),
        (5, 1, "refused: killed", True),
    ]
    assert parse(Reply, worker.lost(text, "died", overrun=False)).updates[0].outcome == "failed: died"


# The worker itself


def workers_of(parent):
    """The running workers that belong to a process, without their children, which are called the same."""
    found = {}  # with the parent of each, since a child may end before it is asked again
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "wildflower.client_app.worker" in process.cmdline() and process.cmdline()[-1] == str(parent):
                found[process.pid] = process, process.ppid()
    return [process for process, its_parent in found.values() if its_parent not in found]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A worker that belongs to this process, started by a first message; its folder and its process."""
    folder = tmp_path_factory.mktemp("node")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.os, "getppid", os.getpid)
        update, arrays = ask(folder, order())
    [process] = workers_of(os.getpid())
    yield folder, process, update, arrays
    process.kill()


pytestmark = pytest.mark.worker


@pytest.mark.thorough
def test_the_worker_does_what_this_process_would_do(started):
    _, _, update, arrays = started
    reply, expected = answers(batch(work_order(1), shared_process=False), partition_id=1)
    [here] = reply.updates
    assert arrays == expected
    assert (update.outcome, update.loss, update.examples) == (here.outcome, here.loss, here.examples)
    assert update.report["memory_total_bytes"] == here.report["memory_total_bytes"]
    assert not update.overrun


def test_the_worker_stays_and_its_children_end(started):
    folder, process, _, arrays = started
    assert ask(folder, order())[1] == arrays
    assert process.is_running()
    psutil.wait_procs(process.children(), timeout=120)
    assert process.children() == []
    assert workers_of(os.getpid()) == [process]
    held = process.memory_info().rss
    for _ in range(5):
        ask(folder, order())
    assert process.memory_info().rss < held + 5e6


@pytest.mark.parametrize(("kind", "counted"), [("train", True), ("delivery", True), ("query", False)])
def test_weights_that_came_count_whatever_they_came_for(kind, counted, started):
    folder, _, _, _ = started
    config = CONFIG | {"state-dir": str(folder), "max-bytes-per-month": 10**12}

    def used():
        return Use.load(folder, datetime.now()).month_bytes

    before = used()
    for asked in (config, CONFIG | {"state-dir": str(folder)}):  # without a limit nothing is written
        with suppress(worker.WorkerError):  # no message is empty but a query
            worker.ask(kind, "", [bytes(1000)], asked)
    assert used() - before == 1000 * counted


def test_the_folder_and_the_socket_are_the_users_alone(started):
    folder, _, _, _ = started
    assert (folder / "worker").stat().st_mode & 0o777 == 0o700
    [path] = (folder / "worker").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_message_of_flower_goes_to_the_worker_and_back(started):
    folder, _, _, arrays = started
    node = context(partition_id=1, state_dir=str(folder))
    content = batch(work_order(1), shared_process=False)
    reply = app(message(content, [payload()]), node)
    assert reply.content["weights"]["0"].data == arrays[0]
    answer = app(report_query(), node)
    assert parse(NodeReport, answer.content["wildflower"]["json"]).device == 1


def test_a_limit_in_the_work_order_ends_that_work_and_nothing_else(started):
    folder, process, _, arrays = started
    # Gradients of 11 MB, far beyond what the order was said to need.
    wide = batch(
        work_order(1, WIDE, width=1.0, predicted_memory_bytes=1, memory_bytes=50_000),
        family=WIDE,
        shared_process=False,
    ).model_dump_json()
    reply, _ = worker.ask("train", wide, [payload(WIDE, 1.0)], CONFIG | {"state-dir": str(folder)})
    [update] = parse(Reply, reply).updates
    assert update.outcome.startswith("refused: training grew to")
    assert update.overrun
    assert update.report is not None
    assert process.is_running()
    assert ask(folder, order())[1] == arrays


def test_an_exception_of_the_work_is_told(started):
    folder, process, _, _ = started
    with pytest.raises(WorkerError, match="MessageError: Batch: run: Field required"):
        ask(folder, "{}")
    with pytest.raises(WorkerError, match="ValueError: no message is called 'nonsense'"):
        worker.ask("nonsense", "", [], CONFIG | {"state-dir": str(folder)})
    assert process.is_running()


def socket_of(folder):
    [path] = (folder / "worker").iterdir()
    return path


def test_garbage_does_not_end_the_worker(started):
    folder, process, _, arrays = started
    for garbage in (b"", b"GET /", LENGTH.pack(2**60), LENGTH.pack(2) + b"{}", LENGTH.pack(12) + b'{"sizes":[]}'):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(socket_of(folder)))
            link.sendall(garbage)
    assert ask(folder, order())[1] == arrays
    assert process.is_running()


def endless():
    """A work order that trains for a long time."""
    made = json.loads(order())
    made["training"]["epochs"] = 10**6
    return json.dumps(made)


def begun(folder, process):
    """A connection whose work has begun, and the child that does it."""
    psutil.wait_procs(process.children(), timeout=120)  # of the message before
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(socket_of(folder)))
    send(link, {"kind": "train", "text": endless(), "config": CONFIG | {"state-dir": str(folder)}}, [payload()])
    assert receive(link) == ({"begun": True}, [])
    while not process.children():
        assert process.is_running()
    [child] = process.children()
    return link, child


def test_a_child_that_is_killed_is_answered_for(started):
    folder, process, _, arrays = started
    link, child = begun(folder, process)
    child.kill()
    with link:
        answer, _ = receive(link)
    [update] = parse(Reply, answer["text"]).updates
    assert update.outcome == "failed: the process that did the work was ended by SIGKILL"
    assert not update.overrun
    assert ask(folder, order())[1] == arrays


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_child_that_dies_under_its_memory_limit_has_outgrown_it(started, number):
    folder, process, _, _ = started
    link, child = begun(folder, process)
    while child.rlimit(psutil.RLIMIT_DATA) == process.rlimit(psutil.RLIMIT_DATA):
        assert child.is_running()
    child.send_signal(number)
    with link:
        answer, _ = receive(link)
    [update] = parse(Reply, answer["text"]).updates
    assert update.outcome.startswith("refused: memory was refused to the process")
    assert update.overrun


def test_work_that_nobody_waits_for_any_more_is_ended(started):
    folder, process, _, arrays = started
    link, child = begun(folder, process)
    link.close()
    child.wait(timeout=120)
    assert ask(folder, order())[1] == arrays


def test_the_kernel_is_to_end_the_child_first(started):
    folder, process, _, _ = started
    link, child = begun(folder, process)
    with link:
        path = f"/proc/{child.pid}/oom_score_adj"
        while Path(path).read_text().strip() != "1000":
            assert child.is_running()
    child.wait(timeout=120)


def test_a_worker_ends_with_the_process_it_belongs_to(tmp_path, monkeypatch, forked):
    parent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(worker.os, "getppid", lambda: parent.pid)
    config = CONFIG | {"state-dir": str(tmp_path / ("x" * 100) / "state")}  # too long for the name of a socket
    reply, _ = worker.ask("query", "", [], config)
    assert parse(NodeReport, reply).device == 1
    [process] = forked
    parent.kill()
    parent.wait()
    _, left = psutil.wait_procs([process], timeout=120)
    assert left == []

    # The next messenger finds the socket of a worker that is gone, and starts another one.
    def start(path):
        raise NotADirectoryError(str(path))

    monkeypatch.setattr(worker, "_start", start)
    with pytest.raises(NotADirectoryError, match="/proc/self/fd/"):
        worker.ask("query", "", [], config)


def scripted(monkeypatch, *scripts):
    """Let each next connection to a worker lead to one that does what a script says; the scripts that are left."""
    left, others = list(scripts), []

    def connect(config):
        here, there = linked()
        others.append(there)  # stays open
        left.pop(0)(there)
        return here

    monkeypatch.setattr(worker, "_connect", connect)
    return left


def dies(link):
    link.close()


def answers_at_once(link):
    send(link, {"begun": True}, [])
    send(link, {"text": "done"}, [b"new"])


def dies_at_work(link):
    send(link, {"begun": True}, [])
    link.shutdown(socket.SHUT_WR)


def test_a_worker_that_is_lost_before_it_began_is_replaced_once(monkeypatch):
    for first in (dies, answers_at_once):
        arrays = [b"old"]
        left = scripted(monkeypatch, first, answers_at_once)
        assert worker.ask("train", "", arrays, CONFIG) == ("done", [b"new"])
        assert arrays == []
        assert len(left) == (first is answers_at_once)
    scripted(monkeypatch, dies, dies)
    with pytest.raises(WorkerError, match="lost twice before it began"):
        worker.ask("train", "", [b"old"], CONFIG)


def test_work_that_has_begun_is_not_begun_again(monkeypatch):
    left = scripted(monkeypatch, dies_at_work, answers_at_once)
    with pytest.raises(WorkerError, match="lost while it worked"):
        worker.ask("train", "", [b"old"], CONFIG)
    assert left == [answers_at_once]


@pytest.mark.parametrize("scripts", [(dies, dies), (dies_at_work,)], ids=["before it began", "at work"])
def test_a_worker_that_memory_took_is_work_that_outgrew_its_budget(monkeypatch, scripts):
    for kind, kills in (("train", [3, 4]), ("train", [3, 3]), ("train", [None, None]), ("query", [3, 4])):
        scripted(monkeypatch, *scripts)
        monkeypatch.setattr(worker, "oom_kills", lambda counts=kills: counts.pop(0))
        if (kind, kills) == ("train", [3, 4]):
            reply, arrays = worker.ask("train", order(), [b"old"], CONFIG)
            [update] = parse(Reply, reply).updates
            assert update.outcome.startswith("refused: the device's worker was lost")
            assert (update.overrun, arrays) == (True, [])
        else:
            with pytest.raises(WorkerError, match="worker was lost"):
                worker.ask(kind, order(), [b"old"], CONFIG)


def test_a_worker_of_another_version_takes_the_place_of_the_one_before(tmp_path, forked):
    config = CONFIG | {"state-dir": str(tmp_path)}
    worker.ask("query", "", [], config)
    [old] = (tmp_path / "worker").iterdir()
    worker.ask("query", "", [], config | {"partition-id": 2})
    old.rename(old.with_name(f"{old.name.split('-')[0]}-another.sock"))
    worker.ask("query", "", [], config)
    first, second, third = forked
    first.wait(timeout=120)
    assert second.is_running()  # another node's
    assert third.is_running()
    assert len(list((tmp_path / "worker").iterdir())) == 2


@pytest.mark.thorough
def test_a_child_ends_with_its_worker(tmp_path, forked):
    worker.ask("query", "", [], CONFIG | {"state-dir": str(tmp_path)})
    [process] = forked
    link, child = begun(tmp_path, process)
    path = f"/proc/{child.pid}/oom_score_adj"  # set at the same moment
    while Path(path).read_text().strip() != "1000":
        assert child.is_running()
    process.kill()
    with link:
        child.wait(timeout=120)


def test_a_killed_worker_is_replaced(tmp_path, forked):
    config = CONFIG | {"state-dir": str(tmp_path)}
    worker.ask("query", "", [], config)
    [process] = forked
    process.kill()
    process.wait(timeout=120)
    reply, _ = worker.ask("query", "", [], config)
    assert parse(NodeReport, reply).device == 1
    assert len(forked) == 2


def test_a_worker_that_nobody_asks_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "LOOK_SECONDS", 0.01)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "w.sock"))
        listener.listen()
        before = time.monotonic()
        worker.serve(listener, os.getpid(), idle_seconds=0.05)
        assert time.monotonic() - before < 60  # a loaded machine is slow, and a worker that stays would stay for ever
        gone = subprocess.Popen(["true"])
        gone.wait()
        worker.serve(listener, gone.pid, idle_seconds=1e9)
