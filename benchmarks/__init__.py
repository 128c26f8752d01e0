"""Measurements of Wildflower, with what they found. A package, because another of this name may be installed."""
