# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The learner: sharded gradients summed over microbatches, and one optimizer update from the sum."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.tree_util import hashable_combine, hashable_partition
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.metrics import Metric, ReductionType, fold
from levanter.optim import OptimizerConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.types import ComputeLossFunction

from marin_rl import multihost
from marin_rl.batching.rl_example import RlExample
from marin_rl.errors import UserError

T = TypeVar("T")


class NonFiniteUpdateError(UserError):
    """A loss or gradient was NaN or infinite; the weights are unchanged."""


class MicrobatchSums(NamedTuple):
    """Sums over the microbatches of one update."""

    gradient: Any
    """Gradient of the batch's loss, with the shapes and sharding of the trainable parameters."""
    loss: jax.Array
    """Loss of the batch."""
    metrics: dict[str, Metric]
    """Metrics of the batch, each folded by its reduction."""


class _Structures(NamedTuple):
    """Tree structures of a microbatch's inputs; hashable, as a static argument of the compiled program."""

    model: jax.tree_util.PyTreeDef
    constants: Hashable
    batch: jax.tree_util.PyTreeDef
    sums: jax.tree_util.PyTreeDef


def _flatten(
    model: eqx.Module, batch: RlExample, sums: MicrobatchSums
) -> tuple[_Structures, list[jax.Array], list[jax.Array], list[jax.Array]]:
    arrays, constants = hashable_partition(model, eqx.is_array)
    (of_model, like_model), (of_batch, like_batch), (of_sums, like_sums) = map(jax.tree.flatten, (arrays, batch, sums))
    return _Structures(like_model, constants, like_batch, like_sums), of_model, of_batch, of_sums


class Learner:
    """Computes gradients and updates the weights.

    One compiled program adds the gradient of each microbatch to a sum; another updates the weights from the sum. The
    loss is a plain sum over tokens, so the split into microbatches does not change the gradient, and the number of
    microbatches may vary without recompilation.

    Attributes:
        trainer: levanter's trainer, which provides mesh, precision and sharding.
    """

    def __init__(
        self,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        loss: Callable[..., tuple[jax.Array, dict[str, Metric]]],
        *,
        num_updates: int,
    ):
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
        """Create a training state with zeroed optimizer moments.

        Args:
            model: its arrays become part of the state; use the state's model from here on.
            key: random key of the training state.
        """
        with self.trainer:
            return self.place(eqx.filter_jit(self._init)(model, key))

    def state_shape(self, model: eqx.Module) -> TrainerState:
        """Return shapes and dtypes of the training state of a model with these shapes."""
        with self.trainer:
            return eqx.filter_eval_shape(self._init, model, jax.random.PRNGKey(0))

    def place(self, state: TrainerState) -> TrainerState:
        """Shard every array of a state as an update does.

        A new state and a state restored from a checkpoint then run the same compiled program, so a resumed run is
        bit-identical to an uninterrupted one.
        """
        return place(state, self.trainer.device_mesh, self.trainer.parameter_axis_mapping)

    def _init(self, model: eqx.Module, key: jax.Array) -> TrainerState:
        trainer = self.trainer
        state = TrainerState.init(trainer.optimizer, model, key=key, is_trainable=True, mp=trainer.mp)
        state = dataclasses.replace(state, step=jnp.zeros((), jnp.int32))
        return hax.shard(state, trainer.parameter_axis_mapping)

    def step(self, state: TrainerState, microbatches: Sequence[RlExample]) -> tuple[TrainerState, dict[str, Metric]]:
        """Run one update.

        Args:
            state: **donated**; use the returned state.
            microbatches: the batch, split into microbatches of one shape; at least one.

        Returns:
            The new state and the metrics of the update: the loss function's metrics under their own names,
            `loss/total`, `grad_norm` (global L2, before clipping) and `lr`.

        Raises:
            NonFiniteUpdateError: if the loss or the gradient is not finite. The weights are unchanged.
        """
        with self.trainer:
            batches = [self._place(batch) for batch in microbatches]
            sums = self._sum_microbatches(state.model, batches)
            state, loss, metrics = self._update(state, sums)
        optimizer_state = cast(SkipState, state.opt_state)
        update = int(state.step)
        rate = jnp.asarray(self._learning_rate(update - 1))
        metrics = {
            **metrics,
            "loss/total": Metric.from_value(loss, ReductionType.MEAN),
            "grad_norm": Metric.from_value(optimizer_state.grad_norm, ReductionType.MEAN),
            "lr": Metric.from_value(rate, ReductionType.LAST),
        }
        if not bool(optimizer_state.finite):
            raise NonFiniteUpdateError(
                f"update {update}: loss {float(loss)}, gradient norm {float(optimizer_state.grad_norm)}; "
                "the weights are unchanged. Lower the learning rate, or inspect the last rollouts"
            )
        return state, metrics

    def lower_microbatch(self, model: eqx.Module, batch: RlExample) -> jax.stages.Lowered:
        """Lower the microbatch program without compiling it, for analysis of its memory and cost."""
        with self.trainer:
            placed = self._place(batch)
            return self._add.lower(*_flatten(model, placed, self._zeros(model, placed)))

    def _place(self, batch: RlExample) -> RlExample:
        return place(batch, self.trainer.device_mesh, self.trainer.compute_axis_mapping)

    def _sum_microbatches(self, model: eqx.Module, batches: Sequence[RlExample]) -> MicrobatchSums:
        # Flatten the model once for all microbatches: flattening costs more than dispatching a program.
        structures, leaves, _, sums = _flatten(model, batches[0], self._zeros(model, batches[0]))
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
        like = eqx.filter_eval_shape(self._gradient, model, batch)
        bounds = {ReductionType.MAX: -jnp.inf, ReductionType.MIN: jnp.inf}
        reductions = {name: metric.reduction for name, metric in like.metrics.items()}
        metrics = {
            name: Metric(jnp.full((), bounds.get(reduction, 0), jnp.float32), jnp.zeros(()), reduction=reduction)
            for name, reduction in reductions.items()
        }
        gradient = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like.gradient)
        return MicrobatchSums(gradient, jnp.zeros(()), metrics)

    def _gradient(self, model: eqx.Module, batch: RlExample) -> MicrobatchSums:
        with hax.axis_mapping(self.trainer.compute_axis_mapping):
            differentiate = eqx.filter_value_and_grad(self.trainer.loss_fn, has_aux=True)
            (loss, metrics), gradient = differentiate(model, batch, key=None)
        return MicrobatchSums(hax.shard(gradient, self.trainer.parameter_axis_mapping), jnp.asarray(loss), metrics)

    def _add_microbatch(self, model: eqx.Module, batch: RlExample, sums: MicrobatchSums) -> MicrobatchSums:
        part = self._gradient(model, batch)
        return MicrobatchSums(
            jax.tree.map(jnp.add, sums.gradient, part.gradient),
            sums.loss + part.loss,
            fold_metrics([sums.metrics, part.metrics]),
        )

    def _take_step(
        self, state: TrainerState, sums: MicrobatchSums
    ) -> tuple[TrainerState, jax.Array, dict[str, Metric]]:
        # The forward pass is deterministic, so the key does not change.
        new_state, _ = state.take_step(sums.gradient, loss=cast(float, sums.loss), key=state.training_key)
        return new_state, sums.loss, sums.metrics


def place(tree: T, mesh: Mesh, mapping: ResourceMapping) -> T:
    """Put every array of a tree on the mesh: named arrays sharded by `mapping`, all others replicated."""

    def put(leaf: Any) -> Any:
        if isinstance(leaf, NamedArray):
            sharding = NamedSharding(mesh, pspec_for_axis(leaf.axes, mapping))
            return NamedArray(multihost.put(leaf.array, sharding), leaf.axes)
        if not eqx.is_array(leaf):
            return leaf
        # A jitted step returns P(None, ...). P() is equivalent, but would be another key of the compilation cache.
        return multihost.put(leaf, NamedSharding(mesh, PartitionSpec(*[None] * leaf.ndim)))

    return jax.tree.map(put, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def fold_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of one or several microbatches or updates with the same names, each by its reduction."""

    def merge(left: Metric, right: Metric) -> Metric:
        # Levanter's fold turns the unused count of a sum into a Python number, which changes the tree structure.
        merged = fold(left, right)
        return Metric(jnp.asarray(merged._value), jnp.asarray(merged._count, jnp.float32), reduction=merged.reduction)

    folded = dict(parts[0])
    for part in parts[1:]:
        folded = {name: merge(metric, part[name]) for name, metric in folded.items()}
    return folded


class SkipState(NamedTuple):
    """State of `skip_nonfinite_updates`."""

    inner: optax.OptState
    """State of the wrapped optimizer."""
    grad_norm: jax.Array
    """Global L2 norm of the last gradient, before clipping."""
    finite: jax.Array
    """Whether the last gradient and loss were finite; if not, the weights and `inner` are unchanged."""


def skip_nonfinite_updates(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer` so that a step with a NaN or infinite gradient or loss changes neither weights nor moments.

    Returns:
        The same transformation with a `SkipState` around its state. Its `update` takes the loss as keyword `loss`, as
        levanter's trainer passes it.
    """
    wrapped = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> SkipState:
        return SkipState(wrapped.init(params), jnp.zeros((), jnp.float32), jnp.array(True))

    def update(updates, state: SkipState, params=None, *, loss=0.0, **extra_args):
        grad_norm = optax.tree.norm(updates).astype(jnp.float32)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        stepped, inner = wrapped.update(updates, state.inner, params, loss=loss, **extra_args)
        stepped = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), stepped)
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner)
        return stepped, SkipState(inner, grad_norm, finite)

    return optax.GradientTransformationExtraArgs(init, cast(optax.TransformUpdateExtraArgsFn, update))
