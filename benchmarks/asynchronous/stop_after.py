"""A hook that ends a run by the virtual clock: `hooks = "stop_after:StopAfter(seconds = 200)"`."""

from typing_extensions import override

from wildflower.rounds.hooks import Round, RoundHook


class StopAfter(RoundHook):
    """Ends a run with the first evaluation at or after a simulated second."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @override
    def at_end(self, round: Round) -> None:
        if round.record["score"] is not None and round.record["simulated_seconds"] >= self.seconds:
            round.stop(f"{self.seconds:g} simulated seconds are over")
