"""The report of a node: what its machine has, what its links carry, and what its owner wrote in the node config."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from wildflower.devices.instance import instance
from wildflower.devices.links import BANDWIDTH_KEYS, LinkSettings, update_links, with_links
from wildflower.devices.probe import probe_machine
from wildflower.devices.resource_report import MAX_KIND_LETTERS, DeviceReport
from wildflower.devices.speed import own_speed
from wildflower.devices.validation import check_text, check_whole, shown
from wildflower.plugins.nearest import nearest

FOLDER_KEYS = ("state-dir", "data-dir", "gpu-trainer")
MIN_MEMBERS = 3  # of a sum under masks
LIMIT_KEYS = ("memory-limit-bytes", "payload-limit-bytes")  # what the owner sets apart
# `num-partitions` is Flower's own: its simulation sets it, and so do many who start a SuperNode. Nothing here reads it.
KEYS = frozenset(
    {"partition-id", "num-partitions", "kind", "secure-minimum", "flop-per-s", "down-mbit-per-s", "up-mbit-per-s"}
    | {*FOLDER_KEYS, *LIMIT_KEYS, *BANDWIDTH_KEYS}
)


def check_node_config(config: Mapping[str, object]) -> LinkSettings:
    """What a node config says of links. Raises ValueError, which names the key, where it says what it must not.

    Whether `partition-id` is there at all is for whoever needs it to ask (`own_device`).
    """
    for key in config:
        if key not in KEYS:
            raise ValueError(f"node config: unknown key {shown(key)}, {nearest(key, KEYS)}")
    settings = LinkSettings.from_node_config(config)
    if "partition-id" in config:
        own_device(config)
    if "kind" in config:
        check_text(config["kind"], "node config kind", maximum=MAX_KIND_LETTERS)
    for key in FOLDER_KEYS:
        if key in config:
            check_text(config[key], f"node config {key}")
    for key in LIMIT_KEYS:
        if key in config:
            check_whole(config[key], f"node config {key}")
    own_secure_minimum(config)
    own_speed(config)
    return settings


def own_secure_minimum(config: Mapping[str, object]) -> int:
    """The fewest devices of a sum that a node's device is in; 0 where it also trains without masks."""
    own = config.get("secure-minimum")
    return 0 if own is None else check_whole(own, "node config secure-minimum", minimum=MIN_MEMBERS)


def own_device(config: Mapping[str, object]) -> int:
    """The device that a node carries: `partition-id` in its node config. ValueError where it does not say."""
    number = config.get("partition-id")
    if type(number) is not int or number < 0:
        raise ValueError(
            f"node config partition-id = {number!r}: a whole number from 0 says which device this node carries "
            '(wildflower-node --node-config "partition-id=0 num-partitions=4")'
        )
    return number


def node_report(
    config: Mapping[str, object], folder: Path, *, traffic_bytes: int = 0, root: Path = Path("/")
) -> DeviceReport:
    """The report of this machine as the node that its config describes.

    Beside the keys of `LinkSettings`, a node config may hold `kind` (a container does not see which board it runs on),
    `memory-limit-bytes` and `payload-limit-bytes`: what the owner sets apart.

    Args:
        config: The node config.
        folder: Where the node keeps what it knows of its links.
        traffic_bytes: Weights that came and went since the last report; they pay for measuring the links.
        root: As for `probe_machine`.

    Raises:
        ValueError: a key of the node config, or a limit of a control group, is not what it should be; names it.
    """
    settings = check_node_config(config)
    name, age_seconds = instance()
    report = replace(probe_machine(root), instance=name, instance_age_seconds=age_seconds)
    said = {key.replace("-", "_"): config[key] for key in ("kind", *LIMIT_KEYS) if key in config}
    report = replace(report, **said)  # type: ignore[arg-type]  # checked above
    return with_links(report, settings, update_links(settings, folder, traffic_bytes=traffic_bytes))
