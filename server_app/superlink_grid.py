"""Flower's grid, which says so when a run cannot go on over it, and outlives a closed connection.

A SuperLink keeps its messages, nodes and runs in a SQLite file. Where the disk of that file has no room left, Flower
1.42 answers every request that writes with an internal error: what devices send is lost, what the app prints goes
nowhere, and the process that starts the SuperLink's work ends. The app sees the disk, because it runs beside the file.

In a simulation Flower does not start a process of Ray's again that was killed, and goes on giving it messages: it fails
them at once, so that it gets more of them than those that work.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from wildflower.devices.validation import one_line
from wildflower.messages.retries import retry_closed_connections
from wildflower.server_app.units import bytes_text

DIED_IN_RAY = "<class 'ray.exceptions.Actor"  # how Flower's reason begins where a process of Ray's is gone
SUPERLINKS = ("wildflower-superlink", "flower-superlink")  # the command, and Flower's own
FULL_DISK_BYTES = 10**6  # less than this and the next messages will not fit


class SuperLinkError(RuntimeError):
    """The run cannot go on over this SuperLink. Its text, which says why, is all there is to know."""


class SuperLinkGrid(Grid):
    """A grid that raises SuperLinkError, with what to do, where the SuperLink cannot store what is sent.

    In a simulation it also does so where a process of Ray's is gone, from then on.

    Args:
        grid: Flower's, to which everything is handed on.
        run_name: of the run, for the command that goes on with it.
        database: the SuperLink's file; None where it is not known, and only the SuperLink's errors tell.
        simulated: its nodes are those of Flower's simulation, whose errors are to be believed.
    """

    def __init__(self, grid: Grid, run_name: str, database: Path | None, *, simulated: bool = False) -> None:
        self._grid, self._run_name, self._database, self._simulated = grid, run_name, database, simulated
        self._has_died = False  # a process of Ray's
        self.names: dict[int, str] = {}  # node -> the name under which its key was enrolled
        # To import the grid's class, flwr.superlink.grid.http_grid.HttpGrid, would take 0.8 s. Others have no retries.
        if (retries := getattr(grid, "_retry_invoker", None)) is not None:
            retry_closed_connections(retries)

    @contextmanager
    def _told(self) -> Iterator[None]:
        self._check_alive()
        if self._database is not None:
            free_bytes = shutil.disk_usage(self._database.parent).free
            if free_bytes < FULL_DISK_BYTES:
                raise SuperLinkError(
                    f"The disk of the SuperLink's database {self._database} is full ({bytes_text(free_bytes)} are "
                    f"free): no message reaches a device. Make room, {self._remedy()}"
                )
        try:
            yield
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
                raise
            where = f" {self._database}" if self._database is not None else ""
            raise SuperLinkError(
                f"The SuperLink answers with an internal error, and its own log says why. Mostly the disk of its "
                f"database{where} has too little room for a round's messages: make room, {self._remedy()}"
            ) from error

    def _check_alive(self) -> None:
        if self._has_died:
            raise SuperLinkError(
                "A process of Ray's was killed, most likely because memory ran out, and Flower does not start it "
                f"again (`wildflower run` does): {self._go_on()}"
            )

    def _remedy(self) -> str:
        return f"start the SuperLink anew, and {self._go_on()}"

    def _go_on(self) -> str:
        return f"go on with the same command and --set resume=true --set run-name={self._run_name}"

    def set_run(self, run: Any) -> None:
        """Hand it on."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Call that of the grid."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Call that of the grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Call that of the grid. Raises SuperLinkError."""
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> Iterable[Any]:
        """Call that of the grid, and note the nodes' names. Raises SuperLinkError."""
        with self._told():
            nodes = list(self._grid.get_nodes())
        self.names |= {node.node_id: one_line(node.name) for node in nodes if node.name}
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Call that of the grid. Raises SuperLinkError."""
        with self._told():
            return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Call that of the grid. Raises SuperLinkError."""
        with self._told():
            replies = list(self._grid.pull_messages(message_ids))
        if self._simulated:
            errors = [reply.error for reply in replies if reply.has_error()]
            self._has_died = any((error.reason or "").startswith(DIED_IN_RAY) for error in errors)
            self._check_alive()
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Call that of the grid. Raises SuperLinkError."""
        with self._told():
            return self._grid.send_and_receive(messages, timeout=timeout)


def superlink_database() -> Path | None:
    """The database of the SuperLink that has started this process; None where none has, or where it is in memory."""
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            command = process.cmdline()
            if any(Path(word).name in SUPERLINKS for word in command[:2]):
                return database_of(command, Path(process.cwd()))
    return None


def database_of(command: Sequence[str], folder: Path) -> Path | None:
    """The file that a SuperLink's command line names as its database.

    Args:
        folder: in which the command runs.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--database", default="")
    name = parser.parse_known_args(list(command))[0].database.removeprefix("sqlite:///")
    path: Path = folder / name
    return path if name and path.is_file() else None
