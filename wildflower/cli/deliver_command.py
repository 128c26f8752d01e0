"""`wildflower deliver` and `wildflower model`: a run's models go to its devices, and what a device uses."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from wildflower.cli.options import AppFolder, Insecure, RootCertificates, RunDir, Sign, deployment_at, print_table
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from wildflower.messages.programs import ProgramFormat


def deliver(
    run_dir: RunDir,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Deliver now, to the devices that are connected to this SuperLink."),
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    app_dir: AppFolder = None,
    sign: Sign = None,
    file_format: Annotated[str, typer.Option("--format", help="pt2, onnx or pte (docs/export.md).")] = "pt2",
) -> None:
    """Give each device the model of its tier: each checks it, and uses it unless it is worse than the one in use.

    Where the method leaves personal models on devices, each makes a program of its own, which never leaves it.

    Without --superlink the models are delivered after the next round of the run. The exit code is 3 where a device does
    not use its model.
    """
    from wildflower.devices.validation import one_line
    from wildflower.messages.programs import ProgramFormat
    from wildflower.server_app.deliveries import FOLDER, ONLY, read_delivered

    if file_format not in get_args(ProgramFormat):
        raise UserError(f"--format {file_format!r}: must be one of {', '.join(get_args(ProgramFormat))}")
    deployment = None if superlink is None else deployment_at(superlink, root_certificates, insecure, sign)
    if deployment is not None:
        _check_ended(run_dir)
    version = _write(run_dir, cast("ProgramFormat", file_format))
    typer.echo(f"{run_dir / FOLDER / version}: models of version {version}")
    if deployment is None:
        return
    from wildflower.launch.experiment import run_experiment
    from wildflower.launch.experiment_file import of_run, write_toml
    from wildflower.launch.terminal import terminal

    again = run_dir / "deliver" / "experiment.toml"
    again.write_text(write_toml(of_run(run_dir, ["resume=true"]).to_dict()), encoding="utf-8")
    only = run_dir / FOLDER / ONLY
    only.touch()
    try:
        code = run_experiment(again, [], app_dir, terminal(), deployment)
    finally:
        only.unlink(missing_ok=True)  # a run that could not be taken up has not read it
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
    """Raise UserError where a run is not at its end: by its rounds, or because a hook has ended it before."""
    from wildflower.server_app.run_folder import read_summary

    summary = read_summary(run_dir)
    if summary is None or summary.status != "finished":
        state = "has no end yet" if summary is None else f"has {summary.status}"
        raise UserError(
            f"{run_dir} {state}: type wildflower deliver without --superlink. "
            "While the run goes on, the models are delivered after its next round"
        )


def _write(run_dir: Path, file_format: "ProgramFormat") -> str:
    """Write what is to be delivered of a run. -> its version."""
    from wildflower.launch.experiment_file import of_run
    from wildflower.server_app.deliveries import write_personal, write_programs
    from wildflower.server_app.run_folder import read_rounds

    config = of_run(run_dir, [])
    if config.method.traits(config.params).personal:
        return write_personal(run_dir, len(read_rounds(run_dir)), file_format)
    return write_programs(run_dir, file_format)


def model(
    state_dir: Annotated[Path, typer.Argument(metavar="STATE_DIR", help="The state folder of a node.")],
    rollback: Annotated[bool, typer.Option("--rollback", help="Use the model from before again.")] = False,
) -> None:
    """Show which model a device uses, on the device; the exit code is 1 where it has none."""
    from wildflower.client_app.delivered import CURRENT, FOLDER, ModelFolderError, program_in, roll_back, version_of
    from wildflower.messages.programs import read_facts

    folder = state_dir / FOLDER
    with raised_as(UserError, "", ModelFolderError):
        if rollback:
            typer.echo(f"Back at the model {roll_back(folder)}")
    version = version_of(folder / CURRENT)
    if version is None:
        raise UserError(f"{folder} holds no model: wildflower deliver brings one")
    program = program_in(folder / CURRENT)
    facts = read_facts(program)
    typer.echo(f"{program}: version {version}, round {facts.round}, {facts.metric}")
