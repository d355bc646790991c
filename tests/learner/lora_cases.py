# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The first updates of an adapter; test_lora_update.py also runs it on 8 fake CPU devices: `lora_cases.py FOLDER`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from marin_rl.learner.base_weights import fingerprint
from marin_rl.learner.config import LoraConfig
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.objectives.policy_loss import ReinforceLossConfig
from tests import tiny_learner as tiny

STEPS = 5
LORA = LoraConfig(rank=4, alpha=8.0, targets=(*LoraConfig().targets, "lm_head"))
PRECISIONS = ("p=f32,c=f32", "p=f32,c=bf16")


def adapter_learner(trainer: Any, **settings: Any) -> tuple[Learner, PolicySpec]:
    """Return a learner of an adapter on tiny_learner's model, and its spec."""
    spec = PolicySpec(tiny.LLAMA, tiny.VOCAB, trainer, lora=LORA)
    base = trainer.mp.cast_to_compute(tiny.make_model(trainer))
    loss = RlLoss(ReinforceLossConfig().per_token, block_size=16)
    settings = {"loss": loss, "optimizer": tiny.adam(1e-3), **settings}
    return Learner(trainer, num_updates=10, capacity=4, frozen=Frozen(base), **settings), spec


def first_updates(precision: str, model_axis: int = 1) -> dict[str, np.ndarray]:
    """Train an adapter on one batch; return loss and A and B after each update."""
    trainer = tiny.make_trainer(tiny.MESH_ROWS, policy=precision, model_axis=model_axis)
    learner, spec = adapter_learner(trainer)
    example = tiny.make_example(tiny.MESH_ROWS)
    example = dataclasses.replace(example, advantages=example.loss_mask.astype(np.float32))
    state = learner.initial_state(spec.new_adapter(jax.random.PRNGKey(0)), jax.random.PRNGKey(1))
    found = {"base": np.asarray(fingerprint(tiny.make_model(trainer), trainer))}
    found |= {f"0{name}": array for name, array in tiny.arrays_by_path(state.model).items()}
    for step in range(1, STEPS + 1):
        state, metrics = learner.update(state, [example])
        found[f"{step} loss"] = np.asarray(float(metrics["loss/total"]))
        found |= {f"{step}{name}": array for name, array in tiny.arrays_by_path(state.model).items()}
    return found


def main(folder: Path) -> None:
    assert jax.device_count() == 8
    for precision in PRECISIONS:
        np.savez(folder / f"{precision}.npz", **first_updates(precision))
    np.savez(folder / "4 data x 2 model shards.npz", **first_updates(PRECISIONS[0], model_axis=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
