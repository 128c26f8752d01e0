"""The worker of a device: one process per node that has torch and the data loaded, and forks a child for every message.

Flower starts a new process for every message, which takes seconds until torch is loaded, and kills or loses a node's
work with it. Here that process (`ask`) is a messenger: it finds the worker over a Unix socket in the node's state
folder, or starts it, and waits. The worker (`serve`) forks; the child works under the memory limit of its work order
(`wildflower.client_app.memory`), answers and ends, so that all memory is given back. A child that dies takes neither
the worker nor the SuperNode with it, and the worker knows how it ended.

The worker ends with the SuperExec that its first messenger came from, when nobody has asked for long, or when a worker
of another version of the app takes its place; on a device short of memory the kernel may end it at any time. It says
when it has a message whole and begins, so that a messenger knows whether it may ask another worker. Messages are JSON
and bytes with their lengths in front. The folder is the user's alone, and the worker answers no other user.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

import wildflower
from wildflower.client_app.frames import receive, send
from wildflower.devices.state_folder import node_state_dir
from wildflower.devices.validation import one_line

# The folder of the app's code: every version of a bundle has its own, and its own worker.
ROOT = Path(wildflower.__file__).parents[1]
IDLE_SECONDS = 900.0
LOOK_SECONDS = 1.0
LEAVE_SECONDS = 10.0  # that another version's worker has to end
END = "end"  # the kind of a message that asks a worker to
PR_SET_PDEATHSIG = 1
LONGEST_PATH = 100  # of a socket: the system allows 104 to 108
PATHS = {"data-dir", "state-dir", "gpu-trainer", "bandwidth-ca", "bandwidth-token-file"}  # of the node config
# How a process ends whose libraries took it for granted that they get memory.
ENDS_WITHOUT_MEMORY = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)


class WorkerError(RuntimeError):
    """The worker could not do what it was asked; the text says why."""


# The messenger -------------------------------------------------------------------------------------------------------


def ask(kind: str, text: str, arrays: list[bytes], config: Mapping[str, object]) -> tuple[str, list[bytes]]:
    """Let the device's worker answer a message (`wildflower.client_app.work.do`); starts it where it does not run.

    `arrays` is emptied as soon as the work begins, so that the weights are not held for as long as it takes. A worker
    that is lost before is replaced, once.

    Raises:
        WorkerError: the worker cannot be started, raised an exception, or was lost with the work. Where the kernel
            killed something for memory meanwhile, a lost training is answered: as one that outgrew its budget.
    """
    kills, config = oom_kills(), _with_whole_paths(config)
    for last in (False, True):
        link = _connect(config)
        try:
            send(link, {"kind": kind, "text": text, "config": config}, arrays)
            _await(link)  # it begins
            break
        except (OSError, EOFError) as error:
            link.close()
            if last:
                why = f"the device's worker was lost twice before it began: {error}"
                return _without_worker(kind, text, why, kills), []
    arrays.clear()
    with link:
        try:
            answer, out = _await(link)
        except (OSError, EOFError) as error:
            return _without_worker(kind, text, f"the device's worker was lost while it worked: {error}", kills), []
    if "error" in answer:
        raise WorkerError(str(answer["error"]))
    return str(answer["text"]), out


def _await(link: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """`receive`, as soon as something comes."""
    # Python's signal handlers wait while a call does: who asks this process to end is heard within a second.
    while not select.select([link], [], [], 1.0)[0]:
        pass
    return receive(link)


def _without_worker(kind: str, text: str, why: str, kills: int | None) -> str:
    """Return the answer to a training whose worker was lost to the kernel's want of memory; WorkerError for all else.

    `kills` are those of before. Where another process was killed meanwhile and the worker lost for another reason,
    memory was short all the same.
    """
    now = oom_kills()
    if kind != "train" or kills is None or now is None or now == kills:
        raise WorkerError(why)
    return lost(text, f"{why}; the kernel killed a process because this device's memory was used up", overrun=True)


def lost(text: str, why: str, *, overrun: bool) -> str:
    """Return the reply to a train message whose work was ended from outside."""
    # Pydantic takes a while, and is rarely needed here.
    from wildflower.messages.orders import Batch, Reply, Update, parse

    batch = parse(Batch, text)
    outcome = one_line(f"{'refused' if overrun else 'failed'}: {why}")
    updates = [Update(order=o.order, device=o.device, outcome=outcome, overrun=overrun) for o in batch.orders]
    return Reply(run=batch.run, round=batch.round, updates=updates).model_dump_json()


def _with_whole_paths(config: Mapping[str, object]) -> dict[str, object]:
    """Return the node config with paths from the root: the worker runs in another folder than the node began in."""
    return {
        key: os.path.abspath(os.path.expanduser(str(value))) if key in PATHS and value else value
        for key, value in config.items()
    }


def _connect(config: Mapping[str, object]) -> socket.socket:
    """Return a connection to the worker; where none answers, to a new one."""
    folder = node_state_dir(config) / "worker"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    # Two nodes of one machine may have one state folder.
    node, version = (hashlib.sha256(str(what).encode()).hexdigest()[:8] for what in (config.get("partition-id"), ROOT))
    path = folder / f"{node}-{version}.sock"
    handle = os.open(folder, os.O_RDONLY)
    try:
        # A socket's name must be short.
        place = folder if len(os.fsencode(path)) <= LONGEST_PATH else Path(f"/proc/self/fd/{handle}")
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(place / path.name))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            for other in folder.glob(f"{node}-*.sock"):
                _dismiss(place / other.name)
                other.unlink(missing_ok=True)
            _start(place / path.name)
            link.connect(str(place / path.name))
        return link
    finally:
        os.close(handle)


def _dismiss(path: Path) -> None:
    """Ask the worker of another version to end, and wait for that: a small device has no room for two."""
    with socket.socket(socket.AF_UNIX) as link, suppress(OSError):  # it is gone, or does not listen
        link.settimeout(LEAVE_SECONDS)
        link.connect(str(path))
        send(link, {"kind": END, "text": "", "config": {}}, [])
        link.recv(1)


def _start(path: Path) -> None:
    """Start a worker that listens at `path`: connections queue until it has loaded what it needs."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(8)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        # A session of its own, because this process ends with its message; its output goes where ours goes.
        subprocess.Popen(
            [sys.executable, "-m", "wildflower.client_app.worker", str(listener.fileno()), str(os.getppid())],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


# The worker ----------------------------------------------------------------------------------------------------------


def serve(listener: socket.socket, parent: int, idle_seconds: float = IDLE_SECONDS) -> None:
    """Answer one message after the other until the process `parent` is gone, or nobody asks for `idle_seconds`."""
    import torch

    from wildflower.client_app import work  # noqa: F401  (loaded once, for all children)

    torch.set_num_threads(1)  # no threads in here: a forked child would not have them
    # A process's first optimizer imports PyTorch's compiler: a second of CPU time and 70 MB, for every child anew.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    started = _start_time(parent)
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < idle_seconds and started is not None and _start_time(parent) == started:
        if select.select([listener], [], [], LOOK_SECONDS)[0]:
            link, _ = listener.accept()
            with link:
                if _is_own_user(link) and not _answer(link, listener):
                    return
            idle_since = time.monotonic()


def _answer(link: socket.socket, listener: socket.socket) -> bool:
    """Let a child answer a message, and answer in its place if it dies before it could; False if asked to end."""
    from wildflower.client_app import work

    try:
        header, arrays = receive(link)
        kind, text, config = str(header["kind"]), str(header["text"]), dict(header["config"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        print(f"The worker was sent something that is no message: {error!r}", file=sys.stderr, flush=True)
        return True
    if kind == END:
        return False
    try:
        send(link, {"begun": True}, [])
    except OSError:
        return True  # nobody waits
    with suppress(Exception):  # the child meets the same trouble, and tells it
        work.preload(kind, text, config)
    kills = oom_kills()
    announced, announce = os.pipe()
    worker = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            listener.close()
            _work(link, announce, kind, text, arrays, config, worker)
        finally:
            os._exit(1)  # not reached after an answer; never back into the loop of the worker
    os.close(announce)
    arrays.clear()
    try:
        answered, alone = _wait(link, announced)
        if alone:
            os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, but not buried: its limits can still be read
        # Of memory (`wildflower.client_app.memory`), which this process is not.
        limited = resource.prlimit(child, resource.RLIMIT_DATA) != resource.getrlimit(resource.RLIMIT_DATA)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(announced)
    if not answered and not alone:
        now = oom_kills()
        meanwhile = None if now is None or kills is None else now - kills
        why, overrun = cause_of_end(os.waitstatus_to_exitcode(status), meanwhile, limited)
        answer = {"text": lost(text, why, overrun=overrun)} if kind == "train" else {"error": why}
        try:
            send(link, answer, [])
        except OSError as error:
            print(f"Nobody waits for this any more: {why} ({error})", file=sys.stderr, flush=True)
    return True


def _wait(link: socket.socket, announced: int) -> tuple[bool, bool]:
    """Wait until the child answers or ends, or the messenger is gone. -> (the child answered, nobody waits)."""
    while True:
        ready, _, _ = select.select([link.fileno(), announced], [], [])
        if announced in ready:
            return os.read(announced, 1) == b"a", False
        try:
            if not link.recv(1):  # what a messenger sends after its message is for nobody
                return False, True
        except ConnectionError:
            return False, True


def _work(
    link: socket.socket,
    announce: int,
    kind: str,
    text: str,
    arrays: list[bytes],
    config: dict[str, object],
    worker: int,
) -> None:
    """The child of a worker: work, answer, end."""
    import torch

    from wildflower.client_app import work
    from wildflower.devices.conditions import has_limits, note_use
    from wildflower.devices.node_config import read
    from wildflower.devices.probe import probe_machine

    with suppress(OSError):  # where memory runs out, the kernel is to end this process and no other; Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")
    end_with(worker)
    out: list[bytes] = []
    began, bytes_down = time.monotonic(), sum(map(len, arrays))
    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or math.ceil(probe_machine().cpus)))
        reply, out = work.do(kind, text, arrays, config)
        answer = {"text": reply}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    if kind in ("train", "evaluate", "data", "delivery") and has_limits(read(config)):
        with suppress(OSError):  # of a full disk, which the work's own state tells
            nbytes = bytes_down + sum(map(len, out))
            note_use(node_state_dir(config), nbytes, time.monotonic() - began, datetime.now())
    os.write(announce, b"a")
    send(link, answer, out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_with(worker: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel end this process with its worker, which alone knows whether anybody still waits."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")
    if os.getppid() != worker:  # it was gone before
        os._exit(1)


def cause_of_end(code: int, kills: int | None, limited: bool) -> tuple[str, bool]:
    """Return why a child ended without an answer, and whether it was for memory.

    Args:
        code: as of `subprocess`: minus the number of the signal that ended it, or its exit code.
        kills: how often the kernel has killed for memory meanwhile; None where it does not say.
        limited: it worked under a memory limit when it ended.
    """
    if code == -signal.SIGKILL and kills is None:
        return "the work was killed; this kernel does not say why: taken to be for memory", True
    if code == -signal.SIGKILL and kills:
        return "the kernel killed the work because this device's memory was used up", True
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if limited and -code in ENDS_WITHOUT_MEMORY:
            return f"memory was refused to the process that did the work, which {name} then ended", True
        return f"the process that did the work was ended by {name}", False
    return f"the process that did the work ended with code {code} and no answer", False


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how often the kernel has killed for memory: in this process's control group, or else in this machine.

    The machine's count is also of other containers, and that of an outer group of other services. None where there is
    no count: kernels before 4.13, as on a Jetson Nano or TX2.
    """
    for path in (*_counters(root), root / "proc" / "vmstat"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.split()[:1] == ["oom_kill"]:
                return int(line.split()[1])
    return None


def _counters(root: Path) -> list[Path]:
    from wildflower.devices.probe import control_groups

    folders = control_groups(root, "memory")
    return [folder / name for folder in folders for name in ("memory.events", "memory.oom_control")]


def _start_time(pid: int) -> float | None:
    """When a process was started; None if it is gone. Numbers are used again, so the number alone says nothing."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _is_own_user(link: socket.socket) -> bool:
    """Say whether the other end is of the same user; where the system cannot say, the folder's rights must do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = struct.Struct("3i")  # process, user, group
    _, user, _ = credentials.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return bool(user == os.getuid())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
