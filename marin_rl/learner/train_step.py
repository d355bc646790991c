# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The learner: sharded gradients summed over microbatches, and one optimizer update from the sum.

`Learner.update` is both in one program. `forward_backward` and `step` are the two as separate calls, for callers that
choose the loss of every microbatch and the settings of every step.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import Axis
from jax.sharding import Mesh
from levanter.metrics import Metric, ReductionType, fold
from levanter.models.lm_model import LmHeadModel
from levanter.optim.config import OptimizerConfig
from levanter.optim.model_averaging import EmaModelAveragingConfig
from levanter.tracker import NoopTracker, current_tracker
from levanter.trainer_state import TrainerState

from marin_rl.batching.rl_example import RlExample, TokenRows
from marin_rl.learner.placement import has_shape, place, place_batch, placed_shape, stack_microbatches, take_microbatch
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.errors import UserError
from marin_rl.utils.levanter_line import metric, shard


class NonFiniteUpdateError(UserError):
    """A loss or gradient was NaN or infinite; the weights are unchanged."""


Loss = Callable[..., tuple[jax.Array, Any]]
"""A function of the trained model in compute precision, a microbatch, and of `Frozen` if there is one; returns the
microbatch's part of the loss and a report, such as metrics. A module may have arrays, which are traced."""


class MicrobatchSums(NamedTuple):
    """Sums over the microbatches of one update."""

    gradient: Any
    """Gradient of the batch's loss, with the shapes and sharding of the trainable parameters."""
    loss: jax.Array
    """Loss of the batch."""
    metrics: Any
    """The loss function's report; metrics of the batch are each folded by its reduction."""


class AccumulatedState(eqx.Module):
    """A training state, and the sum of the gradients since its last step."""

    state: TrainerState
    """Weights and the optimizer's state."""
    gradient: Any
    """float32, with the shapes and sharding of the weights."""

    @property
    def model(self) -> Any:
        """The weights, which no program donates: a sampler may read them during the next steps."""
        return self.state.model


@dataclasses.dataclass(frozen=True)
class StepwiseAdamW(OptimizerConfig):
    """AdamW with clipping, whose settings `Learner.step` takes at every step; without a schedule."""

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Return the transformation, with settings that `Learner.step` replaces."""

        def adamw(rate: Any, beta1: Any, beta2: Any, eps: Any, decay: Any, clip: Any) -> Any:
            return optax.chain(
                optax.clip_by_global_norm(clip), optax.adamw(rate, b1=beta1, b2=beta2, eps=eps, weight_decay=decay)
            )

        return optax.inject_hyperparams(adamw, hyperparam_dtype=jnp.float32)(0.0, 0.0, 0.0, 1.0, 0.0, jnp.inf)

    def lr_scheduler(self, num_train_steps: int, override_lr: float | None = None) -> optax.Schedule:
        """Return the schedule for the metrics of `update`, which has none."""
        return optax.constant_schedule(0.0)


class PendingUpdate(NamedTuple):
    """An update that was dispatched, and may still run on the devices."""

    number: jax.Array
    """Number of this update, from 1 on."""
    finite: jax.Array
    """Whether the loss and the gradient were finite."""
    metrics: dict[str, Metric]
    """Metrics of the update, as in [`Learner.update`][marin_rl.learner.train_step.Learner.update]."""

    def wait(self) -> dict[str, Metric]:
        """Wait for the update and return its metrics, on the host.

        Raises:
            NonFiniteUpdateError: if the loss or the gradient is not finite. The weights are unchanged.
        """
        number, finite, metrics = jax.device_get(self)
        if not finite:
            raise NonFiniteUpdateError(
                f"update {number}: loss {float(metrics['loss/total'])}, gradient norm {float(metrics['grad_norm'])}; "
                "the weights are unchanged. Lower the learning rate, or inspect the last rollouts"
            )
        return metrics


class Frozen(eqx.Module):
    """Models that every update reads and none changes: not differentiated, donated or saved."""

    base: LmHeadModel | None = None
    """The model that an adapter changes; None if whole models are trained."""
    teacher: LmHeadModel | None = None
    """Teacher of an exact KL divergence; None without one."""


class _Constants(NamedTuple):
    """Everything but the arrays of a tree; hashable, as a static argument of a compiled program."""

    structure: jax.tree_util.PyTreeDef
    """Structure of the whole tree."""
    rest: tuple[tuple[int, Hashable], ...]
    """Index and value of each leaf that is no array."""


class Learner:
    """Computes gradients and updates the weights.

    One compiled program runs a whole update: a loop over the microbatches sums their gradients, and the optimizer
    updates the weights from the sum. The loss is a plain sum over tokens, so the split into microbatches does not
    change the gradient. The number of microbatches is an argument of the program, so it may vary without recompilation.

    Attributes:
        trainer: mesh, precision and sharding.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        optimizer: OptimizerConfig,
        loss: Loss | None = None,
        *,
        num_updates: int,
        capacity: int = 1,
        frozen: Frozen | None = None,
        decay: float | None = None,
    ):
        """Build the optimizer.

        Args:
            trainer: mesh, precision and sharding, completed by `start_devices`.
            optimizer: optimizer and learning-rate schedule.
            loss: the loss of `update`, with metrics as its report; None for a learner without `update`.
            num_updates: updates of the run, the length of the learning-rate schedule.
            capacity: microbatches that the compiled program has room for, at least 1. A larger batch doubles it as
                often as necessary, which compiles again.
            frozen: models that the loss also reads, placed on the mesh in compute precision; or their shapes and
                shardings, as from `placed_shape`, for `lower` alone.
            decay: weight of the former average of the weights at each update, which the state then contains; None
                without an average.
        """
        self._frozen_constants, self._frozen = _flatten(frozen)
        self._averaging = None if decay is None else EmaModelAveragingConfig(decay)
        self._learning_rate = optimizer.lr_scheduler(num_updates)
        self._capacity = capacity
        self._optimizer = skip_nonfinite_updates(optimizer.build(num_updates))
        self._loss = loss
        self.trainer, self._mesh = trainer, trainer.device_mesh
        self._compute_mapping, self._parameter_mapping = trainer.compute_axis_mapping, trainer.parameter_axis_mapping
        self._program = functools.cache(self._make_program)
        self._ahead: dict[tuple[Axis, ...], concurrent.futures.Future[jax.stages.Compiled]] = {}
        compiled = functools.partial(
            cast(Any, hax.named_jit),
            axis_resources=self._parameter_mapping,
            compiler_options=compiler_options(self._mesh),
        )
        self._zeros = compiled(zero_gradient)
        self._forward = compiled(self._evaluate)
        # Weights are not donated, because samplers may still read them.
        self._accumulate = compiled(self._add_gradient, donate_args=(False, True, False, False, False, False))
        self._apply = compiled(self._apply_gradient, donate_args=(False, True, True, False))

    def initial_state(self, model: eqx.Module, key: jax.Array) -> TrainerState:
        """Create a training state with zeroed optimizer moments.

        The model's arrays become part of the state; use the state's model from here on.
        """
        with self._compiling():
            return self.place(eqx.filter_jit(self._init)(model, key))

    def state_shape(self, model: eqx.Module) -> TrainerState:
        """Return shapes and dtypes of the training state of a model with these shapes."""
        key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
        with self._compiling():
            return eqx.filter_eval_shape(self._init, model, key)

    def lower_initial_state(self, model: eqx.Module) -> jax.stages.Lowered:
        """Lower the program of `initial_state` without compiling it, for analysis of its memory and cost.

        `model` has shapes and shardings of the parameters, as from `placed_shape`.
        """
        # filter_jit takes no shapes.
        arrays, rest = eqx.partition(model, has_shape)

        def create(arrays: Any, key: jax.Array) -> list[jax.Array]:
            return _flatten(self._init(eqx.combine(arrays, rest), key))[1]

        with self._compiling():
            return jax.jit(create).lower(arrays, jax.eval_shape(lambda: jax.random.PRNGKey(0)))

    def place(self, state: TrainerState) -> TrainerState:
        """Shard every array of a state as an update does.

        A new state and a state restored from a checkpoint then run the same compiled program, so a resumed run is
        bit-identical to an uninterrupted one.
        """
        return place(state, self._mesh, self._parameter_mapping)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Set the mesh and the axis mapping of compiled programs. Levanter's optimizers log to a tracker."""
        mapping = hax.axis_mapping(self._parameter_mapping)
        with current_tracker(NoopTracker()), hax.partitioning.set_mesh(self._mesh), mapping:
            yield

    def _init(self, model: eqx.Module, key: jax.Array) -> TrainerState:
        state = TrainerState.init(
            self._optimizer, model, key=key, is_trainable=True, mp=self.trainer.mp, model_averaging=self._averaging
        )
        # The average starts as a copy, because updates donate both.
        averaging = jax.tree.map(jnp.copy, state.model_averaging)
        state = dataclasses.replace(state, step=jnp.zeros((), jnp.int32), model_averaging=averaging)
        return shard(state, self._parameter_mapping)

    def update(self, state: TrainerState, microbatches: Sequence[RlExample]) -> tuple[TrainerState, dict[str, Metric]]:
        """Run one update and wait for it.

        Args:
            state: **donated**; use the returned state.
            microbatches: the batch, split into microbatches of one shape; at least one.

        Returns:
            The new state and the metrics of the update: the loss function's metrics under their own names,
            `loss/total`, `grad_norm` (global L2, before clipping) and `lr`.

        Raises:
            NonFiniteUpdateError: if the loss or the gradient is not finite. The weights are unchanged.
        """
        state, update = self.dispatch(state, microbatches)
        return state, update.wait()

    def dispatch(
        self, state: TrainerState, microbatches: Sequence[RlExample], num_rows: int | None = None
    ) -> tuple[TrainerState, PendingUpdate]:
        """Start one update and return without waiting for the devices.

        Args:
            state: **donated**; use the returned state.
            microbatches: the batch, split into microbatches of one shape; at least one.
            num_rows: number of rows of a microbatch if `microbatches` contain only the rows of this process
                (`own_rows` of `marin_rl.utils.devices.setup`); None if they contain all rows.

        Returns:
            The new state, which the next update may take at once, and the update's metrics.
        """
        if (compiling := self._ahead.pop(microbatches[0].input_ids.axes, None)) is not None:
            concurrent.futures.wait([compiling])
        with self._compiling():
            batch = place_batch(stack_microbatches(microbatches, self._capacity), self.trainer, num_rows)
            constants, leaves = _flatten(state)
            program = self._program(constants, tuple(leaf.sharding for leaf in leaves))
            leaves, update = program(leaves, batch, np.int32(len(microbatches)), self._frozen)
        return _unflatten(constants, leaves), update

    def compile_ahead(self, model: eqx.Module, microbatch: RlExample) -> None:
        """Compile the program of an update in a thread, for which the next update with this microbatch waits.

        An error of compiling is left to the update, which compiles again.

        Args:
            model: shapes and dtypes of the trained weights.
            microbatch: only its shapes are used.
        """
        state = placed_shape(self.state_shape(model), self._mesh, self._parameter_mapping)
        lowered, compiler = self.lower(state, [microbatch]), concurrent.futures.ThreadPoolExecutor(1, "compiler")
        # Jax keeps the compiled program with the lowered one, which an update finds.
        self._ahead[microbatch.input_ids.axes] = compiler.submit(lowered.compile)
        compiler.shutdown(wait=False)

    def lower(self, state: TrainerState, microbatches: Sequence[RlExample]) -> jax.stages.Lowered:
        """Lower the program of an update without compiling it, for analysis of its memory and cost.

        The state has arrays, or shapes and shardings as from `placed_shape`. Of the microbatches only shapes are used.
        """
        stacked = stack_microbatches(microbatches, self._capacity)
        batch = placed_shape(stacked, self._mesh, self._compute_mapping)
        with self._compiling():
            constants, leaves = _flatten(state)
            program = self._program(constants, tuple(leaf.sharding for leaf in leaves))
            return program.lower(leaves, batch, np.int32(len(microbatches)), self._frozen)

    # Gradients and steps as separate calls.

    def start(self, model: eqx.Module) -> AccumulatedState:
        """Return a new state of these weights, with zeroed optimizer moments and a sum of no gradients."""
        state = self.initial_state(model, jax.random.PRNGKey(0))
        with self._compiling():
            return AccumulatedState(state, self._zeros(state.model))

    def forward(self, model: Any, rows: TokenRows, loss: Loss) -> tuple[jax.Array, Any]:
        """Return the loss of a microbatch, and what the loss function reports.

        Args:
            model: trained weights, as in a state.
            rows: a microbatch on the host, with all rows.
            loss: evaluated in compute precision.
        """
        with self._compiling():
            return self._forward(model, place(rows, self._mesh, self._compute_mapping), loss, self._frozen)

    def forward_backward(
        self, state: AccumulatedState, rows: TokenRows | Sequence[RlExample], loss: Loss
    ) -> tuple[AccumulatedState, jax.Array, Any]:
        """Add the gradient of a loss to the sum.

        Args:
            state: its gradient is **donated**; use the returned state.
            rows: a microbatch on the host, with all rows; or a batch as microbatches of one shape, which one program
                sums, the same as in `update`.
            loss: differentiated in compute precision. The reports of the microbatches of a batch are metrics.

        Returns:
            The new state, the loss, and what the loss function reports; for a batch, metrics are folded.
        """
        with self._compiling():
            if isinstance(rows, TokenRows):
                inputs = place(rows, self._mesh, self._compute_mapping), None
            else:
                stacked = stack_microbatches(rows, self._capacity)
                inputs = place_batch(stacked, self.trainer, None), np.int32(len(rows))
            sums = self._accumulate(state.model, state.gradient, *inputs, loss, self._frozen)
        return dataclasses.replace(state, gradient=sums.gradient), sums.loss, sums.metrics

    def step(
        self,
        state: AccumulatedState,
        rate: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: float = 0.0,
        clip: float = 0.0,
    ) -> tuple[AccumulatedState, dict[str, jax.Array]]:
        """Apply the sum `g` of the gradients to the weights `p` with the learner's optimizer, and zero it.

        A learner with `StepwiseAdamW` takes the settings of each step:

        ```
        g ← g · min(1, clip / |g|)     if clip > 0
        m ← β1 m + (1 - β1) g,   v ← β2 v + (1 - β2) g²
        p ← p - rate · (m / (1 - β1ᵗ) / (√(v / (1 - β2ᵗ)) + ε) + decay · p)
        ```

        The settings are traced, so that no value compiles another program.

        Args:
            state: **donated** except for the weights; use the returned state.
            rate: learning rate of `StepwiseAdamW`; None for other optimizers, which have settings and a schedule.
            betas: β1 and β2, each at least 0 and below 1.
            eps: ε, positive.
            decay: decoupled weight decay.
            clip: bound of the global L2 norm of `g`; at most 0 for none.

        Returns:
            The new state, the norm of `g` as `grad_norm`, and as `fits` whether the new weights and moments are finite.
            If they are not, the state is as before. If the norm is not finite, only `g` becomes zero.

        Source: Loshchilov & Hutter 2019, arXiv 1711.05101, as in torch's `AdamW`.
        """
        model, rest = state.model, dataclasses.replace(state.state, model=None)
        names = ("rate", "beta1", "beta2", "eps", "decay", "clip")
        values = (rate, *betas, eps, decay, clip if clip > 0 else np.inf)
        settings = None if rate is None else dict(zip(names, map(np.float32, values), strict=True))
        with self._compiling():
            model, rest, gradient, metrics = self._apply(model, rest, state.gradient, settings)
        return AccumulatedState(dataclasses.replace(rest, model=model), gradient), metrics

    def _evaluate(self, model: Any, rows: TokenRows, loss: Loss, frozen: list[jax.Array]) -> tuple[jax.Array, Any]:
        with hax.axis_mapping(self._compute_mapping):
            return self._compute(model, rows, _unflatten(self._frozen_constants, frozen), loss)

    def _add_gradient(
        self, model: Any, total: Any, rows: Any, count: jax.Array | None, loss: Loss, frozen: list[jax.Array]
    ) -> MicrobatchSums:
        if count is not None:
            with hax.axis_mapping(self._parameter_mapping):
                return self._sum(model, rows, count, frozen, loss, total)
        sums = self._gradient(model, rows, _unflatten(self._frozen_constants, frozen), loss)
        added = jax.tree.map(lambda old, new: old + new.astype(jnp.float32), total, sums.gradient)
        return sums._replace(gradient=added)

    def _apply_gradient(
        self, model: Any, rest: TrainerState, gradient: Any, settings: dict[str, jax.Array] | None
    ) -> tuple[Any, TrainerState, Any, dict[str, jax.Array]]:
        state = dataclasses.replace(rest, model=model)
        (of_state, leaves), (of_gradient, parts) = _flatten(state), _flatten(gradient)

        def take_step(leaves: list[jax.Array], parts: list[jax.Array]) -> TrainerState:
            state, total = _unflatten(of_state, leaves), _unflatten(of_gradient, parts)
            if settings is not None:
                guarded = cast(SkipState, state.opt_state)
                inner = cast(Any, guarded.inner)._replace(hyperparams=settings)
                state = dataclasses.replace(state, opt_state=guarded._replace(inner=inner))
            total = jax.tree.map(lambda leaf, weight: leaf.astype(weight.dtype), total, state.model)
            return state.take_step(total, loss=0.0, key=state.training_key)[0]

        # Computed twice: the new values of all leaves until the last one is checked would take the memory of the state.
        checked = take_step(*jax.lax.optimization_barrier((leaves, parts)))
        results = jax.tree.leaves((checked.model, cast(Any, checked.opt_state).inner.inner_state))
        fits = jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in results]))
        stepped = take_step(leaves, parts)
        guard = cast(SkipState, stepped.opt_state)
        is_taken = fits & guard.finite
        kept = [jnp.where(is_taken, new, old) for new, old in zip(_flatten(stepped)[1], leaves, strict=True)]
        state = _unflatten(of_state, kept)
        left = jax.tree.map(lambda leaf: jnp.where(fits, 0.0, leaf), gradient)
        metrics = {"grad_norm": guard.grad_norm, "fits": fits}
        return state.model, dataclasses.replace(state, model=None), left, metrics

    def _make_program(self, constants: _Constants, shardings: tuple[jax.sharding.Sharding, ...]) -> jax.stages.Wrapped:
        # Flat arguments, because jax compares the structure of its arguments in every call, in Python for modules.
        def update(
            leaves: list[jax.Array], batch: RlExample, count: jax.Array, frozen: list[jax.Array]
        ) -> tuple[list[jax.Array], PendingUpdate]:
            with hax.axis_mapping(self._parameter_mapping):
                state, pending = self._update(_unflatten(constants, leaves), batch, count, frozen)
            return _flatten(state)[1], pending

        options = compiler_options(self._mesh)
        return jax.jit(update, donate_argnums=0, out_shardings=(list(shardings), None), compiler_options=options)

    def _update(
        self, state: TrainerState, batch: RlExample, count: jax.Array, frozen: list[jax.Array]
    ) -> tuple[TrainerState, PendingUpdate]:
        assert self._loss is not None
        sums = self._sum(state.model, batch, count, frozen, self._loss)
        trained = eqx.filter(state.model, eqx.is_inexact_array)
        gradient = jax.tree.map(lambda leaf, weight: leaf.astype(weight.dtype), sums.gradient, trained)
        # The forward pass is deterministic, so the key does not change.
        new_state, _ = state.take_step(gradient, loss=cast(float, sums.loss), key=state.training_key)
        optimizer_state = cast(SkipState, new_state.opt_state)
        rate = jnp.asarray(self._learning_rate(state.step), jnp.float32)
        metrics = {
            **sums.metrics,
            "loss/total": metric(sums.loss, ReductionType.MEAN),
            "grad_norm": metric(optimizer_state.grad_norm, ReductionType.MEAN),
            "lr": metric(rate, ReductionType.LAST),
        }
        return new_state, PendingUpdate(jnp.asarray(new_state.step), optimizer_state.finite, metrics)

    def _sum(
        self, model: Any, batch: RlExample, count: jax.Array, frozen: list[jax.Array], loss: Loss, total: Any = None
    ) -> MicrobatchSums:
        """Sum over the microbatches; `total` is the sum of gradients to which to add, None for zero."""
        constants, leaves = _flatten(model)

        # Jitted so that it is traced once, although it is called twice: for the shapes of its result and in the loop.
        @jax.jit
        def differentiate(leaves: list[jax.Array], batch: RlExample, frozen: list[jax.Array]) -> MicrobatchSums:
            read = _unflatten(self._frozen_constants, frozen)
            return self._gradient(_unflatten(constants, leaves), batch, read, loss)

        def add(index: jax.Array, sums: MicrobatchSums) -> MicrobatchSums:
            return _add(sums, differentiate(leaves, take_microbatch(batch, index), frozen))

        sums = self._make_zeros(jax.eval_shape(differentiate, leaves, take_microbatch(batch, 0), frozen))
        return jax.lax.fori_loop(0, count, add, sums if total is None else sums._replace(gradient=total))

    def _make_zeros(self, like: MicrobatchSums) -> MicrobatchSums:
        bounds = {ReductionType.MAX: -jnp.inf, ReductionType.MIN: jnp.inf}
        reductions = {name: metric.reduction for name, metric in like.metrics.items()}
        metrics = {
            name: Metric(jnp.full((), bounds.get(reduction, 0), jnp.float32), jnp.zeros(()), reduction=reduction)
            for name, reduction in reductions.items()
        }
        # Also those of bfloat16 parameters are summed in float32.
        gradient = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like.gradient)
        gradient = shard(gradient, self._parameter_mapping)
        return MicrobatchSums(gradient, jnp.zeros(()), metrics)

    def _gradient(self, model: eqx.Module, batch: TokenRows, frozen: Frozen | None, loss: Loss) -> MicrobatchSums:
        compute = functools.partial(self._compute, frozen=frozen, loss=loss)
        with hax.axis_mapping(self._compute_mapping):
            (value, report), gradient = eqx.filter_value_and_grad(compute, has_aux=True)(model, batch)
        return MicrobatchSums(shard(gradient, self._parameter_mapping), jnp.asarray(value), report)

    def _compute(self, model: eqx.Module, batch: TokenRows, frozen: Frozen | None, loss: Loss) -> tuple[jax.Array, Any]:
        read = () if frozen is None else (frozen,)
        return loss(self.trainer.mp.cast_to_compute(model), batch, *read)


def zero_gradient(model: Any) -> Any:
    """Return the sum of no gradients of some weights, in float32."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), model)


def _add(sums: MicrobatchSums, part: MicrobatchSums) -> MicrobatchSums:
    return MicrobatchSums(
        jax.tree.map(jnp.add, sums.gradient, part.gradient),
        sums.loss + part.loss,
        fold_metrics([sums.metrics, part.metrics]),
    )


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """Return XLA's options for the programs of the learner on a mesh; None for the defaults.

    On a CPU, XLA may leave products and reductions to the library YNN. Its products are fast, but its reductions that
    contain an exponential or a logarithm, as in a softmax, take up to ten times as long as XLA's own.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}


def _flatten(tree: Any) -> tuple[_Constants, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    rest = tuple((index, leaf) for index, leaf in enumerate(leaves) if not has_shape(leaf))
    return _Constants(structure, rest), [leaf for leaf in leaves if has_shape(leaf)]


def _unflatten(constants: _Constants, leaves: Sequence[jax.Array]) -> Any:
    every: list[Any] = list(leaves)
    for index, leaf in constants.rest:
        every.insert(index, leaf)
    return jax.tree.unflatten(constants.structure, every)


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
