"""`wildflower-node`: Flower's flower-supernode, which lets go of what a run that ends leaves half pulled.

A SuperNode makes a task of a message before it has pulled all of it. Where the run ends meanwhile, as when it is
stopped or its last round closes without this node, Flower 1.42 ignores the message and keeps it and its task: a process
waits for the rest of it, and what the node says of it in the end takes the place of the reply to the next message, so
that from then on every reply leaves one message late. On slow links that happens easily.

It goes on to say that it is there where the server answers that with an error of its own, as one does whose disk is
full: Flower 1.42 would never say it again, and the server would take the node for gone until it is started anew.

Its work is started by a process of ours, `client_app/starter.py`, in place of flower-superexec. When that one ends,
killed for want of memory, say, the node ends too: Flower 1.42 would go on to take messages that nobody works on. What
has started the node, systemd or Docker, starts it again.

It answers for a message whose process was killed before it had read it, which Flower 1.42 forgets.

It asks for messages less and less often while none come, so that a SuperLink serves a thousand nodes (`asking_less`).

It sends a request again where the server closes the connection, also under TLS (`wildflower.messages.retries`). Where
the server does not let it in, it says why, and ends with a code of its own (`wildflower.client_app.admission`).

Flower is started with functions replaced and with its processes kept in a list. As little as possible is imported,
since this stays in memory.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wildflower.client_app.admission import (
    leaving_in_words,
    note_revoked,
    noticing,
    status_of,
    tell_watchdog,
    waiting_for_lease,
)
from wildflower.client_app.server_clock import clock_trouble
from wildflower.client_app.signed_app import taking_submitted, verifying
from wildflower.devices.instance import draw_instance
from wildflower.messages.retries import retry_closed_connections

# Weights travel in pieces of this size, two at a time, each of which has to arrive within 30 seconds: of Flower's own,
# 5 MB, two need 2.8 Mbit/s for that, and what comes too late is sent again.
PIECE_BYTES = 2**20
STARTER = Path(__file__).with_name("starter.py")
# Flower's nodes ask every 3 s, for which a SuperLink of a thousand has no time. Here a node waits for a tenth of the
# time that it has had no message, so that a message comes at most so much later than it could.
FLOWERS_POLL_SECONDS, LONGEST_POLL_SECONDS, IDLE_SHARE = 3.0, 30.0, 0.1
INSTALLING = "--allow-runtime-dependency-installation"

Pull = Callable[..., int | None]


def letting_go(pull: Pull, started: Sequence[subprocess.Popen[Any]]) -> Pull:
    """Flower's function that pulls a message into the node's state; what it ignores half pulled is not kept.

    started: the processes that Flower has started so far, of which the first starts the node's work. Where that one has
    ended, the node ends.
    """

    def pull_or_let_go(*, state: Any, object_store: Any, **others: Any) -> int | None:
        if started and started[0].poll() is not None:
            why = "ERROR: the process that starts this node's work has ended: so does the node"
            print(why, file=sys.stderr, flush=True)
            # Upon this Flower ends in order: its other threads outlive an exception.
            os.kill(os.getpid(), signal.SIGTERM)
            return None
        messages, tasks = set(state.msg_store), set(state.task_store)
        run_id = pull(state=state, object_store=object_store, **others)
        if run_id is None:
            for message_id in set(state.msg_store) - messages:
                state.delete_messages(message_ids=[message_id])
                object_store.delete(message_id)
            for task_id in set(state.task_store) - tasks:
                state.finish_task(task_id, sub_status="stopped", details="The run ended while its message was pulled")
        return run_id

    return pull_or_let_go


def asking_less(
    pull: Pull,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
    draw: Callable[[float, float], float] = random.uniform,
) -> Pull:
    """Return Flower's function that pulls a message, which waits where none have come for long.

    Flower waits for 3 s itself. `draw` keeps nodes apart that were started together.
    """
    idle_since, worked = now(), False

    def pull_or_wait(**others: Any) -> int | None:
        nonlocal idle_since, worked
        if worked:
            idle_since = now()
        run_id = pull(**others)
        worked = run_id is not None
        seconds = min(IDLE_SHARE * (now() - idle_since), LONGEST_POLL_SECONDS) * draw(0.8, 1.2)
        if not worked and seconds > FLOWERS_POLL_SECONDS:
            sleep(seconds - FLOWERS_POLL_SECONDS)
        return run_id

    return pull_or_wait


def answering_for_killed(expired: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return Flower's function that answers for a process that was killed, also where it had not read its message yet.

    Flower 1.42 answers only what was read: else the node says nothing, and works on nothing, until the run has ended.
    """

    def answer(state: Any, tasks: Any) -> None:
        run_ids = {task.run_id for task in tasks}
        with state.lock_msg_store:
            for message_id, entry in state.msg_store.items():
                of = entry.message.metadata
                if of.run_id in run_ids and not of.reply_to_message_id and not entry.is_retrieved:
                    entry.is_retrieved = True
                    state.record_message_processing_start(message_id)
        expired(state, tasks)

    return answer


def lasting(heartbeat: Callable[[], bool], ends: list[int]) -> Callable[[], bool]:
    """Return Flower's function that says to the server that the node is there; a server's error ends it no more.

    ends: takes the code with which the node is to end, where the server no longer takes its key.
    """

    def beat() -> bool:
        from httpx import HTTPStatusError

        tell_watchdog()
        try:
            return heartbeat()
        except HTTPStatusError as error:
            if status_of(error) == 401:
                note_revoked(ends)
            if not error.response.is_server_error:
                raise
            print(
                f"WARNING: The server answers with an error of its own ({error.response.status_code}), as one does "
                "whose disk is full. This node tries again until it does not",
                file=sys.stderr,
                flush=True,
            )
            return False  # upon which Flower tries again

    return beat


def kept_in(started: list[subprocess.Popen[Any]]) -> SimpleNamespace:
    """Return the module `subprocess` with a `Popen` that also adds what it starts to a list; ours for Flower's starter.

    Flower does not keep the process that it starts. Its own one alone can install what a bundle depends on.
    """

    def popen(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        if command[0] == "flower-superexec" and INSTALLING not in command:
            command = [sys.executable, "-P", str(STARTER), *command[1:]]
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    return SimpleNamespace(**vars(subprocess) | {"Popen": popen})


def collect_until_it_ends(child: int) -> int:
    """Wait for a process that was forked off, and for all others whose parent this one becomes; its exit code.

    The first process of a container becomes the parent of the workers whose own parents have ended. Nobody else takes
    their exit codes, without which they stay in the container's list of processes until that is full. Signals that ask
    the container to stop are for the child; the code is 128 + the signal where one has killed it, as of a shell.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda received, _: os.kill(child, received))
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def trouble_at_start(options: Namespace) -> str:
    """Return why a node cannot be started with these options of flower-supernode's; "" if nothing is known.

    Flower itself would start with a wrong node config, and fail with every message.
    """
    # Not for the first process of a container, which has to stay small.
    from wildflower.client_app.node_config import read_node_config
    from wildflower.devices import node_config

    try:
        config = read_node_config(options.node_config or "")
        node_config.read(config)
        node_config.own_device(config)
    except (ValueError, OSError) as error:
        return str(error)
    return port_trouble(options.host, options.port)


def port_trouble(host: str, port: int) -> str:
    """Return why this node cannot listen at a port; "" if it can."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return ""
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} of {host} is taken, by another node perhaps: --port NUMBER chooses another"
        return f"this node cannot listen at port {port} of {host}: {error.strerror}; --host and --port say where"


def main() -> None:
    """Check what the node was told, say what is wrong with the clock, and run flower-supernode as a new instance.

    The first process of a container starts a node as its child, and collects what ends; so little of it is imported yet
    that it takes a few MB.
    """
    if os.getpid() == 1:
        if child := os.fork():
            sys.exit(collect_until_it_ends(child))
        os.setsid()  # a terminal's Ctrl-C comes once, from the first process
    os.environ.setdefault("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", str(PIECE_BYTES))
    draw_instance()
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode, flower_supernode
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    options = _parse_args_run_supernode().parse_args()
    if trouble := trouble_at_start(options):
        sys.exit(f"Error: {trouble}")
    if trouble := clock_trouble(options.superlink, options.root_certificates, options.insecure):
        print(f"WARNING: {trouble}", file=sys.stderr, flush=True)
    ends: list[int] = []
    sender = fleet_http_connection.HeartbeatSender
    setattr(fleet_http_connection, "HeartbeatSender", lambda heartbeat: sender(lasting(heartbeat, ends)))  # noqa: B010
    retries = fleet_http_connection.make_simple_http_retry_invoker
    fleet_http_connection.make_simple_http_retry_invoker = lambda: retry_closed_connections(noticing(retries(), ends))
    client = fleet_http_connection.FleetHttpClient
    setattr(client, "ActivateNode", waiting_for_lease(client.ActivateNode, ends))  # noqa: B010
    leave = fleet_http_connection.flwr_exit
    setattr(fleet_http_connection, "flwr_exit", leaving_in_words(leave, options.superlink, ends))  # noqa: B010
    started: list[subprocess.Popen[Any]] = []  # none with --isolation process
    setattr(start_client_internal, "subprocess", kept_in(started))  # noqa: B010  # mypy takes no other module there
    pull = taking_submitted(start_client_internal._pull_and_store_message)
    start_client_internal._pull_and_store_message = asking_less(letting_go(pull, started))
    setattr(start_client_internal, "_verify_fab", verifying(start_client_internal._verify_fab))  # noqa: B010
    expired = InMemoryNodeState._on_task_tokens_expired
    setattr(InMemoryNodeState, "_on_task_tokens_expired", answering_for_killed(expired))  # noqa: B010
    try:
        flower_supernode()
    finally:
        if ends:
            sys.exit(ends[0])
