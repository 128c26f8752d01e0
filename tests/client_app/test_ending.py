import signal
import subprocess
import sys

import pytest

# A handler that waits for a lock which the interrupted code holds, as Flower's may.
HANGS = """
import signal, sys, threading, time
from wildflower.client_app import ending

sys.argv[0] = "/opt/venv/bin/flwr-clientapp"
assert ending.is_messenger()
ending.LEAVE_SECONDS = ending.ANSWERED_SECONDS = 1
lock = threading.Lock()
signal.signal(signal.SIGINT, lambda *_: lock.acquire())
"""
STOPPED = """
with ending.ends_for_sure(), lock:
    threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,)).start()
    while True:
        time.sleep(0.01)
"""
ANSWERED = """
with ending.ends_for_sure():
    lock.acquire()
lock.acquire()
"""
FAILED = """
try:
    with ending.ends_for_sure():
        raise RuntimeError("the work failed")
except RuntimeError:
    lock.acquire()
    lock.acquire()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("then", [STOPPED, ANSWERED, FAILED], ids=["stopped", "answered", "failed"])
def test_a_process_that_hangs_is_ended(then):
    done = subprocess.run([sys.executable, "-c", HANGS + then], timeout=60)
    assert done.returncode == -signal.SIGALRM


def test_a_handler_that_ends_the_process_does_so_as_before():
    ends = """
ending.ANSWERED_SECONDS = 300
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
try:
    with ending.ends_for_sure():
        signal.raise_signal(signal.SIGINT)
finally:
    print(signal.alarm(0))
"""
    done = subprocess.run([sys.executable, "-c", HANGS + ends], timeout=60, capture_output=True)
    assert done.returncode == 7
    assert int(done.stdout) == 1  # LEAVE_SECONDS are not made longer on the way out


def test_another_process_is_none_of_a_message():
    from wildflower.client_app import ending

    assert not ending.is_messenger()
    with ending.ends_for_sure():
        pass
    assert signal.alarm(0) == 0
