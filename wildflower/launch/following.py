"""Runs are followed by their journal, and by what Flower says of them, until they end."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from wildflower.launch.app_log import waiting_text
from wildflower.launch.showing import Show
from wildflower.launch.superlink import FlowerError, SuperLink
from wildflower.server_app.run_folder import is_held, read_rounds, read_summary
from wildflower.server_app.run_records import RoundRecord

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

LOOK_SECONDS = 0.3
LOG_SECONDS = 10  # after the end of a run, in which Flower hands over the rest of its log and its own view of it
ENDED_WITH_AN_ERROR = "The run's server has ended with an error"
ENDED_SILENTLY = "The server's process has ended without a word: it was killed, or the run was stopped from elsewhere"


def follow(flower: SuperLink, run_id: str, run_dir: Path, app_log: Path, show: Show, app_log_start: int) -> str | None:
    """Show every round as it ends until the run ends; returns None, or why the run did not complete.

    What the log holds before byte `app_log_start` was written by the run that this one goes on with.
    """
    journal = JournalWatch(run_dir)
    while True:
        over = False
        with flower.follow_log(run_id, app_log) as log_stream:
            while not over and not has_ended(log_stream.wait):
                show.rounds(journal.rounds(), waiting_text(app_log, app_log_start))
                over = journal.writer_was_killed() or journal.seconds_since_the_end() > LOG_SECONDS
        show.rounds(journal.rounds())
        if over:  # Flower itself would notice after a minute, or where it cannot store anything never
            return _end_by_summary(run_dir)
        try:
            status, details = flower.status(run_id)
        except FlowerError:
            if not journal.writer_ends_within(LOG_SECONDS):
                raise
            return _end_by_summary(run_dir)
        if status.startswith("finished"):
            return None if status == "finished:completed" else f"Flower says {status}: {details}"
        # The log stream broke off and the run goes on.
        time.sleep(LOOK_SECONDS)


def _end_by_summary(run_dir: Path) -> str | None:
    """None where a run that is over has finished by its summary; else that its server has ended, and how."""
    summary = read_summary(run_dir)
    if summary is None:
        return ENDED_SILENTLY
    return None if summary.status == "finished" else ENDED_WITH_AN_ERROR


def follow_process(server: "BaseProcess", run_dir: Path, show: Show) -> str | None:
    """Show every round as it ends until the run's server ends; returns None, or why the run did not complete."""
    journal = JournalWatch(run_dir)
    while server.exitcode is None:
        server.join(timeout=LOOK_SECONDS)
        show.rounds(journal.rounds())
    if server.exitcode < 0:
        return f"{ENDED_SILENTLY} ({signal.Signals(-server.exitcode).name})"
    return None if server.exitcode == 0 else ENDED_WITH_AN_ERROR


def has_ended(wait: Callable[..., object]) -> bool:
    """Wait a moment for the end of a process, by what waits for it; whether it has come."""
    try:
        wait(timeout=LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


class JournalWatch:
    """Reads the finished rounds of a run again whenever the file has changed."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._seen: tuple[int, int] | None = None
        self._rounds: list[RoundRecord] = []
        self._held = False
        self._ended_at: float | None = None

    def writer_was_killed(self) -> bool:
        """Return whether the process that wrote the run is gone without having ended it."""
        held = is_held(self.run_dir)
        if self._held and held is False:
            return True
        if self._held and held is None and self._ended_at is None:
            self._ended_at = time.monotonic()
        self._held = self._held or held is True  # a lock that nobody holds yet may be left from an earlier run
        return False

    def seconds_since_the_end(self) -> float:
        """Return how long ago `writer_was_killed` has seen that the run had ended in order; 0 where it has not."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    def writer_ends_within(self, seconds: float) -> bool:
        """Wait so long for a process that writes the run to end; whether there was one, and it has ended."""
        end = time.monotonic() + seconds
        while self._held:
            if self.writer_was_killed() or self._ended_at is not None:
                return True
            if time.monotonic() >= end:
                break
            time.sleep(LOOK_SECONDS)
        return False

    def rounds(self) -> list[RoundRecord]:
        """All finished rounds so far."""
        try:
            state = (self.run_dir / "rounds.jsonl").stat()
        except FileNotFoundError:
            return self._rounds
        if (state.st_mtime_ns, state.st_size) != self._seen:
            self._seen = (state.st_mtime_ns, state.st_size)
            self._rounds = read_rounds(self.run_dir)
        return self._rounds
