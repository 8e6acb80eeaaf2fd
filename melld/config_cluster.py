"""The table `[cluster]` of the configuration: machines of a Ray cluster whose devices melld uses."""

from typing import Annotated, ClassVar, Literal

import msgspec

from melld.config_values import Port, Positive, PositiveSeconds, Table


class ClusterConfig(Table, frozen=True, kw_only=True):
    """Workers on every machine of a Ray cluster, in place of this machine's alone: docs/cluster.md."""

    short_form: ClassVar[str] = "address"

    address: Annotated[str | None, msgspec.Meta(examples=["auto", "10.0.0.2:6379"])] = None
    """Of Ray's head node; `auto`: the cluster that this machine has joined.  Default: no cluster."""
    devices_per_machine: Literal["all"] | Positive = "all"
    """How many devices to use of each machine: GPUs, or for CPU devices what it has of the resource `melld_device`."""
    min_machines: Positive = 1
    """How many machines must have joined before the workers are started."""
    start_timeout_s: PositiveSeconds = 120.0
    """How long that may take, and later the start of melld's agent on one machine."""
    listen: Annotated[str | None, msgspec.Meta(examples=["10.0.0.1"])] = None
    """Address of this machine for its agents.  Default: the one that Ray knows it by."""
    port: Port = 0
    """The port there.  0: a free one."""
    silence_s: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """Silence after which a machine is lost: its requests go on elsewhere, and it ends its workers."""
    return_idle: bool = False
    """Give the devices of stopped workers back to Ray, and take devices again to start them.  After five starts without
    a free one, only `melld resume` tries again."""
    allow_open_cluster: bool = False
    """Use a cluster without `RAY_AUTH_MODE=token`, where everybody who reaches a node can run code."""
