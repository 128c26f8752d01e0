"""HypeMeFed: exits, and hypernetworks that fill in the deep layers that weak devices never train."""

from wildflower.strategies.hypemefed.hypemefed import HypeMeFed, HypeMeFedParams

__all__ = ["HypeMeFed", "HypeMeFedParams"]
