# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from marin_rl.config.workers_config import WorkersConfig
from marin_rl.distributed.worker_devices import (
    WorkerDevicesError,
    check_own_node,
    check_worker_devices,
    open_only_reserved,
)

WITH_GPUS = WorkersConfig(resources={"GPU": 1.0})
WITH_TPUS = WorkersConfig(resources={"TPU": 4.0})
CLUSTER = {"is_own_cluster": False}


def check(
    platform: str,
    environ: dict[str, str],
    *,
    workers: WorkersConfig = WorkersConfig(),
    is_own_cluster: bool = True,
    asks_server: bool = False,
) -> None:
    check_worker_devices(workers.reserved, platform, environ, is_own_cluster=is_own_cluster, asks_server=asks_server)


@pytest.mark.parametrize(
    ("platform", "changes", "message"),
    [
        ("tpu", {}, r"workers\.resources has no TPU, .* sample on the CPU\. Give .*launch tpu.*; or set mode: sync$"),
        ("tpu", CLUSTER, r"workers\.resources has no TPU"),
        ("tpu", {"workers": WITH_TPUS}, "ray_address is not set, so workers would get the TPU chips of this host"),
        ("gpu", {}, r"workers\.resources has no GPU, but this trainer runs on GPU: .* workers\.resources: {GPU: 1}"),
        ("gpu", CLUSTER, r"workers\.resources has no GPU"),
        ("gpu", {"workers": WITH_GPUS}, r"ray_address is not set, .* XLA_PYTHON_CLIENT_MEM_FRACTION=\.45"),
    ],
)
def test_workers_on_the_trainers_accelerators_are_rejected(
    platform: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerDevicesError, match=message):
        check(platform, {}, **changes)


@pytest.mark.parametrize(
    ("platform", "changes", "environ"),
    [
        ("cpu", {}, {}),
        ("gpu", {"workers": WITH_GPUS, **CLUSTER}, {}),
        ("gpu", {"workers": WITH_GPUS}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".45"}),
        ("tpu", {"workers": WITH_TPUS, **CLUSTER}, {}),
        ("tpu", {"workers": WITH_GPUS, **CLUSTER}, {}),
        ("tpu", {"workers": WorkersConfig(tpu_slice="v6e:2x2"), **CLUSTER}, {}),
        ("tpu", {"asks_server": True}, {}),
    ],
)
def test_workers_with_separate_devices_are_accepted(
    platform: str, changes: dict[str, Any], environ: dict[str, str]
) -> None:
    check(platform, environ, **changes)


def test_ray_must_not_offer_the_chips_of_the_trainer() -> None:
    nodes = [{"NodeID": "own", "Resources": {"TPU": 4.0}}, {"NodeID": "other", "Resources": {"TPU": 4.0}}]
    with pytest.raises(WorkerDevicesError, match="Ray offers 4 TPU chips of this host, which the trainer uses"):
        check_own_node(WITH_TPUS.reserved, "tpu", nodes, "own")
    check_own_node(WITH_TPUS.reserved, "cpu", nodes, "own")
    check_own_node(WITH_GPUS.reserved, "tpu", nodes, "own")
    nodes[0]["Resources"] = {"CPU": 1.0}
    check_own_node(WITH_TPUS.reserved, "tpu", nodes, "own")


def test_a_worker_on_one_host_of_a_slice_does_not_wait_for_the_others() -> None:
    environ = {"TPU_PROCESS_BOUNDS": "2,2,1"}
    open_only_reserved({"CPU": 1.0, "TPU": 4.0}, environ)
    assert environ["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"


OPENED = """
import os, jax
from marin_rl.distributed.worker_devices import open_only_reserved
open_only_reserved({RESERVED}, os.environ)
print(jax.config.jax_platforms)
"""


@pytest.mark.medium
@pytest.mark.parametrize(("reserved", "platforms"), [({"CPU": 1.0}, "cpu"), ({"GPU": 1.0}, "cuda,cpu")])
def test_a_worker_without_accelerators_runs_on_the_cpu(
    reserved: dict[str, float], platforms: str, tmp_path: Path
) -> None:
    """Run in a separate process, whose platforms this one must not change."""
    program = OPENED.replace("{RESERVED}", repr(reserved))
    environment = {**os.environ, "JAX_PLATFORMS": "cuda,cpu"}
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert said.stdout.strip() == platforms
