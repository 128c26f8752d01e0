"""`wildflower plan`."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from wildflower.cli.options import AsJson, MaybeExperiment, Overrides, wrong_values_told


def plan(
    experiment: MaybeExperiment = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="RUN_DIR",
            help="Plan for the real devices of this run, by their last reports; without EXPERIMENT with its settings.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what every tier, or with --run every device, would get, what a round takes there, and what binds.

    The exit code is 0 when every device gets a model, 3 when one gets none and 1 when the run could not begin.
    """
    from wildflower.launch.experiment_file import beside, of_run, place, resolve
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.models import modules_of

    of_the_run = run_dir if experiment is None else None
    with wrong_values_told(), beside(experiment) if of_the_run is None else modules_of(of_the_run):
        if of_the_run is None:
            config, _ = place(resolve(experiment, overrides or []).config, Path.cwd(), datetime.now())
        else:
            config = of_run(of_the_run, overrides or [])
        from wildflower.cli.plan import make_plan, plan_tables
        from wildflower.cli.plan_hours import hours_text

        found = make_plan(config, run_dir)
        hours = hours_text(found, config)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        console = terminal()
        console.print(f"{found.method} over {found.family}, whole: {found.whole_parameters:,} parameters", markup=False)
        for table in plan_tables(found, by_node=run_dir is not None):
            console.print(table)
        if hours:
            console.print(hours, markup=False, highlight=False)
        if found.epsilon is not None:
            text = f"The run costs epsilon {found.epsilon:.3g} with delta {found.delta:g} (docs/privacy.md)"
            console.print(text, markup=False, highlight=False)
        for warning in found.warnings:
            console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    raise typer.Exit(3 if found.left_out else 0)
