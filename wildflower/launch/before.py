"""Before a run begins: whether it may, as far as this machine can know. `wildflower check` shows the same on a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wildflower.launch.experiment_file import SettingsError
from wildflower.launch.starting import loading_modules
from wildflower.plugins.beside import digests
from wildflower.plugins.extras import check_installed
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference
from wildflower.server_app.journal import check_writers
from wildflower.server_app.resuming import check_folder, check_resumable, check_same
from wildflower.server_app.run_folder import JournalError, is_held
from wildflower.server_app.units import bytes_text

if TYPE_CHECKING:
    from wildflower.rounds.engine import Engine
    from wildflower.rounds.evaluation import Scorer
    from wildflower.rounds.hooks import RoundHook
    from wildflower.server_app.config import RunConfig


@dataclass(frozen=True)
class Deployment:
    """A SuperLink with real devices: its address, and the certificate to trust (None: without TLS).

    sign: the key that signs the app of a run; None where it is not signed.
    """

    address: str
    root_certificates: Path | None
    sign: Path | None = None


def steps_of_start(config: RunConfig, run_dir: Path, deployment: Deployment | None) -> list[Callable[[], None]]:
    """Return checks that raise unless a run may begin or go on in its folder. Nothing need be built for them.

    None needs another, so that a page can show all that fail.
    """
    steps: list[Callable[[], None]] = [partial(_check_folder, config, run_dir), partial(check_free, run_dir)]
    if deployment is None:  # a ServerApp may run elsewhere
        steps.append(check_writers)
        if config.tracker:
            steps.append(partial(check_installed, config.tracker, f"tracker = {config.tracker!r}"))
    return [*steps, partial(check_population, config, deployment)]


def _check_folder(config: RunConfig, run_dir: Path) -> None:
    """Raise JournalError unless a run may begin or go on in its folder with this configuration."""

    check_folder(run_dir, config.resume)
    if config.resume:
        check_resumable(run_dir, config.to_dict())
        check_same(run_dir, plugins=digests(config.modules()))


def check_same_files(run_dir: Path, config: RunConfig, engine: Engine | None) -> None:
    """Raise JournalError unless fleet, first weights and data are those that a run to be resumed began with.

    Args:
        engine: as built here; None where the devices are real.
    """
    from wildflower.server_app.app import data_of
    from wildflower.server_app.inputs import initial_digest

    fleet = config.fleet, engine.population.fleet_digest if engine else ""
    check_same(run_dir, fleet=fleet, initial=initial_digest(config), data=data_of(engine) if engine else None)


def check_free(run_dir: Path) -> None:
    """Raise JournalError where another process writes the run."""
    if is_held(run_dir):
        raise JournalError(f"the run in {run_dir} goes on in another process: wait for its end, or stop that one")


def check_population(config: RunConfig, deployment: Deployment | None) -> None:
    """SettingsError unless simulated devices have a fleet and workers."""
    if deployment is None and not config.fleet:
        raise SettingsError(
            "fleet = '': devices are simulated here and need a fleet; real devices are reached with --superlink "
            "HOST:PORT, the SuperLink that they are connected to"
        )
    if deployment is not None and config.fleet and config.engine != "nodes":
        raise SettingsError(
            f"fleet = {config.fleet!r} describes simulated devices, --superlink {deployment.address} has real ones: "
            "--set fleet= leaves the fleet out, and --set engine=nodes makes the nodes there workers of simulated "
            "devices"
        )
    if deployment is None and config.engine == "nodes":
        raise SettingsError(
            "engine = 'nodes': the workers of simulated devices are nodes of a deployment: --superlink HOST:PORT names "
            "the SuperLink that they are connected to"
        )


def check_buildable(config: RunConfig, hooks: Sequence[RoundHook] = ()) -> tuple[Engine, Scorer | None]:
    """Build what the run stands on, so that missing data or a wrong fleet show before anything is started.

    A method from outside is begun and tried in a dry run too, on an engine of its own.
    """
    with loading_modules():
        from wildflower.server_app.app import agreed_data, build, start
        from wildflower.server_app.inputs import run_folder

    with raised_as(SettingsError, "", (ValueError, OSError)):
        own = agreed_data(None, config, run_folder(config)) if config.resume else None
        if is_reference(config.strategy):
            start(build(config, own, hooks)[0], config)
        return build(config, own, hooks)


def check_disk(engine: Engine, config: RunConfig, run_dir: Path) -> Iterator[str]:
    """Say where a run's folder has less room than its checkpoints and models need, as its method begins.

    OSError where nothing can be written there.
    """
    there = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"output-dir: nothing can be written in {there}: name a folder of your own")
    state_bytes = sum(tensor.nbytes for tensor in engine.state().tensors.values())
    # One more checkpoint while the newest is written, and the models of all tiers.
    needed_bytes = (config.checkpoints.keep + 2) * state_bytes
    if (free_bytes := shutil.disk_usage(there).free) < needed_bytes:
        yield (
            f"{there} has {bytes_text(free_bytes)} free, and the run's checkpoints and models take about "
            f"{bytes_text(needed_bytes)}: make room, set a smaller checkpoints.keep, or another output-dir"
        )
