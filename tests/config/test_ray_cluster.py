# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from marin_rl.config.ray_cluster import WorkerDevicesError, check_engine, check_own_node, check_worker_devices
from marin_rl.config.sections import Mode
from marin_rl.config.workers_config import Engine, WorkersConfig
from marin_rl.utils.errors import UserError
from marin_rl.utils.user_code import MissingPackageError
from tests.tiny_run import TinyRun
from tests.training.bare_run import make_config

CLUSTER = {"mode": Mode.ASYNC, "ray_address": "127.0.0.1:6379"}


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("ray", "finelog_server") else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("without_engines")
def test_only_runs_with_workers_need_an_engine():
    slices = WorkersConfig(num_workers=4, tpu_slice="v5e:4x4")
    jobs = WorkersConfig(engine=Engine.IRIS)
    for changes in ({}, {"workers": slices}, {"workers": jobs}, {"ray_address": "127.0.0.1:6379"}):
        config = make_config(**changes)
        check_engine(config.mode, config.workers)
    for config in (make_config(mode=Mode.ASYNC), make_config(**CLUSTER, workers=slices)):
        with pytest.raises(MissingPackageError, match=r"^mode: async needs .* \(ray\); .* pip install -e '\.\[ray\]'"):
            check_engine(config.mode, config.workers)
    with pytest.raises(MissingPackageError, match=r"needs .* \(finelog_server\); .* Python 3\.12 .* '\.\[iris\]'"):
        check_engine(Mode.ASYNC, jobs)


@pytest.mark.usefixtures("without_engines")
def test_a_dry_run_names_the_extra(new_run, capfd: pytest.CaptureFixture[str]):
    run: TinyRun = new_run(mode="async")
    assert run.train("--dry_run") == 1
    assert "pip install -e '.[ray]'" in capfd.readouterr().err
    assert not Path(run.path).exists()


@pytest.mark.parametrize("shape", ["v5e:4x4", "v5p:2x2x4", "v6e-8", "v7x:2x2x2"])
def test_slices_that_ray_can_reserve_are_accepted(shape: str):
    check_engine(Mode.ASYNC, WorkersConfig(num_workers=16, tpu_slice=shape))


def test_slices_that_ray_cannot_reserve_are_refused():
    with pytest.raises(UserError, match=r"workers.tpu_slice is 'v5e:6x2', but Ray knows no v5e slices of shape 6x2"):
        check_engine(Mode.ASYNC, WorkersConfig(num_workers=3, tpu_slice="v5e:6x2"))


# Devices of workers.

WITH_GPUS = WorkersConfig(resources={"GPU": 1.0})
WITH_TPUS = WorkersConfig(resources={"TPU": 4.0})


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
        (
            "tpu",
            {},
            r"workers\.resources has no TPU, .* sample on the CPU\. Give .*engine: iris, .*or set mode: sync$",
        ),
        ("tpu", {"is_own_cluster": False}, r"workers\.resources has no TPU"),
        ("tpu", {"workers": WITH_TPUS}, "ray_address is not set, so workers would get the TPU chips of this host"),
        ("gpu", {}, r"workers\.resources has no GPU, but this trainer runs on GPU: .* workers\.resources: {GPU: 1}"),
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
        ("gpu", {"workers": WITH_GPUS, "is_own_cluster": False}, {}),
        ("gpu", {"workers": WITH_GPUS}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".45"}),
        ("tpu", {"workers": WITH_TPUS, "is_own_cluster": False}, {}),
        ("tpu", {"workers": WITH_GPUS, "is_own_cluster": False}, {}),
        ("tpu", {"workers": WorkersConfig(tpu_slice="v6e:2x2"), "is_own_cluster": False}, {}),
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
