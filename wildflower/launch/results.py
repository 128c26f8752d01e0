"""The results of a run or a sweep, as objects and tables (docs/python.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wildflower.launch.experiment_file import write_toml
from wildflower.launch.objects import EXPERIMENT, FOLDER
from wildflower.launch.showing import summary_rows
from wildflower.plugins.extras import needed
from wildflower.server_app.compare import Comparison
from wildflower.server_app.compare import compare as compare_runs
from wildflower.server_app.run_folder import has_virtual_clock, read_config, read_devices, read_rounds
from wildflower.server_app.run_records import DeviceRecord, RoundRecord, Summary
from wildflower.server_app.summary import global_model
from wildflower.server_app.tables import frame_of

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from wildflower.server_app.models import Which


MAX_COLUMNS = 12
PREDICTED_TOGETHER = 256
OVERVIEW = (
    *("delivered_score", "score", "loss", "personal_score", "simulated_seconds"),
    *("training_bytes_down", "training_bytes_up", "memory_utilisation", "wall_seconds"),
)


class Run:
    """The results that a run has left in its folder, finished or not.

    Attributes:
        folder: the run's folder.
        summary: the figures of summary.json; of a run that goes on, those of its rounds so far.
    """

    def __init__(self, folder: Path, summary: Summary) -> None:
        self.folder = folder
        self.summary = summary

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self.status}, {self.summary.rounds} rounds>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left;white-space:pre">{escape(name)}</td>'
            f'<td style="text-align:left">{escape(value)}</td></tr>'
            for name, value in summary_rows(
                self.summary,
                virtual_clock=has_virtual_clock(self.folder),
                whole=global_model(self.folder, self.config),
            )
        )
        return f"<b>{escape(self.folder.name)}</b><table>{rows}</table>"

    @property
    def status(self) -> str:
        """The state of the run: "finished", "failed" or "unfinished"."""
        return self.summary.status

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key of the run and its value."""
        return dict(read_config(self.folder).config)

    @property
    def experiment(self) -> str:
        """The experiment as a file has it: what was written of objects, or the keys that are not at their defaults."""
        for around in (self.folder, self.folder.parent):
            if (file := around / FOLDER / EXPERIMENT).is_file():
                return file.read_text(encoding="utf-8")
        from wildflower.server_app.config import defaults

        usual = defaults(self.config["strategy"])
        return write_toml({key: value for key, value in self.config.items() if value != usual.get(key)})

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per finished round, by its number: docs/run-folder.md says what is in it.

        What a round has of every tier, exit or part of the work is a column each, such as
        `delivered_score_by_tier.small`. Where a round was not evaluated, its scores are NaN. Bytes and seconds are
        those of the round, `simulated_seconds` is the virtual clock at its end.
        """
        return frame_of(read_rounds(self.folder), RoundRecord).set_index("round")

    @cached_property
    def devices(self) -> pd.DataFrame:
        """One row per device and round in which it was sampled: its tier, its model, what that took, and the outcome.

        `architecture` holds dicts. What a device that did not train cannot have is missing.
        """
        finished = self.summary.rounds
        records = [record for record in read_devices(self.folder) if record.round <= finished]
        return frame_of(records, DeviceRecord, whole=("architecture",))

    @property
    def overview(self) -> pd.DataFrame:
        """The main columns of `rounds`, at most twelve, with shares in percent as the terminal shows them."""
        scale = self.summary.scale
        columns = [column for column in OVERVIEW if column in self.rounds and self.rounds[column].notna().any()]
        tiers = [column for column in self.rounds if str(column).startswith("delivered_score_by_tier.")]
        found = self.rounds[[*columns, *tiers][:MAX_COLUMNS]].copy()
        for column in found:
            share = str(column).endswith("utilisation") or (scale.is_share and "score" in str(column))
            found[column] = (100 * found[column]).round(2) if share else found[column].round(4)
        shares = scale.is_share and {c: f"{c}, %" for c in found if "score" in str(c)}
        used = {c: f"{c}, %" for c in found if str(c).endswith("utilisation")}
        return found.rename(columns={**(shares or {}), **used})

    def model(self, tier: str | None = None, which: Which = "best") -> nn.Module:
        """Return a trained model, in evaluation mode, which reads normalized inputs (`predict` normalizes them).

        A module that was cut by itself is of your class, with smaller layers. Where that would answer otherwise than
        what was scored, it comes out as its graph, with the module's names of tensors.

        Args:
            tier: whose model; None is the global one.
            which: of the "best" evaluation, or of the "newest".

        Raises ModelError where the run has none.
        """
        from wildflower.server_app.models import as_own_class, load_model, modules_of

        with modules_of(self.folder):
            return as_own_class(*load_model(self.folder, which, tier))

    def predict(self, inputs: object, tier: str | None = None, which: Which = "best") -> np.ndarray:
        """Return what a trained model says of inputs as they were given to the run, one answer for each.

        Answers are the names of classes, their numbers where they have no names, or numbers where these were learned.

        Args:
            inputs: an array or a tensor (examples, ...), or a table, of which the columns that the run learned from
                are taken by name.
            tier: as of `model`.
            which: as of `model`.
        """
        import torch

        from wildflower.launch.given_data import inputs_as
        from wildflower.server_app.models import load_model, modules_of

        with modules_of(self.folder):
            network, info = load_model(self.folder, which, tier)
            stored = inputs_as(inputs, info.input_shape, info.input_dtype, info.columns)
            with torch.inference_mode():
                said = [network(info.prepare(part)) for part in stored.split(PREDICTED_TOGETHER)]
        outputs = torch.cat(said)
        if info.classes == 1:
            return outputs.reshape(len(outputs), -1)[:, 0].numpy()
        answers = outputs.argmax(dim=1).numpy()
        return np.array(info.label_names)[answers] if info.label_names else answers

    @property
    def report(self) -> Path:
        """The page about the run, report.html."""
        return self.folder / "report.html"


class Sweep:
    """The finished runs of a sweep.

    Attributes:
        folder: where they lie.
        runs: seed by seed, with each in the order of the rows and of the grid.
        rows: of every run the name of its row; empty in a sweep without rows.
        grid: the values of every key of the grid.
    """

    def __init__(self, folder: Path, runs: list[Run], rows: Sequence[str], grid: Mapping[str, Sequence[str]]) -> None:
        self.folder = folder
        self.runs = runs
        self.rows = rows
        self.grid = grid

    def __repr__(self) -> str:
        return f"<Sweep {self.folder}: {len(self.runs)} runs>"

    @cached_property
    def table(self) -> pd.DataFrame:
        """One line per run: its row, its place in the grid, its seed, and its figures, shares between 0 and 1."""
        with needed("pandas", "a table"):
            import pandas as pd

        rows = [{"row": row} for row in self.rows] or [{} for _ in self.runs]
        own = [{key: run.config[key] for key in (*self.grid, "seed")} for run in self.runs]
        places = [row | place for row, place in zip(rows, own, strict=True)]
        names = [run.folder.name for run in self.runs]
        figures = frame_of([run.summary for run in self.runs], Summary)
        return pd.concat([pd.DataFrame(places, index=names), figures.set_axis(names)], axis="columns")

    @cached_property
    def comparison(self) -> Comparison:
        """The runs side by side, and in words which method to take and how sure that is."""
        return compare_runs([run.folder for run in self.runs], rows=self.rows)
