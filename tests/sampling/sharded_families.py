# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_cached_model.py on 2 fake CPU devices in a separate process; prints one line of JSON."""

import dataclasses
import json

import equinox as eqx
import haliax as hax
import jax
import levanter.tracker
from levanter.models.lm_model import LmConfig
from levanter.tracker import NoopTracker

from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests.sampling.families import FAMILIES, random_model
from tests.sampling.test_group_sampler import CONFIG, CONTEXT, STOP_IDS, largest_error, make_requests

LENGTHS = [1, 9, 17, 24, 31, 39, 3, 12, 20]


def measure(config: LmConfig) -> tuple[int, float]:
    """Return the number of arrays with a part on each device, and the largest error of a log-prob."""
    axes = ["mlp", "heads", "kv_head"]
    trainer = TrainerConfig(require_accelerator=False, model_axis_size=2, tensor_parallel_axes=axes)
    with trainer.use_device_mesh(), levanter.tracker.current_tracker(NoopTracker()):
        model = hax.shard(random_model(config), trainer.parameter_axis_mapping)
        sampler = GroupSampler(model, config=CONFIG, stop_token_ids=STOP_IDS, max_context=CONTEXT, trainer=trainer)
        requests = make_requests(LENGTHS)
        generations = sampler.sample(requests)
        sharded = [leaf for leaf in jax.tree.leaves(model) if eqx.is_array(leaf) and not leaf.is_fully_replicated]
        with hax.axis_mapping(trainer.compute_axis_mapping):
            return len(sharded), largest_error(model, requests, generations)


if __name__ == "__main__":
    names = ("gpt2", "mixtral", "olmo2", "qwen3")
    print(json.dumps({name: measure(dataclasses.replace(FAMILIES[name], num_layers=1)) for name in names}))
