"""The nodes that a SuperLink knows: the name that each was enrolled under, and when it was heard of last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wildflower.launch.before import Deployment
from wildflower.launch.superlink import FlowerError

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo

    from wildflower.server_app.node_records import LastReport

HEARTBEATS = 2  # of them a node may miss before Flower takes it for gone


@dataclass(frozen=True)
class KnownNode:
    """A node of a SuperLink.

    Attributes:
        name: of the file of its public key; "" where the node has registered itself.
        status: "registered", "online" or "offline".
        seen: when its last heartbeat came, in seconds since 1970; None where none has come.
    """

    name: str
    status: str
    seen: float | None


def heard_at(last: LastReport, node: KnownNode | None) -> float:
    """Return when a device was heard of last, in seconds since 1970: by a heartbeat, or else when it reported."""
    return node.seen if node and node.seen else last.reported_at


def known_nodes(deployment: Deployment) -> dict[int, KnownNode]:
    """Return the nodes that a SuperLink knows and has not revoked. Raises FlowerError where it does not answer."""
    import click
    from flwr.cli.utils import flwr_cli_exc_handler
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    trust = deployment.root_certificates
    try:
        client = ControlHttpClient.from_server_address(
            server_address=deployment.address,
            insecure=trust is None,
            root_certificates=None if trust is None else trust.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )
        with client as superlink, flwr_cli_exc_handler():
            return nodes_of(superlink.ListNodes(ListNodesRequest()).nodes_info)
    except (OSError, ValueError) as error:
        raise FlowerError(f"{deployment.address}: {error}") from None
    except click.ClickException as error:
        raise FlowerError(f"{deployment.address}: {error.message}") from None


def nodes_of(listed: Iterable[NodeInfo]) -> dict[int, KnownNode]:
    """Return the nodes of Flower's list, but for those whose keys were revoked."""
    return {
        node.node_id: KnownNode(
            name=node.name,
            status=node.status,
            seen=node.online_until - HEARTBEATS * node.heartbeat_interval if node.online_until else None,
        )
        for node in listed
        if node.status != "unregistered"
    }
