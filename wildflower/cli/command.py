"""The command `wildflower`. Everything heavy is imported by the subcommand that needs it, so that --help is quick."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.core import TyperGroup
from typing_extensions import override

from wildflower.cli.bench import bench
from wildflower.cli.check_command import check
from wildflower.cli.compare import compare, report
from wildflower.cli.export_command import export, predict
from wildflower.cli.family_command import family
from wildflower.cli.fleet import fleet
from wildflower.cli.new import new
from wildflower.cli.nodes import nodes
from wildflower.cli.options import Overrides, print_table
from wildflower.cli.paper_command import paper
from wildflower.cli.plan_command import plan
from wildflower.cli.probe_command import bandwidth_server, probe
from wildflower.cli.run import run
from wildflower.cli.supernet_command import supernet
from wildflower.cli.sweep import sweep
from wildflower.cli.tune import tune
from wildflower.launch.process_ends import run_and_leave
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from rich.console import Console


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
app.command(context_settings={"allow_interspersed_args": False})(bench)  # options after NAME, --help too, are its own

app.add_typer(new, name="new")


@app.command()
def config(
    experiment: Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="The experiment file.")] = None,
    overrides: Overrides = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only keys whose values are not the defaults.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All keys, those of methods last.")] = False,
) -> None:
    """Print keys of the run configuration with their values, where each value comes from, and what it means.

    These are the keys that people set most and those that the experiment or --set sets; --all prints the others too.
    """
    from wildflower.launch.experiment_file import SettingsError, beside, resolve
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.config import defaults, descriptions
    from wildflower.server_app.keys import COMMON, keys_by_group

    with beside(experiment):
        try:
            settings = resolve(experiment, overrides or [])
        except SettingsError as error:
            raise _stop(str(error)) from None
        usual = defaults(settings.config.strategy)
        meanings = descriptions(settings.config.strategy)
    values, sources = settings.config.to_dict(), settings.sources
    if everything:
        run, of_methods = keys_by_group(values)
        tables = run | {f"Settings of {name}": keys for name, keys in of_methods.items()}
    elif changed:
        tables = {"": list(values)}
    else:
        own = [key for key in values if key not in COMMON and sources[key] != "default"]
        tables = {"": list(COMMON), "Also set here": own}
    console = terminal()
    for title, keys in tables.items():
        rows = [
            [key, repr(values[key]), Path(sources[key]).name, meanings[key]]
            for key in keys
            if not changed or values[key] != usual[key]
        ]
        if rows:
            _print_table(console, title, ["key", "value", "source", "meaning"], rows)
    if not everything and not changed:
        typer.echo(f"--all shows all {len(values)} keys.")


for shown in (check, plan, family, export, predict, supernet, fleet, nodes, probe, bandwidth_server):
    app.command()(shown)


def _print_table(console: "Console", title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print_table(headers, rows, title)


def _stop(message: str) -> UserError:
    return UserError(message)
