"""`wildflower export`: a model of a run as a file that is used without Wildflower."""

from __future__ import annotations

import os
import re
from pathlib import Path

from wildflower.messages.programs import (
    Described,
    ExportError,
    Facts,
    Format,
    compare,
    facts_path,
    label_texts,
    program_of,
    with_preparation,
)
from wildflower.models.architecture import Architecture
from wildflower.server_app.models import ModelInfo, Which, load_model, modules_of


def export(
    run_dir: Path,
    *,
    file_format: Format = "pt2",
    which: Which = "best",
    tier: str | None = None,
    architecture: Architecture | None = None,
    out: Path | None = None,
) -> Path:
    """Write a model of a run exactly as it was scored, and compare what was written with it.

    Args:
        which: of the best evaluation, or of the newest.
        tier, architecture: which of its models; None: the global one.
        out: where to; None: the folder `export` of the run. Its JSON file has the same name with .json behind it.

    Raises:
        ModelError: the run has no such model.
        ExportError: the format's library is not installed, or what was written says something else than the model.
    """
    with modules_of(run_dir):
        model, info = load_model(run_dir, which, tier, architecture)
        facts = facts_of(info, file_format)
        name = f"{which}-{re.sub('[^A-Za-z0-9.]+', '-', tier) if tier else 'model'}"
        path = run_dir / "export" / f"{name}.{file_format}" if out is None else out
        if path.suffix != f".{file_format}":
            raise ExportError(f"{path}: the name of a {file_format} file ends in .{file_format}")
        deployed = with_preparation(model, facts)
        data = program_of(deployed, facts, str(run_dir))
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, contents in ((path, data), (facts_path(path), facts.model_dump_json(indent=2).encode())):
            beside = target.with_name(f".{target.name}.{os.getpid()}.part")
            beside.write_bytes(contents)
            os.replace(beside, target)
        compare(deployed, path, facts)
        return path


def facts_of(info: ModelInfo, file_format: Format) -> Facts:
    """The facts of a model of a run."""
    return Facts(
        **info.model_dump(include=set(Described.model_fields)),
        **info.model.model_dump(include={"family", "architecture", "exits", "score"}),
        format=file_format,
        labels=label_texts(info.label_names, info.classes),
    )
