"""Spectral norms: the vectors by which they know the largest singular value follow from the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

ITERATIONS = 100  # of the power method: the largest value of 512 x 4608 normal numbers is found to 0.2 %


def _new(module: nn.Module) -> Iterator[tuple[ParametrizationList, _SpectralNorm]]:
    """Spectral norms as parametrizations, with the list of parametrizations that each stands in."""
    for part in module.modules():
        if isinstance(part, ParametrizationList):
            yield from ((part, inner) for inner in part if isinstance(inner, _SpectralNorm) and "_u" in inner._buffers)


def _old(module: nn.Module) -> Iterator[tuple[nn.Module, SpectralNorm]]:
    """Spectral norms as hooks, with the layer that each changes."""
    for part in module.modules():
        yield from ((part, hook) for hook in part._forward_pre_hooks.values() if isinstance(hook, SpectralNorm))


def _vectors(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield where the vectors lie: a part and the name of its buffer."""
    yield from ((norm, name) for _, norm in _new(module) for name in ("_u", "_v"))
    yield from ((layer, f"{hook.name}{end}") for layer, hook in _old(module) for end in ("_u", "_v"))


def leave_vectors_out(module: nn.Module) -> None:
    """Take the vectors out of the module's state.

    Their mean over devices has no unit length, and the module would promise another largest singular value than it has.
    """
    for part, name in _vectors(module):
        part._non_persistent_buffers_set.add(name)
        if (before := part.get_buffer(name)).is_meta:
            part._buffers[name] = _start(before)
    for layer, hook in _old(module):
        if (weight := getattr(layer, hook.name)).is_meta:  # which every pass computes anew
            setattr(layer, hook.name, torch.zeros(weight.shape, dtype=weight.dtype))


@contextmanager
def not_iterated() -> Iterator[None]:
    """Let spectral norms be made without the iterations with which they begin, which take long and find nothing.

    For weights without memory.
    """
    before = _SpectralNorm._power_method
    _SpectralNorm._power_method = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        _SpectralNorm._power_method = before  # type: ignore[method-assign]


@torch.no_grad()
def find_vectors(module: nn.Module) -> None:
    """Compute the vectors from the weights, the same each time."""
    for part, name in _vectors(module):
        part._buffers[name] = _start(part.get_buffer(name))
    for parametrizations, norm in _new(module):
        with _iterating(norm):
            modes = {inner: inner.training for inner in parametrizations.modules()}
            parametrizations.train()
            parametrizations()
            for inner, mode in modes.items():
                inner.training = mode
    for layer, hook in _old(module):
        with _iterating(hook):
            hook.compute_weight(layer, do_power_iteration=True)


def _start(vector: Tensor) -> Tensor:
    """Return a direction of as many entries, always the same."""
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(vector.shape, generator=generator, dtype=vector.dtype), dim=0)


@contextmanager
def _iterating(norm: _SpectralNorm | SpectralNorm) -> Iterator[None]:
    before, norm.n_power_iterations = norm.n_power_iterations, ITERATIONS
    try:
        yield
    finally:
        norm.n_power_iterations = before
