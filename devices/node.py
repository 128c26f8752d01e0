"""The report of a node: what its machine has, what its links carry, and what its owner wrote in the node config."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from devices.instance import instance
from devices.links import LinkSettings, update_links, with_links
from devices.probe import probe_machine
from devices.report import MAX_KIND_LETTERS, DeviceReport
from devices.validation import check_text, check_whole


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
    settings = LinkSettings.from_node_config(config)
    name, age_seconds = instance()
    report = replace(probe_machine(root), instance=name, instance_age_seconds=age_seconds)
    if "kind" in config:
        report = replace(report, kind=check_text(config["kind"], "node config kind", maximum=MAX_KIND_LETTERS))
    if "memory-limit-bytes" in config:
        limit_bytes = check_whole(config["memory-limit-bytes"], "node config memory-limit-bytes")
        report = replace(report, memory_limit_bytes=limit_bytes)
    if "payload-limit-bytes" in config:
        limit_bytes = check_whole(config["payload-limit-bytes"], "node config payload-limit-bytes")
        report = replace(report, payload_limit_bytes=limit_bytes)
    return with_links(report, settings, update_links(settings, folder, traffic_bytes=traffic_bytes))
