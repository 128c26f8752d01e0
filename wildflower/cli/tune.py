"""`wildflower tune`."""

from pathlib import Path
from typing import Annotated

import typer

from wildflower.cli.options import Experiment, Overrides
from wildflower.plugins.user_error import UserError


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
