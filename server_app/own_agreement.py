"""Before round 1 of a run whose devices have their own data: what they agree on, kept in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.serverapp import Grid

from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.rounds.connected_devices import WAIT_SECONDS, ConnectedDevices, rest_seconds
from wildflower.rounds.own_data import OwnData, ask_here, ask_nodes, tell, tell_labels, tell_remarks
from wildflower.rounds.population import wait_for_nodes
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.run_folder import read_if_there
from wildflower.server_app.whole_files import write_whole
from wildflower.tasks.agreement import Declared, agree, declared_by, label_warnings, normalization
from wildflower.tasks.data import DataSet
from wildflower.tasks.device_data import Agreed, Summary, moments_of
from wildflower.tasks.inspection import server_test
from wildflower.tasks.remarks import by_kind
from wildflower.tasks.task import TaskSpec

FILE = "agreed.json"
REST_SECONDS = 60.0  # that nodes beyond those of a round are waited for, so that their labels are known


def agree_with_nodes(grid: Grid, config: RunConfig, spec: TaskSpec) -> OwnData:
    """Ask the connected nodes what their devices' data are. ConfigError where no device has any that fit."""
    test = server_test(spec)
    declared = _declared(config, spec, test)
    end = time.monotonic() + REST_SECONDS
    wait_for_nodes(grid, min(config.devices, config.devices_per_round), WAIT_SECONDS, config.minimum_devices)
    nodes = wait_for_nodes(grid, config.devices, max(0.0, end - time.monotonic()))
    poll_seconds, moments = ConnectedDevices.poll_seconds, not declared.mean
    while True:
        asked = dict.fromkeys(nodes)
        said = ask_nodes(grid, spec, config.run_name, asked, busy=set(), poll_seconds=poll_seconds, moments=moments)
        rests = [each.resting_seconds for each in said.values() if each.resting_seconds is not None]
        if not rests or len(rests) < len(said):
            break
        seconds = rest_seconds(min(rests))
        log.info("All devices rest: they are asked again what their data are in %.0f s", seconds)
        time.sleep(seconds)
        nodes = wait_for_nodes(grid, 1, WAIT_SECONDS)
    return _own_data(said, declared, config, spec, test)


def agree_here(config: RunConfig, spec: TaskSpec) -> OwnData:
    """Read the folders of simulated devices, which lie on this machine. ConfigError where none has data that fit."""
    folders = Path(spec.data_dir) / "devices"
    if not folders.is_dir():
        is_inside = Path(spec.data_dir).name == "devices" and bool(spec.data_dir)
        hint = f": is data-dir = {str(Path(spec.data_dir).parent)!r} meant?" if is_inside else ""
        raise ConfigError(
            f"data-dir = {spec.data_dir!r} has no folder 'devices': with partition = 'own' simulated device 0 has its "
            f"data in devices/0000 there, device 1 in devices/0001{hint}"
        )
    test = server_test(spec)
    declared = _declared(config, spec, test)
    said = ask_here(spec, range(config.devices), moments=not declared.mean)
    return _own_data(said, declared, config, spec, test)


def own_of_run(run_dir: Path, config: RunConfig, spec: TaskSpec) -> OwnData | None:
    """The devices of a run that has begun, under what they had agreed on; None where it broke off before."""
    agreed = read_agreed(run_dir)
    if agreed is None:
        return None
    test = server_test(spec)
    _declared(config, spec, test)
    return OwnData(spec.model_copy(update={"agreed": agreed}), config.run_name, test)


def _declared(config: RunConfig, spec: TaskSpec, test: DataSet | None) -> Declared:
    """What the server says of the data beforehand; ConfigError where a private run would have it from devices.

    What devices say of their data, and scores that they take on it, has no noise. The first is in the model, as its
    normalization and its number of outputs, and the second in the journal, and in which model is the best.
    """
    declared = declared_by(spec.arguments, test)
    if not config.dp.is_on:
        return declared
    private = "partition = 'own' under differential privacy (dp.epsilon, dp.noise-multiplier)"
    if test is None:
        raise ConfigError(
            f"{private}: only devices have examples to test on, and their scores have no noise, nor has what they say "
            "of their labels and of the shape of their inputs: give the server a test set in data-dir, from examples "
            "that are of no device (docs/privacy.md)"
        )
    if test.test.inputs.dtype != torch.int32 and not declared.mean:
        raise ConfigError(
            f"{private}: the mean and the deviation that inputs are normalized by would be sums over devices' data "
            f"without noise: set mean and std in task-arguments{_of_test(test)} (docs/privacy.md)"
        )
    return declared


def _of_test(test: DataSet) -> str:
    """The normalization that the server's test set would have, in words; "" where it has none."""
    try:
        found = normalization([moments_of(test.test.inputs)])
    except ValueError:  # one value only
        return ""
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in found)
    return f"; those of the server's test set are mean = [{mean}], std = [{std}]"


def _own_data(
    said: Mapping[int, Summary], declared: Declared, config: RunConfig, spec: TaskSpec, test: DataSet | None
) -> OwnData:
    with raised_as(ConfigError, "partition = 'own': "):
        agreed, unfit = agree(said.values(), declared, spec.max_examples)
    if declared.form is None and not any(s.test_examples for s in said.values() if s.device not in unfit):
        raise ConfigError(
            f"partition = 'own' with test-fraction = {spec.test_fraction:g}: neither the server nor any device has "
            "examples to test on: set test-fraction, such as 0.2, or give the server a test set in its data-dir"
        )
    tell(agreed, unfit, len(said) - len(unfit))
    own = OwnData(spec.model_copy(update={"agreed": agreed}), config.run_name, test)
    fitting = [each for _, each in sorted(said.items()) if each.device not in unfit]
    own.take(fitting)
    tell_remarks(by_kind(own.remarks))
    tell_labels(label_warnings(fitting))
    return own


def write_agreed(run_dir: Path, agreed: Agreed) -> None:
    """Write agreed.json, whole or not at all."""
    write_whole(run_dir / FILE, f"{agreed.model_dump_json(indent=2)}\n")


def read_agreed(run_dir: Path) -> Agreed | None:
    """Return what the devices of a run agreed on; None where it broke off before. JournalError where it cannot be
    read."""
    return read_if_there(run_dir / FILE, Agreed)
