# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Shapes, dtypes and shardings of the weights that are trained, sampled, sent, saved and exported."""

import dataclasses
import functools
import math
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.trainer_state import TrainerState

from marin_rl.learner.config import CriticConfig
from marin_rl.learner.critic import ActorCritic, with_critic
from marin_rl.learner.train_step import Learner, placed_shape
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.utils.devices.sharding import check_sharding
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """The policy of a run, and the model that is trained: the policy, with the critic if there is one.

    Shapes and dtypes follow from all fields without a device. The mesh of `trainer` is used only for shardings.
    """

    model: LmConfig
    """Architecture. Its attention kernel changes no shape."""
    vocab_size: int
    """Number of tokens of the model, which may be larger than the tokenizer's."""
    trainer: AbstractTrainerConfig
    """Parameter precision, mesh and axis mapping."""
    critic: CriticConfig | None = None
    """Critic that is trained with the policy; None if there is none."""

    @functools.cached_property
    def policy(self) -> LmHeadModel:
        """Shapes and dtypes of the policy's parameters."""

        def build() -> LmHeadModel:
            model = self.model.build(Axis("vocab", self.vocab_size), key=jax.random.PRNGKey(0))
            return self.trainer.mp.cast_to_param(only_arrays(model))

        return eqx.filter_eval_shape(build)

    @functools.cached_property
    def trained(self) -> LmHeadModel | ActorCritic:
        """Shapes and dtypes of all trained parameters."""
        return self.policy if self.critic is None else eqx.filter_eval_shape(self._attach, self.policy)

    @property
    def _attach(self) -> Callable[[LmHeadModel], ActorCritic]:
        trainer, critic = self.trainer, self.critic
        assert critic is not None
        # Not a method, which jax would hash together with the configs.
        return lambda policy: trainer.mp.cast_to_param(with_critic(critic, policy))

    def attach_critic(self, policy: LmHeadModel) -> LmHeadModel | ActorCritic:
        """Return the model to train: the policy alone or with a new critic, sharded like the policy.

        Args:
            policy: its arrays become part of the result.
        """
        if self.critic is None:
            return policy
        with self.trainer.use_device_mesh():
            return hax.named_jit(self._attach, axis_resources=self.trainer.parameter_axis_mapping)(policy)

    @property
    def placed_policy(self) -> LmHeadModel:
        """The policy with the shardings of parameters, as a receiver of weights allocates it.

        Raises:
            ShardingError: if the mesh does not divide an axis of the model.
        """
        self.check_mesh()
        return placed_shape(self.policy, self.trainer.device_mesh, self.trainer.parameter_axis_mapping)

    @property
    def placed_trained(self) -> LmHeadModel | ActorCritic:
        """All trained parameters with their shardings; raises like `placed_policy`."""
        self.check_mesh()
        return placed_shape(self.trained, self.trainer.device_mesh, self.trainer.parameter_axis_mapping)

    @property
    def policy_path(self) -> str:
        """Path of the policy in the state of a checkpoint."""
        return "model" if self.critic is None else "model/policy"

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the policy."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.policy))

    def check_mesh(self) -> None:
        """Check that the mesh divides the axes of the parameters.

        Raises:
            ShardingError: if it does not divide one.
        """
        check_sharding(self.policy, self.trainer.device_mesh.shape, [self.trainer.parameter_axis_mapping])

    def restore_policy(self, checkpoint: Checkpoint) -> LmHeadModel:
        """Load the policy of a checkpoint, without critic and optimizer state.

        Raises:
            CheckpointError: if the checkpoint holds another model.
            ShardingError: if the mesh does not divide an axis of the model.
        """
        self.check_mesh()
        return checkpoint.restore(self.policy, self.trainer, self.policy_path)

    def restore_trained(self, checkpoint: Checkpoint) -> LmHeadModel | ActorCritic:
        """Load the policy, with the critic if there is one; raises like `restore_policy`."""
        self.check_mesh()
        return checkpoint.restore(self.trained, self.trainer, "model")

    def restore_state(self, checkpoint: Checkpoint, learner: Learner) -> TrainerState:
        """Load weights, optimizer state and random key, placed as after an update; raises like `restore_policy`.

        Args:
            checkpoint: checkpoint of the run.
            learner: learner of the run, which defines the structure of the optimizer's state.
        """
        self.check_mesh()
        return learner.place(checkpoint.restore(learner.state_shape(self.trained), self.trainer))


def only_arrays(model: LmHeadModel) -> LmHeadModel:
    """Drop the flags of dropout that GPT-2 has among its weights, which no checkpoint has; nothing uses dropout."""
    return eqx.filter(model, eqx.is_array)
