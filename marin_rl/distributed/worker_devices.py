# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Devices of rollout workers: those that Ray reserves for them, which are never those of the trainer."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import jax

from marin_rl.config.workers_config import CPU, GPU, TPU

SHARES_GPU_MEMORY = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
"""Environment variables with which several jax processes can share the memory of a GPU."""
_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Shape of the chips of a process, by their number."""


class WorkerDevicesError(ValueError):
    """Raised when rollout workers would open accelerators of the trainer; the message names the remedy."""


def check_worker_devices(
    reserved: Mapping[str, float],
    platform: str,
    environ: Mapping[str, str],
    *,
    is_own_cluster: bool,
    asks_server: bool,
) -> None:
    """Check that rollout workers have accelerators, if the trainer has some, and not those of the trainer.

    Args:
        reserved: resources that Ray reserves for each worker.
        platform: platform of the trainer's devices: `cpu`, `gpu` or `tpu`.
        environ: environment variables of the trainer, which workers inherit if the trainer starts Ray.
        is_own_cluster: whether the trainer starts Ray on its host.
        asks_server: whether an inference server samples, so that workers need no devices.

    Raises:
        WorkerDevicesError: if they would; the message names the settings to change.
    """
    if platform == "cpu":
        return
    kind = platform.upper()
    remedy = {
        GPU: "Give trainer and workers separate GPUs: start Ray with the GPUs of the workers "
        "(CUDA_VISIBLE_DEVICES=4,5,6,7 ray start --head) and the trainer with the others "
        "(CUDA_VISIBLE_DEVICES=0,1,2,3, ray_address: 127.0.0.1:6379) and workers.resources: {GPU: 1}",
        TPU: "Give the workers TPU slices of their own: `python -m marin_rl.launch tpu` with rollout_slices, or a Ray "
        "cluster of their hosts at ray_address, and workers.tpu_slice or workers.resources: {TPU: 4}",
    }[kind]
    if not {GPU, TPU} & reserved.keys() and not asks_server:
        raise WorkerDevicesError(
            f"workers.resources has no {kind}, but this trainer runs on {kind}: a worker opens only what it reserves, "
            f"so it would sample on the CPU. {remedy}; or set mode: sync"
        )
    if kind not in reserved or not is_own_cluster:
        return
    if kind == TPU:
        raise WorkerDevicesError(
            f"ray_address is not set, so workers would get the TPU chips of this host, which the trainer uses. {remedy}"
        )
    if not any(environ.get(name) for name in SHARES_GPU_MEMORY):
        raise WorkerDevicesError(
            "ray_address is not set, so workers get GPUs of the trainer, and jax reserves three quarters of a GPU's "
            f"memory for the first process. {remedy}; or let them share each GPU with "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=.45 in the environment"
        )


def check_own_node(reserved: Mapping[str, float], platform: str, nodes: list[dict[str, Any]], own: str) -> None:
    """Check that Ray does not offer the TPU chips of the trainer's own host.

    Args:
        reserved: resources that Ray reserves for each worker.
        platform: platform of the trainer's devices.
        nodes: nodes of the cluster, from `ray.nodes()`.
        own: id of the node of this process.

    Raises:
        WorkerDevicesError: if it does.
    """
    offered = next((node.get("Resources", {}).get(TPU, 0) for node in nodes if node["NodeID"] == own), 0)
    if platform == "tpu" and TPU in reserved and offered:
        raise WorkerDevicesError(
            f"Ray offers {offered:g} TPU chips of this host, which the trainer uses, to workers; start it here with "
            "`ray start --head --num-cpus=0 --resources='{\"TPU\": 0}'`"
        )


def ray_options(reserved: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a Ray actor that reserves these resources.

    >>> ray_options({"CPU": 2.0, "TPU": 4.0})
    {'num_cpus': 2.0, 'num_gpus': 0, 'resources': {'TPU': 4.0}}
    """
    others = {name: amount for name, amount in reserved.items() if name not in (CPU, GPU)}
    return {"num_cpus": reserved.get(CPU, 0), "num_gpus": reserved.get(GPU, 0), "resources": others}


def open_only_reserved(reserved: Mapping[str, float], environ: MutableMapping[str, str]) -> None:
    """Make jax open only the devices that Ray has reserved for this process; call it before jax opens any.

    Ray hides GPUs and TPU chips of others from a process that reserves some, but none from one that reserves none.
    libtpu would wait for the other hosts of a slice, which have workers of their own.

    Args:
        reserved: the reserved resources.
        environ: environment of this process.
    """
    if not {GPU, TPU} & reserved.keys():
        jax.config.update("jax_platforms", "cpu")
    if chips := reserved.get(TPU):
        environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _CHIP_BOUNDS[int(chips)]
        environ["TPU_PROCESS_BOUNDS"] = "1,1,1"
        environ["CLOUD_TPU_TASK_ID"] = "0"
