"""A weight-sharing supernet as a module, with the verbs of once-for-all: sample, set, extract."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from wildflower.models.architecture import Architecture
from wildflower.models.elastic import ElasticSpace
from wildflower.models.network import Network
from wildflower.models.placement import Coordinates
from wildflower.models.space import Space
from wildflower.models.weights import with_weights
from wildflower.plugins.nearest import nearest_part


class Supernet(nn.Module):
    """The weights of a family's global model, and one sub-network that is active: C(Theta, arch) of RaFL's Eq. 1.

    The active sub-network runs over views of the weights, so that its gradients, and in training mode its batch norms'
    running statistics, arrive in the whole ones. All sub-networks write the same statistics, which therefore belong to
    none of them: a network that was extracted needs its own (`wildflower.strategies.supernet_training.calibrated`).

    Attributes:
        whole: the global model. Its parameters are those of the supernet.
        active: the architecture that `forward` runs.
    """

    def __init__(self, space: Space | ElasticSpace, weights: Mapping[str, Tensor] | None = None) -> None:
        """Take a copy of the weights of a global model; None: they are drawn by torch's generator."""
        super().__init__()
        self.space = space
        family = space.family
        given = family.initial() if weights is None else {name: value.clone() for name, value in weights.items()}
        self.whole = with_weights(family, family.full(), given).requires_grad_(True)
        self.set(space.largest())

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draw an architecture of the space and make it active."""
        architecture = self.space.sample(rng)
        self.set(architecture)
        return architecture

    def set(self, architecture: Architecture) -> None:
        """Make an architecture of the family active; ValueError for one out of bounds."""
        family = self.space.family
        family.validate(architecture)
        self.active = architecture
        # A list, so that it is no part of this module: it has no weights of its own.
        self._network = [family.without_memory(architecture)]
        self._coordinates = {
            name: _slices(coordinates) for name, coordinates in family.place(architecture).coordinates.items()
        }

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, *input shape) -> (batch, classes), by the active sub-network."""
        whole = {**dict(self.whole.named_parameters()), **dict(self.whole.named_buffers())}
        views = {name: whole[name][coordinates] for name, coordinates in self._coordinates.items()}
        network = self._network[0].train(self.training)
        output: Tensor = torch.func.functional_call(network, views, (inputs,), strict=True)
        return output

    def extract(self, architecture: Architecture | None = None) -> Network:
        """Return a sub-network, by default the active one, with a copy of its weights."""
        family, architecture = self.space.family, architecture or self.active
        weights = {name: value.detach() for name, value in self.whole.state_dict().items()}
        network = with_weights(family, architecture, family.place(architecture).gather(weights))
        return network.train(self.training).requires_grad_(True)

    def insert(self, architecture: Architecture, weights: Mapping[str, Tensor]) -> None:
        """Put tensors of a sub-network, such as pretrained ones, where they lie in the whole; the rest stays.

        Raises ValueError for names that the sub-network does not have, and for other shapes, before anything changes.
        """
        family = self.space.family
        specs, place = family.tensors(architecture), family.place(architecture)
        for name, value in weights.items():
            if name not in specs:
                raise ValueError(f"the sub-network has no tensor {name!r}; {nearest_part(name, specs)}")
            if tuple(value.shape) != specs[name].shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, the sub-network's has {specs[name].shape}")
        with torch.no_grad():
            place.write_into(self.whole.state_dict(), weights)


def _slices(coordinates: tuple[Coordinates, ...]) -> tuple[slice, ...]:
    """Coordinates of a leading placement, whose all dimensions are cut to a range."""
    assert all(isinstance(index, slice) for index in coordinates)
    return tuple(index for index in coordinates if isinstance(index, slice))
