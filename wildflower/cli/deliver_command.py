"""`wildflower deliver` and `wildflower model`: a run's models go to its devices, and what a device uses."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from wildflower.cli.options import Insecure, RootCertificates, RunDir, deployment_at, print_table


def deliver(
    run_dir: RunDir,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Deliver now, to the devices that are connected to this SuperLink."),
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> None:
    """Give each device the model of its tier: each checks it, and uses it unless it is worse than the one in use.

    Without --superlink the models are delivered after the next round of the run. The exit code is 3 where a device does
    not use its model.
    """
    from wildflower.devices.validation import one_line
    from wildflower.server_app.deliveries import read_delivered

    deployment = None if superlink is None else deployment_at(superlink, root_certificates, insecure)
    if deployment is not None:
        _check_ended(run_dir)
    version = write_programs(run_dir)
    typer.echo(f"{run_dir / 'deliver' / version}: models of version {version}")
    if deployment is None:
        return
    from wildflower.launch.experiment import run_experiment
    from wildflower.launch.experiment_file import of_run, write_toml
    from wildflower.launch.terminal import terminal

    again = run_dir / "deliver" / "experiment.toml"
    again.write_text(write_toml(of_run(run_dir, ["resume=true"]).to_dict()), encoding="utf-8")
    code = run_experiment(again, [], None, terminal(), deployment)
    said = {device: answer for device, answer in read_delivered(run_dir).items() if answer.version == version}
    rows = [
        [
            str(device),
            answer.version,
            "in use" if answer.used else f"not used: {one_line(answer.why)}",
            *("" if score is None else f"{score:.4g}" for score in (answer.score, answer.before)),
        ]
        for device, answer in sorted(said.items())
    ]
    print_table(["device", "version", "", "score there", "score of the one before"], rows)
    raise typer.Exit(code or (0 if said and all(answer.used for answer in said.values()) else 3))


def _check_ended(run_dir: Path) -> None:
    """Raise UserError where a run has rounds left, which would be trained now."""
    from wildflower.plugins.user_error import UserError
    from wildflower.server_app.run_folder import read_config, read_rounds

    done, asked = len(read_rounds(run_dir)), read_config(run_dir).config.get("rounds", 0)
    if done < asked:
        raise UserError(
            f"{run_dir} has {done} of {asked} rounds and would go on now: type wildflower deliver without --superlink. "
            "While the run goes on, the models are delivered after its next round"
        )


def write_programs(run_dir: Path) -> str:
    """Write the newest models of a run as programs for its tiers, unless they are there. -> their version."""
    from wildflower.cli.export import export
    from wildflower.server_app.deliveries import FOLDER, TIERS, Programs
    from wildflower.server_app.models import load_model, tiers_of

    _, info = load_model(run_dir)
    folder = run_dir / FOLDER / f".{os.getpid()}.part"
    files = {tier: f"{place}.pt2" for place, tier in enumerate(["", *tiers_of(run_dir)])}
    digest = hashlib.sha256()
    try:
        for tier, name in files.items():
            digest.update(export(run_dir, tier=tier or None, out=folder / name).read_bytes())
        version = f"{info.round}-{digest.hexdigest()[:12]}"
        there = run_dir / FOLDER / version / TIERS
        if there.exists():
            os.utime(there)  # the newest again
        else:
            (folder / TIERS).write_text(Programs(version=version, tiers=files).model_dump_json(indent=1))
            os.replace(folder, there.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return version


def model(
    state_dir: Annotated[Path, typer.Argument(metavar="STATE_DIR", help="The state folder of a node.")],
    rollback: Annotated[bool, typer.Option("--rollback", help="Use the model from before again.")] = False,
) -> None:
    """Show which model a device uses, on the device; the exit code is 1 where it has none."""
    from wildflower.client_app.delivered import CURRENT, FOLDER, PROGRAM, ModelFolderError, roll_back, version_of
    from wildflower.plugins.user_error import UserError

    folder = state_dir / FOLDER
    try:
        if rollback:
            typer.echo(f"Back at the model {roll_back(folder)}")
    except ModelFolderError as error:
        raise UserError(str(error)) from None
    version = version_of(folder / CURRENT)
    if version is None:
        raise UserError(f"{folder} holds no model: wildflower deliver brings one")
    facts = json.loads((folder / CURRENT / f"{PROGRAM}.json").read_text())
    typer.echo(f"{folder / CURRENT / PROGRAM}: version {version}, round {facts['round']}, {facts['metric']}")
