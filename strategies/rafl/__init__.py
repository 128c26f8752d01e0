"""RaFL: a searched model for each device, and a small knowledge network that travels."""

from wildflower.strategies.rafl.mutual_learning import learn_mutually, mutual_losses
from wildflower.strategies.rafl.rafl import RaFL
from wildflower.strategies.rafl.rafl_params import RaFLParams

__all__ = ["RaFL", "RaFLParams", "learn_mutually", "mutual_losses"]
