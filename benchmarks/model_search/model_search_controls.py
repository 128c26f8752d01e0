"""Controls of dynamic model search, as plug-ins: `strategy = "model_search_controls:Optimum"`.

Experiments of this folder find the file beside them. All have model search's settings, as `model-search-controls.KEY`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from wildflower.strategies.model_search import ModelSearch


class Optimum(ModelSearch):
    """The exact search takes the optimum itself, so that layers get no turns."""

    tolerance: ClassVar[float] = 0.0


class Tolerant(ModelSearch):
    """What the exact search draws may lack a tenth of the optimum's parameters."""

    tolerance: ClassVar[float] = 0.1


class ByExamples(ModelSearch):
    """Devices weigh by their examples in the mean over a coordinate's owners."""

    weighting: ClassVar[Literal["uniform", "examples"]] = "examples"
