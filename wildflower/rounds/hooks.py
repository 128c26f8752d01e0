"""Round hooks: what is optional in a round, and what users add to it beside their experiment (docs/hooks.md)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.serverapp import Grid

from wildflower.devices.budget import Budget
from wildflower.messages.tensor_sets import Weights
from wildflower.plugins.nearest import near
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import one_sentence
from wildflower.rounds.population import Population
from wildflower.rounds.replies import Checked
from wildflower.rounds.requests import Assignment, Work
from wildflower.strategies.method import Method
from wildflower.strategies.run_settings import RoundSettings


@dataclass
class RoundResult:
    """A finished round: its line of rounds.jsonl, and its devices' lines of devices.jsonl.

    stopped: why a hook ends the run after this round; "" where it goes on.
    """

    record: dict[str, Any]
    devices: list[dict[str, Any]]
    stopped: str = ""


@dataclass
class Round:
    """A round as it goes on: what hooks read, and the few things that they may change.

    Attributes:
        number: from 1 on.
        started: time.perf_counter() at its beginning.
        devices: those that are sampled. A hook may choose others in `before_assigning`.
        assignments: the orders of these devices, from when they are assigned on.
        work: the orders as they are sent, from `before_sending` on.
        metrics: figures of the round in the journal. A hook may add its own in `after_finishing`.
        traffic: bytes of the round so far, by the names of `wildflower.rounds.round_records.TRAFFIC`.
        left: devices that have left for good at the end of the round.
        result: what the journal says of the round, at its end.
    """

    number: int
    grid: Grid
    method: Method
    population: Population
    started: float
    devices: list[int] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    work: Work | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    traffic: Counter[str] = field(default_factory=Counter)
    left: list[int] = field(default_factory=list)
    result: RoundResult | None = None

    @property
    def settings(self) -> RoundSettings:
        """The run's settings."""
        return self.method.settings

    @property
    def asked(self) -> Work:
        """The orders as they are sent; only from `before_sending` on."""
        assert self.work is not None, "devices are asked once they have been assigned"
        return self.work

    @property
    def record(self) -> dict[str, Any]:
        """The round's line of rounds.jsonl; only in `at_end`."""
        assert self.result is not None, "a round has its record at its end"
        return self.result.record

    @property
    def weights(self) -> Weights:
        """The tensors of the global model, by name; {} where the method has none."""
        scored = self.method.scored_architecture
        return {name: value for model in self.method.models([scored]).values() for name, value in model.weights.items()}

    def stop(self, why: str) -> None:
        """End the run after this round, as a finished one; only in `at_end`."""
        assert self.result is not None, "a round stops the run at its end"
        self.result.stopped = why


class RoundHook:
    """An optional part of a round. Each function is called at its point in every round; override those you need.

    Hooks of one's own stand in the run's `hooks`, or in `wf.run(..., hooks=[...])`.
    """

    def before_assigning(self, round: Round) -> None:
        """Devices are sampled: `round.devices` may be replaced by others that are there."""

    def budget(self, device: int, budget: Budget) -> Budget:
        """Return what a device may spend: its budget, or a smaller one."""
        return budget

    def before_sending(self, round: Round) -> None:
        """Every device has its orders and its node, and nothing is sent yet."""

    def on_reply(self, round: Round, batch: Sequence[Assignment], reply: Checked) -> None:
        """The orders of a batch are answered, the reply is checked, and its updates are absorbed."""

    def before_finishing(self, round: Round) -> None:
        """All replies are in that are waited for, and what they bring is not the next model yet."""

    def after_exchange(self, work: Work) -> None:
        """All orders of an exchange have their outcome: of the training, or of what is asked beside it."""

    def after_finishing(self, round: Round) -> None:
        """The method has made its next model: figures may be added to `round.metrics`."""

    def at_end(self, round: Round) -> None:
        """The round is over, and `round.record` is its line of the journal."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on, as JSON; it stands in the checkpoint."""
        return {}

    def load(self, values: Mapping[str, Any]) -> None:
        """Restore `state`."""


POINTS = tuple(name for name, value in vars(RoundHook).items() if callable(value) and not name.startswith("_"))


class HookError(RuntimeError):
    """A hook that fails, or may not do what it does; the text names the hook and says what is wrong, in one line."""


def name_of(hook: RoundHook) -> str:
    """Return what a hook is called in errors and checkpoints: its class."""
    return type(hook).__name__


@contextmanager
def naming(hook: RoundHook) -> Iterator[None]:
    """Turn what a user's hook raises into a HookError that names it. The project's own have errors in words."""
    try:
        yield
    except HookError:
        raise
    except Exception as error:
        if type(hook).__module__.startswith("wildflower."):
            raise
        raise HookError(f"hook {name_of(hook)}: {one_sentence(error)}") from error


def each(hooks: Sequence[RoundHook], call: Callable[[RoundHook], None]) -> None:
    """Call something of every hook, in their order. Raises HookError."""
    for hook in hooks:
        with naming(hook):
            call(hook)


def check_hooks(hooks: Sequence[RoundHook], settings: RoundSettings) -> None:
    """Raise HookError where something is wrong with hooks that can be seen before round 1."""
    for hook in hooks:
        _check_names(hook)
        with (
            naming(hook),
            raised_as(HookError, f"hook {name_of(hook)}: its state is no JSON: ", (TypeError, ValueError)),
        ):
            json.dumps(hook.state(), allow_nan=False)
    names = [name_of(hook) for hook in hooks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise HookError(f"hook {twice}: it is given twice, and a checkpoint has one state for it")
    for hook in hooks if settings.privacy else ():
        if overrides(hook, "before_assigning"):
            raise HookError(
                f"hook {name_of(hook)}: it chooses devices, and differential privacy counts on every device being "
                "sampled with the same probability: leave out before_assigning, or dp.epsilon and dp.noise-multiplier"
            )


def overrides(hook: RoundHook, point: str) -> bool:
    """Return whether a hook does anything at a point."""
    return getattr(type(hook), point) is not getattr(RoundHook, point)


def _check_names(hook: RoundHook) -> None:
    """Raise HookError for a function that is named almost like a point, and for a hook that does nothing."""
    kinds = [kind for kind in type(hook).__mro__ if kind not in RoundHook.__mro__]
    own = [name for kind in kinds for name, value in vars(kind).items() if callable(value)]
    for name in own:
        # Only what is all but a point: a hook may have functions of its own.
        meant = [] if name in POINTS else near(name, POINTS, most=1, likeness=0.85)
        if meant and not name.startswith("_"):
            raise HookError(f"hook {name_of(hook)}: there is no point {name!r} in a round: did you mean {meant[0]!r}?")
    if not any(overrides(hook, point) for point in POINTS):
        raise HookError(f"hook {name_of(hook)} does nothing at any point of a round: it has {', '.join(POINTS)}")


def check_devices(hook: RoundHook, round: Round, sampled: Sequence[int]) -> None:
    """Raise HookError where a hook has chosen devices that cannot be asked, or one of them twice."""
    devices = round.devices
    if devices == sampled:
        return
    if not isinstance(devices, list) or not all(type(device) is int for device in devices):
        raise HookError(f"hook {name_of(hook)}: round.devices must be a list of numbers of devices, not {devices!r}")
    if len(set(devices)) < len(devices):
        raise HookError(f"hook {name_of(hook)}: round.devices has a device twice")
    there = set(round.population.everyone(round.grid))
    if gone := [device for device in devices if device not in there]:
        raise HookError(f"hook {name_of(hook)}: device {gone[0]} is not there in round {round.number}")


def check_metrics(hook: RoundHook, round: Round, before: Mapping[str, float | None]) -> None:
    """Raise HookError where a hook has changed figures of others, or added what is no number."""
    for name, value in round.metrics.items():
        if name in before and value is not before[name]:
            raise HookError(f"hook {name_of(hook)}: round.metrics has a figure {name!r} already, which stays as it is")
        if name not in before and not (value is None or (isinstance(value, int | float) and math.isfinite(value))):
            raise HookError(f"hook {name_of(hook)}: its figure {name!r} is {value!r}, not a number")
    if lost := before.keys() - round.metrics.keys():
        raise HookError(f"hook {name_of(hook)}: it has removed the figure {min(lost)!r}")


def ruled(hooks: Sequence[RoundHook], device: int, budget: Budget) -> Budget:
    """Return what is left of a device's budget by the rules of hooks. HookError where one gives more than there is."""
    for hook in hooks:
        if not overrides(hook, "budget"):
            continue
        with naming(hook):
            found = hook.budget(device, budget)
        if not isinstance(found, Budget):
            raise HookError(f"hook {name_of(hook)}: budget must return a Budget, not {found!r}")
        for limit in ("memory_bytes", "download_bytes", "upload_bytes", "deadline_seconds", "round_seconds"):
            now, before = getattr(found, limit), getattr(budget, limit)
            if before is not None and (now is None or now > before):
                raise HookError(
                    f"hook {name_of(hook)}: it gives device {device} {limit} = {now}, and the device has {before}"
                )
        budget = found
    return budget
