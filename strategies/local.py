"""Every device by itself: it trains the widest model that it can afford, and nothing travels."""

from __future__ import annotations

from flwr.serverapp import Grid

from messages.packing import MessageError
from models.architecture import Architecture
from strategies.base import Model, Scorer, Setup, State
from strategies.scores import Evaluation, mean_score
from strategies.submodel import SubModelStrategy
from strategies.work import LEADING, Contribution


class Local(SubModelStrategy):
    """FedAvg's lower bound. Accuracy is the mean over all devices that have trained, each on the task's test set.

    Every device goes on from its own model w_k and minimizes
    L = CE(f(x), y) (`client_app.objectives.local_loss`, "cross entropy").
    """

    keeps_models = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.trained: dict[int, Architecture] = {}

    def absorb(self, contribution: Contribution) -> None:
        """Refuse weights: a model that trains alone stays on its device."""
        raise MessageError("a device that trains alone sent weights")

    def finish_round(self) -> None:
        """Note who has a model."""
        for a in self.assignments:
            if a.outcome == "trained":
                self.trained[a.device] = a.task.architecture

    def models(self, grid: Grid) -> dict[Architecture, Model]:
        """None on the server."""
        return {}

    def evaluate(self, grid: Grid, scorer: Scorer) -> Evaluation | None:
        """Ask every device that has trained to score its own model; None where nobody did."""
        devices = self.population.connected(grid, sorted(self.trained))
        asked = [self.ask(device, self.trained[device], LEADING, self.budget(device)) for device in devices]
        return mean_score(self.scores(grid, asked, "test set"), self.population)

    def state_dict(self) -> State:
        """Who has trained which architecture."""
        state = super().state_dict()
        state.values["trained"] = [[device, a.to_json()] for device, a in sorted(self.trained.items())]
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore who has trained what; the models themselves are with the devices."""
        super().load_state_dict(state)
        # Checkpoints of earlier versions have a tier in the middle.
        self.trained = {device: Architecture.from_json(a) for device, *_, a in state.values["trained"]}
