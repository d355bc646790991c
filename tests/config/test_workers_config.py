# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import jmp
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import TransferDtype, WeightTransferConfig, WorkerMeshConfig, WorkersConfig
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.settings.yaml_text import from_yaml, to_yaml
from tests.training.bare_run import make_config

FLIGHT = WeightTransferConfig(host="0.0.0.0")
HALF = jmp.get_policy("p=bf16,c=bf16")


@pytest.mark.parametrize(
    ("workers", "reserved"),
    [
        (WorkersConfig(), {"CPU": 1.0}),
        (WorkersConfig(resources={"CPU": 0.0, "GPU": 0.5}), {"GPU": 0.5}),
        (WorkersConfig(num_workers=4, tpu_slice="v5p:2x2x4"), {"CPU": 1.0, "TPU": 4.0}),
        (WorkersConfig(tpu_slice="v5e:2x4", resources={"spot": 1.0}), {"CPU": 1.0, "TPU": 8.0, "spot": 1.0}),
        (WorkersConfig(tpu_slice="v5e-8"), {"CPU": 1.0, "TPU": 8.0}),
        (WorkersConfig(num_workers=4, tpu_slice="V5litepod-16"), {"CPU": 1.0, "TPU": 4.0}),
    ],
)
def test_reserved_resources(workers: WorkersConfig, reserved: dict[str, float]) -> None:
    assert workers.reserved == reserved


def test_a_worker_has_its_own_mesh_and_precision() -> None:
    trainer = dataclasses.replace(
        TrainerConfig(), model_axis_size=8, replica_ici_axis_size=2, tensor_parallel_axes=["mlp"]
    )
    assert WorkersConfig().trainer_config(trainer) == trainer
    on_tpu = WorkersConfig(resources={"TPU": 4.0}, mesh=WorkerMeshConfig(2), precision=HALF).trainer_config(trainer)
    assert (on_tpu.model_axis_size, on_tpu.replica_ici_axis_size, on_tpu.tensor_parallel_axes) == (2, 1, ["mlp"])
    assert on_tpu.mp == HALF
    # A worker that reserves chips must not sample on the CPU because it found none.
    assert on_tpu.require_accelerator
    own_axes = WorkersConfig(mesh=WorkerMeshConfig(2, ("kv_head",)))
    assert own_axes.trainer_config(trainer).tensor_parallel_axes == ["kv_head"]


def test_hardware_of_workers_survives_the_text_form() -> None:
    workers = WorkersConfig(resources={"TPU": 4.0}, mesh=WorkerMeshConfig(4, ("heads", "mlp")), precision=HALF)
    weights = dataclasses.replace(FLIGHT, dtype=TransferDtype.BFLOAT16)
    config = make_config(mode=Mode.ASYNC, ray_address="head:6379", weights=weights, workers=workers)
    assert from_yaml(TrainConfig, to_yaml(config), "the config").workers == workers
