"""Models of a run on their way to its devices: `wildflower deliver` writes them into the run's folder.

`deliver/VERSION` holds a program for each tier, and `tiers.json`, which is written last. After every round, and when
a run that has ended is continued, the newest version is sent to the devices that are there and have not been sent it.
`delivered.json` has what each device said.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Annotated, Any

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import override

from wildflower.devices.validation import one_line
from wildflower.messages.delivery import Delivered, Delivery, Version
from wildflower.messages.error import MessageError
from wildflower.messages.wire import DELIVERED_LIMITS, from_records, to_records
from wildflower.plugins.user_error import UserError
from wildflower.rounds.exchange import Failure, exchange
from wildflower.rounds.hooks import Round, RoundHook
from wildflower.rounds.population import Population
from wildflower.server_app.whole_files import file_written_whole

FOLDER, TIERS, SAID = "deliver", "tiers.json", "delivered.json"
MESSAGE = "query.delivery"
DEADLINE_SECONDS = 600.0


class Programs(BaseModel):
    """The programs of a version by tier, each the name of a .pt2 file beside; "" is the global model's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Version
    tiers: dict[str, Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+\.pt2$")]]


_ANSWERS = TypeAdapter(dict[int, Delivered])


def newest(run_dir: Path) -> tuple[Path, Programs] | None:
    """Return the folder of the version that is to be delivered, and its programs; None where there is none."""
    files = sorted((run_dir / FOLDER).glob(f"[0-9]*/{TIERS}"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        return None
    try:
        return files[-1].parent, Programs.model_validate_json(files[-1].read_bytes())
    except ValidationError as error:
        raise UserError(f"{files[-1]} is not what wildflower deliver writes: {one_line(str(error))}") from None


def read_delivered(run_dir: Path) -> dict[int, Delivered]:
    """Return what devices have said of the models that they were sent, by device."""
    try:
        return _ANSWERS.validate_json((run_dir / SAID).read_bytes())
    except FileNotFoundError:
        return {}


class Deliveries(RoundHook):
    """Sends models to devices, where there are any to send."""

    def __init__(self, run_dir: Path, run: str, task: Mapping[str, Any]) -> None:
        self._run, self._run_dir, self._task = run, run_dir, dict(task)

    @override
    def at_end(self, round: Round) -> None:
        self.deliver(round.grid, round.population)

    def deliver(self, grid: Grid, population: Population) -> None:
        """Send the newest version to the devices that are there and have not been sent it."""
        found = newest(self._run_dir)
        if found is None:
            return
        folder, programs = found
        said = read_delivered(self._run_dir)
        devices = [
            device
            for device in population.everyone(grid)
            if not (device in said and said[device].version == programs.version)
        ]
        carried = dict(zip(population.nodes(grid, devices, [0.0] * len(devices)), devices, strict=True))

        def make(node: int, device: int) -> Message:
            name = programs.tiers.get(population.tier(device)) or programs.tiers[""]
            program = (folder / name).read_bytes()
            delivery = Delivery(
                run=self._run,
                device=device,
                version=programs.version,
                sha256=hashlib.sha256(program).hexdigest(),
                facts=json.loads((folder / f"{name}.json").read_text()),
                task=self._task,
            )
            return Message(to_records(delivery, [program]), node, MESSAGE, ttl=DEADLINE_SECONDS)

        queues = {node: deque([device]) for node, device in carried.items()}
        replies = exchange(
            grid,
            queues,
            make,
            deadline_seconds=DEADLINE_SECONDS,
            busy=population.busy,
            poll_seconds=population.poll_seconds,
        )
        for device, reply in replies:
            try:
                if isinstance(reply, Failure):
                    raise MessageError(reply.why)
                answer, _ = from_records(Delivered, reply.content, DELIVERED_LIMITS)
                if (answer.device, answer.version) != (device, programs.version):
                    raise MessageError("it speaks of another delivery")
            except MessageError as error:
                log(WARNING, "The model %s did not reach device %s: %s", programs.version, device, one_line(str(error)))
                continue
            said[device] = answer
            if answer.used:
                log(INFO, "Device %s uses the model %s", device, answer.version)
            else:
                log(WARNING, "Device %s does not use the model %s: %s", device, answer.version, one_line(answer.why))
        with file_written_whole(self._run_dir / SAID) as file:
            file.write(_ANSWERS.dump_json(said, indent=1))
