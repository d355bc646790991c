# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math
from typing import Any

import jmp
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig, TrainerConfig
from marin_rl.config.weights_config import TransferDtype, WeightTransferConfig
from marin_rl.config.workers_config import Refresh, WorkerMeshConfig, WorkersConfig
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml, to_yaml
from tests.training.bare_run import make_config

FLIGHT = WeightTransferConfig(host="0.0.0.0")
HALF = jmp.get_policy("p=bf16,c=bf16")


def test_refresh_modes_are_selected_by_name() -> None:
    assert decode(WorkersConfig, {}).refresh is Refresh.BETWEEN_GROUPS
    assert decode(WorkersConfig, {"refresh": "in_flight"}).refresh is Refresh.IN_FLIGHT
    with pytest.raises(ConfigError, match="between_groups, in_flight"):
        decode(WorkersConfig, {"refresh": "sometimes"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resources": {"GPU": -1.0}}, "workers.resources.GPU is -1.0; it must be at least 0"),
        ({"resources": {"GPU": math.nan}}, "workers.resources.GPU is nan"),
        ({"resources": {"CPU": 1.5}}, "workers.resources.CPU is 1.5; .* whole if above 1"),
        ({"resources": {"TPU": 3.0}}, "workers.resources.TPU is 3; a worker uses 1, 2, 4 or 8 chips of one host"),
        ({"resources": {"tpu": 4.0}}, "workers.resources has 'tpu', which Ray calls 'TPU'"),
        ({"resources": {"memory": 4.0}}, "workers.resources has 'memory', which cannot be reserved here"),
        ({"tpu_slice": "v6e"}, "workers.tpu_slice is 'v6e': it is not a slice of TPUs, such as "),
        ({"tpu_slice": "v9:2x2"}, "workers.tpu_slice is 'v9:2x2': it is not a slice of TPUs, such as v5e-8"),
        (
            {"tpu_slice": "v5e:3x3"},
            "workers.tpu_slice is 'v5e:3x3': slices of v5e have 2 dimensions and consist of whole hosts of 2x2",
        ),
        ({"tpu_slice": "2xv5e-8"}, "workers.tpu_slice is '2xv5e-8': it is the kind of one slice"),
        ({"tpu_slice": "v5e-24"}, "workers.tpu_slice is 'v5e-24': a slice of 24 has no default shape"),
        ({"tpu_slice": "h100-8"}, "workers.tpu_slice is 'h100-8': it is not a slice of TPUs, such as v5e-8"),
        ({"tpu_slice": "v6e:2x2", "resources": {"TPU": 4.0}}, "workers.resources has TPU, but workers.tpu_slice is"),
        ({"tpu_slice": "v5e:4x4", "num_workers": 6}, "is 6, but a slice .* has 4 hosts .* such as 8"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkersConfig(**changes)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"workers": WorkersConfig(resources={"spot": 1.0})},
            "workers.resources has 'spot', but ray_address is not set",
        ),
        ({"workers": WorkersConfig(tpu_slice="v6e:2x2")}, "workers.tpu_slice is v6e:2x2, but ray_address is not set"),
        (
            {"workers": WorkersConfig(precision=HALF)},
            "workers.precision has parameters in bfloat16, .* trainer.mp, float32; set weights.dtype: bfloat16",
        ),
    ],
)
def test_run_must_provide_what_workers_need(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(mode=Mode.ASYNC, **changes)
    make_config(mode=Mode.SYNC, **changes)
    provided = {"ray_address": "head:6379", "weights": dataclasses.replace(FLIGHT, dtype=TransferDtype.BFLOAT16)}
    make_config(mode=Mode.ASYNC, **changes, **provided)
