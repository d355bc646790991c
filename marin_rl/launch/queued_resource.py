# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Queued resources of Cloud TPU: requests for one or several slices, which the service grants when it has them."""

import dataclasses
import enum
import json
import re
from collections.abc import Sequence
from typing import Any

from marin_rl.config_fields import check_at_least, convert_enum_fields
from marin_rl.launch.gcloud import Gcloud, GcloudError, NotFoundError, check_flags
from marin_rl.slice_names import TopologyError, generation_of, slice_type


class CapacityType(enum.Enum):
    """Kind of capacity that a request is for."""

    ON_DEMAND = "on-demand"
    """Not preempted; needs on-demand quota."""
    SPOT = "spot"
    """Cheaper; may be preempted at any time."""
    RESERVED = "reserved"
    """From a reservation of the project."""


DELETE_TIMEOUT = 1800.0
"""Seconds in which a queued resource with its slices must be deleted."""
_OWN_FLAGS = {
    *("accelerator-type", "runtime-version", "node-id", "node-count", "node-prefix", "spot", "reserved", "zone"),
    *("project", "async"),
}


@dataclasses.dataclass(frozen=True)
class SlicesConfig:
    """TPU slices."""

    tpu_type: str
    """Type of each slice, such as v5p-32 or v5e-16 (Google's name is v5litepod-16), or its topology, such as v5p:2x2x4;
    `gcloud compute tpus tpu-vm accelerator-types list` lists the types of a zone."""
    num_slices: int = 1
    """Number of slices. Those of a trainer are connected by the data center's network (Multislice)."""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    """`on-demand`, `spot` (may be preempted; the slices are then requested again, and the run resumes) or
    `reserved`."""
    runtime_version: str | None = None
    """Software of the hosts; that for JAX on the generation by default."""
    create_flags: tuple[str, ...] = ()
    """Further flags of `gcloud compute tpus queued-resources create`, such as `--service-account=NAME`."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        check_at_least(self, "slices", num_slices=1)
        try:
            object.__setattr__(self, "tpu_type", slice_type(self.tpu_type))
        except TopologyError as error:
            raise ValueError(f"tpu_type is {error}") from error
        if not self.runtime_version and not generation_of(self.tpu_type).runtime_version:
            raise ValueError(
                f"tpu_type is {self.tpu_type}, of which the runtime version is not known; set runtime_version"
            )
        if self.runtime_version is not None and not re.fullmatch(r"[a-z0-9][-.a-z0-9]*", self.runtime_version):
            raise ValueError(f"runtime_version is {self.runtime_version!r}; it must be a name, such as v2-alpha-tpuv5")
        check_flags("create_flags", self.create_flags, _OWN_FLAGS)


class Stage(enum.Enum):
    """Stage of a queued resource, from the states of the service."""

    ABSENT = "absent"
    """There is none of this name."""
    WAITING = "waiting"
    """Waiting in the queue, or changing from one of the other stages to another."""
    ACTIVE = "active"
    """All slices exist."""
    SUSPENDED = "suspended"
    """Its slices were preempted or deleted; it must be deleted and created again."""
    FAILED = "failed"
    """The request failed."""


_STAGES = {
    "ACTIVE": Stage.ACTIVE,
    "SUSPENDED": Stage.SUSPENDED,
    "FAILED": Stage.FAILED,
}
"""Others (ACCEPTED, CREATING, DELETING, PROVISIONING, SUSPENDING, WAITING_FOR_RESOURCES) end without an action."""


@dataclasses.dataclass(frozen=True)
class QueuedResource:
    """A request for slices."""

    name: str
    """Name of the request; also of its slice, or the prefix of its slices."""
    slices: SlicesConfig
    """Type, number and capacity of the slices."""

    @property
    def nodes(self) -> list[str]:
        """Names of the slices."""
        count = self.slices.num_slices
        return [self.name] if count == 1 else [f"{self.name}-{index}" for index in range(count)]


@dataclasses.dataclass(frozen=True)
class Description:
    """State of a queued resource."""

    stage: Stage
    state: str = "ABSENT"
    """Name of the state in Cloud TPU."""
    error: str = ""
    """Message of a failed request."""
    tpu_type: str | None = None
    """Type of its slices, if it is known."""
    num_slices: int | None = None
    """Number of slices, if it is known."""


def describe(gcloud: Gcloud, name: str) -> Description:
    """Describe a queued resource.

    Raises:
        GcloudError: if the command fails for a reason other than that there is none.
    """
    try:
        output = gcloud.tpus("queued-resources", "describe", name, "--format=json")
    except NotFoundError:
        return Description(Stage.ABSENT)
    if gcloud.dry_run:
        return Description(Stage.ABSENT)
    values = json.loads(output)
    state = values.get("state", {})
    specs = values.get("tpu", {}).get("nodeSpec", [])
    spec: dict[str, Any] = specs[0] if specs else {}
    count = (spec.get("multisliceParams") or spec.get("multiNodeParams") or {}).get("nodeCount", len(specs))
    name_of_state = state.get("state", "UNKNOWN")
    return Description(
        _STAGES.get(name_of_state, Stage.WAITING),
        name_of_state,
        state.get("failedData", {}).get("error", {}).get("message", ""),
        spec.get("node", {}).get("acceleratorType"),
        int(count) or None,
    )


def create(gcloud: Gcloud, resource: QueuedResource) -> None:
    """Request slices.

    Raises:
        GcloudError: if the request is rejected, for example because of the quota.
    """
    slices = resource.slices
    nodes = (
        [f"--node-id={resource.name}"]
        if slices.num_slices == 1
        else [f"--node-count={slices.num_slices}", f"--node-prefix={resource.name}"]
    )
    capacity = {CapacityType.SPOT: ["--spot"], CapacityType.RESERVED: ["--reserved"], CapacityType.ON_DEMAND: []}
    gcloud.tpus(
        "queued-resources",
        "create",
        resource.name,
        f"--accelerator-type={slices.tpu_type}",
        f"--runtime-version={slices.runtime_version or generation_of(slices.tpu_type).runtime_version}",
        *nodes,
        *capacity[slices.capacity_type],
        *slices.create_flags,
    )


def delete(gcloud: Gcloud, name: str) -> bool:
    """Delete a queued resource with its slices; nothing happens if there is none.

    Returns:
        Whether there was one.

    Raises:
        GcloudError: if it cannot be deleted.
    """
    try:
        gcloud.tpus("queued-resources", "delete", name, "--force", timeout=DELETE_TIMEOUT)
    except NotFoundError:
        return False
    return True


def check_same(resource: QueuedResource, found: Description) -> None:
    """Check that an existing queued resource is the requested one.

    Raises:
        GcloudError: if its slices have another type or number.
    """
    differing = [
        f"{key} {there} instead of {here}"
        for key, there, here in (
            ("tpu_type", found.tpu_type, resource.slices.tpu_type),
            ("num_slices", found.num_slices, resource.slices.num_slices),
        )
        if there not in (None, here)
    ]
    if differing:
        raise GcloudError(
            f"{resource.name} exists with {' and '.join(differing)}; delete it first, or choose another tpu_name"
        )


@dataclasses.dataclass(frozen=True)
class Node:
    """A slice."""

    state: str
    """State in Cloud TPU, such as READY or PREEMPTED; ABSENT if it does not exist."""
    addresses: Sequence[str]
    """Internal address of each host; empty unless all of them have one."""


def describe_node(gcloud: Gcloud, name: str) -> Node:
    """Describe a slice.

    Raises:
        GcloudError: if the command fails for a reason other than that there is none.
    """
    try:
        output = gcloud.tpus("tpu-vm", "describe", name, "--format=json")
    except NotFoundError:
        return Node("ABSENT", ())
    if gcloud.dry_run:
        return Node("READY", ("HOST_ADDRESS",))
    values = json.loads(output)
    addresses = tuple(endpoint.get("ipAddress", "") for endpoint in values.get("networkEndpoints", ()))
    return Node(values.get("state", "UNKNOWN"), addresses if all(addresses) else ())
