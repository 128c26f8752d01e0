"""Models of a run on their way to its devices: by `wildflower deliver`, or every `delivery.every` rounds.

`deliver/VERSION` holds a program for each tier, and `tiers.json`, which has the hash of each file; `deliver/newest`
names the version that is to be delivered. A version is the round and a hash of what the programs are made from, because
the bytes of a program differ from export to export. It goes to the devices of a round once that is over, and by the
command to all that are there. Nobody is waited for: answers are read after later rounds. `delivered.json` has what each
device said. Where a method leaves personal models on devices, each makes the program of its own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import override

from wildflower.devices.validation import one_line
from wildflower.messages.delivery import Delivered, Delivery, Version
from wildflower.messages.error import MessageError
from wildflower.messages.orders import Hex64
from wildflower.messages.programs import LIBRARIES, ProgramFormat, check_writable, facts_path
from wildflower.messages.wire import DELIVERED_LIMITS, from_records, to_records
from wildflower.plugins.flower_log import log
from wildflower.plugins.user_error import UserError
from wildflower.rounds.engine import Engine
from wildflower.rounds.exchange import Failure, pull
from wildflower.rounds.hooks import Round, RoundHook
from wildflower.rounds.scores import evaluation_batch
from wildflower.server_app.config import RunConfig
from wildflower.server_app.export import export, facts_of
from wildflower.server_app.journal import versions
from wildflower.server_app.models import find_model, tiers_of
from wildflower.server_app.run_folder import read_config
from wildflower.server_app.whole_files import file_written_whole

FOLDER, TIERS, NEWEST, ONLY, SAID = "deliver", "tiers.json", "newest", "only", "delivered.json"
MESSAGE = "query.delivery"
DEADLINE_SECONDS = 600.0
_AGAIN = "wildflower deliver writes it again"


class Programs(BaseModel):
    """The programs of a version by tier, each the name of a file beside; "" is the global model's.

    There are none of a version of personal models. `sha256` has the hashes of programs and of the files with their
    facts.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Version
    file_format: ProgramFormat
    tiers: dict[str, Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+\.(pt2|onnx|pte)$")]]
    sha256: dict[str, Hex64]

    def read(self, folder: Path, name: str) -> bytes:
        """Return a file of this version; UserError where it is not what was written."""
        try:
            contents = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {folder / name}: {error.strerror}. {_AGAIN}") from None
        if hashlib.sha256(contents).hexdigest() != self.sha256.get(name):
            raise UserError(f"{folder / name} is damaged: its sha256 is not the one in {TIERS}. {_AGAIN}")
        return contents


_ANSWERS = TypeAdapter(dict[int, Delivered])


def write_programs(run_dir: Path, file_format: ProgramFormat = "pt2") -> str:
    """Write the best models of a run as programs for its tiers, unless they are there. -> their version, now the
    newest."""
    check_writable(file_format)
    files = {tier: f"{place}.{file_format}" for place, tier in enumerate(["", *tiers_of(run_dir)])}
    models = {tier: find_model(run_dir, tier=tier or None)[1] for tier in files}
    made_from = {
        "models": {
            tier: [info.model.sha256, facts_of(info, file_format).model_dump()] for tier, info in models.items()
        },
        "modules": dict(read_config(run_dir).plugins),
        "versions": {name: versions()[name] for name in ("wildflower", "torch")},
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES[file_format]},
    }
    return _as_newest(run_dir, models[""].round, json.dumps(made_from, sort_keys=True), file_format, files)


def write_personal(run_dir: Path, round_number: int, file_format: ProgramFormat) -> str:
    """Let the personal models of a round be delivered. -> their version."""
    return _as_newest(run_dir, round_number, f"{run_dir.name} {round_number} {file_format}", file_format, {})


def _as_newest(
    run_dir: Path, round_number: int, made_from: str, file_format: ProgramFormat, files: dict[str, str]
) -> str:
    """Write the programs of a version, unless they are there whole, and name it the newest."""
    version = f"{round_number}-{hashlib.sha256(made_from.encode()).hexdigest()[:12]}"
    place, pointer = run_dir / FOLDER / version, run_dir / FOLDER / NEWEST
    if not _whole(place):
        folder = run_dir / FOLDER / f".{os.getpid()}.part"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            sha256 = {}
            for tier, name in files.items():
                path = export(run_dir, file_format=file_format, tier=tier or None, out=folder / name)
                for written in (path, facts_path(path)):
                    sha256[written.name] = hashlib.sha256(written.read_bytes()).hexdigest()
            programs = Programs(version=version, file_format=file_format, tiers=files, sha256=sha256)
            (folder / TIERS).write_text(programs.model_dump_json(indent=1))
            shutil.rmtree(place, ignore_errors=True)
            os.replace(folder, place)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    before = pointer.read_text() if pointer.exists() else ""
    with file_written_whole(pointer) as file:
        file.write(version.encode())
    # The one before stays, because a run that goes on may be reading it.
    for older in run_dir.glob(f"{FOLDER}/[0-9]*"):
        if older.name not in (version, before):
            shutil.rmtree(older)
    return version


def _whole(folder: Path) -> bool:
    """Return whether a folder holds all files of a version as they were written."""
    try:
        programs = _programs(folder)
        for name in programs.sha256:
            programs.read(folder, name)
    except UserError:
        return False
    return True


def _programs(folder: Path) -> Programs:
    """Return the programs of a version's folder; UserError where `tiers.json` is not what was written."""
    try:
        return Programs.model_validate_json((folder / TIERS).read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{folder / TIERS} is not what was written: {one_line(str(error))}. {_AGAIN}") from None


def newest(run_dir: Path) -> tuple[Path, Programs] | None:
    """Return the folder of the version that is to be delivered, and its programs; None where there is none."""
    try:
        version = (run_dir / FOLDER / NEWEST).read_text()
    except FileNotFoundError:
        return None
    folder = run_dir / FOLDER / version
    return folder, _programs(folder)


def read_delivered(run_dir: Path) -> dict[int, Delivered]:
    """Return what devices have said of the models that they were sent, by device."""
    try:
        return _ANSWERS.validate_json((run_dir / SAID).read_bytes())
    except FileNotFoundError:
        return {}


def only_delivers(run_dir: Path) -> bool:
    """Return whether a run is taken up to deliver its models and to train no further; once for each time it is asked
    to."""
    try:
        (run_dir / FOLDER / ONLY).unlink()
    except FileNotFoundError:
        return False
    return True


class _Sent(NamedTuple):
    node: int
    device: int
    version: str
    until: float  # of time.monotonic()


class Deliveries(RoundHook):
    """Sends models to devices, where there are any to send, and reads what they say of them."""

    def __init__(self, run_dir: Path, config: RunConfig, engine: Engine) -> None:
        self._run_dir, self._config, self._engine = run_dir, config, engine
        self._open: dict[str, _Sent] = {}  # message -> what was sent

    @override
    def at_end(self, round: Round) -> None:
        """Deliver to the devices of the round, which have been asked already; others are when it is their turn."""
        if (every := self._config.delivery.every) and round.number % every == 0:
            self.write()
        self._read(round.grid)
        self._send(round.grid, round.population.connected(round.grid, round.devices))

    def write(self) -> None:
        """Write the run's models as programs; what hinders it is in the log, and the run goes on."""
        try:
            if self._config.method.traits(self._config.params).personal:
                write_personal(self._run_dir, self._engine.method.round, self._config.delivery.format)
            else:
                write_programs(self._run_dir, self._config.delivery.format)
        except (UserError, OSError) as error:
            log.warning("Nothing new is delivered after round %s: %s", self._engine.method.round, one_line(str(error)))

    def to_all(self, grid: Grid) -> None:
        """Deliver to all devices that are there, and wait for their answers."""
        self._send(grid, self._engine.population.everyone(grid))
        self.wait(grid)

    def wait(self, grid: Grid) -> None:
        """Wait for the answers of those that were sent a model."""
        while self._open:
            self._read(grid)
            if self._open:
                time.sleep(self._engine.population.poll_seconds)

    def _send(self, grid: Grid, devices: Iterable[int]) -> None:
        """Send the newest version to those of the devices that have not been sent it; a damaged one to nobody."""
        try:
            self._send_newest(grid, devices)
        except UserError as error:
            log.warning("No model is delivered: %s", one_line(str(error)))

    def _send_newest(self, grid: Grid, devices: Iterable[int]) -> None:
        found = newest(self._run_dir)
        if found is None:
            return
        folder, programs = found
        said, asked = read_delivered(self._run_dir), {sent.device for sent in self._open.values()}
        for device in devices:
            if device in asked or (device in said and said[device].version == programs.version):
                continue
            if (made := self._made(folder, programs, device)) is None:
                continue
            [node] = self._engine.population.nodes(grid, [device], [0.0])
            message = Message(to_records(*made), node, MESSAGE, ttl=DEADLINE_SECONDS)
            for message_id in grid.push_messages([message]):
                if message_id:
                    until = time.monotonic() + DEADLINE_SECONDS
                    self._open[message_id] = _Sent(node, device, programs.version, until)

    def _made(self, folder: Path, programs: Programs, device: int) -> tuple[Delivery, list[bytes]] | None:
        """What a device is sent; None where it has no model yet."""
        engine = self._engine
        delivery = Delivery(
            run=engine.settings.run,
            device=device,
            version=programs.version,
            file_format=programs.file_format,
            task=engine.settings.task,
        )
        if programs.tiers:
            name = programs.tiers.get(engine.population.tier(device)) or programs.tiers[""]
            program, facts = programs.read(folder, name), json.loads(programs.read(folder, f"{facts_path(Path(name))}"))
            return delivery.model_copy(update={"sha256": programs.sha256[name], "facts": facts}), [program]
        keepers = engine.asking.keepers
        if not engine.method.has_model(device) or (keepers and device not in keepers):
            return None
        asked = engine.evaluation.personal_order(device)
        orders = engine.asking.to_score(asked, engine.method.family, engine.method.payload)
        if not asked:
            return None
        own, arrays = evaluation_batch(orders, asked, engine.settings, "shard", simulated=False)
        return delivery.model_copy(update={"own": own}), arrays

    def _read(self, grid: Grid) -> None:
        """Read what devices have answered since, and give up those whose time is over."""
        said = {}
        for message_id, reply in pull(grid, {number: sent.node for number, sent in self._open.items()}):
            sent = self._open.pop(message_id)
            try:
                if isinstance(reply, Failure):
                    raise MessageError(reply.why)
                answer, _ = from_records(Delivered, reply.content, DELIVERED_LIMITS)
                run = self._engine.settings.run
                if (answer.run, answer.device, answer.version) != (run, sent.device, sent.version):
                    raise MessageError("it speaks of another delivery")
            except MessageError as error:
                text = "The model %s did not reach device %s: %s"
                log.warning(text, sent.version, sent.device, one_line(str(error)))
                continue
            said[sent.device] = answer
            if answer.used:
                log.info("Device %s uses the model %s", sent.device, answer.version)
            else:
                text = "Device %s does not use the model %s: %s"
                log.warning(text, sent.device, answer.version, one_line(answer.why))
        if said:
            with file_written_whole(self._run_dir / SAID) as file:
                file.write(_ANSWERS.dump_json(read_delivered(self._run_dir) | said, indent=1))
        for number, sent in list(self._open.items()):
            if time.monotonic() >= sent.until:
                del self._open[number]
                text = "The model %s did not reach device %s: no reply within %g s"
                log.warning(text, sent.version, sent.device, DEADLINE_SECONDS)
