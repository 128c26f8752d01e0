"""Orders side by side: client steps run until each asks for its training or its score; these are done at once.

A client step stays a plain function: it runs in a thread of its own, one of them at a time, and waits in
`ClientContext.fit` while others come to theirs. A client step that asks for several trainings, one after the other,
waits in each of them. One that never does is done when its thread comes to an end. So it is with the scores of models
in an evaluation, and with batch norm's statistics.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from wildflower.client_app.captured_step import fit_in_turn
from wildflower.client_app.chance import draws, set_draws
from wildflower.client_app.fitting import Fit
from wildflower.client_app.memory import is_out_of_memory
from wildflower.client_app.stack import RowError, fit_stacked, score_stacked
from wildflower.client_app.statistics_pass import Pass, pass_at_once
from wildflower.client_app.widths import can_be_filled
from wildflower.devices.probe import probe_machine
from wildflower.plugins.flower_log import tell
from wildflower.tasks.scoring import Scoring

T = TypeVar("T")
Asked = Fit | Scoring | Pass
Work = Callable[[Callable[[Any], Any]], T]  # is given what does what it asks for


@dataclass
class _Pace:
    """Seconds per step of one kind of trainings, the least so far, and how often they were measured.

    at_once, tried: by the size of the stack, to a factor of two: the more devices, the more a stack gains.
    """

    in_turn: float = math.inf
    turns: int = 0
    at_once: dict[int, float] = field(default_factory=dict)
    tried: Counter[int] = field(default_factory=Counter)


TRIALS = 2  # of each way
LEAST_MEASURED = 4  # at a time, to train some in turn and some at once
MOST_FOUND = 64  # devices at once where no number was asked for
_paces: dict[Hashable, _Pace] = {}


def alone(asked: Asked) -> Any:
    """Do a training, a pass for statistics or a score by itself."""
    return fit_in_turn(asked) if isinstance(asked, Fit) else asked.alone()


class _Work(threading.Thread, Generic[T]):
    """A client step on its way: it runs only between `go_on` and its next training or its end."""

    def __init__(self, work: Work[T]) -> None:
        super().__init__(daemon=True)
        self._do, self._may, self._stands = work, threading.Semaphore(0), threading.Semaphore(0)
        self.asks: Asked | None = None  # what it waits for
        self.result: T | None = None
        self.error: BaseException | None = None
        self.found: object = None  # what came of it
        self.at_once = 1
        self.draws: torch.Tensor

    def go_on(self) -> None:
        """Let it run until it waits or ends."""
        self.asks = None
        if self.ident is None:
            self.start()
        self._may.release()
        self._stands.acquire()
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error

    def run(self) -> None:
        self._may.acquire()
        try:
            self.result = self._do(self.ask)
        except BaseException as error:  # one that is to end the process as well: else nobody would go on
            self.error = error
        self._stands.release()

    def ask(self, asked: Asked) -> object:
        """Wait for a training or a score, in the work's own thread."""
        self.asks, self.draws = asked, draws(asked.device)
        self._stands.release()
        self._may.acquire()
        set_draws(self.draws, asked.device)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def in_turn(self, asked: Asked) -> None:
        """Do by itself what it waits for."""
        set_draws(self.draws, asked.device)
        try:
            self.found = alone(asked)
        except Exception as error:
            self.found = error
        self.draws = draws(asked.device)


def side_by_side(works: Sequence[Work[T]], name: str, kind: Hashable = None) -> tuple[list[T | Exception], list[int]]:
    """Do some work whose trainings and scores are done at once.

    Args:
        name: what it is called where trainings cannot be done at once, which is told once.
        kind: what trainings have in common that take equally long; they are done as the first ones were done faster.
            None: at once.

    Returns:
        What comes of each, or why nothing does, and with how many it was trained at once, itself among them.
    """
    if len(works) == 1:
        try:
            return [works[0](alone)], [1]
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
        for what in (Fit, Pass, Scoring):
            for alike in _alike([each for each in waiting if isinstance(each[1], what)]):
                if kind is None:
                    _do(alike, name)
                else:
                    _do_faster(alike, name, _paces.setdefault((what, kind), _Pace()))
    found = [work.result if work.error is None else work.error for work in all_works]
    return found, [work.at_once for work in all_works]  # type: ignore[return-value]


def _alike(waiting: list[tuple[_Work[T], Asked]]) -> Iterable[list[tuple[_Work[T], Asked]]]:
    """Return what can be done at once: trainings of unequal widths only where the narrower ones can be filled."""
    losses = [asked.loss for _, asked in waiting if isinstance(asked, Fit) and isinstance(asked.loss, nn.Module)]
    if len(losses) < len(waiting) or can_be_filled(losses):
        return [waiting] if waiting else []
    found: dict[Hashable, list[tuple[_Work[T], Asked]]] = {}
    for each, loss in zip(waiting, losses, strict=True):
        found.setdefault(tuple(tensor.shape for tensor in loss.state_dict().values()), []).append(each)
    return found.values()


def _at_once(waiting: list[tuple[_Work[T], Any]]) -> None:
    asked = [each for _, each in waiting]
    found: Sequence[object]
    drawn = [work.draws for work, _ in waiting]
    if isinstance(asked[0], Fit):
        found, drawn = fit_stacked(asked, drawn)
    elif isinstance(asked[0], Pass):
        found = pass_at_once(asked)
    else:
        found = score_stacked(asked)
    for (work, _), value, state in zip(waiting, found, drawn, strict=True):
        work.found, work.draws, work.at_once = value, state, len(waiting)


def _do(waiting: list[tuple[_Work[T], Asked]], name: str) -> None:
    """Do what works wait for: at once where that can be, by halves where memory does not suffice, or in turn."""
    lacks_memory = False
    while len(waiting) > 1:
        try:
            return _at_once(waiting)
        except RowError as failed:
            work, _ = waiting.pop(failed.row)
            work.found = failed.error
        except Exception as error:
            lacks_memory = is_out_of_memory(error)
            if not lacks_memory:
                done = {Fit: "trained", Pass: "done", Scoring: "scored"}[type(waiting[0][1])]
                tell(f"{name} is {done} in turn: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            break
    if not lacks_memory:
        return _in_turn(waiting)
    # Out of the handler, whose error holds what the failed attempt held.
    tell(f"{name}: memory does not suffice for {len(waiting)} devices at once: by halves")
    _do(waiting[::2], name)
    _do(waiting[1::2], name)


def _do_faster(waiting: list[tuple[_Work[T], Asked]], name: str, pace: _Pace) -> None:
    """Do it the faster way: the first ones of a kind are done both ways, the first of each to warm up."""
    if len(waiting) == 1:
        return _in_turn(waiting)
    size = len(waiting).bit_length()
    wins = pace.at_once.get(size, math.inf) < pace.in_turn
    if wins or pace.tried[size] >= TRIALS:
        return _do(waiting, name) if wins else _in_turn(waiting)
    if pace.turns < TRIALS:
        alone = waiting[:2] if len(waiting) >= LEAST_MEASURED else waiting
        _in_turn(alone[:1])
        pace.in_turn = min(pace.in_turn, _seconds(lambda: _in_turn(alone[1:])) / _steps(alone[1:]))
        pace.turns += 1
        waiting = waiting[len(alone) :]
    if waiting:
        seconds = _seconds(lambda: _do(waiting, name)) / _steps(waiting)
        pace.at_once[size] = min(pace.at_once.get(size, math.inf), seconds)
        pace.tried[size] += 1


def _in_turn(waiting: list[tuple[_Work[T], Asked]]) -> None:
    for work, asked in waiting:
        work.in_turn(asked)


def _seconds(do: Callable[[], None]) -> float:
    # A processor is shared with others, whose work says nothing of a way; a GPU's work is none of this process's.
    clock = time.perf_counter if torch.cuda.is_initialized() else time.process_time
    started = clock()
    do()
    return clock() - started


def _steps(waiting: list[tuple[_Work[T], Asked]]) -> int:
    """Return how many batches things of one kind take, up to a factor that they all have."""
    return sum(asked.batches for _, asked in waiting)


def number_at_once(device: torch.device, each_bytes: int, beside_bytes: int) -> int:
    """Return how many devices may train at once in the memory that is free now, at least 1.

    each_bytes: what each takes. beside_bytes: what they take together beside these.
    """
    free_bytes = probe_machine().memory_available_bytes if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    # Other workers share the machine.
    return max(1, min(MOST_FOUND, int((free_bytes / 2 - beside_bytes) / max(1, each_bytes))))
