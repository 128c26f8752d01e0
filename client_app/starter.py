"""Starts the work of a node's messages, in a process that has Flower loaded already; runs in place of flower-superexec.

Flower's starts a new Python for every message once it has claimed it. On a busy board Python and Flower take longer to
load than a claim lasts, 30 seconds: the message is free again, and started once more, while the first one still
loads. 15 starts for one message were seen, up to five of them at once. Here a message is claimed when all is loaded
and nothing else is at work; then a child is forked off, which begins at once. The claim is renewed as long as it lives.

The kernel ends this process with the SuperNode, and a child with this process, so that a node that is killed leaves
nothing behind.

A script that imports nothing of `wildflower`: a child works with the code of its run's bundle, which is another.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
RENEW_SECONDS = 20.0  # a claim that was renewed lasts for 60
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"  # Flower's own variable, in seconds

Renew = Callable[[], bool]


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def serve(claim: Callable[[], str], renewing: Callable[[str], Renew], work: Callable[[str], None], parent: int) -> None:
    """Work on one message after the other until the process `parent` is gone.

    Args:
        claim: returns the token of a message that waits; "" where none does.
        renewing: returns what renews the claim of a token, and says whether the message is still to be worked on.
        work: works on the message of a token, in a process of its own.
    """
    poll_seconds = float(os.environ.get(POLL, "1"))
    while os.getppid() == parent:
        token = claim()
        if token and (renew := renewing(token))():
            watch(start(work, token), renew)
        else:
            time.sleep(poll_seconds)


def start(work: Callable[[str], None], token: str) -> tuple[int, int]:
    """Fork a child that works on a message. -> its number, and a pipe that is closed when it ends."""
    starter = os.getpid()
    ended, alive = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(ended)
        _work(work, token, starter)
    os.close(alive)
    return child, ended


def _work(work: Callable[[str], None], token: str, starter: int) -> NoReturn:
    code = 1
    try:
        end_with(starter)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_NAME, b"flwr-clientapp")  # in lists of processes
        sys.argv = ["flwr-clientapp"]  # by which `wildflower.client_app.ending` knows such a process
        work(token)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def watch(child: tuple[int, int], renew: Renew, seconds: float = RENEW_SECONDS) -> None:
    """Wait until a child has ended, and renew its claim meanwhile.

    One whose message is no longer to be worked on, because its run was stopped, is killed: where that is said twice in
    a row, as a SuperNode whose disk is full for a moment says it too.
    """
    number, ended = child
    refused = 0
    try:
        while not select.select([ended], [], [], seconds)[0]:
            refused = 0 if renew() else refused + 1
            if refused > 1:
                os.kill(number, signal.SIGKILL)
    finally:
        os.close(ended)
        os.waitpid(number, 0)


def main() -> None:
    """Load all that a message needs, and serve the SuperNode that has started this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime-api-address", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--root-certificates", type=Path)
    options = parser.parse_args()
    end_with(options.parent_pid)

    import httpx
    import psutil  # noqa: F401  (for the children)
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    certificates = options.root_certificates.read_bytes() if options.root_certificates else None

    def client(token: str) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=options.runtime_api_address,
            insecure=options.insecure,
            root_certificates=certificates,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                *([RuntimeTokenHttpInterceptor(token)] if token else []),
            ],
        )

    def claim() -> str:
        try:
            return str(claims.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])).token)
        except httpx.HTTPError:  # the SuperNode does not listen yet, or has much to do
            return ""

    def renewing(token: str) -> Renew:
        def renew() -> bool:
            try:
                with client(token) as renewed:
                    return bool(renewed.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
            except httpx.HTTPStatusError:
                return False
            except httpx.HTTPError:
                return True

        return renew

    def work(token: str) -> None:
        run_clientapp(
            runtime_api_address=options.runtime_api_address,
            token=token,
            insecure=options.insecure,
            certificates=certificates,
            parent_pid=None if sys.platform == "linux" else os.getppid(),
        )

    claims = client("")
    gc.collect()
    gc.freeze()  # or collections in children would copy the pages that they share with this process
    serve(claim, renewing, work, options.parent_pid)


if __name__ == "__main__":
    main()
