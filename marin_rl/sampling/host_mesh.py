# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sampler replicas: the devices of each training process, and copies of the learner's weights on them.

With several training processes, each samples on its own devices with all weights, so that decoding needs no
communication with other hosts. The weights are copied from the learner's mesh once per round of sampling, by all
processes together.
"""

import math
from typing import Any, TypeVar

import jax
import numpy as np
from haliax import NamedArray
from haliax.partitioning import ResourceAxis, ResourceMapping, pspec_for_axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")

AXES = (ResourceAxis.REPLICA, ResourceAxis.DATA, ResourceAxis.MODEL)
HOST = "host"


def count_hosts(mesh: Mesh) -> int:
    """Return the number of processes that own the devices of a mesh."""
    return len({device.process_index for device in mesh.devices.flat})


def host_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh on which this process samples: `mesh` itself, or its own devices if there are several processes.

    The model axis keeps its size, unless it spans several hosts; then it is as large as this process's devices allow.

    Args:
        mesh: the learner's mesh, with the axes `AXES`.

    Raises:
        ValueError: if the processes have different numbers of devices in the mesh.
    """
    if count_hosts(mesh) == 1:
        return mesh
    return Mesh(_by_host(mesh)[_host_index(mesh)], AXES)


def copy_to_each_process(tree: T, mesh: Mesh, mapping: ResourceMapping) -> T:
    """Copy the arrays of a tree to the devices of each process; a collective of all processes of the mesh.

    Args:
        tree: arrays on `mesh`.
        mesh: the learner's mesh.
        mapping: sharding of the copies over the axes of `host_mesh`.

    Returns:
        The tree with arrays on `host_mesh(mesh)`.
    """
    # Every process has the same part of this mesh, so its part of a copy is a whole array.
    replicas, own = Mesh(_by_host(mesh), (HOST, *AXES)), host_mesh(mesh)

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, NamedArray):
            return NamedArray(copy_array(leaf.array, pspec_for_axis(leaf.axes, mapping)), leaf.axes)
        return copy_array(leaf, PartitionSpec())

    def copy_array(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        copies = jax.device_put(array, NamedSharding(replicas, spec))
        parts = [shard.data for shard in copies.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(own, spec), parts)

    return jax.tree.map(copy, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def _by_host(mesh: Mesh) -> np.ndarray:
    """Return the devices of a mesh, `[host, replica, data, model]`."""
    hosts: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        hosts.setdefault(device.process_index, []).append(device)
    counts = {process: len(hosts[process]) for process in sorted(hosts)}
    count = counts[min(counts)]
    if any(other != count for other in counts.values()):
        raise ValueError(
            f"the training processes have different numbers of devices ({counts}); start every process with the same "
            "number of devices"
        )
    model = math.gcd(mesh.shape[ResourceAxis.MODEL], count)
    devices = np.array([hosts[process] for process in counts], object)
    return devices.reshape(len(counts), 1, count // model, model)


def _host_index(mesh: Mesh) -> int:
    return sorted({device.process_index for device in mesh.devices.flat}).index(jax.process_index())
