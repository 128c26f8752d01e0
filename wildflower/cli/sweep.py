"""The commands that make several runs: `sweep` and `tune`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from wildflower.cli.compare import print_comparison
from wildflower.cli.options import Experiment, Html, Jobs, Overrides, Seeds
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from wildflower.launch.sweeps import SweepRequest


def sweep(
    experiment: Experiment,
    seeds: Seeds = "1-3",
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Named sets of settings, each a table [NAME], each with all seeds."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=VALUE,VALUE",
            help="Values of a key, each with all seeds and rows; may be given often.",
        ),
    ] = None,
    overrides: Overrides = None,
    jobs: Jobs = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Where the runs lie; default: runs/NAME-sweep, by the experiment's name.")
    ] = None,
    html: Html = None,
) -> None:
    """Run an experiment with several seeds, rows and values, as far as runs are missing, and lay them side by side.

    All runs with one seed come before those with the next one. What is finished is not run again, what was stopped goes
    on. The exit code is 0 when all runs are finished, 1 when one failed and 130 when the sweep was stopped.
    """
    from wildflower.launch import sweeps

    asked = sweeps.SweepRequest(
        experiment,
        overrides or [],
        sweeps.folder_of(experiment, folder),
        sweeps.parse_seeds(seeds),
        [] if rows is None else sweeps.read_rows(rows),
        sweeps.parse_grid(grid or []),
        jobs,
    )
    do_sweep(asked, html)


def do_sweep(asked: "SweepRequest", html: Path | None) -> NoReturn:
    """Run what a sweep lacks, print its comparison, and leave with the exit code that `sweep` names."""
    from wildflower.launch import sweeps
    from wildflower.launch.experiment import INTERRUPTED
    from wildflower.launch.superlink import stop_signals_interrupt
    from wildflower.launch.terminal import terminal

    with stop_signals_interrupt():
        outcome = sweeps.sweep(replace(asked, alone=True), terminal())
    if outcome.interrupted:
        typer.echo("Stopped; the same command goes on with what is missing.")
    if outcome.finished:
        names = [run.row for run in outcome.finished if run.row]
        print_comparison([run.run_dir for run in outcome.finished], html, rows=names)
    raise typer.Exit(INTERRUPTED if outcome.interrupted else 1 if outcome.failed else 0)


def tune(
    experiment: Experiment,
    search: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=LOW..HIGH", help="A key and its range, or its values: KEY=VALUE,VALUE; may be given often."
        ),
    ],
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Trials in all.")] = 20,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the runs lie; default: runs/NAME-tune, by the experiment's name.")
    ] = None,
) -> None:
    """Search for the values of keys that deliver most. Trials are runs, and those below the median are ended early.

    The same command goes on with a search that was stopped, or adds trials to it.
    """
    from wildflower.launch import tuning
    from wildflower.launch.experiment import INTERRUPTED
    from wildflower.launch.superlink import stop_signals_interrupt
    from wildflower.launch.terminal import terminal

    where = (folder or Path("runs") / f"{experiment.stem}-tune").absolute()
    try:
        with stop_signals_interrupt():
            found = tuning.tune(experiment, overrides or [], tuning.parse_space(search), trials, where, terminal())
    except RuntimeError as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        typer.echo("Stopped; the same command goes on with what is missing.")
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"Best of {found.trials} trials ({found.pruned} ended early): {found.score:.4f}")
    typer.echo(" ".join(f"--set {key}={value}" for key, value in found.best.items()))
