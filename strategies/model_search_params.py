"""Settings of dynamic model search."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from wildflower.strategies.params import Count, Params, Shares


class ModelSearchParams(Params):
    """Settings of dynamic model search; the searchers are in `wildflower.strategies.search`."""

    searcher: Literal["pool", "exact"] = Field(
        "pool", description="How architectures are found: by the paper's pool, or by the exact search (ours)"
    )
    criterion: Literal["parameters", "memory", "bandwidth", "flops", "balanced"] = Field(
        "parameters",
        description="What the largest architecture has most of: parameters; in the pool also memory of training or "
        "bytes on the link; in the exact search FLOPs of training, or the sum over blocks of log(1 + parameters)",
    )
    shares: Shares = Field(
        (0.0, 0.5, 1.0), description="Shares of its channels that a layer may keep (S); 0 removes layers that may go"
    )
    layer_shares: str = Field(
        "",
        description="Shares of single layers instead, such as \"stem = [1], 'stage3_*' = [0, 0.5]\"",
    )
    min_blocks: Count = Field(1, description="Blocks that stay of each stage of a ResNet, or of a transformer")
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02, description="Share of the optimum's parameters that an architecture drawn by the exact search may lack"
    )
    epsilon: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8, description="Probability with which the pool's search stops after each draw"
    )
    max_draws: Count = Field(5, description="Maximum draws of the pool's search for one device (T_max)")
    masked_loss: bool = Field(
        False, description="Whether devices minimize HeteroFL's masked cross-entropy; false: plain cross-entropy"
    )
    norm: Literal["batch", "static"] = Field(
        "batch",
        description="Batch norms of families that have them: with running statistics, which are averaged like weights "
        "(batch), or HeteroFL's, which take those of the batch (static)",
    )

    @model_validator(mode="after")
    def _together(self) -> ModelSearchParams:
        other = {"memory": "pool", "bandwidth": "pool", "flops": "exact", "balanced": "exact"}
        if (needed := other.get(self.criterion, self.searcher)) != self.searcher:
            raise ValueError(f"criterion = {self.criterion!r} needs searcher = {needed!r}")
        return self

    @field_validator("layer_shares")
    @classmethod
    def _possible_layer_shares(cls, text: str) -> str:
        layer_shares(text)
        return text


def layer_shares(text: str) -> dict[str, tuple[float, ...]]:
    """Read shares of single layers: the inside of an inline TOML table, such as "stem = [1], 'stage3_*' = [0, 0.5]".

    Names are those of `wildflower.models.space.Space.of`; a dot in a name needs no quotes, a star does.

    Raises:
        ValueError: it is no such table, or a value is no list of numbers.
    """
    example = "must be like \"stem = [1], 'stage3_*' = [0, 0.5]\""
    try:
        table = tomllib.loads(f"shares = {{{text}}}")["shares"]
    except tomllib.TOMLDecodeError as error:
        # tomllib's words for a key that stands there twice.
        if "immutable namespace" in str(error) or "Duplicate" in str(error):
            raise ValueError(f"{example}: a layer is named twice; give each its shares once") from None
        raise ValueError(f"{example}: {error}") from None
    found = {}
    for name, values in _flat(table):
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise ValueError(f"{example}: {name} is no list of numbers, but {values!r}")
        found[name] = tuple(sorted(float(value) for value in values))
    return found


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """TOML reads `stage1.stream = ...` as a table in a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
