"""`wildflower run`: one experiment from start to report, watched through its journal."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from wildflower.client_app.signed_app import SIGNATURE, app_digest
from wildflower.launch.app_log import last_traceback, log_since, warnings_text
from wildflower.launch.before import (
    Deployment,
    check_buildable,
    check_disk,
    check_free,
    check_same_files,
    steps_of_start,
)
from wildflower.launch.bundle import make_bundle
from wildflower.launch.experiment_file import SettingsError, beside, place, resolve, write_toml
from wildflower.launch.following import follow, follow_process
from wildflower.launch.forked_server import local_server, prepare_to_fork, told_later
from wildflower.launch.showing import progress, summary_table
from wildflower.launch.starting import loading_modules
from wildflower.launch.superlink import FlowerError, SuperLink, connected, stop_signals_interrupt
from wildflower.launch.terminal import say
from wildflower.plugins.beside import APP
from wildflower.plugins.extras import MissingExtraError
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference
from wildflower.server_app.resuming import check_folder
from wildflower.server_app.run_folder import COMMAND_LOCK, JournalError, alone_in, read_rounds, read_summary
from wildflower.server_app.summary import global_model
from wildflower.server_app.units import bytes_text, counted

if TYPE_CHECKING:
    from wildflower.client_app.simulation import ForkServer
    from wildflower.rounds.hooks import RoundHook
    from wildflower.server_app.config import RunConfig

_INCLUDE = "fab-include = ["


def sign(app: Path, key_file: Path) -> None:
    """Sign the files of an app's folder, as `make_bundle` makes it, with an Ed25519 key of OpenSSH's.

    Raises SettingsError where it is none.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.cli.build import build_fab_from_disk

    with raised_as(SettingsError, f"--sign {key_file}: ", (OSError, ValueError, TypeError, UnsupportedAlgorithm)):
        key = load_ssh_private_key(key_file.read_bytes(), None)
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"--sign {key_file}: expected an Ed25519 key, as deploy/certs makes it: app.key")
    pyproject = app / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace(_INCLUDE, f'{_INCLUDE}\n    "{SIGNATURE}",', 1), encoding="utf-8")
    file = app / SIGNATURE
    file.write_text("", encoding="utf-8")
    signature = base64.b64encode(key.sign(app_digest(build_fab_from_disk(app)))).decode()
    file.write_text(f'signature = "{signature}"\n', encoding="utf-8")


INTERRUPTED = 130
FULL_DISK_BYTES = 10**6


def run_experiment(
    experiment: Path,
    overrides: Sequence[str],
    app_dir: Path | None,
    console: Console,
    deployment: Deployment | None = None,
    hooks: Sequence[RoundHook] = (),
    shared: ForkServer | None = None,
) -> int:
    """Run an experiment and tell about it on `console`; returns the exit code: 0 only if the run really finished.

    Devices are simulated here, or those of a `deployment`, which writes the run's folder where we read it: this command
    and its SuperLink must see the same output-dir. `hooks` are of this process, from which the run is forked;
    `shared` forks workers that it shares with other runs.
    """
    try:
        with stop_signals_interrupt(), beside(experiment) as modules, ExitStack() as held:
            return _run(experiment, overrides, app_dir, console, deployment, modules, held, hooks, shared)
    except (SettingsError, MissingExtraError, JournalError, FlowerError, OSError) as error:
        say(console, str(error), "Error: ", "bold red")
        return 1
    except KeyboardInterrupt:
        console.print("[yellow]Stopped, and everything that was started with it.[/]")
        return INTERRUPTED


def _run(
    experiment: Path,
    overrides: Sequence[str],
    app_dir: Path | None,
    console: Console,
    deployment: Deployment | None,
    modules: Mapping[str, Path],
    held: ExitStack,
    hooks: Sequence[RoundHook],
    shared: ForkServer | None,
) -> int:
    with loading_modules():
        import wildflower.server_app.config  # noqa: F401  torch above all

    config, run_dir = place(resolve(experiment, overrides).config, Path.cwd(), datetime.now())
    app_dir = _code_here(app_dir) if deployment is None else find_app(app_dir)
    for check in steps_of_start(config, run_dir, deployment):
        check()
    if deployment is None:
        prepare_to_fork()
    with told_later() as said:
        built = check_buildable(config, hooks) if config.fleet else None
    if config.resume:
        check_same_files(run_dir, config, built[0] if built else None)
    warnings = list(check_disk(built[0], config, run_dir)) if built else []
    # Another command may have begun the same run, or even ended it, while this one was built.
    held.enter_context(alone_in(run_dir, COMMAND_LOCK))
    check_folder(run_dir, config.resume)
    check_free(run_dir)
    # What was found while the run was built, such as first weights that are not in the file, before its rounds.
    ignored = config.ignored_text()
    warnings += [*([ignored] if ignored else []), *(r.getMessage() for r in said if r.levelno >= WARNING)]
    _announce(console, config, deployment, warnings)
    earlier = len(read_rounds(run_dir))
    named = partial(global_model, run_dir, {"strategy": config.strategy})
    shown = partial(progress, console, config.rounds, earlier, named)
    app_log = run_dir / "app.log"
    app_log_start = app_log.stat().st_size if app_log.exists() else 0
    try:
        if deployment is None:
            assert built is not None
            with local_server(config, built, said, app_log, shared) as server, shown() as show:
                failure = follow_process(server, run_dir, show)
        else:
            with _submitted(config, app_dir, modules, deployment) as (flower, run_id), shown() as show:
                failure = follow(flower, run_id, run_dir, app_log, show, app_log_start)
    except (KeyboardInterrupt, FlowerError):
        print_resume_hint(run_dir, config, console)
        raise
    log = log_since(app_log, app_log_start)
    if told := warnings_text(log, app_log, already=warnings):
        say(console, told, "Warning: ", "yellow")
    summary = read_summary(run_dir)
    if failure is None and (summary is None or summary.status != "finished"):
        failure = (
            f"{'Flower' if deployment else 'Its server'} says that the run finished, but its summary.json does not"
        )
    if failure is not None:
        own = summary.error if summary else None
        reason = last_traceback(log, app_dir, modules) or own or failure
        # What the run says of itself in words, which is one line, needs no frames and is said once.
        if own and "\n" not in own and reason.endswith(own):
            reason = failure = own
        say(console, failure, "The run failed. ", "bold red")
        for text in ("" if reason == failure else reason, full_disk_text(run_dir), f"Logs: {app_log}"):
            if text:
                say(console, text)
        # What a run says in words before its first round or after its last one would come again. Some of it says how to
        # go on.
        in_words = own is not None and "\n" not in own
        comes_again = in_words and len(read_rounds(run_dir)) in (earlier, config.rounds)
        if not comes_again and "resume=true" not in (own or ""):
            print_resume_hint(run_dir, config, console)
        return 1
    assert summary is not None
    console.print(summary_table(summary, virtual_clock=bool(config.fleet), whole=named()))
    say(console, f"Report: {run_dir / 'report.html'}")
    return 0


def _announce(console: Console, config: RunConfig, deployment: Deployment | None, warnings: Iterable[str]) -> None:
    """Say what begins, and what a person should know before."""
    where = [f"{config.workers} workers"] if config.fleet else []
    where += [f"at {deployment.address}"] if deployment else []
    say(
        console,
        f": {config.strategy} on {config.task}, {counted(config.rounds, 'round')}, "
        f"{config.devices_per_round} of {config.devices} devices per round, {' '.join(where)}",
        config.run_name,
        "bold",
    )
    for warning in dict.fromkeys(warnings):
        say(console, warning, "Warning: ", "yellow")


@contextmanager
def _submitted(
    config: RunConfig, app_dir: Path, modules: Mapping[str, Path], deployment: Deployment
) -> Iterator[tuple[SuperLink, str]]:
    """Hand a run to the SuperLink of a deployment, for the time of a `with` block."""
    with connected(deployment.address, deployment.root_certificates) as flower:
        config_file = flower.folder / "config.toml"
        config_file.write_text(write_toml(config.to_dict()), encoding="utf-8")
        app = app_dir
        if modules or is_reference(config.strategy) or deployment.sign:
            app = make_bundle(app_dir, flower.folder / "app", config.strategy, modules)
        if deployment.sign:
            sign(app, deployment.sign)
        run_id = flower.submit(app, config_file)
        try:
            yield flower, run_id
        except KeyboardInterrupt:  # its SuperLink would go on with a run that nobody follows any more
            flower.stop(run_id)
            raise


def full_disk_text(run_dir: Path) -> str:
    """Return what to do where the disk of a run's folder has no room left, not even for its log; "" where it has."""
    free_bytes = shutil.disk_usage(run_dir).free
    if free_bytes >= FULL_DISK_BYTES:
        return ""
    return f"The disk of {run_dir} is full ({bytes_text(free_bytes)} are free): make room before the run goes on"


def _code_here(app_dir: Path | None) -> Path:
    """The folder of the code that runs here; SettingsError where the user asks for another app's."""
    if app_dir is not None and app_dir.expanduser().resolve() != APP:
        raise SettingsError(
            f"--app {app_dir}: simulations run the app of this installation; --superlink hands that one to real devices"
        )
    return APP


def find_app(app_dir: Path | None) -> Path:
    """The folder of the Flower app: the one given, or the project that this file is part of. Raises SettingsError."""
    found = APP if app_dir is None else app_dir.expanduser().resolve()
    if not (found / "pyproject.toml").is_file():
        raise SettingsError(
            f"there is no pyproject.toml in {found}: name the folder of the app with --app"
            if app_dir is not None
            else "this installation does not hold the app's pyproject.toml: name the project's folder with --app"
        )
    return found


def print_resume_hint(run_dir: Path, config: RunConfig, console: Console) -> None:
    """Say how a run goes on that has broken off; nothing where no round was finished."""
    if finished := len(read_rounds(run_dir)):
        say(
            console,
            f"{finished} of {config.rounds} rounds are in {run_dir}; go on with the same command and "
            f"--set resume=true --set run-name={config.run_name}",
        )
