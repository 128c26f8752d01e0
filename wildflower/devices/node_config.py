"""The node config: what the owner of a device says of it when its node is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from wildflower.devices.checked import STRICT, FlopPerS, MbitPerS, Text, Whole, checked
from wildflower.devices.hours import Hours
from wildflower.devices.resource_report import Kind

MIN_MEMBERS = 3  # of a sum under masks
SHARE = 0.01


class NodeConfig(BaseModel):
    """The keys of a node config, which have hyphens in place of underscores.

    Attributes:
        partition_id: the device that the node carries; whoever needs it asks `own_device`.
        num_partitions: Flower's own: its simulation sets it, and so do many who start a SuperNode. Nothing reads it.
        kind: a container does not see which board it runs on.
        secure_minimum: the fewest devices of a sum that this one is in; 0 where it also trains without masks.
        flop_per_s, down_mbit_per_s, up_mbit_per_s: taken where nothing was measured.
        memory_limit_bytes, payload_limit_bytes: what the owner sets apart.
        bandwidth_address: "host:port" of the bandwidth service; None: there is no probe.
        bandwidth_ca: certificate of the authority that signed the service's.
        bandwidth_insecure: without TLS.
        bandwidth_token_file: holds the service's token.
        bandwidth_share: the probe may spend this share of the weights' traffic.
        charging, idle, hours, unmetered, max_temperature, max_bytes_per_month, max_minutes_per_day: when the device
            takes part (`wildflower.devices.conditions`).
    """

    model_config = ConfigDict(**STRICT, frozen=True, alias_generator=lambda name: name.replace("_", "-"))

    partition_id: Whole | None = None
    num_partitions: Any = None
    kind: Kind | None = None
    secure_minimum: Annotated[int, Field(ge=MIN_MEMBERS, lt=2**63)] | None = None
    flop_per_s: FlopPerS | None = None
    down_mbit_per_s: MbitPerS | None = None
    up_mbit_per_s: MbitPerS | None = None
    state_dir: Text | None = None
    data_dir: Text | None = None
    gpu_trainer: Text | None = None
    memory_limit_bytes: Whole | None = None
    payload_limit_bytes: Whole | None = None
    bandwidth_address: Text | None = None
    bandwidth_ca: Text | None = None
    bandwidth_insecure: bool = False
    bandwidth_token_file: Text | None = None
    bandwidth_share: Annotated[float, Field(ge=0, le=1)] = SHARE
    charging: bool = False
    idle: bool = False
    hours: Hours | None = None
    unmetered: bool = False
    max_temperature: Annotated[float, Field(gt=0, le=200)] | None = None
    max_bytes_per_month: Whole | None = None
    max_minutes_per_day: Annotated[float, Field(gt=0, le=1440)] | None = None

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.bandwidth_address is None:
            return self
        if self.bandwidth_insecure == (self.bandwidth_ca is not None):
            raise ValueError(
                "bandwidth-address: give either bandwidth-ca, the certificate of the service's authority, or "
                "bandwidth-insecure=true"
            )
        if self.bandwidth_token_file is None:
            raise ValueError("bandwidth-address without bandwidth-token-file: the service wants a token")
        return self


KEYS = frozenset(field.alias or name for name, field in NodeConfig.model_fields.items())


def read(config: Mapping[str, object]) -> NodeConfig:
    """Return what a node config says; ValueError names the key that says what it must not."""
    return checked(NodeConfig, config, "node config")


def own_device(config: Mapping[str, object]) -> int:
    """Return the device that a node carries: `partition-id` in its node config. ValueError where it does not say."""
    number = config.get("partition-id")
    if type(number) is not int or number < 0:
        raise ValueError(
            f"node config partition-id = {number!r}: a whole number from 0 says which device this node carries "
            '(wildflower-node --node-config "partition-id=0 num-partitions=4")'
        )
    return number
