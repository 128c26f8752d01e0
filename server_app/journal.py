"""The journal: the files a run leaves in its folder, written so that a crash at any moment loses at most one round."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from wildflower.devices.private import close_to_others, private_folder, private_open
from wildflower.plugins.extras import MissingExtraError, check_installed
from wildflower.plugins.raised_as import raised_as
from wildflower.server_app.resuming import check_folder, check_resumable, check_same
from wildflower.server_app.run_folder import (
    JournalError,
    read_devices,
    read_rounds,
    whole_rounds,
)
from wildflower.server_app.run_records import DeviceRecord, Record, RoundRecord, RunFile, Summary, scalars_of
from wildflower.server_app.summary import summarize
from wildflower.server_app.whole_files import file_written_whole, write_whole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ERROR_LINES = 40


class Journal:
    """Writes one run's folder. Open it with `Journal.open`, write every round, and `finish` it in any case.

    A round's devices are written before the round itself, so a round that is in rounds.jsonl is complete.
    """

    def __init__(self, run_dir: Path, last_round: int) -> None:
        self.run_dir = run_dir
        self.last_round = last_round
        self._writer: SummaryWriter | None = None

    @classmethod
    def open(cls, run_dir: Path, config: Mapping[str, Any], resume: bool, **recorded: Any) -> "Journal":
        """Start a run's journal, or with `resume` go on with one, and write config.json.

        `config` is the whole resolved run configuration with its kebab-case keys, "seed" among them, and `recorded` are
        the other fields of `RunFile`: fleet, plugins, initial, data, budgets.
        A resumed journal still holds all its rounds, of which `last_round` is the last that both files have in full:
        call `drop_after` with the round of the checkpoint.

        Raises JournalError when there is a run in the folder already and `resume` is not set, when there is none and
        it is set, when the run to be resumed had another configuration or has more rounds than that asks for, or when
        what writes the run's files is not installed.
        """
        with raised_as(JournalError, "", MissingExtraError):
            check_writers()
        if "torch.utils.tensorboard" not in sys.modules:  # beside the first round
            Thread(target=load_writers, name="writers", daemon=True).start()
        check_folder(run_dir, resume)
        private_folder(run_dir)
        journal = cls(run_dir, last_round=0)
        of_run = {"config": dict(config), "versions": versions(), "seed": config["seed"], "fleet": ""}
        kept = RunFile.model_validate(of_run | recorded)
        if resume:
            check_resumable(run_dir, config)
            fleet = config.get("fleet"), kept.fleet
            check_same(run_dir, fleet=fleet, plugins=kept.plugins, initial=kept.initial, data=kept.data)
            journal.last_round = whole_rounds(run_dir)
            if journal.last_round == len(read_rounds(run_dir)):
                # Also cuts off a line that a crash left torn, so that nothing is ever appended to half a line.
                journal.drop_after(journal.last_round)
        elif (run_dir / "devices.jsonl").exists():  # of a run that broke off before its first checkpoint
            journal.drop_after(0)
        text = kept.model_dump_json(by_alias=True, exclude_defaults=True, indent=2)
        write_whole(run_dir / "config.json", text + "\n")
        (run_dir / "summary.json").unlink(missing_ok=True)
        return journal

    def write_round(
        self, record: RoundRecord | Mapping[str, Any], devices: Sequence[DeviceRecord | Mapping[str, Any]]
    ) -> None:
        """Append one finished round and its devices to the files, on disk when this returns, and to TensorBoard.

        Raises ValueError (a pydantic ValidationError for a missing, unknown or ill-typed key), and nothing is written.
        """
        record = RoundRecord.model_validate(record)
        checked = [DeviceRecord.model_validate(device) for device in devices]
        if record.round != self.last_round + 1:
            raise ValueError(
                f"round {record.round} cannot follow round {self.last_round} in the journal {self.run_dir}"
            )
        for device in checked:
            if device.round != record.round:
                raise ValueError(
                    f"device {device.device} of round {device.round} was written with round {record.round}"
                )
        record = record.model_copy(update={"device_lines": len(checked)})
        _append(self.run_dir / "devices.jsonl", checked)
        _append(self.run_dir / "rounds.jsonl", [record])
        self.last_round = record.round
        self._write_scalars(record)

    def drop_after(self, round: int) -> None:
        """Remove every line beyond `round`, the round of the checkpoint that a resumed run goes on from."""
        rounds = [record for record in read_rounds(self.run_dir) if record.round <= round]
        if len(rounds) < round:
            raise JournalError(
                f"the checkpoint in {self.run_dir} is of round {round}, but rounds.jsonl ends with round {len(rounds)}"
            )
        write_whole(self.run_dir / "rounds.jsonl", "".join(_line(record) for record in rounds))
        with file_written_whole(self.run_dir / "devices.jsonl") as file:
            # One line at a time: a long run's devices do not fit in memory.
            for device in read_devices(self.run_dir):
                if device.round <= round:
                    file.write(_line(device).encode())
        self.last_round = round

    def finish(self, status: Literal["finished", "failed"], error: str | None = None) -> Summary:
        """Write summary.json, then report.html. `error` is a traceback, of which the last lines are kept."""
        from wildflower.server_app.report import write_report

        if self._writer is not None:
            self._writer.close()
            self._writer = None
        last_lines = None if error is None else "\n".join(error.rstrip().splitlines()[-ERROR_LINES:])
        summary = summarize(self.run_dir, status, last_lines)
        write_whole(self.run_dir / "summary.json", summary.model_dump_json(indent=2) + "\n")
        write_report(self.run_dir)
        return summary

    def _write_scalars(self, record: RoundRecord) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            private_folder(events := self.run_dir / "tensorboard")
            # purge_step hides what an interrupted run had written of this round and later ones.
            self._writer = SummaryWriter(str(events), purge_step=record.round)
            for path in events.iterdir():
                close_to_others(path)
        for name, value in scalars_of(record).items():
            if value is not None:
                self._writer.add_scalar(name, value, record.round)
        self._writer.flush()


def check_writers() -> None:
    """Raise MissingExtraError unless all is installed that writes a run's figures and its report."""
    check_installed("tensorboard", "a run's folder, which has figures for TensorBoard,")
    check_installed("plotly", "a run's report")
    check_installed("pandas", "a run's report, which has tables of its rounds,")


def load_writers() -> None:
    """Load what writes to TensorBoard and the report, with its script and pandas' way to LaTeX.

    Raises MissingExtraError where something is not installed.
    """
    check_writers()

    import torch.utils.tensorboard  # noqa: F401

    import wildflower.server_app.report  # noqa: F401
    from wildflower.server_app.pages import library
    from wildflower.server_app.tables import TextTable

    library()
    TextTable("", ["a table"], [["of one cell"]]).latex()


def _line(record: Record) -> str:
    return record.model_dump_json() + "\n"


def _append(path: Path, records: Sequence[Record]) -> None:
    with private_open(path, "a", encoding="utf-8") as file:
        file.write("".join(_line(record) for record in records))
        file.flush()
        os.fsync(file.fileno())


def versions() -> dict[str, str | None]:
    """Return what a run's results may depend on; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "flwr", "wildflower"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None  # the app can run from its bundle without being installed
    return found
