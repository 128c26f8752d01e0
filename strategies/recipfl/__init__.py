"""RecipFL: a graph hypernetwork on the server writes every device's weights, whatever its architecture."""

from wildflower.strategies.recipfl.recipfl import RecipFL, RecipFLParams

__all__ = ["RecipFL", "RecipFLParams"]
