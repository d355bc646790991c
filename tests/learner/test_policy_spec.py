# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path
from types import ModuleType

import jax
import pytest
from haliax import Axis  # noqa: F401  before marin_rl: see tests/tiny_run.py

from marin_rl.learner.config import CriticConfig
from marin_rl.learner.critic import policy_of
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints


@pytest.mark.parametrize(
    "critic", [None, CriticConfig(), CriticConfig(shared_trunk=False)], ids=["none", "shared", "separate"]
)
def test_the_parts_of_a_checkpoint_are_restored_bit_for_bit(
    tiny: ModuleType, tmp_path: Path, critic: CriticConfig | None
) -> None:
    """The critic has the precision of the parameters, too."""
    trainer = tiny.make_trainer(policy="p=bf16,c=bf16")
    spec, learner = PolicySpec(tiny.LLAMA, tiny.VOCAB, trainer, critic), tiny.make_learner(trainer)
    state = learner.initial_state(spec.attach_critic(tiny.make_model(trainer)), jax.random.PRNGKey(0))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(state, 3, {}, {})
    checkpoints.close()
    checkpoint = checkpoints.open(3)
    policy = spec.restore_policy(checkpoint)
    tiny.assert_same_bits(policy, policy_of(state.model))
    tiny.assert_same_bits(spec.restore_trained(checkpoint), state.model)
    tiny.assert_same_bits(spec.restore_state(checkpoint, learner), state)
    assert spec.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(policy))
