"""The report of a node: what its machine has, what its links carry, and what its owner wrote in the node config."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from wildflower.devices import node_config
from wildflower.devices.instance import instance
from wildflower.devices.links import update_links, with_links
from wildflower.devices.probe import probe_machine
from wildflower.devices.resource_report import DeviceReport


def node_report(config: Mapping[str, object], folder: Path, *, traffic_bytes: int = 0) -> DeviceReport:
    """Return the report of this machine as the node that its config describes.

    Args:
        config: The node config.
        folder: Where the node keeps what it knows of its links.
        traffic_bytes: Weights that came and went since the last report; they pay for measuring the links.

    Raises:
        ValueError: a key of the node config, or a limit of a control group, is not what it should be; names it.
    """
    owner = node_config.read(config)
    name, age_seconds = instance()
    machine = probe_machine()
    report = replace(
        machine,
        kind=owner.kind or machine.kind,
        memory_limit_bytes=owner.memory_limit_bytes,
        payload_limit_bytes=owner.payload_limit_bytes,
        instance=name,
        instance_age_seconds=age_seconds,
        disk_free_bytes=_disk_free_bytes(folder),
        clock_seconds=max(0.0, time.time()),
    )
    return with_links(report, owner, update_links(owner, folder, traffic_bytes=traffic_bytes))


def _disk_free_bytes(folder: Path) -> int | None:
    """Return what is free where a folder lies or will be made; None where nobody may look."""
    try:
        return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    except OSError:
        return None
