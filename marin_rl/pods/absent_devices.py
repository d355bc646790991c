# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The devices of a topology for compilation, without the hardware: TPUs of a pod, GPUs of a host, or CPU devices."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src.core import trace_state_clean
from jax.experimental import mesh_utils
from jax.experimental.topologies import get_topology_desc

from marin_rl.pods.chips import Topology, TopologyError
from marin_rl.utils.errors import install_command


@contextlib.contextmanager
def absent_devices(topology: Topology) -> Iterator[None]:
    """Let jax and levanter find the devices of a topology instead of this machine's.

    Inside, programs can be lowered and compiled from shapes, but not run. For a CPU, the devices are this process's, so
    it must not have used any before.

    Raises:
        TopologyError: if jax has no compiler for the chip or no such topology, or this process has other CPU devices.
    """
    if topology.chip.platform == "cpu":
        use_cpu_devices(topology.num_chips)
        yield
        return
    devices = _describe_gpus(topology) if topology.chip.platform == "gpu" else _describe(topology)

    def arrange(within: tuple[int, int, int], between: tuple[int, int, int]) -> Any:
        if topology.slices > 1:
            return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
        if topology.chip.platform == "gpu":
            return np.array(devices).reshape(within)
        return mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)

    def local_devices() -> list[jax.Device]:
        return [device for device in devices if device.process_index == 0]

    # Levanter and the Pallas kernels ask jax for the devices of this process. jax.ensure_compile_time_eval and eager
    # operations of haliax would run on the devices of the mesh.
    with (
        mock.patch("jax.devices", return_value=devices),
        mock.patch("jax.device_count", return_value=len(devices)),
        mock.patch("jax.local_devices", side_effect=lambda *_, backend=None: local_devices()),
        mock.patch("jax.local_device_count", return_value=len(local_devices())),
        mock.patch("jax.default_backend", return_value=topology.chip.platform),
        mock.patch("marin_rl.utils.devices.trainer_config.arrange_devices", arrange),
        mock.patch("jax.ensure_compile_time_eval", contextlib.nullcontext),
        mock.patch("haliax.partitioning.is_in_jit", _is_tracing),
    ):
        yield


def _is_tracing() -> bool:
    return not trace_state_clean()


def use_cpu_devices(count: int) -> None:
    """Split this machine's CPU into a number of devices, before the first use of jax in this process.

    Raises:
        TopologyError: if jax has started with another number.
    """
    with contextlib.suppress(RuntimeError):  # jax has started
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    if (found := len(jax.devices())) != count or jax.devices()[0].platform != "cpu":
        raise TopologyError(
            f"jax has started with {found} devices of {jax.devices()[0].platform} in this process, so it cannot use "
            f"cpu:{count}; use a new process, without XLA_FLAGS for the number of devices"
        )


def _describe(topology: Topology) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(
            f"compiling for {topology.name} needs libtpu, which is not installed; install the extra: "
            f"{install_command('tpu')}"
        )
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=topology.accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        # Otherwise a second compiling process on this machine fails.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    shape = f"{topology.chip.name}:{'x'.join(map(str, topology.shape))}"
    options: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    # Three numbers, also if slices have two dimensions.
    options["chips_per_host_bounds"] = (*topology.host_shape, 1)[:3]
    try:
        return list(get_topology_desc(topology_name=shape, platform="tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise TopologyError(f"libtpu has no topology {topology.name!r}: {str(error).splitlines()[0]}") from error


_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""XLA's description of an H100 SXM (`xla/tools/hlo_opt/gpu_specs/h100_sxm.txtpb`), with cuDNN 9.8."""


CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages with jax's compiler for GPUs; the extra gpu installs one of them."""


def _describe_gpus(topology: Topology) -> list[jax.Device]:
    if not any(map(importlib.util.find_spec, CUDA_PLUGINS)):
        raise TopologyError(
            f"compiling for {topology.name} needs jax's CUDA plugin, which is not installed; install the extra: "
            f"{install_command('gpu')}"
        )
    # The plugin is not registered if it checks for CUDA's libraries and does not find them.
    jax.config.update("jax_platforms", "cpu")
    shape = f"1x1x{topology.num_chips}"
    description = get_topology_desc(topology.name, "cuda", target_config=_H100, topology=shape)
    return list(description.devices)
