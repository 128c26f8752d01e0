"""An architecture: what is kept of a family's global model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One member of a family.

    `widths` holds the kept channels of every channel group, in the order of `Family.groups`; 0 stands for a group whose
    block is not kept. `depths` holds the kept blocks of every stage, in the order of `Family.stages`; it is empty where
    depth is fixed. An architecture knows nothing of its family: `Family.validate` checks it against the bounds.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...] = ()

    def to_json(self) -> dict[str, list[int]]:
        """Return plain lists; `depths` is left out where it is empty."""
        value = {"widths": list(self.widths)}
        if self.depths:
            value["depths"] = list(self.depths)
        return value

    @classmethod
    def from_json(cls, value: object) -> Architecture:
        """Read what `to_json` wrote; raises ValueError that says which entry is wrong."""
        if not isinstance(value, dict):
            raise ValueError(f"an architecture is an object with widths and depths, not {type(value).__name__}")
        unknown = sorted(str(key) for key in value if key not in ("widths", "depths"))
        if unknown:
            raise ValueError(f"architecture: unknown keys {unknown}; it has 'widths' and 'depths'")
        if "widths" not in value:
            raise ValueError("architecture: 'widths' is missing")
        return cls(_counts("widths", value["widths"]), _counts("depths", value.get("depths", [])))


def _counts(key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"architecture: '{key}' must be a list of counts, not {type(value).__name__}")
    for position, entry in enumerate(value):
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
            raise ValueError(f"architecture: {key}[{position}] must be a count >= 0, not {entry!r}")
    return tuple(value)
