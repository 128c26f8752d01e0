"""Operators that a stack of devices computes by rules of its own, because PyTorch's vmap has none or a wrong one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._C._functorch import _add_batch_dim, _unwrap_batched
from torch._decomp import decomposition_table
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter


class InTurn(Exception):
    """These trainings cannot be done at once; the text says why."""


def _recurrent(layer: Callable[..., Any], *arguments: Any) -> Any:
    """Return a recurrent layer's results by the operators that it is made of, which have rules for a stack."""
    dropout, trains = arguments[5:7]
    if dropout and trains:
        raise InTurn("a recurrent layer with dropout draws at random")
    return layer(*arguments)


def _lstm(*_: Any) -> Any:
    raise InTurn("an LSTM is one operator of oneDNN's, which has no form for a stack")


def _embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, *more: Any) -> Tensor:
    """Return what tables (rows, size, channels) hold; of PyTorch's rule the first row alone has a padding entry."""
    level = retrieve_current_functorch_interpreter().level()
    (table, rows_at), (at, indices_at) = (_unwrap_batched(each, level) for each in (weight, indices))
    if indices_at is not None:
        at = at.movedim(indices_at, 0)
    with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.FuncTorchBatched)):
        if rows_at is None:
            return _add_batch_dim(torch.embedding(table, at, padding_idx, *more), 0, level)
        table = table.movedim(rows_at, 0)
        rows, size = table.shape[:2]
        if indices_at is None:
            at = at.expand(rows, *at.shape)
        first = torch.arange(0, rows * size, size, device=table.device).view(-1, *[1] * (at.dim() - 1))
        found = torch.embedding(table.flatten(0, 1), at + first, -1, *more)
        if padding_idx >= 0:  # which is not trained
            found = torch.where((at == padding_idx).unsqueeze(-1), found.detach(), found)
        return _add_batch_dim(found, 0, level)


def _renorm(*_: Any) -> Any:
    raise InTurn("an embedding with max_norm changes its table before it reads it")


_RULES = torch.library.Library("aten", "IMPL")
for _operator in (torch.ops.aten.gru.input, torch.ops.aten.rnn_tanh.input, torch.ops.aten.rnn_relu.input):
    _RULES.impl(_operator, partial(_recurrent, decomposition_table[_operator]), "FuncTorchBatchedDecomposition")
_RULES.impl(torch.ops.aten.lstm.input, _lstm, "FuncTorchBatchedDecomposition")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that a rule takes the place of another
    _RULES.impl("embedding", _embedding, "FuncTorchBatched")
    _RULES.impl("embedding_renorm_", _renorm, "FuncTorchBatched")
