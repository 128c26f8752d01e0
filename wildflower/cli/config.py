"""`wildflower config`."""

from pathlib import Path
from typing import Annotated

import typer

from wildflower.cli.options import MaybeExperiment, Overrides, print_table


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
