# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import jax
import pytest

from marin_rl.utils.devices.trainer_config import DistributedConfig, TrainerConfig


def test_axes_by_precedence():
    config = TrainerConfig(
        fsdp_axis=["embed", "mlp"],
        tensor_parallel_axes=["mlp", "heads"],
        axis_resources={"heads": "data", "vocab": ["data", "model"], "batch": "model"},
        parameter_axis_resources={"embed": "model", "head_size": "data"},
    )
    activations = {"heads": "model", "mlp": "model", "vocab": ("data", "model"), "batch": ("replica", "data")}
    assert config.compute_axis_mapping == activations
    assert config.parameter_axis_mapping == activations | {"embed": "data", "mlp": "data", "head_size": "data"}


def test_parameters_are_split_over_the_data_axis_by_default():
    rows = {"batch": ("replica", "data")}
    assert TrainerConfig().parameter_axis_mapping == {**rows, "embed": "data"}
    assert TrainerConfig(fsdp_axis=None).parameter_axis_mapping == rows


def test_parameters_are_split_over_a_model_axis_that_splits_positions():
    config = TrainerConfig(tensor_parallel_axes=["position"], parameter_axis_resources={"embed": "data"})
    activations = {"position": "model", "batch": ("replica", "data")}
    assert config.compute_axis_mapping == activations
    assert config.parameter_axis_mapping == {**activations, "embed": ("data", "model")}


def test_rows_of_a_microbatch():
    rows = TrainerConfig(per_device_parallelism=3)
    assert rows.rows_per_microbatch == 3 * jax.device_count()
    with pytest.raises(ValueError, match="per_device_parallelism is not set"):
        dataclasses.replace(rows, per_device_parallelism=-1).rows_per_microbatch  # noqa: B018


def test_one_process_does_not_initialize_jax_distributed():
    DistributedConfig().initialize()
    assert not jax.distributed.is_initialized()
