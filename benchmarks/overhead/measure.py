"""CPU seconds and memory of a command with every process it starts, daemons included. Linux only.

The measuring process makes itself the reaper of orphans, so that whatever a command starts stays its descendant, even a
daemon whose parent has ended. Every descendant's own CPU time is read from /proc several times a second and kept at its
last value: Ray lets the kernel reap its processes, whose times then reach nobody's sums.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
CPU_EVERY_SECONDS = 0.1
MEMORY_EVERY_SECONDS = 1.0
STOP_SECONDS = 5.0


@dataclass
class Usage:
    """What a command and all its descendants took.

    Attributes:
        cpu_seconds: user and system time of all processes.
        cpu_seconds_by_process: the same, by the name of the program.
        peak_pss_bytes: the most of all processes together; pages that several share are counted once.
        peak_rss_bytes_by_process: the high-water mark of the largest process of each program.
        rounds: (wall seconds, CPU seconds) since the start when the end of each round was seen, in order.
    """

    wall_seconds: float
    cpu_seconds: float
    cpu_seconds_by_process: dict[str, float]
    peak_pss_bytes: int
    peak_rss_bytes_by_process: dict[str, int]
    rounds: list[tuple[float, float]]


@dataclass
class _Seen:
    name: str = ""
    cpu_seconds: float = 0.0
    peak_rss_bytes: int = 0


@dataclass
class _Tree:
    """The processes seen so far, by id and start time."""

    seen: dict[tuple[int, int], _Seen] = field(default_factory=lambda: defaultdict(_Seen))
    peak_pss_bytes: int = 0

    @property
    def cpu_seconds(self) -> float:
        return sum(process.cpu_seconds for process in self.seen.values())

    def look(self, memory: bool) -> list[int]:
        """Read the times, and the memory where asked, of all descendants of this process; their ids."""
        stats = _stats()
        below = _below(os.getpid(), stats)
        pss_bytes = 0
        for pid in below:
            _, start, cpu_seconds = stats[pid]
            process = self.seen[pid, start]
            process.cpu_seconds = cpu_seconds
            if memory or not process.name:
                process.name = _name(pid) or process.name
            if memory:
                process.peak_rss_bytes = max(process.peak_rss_bytes, _kilobytes(pid, "status", "VmHWM") * 1024)
                pss_bytes += _kilobytes(pid, "smaps_rollup", "Pss") * 1024
        self.peak_pss_bytes = max(self.peak_pss_bytes, pss_bytes)
        return below


def measure(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, rounds_file: Path) -> Usage:
    """Run a command to its end, stop what it left behind, and say what all of it took.

    The command writes one line to `rounds_file` at the end of each round.

    Raises RuntimeError with the end of its output, which goes to `log`, where its exit code is not 0.
    """
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this kernel does not let a process adopt orphans")
    tree, started, next_memory = _Tree(), time.monotonic(), 0.0
    with log.open("ab") as out:
        child = subprocess.Popen(command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    rounds: list[tuple[float, float]] = []
    while child.poll() is None:
        now = time.monotonic()
        tree.look(memory=now >= next_memory)
        ended = len(rounds_file.read_text().splitlines()) if rounds_file.exists() else 0
        rounds += [(now - started, tree.cpu_seconds)] * (ended - len(rounds))
        next_memory = now + MEMORY_EVERY_SECONDS if now >= next_memory else next_memory
        time.sleep(CPU_EVERY_SECONDS)
    wall_seconds = time.monotonic() - started
    _stop_orphans(tree)
    if child.returncode:
        said = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(command)} ended with code {child.returncode}:\n{said}")
    cpu_seconds: dict[str, float] = defaultdict(float)
    rss_bytes: dict[str, int] = defaultdict(int)
    for process in tree.seen.values():
        cpu_seconds[process.name] += process.cpu_seconds
        rss_bytes[process.name] = max(rss_bytes[process.name], process.peak_rss_bytes)
    return Usage(wall_seconds, tree.cpu_seconds, dict(cpu_seconds), tree.peak_pss_bytes, dict(rss_bytes), rounds)


def _stop_orphans(tree: _Tree) -> None:
    """End what the command left running; a process is reaped only after its times were read."""
    end = time.monotonic() + STOP_SECONDS
    while left := tree.look(memory=False):
        for pid in left:
            try:
                os.kill(pid, signal.SIGTERM if time.monotonic() < end else signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(CPU_EVERY_SECONDS)
        while _reap():
            pass


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _stats() -> dict[int, tuple[int, int, float]]:
    """Process id -> (parent, start time in ticks, CPU seconds), of all processes."""
    stats: dict[int, tuple[int, int, float]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (text := _read(int(entry), "stat")):
            fields = text.rpartition(")")[2].split()  # the name before may hold blanks and brackets
            stats[int(entry)] = (
                int(fields[1]),
                int(fields[19]),
                (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND,
            )
    return stats


def _below(root: int, stats: Mapping[int, tuple[int, int, float]]) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for pid, (parent, _, _) in stats.items():
        children[parent].append(pid)
    found: list[int] = []
    todo = list(children[root])
    while todo:
        found.append(todo.pop())
        todo += children[found[-1]]
    return found


def _name(pid: int) -> str:
    """The program: `raylet`, `flwr-simulation`; for Ray's workers what they are, for Python its script."""
    words = [word for word in _read(pid, "cmdline").split("\0") if word]
    if not words:
        return ""
    if words[0].startswith("ray::"):
        return "ray worker"
    scripts = [word for word in words[1:] if not word.startswith("-")]
    name = scripts[0] if Path(words[0]).name.startswith("python") and scripts else words[0].split()[0]
    return Path(name).name


def _kilobytes(pid: int, file: str, key: str) -> int:
    for line in _read(pid, file).splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    return 0  # it has ended


def _read(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""
