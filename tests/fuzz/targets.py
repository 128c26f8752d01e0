"""What reads from outside, each with honest input, a way to change it, and what may become of what is accepted."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import strategies as st

from tests.client_app.work_orders import batch, work_order
from tests.fuzz.mutations import Choices, as_text, changed_bytes, changed_json, changed_text, messages
from tests.server_app.fake_runs import CONFIG, three_rounds
from tests.small_run import FLEET, small_config, started
from wildflower.client_app.policy import Policy
from wildflower.client_app.prepared import family_of
from wildflower.client_app.secure_member import SecureDevice
from wildflower.devices.budget import Budget
from wildflower.devices.fleet import Fleet
from wildflower.devices.resource_report import DeviceReport
from wildflower.messages.encoding import Wire, encode
from wildflower.messages.error import MessageError
from wildflower.messages.flower_records import make_records
from wildflower.messages.masks import (
    SEALED_BYTES,
    SEED_BYTES,
    Secrets,
    add_common_masks,
    digest_of_members,
    digests_of,
    mask_key,
    seal,
    unseal,
)
from wildflower.messages.orders import (
    Batch,
    DataAnswer,
    KeyAnswer,
    KeyOrder,
    KeyReply,
    NodeReport,
    Reply,
    Update,
    parse,
)
from wildflower.messages.sums import SCALE, joined
from wildflower.messages.wire import DATA_ANSWER_LIMITS, NODE_REPORT_LIMITS, from_records
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.lenet import LeNet5
from wildflower.rounds.replies import read_reply
from wildflower.rounds.requests import Assignment, Given, Work
from wildflower.rounds.secure_aggregation import SecureRound
from wildflower.server_app import checkpoint
from wildflower.server_app.checkpoint import Checkpoint, CheckpointError
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.run_folder import JournalError, read_config, read_devices, read_rounds, read_summary
from wildflower.strategies.method import LEADING, Order, State, client_step_of
from wildflower.strategies.static_norm import MaskedTraining
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.agreement import Declared, agree
from wildflower.tasks.device_data import Agreed, Summary


@dataclass(frozen=True)
class Target:
    """inputs: hostile ones. read: reads one, and raises one of `refusals`, or returns what may be used.

    harmless: AssertionError where what was accepted could do more harm than an honest input.
    max_seconds: the processor's, of one input. What a user writes may take longer than what a node sends.
    """

    name: str
    count: int
    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], Any]
    refusals: tuple[type[Exception], ...]
    harmless: Callable[[Any], None]
    max_seconds: float = 0.05


# A node trusts its server with all its work: large batches are honest, and take their time.
MAX_ORDER_LETTERS = 2**17
BOUND, HELD = 0.5, 24  # the norm bound, and how many examples the device has
MAX_EXAMPLES = 1000  # that a device may say that it has
FAMILY = LeNet5(input_shape=(1, 8, 8), classes=4, conv_channels=(2, 3), hidden=(8, 6))
REPORT = DeviceReport("raspberry-pi-4", 4 * 2**30, 2**30, 20.0, 5.0)


def replies(name: str, count: int, wire: Wire) -> Target:
    """A node's reply to one order, under a norm bound."""
    local, full = MaskedTraining(weighting="uniform"), FAMILY.full()
    price = cost(FAMILY, full, batch_size=4, optimizer="sgd")
    given = Given(Order(3, full), LEADING, price, local)
    asked = Assignment(3, "all", Budget(2**30), given, node=1)
    sent = initial_weights(FAMILY, 1)
    work = Work(
        round=2,
        assignments=[asked],
        family=FAMILY,
        payload=lambda group: {"weights": sent},
        absorb=lambda contribution: None,
        enough=1,
        simulated=False,
        norm_bound=BOUND,
        wire=wire,
    )
    tensor_set = work.groups[0].returned["weights"]
    # Weights, or where the wire rounds how they have changed.
    returned = {n: value + 0.001 if wire == "float32" else torch.full_like(value, 0.001) for n, value in sent.items()}
    array = encode(returned, tensor_set.layout, wire)
    update = Update(
        order=0,
        device=3,
        outcome="trained",
        payloads={"weights": 0},
        examples=HELD,
        loss=1.0,
        present_classes=[0, 2],
        report=REPORT.to_json(),
    )
    honest = json.loads(Reply(run="a run", round=2, updates=[update]).model_dump_json())
    start = torch.cat([sent[entry.name].flatten() for entry in tensor_set.layout.entries])

    @st.composite
    def inputs(draw: st.DrawFn) -> RecordDict:
        choices, text, arrays = Choices(draw), as_text(honest), [array]
        how = choices.below(10)
        if how < 7:
            text = as_text(changed_json(draw, honest))
        elif how == 7:
            text = changed_text(draw, text)
        if how >= 7:
            arrays = [changed_bytes(draw, array)] * choices.of((1, 1, 1, 0, 2, 50))
        return make_records(text, arrays)

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # a Flower process sets them

    def read(records: RecordDict) -> Any:
        message = Message(records, 1, "train")
        asked.outcome, asked.update = "", None
        checked = read_reply("a run", work, [asked], message, lambda device: HELD, lambda device, report: None)
        if set(checked.outcomes.values()) != {"trained"}:
            raise MessageError(next(iter(checked.outcomes.values())))
        return checked

    def harmless(checked: Any) -> None:
        [contribution] = checked.contributions
        assert 1 <= contribution.examples <= HELD
        total = contribution.sums["weights"]
        assert total.weight == 1024
        moved = total.total.double() / (total.weight * SCALE) - start
        moved[total.total == 0] = 0.0  # rows of absent classes
        assert float(moved.norm()) <= BOUND * 1.001
        assert all(outcome.isprintable() for outcome in checked.outcomes.values())
        assert all(isinstance(report, DeviceReport) for report in checked.reports.values())

    return Target(name, count, inputs(), read, (MessageError,), harmless)


def orders() -> Target:
    """A message to a node, as far as it is read before anything is trained."""
    honest = json.loads(batch(work_order(1), work_order(2)).model_dump_json())

    texts = messages(honest, copies=20).filter(lambda text: len(text) < MAX_ORDER_LETTERS)

    def read(text: str) -> Batch:
        found = parse(Batch, text)
        family = family_of(json.dumps(found.family))
        for order in found.orders:
            try:
                family.validate(Architecture.from_json(order.architecture))
            except ValueError as error:  # of the order alone
                raise MessageError(str(error)) from None
            client_step_of(order.client_step)
        return found

    def harmless(found: Batch) -> None:
        assert 1 <= len(found.orders) <= 4000
        assert all(0 <= order.device < 2**63 for order in found.orders)

    return Target("orders", 4000, texts, read, (MessageError,), harmless)


def reports() -> Target:
    """A node's answer to a query."""
    honest = {"device": 3, "report": REPORT.to_json()}

    inputs = messages(honest).map(lambda text: RecordDict({"wildflower": ConfigRecord({"json": text})}))

    def read(records: RecordDict) -> DeviceReport:
        answer, _ = from_records(NodeReport, records, NODE_REPORT_LIMITS)
        return DeviceReport.from_json(answer.report)

    def harmless(report: DeviceReport) -> None:
        assert report.kind.isprintable()
        assert 0 <= report.memory_available_bytes <= report.memory_total_bytes < 2**63
        assert replace(report) == report

    return Target("reports", 3000, inputs, read, (ValueError,), harmless)


def key_answers(folder: Path) -> Target:
    """What a device answers about its keys, shares that it seals, the sum, and those that it reveals: one of four."""
    keys = {"fleet": "", "strategy": "fedavg", "devices": 4, "devices-per-round": 4}
    engine, _ = started(small_config(folder, **keys | {"secure-aggregation.minimum": 3}))
    local, full, everybody = MaskedTraining(weighting="uniform"), FAMILY.full(), [0, 1, 2, 3]
    price = cost(FAMILY, full, batch_size=4, optimizer="sgd")
    orders = [
        Assignment(d, "all", Budget(2**30), Given(Order(d, full), LEADING, price, local), node=d + 1) for d in everybody
    ]
    sent = {name: torch.zeros(spec.shape) for name, spec in FAMILY.tensors(full).items()}
    nothing: dict[str, Any] = {"payload": lambda _: {"weights": sent}, "absorb": print, "enough": 1, "simulated": False}
    work = Work(round=1, assignments=orders, family=FAMILY, **nothing)
    secure = SecureRound(work, engine.settings, engine.population)
    [found] = secure.sums
    # An honest round of the four, whose third is lost while it trains.
    homes = [folder / str(device) for device in everybody]
    devices = [SecureDevice(d, engine.settings.run, 1, home, Policy()) for d, home in enumerate(homes)]
    weights = secure._weights(found)
    made = [device.do_step(KeyOrder(device=device.device, weights=weights)).member for device in devices]
    found.members = [member for member in made if member is not None]
    for d, device in enumerate(devices):
        shared = device.do_step(found.sharing(d))
        found.sealed[d], found.share_hashes[d] = shared.sealed, shared.share_hashes
        orders[d].update = Update(order=d, device=d, outcome="trained", examples=HELD)
    values = joined(work.empty_sums(orders[0]))
    content, arrays = work.content(engine.settings, orders[:1])
    _, work_digest = digests_of(content, content.orders[0], arrays)
    for d, device in enumerate(devices):
        words = device.masked(values + (d + 1), everybody, weights, work_digest)
        if d != 2:
            found.add(d, torch.frombuffer(bytearray(words), dtype=torch.int64))
    found.blocks = [sorted(found.arrived)]
    confirmed = {d: devices[d].do_step(found.confirming(d)) for d in found.arrived}
    found.confirmed = {d: answer.confirmed for d, answer in confirmed.items()}
    answers = {d: devices[d].do_step(found.revealing(d)) for d in found.arrived}
    sessions = [Secrets(bytes.fromhex(json.loads((home / "secure.json").read_text())["root"])) for home in homes]
    members = digest_of_members(found.members, found.threshold, found.minimum)
    right = secure._unmasked(found, answers).sums["weights"].total
    assert int(right[0]) == 1 + 2 + 4
    honest = [
        KeyAnswer(device=0, member=found.members[0]),
        KeyAnswer(device=0, sealed=found.sealed[0], share_hashes=found.share_hashes[0]),
        confirmed[0],
        answers[0],
    ]
    texts = [json.loads(KeyReply(run=engine.settings.run, round=1, answers=[a]).model_dump_json()) for a in honest]

    @st.composite
    def inputs(draw: st.DrawFn) -> RecordDict:
        choices = Choices(draw)
        reply, how = choices.of(texts), choices.below(10)
        text = as_text(changed_json(draw, reply) if how >= 3 else reply)
        if how < 6:  # another letter in a key or a share, which keeps its length
            start = choices.below(len(text))
            text = text[:start] + choices.of("0123456789abcdef") + text[start + 1 :]
        return make_records(text)

    def read(records: RecordDict) -> KeyAnswer:
        answer = secure._read([KeyOrder(device=0)], Message(records, 1, "query")).get(0)
        if answer is None or answer.error:
            raise MessageError("no answer" if answer is None else str(answer.error))
        return answer

    def harmless(answer: KeyAnswer) -> None:
        """The sum stays the one of the honest devices, or is lost with words: no answer makes it another one."""
        with suppress(MessageError):
            if answer.member is not None:
                shares = seal(sessions[1].channel, 1, answer.member, bytes(16), bytes(16), members)
                assert len(shares) == SEALED_BYTES
                add_common_masks(
                    np.zeros(4, np.uint64), 1, mask_key(sessions[1].mask_seed), {0: answer.member}, members
                )
        for sealed in answer.sealed[:4]:
            with suppress(MessageError):
                own, mask = unseal(sessions[1].channel, 1, found.members[0], bytes.fromhex(sealed), members)
                assert len(own) == len(mask) == SEED_BYTES
        if answer.shares:
            with suppress(MessageError):
                total = secure._unmasked(found, answers | {0: answer}).sums["weights"].total
                assert torch.equal(total, right)

    return Target("answers about keys", 2000, inputs(), read, (MessageError,), harmless)


def data_answers() -> Target:
    """What a device says of the data that it alone holds, beside two honest ones: of images, or of numbers."""
    images = {"stored": "uint8", "input_shape": [1, 8, 8], "labels": "classes"}
    numbers = {"stored": "float32", "input_shape": [2, 4], "labels": "classes"}
    sums_of_images = {"values": HELD * 64, "sums": [1.0e5], "squares": [1.0e7]}
    sums_of_numbers = {"values": HELD * 4, "sums": [8.0, 8.0], "squares": [90.0, 90.0]}
    rows = {"stored": "float64", "input_shape": [2, 1], "labels": "classes"}
    sums_of_rows = {"values": HELD, "sums": [8.0, 8.0], "squares": [90.0, 90.0], "centers": [1.7e9, 0.5]}

    def one(form: dict[str, Any], moments: dict[str, Any], device: int) -> dict[str, Any]:
        said = {"examples": HELD, "test_examples": 6, "form": form, "label_names": ["0", "1"], "moments": moments}
        said["remarks"] = [{"what": "files that are not read", "count": 3, "example": "cat/1.heic"}]
        return {"run": "a run", "said": {"device": device, **said}}

    kinds = [(images, sums_of_images), (numbers, sums_of_numbers), (rows, sums_of_rows)]
    others = {
        form["stored"]: [parse(DataAnswer, as_text(one(form, sums, d))).said for d in (1, 2)] for form, sums in kinds
    }
    before = {stored: agree(two, Declared(), MAX_EXAMPLES)[0] for stored, two in others.items()}
    inputs = st.one_of(
        *(st.tuples(st.just(form["stored"]), messages(one(form, sums, 0)).map(make_records)) for form, sums in kinds)
    )

    def read(sent: tuple[str, RecordDict]) -> tuple[Summary, Agreed, str]:
        stored, records = sent
        answer, _ = from_records(DataAnswer, records, DATA_ANSWER_LIMITS)
        if answer.run != "a run" or answer.said.device != 0:
            raise MessageError("of another run, or of another device")
        agreed, unfit = agree([answer.said, *others[stored]], Declared(), MAX_EXAMPLES)
        if 0 in unfit:
            raise MessageError(unfit[0])
        assert not unfit, "a device has ruled out another"
        return answer.said, agreed, stored

    def harmless(found: tuple[Summary, Agreed, str]) -> None:
        """Its weight is bounded, the form is the others', and inputs are normalized by what such values can have."""
        said, agreed, stored = found
        assert 1 <= said.examples <= MAX_EXAMPLES
        assert said.test_examples <= MAX_EXAMPLES
        assert agreed.form == before[stored].form
        assert set(before[stored].label_names) <= set(agreed.label_names)
        assert len(agreed.label_names) <= len(before[stored].label_names) + said.examples + said.test_examples
        assert all(name.isprintable() for name in agreed.label_names)
        assert all(map(math.isfinite, (*agreed.mean, *agreed.std)))
        assert all(std > 0 for std in agreed.std)
        if stored == "uint8":
            assert 0 <= agreed.mean[0] <= 255
            assert agreed.std[0] <= 255

    return Target("answers about data", 2000, inputs, read, (ValueError,), harmless)


def checkpoints(folder: Path) -> Target:
    """Two checkpoints, of which one has another file, or both have."""
    state = State({"weights/w": torch.arange(12.0).reshape(3, 4)}, {"tiers": {"a": {"widths": [3]}}})
    for number in (1, 2):
        checkpoint.save(folder, Checkpoint(number, 0.5 * number, state), keep=2)
    rounds = [folder / "checkpoint" / f"round-{number}" for number in (1, 2)]
    honest = {path: path.read_bytes() for written in rounds for path in written.iterdir()}
    files = [sorted(written.iterdir()) for written in rounds]

    @st.composite
    def inputs(draw: st.DrawFn) -> dict[Path, bytes]:
        """Files of the newest checkpoint, or of both."""
        choices = Choices(draw)
        paths = [choices.of(files[number]) for number in choices.of(((1,), (0, 1)))]
        return {path: changed_bytes(draw, honest[path]) for path in paths}

    def read(changes: dict[Path, bytes]) -> Checkpoint:
        for path, data in changes.items():
            path.write_bytes(data)
        try:
            return checkpoint.load(folder)
        finally:
            for path in changes:
                path.write_bytes(honest[path])

    def harmless(found: Checkpoint) -> None:
        assert found.round in (1, 2)
        assert torch.equal(found.state.tensors["weights/w"], state.tensors["weights/w"])
        assert found.state.values == state.values

    return Target("checkpoints", 400, inputs(), read, (CheckpointError,), harmless)


def journals(folder: Path) -> Target:
    """The folder of a run of which one file is another."""
    three_rounds(folder).finish("finished")
    names = ("rounds.jsonl", "devices.jsonl", "config.json", "summary.json")
    honest = {name: (folder / name).read_bytes() for name in names}

    @st.composite
    def inputs(draw: st.DrawFn) -> tuple[str, bytes]:
        choices = Choices(draw)
        name = choices.of(names)
        if choices.below(2):
            return name, changed_bytes(draw, honest[name])
        lines = honest[name].decode().splitlines() if name.endswith("l") else [honest[name].decode()]
        place = choices.below(len(lines))
        lines[place] = as_text(changed_json(draw, json.loads(lines[place])))
        return name, ("\n".join(lines) + "\n").encode()

    def read(change: tuple[str, bytes]) -> Any:
        name, data = change
        (folder / name).write_bytes(data)
        try:
            return read_rounds(folder), list(read_devices(folder)), read_config(folder), read_summary(folder)
        finally:
            (folder / name).write_bytes(honest[name])

    def harmless(found: Any) -> None:
        rounds, devices, config, _ = found
        assert [record.round for record in rounds] == list(range(1, len(rounds) + 1))
        assert len(rounds) <= 4
        assert all(device.round >= 1 for device in devices)
        assert isinstance(config.config, dict)
        assert CONFIG  # what is in it is compared with the run's own, word by word, before it is resumed

    return Target("journals", 300, inputs(), read, (JournalError,), harmless)


def fleets(folder: Path) -> Target:
    """A fleet file."""
    honest = tomllib.loads(FLEET)["group"]

    @st.composite
    def inputs(draw: st.DrawFn) -> str:
        if Choices(draw).below(10) >= 6:
            return changed_text(draw, FLEET)
        groups = changed_json(draw, honest, copies=3)
        lines: list[str] = []
        for group in groups if isinstance(groups, list) else []:
            lines.append("[[group]]")
            if isinstance(group, dict):
                lines += [f"{json.dumps(key)} = {_toml(value)}" for key, value in group.items()]
        return "\n".join(lines)

    def read(text: str) -> Fleet:
        path = folder / "fleet.toml"
        path.write_text(text, errors="replace")
        return Fleet(path, devices=6, seed=1, requirement=lambda width: (10**6, 10**5))

    def harmless(fleet: Fleet) -> None:
        assert fleet.size == 6
        for device in (0, 5):
            report = fleet.report(device, 60.0)
            assert 0 <= report.memory_available_bytes < 2**63

    return Target("fleet files", 200, inputs(), read, (ValueError,), harmless, max_seconds=1.0)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


def configurations() -> Target:
    """A run configuration, as Flower hands it over."""
    honest = RunConfig().to_dict()
    keys = sorted(honest)

    @st.composite
    def inputs(draw: st.DrawFn) -> dict[str, Any]:
        choices = Choices(draw)
        few = {choices.of(keys) for _ in range(6)}
        found = changed_json(draw, {key: honest[key] for key in sorted(few)})
        return found if isinstance(found, dict) else {"task": found}

    def read(values: dict[str, Any]) -> RunConfig:
        with suppress(RecursionError):
            return RunConfig.from_run_config(values)
        raise ConfigError("too deep")

    def harmless(config: RunConfig) -> None:
        assert RunConfig.from_run_config(config.to_dict()) == config

    return Target("configurations", 100, inputs(), read, (ConfigError,), harmless, max_seconds=1.0)


def all_targets(folder: Path) -> list[Target]:
    """All of them, over a folder of their own."""
    for name in ("keys", "checkpoints", "journals", "fleets"):
        (folder / name).mkdir()
    return [
        replies("replies", 5000, "float32"),
        replies("replies in int8", 3000, "int8"),
        orders(),
        reports(),
        key_answers(folder / "keys"),
        data_answers(),
        checkpoints(folder / "checkpoints"),
        journals(folder / "journals"),
        fleets(folder / "fleets"),
        configurations(),
    ]
