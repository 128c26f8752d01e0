"""RaFL's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from wildflower.strategies.params import Count, Params, Shares, kebab, to_scalar


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
    min_blocks: Count = Field(
        1, description="Blocks that stay of each stage of a ResNet in a personal model, where it is cut by shares"
    )
    searcher: Literal["exact", "pool", "evolution"] = Field(
        "exact",
        description="How personal models are found: by the exact search for the most parameters, by a pool of random "
        "draws, or by evolution for the best predicted accuracy, where accuracies lie beside the initial weights, and "
        "else for the most multiplications",
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


def check_together(params: RaFLParams) -> None:
    """Raise ValueError if a setting is given that others say is not read."""
    if params.space == "once-for-all":
        for name in ("shares", "min_blocks"):
            if getattr(params, name) != RaFLParams.model_fields[name].default:
                raise ValueError(
                    f"rafl.{kebab(name)} = {to_scalar(getattr(params, name))!r}: rafl.space = 'once-for-all' does "
                    "not read it, because the family says which sub-networks there are: leave it out, or set "
                    "rafl.space = 'shares'"
                )
