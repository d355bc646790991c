# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The learner: one jitted, sharded update on levanter's `Trainer`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax.partitioning import ResourceMapping
from jax.sharding import Mesh
from levanter.metrics import Metric
from levanter.models.lm_model import LmHeadModel
from levanter.optim import OptimizerConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.types import ComputeLossFunction

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.capture import CapturingTracker, CapturingTrackerConfig
from marin_rl.learner.guard import GuardState, guard_updates

LossFunction = Callable[..., tuple[jax.Array, dict[str, Metric]]]


class NonFiniteUpdateError(RuntimeError):
    """A loss or gradient was NaN or infinite; the weights are those from before the step."""


class Learner:
    """Turns batches into new weights.

    A thin wrapper around levanter's `Trainer`: the trainer owns mesh, precision, microbatches and the
    jitted step with donated buffers; this class adds a guard against broken gradients and hands back
    what a step measured, instead of sending it to a tracker.

    Attributes:
        trainer: levanter's trainer.
    """

    def __init__(self, config: TrainerConfig, optimizer: OptimizerConfig, loss: LossFunction, *, num_steps: int):
        capturing = dataclasses.replace(
            config, tracker=CapturingTrackerConfig(), num_train_steps=num_steps, crash_on_nan=False, crash_on_inf=False
        )
        self._learning_rate = optimizer.lr_scheduler(num_steps)
        guarded = guard_updates(optimizer.build(num_steps))
        self.trainer = Trainer(capturing, guarded, cast(ComputeLossFunction, loss), add_default_hooks=False)

    def initial_state(self, model: LmHeadModel, key: jax.Array) -> TrainerState:
        """A fresh state around `model`, with zeroed optimizer moments.

        Args:
            model: its arrays are taken over; use the state's model from here on.
            key: random key of the training state.
        """
        with self.trainer:
            return eqx.filter_jit(self._init)(model, key)

    def state_shape(self, model: LmHeadModel) -> TrainerState:
        """Shapes and dtypes of the state around a model of these shapes."""
        with self.trainer:
            return eqx.filter_eval_shape(self._init, model, jax.random.PRNGKey(0))

    def _init(self, model: LmHeadModel, key: jax.Array) -> TrainerState:
        trainer = self.trainer
        state = TrainerState.init(trainer.optimizer, model, key=key, is_trainable=True, mp=trainer.mp)
        state = dataclasses.replace(state, step=jnp.zeros((), jnp.int32))
        return hax.shard(state, trainer.parameter_axis_mapping)

    def step(self, state: TrainerState, batch: RlExample) -> tuple[TrainerState, dict[str, float]]:
        """One update.

        Args:
            state: **donated**; use the returned one.
            batch: the global batch.

        Returns:
            The new state, and what the step measured: the loss function's metrics under their own names,
            `loss`, `grad_norm` (global L2, before clipping) and `lr`.

        Raises:
            NonFiniteUpdateError: if the loss or the gradient is not finite. The weights did not move.
        """
        with self.trainer:
            info = self.trainer.train_step(state, batch)
        guard = cast(GuardState, info.state.opt_state)
        measured = _own_names(self.tracker.pop())
        measured["loss/total"] = float(info.loss)
        measured["grad_norm"] = float(guard.grad_norm)
        measured["lr"] = float(jnp.asarray(self._learning_rate(int(info.state.step) - 1)))
        if not bool(guard.finite):
            raise NonFiniteUpdateError(
                f"update {int(info.state.step)}: loss {measured['loss/total']}, gradient norm {measured['grad_norm']}; "
                "the weights were left as they were. Lower the learning rate, or look at the last rollouts"
            )
        return info.state, measured

    @property
    def tracker(self) -> CapturingTracker:
        """Where the trainer's own log calls end up."""
        tracker = self.trainer.tracker
        assert isinstance(tracker, CapturingTracker)
        return tracker

    @property
    def mesh(self) -> Mesh:
        """Mesh(replica, data, model)."""
        return self.trainer.device_mesh

    @property
    def parameter_mapping(self) -> ResourceMapping:
        """Where parameters and optimizer moments are sharded."""
        return self.trainer.parameter_axis_mapping


def _own_names(logged: Mapping[str, float]) -> dict[str, float]:
    prefix = "train/"
    return {name.removeprefix(prefix): value for name, value in logged.items() if name.startswith(prefix)}
