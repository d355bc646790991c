# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Shapes, dtypes and shardings of the weights that are trained, sampled, sent, saved and exported."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.trainer_state import TrainerState

from marin_rl.learner.config import CriticConfig, LoraConfig
from marin_rl.learner.critic import ActorCritic, with_critic
from marin_rl.learner.placement import placed_shape
from marin_rl.learner.train_step import Learner
from marin_rl.models.lora import Adapter, init_adapter
from marin_rl.models.peft_format import check_peft_adapter
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.utils.devices.sharding import check_sharding
from marin_rl.utils.devices.trainer_config import TrainerConfig

T = TypeVar("T")
TrainedPolicy = LmHeadModel | Adapter
"""The trained part of a policy: all of it, or its adapter."""


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """The policy of a run, and its trained part: the policy or its adapter, with the critic if there is one.

    The optimizer updates the trained part, checkpoints hold it, and workers receive it. With its base, an adapter makes
    the whole policy, which is scored, sampled and exported (`assemble`). Shapes and dtypes follow from all fields
    without a device. The mesh of `trainer` is used only for shardings.
    """

    model: LmConfig
    """Architecture. Its attention kernel changes no shape."""
    vocab_size: int
    """Number of tokens of the model, which may be larger than the tokenizer's."""
    trainer: TrainerConfig
    """Parameter precision, mesh and axis mapping."""
    critic: CriticConfig | None = None
    """Critic that is trained with the policy; None if there is none."""
    lora: LoraConfig | None = None
    """Adapter that is trained instead of the policy's weights; None trains the weights."""

    @functools.cached_property
    def policy(self) -> LmHeadModel:
        """Shapes and dtypes of the policy's parameters."""

        def build() -> LmHeadModel:
            model = self.model.build(Axis("vocab", self.vocab_size), key=jax.random.PRNGKey(0))
            return self.trainer.mp.cast_to_param(only_arrays(model))

        return eqx.filter_eval_shape(build)

    @functools.cached_property
    def base(self) -> LmHeadModel | None:
        """The same in compute precision, as the base of an adapter; None without an adapter."""
        return None if self.lora is None else eqx.filter_eval_shape(self.trainer.mp.cast_to_compute, self.policy)

    @functools.cached_property
    def trained_policy(self) -> TrainedPolicy:
        """Shapes and dtypes of the trained part of the policy: its adapter, or all of it.

        Raises:
            LoraTargetError: if a module that `lora.targets` names cannot be adapted.
        """
        if self.lora is None:
            return self.policy
        return eqx.filter_eval_shape(self._init_adapter, jax.eval_shape(lambda: jax.random.PRNGKey(0)))

    @functools.cached_property
    def trained(self) -> TrainedPolicy | ActorCritic:
        """Shapes and dtypes of all trained parameters; raises like `trained_policy`."""
        return self.trained_policy if self.critic is None else eqx.filter_eval_shape(self._attach, self.trained_policy)

    @property
    def _init_adapter(self) -> Callable[[jax.Array], Adapter]:
        trainer, lora, policy = self.trainer, self.lora, self.policy
        assert lora is not None
        return lambda key: trainer.mp.cast_to_param(
            init_adapter(policy, rank=lora.rank, scale=lora.scale, targets=lora.targets, key=key)
        )

    @property
    def _attach(self) -> Callable[[TrainedPolicy], ActorCritic]:
        trainer, critic, whole = self.trainer, self.critic, self.policy
        assert critic is not None

        # Not a method, which jax would hash together with the configs.
        def attach(policy: TrainedPolicy) -> ActorCritic:
            if isinstance(policy, Adapter):
                # The critic shares the trunk, so that it takes only an axis from the model.
                return trainer.mp.cast_to_param(dataclasses.replace(with_critic(critic, whole), policy=policy))
            return trainer.mp.cast_to_param(with_critic(critic, policy))

        return attach

    def new_adapter(self, key: jax.Array) -> Adapter:
        """Return an adapter that changes nothing yet, sharded like parameters; raises like `trained_policy`."""
        with self.trainer.use_device_mesh():
            return hax.named_jit(self._init_adapter, axis_resources=self.trainer.parameter_axis_mapping)(key)

    def check_adapter(self) -> None:
        """Check the files of `lora.adapter`, if it is set, without a device.

        Raises:
            AdapterFormatError: if it cannot be loaded, or does not fit the model or `lora`.
        """
        if self.lora is not None and self.lora.adapter is not None:
            check_peft_adapter(self.lora.adapter, self.policy, cast(Adapter, self.trained_policy))

    def attach_critic(self, policy: TrainedPolicy) -> TrainedPolicy | ActorCritic:
        """Return the parameters to train: the policy's alone or with a new critic, sharded like the policy.

        The policy's arrays become part of the result.
        """
        if self.critic is None:
            return policy
        with self.trainer.use_device_mesh():
            return hax.named_jit(self._attach, axis_resources=self.trainer.parameter_axis_mapping)(policy)

    def place(self, tree: T) -> T:
        """Return parameters of this policy with their shardings.

        `tree` has shapes of parameters, such as `trained_policy`, as a receiver of weights allocates it.

        Raises:
            ShardingError: if the mesh does not divide an axis of the model.
        """
        self.check_mesh()
        return placed_shape(tree, self.trainer.device_mesh, self.trainer.parameter_axis_mapping)

    @property
    def policy_path(self) -> str:
        """Path of the policy in the state of a checkpoint."""
        return "model" if self.critic is None else "model/policy"

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the policy, without those of an adapter."""
        return _size(self.policy)

    @property
    def num_trained(self) -> int:
        """Number of trained parameters, without those of a critic."""
        return _size(self.trained_policy)

    def check_mesh(self) -> None:
        """Check that the mesh divides the axes of the parameters.

        Raises:
            ShardingError: if it does not divide one.
        """
        check_sharding(self.policy, self.trainer.device_mesh.shape, [self.trainer.parameter_axis_mapping])

    def restore_policy(self, checkpoint: Checkpoint) -> TrainedPolicy:
        """Load the trained part of the policy of a checkpoint, without critic and optimizer state.

        Raises:
            CheckpointError: if the checkpoint holds another model.
            ShardingError: if the mesh does not divide an axis of the model.
        """
        self.check_mesh()
        return checkpoint.restore(self.trained_policy, self.trainer, self.policy_path)

    def restore_trained(self, checkpoint: Checkpoint) -> TrainedPolicy | ActorCritic:
        """Load the trained part of the policy, with the critic if there is one; raises like `restore_policy`."""
        self.check_mesh()
        return checkpoint.restore(self.trained, self.trainer, "model")

    def restore_state(self, checkpoint: Checkpoint, learner: Learner) -> TrainerState:
        """Load weights, optimizer state and random key, placed as after an update; raises like `restore_policy`.

        The learner defines the structure of the optimizer's state.
        """
        self.check_mesh()
        return learner.place(checkpoint.restore(learner.state_shape(self.trained), self.trainer))


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def only_arrays(model: LmHeadModel) -> LmHeadModel:
    """Drop the flags of dropout that GPT-2 has among its weights, which no checkpoint has; nothing uses dropout."""
    return eqx.filter(model, eqx.is_array)


def with_config(policy: LmHeadModel, model: LmConfig) -> LmHeadModel:
    """Return the same arrays as a model with other settings, such as the attention kernel of longer rows."""
    vocab = Axis("vocab", policy.vocab_size)
    shape = eqx.filter_eval_shape(lambda: only_arrays(model.build(vocab, key=jax.random.PRNGKey(0))))
    return jax.tree.unflatten(jax.tree.structure(shape), jax.tree.leaves(policy))
