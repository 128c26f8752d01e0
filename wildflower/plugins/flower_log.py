"""Flower's log, which is this project's as well; without importing Flower."""

import logging

log = logging.getLogger("flwr")
_told: set[str] = set()  # what this process has said already


def tell(words: str) -> None:
    """Warn, once in this process."""
    if words not in _told:
        _told.add(words)
        log.warning("%s", words)
