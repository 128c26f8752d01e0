import gc
import os
import signal
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import settings

from tests.launch.fake_child import Runs
from wildflower.client_app import training_message, work, worker
from wildflower.devices import speed
from wildflower.rounds import exchange

# The same examples in every run: what fails here fails there.
settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("seeded")


THOROUGH_FOLDERS = {"benchmarks", "deploy", "fuzz"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What few changes touch is left to `make test-all`."""
    for item in items:
        if THOROUGH_FOLDERS & set(item.path.relative_to(Path(__file__).parent).parts[:1]):
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """The thousands of objects of libraries and collected tests stay: the collector need not go through them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionstart() -> None:
    """Tests that interrupt themselves can do so in the background too, where a shell has Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache_and_one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache folder; digits are decoded once for all of them."""
    torch.set_num_threads(1)
    # Processes that share the tests have folders beside each other.
    shared = (
        tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else tmp_path_factory.mktemp("one")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WILDFLOWER_CACHE", str(shared / "cache"))
        yield


@pytest.fixture(autouse=True)
def _work_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices on hardware work in this process, where the test is not about their worker."""
    if "worker" not in request.keywords:
        monkeypatch.setattr(worker, "ask", work.do)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of `tests.grid` answer when they are asked: the exchange, which waits as long as that took, need not."""
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(exchange, "time", clock)


@pytest.fixture(autouse=True)
def _speed_is_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device measures its speed, which takes a moment, where the test is not about that."""
    if "measures" not in request.keywords:
        monkeypatch.setattr(speed, "measure", lambda *seconds: 10e9)


@pytest.fixture(autouse=True)
def _quick_calls_of_the_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a disk, which no test cuts from its power, nor for the kernel to count shared pages."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    if "measures" not in request.keywords:
        monkeypatch.setattr(training_message, "own_bytes", lambda: 0)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[psutil.Process]]:
    """Workers forked from this process, which has loaded what they need; those that are left at the end are killed."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # imports what every worker would import by itself
    real = os.getppid
    workers: list[psutil.Process] = []

    def start(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(8)
            parent, number = os.getppid(), os.fork()
            if number == 0:
                try:
                    os.getppid = real  # tests pretend that workers belong to another process
                    worker.serve(listener, parent)
                finally:
                    os._exit(0)
        workers.append(psutil.Process(number))

    monkeypatch.setattr(worker, "_start", start)
    yield workers
    for process in workers:
        with suppress(psutil.NoSuchProcess):
            process.kill()
        with suppress(ChildProcessError):
            os.waitpid(process.pid, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With WILDFLOWER_NO_SKIPS set, as in CI, a skipped test fails: whatever it lacked is to be installed."""
    report = yield
    if report.skipped and os.environ.get("WILDFLOWER_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is not allowed here: {report.longrepr}"
    return report


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Stand-ins for the processes of runs, which write a run's journal at once."""
    made = Runs()
    monkeypatch.setattr("wildflower.launch.child.start", made.start)
    monkeypatch.setattr("wildflower.launch.child.load_for_forks", lambda: False)
    monkeypatch.setattr("wildflower.launch.sweeps.LOOK_SECONDS", 0.0)
    return made
