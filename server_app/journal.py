"""The journal: the files a run leaves in its folder, written so that a crash at any moment loses at most one round."""

import fcntl
import json
import os
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from devices.validation import shown
from plugins.reference import is_reference
from server_app.folders import file_written_whole
from server_app.trackers import Tracker, TrackerError, finite, open_tracker
from server_app.units import score_format
from tasks.arguments import in_words
from tasks.metrics import Scale, scale_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# What a resumed run may change without becoming another experiment: where things lie, and how far and how fast it goes.
# Tasks whose data set is what the folder holds; those of named data sets may lie anywhere.
DATA_OF_A_FOLDER = ("idx", "npz", "images", "table", "text")
MAY_CHANGE_ON_RESUME = frozenset(
    {"resume", "resume-from", "keep-checkpoints", "tracker", "rounds", "workers", "engine", "output-dir", "data-dir"}
    | {"evaluate-every", "personal-every", "personal-from"}
)
ERROR_LINES = 40
LOCK, LOCK_SECONDS = "lock", 0.2
SWEEP_LOGS = "logs"  # what the runs of a sweep have said lies beside their folders
# What journals called scores while accuracy was the only metric.
EARLIER_NAMES = {
    "accuracy": "score",
    "accuracy_by_tier": "score_by_tier",
    "accuracy_by_exit": "score_by_exit",
    "personal_accuracy": "personal_score",
    "personal_accuracy_by_tier": "personal_score_by_tier",
    "final_accuracy": "final_score",
    "best_accuracy": "best_score",
}
EARLIER_PAYLOAD = "payload_bytes"  # of the heavier way, and of the slower link of a budget
EARLIER_METRICS = ("distillation_steps_per_second", "distillation_told_apart_nats")
CONFIG_KEYS = ("config", "versions", "seed", "fleet-sha256")
PLUGINS = "plugins-sha256"  # beside these, where a run has modules from outside: name -> hash of their files
INITIAL = "initial-weights-sha256"  # of the file of first weights, where a run has one
DATA = "data"  # what identifies the data, `Task.identity`; not of devices that hold their own, nor of earlier versions

Count = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]  # above 1 when a budget was overrun


class JournalError(RuntimeError):
    """A run folder that cannot be written to, or that does not hold what a run leaves behind."""


class Record(BaseModel):
    """A line of a journal file: every key must be there, no other may.

    Numbers that JSON does not have are written as the strings "NaN", "Infinity" and "-Infinity", and are read back as
    floats.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


def todays_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of rounds.jsonl or a summary with scores under today's names; what has them is left as it is."""
    if "metric" in record or EARLIER_NAMES.keys().isdisjoint(record):
        return dict(record)
    renamed = {EARLIER_NAMES.get(key, key): value for key, value in record.items()}
    return {"metric": "accuracy", "higher_is_better": True} | renamed


class ScoreRecord(Record):
    """A record with scores, which are values of its metric; older files have accuracies."""

    @model_validator(mode="before")
    @classmethod
    def _todays_names(cls, record: Any) -> Any:
        return todays_names(record) if isinstance(record, dict) else record


class RoundRecord(ScoreRecord):
    """One finished round. `wall_seconds` is what this round took, `simulated_seconds` the virtual clock at its end."""

    round: Annotated[int, Field(ge=1)]
    strategy: str
    task: str
    metric: str
    higher_is_better: bool  # of its values
    score: float | None  # these four are None in a round without evaluation
    loss: float | None  # these two also where the global model could not be scored
    score_by_tier: dict[str, float] | None
    score_by_exit: list[float] | None  # from the shallowest on; None too where the family has one exit only
    # Of what devices would be given now. None too with evaluate-tiers = false; earlier versions do not have these five.
    delivered_score: float | None = None
    delivered_score_by_tier: dict[str, float] | None = None
    delivered_devices: Count | None = None
    devices_without_model: Count | None = None
    devices_beyond_budget: Count | None = None
    # Of the whole model, by the names of classes; None too where labels are not one class per example, where there are
    # many classes, and where devices score. Earlier versions do not have this, and do not have score_by_device.
    accuracy_by_class: dict[str, Share] | None = None
    # Of what each device would be given, or where devices score, what each did; None too where there are many devices.
    score_by_device: dict[int, float] | None = None
    # None too where the server has a test set; earlier versions do not have them.
    worst_device: Annotated[int, Field(ge=0)] | None = None
    worst_score: float | None = None
    scored_devices: Count | None = None
    personal_score: float | None  # these four are None in a round without personal evaluation
    personal_score_by_tier: dict[str, float] | None
    personal_devices: Count | None
    personal_failed: Count | None
    # None too where there are many devices, unless these have label sets of their own; earlier versions do not have it.
    personal_score_by_device: dict[int, float] | None = None
    # Of further networks that devices scored on their own examples; None too where the method has none.
    personal_score_by_network: dict[str, float] | None = None
    # What all rounds so far cost of privacy. None without differential privacy; earlier versions do not have them.
    epsilon: float | None = None
    delta: float | None = None
    # Lines of devices.jsonl that are of this round, one for each order. The journal counts them; earlier versions do
    # not have it.
    device_lines: Count | None = None
    devices_sampled: Count
    devices_replied: Count
    devices_failed: Count
    devices_refused: Count
    devices_bounded: Count  # whose updates were scaled down to norm-bound or dp-clip
    devices_state_lost: Count = 0  # that began anew because what they kept is gone; earlier versions do not have it
    devices_below_smallest: Count  # could afford no architecture of the strategy, whether skipped or not
    bytes_down: Bytes
    bytes_up: Bytes
    memory_utilisation: Share | None  # None when no device trained
    bandwidth_utilisation: Share | None  # None when no device trained under a payload budget
    distinct_architectures: Count
    simulated_seconds: Seconds
    wall_seconds: Seconds
    server_seconds: dict[str, Seconds]  # assign, payload, absorb, finish (aggregation), evaluate, and a method's own
    metrics: dict[str, float | None]  # of the method's own
    server_peak_rss_bytes: Bytes

    @property
    def scale(self) -> Scale:
        """What the scores mean."""
        return scale_of(self.metric, self.higher_is_better)

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, line: Any) -> Any:
        """Earlier versions wrote the figures of distillation beside the others."""
        if not isinstance(line, dict) or "metrics" in line:
            return line
        own = {key: value for key, value in line.items() if key in EARLIER_METRICS}
        rest = {key: value for key, value in line.items() if key not in EARLIER_METRICS}
        return rest | {"metrics": {key: value for key, value in own.items() if value is not None}}


def _both_ways(line: Any) -> Any:
    """Earlier versions wrote one payload for both ways."""
    if not isinstance(line, dict) or EARLIER_PAYLOAD not in line:
        return line
    rest = {key: value for key, value in line.items() if key != EARLIER_PAYLOAD}
    return {"download_bytes": line[EARLIER_PAYLOAD], "upload_bytes": line[EARLIER_PAYLOAD]} | rest


class BudgetRecord(Record):
    """What a device might spend in a round; None is no limit."""

    memory_bytes: Bytes
    download_bytes: Bytes | None
    upload_bytes: Bytes | None
    deadline_seconds: Seconds | None

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, line: Any) -> Any:
        return _both_ways(line)


class DeviceRecord(Record):
    """One device in one round. What a device that did not train cannot have is None."""

    device: Annotated[int, Field(ge=0)]
    node: int | None
    round: Annotated[int, Field(ge=1)]
    tier: str | None
    architecture: dict[str, Any] | None
    parameters: Count | None
    download_bytes: Bytes | None
    upload_bytes: Bytes | None
    budget: BudgetRecord | None
    predicted_memory_bytes: Bytes | None
    training_flops: Count | None = None  # of one example, by the price; earlier versions do not have it
    measured_memory_bytes: Bytes | None
    seconds: Seconds | None
    simulated_seconds: Seconds | None
    examples: Count | None
    loss: float | None
    bounded: bool  # its update was scaled down to norm-bound or dp-clip
    outcome: str

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, line: Any) -> Any:
        return _both_ways(line)

    @field_validator("outcome")
    @classmethod
    def _known_outcome(cls, outcome: str) -> str:
        if outcome in ("trained", "late") or outcome.startswith(("failed: ", "refused: ", "skipped: ")):
            return outcome
        raise ValueError(f"{outcome!r} is not 'trained', 'late', 'failed: ...', 'refused: ...' or 'skipped: ...'")

    @property
    def outcome_word(self) -> str:
        """The outcome without its reason: trained, late, failed, refused or skipped."""
        return self.outcome.split(":", 1)[0]


class Summary(ScoreRecord):
    """The whole run in a few figures. Bytes and wall seconds are sums over the rounds. A file never says unfinished."""

    status: Literal["finished", "failed", "unfinished"]
    rounds: Count
    metric: str | None  # None where no round was finished
    higher_is_better: bool
    # Final scores are means over the last fifth of the evaluations; summaries of earlier versions have the last one.
    final_score: float | None
    best_score: float | None
    best_round: int | None
    score_by_tier: dict[str, float] | None
    score_by_exit: list[float] | None
    delivered_score: float | None = None  # earlier versions do not have these ten
    delivered_score_by_tier: dict[str, float] | None = None
    worst_tier: str | None = None
    worst_tier_score: float | None = None
    last_score: float | None = None  # of the last evaluation alone
    last_delivered_score: float | None = None
    # These three are the most in one of the evaluations that the final scores are means of; earlier versions have the
    # last one's.
    delivered_devices: Count | None = None
    devices_without_model: Count | None = None
    devices_beyond_budget: Count | None = None
    worst_device: Count | None = None  # these three of the last evaluation, where devices score
    worst_device_score: float | None = None
    scored_devices: Count | None = None
    final_evaluations: Count | None = None  # how many the means are over
    personal_score: float | None  # means over the personal evaluations in the last fifth of the rounds
    personal_score_by_tier: dict[str, float] | None
    personal_score_by_network: dict[str, float] | None = None
    epsilon: float | None = None  # of the whole run; these two are None without differential privacy
    delta: float | None = None
    bytes_down: Bytes
    bytes_up: Bytes
    devices_by_outcome: dict[str, int]
    simulated_seconds: Seconds
    wall_seconds: Seconds
    error: str | None

    @property
    def scale(self) -> Scale:
        """What the scores mean."""
        return scale_of(self.metric, self.higher_is_better)

    def delivered_note(self) -> str:
        """What stands beside the delivered score: over how many evaluations it is, the last, and who is left out."""
        parts, text = [], score_format(self.scale)
        if (self.final_evaluations or 0) > 1 and self.last_delivered_score is not None:
            last = text(self.last_delivered_score)
            parts.append(f"mean of the last {self.final_evaluations} evaluations, the last {last}")
        devices, most = self.delivered_devices or 0, "up to " if (self.final_evaluations or 0) > 1 else ""
        if self.devices_without_model:
            parts.append(f"{most}{self.devices_without_model} of {devices} devices get none")
        if self.devices_beyond_budget:
            parts.append(f"{most}{self.devices_beyond_budget} of {devices} devices get more than they afford")
        return "; ".join(parts)


AnyRecord = TypeVar("AnyRecord", RoundRecord, DeviceRecord)


class Journal:
    """Writes one run's folder. Open it with `Journal.open`, write every round, and `finish` it in any case.

    A round's devices are written before the round itself, so a round that is in rounds.jsonl is complete.
    """

    def __init__(self, run_dir: Path, last_round: int) -> None:
        self.run_dir = run_dir
        self.last_round = last_round
        self._writer: SummaryWriter | None = None
        self._tracker: Tracker | None = None

    @classmethod
    def open(
        cls,
        run_dir: Path,
        config: Mapping[str, Any],
        resume: bool,
        fleet_digest: str = "",
        plugins: Mapping[str, str] | None = None,
        initial_digest: str = "",
        data: Mapping[str, Any] | None = None,
    ) -> "Journal":
        """Start a run's journal, or with `resume` go on with one, and write config.json.

        `config` is the whole resolved run configuration with its kebab-case keys, "seed" among them; `fleet_digest`
        stands for the contents of the fleet's files, `plugins` for those of the modules from outside, by their names,
        `initial_digest` for the file of first weights, and `data` is what identifies the data, if the server has them.
        A resumed journal still holds all its rounds, of which `last_round` is the last that both files have in full:
        call `drop_after` with the round of the checkpoint.

        Raises JournalError when there is a run in the folder already and `resume` is not set, when there is none and
        it is set, or when the run to be resumed had another configuration or has more rounds than that asks for.
        """
        _load_writers()
        check_folder(run_dir, resume)
        run_dir.mkdir(parents=True, exist_ok=True)
        journal = cls(run_dir, last_round=0)
        if resume:
            check_resumable(run_dir, config)
            check_same_fleet(run_dir, config, fleet_digest)
            check_same_plugins(run_dir, plugins or {})
            check_same_initial(run_dir, initial_digest)
            check_same_data(run_dir, data or {})
            journal.last_round = whole_rounds(run_dir)
            if journal.last_round == len(read_rounds(run_dir)):
                # Also cuts off a line that a crash left torn, so that nothing is ever appended to half a line.
                journal.drop_after(journal.last_round)
        elif (run_dir / "devices.jsonl").exists():  # of a run that broke off before its first checkpoint
            journal.drop_after(0)
        resolved = {
            "config": dict(config),
            "versions": versions(),
            "seed": config["seed"],
            "fleet-sha256": fleet_digest,
            **({PLUGINS: dict(plugins)} if plugins else {}),
            **({INITIAL: initial_digest} if initial_digest else {}),
            **({DATA: dict(data)} if data else {}),
        }
        _write_beside(run_dir / "config.json", json.dumps(resolved, indent=2) + "\n")
        (run_dir / "summary.json").unlink(missing_ok=True)
        if config.get("tracker"):
            try:
                journal._tracker = open_tracker(config["tracker"], run_dir, config)
            except TrackerError as error:
                raise JournalError(str(error)) from None
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
        _write_beside(self.run_dir / "rounds.jsonl", "".join(_line(record) for record in rounds))
        with file_written_whole(self.run_dir / "devices.jsonl") as file:
            # One line at a time: a long run's devices do not fit in memory.
            for device in read_devices(self.run_dir):
                if device.round <= round:
                    file.write(_line(device).encode())
        self.last_round = round

    def finish(self, status: Literal["finished", "failed"], error: str | None = None) -> Summary:
        """Write summary.json, then report.html. `error` is a traceback, of which the last lines are kept."""
        from server_app.report import write_report

        if self._writer is not None:
            self._writer.close()
            self._writer = None
        last_lines = None if error is None else "\n".join(error.rstrip().splitlines()[-ERROR_LINES:])
        try:
            summary = summarize(self.run_dir, status, last_lines)
            _write_beside(self.run_dir / "summary.json", summary.model_dump_json(indent=2) + "\n")
            write_report(self.run_dir)
        finally:
            if self._tracker is not None:  # after all that is ours: a slow one takes its time
                self._tracker.end(status)
                self._tracker = None
        return summary

    def _write_scalars(self, record: RoundRecord) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            # purge_step hides what an interrupted run had written of this round and later ones.
            self._writer = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=record.round)
        scalars = scalars_of(record)
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.round)
        self._writer.flush()
        if self._tracker is not None:
            self._tracker.write(record.round, finite(scalars))


def _load_writers() -> None:
    """Begin to load, beside the first round, what writes to TensorBoard, and the report with its script.

    Raises ModuleNotFoundError where there is no TensorBoard: that should stop a run before its first round.
    """
    if find_spec("tensorboard") is None:
        raise ModuleNotFoundError("No module named 'tensorboard': install the extra 'server'", name="tensorboard")

    def load() -> None:
        import torch.utils.tensorboard  # noqa: F401

        import server_app.report  # noqa: F401
        from server_app.pages import library

        library()

    if "torch.utils.tensorboard" not in sys.modules:
        Thread(target=load, name="writers", daemon=True).start()


def scalars_of(record: RoundRecord) -> dict[str, float | None]:
    """The figures of a round by the names that TensorBoard and trackers show them under."""
    scalars: dict[str, float | None] = {
        f"delivered_{record.metric}": record.delivered_score,
        record.metric: record.score,
        "loss": record.loss,
        "epsilon": record.epsilon,
        f"personal_{record.metric}": record.personal_score,
        "bytes/down": record.bytes_down,
        "bytes/up": record.bytes_up,
        "utilisation/memory": record.memory_utilisation,
        "utilisation/bandwidth": record.bandwidth_utilisation,
        "devices/sampled": record.devices_sampled,
        "devices/replied": record.devices_replied,
        "devices/failed": record.devices_failed,
        "devices/refused": record.devices_refused,
        "devices/bounded": record.devices_bounded,
        "devices/state_lost": record.devices_state_lost,
        "devices/below_smallest": record.devices_below_smallest,
        "architectures": record.distinct_architectures,
        "seconds/simulated": record.simulated_seconds,
        "seconds/wall": record.wall_seconds,
        "server/peak_rss_bytes": record.server_peak_rss_bytes,
    }
    metric, by_tier, by_exit = record.metric, record.score_by_tier or {}, record.score_by_exit or []
    scalars |= {f"{metric}_by_tier/{tier}": value for tier, value in by_tier.items()}
    delivered = record.delivered_score_by_tier or {}
    scalars |= {f"delivered_{metric}_by_tier/{tier}": value for tier, value in delivered.items()}
    scalars |= {f"{metric}_by_exit/{number}": value for number, value in enumerate(by_exit, start=1)}
    personal = record.personal_score_by_tier or {}
    scalars |= {f"personal_{metric}_by_tier/{tier}": value for tier, value in personal.items()}
    beside = record.personal_score_by_network or {}
    scalars |= {f"personal_{metric}_by_network/{name}": value for name, value in beside.items()}
    scalars |= {f"metrics/{name}": value for name, value in record.metrics.items()}
    scalars |= {f"server_seconds/{name}": value for name, value in record.server_seconds.items()}
    return scalars


def flat(record: Mapping[str, Any], whole: Iterable[str] = ()) -> dict[str, Any]:
    """A record with an entry per part of its dicts and lists, which count from 1; the `whole` ones stay as they are."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if key not in whole and isinstance(value, dict):
            found |= {f"{key}.{part}": entry for part, entry in value.items()}
        elif key not in whole and isinstance(value, list):
            found |= {f"{key}.{number}": entry for number, entry in enumerate(value, start=1)}
        else:
            found[key] = value
    return found


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder: two processes that write one journal would ruin it. JournalError where another holds it.

    The lock goes with the process that holds it, so that a killed run leaves none behind.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK
    with path.open("a") as file:
        if not _locked(file, seconds=LOCK_SECONDS):
            raise JournalError(f"another process is writing the run in {run_dir}: wait for it, or stop its ServerApp")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def is_run(run_dir: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (run_dir / "config.json").exists() or (run_dir / "rounds.jsonl").exists()


def runs_of(folders: Iterable[Path]) -> list[Path]:
    """The folders of the runs that these folders are or hold, each once: a sweep's folder holds its runs.

    The logs of a sweep are passed over, so that all that lies in its folder may be given. Raises JournalError for a
    folder that neither is a run nor holds one.
    """
    found: list[Path] = []
    for folder in folders:
        if is_run(folder):
            found.append(folder)
        elif inside := sorted(path for path in folder.glob("*/") if is_run(path)):
            found += inside
        elif not (folder.name == SWEEP_LOGS and any(is_run(path) for path in folder.absolute().parent.glob("*/"))):
            raise JournalError(
                f"{folder} is neither the folder of a run, which has a config.json, nor one that holds such folders, "
                "as that of a sweep does: give folders like runs/NAME"
            )
    return list({path.resolve(): path for path in found}.values())


def _locked(file: IO[str], seconds: float) -> bool:
    """Lock an open file; a process that only looks whether it is locked holds it for a moment."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)


def is_held(run_dir: Path) -> bool | None:
    """Whether a process writes the run; None where none has begun, or the last one has ended in order.

    False: the one that did was killed, and could not take its lock away.
    """
    path = run_dir / LOCK
    try:
        with path.open("r") as file:
            if not _locked(file, seconds=0.0):
                return True
            fcntl.flock(file, fcntl.LOCK_UN)
    except FileNotFoundError:
        return None
    return False if path.exists() else None  # it may have been taken away in between


def check_folder(run_dir: Path, resume: bool) -> None:
    """Raise JournalError unless a new run may start in `run_dir`, or with `resume` an earlier one go on there."""
    exists = is_run(run_dir)
    if exists and not resume and not _broke_off_at_once(run_dir):
        summary = read_summary(run_dir)
        state = f"a {summary.status}" if summary else "an unfinished"
        raise JournalError(
            f"{run_dir} already holds {state} run, which is not overwritten: "
            "choose another run-name, or go on with it by resume=true"
        )
    if resume and not exists:
        raise JournalError(f"{run_dir} holds no run to resume: check output-dir and run-name, or set resume=false")


def _broke_off_at_once(run_dir: Path) -> bool:
    """Whether a run ended before its first checkpoint, as on a full disk: there is nothing of it to keep."""
    from server_app import checkpoint  # which imports torch, and this is seldom asked

    return not checkpoint.exists(run_dir) and len(read_rounds(run_dir)) <= 1


def check_resumable(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Raise JournalError unless the run in `run_dir` may go on with this configuration.

    Keys that nothing reads make no difference, such as those of other methods, of which another version may have
    others.
    """
    from server_app.checkpoint import CheckpointError, check_there
    from server_app.config import unread  # both import torch

    before = read_config(run_dir)["config"]
    read = set().union(*(values.keys() - set(unread(values)) for values in (before, config)))
    changed = [
        f"{key} was {before.get(key)!r} and is {config.get(key)!r}"
        for key in sorted(before.keys() | config.keys())
        if before.get(key) != config.get(key)
        and key in read
        and (key not in MAY_CHANGE_ON_RESUME or (key == "data-dir" and is_of_a_folder(config.get("task"))))
    ]
    engines = before.get("engine", "local"), config.get("engine", "local")
    if engines[0] != engines[1] and "nodes" in engines:
        # What devices keep lies in the run's folder, or in those of the nodes.
        changed.append(f"engine was {engines[0]!r} and is {engines[1]!r}")
    if changed:
        raise JournalError(f"the run in {run_dir} cannot be resumed with another configuration: " + ", ".join(changed))
    if config.get("dp-epsilon") and before.get("rounds") != config.get("rounds"):
        raise JournalError(
            f"rounds = {config['rounds']}: the run in {run_dir} has the noise with which {before['rounds']} rounds "
            f"reach dp-epsilon = {config['dp-epsilon']:g}: leave rounds as they were"
        )
    if config.get("schedule") == "cosine" and before.get("rounds") != config.get("rounds"):
        raise JournalError(
            f"rounds = {config['rounds']}: the learning rate of the run in {run_dir} falls towards 0 over "
            f"{before['rounds']} rounds, and the rounds that are done had those rates: leave rounds as they were, or "
            "begin another run from its model (initial-weights)"
        )
    finished = len(read_rounds(run_dir))
    if config.get("resume-from", 0) > finished:
        raise JournalError(f"resume-from = {config['resume-from']}, but the run in {run_dir} has {finished} rounds")
    if config.get("resume-from", 0):
        try:
            check_there(run_dir, config["resume-from"])
        except CheckpointError as error:
            raise JournalError(str(error)) from None
    finished = config.get("resume-from", 0) or finished
    # Nothing would be run, and config.json would say fewer rounds than there are.
    if config["rounds"] < finished:
        raise JournalError(
            f"rounds = {config['rounds']}, but the run in {run_dir} has {finished}: ask for {finished} or more to go "
            "on with it, or start another run under another run-name"
        )


def is_of_a_folder(task: object) -> bool:
    """Whether a task's data set is what its folder holds; of one from outside the project nothing else is known."""
    return task in DATA_OF_A_FOLDER or is_reference(task)


def check_same_fleet(run_dir: Path, config: Mapping[str, Any], fleet_digest: str) -> None:
    """Raise JournalError unless the fleet's files hold what they held when the run in `run_dir` began."""
    if read_config(run_dir)["fleet-sha256"] != fleet_digest:
        raise JournalError(
            f"the run in {run_dir} cannot be resumed: the fleet file {config.get('fleet')!r} or a trace that it names "
            "is not what it was when the run began; put the old files back, or start another run"
        )


def check_same_plugins(run_dir: Path, plugins: Mapping[str, str]) -> None:
    """Raise JournalError unless the modules from outside are what they were when the run in `run_dir` began."""
    before = read_config(run_dir).get(PLUGINS, {})
    changed = sorted(name for name in before.keys() | plugins.keys() if before.get(name) != plugins.get(name))
    if changed:
        raise JournalError(
            f"the run in {run_dir} cannot be resumed: {', '.join(changed)} from outside the project "
            f"{'is' if len(changed) == 1 else 'are'} not as when the run began; put the old files back, or start "
            "another run"
        )


def check_same_initial(run_dir: Path, digest: str) -> None:
    """Raise JournalError unless the file of first weights is the one that the run in `run_dir` began with."""
    if read_config(run_dir).get(INITIAL, "") != digest:
        raise JournalError(
            f"the run in {run_dir} cannot be resumed: the file of initial-weights is not as when the run began; put "
            "the old one back, or start another run"
        )


def check_same_data(run_dir: Path, data: Mapping[str, Any]) -> None:
    """Raise JournalError unless the data are those that the run in `run_dir` began with, where it says which.

    Runs of earlier versions do not say it, and neither do those whose devices hold their own.
    """
    before = read_config(run_dir).get(DATA, {})
    changed = [key for key in before if before[key] != data.get(key)]
    if not changed:
        return
    told = [f"{key.replace('-', ' ')}: {before[key]} then, {data.get(key)} now" for key in changed if key != "sha256"]
    raise JournalError(
        f"the run in {run_dir} cannot be resumed: its data are not what they were when the run began "
        f"({'; '.join(told) or 'there are as many examples, and their labels or inputs differ'}); put the old data "
        "back, or start another run"
    )


def read_config(run_dir: Path) -> dict[str, Any]:
    """The content of config.json, an object of CONFIG_KEYS. Raises JournalError when there is no run."""
    path = run_dir / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JournalError(f"{run_dir} is not the folder of a run: it has no config.json") from None
    except (ValueError, RecursionError) as error:  # of its letters, its form, or how deep it is
        raise JournalError(
            f"{path} is not JSON: {error}. Without the configuration that it began with a run does not go on: put the "
            "file back from a copy, or start another run"
        ) from None
    if not isinstance(content, dict) or set(content) - {PLUGINS, INITIAL, DATA} != set(CONFIG_KEYS):
        raise JournalError(f"{path} must be an object with the keys {', '.join(CONFIG_KEYS)}")
    kinds = {"config": dict, "fleet-sha256": str, "seed": int, PLUGINS: dict, INITIAL: str, DATA: dict}
    wrong = [(key, content[key]) for key, kind in kinds.items() if not isinstance(content.get(key, kind()), kind)]
    if not wrong:
        texts = {
            "config.strategy": content["config"].get("strategy"),
            f"{DATA}.sha256": content.get(DATA, {}).get("sha256", ""),
        }
        texts |= {f"{PLUGINS}.{name}": digest for name, digest in content.get(PLUGINS, {}).items()}
        wrong = [(key, value) for key, value in texts.items() if not isinstance(value, str)]
    if wrong:
        key, value = wrong[0]
        raise JournalError(f"{path}: {key} = {shown(value)} is not what a run writes there")
    return content


def has_virtual_clock(run_dir: Path) -> bool:
    """Whether a run's devices are those of a fleet, whose time is simulated. Raises JournalError without a run."""
    return bool(read_config(run_dir)["config"].get("fleet", "of an earlier version"))


def read_summary(run_dir: Path) -> Summary | None:
    """The content of summary.json, or None while the run has not ended."""
    path = run_dir / "summary.json"
    if not path.exists():
        return None
    try:
        return Summary.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise JournalError(f"{path}: {in_words(error)}") from None


def read_rounds(run_dir: Path) -> list[RoundRecord]:
    """The finished rounds, 1, 2, ... without gaps. A torn last line, as a crash leaves it, is not a finished round."""
    rounds = list(_read_lines(run_dir / "rounds.jsonl", RoundRecord))
    for expected, record in enumerate(rounds, start=1):
        if record.round != expected:
            raise JournalError(
                f"{run_dir / 'rounds.jsonl'}, line {expected}: round {record.round} instead of {expected}"
            )
    return rounds


def read_devices(run_dir: Path) -> Iterator[DeviceRecord]:
    """The devices of every round, one after the other, also those of a round that a crash kept from finishing."""
    return _read_lines(run_dir / "devices.jsonl", DeviceRecord)


def whole_rounds(run_dir: Path) -> int:
    """How many rounds both files of the journal have in full: a damaged disk may have taken the end of either.

    What devices.jsonl has beyond the last round is of a round that a crash kept from finishing, and does not matter.
    """
    rounds = read_rounds(run_dir)
    lines: Counter[int] = Counter()
    devices: defaultdict[int, set[int]] = defaultdict(set)
    for device in read_devices(run_dir):
        lines[device.round] += 1
        devices[device.round].add(device.device)
    for record in rounds:
        if record.device_lines is not None:
            whole = lines[record.round] >= record.device_lines
        else:
            whole = len(devices[record.round]) >= record.devices_sampled
        if not whole:
            return record.round - 1
    return len(rounds)


def summarize(run_dir: Path, status: Literal["finished", "failed", "unfinished"], error: str | None) -> Summary:
    """The figures of summary.json, from the journal files as they are now."""
    rounds = read_rounds(run_dir)
    evaluated = [record for record in rounds if record.score_by_tier is not None]
    # The first of equals.
    whole = [record for record in evaluated if record.score is not None]
    best = max(whole, key=lambda record: record.scale.rank(record.score), default=None)
    last, final = (evaluated[-1] if evaluated else None), last_fifth(evaluated)
    # RecipFL's paper takes the mean over the last 20 % of its rounds.
    personal = [r for r in rounds[-max(1, round(len(rounds) / 5)) :] if r.personal_score is not None]
    outcomes: Counter[str] = Counter()
    tier_of: dict[int, str] = {}
    for device in read_devices(run_dir):
        if device.round <= len(rounds):
            outcomes[device.outcome_word] += 1
            if device.tier is not None:
                tier_of[device.device] = device.tier
    delivered = _means_by_name([r.delivered_score_by_tier for r in final], tier_of)
    of_tiers = (delivered or {}).items()
    worst, worst_score = min(of_tiers, key=lambda of_tier: rounds[-1].scale.rank(of_tier[1]), default=(None, None))
    exits = [r.score_by_exit for r in final if r.score_by_exit is not None]
    return Summary(
        status=status,
        rounds=len(rounds),
        metric=rounds[-1].metric if rounds else None,
        higher_is_better=rounds[-1].higher_is_better if rounds else True,
        final_score=_mean(r.score for r in final),
        best_score=best.score if best else None,
        best_round=best.round if best else None,
        score_by_tier=_means_by_name([r.score_by_tier for r in final], tier_of),
        score_by_exit=[sum(scores) / len(scores) for scores in zip(*exits, strict=True)] if exits else None,
        delivered_score=_mean(r.delivered_score for r in final),
        delivered_score_by_tier=delivered,
        worst_tier=worst,
        worst_tier_score=worst_score,
        last_score=last.score if last else None,
        last_delivered_score=last.delivered_score if last else None,
        delivered_devices=_most(r.delivered_devices for r in final),
        devices_without_model=_most(r.devices_without_model for r in final),
        devices_beyond_budget=_most(r.devices_beyond_budget for r in final),
        worst_device=last.worst_device if last else None,
        worst_device_score=last.worst_score if last else None,
        scored_devices=last.scored_devices if last else None,
        final_evaluations=len(final),
        personal_score=_mean(r.personal_score for r in personal),
        personal_score_by_tier=_means_by_name([r.personal_score_by_tier for r in personal], tier_of),
        personal_score_by_network=_means_by_name([r.personal_score_by_network for r in personal], {}),
        epsilon=rounds[-1].epsilon if rounds else None,
        delta=rounds[-1].delta if rounds else None,
        bytes_down=sum(record.bytes_down for record in rounds),
        bytes_up=sum(record.bytes_up for record in rounds),
        devices_by_outcome=dict(sorted(outcomes.items())),
        simulated_seconds=rounds[-1].simulated_seconds if rounds else 0.0,
        wall_seconds=sum(record.wall_seconds for record in rounds),
        error=error,
    )


def last_fifth(evaluated: Sequence[RoundRecord]) -> Sequence[RoundRecord]:
    """The last fifth of the evaluations, at least one: single evaluations swing, and their mean is a run's figure."""
    return evaluated[-max(1, round(len(evaluated) / 5)) :]


def _means_by_name(
    of_rounds: Sequence[Mapping[str, float] | None], tier_of: Mapping[int, str]
) -> dict[str, float] | None:
    """The means by name, each over the rounds that have one; None where no round has any.

    Names of tiers come in the order of the fleet, others as rounds have them.
    """
    there = [by_name for by_name in of_rounds if by_name is not None]
    names = in_fleet_order((name for by_name in there for name in by_name), tier_of)
    means = {name: _mean(by_name.get(name) for by_name in there) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None} if there else None


def in_fleet_order(tiers: Iterable[str], tier_of: Mapping[int, str]) -> list[str]:
    """Each tier once, as the fleet file has them: it numbers devices group after group.

    Args:
        tiers: those of a round stand as the fleet file has them, in journals of earlier versions not always.
        tier_of: the tiers of devices that trained or were to train. Where these stand in another order than `tiers`, a
            tier that none of them has comes last.
    """
    first = {tier_of[device]: device for device in sorted(tier_of, reverse=True)}
    names = list(dict.fromkeys(tiers))
    known = [first[tier] for tier in names if tier in first]
    return names if known == sorted(known) else sorted(names, key=lambda tier: first.get(tier, float("inf")))


def _most(values: Iterable[int | None]) -> int | None:
    """The largest of what is there."""
    return max((value for value in values if value is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _read_lines(path: Path, kind: type[AnyRecord]) -> Iterator[AnyRecord]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a crash: only the last line can lack its end
            try:
                yield kind.model_validate_json(line)
            except ValidationError as error:
                raise JournalError(f"{path}, line {number}: {in_words(error)}") from None


def _line(record: Record) -> str:
    return record.model_dump_json() + "\n"


def _append(path: Path, records: Sequence[Record]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(_line(record) for record in records))
        file.flush()
        os.fsync(file.fileno())


def _write_beside(path: Path, text: str) -> None:
    """Write a whole file so that at every moment either the old or the new one is there."""
    with file_written_whole(path) as file:
        file.write(text.encode())


def versions() -> dict[str, str | None]:
    """What a run's results may depend on; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "flwr", "wildflower"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None  # the app can run from its bundle without being installed
    return found
