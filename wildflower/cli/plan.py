"""`wildflower plan`: what every tier or node would get, what a round would take there, and what binds."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.plugins.user_error import UserError
from wildflower.rounds.connected_devices import ConnectedDevices
from wildflower.rounds.delivery import evenly_spread
from wildflower.rounds.engine import Engine
from wildflower.rounds.lateness import load_of
from wildflower.rounds.own_data import OwnData
from wildflower.rounds.population import NodeState
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.server_app.inputs import task_spec
from wildflower.server_app.no_progress import goes_by_widths, more_of_each, smaller_batches, smaller_model
from wildflower.server_app.node_records import LastReport, read_nodes
from wildflower.server_app.own_agreement import own_of_run
from wildflower.server_app.run_folder import read_devices
from wildflower.server_app.units import bytes_text, range_text, seconds_text
from wildflower.strategies.method import Method, Selection
from wildflower.strategies.pricing import fit_in_turn

if TYPE_CHECKING:
    from rich.table import Table

MAX_DEVICES_PER_TIER = 50  # a tier of more is planned with that many of its devices, evenly spread
STRAGGLER_FACTOR = 2.0  # a round that lasts longer than this many times the median device's has a straggler
SHORTEST_WAIT_SECONDS = 0.1  # nobody gives devices smaller models for a shorter one
LIMITS: dict[str, dict[str, Any]] = {
    "memory": {"memory_bytes": 2**62},
    "link": {"download_bytes": None, "upload_bytes": None},
    "time": {"round_seconds": None},
}
"""What may bind, and how a budget looks without it."""


class PlanError(UserError, ValueError):
    """An experiment that cannot be planned; the text says why, and what would be right."""


@dataclass(frozen=True)
class DevicePlan:
    """The model that one device would get, and what it would take there.

    Attributes:
        parameters: of the largest model that it trains; 0 where it gets none.
        needed_memory_bytes, memory_bytes: of training by the price, and what the device may use for it.
        download_seconds, training_seconds, upload_seconds: of a round; None where nobody has measured link or speed.
        binds: "memory", "link", "time": without which limits it would get a larger model. Empty: it gets the largest.
        exceeds: the limits that its model exceeds; empty where it gets no model.
    """

    device: int
    tier: str
    parameters: int
    bytes_down: int
    bytes_up: int
    needed_memory_bytes: int
    memory_bytes: int
    download_seconds: float | None
    training_seconds: float | None
    upload_seconds: float | None
    binds: tuple[str, ...]
    exceeds: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Return the time of a round, as far as links and speed are known."""
        return sum(part or 0.0 for part in (self.download_seconds, self.training_seconds, self.upload_seconds))

    def to_json(self) -> dict[str, Any]:
        """All fields by name; seconds that never end are null, as unknown ones are, because JSON knows no infinity."""
        values = {name: None if value == math.inf else value for name, value in asdict(self).items()}
        return values | {"binds": list(self.binds), "exceeds": list(self.exceeds)}


@dataclass(frozen=True)
class Plan:
    """The plan of an experiment.

    Attributes:
        method, family: their names.
        whole_parameters: of the largest model that the method gives.
        devices: those that were looked at.
        counts: how many devices every tier has.
        epsilon, delta: what the whole run costs of privacy; None without differential privacy.
        warnings: what is wrong with it, each with the change that would help.
    """

    method: str
    family: str
    whole_parameters: int
    devices: list[DevicePlan]
    counts: dict[str, int]
    warnings: list[str]
    epsilon: float | None = None
    delta: float | None = None

    @property
    def left_out(self) -> list[DevicePlan]:
        """Devices that get no model."""
        return [device for device in self.devices if not device.parameters]

    def to_json(self) -> dict[str, Any]:
        """JSON, with a list of devices."""
        return asdict(replace(self, devices=[])) | {"devices": [device.to_json() for device in self.devices]}


def make_plan(config: RunConfig, run_dir: Path | None = None) -> Plan:
    """Plan an experiment: for its fleet, or for the nodes of an earlier run, by what they reported last.

    A fleet is taken as it is at simulated second 0.

    Args:
        config: the settings of the run.
        run_dir: the folder of a run with real devices; None: of a fleet.

    Raises:
        PlanError: there are neither a fleet nor reports.
        ConfigError, JournalError, ValueError: as the run would, naming what is wrong.
    """
    if run_dir is not None:
        config = RunConfig.from_run_config({**config.to_dict(), "fleet": ""})
    elif not config.fleet:
        raise PlanError(
            "fleet = '' stands for real devices, which are not asked for a plan: name a run whose nodes have reported "
            "(--run RUN_DIR), or a fleet (--set fleet=FILE.toml)"
        )
    engine, _ = build(config, _own(config, run_dir))
    if run_dir is not None:
        _remember(engine, config, read_nodes(run_dir), run_dir)
    return plan_of(engine, config)


def plan_of(engine: Engine, config: RunConfig) -> Plan:
    """Plan an experiment that has been built, for the devices of its fleet or the nodes whose reports are known.

    The engine is at its first round afterwards.
    """
    population = engine.population
    numbers = population.known_devices() if isinstance(population, ConnectedDevices) else range(config.devices)
    by_tier: dict[str, list[int]] = {}
    for number in numbers:
        by_tier.setdefault(engine.population.tier(number), []).append(number)
    chosen = [number for tier in by_tier.values() for number in evenly_spread(tier, MAX_DEVICES_PER_TIER)]
    engine.method.round = max(1, engine.method.round)  # what is drawn at random is what the first round draws
    engine.asking.survey(chosen)
    devices = [plan_device(engine, number) for number in chosen]
    method = engine.method
    whole = method.cost(_largest(method)).parameters
    counts = {tier: len(found) for tier, found in by_tier.items()}
    privacy = method.settings.privacy
    cost = (privacy.epsilon(config.rounds), privacy.delta) if privacy else (None, None)
    plan = Plan(method.name(), method.family.name, whole, devices, counts, [], *cost)
    return replace(plan, warnings=warnings_of(plan, engine, config))


def _own(config: RunConfig, run_dir: Path | None) -> OwnData | None:
    """What the devices of an earlier run agreed on, and how many examples each trained on last."""
    if run_dir is None or config.partition != "own":
        return None
    own = own_of_run(run_dir, config, task_spec(config))
    if own is None:
        raise PlanError(f"{run_dir} does not say what its devices' data are: its run broke off before they were asked")
    for record in read_devices(run_dir):
        if record.outcome == "trained" and record.examples:
            own.claim(record.device, record.examples, 0)
    return own


def _remember(engine: Engine, config: RunConfig, reports: Sequence[LastReport], run_dir: Path) -> None:
    now = time.time()
    states = [NodeState(r.node, r.device, r.report, max(0.0, now - r.reported_at), r.memory_factor) for r in reports]
    beyond = [state.device for state in states if state.device >= config.devices]
    if beyond:
        raise PlanError(
            f"{run_dir} has a report of device {beyond[0]}, and devices = {config.devices}: set devices = "
            f"{max(beyond) + 1} or more"
        )
    if not states:
        raise PlanError(f"{run_dir} has no report of any node")
    assert isinstance(engine.population, ConnectedDevices)
    engine.population.remember(states)


def plan_device(engine: Engine, device: int) -> DevicePlan:
    """Return what the engine would ask of a device in its next round, and what it would take there."""
    orders = engine.asking.orders(device)
    budget, tier = orders[0].budget, orders[0].tier
    binds = binding(engine, device, budget)
    if orders[0].given is None:
        needed = engine.method.cost(engine.method.smallest_architecture).peak_training_memory_bytes
        return DevicePlan(device, tier, 0, 0, 0, needed, budget.memory_bytes, None, None, None, binds, ())
    load = load_of(orders, engine.method.family, engine.population, engine.settings)
    report = engine.population.report(device)
    costs = [order.task.cost for order in orders]  # of what it trains one after the other
    needed = max(cost.peak_training_memory_bytes for cost in costs)
    return DevicePlan(
        device=device,
        tier=tier,
        parameters=max(cost.parameters for cost in costs),
        bytes_down=load.bytes_down,
        bytes_up=load.bytes_up,
        needed_memory_bytes=needed,
        memory_bytes=budget.memory_bytes,
        download_seconds=_seconds(load.bytes_down, report.down_mbit_per_s),
        training_seconds=None if report.flop_per_s is None else load.flops / report.flop_per_s,
        upload_seconds=_seconds(load.bytes_up, report.up_mbit_per_s),
        binds=binds,
        exceeds=tuple(name for name in LIMITS if not fit_in_turn(costs, _without(budget, LIMITS.keys() - {name}))),
    )


def _without(budget: Budget, limits: Collection[str]) -> Budget:
    """A budget as it would be without some of its limits."""
    return replace(budget, **{key: value for name in limits for key, value in LIMITS[name].items()})


def _seconds(nbytes: int, mbit_per_s: float | None) -> float | None:
    if mbit_per_s is None:
        return None
    return 0.0 if not nbytes else nbytes * 8e-6 / mbit_per_s if mbit_per_s else float("inf")


def binding(engine: Engine, device: int, budget: Budget) -> tuple[str, ...]:
    """The limits of a budget without which the device would get a larger model.

    Where no single one makes a difference, those that do so together.
    """

    def parameters(under: Budget) -> int:
        architecture = engine.method.assign(device, under)
        return 0 if architecture is None else engine.method.cost(architecture).parameters

    has = parameters(budget)
    for size in range(1, len(LIMITS) + 1):
        found: list[str] = []
        for names in combinations(LIMITS, size):
            if parameters(_without(budget, names)) > has:
                found += names
        if found:
            return tuple(name for name in LIMITS if name in found)
    return ()


def warnings_of(plan: Plan, engine: Engine, config: RunConfig) -> list[str]:
    """Return what a user should change before the run, in sentences."""
    method = engine.method
    found = [ignored] if (ignored := config.ignored_text()) else []
    found += engine.population.absences()
    smallest = method.cost(method.smallest_architecture)
    for tier, devices in _by_tier(plan.left_out).items():
        of = [device for device in plan.devices if device.tier == tier]
        who = (
            f"{len(devices)} of {len(of)} devices of tier {tier} {'get' if len(devices) > 1 else 'gets'}"
            if len(of) > 1
            else f"The device of tier {tier} gets"
        )
        limits = sorted({limit for device in devices for limit in device.binds}) or ["memory"]
        found.append(
            f"{who} no model: the smallest one needs {bytes_text(smallest.peak_training_memory_bytes)} of memory, "
            f"{bytes_text(smallest.download_bytes)} down and {bytes_text(smallest.upload_bytes)} up, "
            f"and what binds is {' and '.join(limits)} "
            f"({bytes_text(min(d.memory_bytes for d in devices))} of memory). Try {_smaller(engine, config, limits)}."
        )
    beyond = [device for device in plan.devices if device.exceeds]
    for tier, devices in _by_tier(beyond).items():
        found.append(
            f"Tier {tier} gets a model beyond its budget: {_excess(devices, config)}. strategy = {config.strategy!r} "
            f"with below-smallest = {config.below_smallest!r} gives it nevertheless."
        )
    if config.secure_aggregation.is_on:
        found += _small_sums(plan, engine, config)
    given = [device for device in plan.devices if device.parameters]
    if len(plan.devices) > 1 and len({d.parameters for d in given}) == 1 and config.strategy != "one-model":
        found.append(_all_alike(plan, given, engine, config))
    slowest = [max(devices, key=lambda device: device.seconds) for devices in _by_tier(given).values()]
    usual = median_low(d.seconds for d in slowest for _ in range(plan.counts[d.tier])) if slowest else 0.0
    last = max(slowest, key=lambda device: device.seconds, default=None)
    if last is not None and math.isinf(last.seconds):
        found.append(
            f"Tier {last.tier} has devices with a link that carries nothing now: what they are given does not arrive, "
            "and they do not finish."
        )
        last = None
    late = max(STRAGGLER_FACTOR * usual, SHORTEST_WAIT_SECONDS)
    if last is not None and last.seconds > late and usual > 0 and not config.budget.round_seconds:
        found.append(
            f"A round waits for tier {last.tier}, which takes {seconds_text(last.seconds)}; the median device takes "
            f"{seconds_text(usual)}. budget.round-seconds = {float(f'{usual:.2g}'):g} gives slow devices less to "
            "train, where smaller models are among the candidates."
        )
    return found


def _excess(devices: Sequence[DevicePlan], config: RunConfig) -> str:
    """How far the models of a tier's devices exceed their budgets."""
    of_memory, of_link, of_time = ([d for d in devices if limit in d.exceeds] for limit in LIMITS)
    found = []
    if of_memory:
        needed, has = max(d.needed_memory_bytes for d in of_memory), min(d.memory_bytes for d in of_memory)
        found.append(f"it needs {bytes_text(needed)} of memory where {bytes_text(has)} may be used")
    if of_link:
        down, up = max(d.bytes_down for d in of_link), max(d.bytes_up for d in of_link)
        found.append(f"{bytes_text(down)} down and {bytes_text(up)} up are more than its link may carry")
    if of_time:
        longest = max(device.seconds for device in of_time)
        found.append(
            f"a round takes {seconds_text(longest)} where budget.round-seconds = {config.budget.round_seconds:g}"
        )
    return ", and ".join(found)


def _small_sums(plan: Plan, engine: Engine, config: RunConfig) -> list[str]:
    """Groups of devices whose sum would be of too few of them: under secure aggregation they are left out."""
    looked_at = Counter(device.tier for device in plan.devices)
    expected: defaultdict[tuple[Architecture, Selection], float] = defaultdict(float)
    tiers: defaultdict[tuple[Architecture, Selection], set[str]] = defaultdict(set)
    for device in plan.devices:
        order = engine.asking.orders(device.device)[0]
        if order.given is not None:
            group = order.given.architecture, order.given.selection
            expected[group] += plan.counts[device.tier] / looked_at[device.tier]
            tiers[group].add(device.tier)
    chance = min(1.0, config.devices_per_round / sum(plan.counts.values()))
    small = {
        group: count * chance for group, count in expected.items() if count * chance < config.secure_aggregation.minimum
    }
    if not small:
        return []
    who = ", ".join(sorted({tier for group in small for tier in tiers[group]}))
    by_device = len({architecture for architecture, _ in expected}) < len(expected)
    remedy = (
        "a strategy that does not cut other channels for every device"
        if by_device
        else more_of_each(config, engine.method)
    )
    return [
        f"Devices of {who} train in {len(small)} of {len(expected)} groups of equal sub-models, of which a round has "
        f"{range_text(min(small.values()), max(small.values()))} devices on average. A group of fewer than "
        f"secure-aggregation.minimum = {config.secure_aggregation.minimum} is left out of the round. Try {remedy}."
    ]


def _smaller(engine: Engine, config: RunConfig, limits: Sequence[str]) -> str:
    remedies = []
    if "time" in limits:
        remedies.append(f"a larger budget.round-seconds than {config.budget.round_seconds:g}")
    if "link" in limits and config.budget.transfer_seconds:
        remedies.append(f"a larger budget.transfer-seconds than {config.budget.transfer_seconds:g}")
    remedies.append(smaller_model(config, engine.method))
    if "memory" in limits:
        remedies += smaller_batches(config, engine.method)
    return ", or ".join(remedies)


def _all_alike(plan: Plan, given: Sequence[DevicePlan], engine: Engine, config: RunConfig) -> str:
    """Why all devices get the same model, and what would change that."""
    method, parameters = engine.method, given[0].parameters
    begin = f"All devices {'that get a model ' if plan.left_out else ''}get the same one, of {parameters:,} parameters"
    if method.smallest_architecture == _largest(method):
        if _wider_choice(engine, config):
            remedy = f"more widths than widths = {config.to_dict()['widths']!r}"
        else:
            nested = "strategy = 'wildflower', or " if config.strategy != "wildflower" else ""
            remedy = f"{nested}a family or family-arguments with more widths, depths or levels"
        return f"{begin}: strategy = {config.strategy!r} has no other with these settings. Try {remedy}."
    if not any(device.binds for device in given):
        if plan.left_out:
            return f"{begin}, the whole model: nothing limits them."
        spare = min(device.memory_bytes / max(1, device.needed_memory_bytes) for device in given)
        return (
            f"{begin}, the whole model: nothing limits them, and the poorest has {spare:.3g} times the memory that it "
            "needs. Try a larger model by `family` or `family-arguments`, or hold slow devices back with "
            "budget.round-seconds or budget.transfer-seconds."
        )
    if goes_by_widths(config, method):
        return f"{begin}: try more widths between those in widths = {config.to_dict()['widths']!r}."
    return (
        f"{begin}: try more models between the smallest and the largest, such as levels or depths in family-arguments, "
        "or the method's own keys."
    )


def _wider_choice(engine: Engine, config: RunConfig) -> bool:
    """Whether another width would be another model for some device. Some methods give one model to all."""
    if not goes_by_widths(config, engine.method):
        return False
    widths = (*config.widths, min(config.widths) / 2)
    try:
        other, _ = build(config.model_copy(update={"widths": widths}), engine.own)
    except ValueError:  # what is too narrow for the family or the method is no choice
        return False
    return len(set(other.method.deliverable)) > 1


def _largest(method: Method) -> Architecture:
    """The largest architecture that a device may get: not what is scored where models live on devices."""
    return max(method.deliverable, key=lambda architecture: method.cost(architecture).parameters)


def _by_tier(devices: Sequence[DevicePlan]) -> dict[str, list[DevicePlan]]:
    found: dict[str, list[DevicePlan]] = {}
    for device in devices:
        found.setdefault(device.tier, []).append(device)
    return found


def plan_tables(plan: Plan, *, by_node: bool) -> list[Table]:
    """Return what every tier or node gets, and how long a round takes there. Both tables read in 80 columns.

    Figures that differ within a tier are ranges; seconds are those of its slowest device.
    """
    rows = [[device] for device in plan.devices] if by_node else list(_by_tier(plan.devices).values())
    names = [f"{d[0].device} {d[0].tier}" if by_node else f"{plan.counts[d[0].tier]} {d[0].tier}" for d in rows]
    who = "device" if by_node else "tier"
    models = _table(who, "parameters", "of whole", "MB down", "MB up", "MB memory", "MB budget")
    seconds = _table(who, "download", "training", "upload", "in all", "binds")
    for name, devices in zip(names, rows, strict=True):
        models.add_row(name, *_model_cells(plan, devices))
        slowest = max(devices, key=lambda device: device.seconds)
        parts = [slowest.download_seconds, slowest.training_seconds, slowest.upload_seconds]
        cells = ["", "", "", ""]
        if slowest.parameters:
            whole = None if parts == [None, None, None] else slowest.seconds
            cells = [
                "?" if part is None else "never" if math.isinf(part) else f"{part:.3g} s" for part in (*parts, whole)
            ]
        binds = Counter(limit for device in devices for limit in device.binds)
        seconds.add_row(name, *cells, ", ".join(binds) or "nothing")
    return [models, seconds]


def _table(first: str, *others: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold")
    for header in others:
        table.add_column(header, overflow="fold", justify="left" if header == "binds" else "right")
    return table


def _model_cells(plan: Plan, devices: Sequence[DevicePlan]) -> list[str]:
    memory = [
        _range([device.needed_memory_bytes / 1e6 for device in devices]),
        _range([device.memory_bytes / 1e6 for device in devices]),
    ]
    if not any(device.parameters for device in devices):
        return ["none", "", "", "", *memory]
    return [
        _range([device.parameters for device in devices], "{:,.0f}".format),
        _range([device.parameters / plan.whole_parameters for device in devices], "{:.0%}".format),
        _range([device.bytes_down / 1e6 for device in devices], partial(_plain, digits=2)),
        _range([device.bytes_up / 1e6 for device in devices], partial(_plain, digits=2)),
        *memory,
    ]


def _plain(value: float, digits: int = 3) -> str:
    """A number to so many digits, but with all those before its point: 14,600 and not 1.46e+04."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _range(values: Sequence[float], form: Callable[[float], str] = _plain) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to\n{high}"  # two lines, so that no word of a column is cut in two
