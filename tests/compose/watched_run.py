"""What tests of recovery share: a run that is started, watched and ended, small disks, and what logs say."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.compose.engine import wait_for
from tests.deployment import ROOT, Deployment
from wildflower.server_app import checkpoint
from wildflower.server_app.run_folder import read_devices, read_rounds
from wildflower.server_app.run_records import DeviceRecord, RoundRecord

HINT = "go on with the same command and --set resume=true --set run-name=one"
MB = 2**20
LONGEST_SECONDS = 300  # that anything is waited for, which only a busy machine needs


def descendants(pid: int, words: str) -> list[psutil.Process]:
    """The processes below one in whose command these words stand; that of a message is forked, and has its own name."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                command = process.name() if process.name() == "flwr-clientapp" else " ".join(process.cmdline())
                if words in command:
                    found.append(process)
    return found


class Run:
    """A `wildflower run` of a folder's experiment, whose output goes to a file."""

    def __init__(self, folder: Path, deployment: Deployment | None = None, output: Path | None = None) -> None:
        self.folder, self.deployment = folder, deployment
        self.dir = (output or folder) / "one"
        self.arguments = [str(folder / "experiment.toml"), "--set", f"output-dir={output or folder}"]
        if deployment is not None:
            self.arguments += deployment.connection
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *settings: str) -> Run:
        """Start it with more settings; where one of an earlier start runs, that one stays."""
        words = [word for setting in settings for word in ("--set", setting)]
        return self._start([sys.executable, "-m", "wildflower", "run", *self.arguments, *words])

    def _start(self, command: list[str]) -> Run:
        with (self.folder / "said").open("wb") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        return self

    def said(self) -> str:
        """What it has printed."""
        return (self.folder / "said").read_text(errors="replace")

    def log(self) -> str:
        """What its server has printed."""
        return (self.dir / "app.log").read_text(errors="replace") if (self.dir / "app.log").exists() else ""

    def rounds(self) -> list[RoundRecord]:
        """The finished rounds.

        A server that is killed between a round's lines and its checkpoint does that round again. A simulation gives it
        the same figures; on real nodes it is another round, and counts from its checkpoint on.
        """
        found = read_rounds(self.dir) if (self.dir / "rounds.jsonl").exists() else []
        last = max(checkpoint.rounds(self.dir), default=0) if self.deployment else len(found)
        return found[:last]

    def devices(self) -> list[DeviceRecord]:
        """What devices did in them."""
        return list(read_devices(self.dir))

    def wait_for_round(self, number: int, seconds: float = LONGEST_SECONDS) -> float:
        """Wait until so many rounds are finished; how long that took."""
        started = time.monotonic()

        def look() -> bool:
            done = len(self.rounds()) >= number
            assert done or self.process is None or self.process.poll() is None, self.said()[-3000:]
            return done

        wait_for(f"round {number}", look, seconds)
        return time.monotonic() - started

    def next_round(self, more: int = 1) -> float:
        """Wait for so many rounds more than there are; how long that took."""
        return self.wait_for_round(len(self.rounds()) + more)

    def wait_for_device(self, device: int, after: int, trained: bool, seconds: float = LONGEST_SECONDS) -> DeviceRecord:
        """A device's first order behind a round in which it trained, or did not."""

        def look() -> DeviceRecord | None:
            own = (d for d in self.devices() if d.device == device and d.round > after)
            return next((d for d in own if (d.outcome == "trained") == trained), None)

        found: DeviceRecord = wait_for(f"device {device} trains: {trained}", look, seconds)
        return found

    def ends(self, code: int, seconds: float = LONGEST_SECONDS) -> str:
        """Wait until it has ended with this code; what it said."""
        assert self.process is not None
        assert self.process.wait(seconds) == code, self.said()[-3000:]
        return self.said()

    def stop(self) -> None:
        """End it as Ctrl-C does, where it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(LONGEST_SECONDS)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A disk of its own at a folder, for the time of a `with` block."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write until the disk of a folder is full; the file to remove."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def quoted(text: str, words: str, letters: int = 200) -> str:
    """The first line of a text with these words in it, from them on, fit for a cell of a table."""
    assert words in text, text[-3000:]
    line = words + text.partition(words)[2].splitlines()[0]
    line = line.replace("|", "/").replace("`", "'").strip()
    return f"`{line if len(line) <= letters else line[:letters].rsplit(' ', 1)[0] + ' ...'}`"
