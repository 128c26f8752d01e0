"""ScaleFL (Ilhan, Su and Liu, CVPR 2023): levels that scale width and depth together.

Level k is the network up to exit k with a share of the leading channels of every group. A device trains the deepest
level that it can afford, deeper exits counting for more; its early exits may also learn from its own last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from messages.orders import Merge, Objective
from models.architecture import Architecture
from models.family import Family
from strategies.base import Setup
from strategies.submodel import SubModelStrategy, require_exits

PAPER_WIDTHS = (0.7, 0.7, 0.75, 1.0)  # of exits 1 to 4
QUIET_SHARE = 0.25  # of the rounds, in which exits do not learn from the last one yet


@dataclass(frozen=True)
class ScaleFLParams:
    """widths: of the levels, one per exit from the shallowest on; () takes the last of `PAPER_WIDTHS`.

    gamma: weight of what early exits learn from the last one; 0 leaves it out. temperature: T, of both softmaxes there.
    """

    widths: tuple[float, ...] = ()
    gamma: float = 0.0
    temperature: float = 3.0


class ScaleFL(SubModelStrategy):
    """w <- mean over the devices that have a coordinate, weighted by examples; untouched coordinates are kept.

    Devices minimize L = sum_j j L_j / (K (K + 1) / 2) over their exits j = 1..K, with L_K = CE(f_K(x), y) and, for
    j < K, L_j = CE(f_j(x), y) + gamma T^2 KL(p_K || p_j), p being softmaxes of logits / T; p_K is not constant
    (`client_app.objectives._weighted_exits`, "weighted exits").
    """

    merge = Merge(weighting="examples")

    def __init__(self, setup: Setup, params: ScaleFLParams) -> None:
        require_exits("scalefl", setup.family)
        super().__init__(setup, levels(setup.family, params.widths)[::-1])
        self.params = params

    def objective(self, device: int, architecture: Architecture) -> Objective:
        """Weighted cross-entropies; after the first quarter of the rounds early exits learn from the last one too."""
        active = self.round - 1 > QUIET_SHARE * self.settings.rounds
        gamma = self.params.gamma if active else 0.0
        return Objective(kind="weighted exits", gamma=gamma, temperature=self.params.temperature)


def levels(family: Family, widths: tuple[float, ...] = ()) -> list[Architecture]:
    """The levels of a family, shallowest first.

    Args:
        family: one with several exits.
        widths: share of every channel group that a level keeps, one per exit, not falling; () takes the last of
            `PAPER_WIDTHS`.

    Raises:
        ValueError: there are not as many widths as exits, or a deeper level is narrower.
    """
    exits = len(family.segments)
    if not widths and exits > len(PAPER_WIDTHS):
        raise ValueError(
            f"{family.name} has {exits} exits, but the paper's widths are of {len(PAPER_WIDTHS)}: set scalefl.widths "
            f"to {exits} widths, one per exit from the shallowest on"
        )
    widths = widths or PAPER_WIDTHS[-exits:]
    text = ", ".join(f"{width:g}" for width in widths)
    if len(widths) != exits:
        raise ValueError(
            f"scalefl.widths = {text!r} are {len(widths)}, but {family.name} has {exits} exits "
            f"({', '.join(family.segments)}): one per exit from the shallowest on"
        )
    if list(widths) != sorted(widths):
        raise ValueError(f"scalefl.widths = {text!r}: a deeper level must not be narrower than the one before")
    return [family.up_to(exit, width) for exit, width in enumerate(widths, start=1)]
