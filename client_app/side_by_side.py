"""Orders side by side: client steps run until each asks for its training, and the trainings are done at once.

A client step stays a plain function: it runs in a thread of its own, one of them at a time, and waits in
`ClientContext.fit` while others come to theirs. A client step that asks for several trainings, one after the other,
waits in each of them. One that never does is done when its thread comes to an end.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from wildflower.client_app.chance import draws, set_draws
from wildflower.client_app.fitting import Fit, fit_here
from wildflower.client_app.memory import is_out_of_memory
from wildflower.client_app.stack import RowError, fit_stacked
from wildflower.devices.probe import probe_machine

log = logging.getLogger("flwr")  # what Flower's own log is called
T = TypeVar("T")
Work = Callable[[Callable[[Fit], float]], T]  # is given what trains a model


@dataclass
class _Pace:
    """Seconds per step of one kind of trainings, the least so far, and how often they were done at once."""

    in_turn: float = math.inf
    at_once: float = math.inf
    times: int = 0


LEAST_MEASURED = 4  # of a kind, to train some in turn and some at once
STACKED = 3  # times its price that a device may take in a stack: measured, 1.2 to 2.7
MOST_FOUND = 64  # devices at once where no number was asked for
_told: set[str] = set()  # what this process has said already
_paces: dict[Hashable, _Pace] = {}


class _Work(threading.Thread, Generic[T]):
    """A client step on its way: it runs only between `go_on` and its next training or its end."""

    def __init__(self, work: Work[T]) -> None:
        super().__init__(daemon=True)
        self._do, self._may, self._stands = work, threading.Semaphore(0), threading.Semaphore(0)
        self.asks: Fit | None = None  # the training that it waits for
        self.result: T | None = None
        self.error: Exception | None = None
        self.loss: float | Exception = 0.0  # what came of it
        self.at_once = 1
        self.draws: torch.Tensor

    def go_on(self) -> None:
        """Let it run until it waits or ends."""
        self.asks = None
        if self.ident is None:
            self.start()
        self._may.release()
        self._stands.acquire()

    def run(self) -> None:
        self._may.acquire()
        try:
            self.result = self._do(self.fit)
        except Exception as error:
            self.error = error
        self._stands.release()

    def fit(self, fit: Fit) -> float:
        """Wait for a training, in the work's own thread."""
        self.asks, self.draws = fit, draws(fit.device)
        self._stands.release()
        self._may.acquire()
        set_draws(self.draws, fit.device)
        if isinstance(self.loss, Exception):
            raise self.loss
        return self.loss

    def in_turn(self, fit: Fit) -> None:
        """Train by itself what it waits for."""
        set_draws(self.draws, fit.device)
        try:
            self.loss = fit_here(fit)
        except Exception as error:
            self.loss = error
        self.draws = draws(fit.device)


def side_by_side(works: Sequence[Work[T]], name: str, kind: Hashable = None) -> tuple[list[T | Exception], list[int]]:
    """Do some work whose trainings are done at once.

    Args:
        name: what it is called where trainings cannot be done at once, which is told once.
        kind: what trainings have in common that take equally long; they are done as the first ones were done faster.
            None: at once.

    Returns:
        What comes of each, or why nothing does, and with how many it was trained at once, itself among them.
    """
    if len(works) == 1:
        try:
            return [works[0](fit_here)], [1]
        except Exception as error:
            return [error], [1]
    all_works = [_Work(work) for work in works]
    going: list[_Work[T]] = all_works
    while going:
        for work in going:
            work.go_on()
        going = [work for work in going if work.asks is not None]
        waiting = [(work, work.asks) for work in going if work.asks is not None]
        # Who has more examples takes at least as many steps.
        waiting.sort(key=lambda each: -each[1].examples)
        if kind is None:
            _fit(waiting, name)
        else:
            _fit_faster(waiting, name, _paces.setdefault((kind, len(waiting).bit_length()), _Pace()))
    found = [work.result if work.error is None else work.error for work in all_works]
    return found, [work.at_once for work in all_works]  # type: ignore[return-value]


def _fit(waiting: list[tuple[_Work[T], Fit]], name: str) -> None:
    """Train what works wait for: at once where that can be, by halves where memory does not suffice, or in turn."""
    while len(waiting) > 1:
        try:
            losses, drawn = fit_stacked([fit for _, fit in waiting], [work.draws for work, _ in waiting])
        except RowError as failed:
            work, _ = waiting.pop(failed.row)
            work.loss = failed.error
        except Exception as error:
            if is_out_of_memory(error):
                tell(f"{name}: memory does not suffice for {len(waiting)} devices at once: by halves")
                _fit(waiting[::2], name)
                _fit(waiting[1::2], name)
                return
            tell(f"{name} is trained in turn: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            break
        else:
            for (work, _), loss, state in zip(waiting, losses, drawn, strict=True):
                work.loss, work.draws, work.at_once = loss, state, len(waiting)
            return
    _in_turn(waiting)


def _fit_faster(waiting: list[tuple[_Work[T], Fit]], name: str, pace: _Pace) -> None:
    """Train the faster way: the first ones of a kind are trained both ways, the first of each to warm up."""
    if pace.times < 2 and pace.at_once >= pace.in_turn:
        if len(waiting) < LEAST_MEASURED:
            return _in_turn(waiting)
        _in_turn(waiting[:1])
        pace.in_turn = min(pace.in_turn, _seconds(lambda: _in_turn(waiting[1:2])) / _steps(waiting[1:2]))
        pace.at_once = min(pace.at_once, _seconds(lambda: _fit(waiting[2:], name)) / _steps(waiting[2:]))
        pace.times += 1
    elif pace.at_once < pace.in_turn:
        _fit(waiting, name)
    else:
        _in_turn(waiting)


def _in_turn(waiting: list[tuple[_Work[T], Fit]]) -> None:
    for work, fit in waiting:
        work.in_turn(fit)


def _seconds(do: Callable[[], None]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def _steps(waiting: list[tuple[_Work[T], Fit]]) -> int:
    """Return how many steps trainings of one kind take, up to a factor that they all have."""
    return sum(1 if fit.training.steps else -(-fit.examples // fit.training.batch_size) for _, fit in waiting)


def number_at_once(asked: int | str, device: torch.device, price_bytes: int) -> int:
    """Return how many devices may train at once that take so much memory each; 1: they take turns."""
    if isinstance(asked, int):
        return asked
    if asked == "auto" and device.type == "cpu":
        return 1
    free_bytes = probe_machine().memory_available_bytes if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    # Other workers share the machine.
    return max(1, min(MOST_FOUND, int(free_bytes / 2 / max(1, STACKED * price_bytes))))


def tell(words: str) -> None:
    """Warn, once in this process."""
    if words not in _told:
        _told.add(words)
        log.warning("%s", words)
