"""Lets hypothesis make hostile inputs of a target, reads them, and counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import Target

BATCH = 10  # inputs of one example: an example takes hypothesis longer than most inputs take to be read
MOST_LETTERS = 2000  # of an input that is shown
AGAIN = 3  # how often what seems slow is read again: the best counts
# The same inputs in every run. What fails is shrunk, and kept nowhere.
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,  # the tally has the time of reading alone
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Tally:
    """What became of a target's inputs; seconds are those of the slowest one, the processor's where it seemed slow."""

    tried: int = 0
    accepted: int = 0
    slowest_seconds: float = 0.0
    slowest_input: str = ""


def fuzz(target: Target, count: int) -> Tally:
    """Read `count` inputs of a target, a multiple of BATCH, which are the same in every run.

    Any exception that is no refusal, and any harm, comes through as AssertionError, with the smallest input that does
    it and, in its notes, how that differs from an honest one.
    """
    tally = Tally()

    @settings(SETTINGS, max_examples=count // BATCH)
    @given(st.lists(target.inputs, min_size=BATCH, max_size=BATCH))
    def read(batch: list[Any]) -> None:
        for made in batch:
            seconds, accepted = _read(target, made, time.perf_counter)
            if seconds > target.max_seconds / 10:
                # Others use the processor too. To ask for its own seconds takes longer than most inputs.
                seconds = min(_read(target, made, time.process_time)[0] for _ in range(AGAIN))
            tally.tried += 1
            tally.accepted += accepted
            if seconds > tally.slowest_seconds:
                tally.slowest_seconds, tally.slowest_input = seconds, repr(made)[:MOST_LETTERS]

    with _no_log():
        read()
    return tally


@contextmanager
def _no_log() -> Iterator[None]:
    """Without thousands of warnings."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _read(target: Target, made: Any, clock: Callable[[], float]) -> tuple[float, bool]:
    started = clock()
    try:
        found = target.read(made)
    except target.refusals:
        return clock() - started, False
    except Exception as error:
        raise AssertionError(f"{target.name}: {type(error).__name__}: {error}: {repr(made)[:MOST_LETTERS]}") from error
    seconds = clock() - started
    try:
        target.harmless(found)
    except Exception as error:
        raise AssertionError(f"{target.name}: it does harm: {error}: {repr(made)[:MOST_LETTERS]}") from error
    return seconds, True
