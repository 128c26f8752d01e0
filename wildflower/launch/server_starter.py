"""`wildflower-superlink`: Flower's flower-superlink, which starts the server of a run once.

Flower claims a run for 30 seconds and starts a Python for its server. On a busy machine Python and Flower take longer
to load than that: the run is free again, and started once more while the first process still loads, and each makes the
others slower. Here the process that has started a server, this module in place of flower-superexec, renews the claim as
long as the server lives. Weights travel in the small pieces of `wildflower-node`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from wildflower.client_app.supernode import PIECE_BYTES, kept_in

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor import ExecutionSpec

RENEW_SECONDS, AGAIN_SECONDS = 20.0, 2.0  # a claim that was renewed lasts for 60

Renew = Callable[[], bool]
Launch = Callable[[Any, Any], Any]


def renew_while_alive(process: subprocess.Popen[Any], renew: Renew) -> None:
    """Renew the claim of a process's run at once, and again and again until the process has ended.

    renew: says whether the claim was renewed; soon after it was not, that is tried again.
    """
    while process.poll() is None:
        seconds = RENEW_SECONDS if renew() else AGAIN_SECONDS
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def renewing(spec: ExecutionSpec) -> Renew:
    """Return what renews the claim of a run."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    def renew() -> bool:
        client = RuntimeHttpClient.from_server_address(
            server_address=spec.runtime_api_address,
            insecure=spec.insecure,
            root_certificates=Path(spec.root_certificates_path).read_bytes() if spec.root_certificates_path else None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                RuntimeTokenHttpInterceptor(spec.token),
            ],
        )
        try:
            with client:
                return bool(client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except httpx.HTTPError:  # the SuperLink has much to do, or the run has ended and its process will
            return False

    return renew


def launching(launch: Launch, started: list[subprocess.Popen[Any]]) -> Launch:
    """Return Flower's function that starts the process of a run, whose claim is renewed from then on.

    started: where what Flower starts is added.
    """

    def launch_and_renew(executor: Any, spec: ExecutionSpec) -> Any:
        result = launch(executor, spec)
        Thread(target=renew_while_alive, args=(started.pop(), renewing(spec)), daemon=True).start()
        return result

    return launch_and_renew


def start_servers() -> None:
    """Run flower-superexec, and renew the claims of what it starts."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    started: list[subprocess.Popen[Any]] = []
    setattr(subprocess_executor, "subprocess", kept_in(started))  # noqa: B010  # mypy takes no other module there
    executor = subprocess_executor.SubprocessExecutor
    setattr(executor, "launch", launching(executor.launch, started))  # noqa: B010
    flower_superexec()


def main() -> None:
    """Run flower-superlink, whose runs this module starts."""
    os.environ.setdefault("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", str(PIECE_BYTES))
    flowers: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")  # the package's name is a function's
    command = flowers._get_superexec_command

    def own_command(*arguments: Any, **options: Any) -> list[str]:
        # -P: not the modules of the folder in which the SuperLink runs.
        return [sys.executable, "-P", "-m", __name__, *command(*arguments, **options)[1:]]

    flowers._get_superexec_command = own_command
    flowers.flower_superlink()


if __name__ == "__main__":
    start_servers()
