"""A Docker engine, images and a compose project for the container tests; everything is gone when they end.

An engine that answers is used (DOCKER_HOST), otherwise one is started: as root, with its data in a folder of ours, and
stopped by its process id. Images are built by deploy/build-without-registry, because a test machine may reach no image
registry: on BASE_IMAGE, or on a Debian base made by debootstrap. WILDFLOWER_IMAGES takes images that exist.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
PROJECT, GATE_PORT, BANDWIDTH_PORT = "wildflower-test", 18080, 19190
NETWORK = f"{PROJECT}_devices"
NODES = ("node-0", "node-1", "node-2", "node-3")
# Runs inside a node and ends as soon as it trains: `child` is then the process that does, the one of the worker's that
# has a memory limit.
WAIT_FOR_TRAINING = """
import os, resource, time

def trains(pid):
    try:
        named = b"wildflower.client_app.worker" in open(f"/proc/{pid}/cmdline", "rb").read()
        return named and resource.prlimit(pid, resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    except OSError:
        return False

end = time.monotonic() + 200
while not (children := [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if trains(pid)]):
    if time.monotonic() > end:
        raise SystemExit("nothing was trained within 200 s")
    time.sleep(0.05)
child = children[0]
"""


def run(*command: str | Path, timeout: float = 600.0, check: bool = True, **options: Any) -> str:
    """The output of a command; AssertionError with all it said when it failed."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=options.pop("cwd", ROOT),
        **options,
    )
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def wait_for(what: str, look: Callable[[], Any], seconds: float, every: float = 0.2) -> Any:
    """What `look` gives as soon as it is true; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(every)
    raise AssertionError(f"{what}: not within {seconds:g} s")


def answers() -> bool:
    """Whether there is a Docker engine."""
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


@contextmanager
def engine(folder: Path) -> Iterator[None]:
    """A Docker engine for the time of a `with` block, named by DOCKER_HOST."""
    if answers():
        yield
        return
    socket = folder / "docker.sock"
    before = os.environ.get("DOCKER_HOST")
    with (folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                *("dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec"),
                *("--pidfile", folder / "pid", "--host", f"unix://{socket}"),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.environ["DOCKER_HOST"] = f"unix://{socket}"
    try:
        wait_for(
            f"dockerd answers ({folder / 'dockerd.log'})",
            lambda: (
                daemon.poll() is not None or subprocess.run(["docker", "info"], capture_output=True).returncode == 0
            ),
            START_SECONDS,
        )
        assert daemon.poll() is None, (folder / "dockerd.log").read_text()[-2000:]
        yield
    finally:
        daemon.terminate()
        daemon.wait(30)
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before
        shutil.rmtree(folder / "data", ignore_errors=True)


def build_images(folder: Path) -> str:
    """Build all images, by the command for machines without a registry; returns the prefix of their names."""
    if prefix := os.environ.get("WILDFLOWER_IMAGES"):
        return prefix
    base = ("--base", os.environ["BASE_IMAGE"]) if "BASE_IMAGE" in os.environ else ()
    command = working_copy(folder / "context") / "deploy/build-without-registry"
    run(command, "--images", PROJECT, *base, env=os.environ | {"PYTHON": sys.executable}, timeout=3600)
    return PROJECT


def build_arm64_device(folder: Path) -> str:
    """Build the device image for arm64 under emulation; returns its name.

    pip runs inside it, because no pip of another processor finds what it would find; torch is the one that the
    Jetsons' script takes.
    """
    if image := os.environ.get("WILDFLOWER_ARM64_IMAGE"):
        return image
    context = working_copy(folder / "context-arm64")
    base = os.environ.get("BASE_IMAGE_ARM64")
    if base is None:
        base = f"{PROJECT}/base-arm64"
        make = context / "deploy/build-without-registry"
        run(make, "--images", PROJECT, "--only-base", "--arch", "arm64", timeout=3600)
    (torch,) = set(re.findall(r"TORCH_VERSION=[0-9.]+", (ROOT / "deploy/jetson/install").read_text()))
    options = [part for argument in (f"BASE_IMAGE={base}", torch) for part in ("--build-arg", argument)]
    options += ["--network", "host", "--file", str(context / "deploy/Dockerfile"), "--target", "device"]
    tag = f"{PROJECT}-arm64-device"
    run("docker", "build", *options, "--tag", tag, context, env=os.environ | {"DOCKER_BUILDKIT": "1"}, timeout=3600)
    return tag


def working_copy(folder: Path) -> Path:
    """A copy of what git would commit: what docker builds from, without what else lies in the checkout."""
    folder.mkdir()
    for name in run("git", "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)  # wildflower/ links to its rooms
    return folder


def compose_command() -> list[str]:
    """Compose 2 where Docker has it, else Compose 1.29."""
    v2 = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return ["docker", "compose"] if v2 else ["docker-compose"]


def fill(volume: str, folder: Path, image: str) -> None:
    """Make a volume whose content is that of a folder, for the user of our images."""
    copy = "rm -rf /data/* && cp -r /from/. /data && chown -R 10001:10001 /data"
    mounts = ("--volume", f"{volume}:/data", "--volume", f"{folder}:/from:ro")
    run("docker", "run", "--rm", "--user", "0", "--network", "none", *mounts, image, "sh", "-c", copy)


class Deployment:
    """A running compose project of this repository."""

    def __init__(
        self,
        folder: Path,
        images: str,
        other: Mapping[str, Mapping[str, Any]] | None = None,
        volumes: Sequence[str] = (),
    ) -> None:
        """`images` is the prefix of the images' names; `other` has what is otherwise in single services.

        volumes: further ones, which `other` may mount.
        """
        self.secrets = folder / "secrets"
        self.environment = os.environ | {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "WILDFLOWER_IMAGES": images,
            "WILDFLOWER_SECRETS": str(self.secrets),
            "WILDFLOWER_PORT": str(GATE_PORT),
            "WILDFLOWER_BANDWIDTH_PORT": str(BANDWIDTH_PORT),
        }
        self._compose = compose_command()
        if other:
            override = folder / "override.yml"
            content = {"services": other} | ({"volumes": {name: {} for name in volumes}} if volumes else {})
            override.write_text(json.dumps(content))  # which YAML can be
            self._compose += ["--file", str(ROOT / "docker-compose.yml"), "--file", str(override)]
        self.images = images
        self._folder = folder

    def up(self, seconds: float = 240) -> None:
        """Make secrets, start everything, wait until all four nodes are connected."""
        if not self.secrets.exists():
            run(ROOT / "deploy/certs", "--out", self.secrets)
        self.compose("up", "--detach")
        wait_for("all nodes are healthy", lambda: self.healthy() == 4, seconds)

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        # Nobody is given time to end well: what matters was copied, and volumes go too.
        options = ("--volumes", "--remove-orphans", "--timeout", "1")
        self.compose("--profile", "run", "--profile", "shaping", "down", *options, check=False)

    def compose(self, *arguments: str, check: bool = True, timeout: float = 600.0) -> str:
        """Run a compose command."""
        return run(*self._compose, *arguments, env=self.environment, check=check, timeout=timeout)

    def container(self, service: str) -> str:
        """The id of a service's newest container, stopped ones included."""
        found = self._newest(service)
        assert found, f"{service} has no container"
        return found

    def _newest(self, service: str) -> str | None:
        # Docker itself answers sooner than compose, and some faults have to come within seconds.
        labels = (f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}")
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        found = run("docker", "ps", "--all", "--quiet", "--no-trunc", *filters).split()
        return found[0] if found else None

    def inspect(self, service: str) -> dict[str, Any]:
        """What Docker says of a service's container."""
        (found,) = json.loads(run("docker", "inspect", self.container(service)))
        return dict(found)

    def state(self, service: str) -> dict[str, Any]:
        """Of what Docker says of a service's container: State and RestartCount."""
        found = self.inspect(service)
        return found["State"] | {"RestartCount": found["RestartCount"]}

    def healthy(self) -> int:
        """How many nodes are healthy."""
        return sum(self.state(node).get("Health", {}).get("Status") == "healthy" for node in NODES)

    def start_run(self, name: str, *settings: str, experiment: str = "digits") -> subprocess.Popen[bytes]:
        """Start an experiment; what it prints goes to a file of its name."""
        overrides = [part for setting in (f"run-name={name}", *settings) for part in ("--set", setting)]
        command = [*self._compose, "run", "--rm", "-T", "runner", f"/app/benchmarks/deployment/{experiment}.toml"]
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([*command, *overrides], cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def when_training(self, node: str, then: str = "") -> str:
        """Wait until a node trains, run further Python in its container, and return what that printed."""
        return run("docker", "exec", self.container(node), "python3", "-c", WAIT_FOR_TRAINING + then)

    def stop_run(self, process: subprocess.Popen[bytes], name: str) -> None:
        """End a run before its last round, as Ctrl-C does."""
        run("docker", "kill", "--signal", "TERM", self.container("runner"))
        process.wait(60)
        assert "Stopped" in self.output(name), self.output(name)[-3000:]

    def keep_logs_and_runs(self) -> None:
        """Copy what services said, and the folder of runs out of its volume, for whoever looks into a failed test."""
        for service in ("superlink", "gate", "bandwidth", *NODES):
            if container := self._newest(service):
                with (self._folder / f"{service}.log").open("wb") as log:
                    subprocess.run(["docker", "logs", "--timestamps", container], stdout=log, stderr=log, check=False)
        if superlink := self._newest("superlink"):
            run("docker", "cp", f"{superlink}:/runs", self._folder / "runs", check=False)

    def finish(self, process: subprocess.Popen[bytes], name: str, seconds: float) -> None:
        """Wait until a run has ended, and well."""
        code = process.wait(seconds)
        assert code == 0, (self._folder / f"{name}.log").read_text()[-3000:]

    def output(self, name: str) -> str:
        """What the runner printed."""
        return (self._folder / f"{name}.log").read_text()

    def read(self, path: str) -> bytes:
        """A file of the volume of runs, b"" if it is not there."""
        done = subprocess.run(
            ["docker", "exec", self.container("superlink"), "cat", f"/runs/{path}"], capture_output=True
        )
        return done.stdout if done.returncode == 0 else b""

    def journal(self, name: str, kind: str = "rounds") -> list[dict[str, Any]]:
        """The lines of a run's journal: rounds or devices."""
        return [json.loads(line) for line in self.read(f"{name}/{kind}.jsonl").splitlines()]
