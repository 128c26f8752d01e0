"""`wildflower check`."""

from datetime import datetime
from pathlib import Path

import typer

from wildflower.cli.options import Experiment, Overrides
from wildflower.launch.starting import loading_modules


def check(experiment: Experiment, overrides: Overrides = None) -> None:
    """Show what can be known of a run before its first round: data, model, devices, and what is wrong with them.

    The exit code is 0 when the run can begin and 1 when it cannot.
    """
    with loading_modules():
        from wildflower.cli.check import check as look
        from wildflower.launch.experiment_file import beside, place, resolve
        from wildflower.launch.terminal import terminal

    console = terminal()
    with beside(experiment):
        config, run_dir = place(resolve(experiment, overrides or []).config, Path.cwd(), datetime.now())
        page = look(config, run_dir, console.width)
    page.print(console)
    if page.problems:
        raise typer.Exit(1)
