# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks before Ray is started: it is installed, its cluster answers, and workers get no devices of the trainer."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from marin_rl.config.sections import Mode
from marin_rl.config.workers_config import GPU, TPU, Engine, WorkersConfig
from marin_rl.utils.devices.slice_names import SliceName, parse_slice
from marin_rl.utils.errors import UserError
from marin_rl.utils.user_code import require_extra

CONNECT_TIMEOUT = 10.0
"""Timeout of the connection to the head node of a cluster, in seconds."""

SHARES_GPU_MEMORY = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
"""Environment variables with which several jax processes can share the memory of a GPU."""


class NoClusterError(UserError):
    """Raised when there is no Ray cluster at the configured address."""


class WorkerDevicesError(ValueError):
    """Raised when rollout workers would open accelerators of the trainer; the message names the remedy."""


def ray_version(named: SliceName) -> str:
    """Return Ray's name of the generation of a slice, such as v5litepod."""
    return {"v5e": "v5litepod"}.get(named.generation.name, named.generation.name)


def check_engine(mode: Mode, workers: WorkersConfig) -> None:
    """Check that the engine of rollout workers is installed, and knows their TPU slices; `mode: sync` needs none.

    Raises:
        MissingPackageError: if it is not installed.
        UserError: if Ray knows no slices of this shape.
    """
    if mode is Mode.SYNC:
        return
    require_extra(workers.engine.value, "mode: async")
    tpu_slice = None if workers.engine is Engine.IRIS else workers.tpu_slice
    if tpu_slice is None:
        return
    from ray._private.accelerators.tpu import TPUAcceleratorManager

    named = parse_slice(tpu_slice)
    if not TPUAcceleratorManager.is_valid_tpu_accelerator_topology(ray_version(named), named.shape_text):
        raise UserError(
            f"workers.tpu_slice is {tpu_slice!r}, but Ray knows no {named.generation.name} slices of "
            f"shape {named.shape_text}; use another shape"
        )


def find_cluster(address: str) -> None:
    """Check that a cluster address accepts connections. Ray itself would retry for minutes and end the process.

    The address is `host:port`, or `auto`, which only Ray can resolve.

    Raises:
        NoClusterError: if the connection fails.
    """
    if address != "auto":
        host, _, port = address.rpartition(":")
        with no_cluster(address):
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()


@contextlib.contextmanager
def no_cluster(address: str) -> Iterator[None]:
    """Raise connection errors of the block as `NoClusterError`."""
    try:
        yield
    except OSError as error:
        raise NoClusterError(
            f"no Ray cluster responds at ray_address {address!r} ({error}); start it with `ray start --head` on its "
            "first machine, correct ray_address, or leave it out"
        ) from error


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
        TPU: "Give the workers TPU slices of their own: workers: {engine: iris, tpu_slice: v5p-8} in a job of "
        "marin_rl.launch, or a Ray cluster of their hosts at ray_address, and workers.tpu_slice or workers.resources: "
        "{TPU: 4}",
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

    `reserved` are the resources of each worker, `nodes` is from `ray.nodes()`, and `own` is the id of the node of this
    process.

    Raises:
        WorkerDevicesError: if it does.
    """
    offered = next((node.get("Resources", {}).get(TPU, 0) for node in nodes if node["NodeID"] == own), 0)
    if platform == "tpu" and TPU in reserved and offered:
        raise WorkerDevicesError(
            f"Ray offers {offered:g} TPU chips of this host, which the trainer uses, to workers; start it here with "
            "`ray start --head --num-cpus=0 --resources='{\"TPU\": 0}'`"
        )
