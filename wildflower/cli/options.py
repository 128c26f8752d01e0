"""Options that several commands have, and how commands print."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from wildflower.launch.before import Deployment

Experiment = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment file.")]
MaybeExperiment = Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="The experiment file.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the run configuration; may be given often."),
]
Seeds = Annotated[str, typer.Option(help="Seeds, such as 1-3 or 1,4,7-9.")]
Jobs = Annotated[int, typer.Option(min=1, max=256, help="Runs at a time.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write plots and tables here, and a CSV file beside.")
]
Tier = Annotated[str | None, typer.Option(help="The model of a tier; default: the global one.")]
WhichModel = Annotated[
    str, typer.Option(help="Of the best evaluation by the score of that model itself, or of the newest.")
]
RootCertificates = Annotated[
    Path | None, typer.Option(help="PEM file of the authority that signed the SuperLink's certificate.")
]
AppFolder = Annotated[
    Path | None, typer.Option("--app", help="Folder of the Flower app, when this installation does not hold it.")
]
Sign = Annotated[
    Path | None, typer.Option(metavar="KEY", help="Sign the app, for devices that run signed apps only: app.key.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Talk to the SuperLink without TLS.")]


def deployment_at(
    superlink: str, root_certificates: Path | None, insecure: bool, sign: Path | None = None
) -> "Deployment":
    """Return the SuperLink that the options name; UserError unless they say with TLS or without."""
    from wildflower.launch.before import Deployment
    from wildflower.launch.superlink import check_address

    if insecure == (root_certificates is not None):
        raise UserError("--superlink needs --root-certificates FILE, or --insecure to talk without TLS")
    check_address(superlink)
    return Deployment(superlink, root_certificates, sign)


def wrong_values_told() -> AbstractContextManager[None]:
    """Turn a ValueError, with which parts of the engine tell of a wrong value, into an error for the user."""
    return raised_as(UserError, "")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table, however narrow the terminal is."""
    from wildflower.launch.terminal import tables_of, terminal

    console = terminal()
    for table in tables_of(title, headers, rows, console.width):
        console.print(table)
