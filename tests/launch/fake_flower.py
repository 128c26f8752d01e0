"""Stands in for Flower's command in the tests of the runner: same arguments and answers, no federated learning.

The link is installed as `flwr`. What the run does is in $FAKE_FLOWER, and the processes
write their numbers into $FAKE_PIDS.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

HERE = Path(os.environ["FLWR_HOME"])
MODE = os.environ["FAKE_FLOWER"]


def note_pid(pid: int) -> None:
    with open(os.environ["FAKE_PIDS"], "a") as file:
        file.write(f"{pid}\n")


def run(arguments: list[str]) -> dict:
    if MODE == "bad app":
        return {"success": False, "error-message": "\nno such app"}
    (HERE / "submitted.json").write_text(json.dumps(arguments))
    if "FAKE_CONNECTION" in os.environ:
        Path(os.environ["FAKE_CONNECTION"]).write_text((HERE / "config.toml").read_text())
    return {"success": True, "run-id": "17"}


def log() -> None:
    note_pid(os.getpid())
    submitted = json.loads((HERE / "submitted.json").read_text())
    config = tomllib.loads(Path(submitted[submitted.index("--run-config") + 1]).read_text())
    run_dir = Path(config["output-dir"]) / config["run-name"]
    if MODE == "interrupt":
        (run_dir / "rounds.jsonl").write_text(os.environ["FAKE_ROUND"] + "\n")
        os.kill(os.getppid(), signal.SIGTERM if os.environ.get("FAKE_TERM") else signal.SIGINT)
        signal.pause()
    if MODE == "server dies":
        holding = "import fcntl, signal, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(flush=True)"
        command = [sys.executable, "-c", f"{holding}; signal.pause()", str(run_dir / "lock")]
        with (run_dir / "rounds.jsonl").open("w") as file:
            file.write(os.environ["FAKE_ROUND"] + "\n")
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        server.stdout.readline()
        note_pid(server.pid)
        Path(os.environ["FAKE_DIES"]).touch()
        signal.pause()
    if MODE == "superlink is full":  # the server ends in order, and Flower tells nobody
        lock = run_dir / "lock"
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (run_dir / "rounds.jsonl").write_text(os.environ["FAKE_ROUND"] + "\n")
            end = time.monotonic() + 20
            while not Path(os.environ["FAKE_SEEN"]).exists() and time.monotonic() < end:
                time.sleep(0.01)
            (run_dir / "summary.json").write_text(os.environ["FAKE_SUMMARY"])
            lock.unlink()
        if os.environ["FAKE_STREAM"] == "stays":
            signal.pause()
        return
    (run_dir / "submitted.json").write_text(json.dumps({"arguments": submitted, "config": config}))
    print("Loading project configuration...")
    print("\x1b[93mWARNING \x1b[0m:   Round 1: [one] device is gone")
    if MODE == "crash":
        print("Traceback (most recent call last):\n  File 'client.py', line 1\nKeyError: 'an old one'\n")
        print("ERROR :  again\nTraceback (most recent call last):")
        print("  File 'server.py', line 9, in main\n    run()\nValueError: no [bold] family\nINFO :  bye")
        return
    if MODE == "no progress":
        print("ERROR :  ServerApp\nTraceback (most recent call last):")
        print("  File 'server.py', line 9, in main\n    run()\napp.NoProgressError: nobody trained\n")
    (run_dir / "rounds.jsonl").write_text(os.environ["FAKE_ROUND"] + "\n")
    if MODE != "no summary":
        (run_dir / "summary.json").write_text(os.environ["FAKE_SUMMARY"])


def listing(run_id: str) -> dict:
    if MODE == "superlink is full":
        return {"success": False, "error-message": "Internal server error."}
    status, details = ("finished:failed", "it broke") if MODE == "crash" else ("finished:completed", "N/A")
    return {"success": True, "runs": [{"run-id": run_id, "status": status, "status-details": details}]}


if sys.argv[1] == "run":
    print(json.dumps(run(sys.argv[2:])))
elif sys.argv[1] == "log":
    log()
elif sys.argv[1] == "stop":
    Path(os.environ["FAKE_STOPPED"]).write_text(sys.argv[2])
    print(json.dumps({"success": True, "run-id": sys.argv[2]}))
elif sys.argv[1] == "list":
    print(json.dumps(listing(sys.argv[sys.argv.index("--run-id") + 1])))
