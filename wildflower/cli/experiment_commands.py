"""The commands that take one experiment: `run`, `check`, `config`, `family`, `plan` and `supernet`."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from wildflower.cli.options import (
    AppFolder,
    AsJson,
    Experiment,
    Insecure,
    MaybeExperiment,
    Overrides,
    RootCertificates,
    Sign,
    deployment_at,
    print_table,
    wrong_values_told,
)
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


def config(
    experiment: MaybeExperiment = None,
    overrides: Overrides = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only keys whose values are not the defaults.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All keys, those of methods last.")] = False,
) -> None:
    """Print keys of the run configuration with their values, where each value comes from, and what it means.

    These are the keys that people set most and those that the experiment or --set sets; --all prints the others too.
    """
    from wildflower.launch.experiment_file import beside, resolve
    from wildflower.server_app.config import defaults, descriptions
    from wildflower.server_app.keys import COMMON, keys_by_group

    with beside(experiment):
        settings = resolve(experiment, overrides or [])
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
    for title, keys in tables.items():
        rows = [
            [key, repr(values[key]), Path(sources[key]).name, meanings[key]]
            for key in keys
            if not changed or values[key] != usual[key]
        ]
        if rows:
            print_table(["key", "value", "source", "meaning"], rows, title)
    if not everything and not changed:
        typer.echo(f"--all shows all {len(values)} keys.")


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


def supernet(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="Task, family and training.")],
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the weights go: *.safetensors.")],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the optimizer; 0: weights stay as they begin.")] = 1000,
    random: Annotated[
        int, typer.Option(min=0, help="Random sub-networks of each step, beside the largest and the smallest.")
    ] = 2,
    held_out: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the training examples on which sub-networks are scored.")
    ] = 0.1,
    pairs: Annotated[
        int, typer.Option(min=0, help="Random sub-networks that are scored in the end, for an accuracy predictor.")
    ] = 0,
    initial: Annotated[
        Path | None, typer.Option(help="File of first weights, such as torchvision's of a MobileNet.")
    ] = None,
) -> None:
    """Train a supernet on the experiment's data, which are public then; stopped, it goes on where it was."""
    from wildflower.cli.supernet import Wanted, train
    from wildflower.launch.experiment_file import beside, resolve
    from wildflower.launch.terminal import terminal
    from wildflower.strategies.supernet_training import SupernetParams

    if output.suffix != ".safetensors":
        raise UserError(f"--output {output} must end with .safetensors")
    with beside(experiment):
        config = resolve(experiment, overrides or []).config
        wanted = Wanted(output.absolute(), SupernetParams(steps=steps, random=random), held_out, pairs, initial)
        written = train(config, wanted, terminal())
    typer.echo(f"Supernet: {written}")
