"""The report of a device, as its node's worker and `wildflower probe` make it.

Nothing here needs torch but measuring the speed, which happens once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from wildflower.client_app.board_link import BoardError, about
from wildflower.devices import node_config
from wildflower.devices.conditions import Rest, rest_of
from wildflower.devices.node import node_report
from wildflower.devices.probe import probe_machine
from wildflower.devices.resource_report import DeviceReport
from wildflower.devices.speed import with_speed
from wildflower.devices.state_folder import node_state_dir
from wildflower.plugins.flower_log import log


def device_report(config: Mapping[str, object], traffic_bytes: int = 0, *, left_bytes: int = 0) -> DeviceReport:
    """Return the report of the node that a node config describes, with the GPU of the board's trainer where it has one.

    `traffic_bytes` is as of `wildflower.devices.node.node_report`; `left_bytes` are held by a process that is about to
    end. Raises ValueError where the config does not say what it must.
    """
    report = node_report(config, node_state_dir(config), traffic_bytes=traffic_bytes)
    free_bytes = min(report.memory_available_bytes + left_bytes, report.memory_total_bytes)
    report = replace(report, memory_available_bytes=free_bytes)
    report = with_speed(report, config, node_state_dir(config))
    if (rest := resting(config, report)) is not None:
        report = replace(report, resting=rest.why, resting_seconds=rest.seconds)
    path = gpu_trainer(config)
    if path is None:
        return report
    try:
        return replace(report, accelerator=about(path)["device"])
    except BoardError as error:  # the report tells what this device has now
        log.warning("%s", error)
        return report


def resting(config: Mapping[str, object], report: DeviceReport | None = None) -> Rest | None:
    """Return why the owner of a node lets its device take no part now; None where it does."""
    owner = node_config.read(config)
    return rest_of(owner, report or probe_machine(), node_state_dir(config), datetime.now())


def gpu_trainer(config: Mapping[str, object]) -> Path | None:
    """Return where the trainer listens that has the board's GPU: `gpu-trainer` in the node config."""
    path = node_config.read(config).gpu_trainer
    return None if path is None else Path(path)
