# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A critic beside the policy: one more output on its trunk, or a trunk of its own."""

import dataclasses
import math

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl.batching.alignment import to_predictors, to_tokens
from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.logprobs import policy_activations


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """A critic, which estimates the return of what is yet to be said. `advantage: {type: gae}` needs one."""

    shared_trunk: bool = True
    """True: one more output on the policy's trunk, which costs nothing, and whose loss moves the trunk too. False: a
    trunk of its own, which begins as a copy of the policy's: twice the memory and time, and no interference."""
    coefficient: float = 0.5
    """Weight of the value loss beside the policy term, above 0."""
    clip: float | None = 0.2
    """ε_v, above 0: how far a value may move from its old one before its loss stops falling; null for no bound."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            raise ValueError(f"critic.coefficient is {self.coefficient}; it must be finite and above 0")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"critic.clip is {self.clip}; it must be finite and above 0, or null for no bound")


class ActorCritic(eqx.Module):
    """A policy and what estimates its return; trained, saved and restored as one model."""

    policy: LmHeadModel
    """The policy."""
    value_weight: NamedArray
    """`{embed}`, from the trunk's activations to one number."""
    value_bias: NamedArray
    """`{}`, what is added to it."""
    trunk: LmHeadModel | None
    """The critic's own trunk; None where it shares the policy's."""

    def values(self, batch: RlExample, policy_trunk: NamedArray) -> NamedArray:
        """The estimated return before each action token is chosen: `V_t = w · h_{t-1} + b`.

        Args:
            batch: the tokens.
            policy_trunk: `{batch, position, embed}`, the policy's activations `h` on them.

        Returns:
            `{batch, position}` float32, aligned with the tokens; 0 off the loss mask.
        """
        activations = policy_trunk if self.trunk is None else policy_activations(self.trunk, batch)
        # What stands where nothing is asked may overflow, and 0 · inf is NaN in the gradient of the weight.
        activations = hax.where(to_predictors(batch.loss_mask), activations, 0).astype(jnp.float32)
        values = hax.dot(activations, self.value_weight.astype(jnp.float32), axis=self.policy.Embed) + self.value_bias
        return hax.where(batch.loss_mask, to_tokens(values.rearrange(batch.input_ids.axes)), 0.0)


def policy_of(model: LmHeadModel | ActorCritic) -> LmHeadModel:
    """The policy inside what is trained."""
    return model.policy if isinstance(model, ActorCritic) else model


def with_critic(config: CriticConfig, policy: LmHeadModel) -> ActorCritic:
    """A critic beside the policy; it says 0 until it is trained.

    Args:
        config: which one.
        policy: its arrays become part of the result.
    """
    trunk = None
    if not config.shared_trunk:
        trunk = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, _without_lm_head(policy))
    return ActorCritic(policy, hax.zeros(policy.Embed), hax.zeros(()), trunk)


def attach_critic(
    config: CriticConfig | None, policy: LmHeadModel, trainer: TrainerConfig
) -> LmHeadModel | ActorCritic:
    """What is trained: the policy alone or with a critic, in parameter precision, sharded like the policy.

    Args:
        config: which critic; None for none.
        policy: its arrays are taken over.
        trainer: mesh, axis mapping and parameter precision.
    """
    if config is None:
        return policy

    def attach(policy: LmHeadModel) -> ActorCritic:
        return trainer.mp.cast_to_param(with_critic(config, policy))

    with trainer.use_device_mesh():
        return hax.named_jit(attach, axis_resources=trainer.parameter_axis_mapping)(policy)


def _without_lm_head(policy: LmHeadModel) -> LmHeadModel:
    # Levanter's models mark tied embeddings by having no head of their own; an unused head would cost its moments too.
    names = {field.name for field in dataclasses.fields(policy)}
    if "lm_head" not in names:
        return policy
    return eqx.tree_at(lambda model: model.lm_head, policy, None, is_leaf=lambda leaf: leaf is None)
