"""`wildflower supernet`."""

from pathlib import Path
from typing import Annotated

import typer

from wildflower.cli.options import Overrides
from wildflower.plugins.user_error import UserError


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
