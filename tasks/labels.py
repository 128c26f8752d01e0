"""What labels may be."""

from typing import Literal

LabelKind = Literal["classes", "numbers", "classes of tokens"]
"""What labels are: int64 (examples,), float32 (examples,) or int64 (examples, sequence)."""

NO_LABEL = -100
"""Stands for the label of a token that has none; PyTorch's losses leave it out."""
