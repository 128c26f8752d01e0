"""`wildflower family`."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from wildflower.cli.options import MaybeExperiment, Overrides, wrong_values_told


def family(
    experiment: MaybeExperiment = None,
    overrides: Overrides = None,
    methods: Annotated[
        bool, typer.Option("--methods", help="Also say which methods take the model, and why not.")
    ] = False,
) -> None:
    """Show how an experiment's model is cut: its channel groups, what is never cut and why, and what widths cost.

    The exit code is 0, or 1 when the model cannot be cut, or the run could not begin.
    """
    from wildflower.launch.experiment_file import beside, place, resolve
    from wildflower.launch.terminal import terminal

    with wrong_values_told(), beside(experiment):
        config, _ = place(resolve(experiment, overrides or []).config, Path.cwd(), datetime.now())
        from wildflower.cli.family_page import family_page, methods_table

        console = terminal()
        for part in family_page(config):
            if isinstance(part, str):
                console.print(part, markup=False, highlight=False)
            else:
                console.print(part)
        if methods:
            console.print(methods_table(experiment, overrides or []))
