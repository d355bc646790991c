# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from marin_rl.config.sections import Mode
from marin_rl.config.workers_config import WorkersConfig
from marin_rl.distributed.ray_cluster import check_ray
from marin_rl.utils.errors import UserError
from marin_rl.utils.user_code import MissingPackageError
from tests.tiny_run import TinyRun
from tests.training.bare_run import make_config

CLUSTER = {"mode": Mode.ASYNC, "ray_address": "127.0.0.1:6379"}


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "ray" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("without_ray")
def test_only_runs_with_workers_need_ray():
    slices = WorkersConfig(num_workers=4, tpu_slice="v5e:4x4")
    for config in (make_config(), make_config(workers=slices), make_config(ray_address="127.0.0.1:6379")):
        check_ray(config)
    for config in (make_config(mode=Mode.ASYNC), make_config(**CLUSTER, workers=slices)):
        with pytest.raises(
            MissingPackageError, match=r"^mode: async needs .* \(ray\); .* pip install 'marin_rl\[ray\]'"
        ):
            check_ray(config)


@pytest.mark.usefixtures("without_ray")
def test_a_dry_run_names_the_extra(new_run, capfd: pytest.CaptureFixture[str]):
    run: TinyRun = new_run(mode="async")
    assert run.train("--dry_run") == 1
    assert "pip install 'marin_rl[ray]'" in capfd.readouterr().err
    assert not Path(run.path).exists()


@pytest.mark.parametrize("shape", ["v5e:4x4", "v5p:2x2x4", "v6e-8", "v7x:2x2x2"])
def test_slices_that_ray_can_reserve_are_accepted(shape: str):
    check_ray(make_config(**CLUSTER, workers=WorkersConfig(num_workers=4, tpu_slice=shape)))


def test_slices_that_ray_cannot_reserve_are_refused():
    workers = WorkersConfig(num_workers=3, tpu_slice="v5e:6x2")
    with pytest.raises(UserError, match=r"workers.tpu_slice is 'v5e:6x2', but Ray knows no v5e slices of shape 6x2"):
        check_ray(make_config(**CLUSTER, workers=workers))
