"""`wildflower export` and `wildflower predict`: a model of a run, taken along or asked."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from wildflower.cli.options import AsJson, RunDir, Tier, WhichModel, print_table
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from wildflower.messages.programs import Format
    from wildflower.server_app.models import Which


def export(
    run_dir: RunDir,
    file_format: Annotated[
        str, typer.Option("--format", help="pt2, onnx, pte, or safetensors: the weights alone.")
    ] = "pt2",
    tier: Tier = None,
    architecture: Annotated[
        str | None, typer.Option(metavar="JSON", help="The model of an architecture, as models.json writes it.")
    ] = None,
    which: WhichModel = "best",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to; default: the folder `export` of the run.")
    ] = None,
) -> None:
    """Write a model of a run exactly as it was scored, as a file that works without Wildflower (docs/export.md)."""
    from wildflower.messages.programs import FORMATS, facts_path, read_facts
    from wildflower.models.architecture import Architecture
    from wildflower.server_app.export import export as export_model
    from wildflower.server_app.units import score_format
    from wildflower.tasks.metrics import scale_of

    if file_format not in FORMATS:
        raise UserError(f"--format {file_format!r}: must be one of {', '.join(FORMATS)}")
    with raised_as(UserError, f"--architecture {architecture!r}: ", (ValueError, TypeError)):
        wanted = None if architecture is None else Architecture.from_json(json.loads(architecture))
    path = export_model(
        run_dir,
        file_format=cast("Format", file_format),
        which=cast("Which", which),
        tier=tier,
        architecture=wanted,
        out=out,
    )
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.3g} MB); labels and preparation: {facts_path(path)}")
    facts, whose = read_facts(path), f"of tier {tier} " if tier is not None else ""
    assert facts.score is not None, "a model of a run is saved once it is scored"
    scale = scale_of(facts.metric)
    scored = f"{scale.label} {score_format(scale)(facts.score)}"
    typer.echo(f"It is the model {whose}as it was in round {facts.round}: {scored}")


def predict(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|FILE", help="The folder of a run, or an exported model.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the images.")],
    tier: Tier = None,
    which: WhichModel = "best",
    as_json: AsJson = False,
) -> None:
    """Print what a model of images says of every image of a folder. The exit code is 1 where one cannot be read.

    Models of texts, tables and signals are used by way of `wildflower export` (docs/export.md).
    """
    from wildflower.cli.predict import predict as predict_folder

    found = predict_folder(source, folder, which=cast("Which", which), tier=tier)
    if as_json:
        typer.echo(json.dumps([asdict(prediction) for prediction in found]))
    else:
        rows = [
            [p.file, p.problem or p.label or f"{p.value:g}", "" if p.share is None else f"{p.share:.1%}"] for p in found
        ]
        print_table(["image", "prediction", "share"], rows)
    raise typer.Exit(1 if any(prediction.problem for prediction in found) else 0)
