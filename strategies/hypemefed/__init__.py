"""HypeMeFed: exits, and hypernetworks that fill in the deep layers that weak devices never train."""

from wildflower.strategies.hypemefed.guesses import HypeMeFedParams
from wildflower.strategies.hypemefed.hypemefed import HypeMeFed

__all__ = ["HypeMeFed", "HypeMeFedParams"]
