"""A control of dynamic model search, as a plug-in: `strategy = "model_search_controls:ByExamples"`.

Experiments of this folder find the file beside them. It has model search's settings, as `model-search-controls.KEY`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from wildflower.strategies.model_search import ModelSearch


class ByExamples(ModelSearch):
    """Devices weigh by their examples in the mean over a coordinate's owners."""

    weighting: ClassVar[Literal["uniform", "examples"]] = "examples"
