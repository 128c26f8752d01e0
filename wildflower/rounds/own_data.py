"""Devices with data of their own: asking them before round 1, and later those that come late; what they claim."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from typing_extensions import override

from wildflower.devices.validation import one_line
from wildflower.messages.orders import DataAnswer, DataQuestion
from wildflower.messages.packing import MessageError
from wildflower.messages.wire import DATA_ANSWER_LIMITS, from_records, to_records
from wildflower.plugins.flower_log import log
from wildflower.rounds.exchange import Failure, exchange
from wildflower.rounds.hooks import RoundHook
from wildflower.rounds.population import Population
from wildflower.rounds.requests import Work
from wildflower.tasks.agreement import problem_of
from wildflower.tasks.data import DataSet
from wildflower.tasks.device_data import Agreed, Summary
from wildflower.tasks.inspection import describe
from wildflower.tasks.remarks import Remark, by_kind
from wildflower.tasks.task import TaskSpec

DATA = "query.data"  # the type of the message
MAX_LINES = 40  # of remarks on data, in a log
ASK_SECONDS = 600.0  # a first answer reads and decodes all files of a device


class OwnData(RoundHook):
    """Claims of devices about the data that they alone hold, and which of them take part.

    The round calls `admit` itself, because it needs to know who does not take part.

    The server cannot count a device's examples. It holds every device to `max_examples` of the task, and says where a
    device claims another number than before.

    Attributes:
        spec: of the task, with what was agreed.
        test: the server's test set as its folder has it; None where only devices have examples to test on.
    """

    def __init__(self, spec: TaskSpec, run: str, test: DataSet | None = None) -> None:
        self.spec, self.test, self._run = spec, test, run
        self._claims: dict[int, tuple[int, int]] = {}  # device -> examples for training and for testing
        self._cut: dict[int, int] = {}  # device -> texts that were cut, where it has said so
        self.remarks: dict[int, tuple[Remark, ...]] = {}  # device -> what it left out, and what is seldom meant

    def training(self, device: int) -> int:
        """Return how many examples the device says that it trains on; IndexError where the run has no such device."""
        return self._claim(device)[0]

    def told_training(self) -> list[int]:
        """Return how many examples the devices that have been asked say that they train on."""
        return [training for training, _ in self._claims.values()]

    def testing(self, device: int) -> int:
        """Return how many examples the device says that it keeps for testing; IndexError as of `training`."""
        return self._claim(device)[1]

    def _claim(self, device: int) -> tuple[int, int]:
        if not 0 <= device < self.spec.devices:
            raise IndexError(f"device {device} is not one of 0 to {self.spec.devices - 1}")
        return self._claims.get(device, (1, 0))  # of one that has not been asked yet nothing is known

    def most_examples(self, device: int) -> int:
        """Return how many examples a device may at most say that it has."""
        return self.spec.max_examples

    def take(self, summaries: Iterable[Summary]) -> dict[int, str]:
        """Note what devices say of data that fit. -> why others do not take part."""
        unfit: dict[int, str] = {}
        for said in summaries:
            agreed = self.spec.agreed
            why = problem_of(said, self.spec.max_examples)
            if not why and agreed is not None and said.form is not None:
                why = agreed.misfit(said.form)
            if why:
                unfit[said.device] = why
                self._claims.pop(said.device, None)
            else:
                self.claim(said.device, said.examples, said.test_examples)
                self._cut[said.device] = said.cut_texts
                self.remarks[said.device] = said.remarks
        return unfit

    def cut_texts(self, devices: Iterable[int]) -> tuple[int, int]:
        """Return how many texts of devices that take part were cut, and how many they have."""
        there = [device for device in devices if device in self._claims]
        return sum(self._cut.get(device, 0) for device in there), sum(sum(self._claims[device]) for device in there)

    def claim(self, device: int, examples: int, test_examples: int) -> None:
        """Note how many examples a device says that it has."""
        self._claims[device] = examples, test_examples

    def admit(self, grid: Grid, devices: Sequence[int], population: Population) -> dict[int, str]:
        """Ask devices of whose data nothing is known yet. -> the outcomes of those that do not take part for now."""
        new = sorted(device for device in devices if device not in self._claims)
        if not new:
            return {}
        if self.spec.device_folders:
            said = ask_here(self.spec, new)
        else:
            nodes = dict(zip(population.nodes(grid, new, [0.0] * len(new)), new, strict=True))
            busy, poll_seconds = population.busy, population.poll_seconds
            said = ask_nodes(grid, self.spec, self._run, nodes, busy=busy, poll_seconds=poll_seconds)
        unfit = self.take(said[device] for device in new if device in said)
        if self.spec.agreed is not None:
            tell_cut(*self.cut_texts(new), self.spec.agreed.form.input_shape[0])
        tell_remarks(
            by_kind({device: self.remarks[device] for device in new if device in said and device not in unfit})
        )
        silent = {device: "failed: no answer to what its data are" for device in new if device not in said}
        return silent | {device: one_line(f"refused: its data do not fit: {why}") for device, why in unfit.items()}

    def fitting(self, devices: Sequence[int]) -> list[int]:
        """Those of the devices whose data are known to fit."""
        return [device for device in devices if device in self._claims]

    @override
    def after_exchange(self, work: Work) -> None:
        for a in work.assignments:
            if a.update is not None and a.outcome == "trained":
                before, examples = self._claims.get(a.device), a.update.examples
                if before is not None and before[0] != examples:
                    text = "Device %s trained on %s examples, before it said %s: its data have changed"
                    log.warning(text, a.device, examples, before[0])
                    self._claims[a.device] = examples, before[1]
            elif a.update is not None and a.outcome.startswith("refused"):
                # It is asked anew before it is given any more work, because its data may have changed.
                self._claims.pop(a.device, None)

    @override
    def state(self) -> dict[str, Any]:
        return {"claims": {str(device): list(claim) for device, claim in sorted(self._claims.items())}}

    @override
    def load(self, values: Mapping[str, Any]) -> None:
        self._claims = {int(d): (training, testing) for d, (training, testing) in values["claims"].items()}


def ask_here(spec: TaskSpec, devices: Iterable[int], *, moments: bool = False) -> dict[int, Summary]:
    """Return what simulated devices say, whose folders lie on this machine."""
    return {device: describe(spec, device, moments=moments) for device in devices}


def ask_nodes(
    grid: Grid,
    spec: TaskSpec,
    run: str,
    nodes: Mapping[int, int | None],
    *,
    busy: set[int],
    poll_seconds: float,
    moments: bool = False,
) -> dict[int, Summary]:
    """Return what the devices of nodes say. Of two nodes that speak for one device neither is believed.

    Args:
        nodes: node -> the device that it carries, where that is known.
        busy: where nodes are added that do not answer in time.
    """
    question = DataQuestion(run=run, task=spec.to_json(), moments=moments)

    def make(node: int, _: int) -> Message:
        return Message(to_records(question), node, DATA, ttl=ASK_SECONDS)

    found: dict[int, Summary] = {}
    speakers: Counter[int] = Counter()
    queues = {node: deque([node]) for node in nodes}
    replies = exchange(grid, queues, make, deadline_seconds=ASK_SECONDS, busy=busy, poll_seconds=poll_seconds)
    for node, reply in replies:
        if isinstance(reply, Failure):
            log.warning("Node %s does not say what its data are: %s", node, reply.why)
            continue
        try:
            answer, _ = from_records(DataAnswer, reply.content, DATA_ANSWER_LIMITS)
            said, carried = answer.said, nodes[node]
            if answer.run != run:
                raise MessageError("it is of another run")
            if said.device >= spec.devices or (carried is not None and said.device != carried):
                raise MessageError(f"it speaks for device {said.device}")
        except MessageError as error:
            log.warning("What node %s says of its data is refused: %s", node, one_line(str(error)))
            continue
        speakers[said.device] += 1
        found[said.device] = said
    for device in sorted(device for device, count in speakers.items() if count > 1):
        log.warning("%s nodes speak for device %s: none of them is believed", speakers[device], device)
        del found[device]
    return found


def tell_cut(cut_texts: int, texts: int, tokens: int) -> None:
    """Write to the log how many of the texts were longer than the limit of tokens, where any were."""
    if cut_texts:
        what = "%s of %s texts are longer than %s tokens and were cut: max_tokens of task-arguments allows more"
        log.warning(what, cut_texts, texts, tokens)


def tell_remarks(lines: Iterable[str]) -> None:
    """Write to the log what was left out of data and why: a line for each reason, of which devices may make up any."""
    lines = list(lines)
    for line in lines[:MAX_LINES]:
        log.warning("Data of %s", one_line(line))
    if len(lines) > MAX_LINES:
        log.warning("and %s more remarks on data", len(lines) - MAX_LINES)


def tell_labels(lines: Iterable[str]) -> None:
    """Write to the log which labels look alike: those of `label_warnings` or `alike_in_words`."""
    for line in list(lines)[:MAX_LINES]:
        log.warning("%s", one_line(line))


def tell(agreed: Agreed, unfit: Mapping[int, str], fitting: int) -> None:
    """Write to the log what was agreed, and who does not fit."""
    labels = f"{len(agreed.label_names)} labels" if agreed.label_names else "numbers for labels"
    log.info("%s devices have data that fit: %s, %s", fitting, agreed.form, labels)
    for device, why in sorted(unfit.items())[:20]:
        log.warning("Device %s does not take part: %s", device, one_line(why))
