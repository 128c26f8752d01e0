"""Every method as a strategy of Flower's, for the loop of anyone's ServerApp (docs/flower.md).

Our own loop is `wildflower.server_app.app`: it reads replies as they arrive and keeps a journal. Flower's holds all
messages of a round at once, and then all its replies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from wildflower.messages.flower_records import release
from wildflower.plugins.flower_log import log
from wildflower.rounds.engine import Engine
from wildflower.rounds.evaluation import Scorer
from wildflower.rounds.exchange import failure_of, stranger
from wildflower.rounds.hooks import Round, RoundResult
from wildflower.rounds.requests import Assignment, devices_that_trained


@dataclass
class _Open:
    """A round whose devices have been asked, and that is not summed up yet.

    Attributes:
        sent: every batch with what Flower knows of its message, which is where Flower writes the message's id.
        finished: the replies are in, and the method has made its next model.
    """

    round: Round
    sent: list[tuple[list[Assignment], Metadata]]
    finished: bool = False


class FlowerStrategy(Strategy):
    """Flower's `Strategy` over an engine: `FlowerStrategy(engine, scorer).start(grid, ...)` runs the engine's rounds.

    The engine holds the global model, so the arrays that Flower hands from round to round are written by this strategy
    and never read. Evaluations come when the run's settings say, also the last one: let `num_rounds` be `rounds`.

    Attributes:
        results: the lines of the journal of every round so far.
    """

    def __init__(self, engine: Engine, scorer: Scorer | None = None, *, rounds_done: int = 0) -> None:
        """Make a strategy of an engine.

        Args:
            scorer: scores models on the server; None leaves these evaluations out.
            rounds_done: how many rounds the engine has run before. Flower counts from 1 in every `start`.
        """
        if engine.settings.buffer:
            raise ValueError(
                f"buffer = {engine.settings.buffer}: a strategy of Flower's is called with all replies of a round, and "
                "never while devices are at work: leave buffer 0, or run it by wildflower"
            )
        privacy = engine.settings.privacy
        if privacy is not None and len(privacy.account.releases) < rounds_done:
            raise ValueError(
                f"{rounds_done} rounds were done before, and the account of differential privacy has "
                f"{len(privacy.account.releases)} releases: let it go on by "
                "wildflower.server_app.ledger.keep (docs/flower.md)"
            )
        if privacy is not None and privacy.account.record is None:
            log.warning(
                "Noised models are written to no ledger: call wildflower.server_app.ledger.begin and keep "
                "(docs/flower.md)"
            )
        self.engine, self.scorer, self.rounds_done = engine, scorer, rounds_done
        self.results: list[RoundResult] = []
        self._open: _Open | None = None
        self._begun = False

    @property
    def arrays(self) -> ArrayRecord:
        """The tensors of the method's state, such as the global weights, by name."""
        return ArrayRecord({name: value.detach() for name, value in self.engine.state().tensors.items()})

    def summary(self) -> None:
        """Log what runs."""
        method = self.engine.method
        log.info(
            "%s over %s, %s devices per round", method.name(), method.family.name, method.settings.devices_per_round
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """All messages of a round. `arrays` and `config` are not read.

        What the method has to ask devices before they train goes over the grid here.
        """
        if not self._begun:
            self.engine.start(self.rounds_done + server_round)
            self._begun = True
        round = self.engine.begin(grid, self.rounds_done + server_round)
        sent = [
            (batch, self.engine.sending.message(round.asked, node, batch))
            for node, queue in round.asked.batches().items()
            for batch in queue
        ]
        self._open = _Open(round, [(batch, message.metadata) for batch, message in sent])
        return [message for _, message in sent]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Absorb the replies, up to as many devices as the round wants, and let the method make its next model."""
        current = self._open
        if current is None or current.round.number != self.rounds_done + server_round or current.finished:
            raise RuntimeError(f"aggregate_train of round {server_round} without its configure_train")
        batches = {metadata.message_id: (batch, metadata.dst_node_id) for batch, metadata in current.sent}
        trained, late = 0, set[int]()
        for reply in replies:
            batch, node = batches.pop(reply.metadata.reply_to_message_id, ([], 0))
            failure = failure_of(reply) or stranger(reply, node)
            if batch and failure is not None and failure.late:
                late.add(node)
            if batch and trained < current.round.asked.enough:
                self.engine.take(current.round, batch, failure or reply)
                trained += devices_that_trained(batch)
            if reply.has_content():
                release(reply.content)
        # Flower cannot cancel: who is late may still work, and is asked nothing until it answers a query.
        self.engine.population.busy.update(late, (node for _, node in batches.values()))
        self.engine.finish(current.round)
        current.finished = True
        metrics = current.round.metrics
        figures = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        return self.arrays, MetricRecord({"devices-replied": trained, **figures})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: the engine evaluates here, over the grid where devices take part, and sums the round up."""
        current = self._open
        if current is None or not current.finished or current.round.number != self.rounds_done + server_round:
            raise RuntimeError(f"configure_evaluate of round {server_round} without its aggregate_train")
        self._open = None
        self.results.append(self.engine.conclude(current.round, self.scorer))
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The task's metric, under its name, and the loss of the round; None in a round without evaluation."""
        record = self.results[-1].record if self.results else {}
        if record.get("round") != self.rounds_done + server_round or record["score"] is None:
            return None
        return MetricRecord({record["metric"]: record["score"], "loss": record["loss"]})
