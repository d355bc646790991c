# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lowers every program of a run from shapes, on the devices of a topology. No weights are allocated."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import haliax.partitioning
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import empty_microbatch
from marin_rl.config.reference_config import CheckpointReferenceConfig
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.critic import ActorCritic, assemble
from marin_rl.learner.placement import placed_shape
from marin_rl.learner.policy_spec import PolicySpec, TrainedPolicy
from marin_rl.models.mixture import mixture_shape
from marin_rl.parts.model import AbstractModelParts
from marin_rl.parts.rl import RunParts
from marin_rl.parts.teacher import teacher_spec
from marin_rl.sampling.attention import Tokens
from marin_rl.sampling.cached_model import CachedModel, ModelArrays, with_cache
from marin_rl.sampling.config import LevanterSamplerConfig
from marin_rl.sampling.decoding import SamplerPrograms, Slots, compile_programs, conversion_program
from marin_rl.sampling.sizes import SamplerSizes, check_cache_size, sampler_sizes
from marin_rl.sampling.stops import StopTable
from marin_rl.sessions.recipes import as_rl, recipe_of
from marin_rl.utils.devices.arrays import copy_program, numeric_arrays
from marin_rl.utils.devices.trainer_config import DistributedConfig, TrainerConfig
from marin_rl.utils.levanter_line import shard


@dataclasses.dataclass(frozen=True)
class RunShapes:
    """A run on the current devices: everything that determines its programs."""

    config: AbstractRunConfig
    """Config of the run; `model` is set."""
    trainer: TrainerConfig
    """Mesh, precision and sharding, completed by `start_devices`."""
    layout: RowLayout
    """Shape of a microbatch."""
    vocab_size: int
    """Number of tokens of the model."""

    @functools.cached_property
    def parts(self) -> AbstractModelParts:
        """Parts of the run."""
        return recipe_of(self.config).parts(self.config, self.trainer)

    @property
    def rl(self) -> TrainConfig:
        """Config of an RL run, for the programs that other runs do not have."""
        rl = as_rl(self.config)
        assert rl is not None
        return rl

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return cast(Any, self.config.model).num_layers

    @functools.cached_property
    def spec(self) -> PolicySpec:
        """Shapes and shardings of the parameters."""
        return self.parts.policy_spec(self.vocab_size)

    @property
    def policy(self) -> LmHeadModel:
        """Shapes of the policy's parameters."""
        return self.spec.policy

    @functools.cached_property
    def sent(self) -> TrainedPolicy:
        """Shapes and shardings of the trained part of the policy, which workers receive."""
        return self.spec.place(self.spec.trained_policy)

    @functools.cached_property
    def base(self) -> LmHeadModel | None:
        """Shapes and shardings of the base of the adapter; None without an adapter."""
        return self.spec.place(self.spec.base)

    @functools.cached_property
    def parameters(self) -> LmHeadModel:
        """Shapes and shardings of the whole policy."""
        return assemble(self.sent, self.base)

    @functools.cached_property
    def trained(self) -> TrainedPolicy | ActorCritic:
        """Shapes and shardings of all trained parameters: of the policy, and of the critic if there is one."""
        return self.spec.place(self.spec.trained)

    @functools.cached_property
    def teacher(self) -> LmHeadModel | None:
        """Shapes and shardings of the teacher of an exact divergence; None without one."""
        if not self.config.needs_teacher:
            return None
        policy, reference = self.parameters, self.rl.reference
        if isinstance(reference, CheckpointReferenceConfig):
            policy = teacher_spec(cast(RunParts, self.parts), reference.path).policy
        return self.place(eqx.filter_eval_shape(self.trainer.mp.cast_to_compute, policy))

    def place(self, tree: Any) -> Any:
        """Return shapes with the shardings of parameters."""
        return placed_shape(tree, self.trainer.device_mesh, self.trainer.parameter_axis_mapping)

    def place_for_sampler(self, tree: Any) -> Any:
        """Return shapes with the shardings of the sampler's weights."""
        return placed_shape(tree, cast(Mesh, self.sizes.mesh), self.trainer.compute_axis_mapping)

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers of a mixture of experts are dense."""
        mixture = mixture_shape(cast(LmConfig, self.config.model))
        return mixture is not None and mixture.layers < self.num_layers

    def with_layers(self, count: int) -> "RunShapes":
        """Return the same run with another number of layers."""
        if count not in self._by_layers:
            model = dataclasses.replace(cast(Any, self.config.model), num_layers=count)
            config = dataclasses.replace(self.config, model=model)
            self._by_layers[count] = dataclasses.replace(self, config=config)
        return self._by_layers[count]

    @functools.cached_property
    def _by_layers(self) -> "dict[int, RunShapes]":
        return {}

    @functools.cached_property
    def sizes(self) -> SamplerSizes:
        """Sizes of the sampler."""
        return sampler_sizes(
            self.rl.sampling, self.rl.rollouts.max_length, self.trainer, experts=self.rl.samples_experts
        )

    @functools.cached_property
    def sampler_programs(self) -> SamplerPrograms:
        """Programs of the sampler, not yet compiled.

        Raises:
            ValueError: if the KV cache exceeds `sampling.max_cache_gib`.
        """
        model = cast(LmConfig, self.policy.config)
        check_cache_size(model, self.sizes, self.rl.sampling)
        return compile_programs(self.trainer, model, self.sizes)

    @functools.cached_property
    def converted(self) -> CachedModel:
        """Shapes of the weights in the layout for decoding."""
        form, context = self.sizes.form, self.rl.rollouts.max_length

        def convert(policy: LmHeadModel) -> CachedModel:
            return with_cache(self.trainer.mp.cast_to_compute(policy), form, context)

        return eqx.filter_eval_shape(convert, self.parameters)

    @functools.cached_property
    def sampler_weights(self) -> ModelArrays:
        """Shapes of the weights in the layout for decoding, with their shardings on the devices of the sampler."""
        return ModelArrays.of(self.place_for_sampler(self.converted))

    @functools.cached_property
    def cache(self) -> Any:
        """Shapes and shardings of the KV cache of every layer."""
        with self.use_sampler_mesh():
            return _output_shapes(self.sampler_programs.empty)

    def use_sampler_mesh(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with the mesh of the sampler, which is one host's."""
        return haliax.partitioning.set_mesh(cast(Mesh, self.sizes.mesh))


def open_shapes(config: AbstractRunConfig, vocab_size: int) -> RunShapes:
    """Complete a config for the current devices, as a run does at its start.

    Args:
        config: config of the run; `model` is set.
        vocab_size: number of tokens of the model.

    Raises:
        ValueError: if the mesh or the rows do not fit the devices.
    """
    section = dataclasses.replace(config.trainer, distributed=DistributedConfig(), require_accelerator=False)
    if not config.num_updates:
        # Whole epochs are counted when the data is read. The length of the learning-rate schedule changes no memory.
        config = dataclasses.replace(config, num_steps=10**6)
    parts = recipe_of(config).parts.start(config, section)
    return RunShapes(config, parts.trainer, parts.layout, vocab_size)


def lower_initial_state(run: RunShapes) -> jax.stages.Lowered:
    """Lower the creation of the training state from the first policy."""
    return run.parts.make_learner(run.layout, run.base).lower_initial_state(cast(eqx.Module, run.trained))


def lower_update(run: RunShapes) -> jax.stages.Lowered:
    """Lower an update."""
    learner = run.parts.make_learner(run.layout, run.base, run.teacher)
    state = run.place(learner.state_shape(run.spec.trained))
    return learner.lower(state, [empty_microbatch(run.layout, run.parts.optional_arrays, run.parts.model)])


def lower_score(run: RunShapes) -> jax.stages.Lowered:
    """Lower the forward pass over a batch, for the reference or the learner's own log-probabilities."""
    scorer = run.parts.make_scorer(run.layout, pad_token_id=0)
    model = assemble(run.trained if run.parts.own_scorings else run.sent, run.base)
    return scorer.lower(model, [empty_microbatch(run.layout)])


def lower_weight_copy(run: RunShapes) -> jax.stages.Lowered:
    """Lower the copy of the policy that workers fetch."""
    arrays = list(numeric_arrays(run.sent).values())
    program = copy_program(tuple(leaf.sharding for leaf in cast(Any, arrays)), run.rl.weights.sent_dtype)
    return program.lower(arrays)


def lower_sampler_weights(run: RunShapes) -> jax.stages.Lowered:
    """Lower the conversion of the weights to the layout for decoding, on the mesh of the learner."""
    if run.sizes.hosts == 1:
        with run.use_sampler_mesh():
            return cast(Any, run.sampler_programs.prepare).lower(run.parameters)
    with run.trainer.use_device_mesh():
        program = conversion_program(run.trainer, run.sizes.form, run.rl.rollouts.max_length)
        return cast(Any, program).lower(run.parameters)


def lower_resharding(run: RunShapes) -> jax.stages.Lowered:
    """Lower the copy of the converted weights to every host, as sharded in one host."""
    mapping = run.trainer.compute_axis_mapping
    with run.trainer.use_device_mesh():
        return jax.jit(lambda model: shard(model, mapping)).lower(run.place(run.converted))


def lower_prefill(run: RunShapes, *, short: bool = False) -> jax.stages.Lowered:
    """Lower a long or a short call of `prefill`."""
    shape = run.sizes.prefill.short if short else run.sizes.prefill.long
    rows, chunk = run.sizes.shards * shape.rows, shape.chunk
    tokens = Tokens(_integers(rows, chunk), _integers(rows), _integers(rows, chunk))
    with run.use_sampler_mesh():
        return cast(Any, run.sampler_programs.prefill).lower(run.sampler_weights, run.cache, tokens)


def lower_decode(run: RunShapes) -> jax.stages.Lowered:
    """Lower a call of `decode`, without stop texts, which enlarge a small table."""
    slots = run.sizes.slots
    keys, temperatures = jax.ShapeDtypeStruct((slots, 2), jnp.uint32), jax.ShapeDtypeStruct((slots,), jnp.float32)
    active = jax.ShapeDtypeStruct((slots,), jnp.bool_)
    numbers = _integers(slots)
    state = Slots(*cast(Any, (active, numbers, numbers, numbers, numbers, keys, temperatures)))
    stops = StopTable(*cast(Any, (_integers(run.vocab_size), _integers(2, 2))))
    inputs = run.sampler_weights, run.cache, state, stops, _integers()
    with run.use_sampler_mesh():
        return cast(Any, run.sampler_programs.decode).lower(*inputs)


LOWER: dict[str, Callable[[RunShapes], jax.stages.Lowered]] = {
    "initial state": lower_initial_state,
    "update": lower_update,
    "score": lower_score,
    "sampler weights": lower_sampler_weights,
    "resharding": lower_resharding,
    "prefill": lower_prefill,
    "short prefill": functools.partial(lower_prefill, short=True),
    "decode": lower_decode,
    "weight copy": lower_weight_copy,
}
"""Function that lowers each program."""
UNROLLED = ("sampler weights", "resharding", "prefill", "short prefill", "decode")
"""Programs with one copy of the code per layer."""


def programs_of(parts: AbstractModelParts, hosts: int) -> list[str]:
    """Return the names of the programs that a run executes, in the order of `LOWER`.

    Args:
        parts: parts of the run, which need no devices.
        hosts: number of hosts of the trainer.

    >>> from marin_rl.environments import ArithmeticConfig
    >>> from levanter.models.llama import LlamaConfig
    >>> config = TrainConfig(environment=ArithmeticConfig(), run_dir="runs/a", model=LlamaConfig())
    >>> programs_of(RunParts(config, config.trainer), hosts=1)
    ['initial state', 'update', 'sampler weights', 'prefill', 'short prefill', 'decode']
    """
    config = parts.config
    builtin = (rl := as_rl(config)) is not None and isinstance(rl.sampler, LevanterSamplerConfig)
    needed = {
        "initial state": True,
        "update": True,
        "score": config.needs_reference or parts.own_scorings > 0 or parts.scores_data,
        "sampler weights": builtin,
        "resharding": builtin and hosts > 1 and not config.is_async,
        "prefill": builtin,
        "short prefill": builtin,
        "decode": builtin,
        "weight copy": config.is_async,
    }
    return [name for name in LOWER if needed[name]]


def _output_shapes(program: Any, *arguments: Any) -> Any:
    compiled = program.lower(*arguments).compile()
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        compiled.out_info,
        compiled.output_shardings,
    )


def _integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
