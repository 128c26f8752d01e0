"""Weights for modules that are cut by themselves, by which tests tell one channel from another."""

import torch


def lively(family):
    """Weights none of which is 0, and statistics that are no others' either."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        weights = family.initial()
        return {
            name: value.abs() + 0.5 if name.endswith("running_var") else value + 0.1 * torch.randn_like(value)
            for name, value in weights.items()
        }
