"""`wildflower run`."""

from typing import Annotated

import typer

from wildflower.cli.options import AppFolder, Experiment, Insecure, Overrides, RootCertificates, Sign, deployment_at
from wildflower.launch.starting import loading_modules
from wildflower.plugins.user_error import UserError


def run(
    experiment: Experiment,
    overrides: Overrides = None,
    app_dir: AppFolder = None,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Run it on the real devices that are connected to this SuperLink."),
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    sign: Sign = None,
) -> None:
    """Run an experiment and write its report: on devices simulated here, or with --superlink on real ones.

    The exit code is 0 when the run finished, 1 when it failed and 130 when it was stopped.
    """
    with loading_modules():
        from wildflower.launch.experiment import run_experiment
        from wildflower.launch.terminal import terminal

    deployment = None
    if superlink is not None:
        deployment = deployment_at(superlink, root_certificates, insecure, sign)
    elif insecure or root_certificates is not None or sign is not None:
        raise UserError("--root-certificates, --insecure and --sign belong to --superlink HOST:PORT")
    raise typer.Exit(run_experiment(experiment, overrides or [], app_dir, terminal(), deployment))
