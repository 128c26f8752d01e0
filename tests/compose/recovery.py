"""What is seen of every fault, how many finished rounds are lost, and how long it takes until the run goes on.

One row of benchmarks/trust/README.md's table per fault (`python -m benchmarks.trust.faults` writes it), with processes
of this machine: a SuperLink with TLS and keys with nodes that are started again whenever they end, as systemd does.
Simulations are in simulations.py; gates, containers and links in faults.py.

Not part of `make test`, because most of their time is waiting: `make test-compose` names this file. Root fills disks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.compose.engine import wait_for
from tests.compose.watched_run import HINT, LONGEST_SECONDS, MB, Run, descendants, fill, quoted, small_disk
from tests.deployment import ROOT, Deployment, free_port, kill

NODES = 3
EXPERIMENT = f"""
task = "digits"
family = "vgg"
family-arguments = "block_channels = [2, 4, 32], exits = [0, 1, 2]"
strategy = "depthfl"
depthfl.alpha = 0.1  # devices keep corrections from one round to the next
learning-rate = 0.001  # so small that a hundred rounds do not diverge
fleet = ""
devices = {NODES}
devices-per-round = {NODES}
rounds = 1000
local-steps = 20
examples-per-device = 24
evaluate-every = 1000
deadline-seconds = 200
seed = 3
run-name = "one"
"""
STARTER = "client_app/starter.py"


@contextmanager
def one_more(deployment: Deployment, device: int, of: int, **options: Any) -> Iterator[None]:
    """A further node for the time of a `with` block."""
    process = deployment.start_node(device, of=of, **options)
    try:
        yield
    finally:
        kill(process)


@dataclass
class Nodes:
    """A SuperLink, three nodes that are started again whenever they end, and a run over them that has two rounds."""

    deployment: Deployment
    run: Run
    superlink: subprocess.Popen[bytes]
    shells: list[subprocess.Popen[bytes]]
    runs: Path

    def process(self, node: int, words: str, seconds: float = LONGEST_SECONDS) -> psutil.Process:
        """A process of a node by words in its command, as soon as there is one."""
        found: list[psutil.Process] = wait_for(
            f"{words} of node {node}", lambda: descendants(self.shells[node].pid, words), seconds, 0.02
        )
        return found[0]

    def worker(self, node: int) -> psutil.Process:
        """The worker of a node, which is a session of its own, by the state folder that it keeps."""
        starter = self.process(node, STARTER).pid
        workers = [
            p for p in psutil.process_iter(["cmdline"]) if "wildflower.client_app.worker" in (p.info["cmdline"] or [])
        ]
        # While it works, so does a fork of it, which has its command line.
        return min((p for p in workers if p.info["cmdline"][-1] == str(starter)), key=psutil.Process.create_time)

    def server(self) -> psutil.Process:
        """The process of the run's server."""
        [found] = descendants(self.superlink.pid, "flwr-serverapp")
        return found

    def log_of(self, node: str) -> str:
        """What a node has printed."""
        return (self.deployment.folder / f"{node}.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "experiment.toml").write_text(EXPERIMENT)
    deployment = Deployment(folder / "flower", key_count=NODES + 1)
    with ExitStack() as disks:
        runs = disks.enter_context(small_disk(folder / "runs", 64 * MB))
        disks.enter_context(small_disk(folder / "flower" / "node-1", 4 * MB))
        disks.enter_context(small_disk(deployment.database.parent, 64 * MB))
        try:
            superlink = deployment.start_superlink()
            deployment.enroll()
            last = hostile(folder)
            shells = [
                deployment.start_node(device, of=NODES, again=True, environment=last if device == NODES - 1 else {})
                for device in range(NODES)
            ]
            run = Run(folder, deployment, runs).start()
            try:
                run.wait_for_round(2)
                yield Nodes(deployment, run, superlink, shells, runs)
            finally:
                run.stop()
        finally:
            deployment.close()


# What a node's Python does before everything else: it changes a module as soon as that is imported.
SITE = """
import datetime, importlib.abc, importlib.util, os, sys, time
{first}
class Changed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            honest = module.{function}
            def changed(*arguments):
                {change}
            module.{function} = changed
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Changed())
"""
LIE = """if len(arguments) > 1 and arguments[1] and os.path.exists({flag!r}):
                    shapes = "[" + ",".join(["[4611686018427387904,4611686018427387904]"] * 100000) + "]"
                    text = arguments[0].replace('"facts":{{}}', '"facts":{{}},"index":' + shapes, 1)
                    return honest(text, *arguments[1:])
                return honest(*arguments)"""


def hostile(folder: Path) -> dict[str, str]:
    """The environment of a node whose device sends huge shapes beside its update while the file "lies" is there."""
    change = LIE.format(flag=str(folder / "lies"))
    return site(folder / "hostile", module="wildflower.messages.flower_records", function="make_records", change=change)


def wrong_clock(folder: Path, shift_seconds: float) -> dict[str, str]:
    """The environment of a node whose clock is so far ahead."""
    first = f"real = time.time\ntime.time = lambda: real() + {shift_seconds}"
    signs = "flwr.supernode.node_auth_http_interceptor"
    change = f"return honest(*arguments) + datetime.timedelta(seconds={shift_seconds})"
    return site(folder / f"clock{shift_seconds}", first=first, module=signs, function="now", change=change)


def site(folder: Path, *, module: str, function: str, change: str, first: str = "") -> dict[str, str]:
    """The environment of a Python in which a function of a module is another one."""
    folder.mkdir()
    text = SITE.format(first=first, module=module, function=function, change=change)
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def outcomes(run: Run, number: int) -> dict[int, str]:
    """What became of every device in a round."""
    return {d.device: d.outcome for d in run.devices() if d.round == number}


def devices_in(run: Run, after: int) -> set[str]:
    """The outcomes behind a round other than "trained", each once, without what Flower adds."""
    return {d.outcome.partition(": Error")[0] for d in run.devices() if d.round > after and d.outcome != "trained"}


def test_the_processes_of_a_nodes_work_are_killed(nodes, note):
    """Of two nodes in one round: the process that Flower starts for a message, and the worker that has the data."""
    run, before = nodes.run, nodes.run.rounds()
    nodes.process(0, "flwr-clientapp").kill()
    nodes.worker(1).kill()
    killed = time.monotonic()
    hit = len(before) + 1
    for device, who in enumerate(("ClientApp, the process of one message, of a node", "worker of a node")):
        run.wait_for_device(device, len(before), True)
        seconds = time.monotonic() - killed
        outcome = outcomes(run, hit)[device].partition(": Error")[0]
        seen = "nothing, another one does the work" if outcome == "trained" else f"`{outcome}` in that round"
        note(f"kill -9: {who}", seen, seconds, before, run.rounds())


def test_a_supernode_is_killed(nodes, note):
    """It is started again after 15 s, as on a board."""
    run, before = nodes.run, nodes.run.rounds()
    nodes.process(1, "flwr-clientapp")
    nodes.process(1, "wildflower-node").kill()
    killed = time.monotonic()
    lost = run.wait_for_device(1, len(before), False)
    assert {o for d, o in outcomes(run, lost.round).items() if d != 1} == {"trained"}
    back = run.wait_for_device(1, lost.round, True)
    assert back.node == lost.node
    seen = f"`{lost.outcome.partition(': Error')[0]}` in that round, which goes on with the others"
    note("kill -9: SuperNode", seen, time.monotonic() - killed, before, run.rounds())


def test_the_starter_of_a_node_is_killed(nodes, note):
    """Without it no work of the node's is ever started: the node ends in order, and is started again."""
    run, before = nodes.run, nodes.run.rounds()
    starts = nodes.log_of("node-1").count("Starting Flower SuperNode")
    nodes.process(1, STARTER).kill()
    killed = time.monotonic()
    told = "the process that starts this node's work has ended"
    wait_for("the node says so", lambda: told in nodes.log_of("node-1"), LONGEST_SECONDS)
    wait_for(
        "it starts again", lambda: nodes.log_of("node-1").count("Starting Flower SuperNode") > starts, LONGEST_SECONDS
    )
    run.wait_for_device(1, len(run.rounds()), True)
    seen = f"the node says {quoted(nodes.log_of('node-1'), told)}; rounds go on without it until it is back"
    note("kill -9: a node's SuperExec", seen, time.monotonic() - killed, before, run.rounds())


def test_nodes_are_paused(nodes, note):
    """One for 20 s, and in the same round another one for 100 s."""
    run, before = nodes.run, nodes.run.rounds()
    brief, long = (psutil.Process(nodes.shells[node].pid).children(recursive=True) for node in (0, 1))
    every(brief + long, "suspend")
    time.sleep(20)
    every(brief, "resume")
    back = time.monotonic()
    run.wait_for_device(0, len(before), True)
    note("pause: a node for 20 s", "nothing", time.monotonic() - back, before, run.rounds())
    time.sleep(max(0.0, 80 - (time.monotonic() - back)))
    every(long, "resume")
    back = time.monotonic()
    lost = run.wait_for_device(1, len(before), False)
    run.wait_for_device(1, lost.round, True)
    seen = f"`{lost.outcome.partition(': Error')[0]}` in that round, which goes on with the others"
    note("pause: a node for 100 s", seen, time.monotonic() - back, before, run.rounds())
    assert devices_in(run, len(before)) <= {lost.outcome.partition(": Error")[0]}


def every(processes: Sequence[psutil.Process], what: str) -> None:
    """Suspend or resume processes, of which some may have ended."""
    for process in processes:
        with suppress(psutil.Error):
            getattr(process, what)()


def test_the_disk_of_a_node_fills(nodes, note):
    run, before = nodes.run, nodes.run.rounds()
    ballast = fill(nodes.deployment.folder / "node-1")
    lost = run.wait_for_device(1, len(before), False)
    assert "No space left on device" in lost.outcome
    ballast.unlink()
    freed = time.monotonic()
    run.wait_for_device(1, lost.round, True)
    note("full disk: a node's state folder", f"`{lost.outcome}`", time.monotonic() - freed, before, run.rounds())


def test_a_node_sends_hostile_replies(nodes, note):
    """Four megabytes of huge shapes in place of an update, until the node is quarantined and released by hand."""
    run, before = nodes.run, nodes.run.rounds()
    flag = run.folder / "lies"
    flag.touch()
    lost = run.wait_for_device(2, len(before), False)
    assert lost.outcome.startswith("refused: ")
    run.wait_for_round(lost.round)  # devices' lines are written before those of their round
    assert run.rounds()[lost.round - 1].server_seconds["absorb"] < 1
    wait_for(
        "the node is quarantined", lambda: f"Node {lost.node} (node-2) is quarantined" in run.log(), LONGEST_SECONDS
    )
    flag.unlink()
    refused = [d.round for d in run.devices() if d.device == 2 and d.outcome.startswith("refused")]
    assert len(refused) == 3
    assert {o for n in refused for d, o in outcomes(run, n).items() if d != 2} == {"trained"}
    command = [sys.executable, "-m", "wildflower", "fleet", str(run.dir), *nodes.deployment.connection]
    wide = {**os.environ, "COLUMNS": "300"}
    listed = subprocess.run(command, capture_output=True, text=True, env=wide).stdout
    assert "quarantined" in listed, listed
    subprocess.run([*command, "--release", str(lost.node)], check=True, capture_output=True)
    released = time.monotonic()
    run.wait_for_device(2, len(run.rounds()), True)
    seen = f"`{lost.outcome}`, after three of them the node is quarantined, until it is released by hand"
    note("hostile reply: 4 MB of huge shapes", seen, time.monotonic() - released, before, run.rounds())


def test_a_key_is_copied(nodes, note):
    """A second board with the key of a node that is there, and with its number."""
    run, before = nodes.run, nodes.run.rounds()
    options: dict[str, Any] = {"again": True, "log": "copy.log", "state-dir": f"{run.folder}/copy"}
    with one_more(nodes.deployment, 0, NODES, **options):
        told = "the server refuses this node's key"
        wait_for("the copy is refused", lambda: told in nodes.log_of("copy"), LONGEST_SECONDS)
        seconds = run.next_round()
        assert devices_in(run, len(before)) == set()
    seen = "the second board says that its key is refused, as long as the first is there, which does not notice"
    note("copied key: a second board while the first is there", seen, seconds, before, run.rounds())


@pytest.mark.parametrize(("shift", "words"), [(30, "s ahead of the server's"), (-400, "s behind the server's")])
def test_a_clock_is_wrong(shift, words, nodes, note):
    """Of a fourth node, which takes part as soon as its clock is right."""
    before, log = nodes.run.rounds(), f"clock{shift}"
    environment = wrong_clock(nodes.run.folder, shift)
    options: dict[str, Any] = {"again": True, "environment": environment, "log": f"{log}.log"}
    with one_more(nodes.deployment, NODES, NODES + 1, **options):
        wait_for("the clock is told", lambda: words in nodes.log_of(log), LONGEST_SECONDS)
        wait_for(
            "Flower ends the node", lambda: "SuperNode terminated gracefully" in nodes.log_of(log), LONGEST_SECONDS
        )
    assert "SuperNode ID" not in nodes.log_of(log)  # it was never taken
    seen = f"the node says {quoted(nodes.log_of(log), 'This machine')}, and ends"
    mended = time.monotonic()
    # Where the node of another clock was taken before, its lease has to end.
    with one_more(nodes.deployment, NODES, NODES + 1, again=True, log=f"{log}-mended.log"):
        wait_for("it is taken", lambda: "SuperNode ID" in nodes.log_of(f"{log}-mended"), LONGEST_SECONDS)
        seconds = time.monotonic() - mended
    nodes.run.next_round()
    note(f"wrong clock: {shift:+d} s", seen, seconds, before, nodes.run.rounds())


@pytest.mark.parametrize("who", ["server", "SuperLink"])
def test_the_servers_side_is_paused(who, nodes, note):
    run, before = nodes.run, nodes.run.rounds()
    process = nodes.server() if who == "server" else psutil.Process(nodes.superlink.pid)
    process.suspend()
    time.sleep(20)
    process.resume()
    resumed = time.monotonic()
    run.next_round()
    seconds = time.monotonic() - resumed
    assert devices_in(run, len(before)) == set()
    note(f"pause: the {who} for 20 s", "nothing", seconds, before, run.rounds())


def test_the_runner_is_killed(nodes, note):
    """`wildflower run` only follows a run of real nodes: killed, it leaves the run as it is."""
    run, before = nodes.run, nodes.run.rounds()
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    run.process = None
    seconds = run.next_round()
    run.start("resume=true")
    said = run.ends(1)
    run.process = None
    run.next_round()
    seen = f"the run goes on; the same command then says {quoted(said, 'Error: ').replace(str(nodes.runs), 'RUNS')}"
    note("kill -9: `wildflower run` of real nodes", seen, seconds, before, run.rounds())


def test_the_server_is_killed(nodes, note):
    """First the run that nobody follows any more, then one that is followed."""
    run = nodes.run
    nodes.server().kill()
    run.start("resume=true").next_round()
    before = run.rounds()
    nodes.process(1, "flwr-clientapp")
    nodes.server().kill()
    killed = time.monotonic()
    said = run.ends(1)
    told = time.monotonic() - killed
    assert told < 10
    assert HINT in said
    seconds = run.start("resume=true").next_round()
    seen = f"after {told:.1f} s {quoted(said, 'The run failed.')}, and how to resume"
    note("kill -9: the server's process of real nodes", seen, seconds, before, run.rounds())


def test_the_disk_of_the_servers_runs_fills(nodes, note):
    run, before = nodes.run, nodes.run.rounds()
    ballast = fill(nodes.runs)
    said = run.ends(1)
    assert HINT in said
    ballast.unlink()
    seconds = run.start("resume=true").next_round()
    seen = f"{quoted(said, 'The disk of').replace(str(nodes.runs), 'RUNS')}, and how to resume"
    note("full disk: the run's folder, with real nodes", seen, seconds, before, run.rounds())


def test_the_disk_of_the_superlinks_database_fills(nodes, note):
    """The run ends; with room, and the SuperLink started anew, it goes on, also with the nodes that have stayed."""
    run, before = nodes.run, nodes.run.rounds()
    nodes.process(1, "flwr-clientapp")
    ballast = fill(nodes.deployment.database.parent)
    filled = time.monotonic()
    said = run.ends(1)
    told = time.monotonic() - filled
    assert told < 40
    assert HINT in said
    ballast.unlink()
    kill(nodes.superlink)
    nodes.superlink = nodes.deployment.start_superlink()
    started, number = time.monotonic(), len(run.rounds())
    run.start("resume=true").next_round()
    seconds = time.monotonic() - started
    for device in range(NODES):
        run.wait_for_device(device, number, True)
    words = quoted(said, "The disk of the SuperLink").replace(str(nodes.deployment.database), "STATE")
    note(
        "full disk: the SuperLink's database",
        f"after {told:.0f} s {words}, and how to resume",
        seconds,
        before,
        run.rounds(),
    )


def test_the_superlink_is_killed(nodes, note):
    run, before = nodes.run, nodes.run.rounds()
    kill(nodes.superlink)
    killed = time.monotonic()
    said = run.ends(1)
    told = time.monotonic() - killed
    assert HINT in said
    nodes.superlink = nodes.deployment.start_superlink()
    seconds = run.start("resume=true").next_round()
    seen = f"after {told:.1f} s {quoted(said, 'The run failed.')}, and how to resume"
    note("kill -9: SuperLink", seen, seconds, before, run.rounds())


# The bandwidth service ------------------------------------------------------------------------------------------------


def test_the_bandwidth_service_is_killed(tmp_path, note):
    """A node that has measured its links keeps what it knows; one that has not knows nothing, and says why."""
    token = tmp_path / "token"
    token.write_text("a" * 64)
    address = f"127.0.0.1:{free_port()}"
    service = ["bandwidth-server", "--token-file", str(token), "--insecure", "--address", address]
    words = f'bandwidth-address="{address}" bandwidth-insecure=true bandwidth-token-file="{token}"'

    def serve() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", "wildflower", *service], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert b"Bandwidth service at" in process.stdout.readline()
        return process

    def report(state: str) -> dict[str, Any]:
        probe = ["probe", "--json", "--state-dir", str(tmp_path / state), "--node-config", words]
        done = subprocess.run([sys.executable, "-m", "wildflower", *probe], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    process = serve()
    try:
        before = report("known")
        assert (before["links_from"], before["links_problem"]) == ("probe", None)
        process.kill()
        process.wait()
        known, new = report("known"), report("new")
        assert known["down_mbit_per_s"] == before["down_mbit_per_s"]
        assert (new["links_from"], new["down_mbit_per_s"]) == (None, None)
        assert new["links_problem"]
        process = serve()
        started = time.monotonic()
        assert report("known")["links_problem"] is None
        why = quoted(new["links_problem"], "did not answer")
        seen = f"nodes keep the links that they measured; one that has measured none reports {why}"
        note("kill -9: bandwidth service", seen, time.monotonic() - started)
    finally:
        process.kill()
        process.wait()
