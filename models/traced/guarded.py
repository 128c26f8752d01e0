"""Operators of which PyTorch does not check all arguments: with others they would read or write other memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from wildflower.models.traced.operators import operator_named


def function_named(text: str) -> Callable[..., Any]:
    """Return what a node calls by the name of its operator; ValueError if that is not allowed."""
    operator = operator_named(text)
    guard = GUARDS.get(text.partition(".")[0])
    return operator if guard is None else partial(guard, operator)


def _bag(
    operator: Callable[..., Any], weight: Tensor, indices: Tensor, offsets: Tensor, *more: Any, **options: Any
) -> Any:
    """Keep all offsets within the indices: PyTorch checks only the first and the last."""
    return operator(weight, indices, offsets.clamp(0, len(indices)).cummax(0).values, *more, **options)


def _weight_norm(operator: Callable[..., Any], v: Tensor, g: Tensor, dim: int = 0) -> Any:
    if g.numel() != (1 if dim == -1 else v.shape[dim]):
        raise ValueError(f"_weight_norm: {g.numel()} lengths are not those of dimension {dim} of {tuple(v.shape)}")
    return operator(v, g, dim)


def _lstm(
    operator: Callable[..., Any],
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    directions = 2 if bidirectional else 1
    read, out, hidden = input.shape[-1], hx[0].shape[-1], hx[1].shape[-1]
    states = num_layers * directions, input.shape[0 if batch_first else 1]
    wanted: list[tuple[int, ...]] = []
    for number in range(num_layers * directions):
        of_input = read if number < directions else out * directions
        wanted += [(4 * hidden, of_input), (4 * hidden, out), *[(4 * hidden,)] * (2 if has_biases else 0)]
        wanted += [(out, hidden)] * (out != hidden)
    if [tuple(p.shape) for p in params] != wanted or [tuple(s.shape[:2]) for s in hx] != [states] * 2:
        raise ValueError(f"lstm: its weights or states are not those of {num_layers} layers of {hidden} channels")
    return operator(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def _empty(operator: Callable[..., Any], *sizes: Any, **options: Any) -> Any:
    """Fill with zeros what would tell what the process had in that memory before."""
    return operator(*sizes, **options).zero_()


GUARDS: Mapping[str, Callable[..., Any]] = {
    "embedding_bag": _bag,
    "_weight_norm": _weight_norm,
    "lstm": _lstm,
    **dict.fromkeys(("empty", "empty_like", "new_empty"), _empty),
}
