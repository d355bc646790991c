# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_group_sampler.py on 8 fake CPU devices in a separate process; prints one line of JSON."""

import dataclasses
import json
import sys
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np

from experiments.lab.benchmarks.measurement import counted_compiles
from marin_rl.sampling.attention import DenseAttention
from marin_rl.sampling.cached_model import with_cache
from marin_rl.sampling.decoding import conversion_program
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sizes import copy_to_each_process
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests.sampling.test_group_sampler import CONFIG, CONTEXT, LLAMA, STOP_IDS, build, largest_error, make_requests


def measure(model_axis_size: int) -> dict[str, Any]:
    """Sample three times from a model with the learner's sharding, and compare with its full forward pass."""
    axes = ["mlp", "kv_head"]
    trainer = TrainerConfig(require_accelerator=False, model_axis_size=model_axis_size, tensor_parallel_axes=axes)
    config = dataclasses.replace(LLAMA, num_layers=1)
    requests = make_requests([1, 3, 8, 9, 12, 17, 20, 23], max_new_tokens=6)
    with trainer.use_device_mesh():
        model = hax.shard(build(config), trainer.parameter_axis_mapping)
        with hax.axis_mapping(trainer.compute_axis_mapping):
            sampler = GroupSampler(model, config=CONFIG, stop_token_ids=STOP_IDS, max_context=CONTEXT, trainer=trainer)
            first = sampler.sample(requests)
            with counted_compiles() as compiles:
                again = sampler.sample(requests)
                sampler.update_weights(model, 1)
                third = sampler.sample(requests)
            error = largest_error(model, requests, first)
        weight = model.transformer.layers.stacked.mlp.up_proj.weight.array
        # The conversion for several hosts, the copies on each of them, and the layout of one host.
        arrays, form = eqx.filter(model, eqx.is_array), DenseAttention()
        converted = conversion_program(trainer, form, CONTEXT)(arrays)
        copied = copy_to_each_process(converted, trainer.device_mesh, trainer.compute_axis_mapping)
        expected = jax.jit(lambda model: with_cache(model, form, CONTEXT))(arrays)
    return {
        "converted_bytes": _first_bytes(converted) / _first_bytes(copied),
        "copies_equal": all(map(np.array_equal, jax.tree.leaves(copied), jax.tree.leaves(expected))),
        "devices": jax.device_count(),
        "parameter_devices": len(weight.sharding.device_set),
        "sharded": not weight.sharding.is_fully_replicated,
        "recompiled": compiles.programs,
        "repeats": first == again == [dataclasses.replace(g, first_version=0, last_version=0) for g in third],
        "error": error,
    }


def _first_bytes(tree: Any) -> int:
    """Return the bytes of a tree on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
