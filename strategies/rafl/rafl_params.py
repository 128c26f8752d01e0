"""RaFL's settings."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from wildflower.strategies.params import Numbers, Params, Shares, to_scalar


class RaFLParams(Params):
    """RaFL's settings."""

    space: Literal["shares", "once-for-all"] = Field(
        "shares",
        description="Which cuts of the supernet personal models may be: every layer at one of the shares, or a "
        "family's own sub-networks (docs/supernets.md), which `wildflower supernet` trains",
    )
    shares: Shares = Field(
        (0.25, 0.5, 0.75, 1.0),
        description="Shares of its channels that a layer of a personal model may keep; 0 removes layers that may go; "
        "once-for-all has none",
    )
    searcher: Literal["auto", "exact", "pool", "evolution"] = Field(
        "auto",
        description="How personal models are found: by the exact search for the most parameters (auto: or a pool where "
        "a model is no chain), by a pool of random draws, or by evolution for the best accuracy predicted",
    )
    macs: Numbers = Field(
        (),
        description="Multiplications for one example that a personal model may take, beside what memory and link "
        'allow: one number for all devices, or two between which each has its own; "": no limit',
    )
    first: Literal["sent", "drawn"] = Field(
        "sent",
        description="First weights of a personal model: the supernet's, which are sent, or weights that the device "
        "draws, so that the model never travels",
    )
    knowledge_width: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Width of the knowledge network; 0 is the smallest personal model that devices may get, or the "
        "whole of knowledge-family where that is set",
    )
    knowledge_family: str = Field(
        "",
        description="Family of the knowledge network (docs/families.md), with arguments behind a comma, such as "
        '"lenet5, hidden = [8]"; "" cuts it out of the supernet',
    )
    fusion: Literal["average", "ensemble"] = Field(
        "average",
        description="How knowledge networks are fused: average (a), or from there on by ensemble distillation on "
        "public.task (b)",
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        """Refuse settings that others say are not read."""
        if self.space == "once-for-all" and self.shares != type(self).model_fields["shares"].default:
            raise ValueError(
                f"rafl.shares = {to_scalar(self.shares)!r}: rafl.space = 'once-for-all' does not read it, because the "
                "family says which sub-networks there are: leave it out, or set rafl.space = 'shares'"
            )
        if not self.macs:
            return self
        low, high = self.macs[0], self.macs[-1]
        if len(self.macs) > 2 or not 0 < low <= high < math.inf:
            raise ValueError(
                f"rafl.macs = {to_scalar(self.macs)!r}: must be one number above 0, or the least and the most, such as "
                "'28e6, 66e6'"
            )
        if self.searcher != "evolution":
            raise ValueError(
                f"rafl.macs = {to_scalar(self.macs)!r}: rafl.searcher = {self.searcher!r} does not limit "
                "multiplications: set rafl.searcher = 'evolution'"
            )
        return self
