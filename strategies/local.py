"""Every device by itself: it trains the widest model that it can afford, and nothing travels."""

from __future__ import annotations

from collections import defaultdict, deque
from logging import WARNING

import numpy as np
from flwr.app import Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid

from messages.layouts import sent_layout
from messages.orders import EvaluationBatch, EvaluationOrder, EvaluationReply, Score
from messages.packing import MessageError
from messages.wire import from_records, to_records
from models.architecture import Architecture
from strategies.base import Model, Scorer, Setup, State
from strategies.exchange import Failure, exchange
from strategies.records import Evaluation
from strategies.submodel import SubModelStrategy
from strategies.work import Contribution


class Local(SubModelStrategy):
    """FedAvg's lower bound. Accuracy is the mean over all devices that have trained, each on the task's test set."""

    keeps_models = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.trained: dict[int, tuple[str, Architecture]] = {}

    def absorb(self, contribution: Contribution) -> None:
        """Refuse weights: a model that trains alone stays on its device."""
        raise MessageError("a device that trains alone sent weights")

    def finish_round(self) -> None:
        """Note who has a model."""
        for a in self.assignments:
            if a.outcome == "trained":
                self.trained[a.device] = (a.tier, a.task.architecture)

    def models(self, grid: Grid) -> dict[Architecture, Model]:
        """None on the server."""
        return {}

    def evaluate(self, grid: Grid, scorer: Scorer) -> Evaluation | None:
        """Ask every device that has trained to score its own model; None where nobody did."""
        devices = self.population.connected(grid, sorted(self.trained))
        queues: dict[int, deque[list[int]]] = defaultdict(deque)
        for device, node in zip(devices, self.population.nodes(grid, devices, [1.0] * len(devices)), strict=True):
            if not queues[node]:
                queues[node].append([])
            queues[node][0].append(device)
        correct, losses = dict[int, float](), dict[int, float]()
        replies = exchange(
            grid,
            queues,
            self._question,
            deadline_seconds=None if self.population.simulated else self.settings.deadline_seconds,
            busy=self.population.busy,
            poll_seconds=self.population.poll_seconds,
        )
        for batch, reply in replies:
            if isinstance(reply, Failure):
                log(WARNING, "Round %s: no scores of devices %s: %s", self.round, batch, reply.why)
                continue
            try:
                scores = self._read(batch, reply)
            except MessageError as error:
                log(WARNING, "Round %s: the scores of devices %s are refused: %s", self.round, batch, error)
                continue
            for score in scores:
                if score.error is not None:
                    log(WARNING, "Round %s: device %s cannot be scored: %s", self.round, score.device, score.error)
                    continue
                correct[score.device] = score.correct / score.examples
                losses[score.device] = score.loss_sum / score.examples
        scored = sorted(correct)  # a mean of floats depends on their order, and replies come in any
        tiers: dict[str, list[float]] = defaultdict(list)
        for device in scored:
            tiers[self.trained[device][0]].append(correct[device])
        if not scored:
            return None
        mean = float(np.mean([correct[device] for device in scored]))
        loss = float(np.mean([losses[device] for device in scored]))
        return Evaluation(mean, loss, {tier: float(np.mean(values)) for tier, values in tiers.items()})

    def _read(self, batch: list[int], reply: Message) -> list[Score]:
        """Check a node's scores of a batch in full. Raises MessageError where they cannot be used."""
        answer, _ = from_records(EvaluationReply, reply.content)
        if (answer.run, answer.round) != (self.settings.run, self.round):
            raise MessageError(f"they are of round {answer.round} of run {answer.run!r}")
        devices = [score.device for score in answer.scores]
        if len(set(devices)) != len(devices) or not set(devices) <= set(batch):
            raise MessageError(f"they are of devices {devices}")
        for score in answer.scores:
            if score.error is None and not (score.correct <= score.examples and 0 < score.examples < 2**31):
                raise MessageError(f"device {score.device} has {score.correct} of {score.examples} examples right")
        return answer.scores

    def _question(self, node: int, batch: list[int]) -> Message:
        orders = [
            EvaluationOrder(
                device=device,
                architecture=self.trained[device][1].to_json(),
                payload=None,
                digest=sent_layout(self.family, self.trained[device][1]).digest,
                data="test set",
            )
            for device in batch
        ]
        content = EvaluationBatch(
            run=self.settings.run,
            round=self.round,
            task=self.settings.task,
            family=self.family.spec(),
            batch_size=256,
            shared_process=self.population.simulated,
            state_dir=self.settings.state_dir,
            orders=orders,
        )
        ttl = None if self.population.simulated else self.settings.deadline_seconds
        return Message(to_records(content), node, MessageType.EVALUATE, ttl=ttl, group_id=str(self.round))

    def state_dict(self) -> State:
        """Who has trained which architecture."""
        state = super().state_dict()
        state.values["trained"] = [[d, tier, a.to_json()] for d, (tier, a) in sorted(self.trained.items())]
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore who has trained what; the models themselves are with the devices."""
        super().load_state_dict(state)
        self.trained = {d: (tier, Architecture.from_json(a)) for d, tier, a in state.values["trained"]}
