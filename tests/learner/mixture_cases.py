# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Updates of tiny mixtures of experts, for test_mixture.py.

It also runs this on 8 fake CPU devices in a separate process: `python -m tests.learner.mixture_cases FOLDER`.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
from haliax import Axis
from levanter.models.lm_model import LmConfig

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.train_step import Learner
from marin_rl.models.mixture import MixtureShape, mixture_shape
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests import tiny_learner as tiny
from tests.sampling.families import FAMILIES
from tests.sampling.test_group_sampler import STOP_IDS, make_requests

MIXTURES = [name for name in ("mixtral", "qwen3_moe") if name in FAMILIES]
SPLIT_EXPERTS = ["experts"], 4
"""Axes that are split over the model axis of the mesh of updates, and its size."""
SPLIT_HEADS_TOO = ["experts", "heads", "kv_head"], 2
"""The same for sampling."""


def config_of(name: str) -> LmConfig:
    """Return a tiny mixture whose losses have large coefficients."""
    coefficients = {"mixtral": {"lbl_coef": 0.3, "rzl_coef": 0.2}, "qwen3_moe": {}}
    if name == "qwen3_moe":
        coefficients[name] = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.2}
    return dataclasses.replace(FAMILIES[name], gradient_checkpointing=False, **coefficients[name])


def shape_of(name: str) -> MixtureShape:
    """Return the sizes of a mixture."""
    shape = mixture_shape(config_of(name))
    assert shape is not None
    return shape


def with_router(example: RlExample, name: str, experts: np.ndarray | None = None) -> RlExample:
    """Add equal weights of all tokens, and given experts `[batch, position, layer, top]`; None for no choice."""
    shape, (Batch, Pos) = shape_of(name), example.input_ids.axes
    if experts is None:
        experts = np.full((Batch.size, Pos.size, shape.layers, shape.per_token), 255, np.uint8)
    axes = Batch, Pos, Axis("layer", shape.layers), Axis("top_experts", shape.per_token)
    is_token = example.segment_ids.array != 0
    weights = (is_token / is_token.sum()).astype(np.float32)
    return dataclasses.replace(
        example, router_weights=hax.named(weights, (Batch, Pos)), experts=hax.named(experts, axes)
    )


def random_experts(name: str, rows: int = tiny.ROWS, seed: int = 0) -> np.ndarray:
    """Return valid experts of every token."""
    shape, rng = shape_of(name), np.random.default_rng(seed)
    scores = rng.uniform(size=(rows, tiny.POSITIONS, shape.layers, shape.experts))
    return np.argsort(scores, axis=-1)[..., : shape.per_token].astype(np.uint8)


def update(name: str, trainer: TrainerConfig, example: RlExample) -> dict[str, Any]:
    """Return the loss, the metrics and the gradient of an update by SGD, as arrays by name."""
    learner = Learner(
        trainer, tiny.SgdConfig(), RlLoss(PpoClipLossConfig(0.1, 0.2).per_token, block_size=16), num_updates=1
    )
    model = tiny.make_model(trainer, config_of(name))
    before = jax.device_get(jax.tree.leaves(model))
    state, metrics = learner.update(learner.initial_state(model, jax.random.PRNGKey(0)), [example])
    after = jax.device_get(jax.tree.leaves(state.model))
    arrays = {f"gradient {index}": old - new for index, (old, new) in enumerate(zip(before, after, strict=True))}
    return arrays | {key: np.asarray(metric.value()) for key, metric in metrics.items()}


def sampled(name: str, trainer: TrainerConfig | None) -> dict[str, Any]:
    """Return the tokens, log-probs and experts of some generations."""
    with (trainer or tiny.make_trainer()).use_device_mesh():
        model = tiny.make_model(trainer or tiny.make_trainer(), config_of(name))
        config = SamplingConfig(max_new_tokens=8, max_seqs=8)
        sampler = GroupSampler(
            model, config=config, stop_token_ids=STOP_IDS, max_context=40, trainer=trainer, experts=True
        )
        generations = sampler.sample(make_requests([3, 9, 17, 30, 2, 5, 8, 21], max_new_tokens=8))
    return {
        "tokens": np.array([token for one in generations for token in one.token_ids]),
        "logprobs": np.array([value for one in generations for value in one.logprobs]),
        "experts": np.concatenate([one.experts for one in generations if one.experts is not None]),
    }


def split(axes: list[str], size: int) -> TrainerConfig:
    """Return the section of a mesh that splits these axes of the model."""
    section = TrainerConfig(
        id="test", model_axis_size=size, tensor_parallel_axes=axes, tracker=(), require_accelerator=False
    )
    return start_devices(section, rows_per_device=tiny.ROWS * size // jax.device_count())


def main(folder: Path) -> None:
    """Write the results of every mixture to `FOLDER/NAME.npz`."""
    for name in MIXTURES:
        example = with_router(tiny.make_example(), name, random_experts(name))
        updated, generated = update(name, split(*SPLIT_EXPERTS), example), sampled(name, split(*SPLIT_HEADS_TOO))
        np.savez(folder / f"{name}.npz", devices=jax.device_count(), **updated, **generated)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
