# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The learner: sharded gradients, summed over microbatches, and one update from their sum."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.tree_util import hashable_combine, hashable_partition
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.metrics import Metric, ReductionType, fold
from levanter.optim import OptimizerConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.types import ComputeLossFunction

from marin_rl import processes
from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.skip_nonfinite_updates import SkipState, skip_nonfinite_updates

LossFunction = Callable[..., tuple[jax.Array, dict[str, Metric]]]
T = TypeVar("T")

START = {ReductionType.MAX: -jnp.inf, ReductionType.MIN: jnp.inf}
"""What a metric is before anything was observed; 0 for sums and means."""


class NonFiniteUpdateError(RuntimeError):
    """A loss or gradient was NaN or infinite; the weights are those from before the step."""


class MicrobatchSums(NamedTuple):
    """What the microbatches of one update add up to."""

    gradient: Any
    """Of the whole batch's loss, shaped and sharded like the trainable part of the model."""
    loss: jax.Array
    """Of the whole batch."""
    metrics: dict[str, Metric]
    """Folded by their own reductions."""


class _Structures(NamedTuple):
    """How the arrays of a microbatch go together again; hashable, so that a program is found by it."""

    model: jax.tree_util.PyTreeDef
    constants: Hashable
    batch: jax.tree_util.PyTreeDef
    sums: jax.tree_util.PyTreeDef


def _take_apart(
    model: eqx.Module, batch: RlExample, sums: MicrobatchSums
) -> tuple[_Structures, list[jax.Array], list[jax.Array], list[jax.Array]]:
    arrays, constants = hashable_partition(model, eqx.is_array)
    (of_model, like_model), (of_batch, like_batch), (of_sums, like_sums) = map(jax.tree.flatten, (arrays, batch, sums))
    return _Structures(like_model, constants, like_batch, like_sums), of_model, of_batch, of_sums


class Learner:
    """Turns batches into new weights.

    Levanter's `Trainer` gives mesh, precision and sharding. A batch comes as microbatches of one shape: the same
    program adds each microbatch's gradient to a sum, and another updates the weights from it. The loss is a plain
    sum over tokens, so neither the number of microbatches nor what lies in which of them changes the gradient, and a
    batch may need any number of microbatches without anything being compiled again.

    Attributes:
        trainer: levanter's trainer.
    """

    def __init__(self, config: TrainerConfig, optimizer: OptimizerConfig, loss: LossFunction, *, num_updates: int):
        quiet = dataclasses.replace(
            config, tracker=(), num_train_steps=num_updates, crash_on_nan=False, crash_on_inf=False
        )
        self._learning_rate = optimizer.lr_scheduler(num_updates)
        wrapped = skip_nonfinite_updates(optimizer.build(num_updates))
        self.trainer = Trainer(quiet, wrapped, cast(ComputeLossFunction, loss), add_default_hooks=False)
        mapping = self.trainer.parameter_axis_mapping
        self._zeros = hax.named_jit(self._make_zeros, axis_resources=mapping)
        self._add = jax.jit(self._add_leaves, static_argnums=0, donate_argnums=3)
        self._update = hax.named_jit(self._take_step, axis_resources=mapping, donate_args=(True, False))

    def initial_state(self, model: eqx.Module, key: jax.Array) -> TrainerState:
        """A fresh state around `model`, with zeroed optimizer moments.

        Args:
            model: its arrays are taken over; use the state's model from here on.
            key: random key of the training state.
        """
        with self.trainer:
            return self.place(eqx.filter_jit(self._init)(model, key))

    def state_shape(self, model: eqx.Module) -> TrainerState:
        """Shapes and dtypes of the state around a model of these shapes."""
        with self.trainer:
            return eqx.filter_eval_shape(self._init, model, jax.random.PRNGKey(0))

    def place(self, state: TrainerState) -> TrainerState:
        """Put every array of a state where an update would leave it.

        A state that was just made and one that was read from a checkpoint then run the same compiled program, which
        is what makes a resumed run equal to one that was never stopped, bit for bit.
        """
        return place(state, self.mesh, self.parameter_mapping)

    def _init(self, model: eqx.Module, key: jax.Array) -> TrainerState:
        trainer = self.trainer
        state = TrainerState.init(trainer.optimizer, model, key=key, is_trainable=True, mp=trainer.mp)
        state = dataclasses.replace(state, step=jnp.zeros((), jnp.int32))
        return hax.shard(state, trainer.parameter_axis_mapping)

    def step(self, state: TrainerState, microbatches: Sequence[RlExample]) -> tuple[TrainerState, dict[str, Metric]]:
        """One update.

        Args:
            state: **donated**; use the returned one.
            microbatches: the whole batch, in parts of one shape; at least one.

        Returns:
            The new state, and what the update measured: the loss function's metrics under their own names,
            `loss/total`, `grad_norm` (global L2, before clipping) and `lr`.

        Raises:
            NonFiniteUpdateError: if the loss or the gradient is not finite. The weights did not move.
        """
        with self.trainer:
            batches = [place(batch, self.mesh, self.trainer.compute_axis_mapping) for batch in microbatches]
            sums = self._sum_microbatches(state.model, batches)
            state, loss, metrics = self._update(state, sums)
        guard = cast(SkipState, state.opt_state)
        update = int(state.step)
        rate = jnp.asarray(self._learning_rate(update - 1))
        measured = {
            **metrics,
            "loss/total": Metric.from_value(loss, ReductionType.MEAN),
            "grad_norm": Metric.from_value(guard.grad_norm, ReductionType.MEAN),
            "lr": Metric.from_value(rate, ReductionType.LAST),
        }
        if not bool(guard.finite):
            raise NonFiniteUpdateError(
                f"update {update}: loss {float(loss)}, gradient norm {float(guard.grad_norm)}; "
                "the weights were left as they were. Lower the learning rate, or look at the last rollouts"
            )
        return state, measured

    def lower_microbatch(self, model: eqx.Module, batch: RlExample) -> jax.stages.Lowered:
        """The program that every microbatch runs, lowered and not compiled: what to ask for its memory and its cost."""
        with self.trainer:
            placed = place(batch, self.mesh, self.trainer.compute_axis_mapping)
            return self._add.lower(*_take_apart(model, placed, self._zeros(model, placed)))

    def _sum_microbatches(self, model: eqx.Module, batches: Sequence[RlExample]) -> MicrobatchSums:
        # Trees are taken apart once for all microbatches: that costs more than starting a program does.
        structures, leaves, _, sums = _take_apart(model, batches[0], self._zeros(model, batches[0]))
        for batch in batches:
            sums = self._add(structures, leaves, jax.tree.leaves(batch), sums)
        return jax.tree.unflatten(structures.sums, sums)

    def _add_leaves(
        self, structures: "_Structures", model: list[jax.Array], batch: list[jax.Array], sums: list[jax.Array]
    ) -> list[jax.Array]:
        with hax.axis_mapping(self.trainer.parameter_axis_mapping):
            added = self._add_microbatch(
                hashable_combine(jax.tree.unflatten(structures.model, model), structures.constants),
                jax.tree.unflatten(structures.batch, batch),
                jax.tree.unflatten(structures.sums, sums),
            )
        return jax.tree.leaves(added)

    def _make_zeros(self, model: eqx.Module, batch: RlExample) -> MicrobatchSums:
        def shapes(model: eqx.Module, batch: RlExample) -> MicrobatchSums:
            return self._pass(model, batch)

        like = eqx.filter_eval_shape(shapes, model, batch)
        metrics = {
            name: Metric(
                jnp.full((), START.get(metric.reduction, 0), jnp.float32), jnp.zeros(()), reduction=metric.reduction
            )
            for name, metric in like.metrics.items()
        }
        gradient = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like.gradient)
        return MicrobatchSums(gradient, jnp.zeros(()), metrics)

    def _pass(self, model: eqx.Module, batch: RlExample) -> MicrobatchSums:
        with hax.axis_mapping(self.trainer.compute_axis_mapping):
            differentiate = eqx.filter_value_and_grad(self.trainer.loss_fn, has_aux=True)
            (loss, metrics), gradient = differentiate(model, batch, key=None)
        return MicrobatchSums(hax.shard(gradient, self.trainer.parameter_axis_mapping), jnp.asarray(loss), metrics)

    def _add_microbatch(self, model: eqx.Module, batch: RlExample, sums: MicrobatchSums) -> MicrobatchSums:
        here = self._pass(model, batch)
        return MicrobatchSums(
            jax.tree.map(jnp.add, sums.gradient, here.gradient),
            sums.loss + here.loss,
            fold_metrics([sums.metrics, here.metrics]),
        )

    def _take_step(
        self, state: TrainerState, sums: MicrobatchSums
    ) -> tuple[TrainerState, jax.Array, dict[str, Metric]]:
        # The forward pass is deterministic, so the key stays as it is.
        new_state, _ = state.take_step(sums.gradient, loss=cast(float, sums.loss), key=state.training_key)
        return new_state, sums.loss, sums.metrics

    @property
    def mesh(self) -> Mesh:
        """Mesh(replica, data, model)."""
        return self.trainer.device_mesh

    @property
    def parameter_mapping(self) -> ResourceMapping:
        """Where parameters and optimizer moments are sharded."""
        return self.trainer.parameter_axis_mapping


def place(tree: T, mesh: Mesh, mapping: ResourceMapping) -> T:
    """Put every array of a tree on the mesh: named ones as `mapping` says, all others whole on every device."""

    def put(leaf: Any) -> Any:
        if isinstance(leaf, NamedArray):
            sharding = NamedSharding(mesh, pspec_for_axis(leaf.axes, mapping))
            return NamedArray(processes.put(leaf.array, sharding), leaf.axes)
        if not eqx.is_array(leaf):
            return leaf
        # Spelled as a jitted step spells it: P() and P(None) mean the same to an array, but are different keys.
        return processes.put(leaf, NamedSharding(mesh, PartitionSpec(*[None] * leaf.ndim)))

    return jax.tree.map(put, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def fold_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge what several microbatches or updates measured, each metric by its own reduction.

    Args:
        parts: at least one; all with the same names.
    """
    folded = dict(parts[0])
    for part in parts[1:]:
        folded = {name: _fold(metric, part[name]) for name, metric in folded.items()}
    return folded


def _fold(left: Metric, right: Metric) -> Metric:
    # Levanter's fold makes the unused count of a sum a Python number, which changes the structure of a carried tree.
    merged = fold(left, right)
    return Metric(jnp.asarray(merged._value), jnp.asarray(merged._count, jnp.float32), reduction=merged.reduction)
