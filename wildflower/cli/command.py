"""The command `wildflower`. Everything heavy is imported by the subcommand that needs it, so that --help is quick."""

from typing import Annotated

import click
import typer
from typer.core import TyperGroup
from typing_extensions import override

from wildflower.cli.compare import compare, report
from wildflower.cli.deliver_command import deliver, model
from wildflower.cli.experiment_commands import check, config, family, plan, run, supernet
from wildflower.cli.export_command import export, predict
from wildflower.cli.fleet import fleet
from wildflower.cli.new import new
from wildflower.cli.paper_command import paper
from wildflower.cli.probe_command import bandwidth_server, probe
from wildflower.cli.record import record
from wildflower.cli.sweep import sweep, tune
from wildflower.launch.process_ends import run_and_leave
from wildflower.plugins.user_error import UserError


class Commands(TyperGroup):
    """The subcommands; what goes wrong in one, and is for the user, is printed in one line."""

    @override
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has gone
            raise
        except (UserError, OSError) as error:
            typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    help="Federated learning over devices that cannot all train the same model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def main() -> None:
    """Run the command."""
    run_and_leave(lambda: app())


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    from wildflower.server_app.journal import versions

    found = versions()
    for package in ("wildflower", "flwr", "torch", "python"):
        typer.echo(f"{package} {found[package] or 'not installed'}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_versions, is_eager=True, help="Print versions, also Flower's and torch's."
        ),
    ] = False,
) -> None:
    pass


for started in (run, sweep, tune, paper, report, compare):
    app.command()(started)

app.add_typer(new, name="new")
for shown in (
    config,
    check,
    plan,
    family,
    export,
    predict,
    deliver,
    model,
    supernet,
    fleet,
    record,
    probe,
    bandwidth_server,
):
    app.command()(shown)
