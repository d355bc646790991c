# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The model of trained weights: adapters on their base, and critics on the policy's trunk or on a separate one."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import RlExample, to_predictors, to_tokens
from marin_rl.learner.config import CriticConfig
from marin_rl.learner.logprobs import policy_activations
from marin_rl.models.lora import Adapter, with_adapter


class ActorCritic(eqx.Module):
    """A policy and its critic; trained, saved and restored as one model."""

    policy: Any
    """The policy; an `Adapter` in trained weights that have a base."""
    value_weight: NamedArray
    """`{embed}`, weight of the linear value head."""
    value_bias: NamedArray
    """`{}`, bias of the value head."""
    trunk: LmHeadModel | None
    """The critic's separate trunk; None if it shares the policy's."""

    def values(self, batch: RlExample, policy_trunk: NamedArray) -> NamedArray:
        """Estimate the return before each action token is chosen: `V_t = w · h_{t-1} + b`.

        `policy_trunk` is `{batch, position, embed}`, the activations `h` of the policy's trunk.

        Returns:
            `{batch, position}` float32, aligned with the tokens; 0 off the loss mask.
        """
        activations = policy_trunk if self.trunk is None else policy_activations(self.trunk, batch.for_other_model())
        # Activations off the mask may overflow, and 0 · inf is NaN in the gradient of the weight.
        activations = hax.where(to_predictors(batch.loss_mask), activations, 0).astype(jnp.float32)
        values = hax.dot(activations, self.value_weight.astype(jnp.float32), axis=self.policy.Embed) + self.value_bias
        return hax.where(batch.loss_mask, to_tokens(values.rearrange(batch.input_ids.axes)), 0.0)


def policy_of(model: Any) -> Any:
    """Return the policy of a model with or without a critic; an `Adapter` of trained weights that have a base."""
    return model.policy if isinstance(model, ActorCritic) else model


def assemble(trained: Any, base: LmHeadModel | None) -> Any:
    """Return the model of trained weights, with the critic if there is one; usable inside and outside `jit`.

    `base` is the model that an `Adapter` changes; its arrays become part of the result.
    """
    policy = policy_of(trained)
    if not isinstance(policy, Adapter):
        return trained
    assert base is not None, "an adapter needs its base"
    whole = with_adapter(base, policy)
    return dataclasses.replace(trained, policy=whole) if isinstance(trained, ActorCritic) else whole


def with_critic(config: CriticConfig, policy: LmHeadModel) -> ActorCritic:
    """Add a critic to a policy. Its values are 0 until it is trained. The policy's arrays become part of the result."""
    trunk = None
    if not config.shared_trunk:
        trunk = policy
        # Models with tied embeddings have no separate head; an unused head would need optimizer moments too.
        if any(field.name == "lm_head" for field in dataclasses.fields(policy)):
            trunk = eqx.tree_at(lambda model: model.lm_head, policy, None, is_leaf=lambda leaf: leaf is None)
        trunk = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, trunk)
    return ActorCritic(policy, hax.zeros(policy.Embed), hax.zeros(()), trunk)
