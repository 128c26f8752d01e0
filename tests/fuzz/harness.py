"""Reads many hostile inputs of a target, and counts."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from tests.fuzz.targets import Target

AGAIN = 3  # how often what seems slow is read again: the best counts, because others use the processor too


@dataclass
class Tally:
    """What became of a target's inputs; seconds are the processor's, of the slowest one."""

    tried: int = 0
    accepted: int = 0
    slowest_seconds: float = 0.0
    slowest_seed: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def fuzz(target: Target, count: int, seed: int = 1) -> Tally:
    """Read `count` inputs. Any exception that is no refusal, and any harm, comes through with the input's seed."""
    tally = Tally()
    logging.disable(logging.CRITICAL)  # thousands of warnings
    try:
        for number in range(count):
            name = f"{target.name} {seed} {number}"
            seconds, accepted = _read(target, name)
            for _ in range(AGAIN if seconds > target.max_seconds / 2 else 0):
                seconds = min(seconds, _read(target, name)[0])
            tally.tried += 1
            tally.accepted += accepted
            if seconds > tally.slowest_seconds:
                tally.slowest_seconds, tally.slowest_seed = seconds, name
    finally:
        logging.disable(logging.NOTSET)
    return tally


def _read(target: Target, name: str) -> tuple[float, bool]:
    made = target.make(random.Random(name))
    started = time.process_time()
    try:
        found = target.read(made)
    except target.refusals:
        return time.process_time() - started, False
    except Exception as error:
        raise AssertionError(f"input {name!r} crashed {target.name}: {type(error).__name__}: {error}") from error
    seconds = time.process_time() - started
    try:
        target.harmless(found)
    except Exception as error:
        raise AssertionError(f"input {name!r} does harm to {target.name}: {error}") from error
    return seconds, True
