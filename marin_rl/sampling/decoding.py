# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The compiled programs of the sampler: prefill of prompts, copies of their cache, and decoding.

With a mesh, each data shard runs the programs on its own slots, and no data moves between shards; the model's heads are
sharded over the model axis.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import jmp
from haliax.partitioning import ResourceMapping
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.models.mixture import mixture_shape
from marin_rl.sampling.attention import PADDING, AttentionForm, CacheAxes, Tokens, einsum_in_float32
from marin_rl.sampling.cached_model import Cache, CachedModel, ModelArrays, empty_cache, with_cache
from marin_rl.sampling.sizes import SamplerSizes
from marin_rl.sampling.stops import ENDED, StopTable
from marin_rl.utils.devices.sharding import POSITION
from marin_rl.utils.devices.trainer_config import BATCH, TrainerConfig
from marin_rl.utils.levanter_line import shard

_SMALL_BLOCK = 64
_LARGE_BLOCK = 512


class Slots(NamedTuple):
    """State of every slot before a call of `decode`."""

    active: Bool[Array, " slots"]
    """Whether tokens are sampled."""
    lengths: Int[Array, " slots"]
    """Number of tokens in the cache."""
    last_tokens: Int[Array, " slots"]
    """The token after those in the cache: the last one of the prompt, or the last sampled one."""
    stop_states: Int[Array, " slots"]
    """State of the automaton of stop tokens and stop texts; see `StopTable`."""
    remaining: Int[Array, " slots"]
    """Number of tokens that may be sampled in this call."""
    keys: UInt32[Array, "slots 2"]
    """Key of the random numbers; the counter is the position."""
    temperatures: Float[Array, " slots"]
    """Divides the logits; 0 is greedy."""


class Decoded(NamedTuple):
    """Output of a call of `decode`."""

    tokens: Int[Array, "steps slots"]
    """Sampled tokens; -1 after the end of a sequence."""
    logprobs: Float[Array, "steps slots"]
    """Their log-probabilities, in nats."""
    stop_states: Int[Array, " slots"]
    """State of the automaton after the last token; `ENDED` if it ends the sequence."""


def prefill(model: CachedModel, cache: Cache, tokens: Tokens) -> Cache:
    """Add prompt tokens to the cache."""
    return model.run(tokens, cache, all_slots=False)[1]


def copy_slots(
    cache: Cache, sources: Int[Array, " slots"], targets: Int[Array, " slots"], count: Int[Array, " one"]
) -> Cache:
    """Copy the cache of slot `sources[i]` to slot `targets[i]`, for the first `count` pairs in order."""

    def copy(index: Int[Array, ""], cache: Cache) -> Cache:
        def copy_array(array: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(array, sources[index], 1)
            return jax.lax.dynamic_update_slice_in_dim(array, row, targets[index], 0)

        return jax.tree.map(copy_array, cache)

    return jax.lax.fori_loop(0, count[0], copy, cache)


class _DecodeCarry(NamedTuple):
    step: Int[Array, ""]
    cache: Cache
    slots: Slots
    decoded: Decoded


def decode(
    model: CachedModel,
    cache: Cache,
    slots: Slots,
    stops: StopTable,
    exit_after: Int[Array, ""],
    *,
    steps: int,
) -> tuple[Cache, Decoded]:
    """Sample up to `steps` tokens in every active slot; return the new cache and the tokens.

    The call ends after `exit_after` sequences have ended, so that their slots can be refilled.
    """
    num_slots = slots.lengths.shape[0]
    started = jnp.sum(slots.active)

    def unfinished(carry: _DecodeCarry) -> Bool[Array, ""]:
        active = jnp.sum(carry.slots.active)
        return (carry.step < steps) & (active > 0) & (started - active < exit_after)

    def advance(carry: _DecodeCarry) -> _DecodeCarry:
        slots, active = carry.slots, carry.slots.active
        positions = jnp.where(active, slots.lengths, PADDING)
        inputs = Tokens(slots.last_tokens[:, None], jnp.arange(num_slots), positions[:, None])
        activations, cache = model.run(inputs, carry.cache, all_slots=True)
        logits = einsum_in_float32("se,ev->sv", activations[:, 0], model.lm_head.array)
        tokens, logprobs = draw(logits, slots.temperatures, _uniform(slots.keys, slots.lengths))
        stop_states = jnp.asarray(stops.next_states)[slots.stop_states, jnp.asarray(stops.classes)[tokens]]
        stop_states = jnp.where(active, stop_states, slots.stop_states)
        remaining = slots.remaining - active
        return _DecodeCarry(
            carry.step + 1,
            cache,
            slots._replace(
                active=active & (remaining > 0) & (stop_states != ENDED),
                lengths=slots.lengths + active,
                last_tokens=jnp.where(active, tokens, slots.last_tokens),
                stop_states=stop_states,
                remaining=remaining,
            ),
            Decoded(
                carry.decoded.tokens.at[carry.step].set(jnp.where(active, tokens, -1)),
                carry.decoded.logprobs.at[carry.step].set(logprobs),
                stop_states,
            ),
        )

    start = Decoded(
        jnp.full((steps, num_slots), -1, jnp.int32), jnp.zeros((steps, num_slots)), jnp.asarray(slots.stop_states)
    )
    end = jax.lax.while_loop(unfinished, advance, _DecodeCarry(jnp.zeros((), jnp.int32), cache, slots, start))
    return end.cache, end.decoded


def draw(
    logits: Float[Array, "slots vocab"], temperatures: Float[Array, " slots"], uniforms: Float[Array, " slots"]
) -> tuple[Int[Array, " slots"], Float[Array, " slots"]]:
    """Draw a token from `softmax(logits / temperature)` by inversion of its cumulative distribution.

    The inversion has two levels, a block of tokens and a token in it, so that sums of float32 stay short. At
    temperature 0 the most probable token is chosen. `uniforms` are numbers in [0, 1). The log-probabilities of the
    tokens are at temperature 1 if greedy.
    """
    rows, vocab = logits.shape
    block = _SMALL_BLOCK if vocab <= _SMALL_BLOCK**2 else _LARGE_BLOCK
    # Differences first: at low temperatures the rounding error of a quotient is large.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(temperatures > 0, temperatures, 1.0)[:, None]
    padded = jnp.pad(scaled, ((0, 0), (0, -vocab % block)), constant_values=-jnp.inf)
    weights = jnp.exp(padded).reshape(rows, -1, block)
    block_weights = weights.sum(axis=-1)
    sums = jnp.cumsum(block_weights, axis=-1)
    targets = uniforms * sums[:, -1]
    blocks = _first_above(targets, sums, block_weights)
    before = jnp.where(blocks > 0, _pick(sums, blocks - 1), 0.0)
    inside = jnp.take_along_axis(weights, blocks[:, None, None], axis=1)[:, 0]
    offsets = _first_above(targets - before, jnp.cumsum(inside, axis=-1), inside)
    tokens = jnp.where(temperatures > 0, blocks * block + offsets, _first_zero(scaled))
    return tokens, _pick(scaled, tokens) - jnp.log(sums[:, -1])


def _first_above(
    targets: Float[Array, " rows"], sums: Float[Array, "rows columns"], weights: Float[Array, "rows columns"]
) -> Int[Array, " rows"]:
    """Return the first column with a positive weight whose cumulative sum is above the target; the last if none is.

    XLA adds long rows as a tree, so rounding may raise or lower the cumulative sum at a weight of 0.
    """
    columns, positive = jnp.arange(sums.shape[-1]), weights > 0
    first = jnp.min(jnp.where(positive & (sums > targets[:, None]), columns, sums.shape[-1]), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(positive, columns, 0), axis=-1))


def _first_zero(array: Float[Array, "rows columns"]) -> Int[Array, " rows"]:
    """Return the first column with 0; the last if there is none.

    On differences to the maximum this is `jnp.argmax`, which XLA does not vectorize on a CPU.
    """
    columns = array.shape[-1]
    return jnp.min(jnp.where(array == 0, jnp.arange(columns), columns - 1), axis=-1)


def _pick(array: Float[Array, "rows columns"], index: Int[Array, " rows"]) -> Float[Array, " rows"]:
    return jnp.take_along_axis(array, index[:, None], axis=1, mode="clip")[:, 0]


def _uniform(keys: UInt32[Array, "slots 2"], counters: Int[Array, " slots"]) -> Float[Array, " slots"]:
    """Return a number in [0, 1) for each slot, a function of its key and counter."""

    def one(key: Array, counter: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), counter))

    return jax.vmap(one)(keys, counters)


class SamplerPrograms(NamedTuple):
    """The compiled programs; with a trainer, each data shard of its mesh has its own slots.

    `decode` returns the cache and the fields of `Decoded`.
    """

    prepare: Callable[[LmHeadModel], CachedModel]
    empty: Callable[[], Cache]
    prefill: Callable[[ModelArrays, Cache, Tokens], Cache]
    copy_slots: Callable[..., Cache]
    decode: Callable[..., tuple[Cache, tuple[jax.Array, jax.Array, jax.Array]]]


@jax.jit
def recorded_experts(cache: Cache, slot: Int[Array, ""]) -> UInt[Array, "context layers top"]:
    """Return the chosen experts of the tokens in a slot, from a cache that has them."""
    return cache[-1][0][slot]


def compile_programs(trainer: TrainerConfig | None, model: LmConfig, sizes: SamplerSizes) -> SamplerPrograms:
    """Return the programs; each is compiled at its first call, once per process for equal arguments.

    Without `trainer`, programs use one device and the model's precision.
    """
    axes, mixture = sizes.cache_axes(model), mixture_shape(model)
    dtypes, steps = (sizes.dtype, None if mixture is None else mixture.dtype), sizes.decode_steps
    if trainer is None:
        return _programs(None, None, (), None, axes, sizes.form, sizes.context, dtypes, steps)
    learners = (BATCH, POSITION)
    mapping = {name: axes for name, axes in trainer.compute_axis_mapping.items() if name not in learners}
    batch_axes = trainer.compute_axis_mapping[BATCH]
    return _programs(
        sizes.mesh, _entries(mapping), batch_axes, trainer.mp, axes, sizes.form, sizes.context, dtypes, steps
    )


_Mapping = tuple[tuple[str, str | tuple[str, ...]], ...]
"""A resource mapping that can be hashed."""


def conversion_program(
    trainer: TrainerConfig, form: AttentionForm, context: int
) -> Callable[[LmHeadModel], CachedModel]:
    """Return the program that converts weights to the layout for decoding, sharded as the learner's parameters are.

    It runs on the learner's mesh. Copies of its result to each host never need memory for two layouts.
    """
    return _conversion(trainer.device_mesh, trainer.mp, _entries(trainer.parameter_axis_mapping), form, context)


@functools.cache
def _conversion(
    mesh: jax.sharding.Mesh, precision: jmp.Policy, mapping: _Mapping, form: AttentionForm, context: int
) -> Callable[[LmHeadModel], CachedModel]:
    """`mesh` is a part of the cache key; the program runs under the current mesh."""

    def convert(model: LmHeadModel) -> CachedModel:
        return shard(with_cache(precision.cast_to_compute(model), form, context), dict(mapping))

    return jax.jit(convert)


def _entries(mapping: ResourceMapping) -> _Mapping:
    return tuple((name, axes if isinstance(axes, str) else tuple(axes)) for name, axes in mapping.items())


@functools.cache
def _programs(
    mesh: jax.sharding.Mesh | None,
    mapping: _Mapping | None,
    batch_axes: tuple[str, ...],
    precision: jmp.Policy | None,
    axes: tuple[CacheAxes, ...],
    form: AttentionForm,
    context: int,
    dtypes: tuple[jnp.dtype, jnp.dtype | None],
    steps: int,
) -> SamplerPrograms:
    """`mesh` is a part of the cache key; the programs run under the current mesh."""

    def run_prefill(weights: ModelArrays, *arguments: Any) -> Cache:
        return prefill(weights.model, *arguments)

    def run_decode(weights: ModelArrays, *arguments: Any) -> tuple[Cache, tuple[jax.Array, ...]]:
        cache, decoded = decode(weights.model, *arguments, steps=steps)
        return cache, tuple(decoded)

    if mapping is None:
        return SamplerPrograms(
            jax.jit(functools.partial(with_cache, form=form, context=context)),
            jax.jit(functools.partial(empty_cache, axes, *dtypes)),
            jax.jit(run_prefill, donate_argnums=1),
            jax.jit(copy_slots, donate_argnums=0),
            jax.jit(run_decode, donate_argnums=1),
        )
    axis_mapping = dict(mapping)
    by_slot, whole, by_step_and_slot = PartitionSpec(batch_axes), PartitionSpec(), PartitionSpec(None, batch_axes)

    def per_shard(
        function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any, donate: int
    ) -> Callable[..., Any]:
        # Traces show the name of the function.
        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            with hax.axis_mapping(axis_mapping):
                return function(*arguments)

        mapped = jax.shard_map(run, in_specs=inputs, out_specs=outputs, axis_names=set(batch_axes), check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

    def prepare(model: LmHeadModel) -> CachedModel:
        assert precision is not None
        with hax.axis_mapping(axis_mapping):
            return with_cache(shard(precision.cast_to_compute(model), axis_mapping), form, context)

    def empty() -> Cache:
        with hax.axis_mapping({**axis_mapping, "slot": batch_axes}):
            return empty_cache(axes, *dtypes)

    return SamplerPrograms(
        jax.jit(prepare),
        jax.jit(empty),
        per_shard(run_prefill, (whole, by_slot, by_slot), by_slot, 1),
        per_shard(copy_slots, (by_slot, by_slot, by_slot, by_slot), by_slot, 0),
        per_shard(
            run_decode,
            (whole, by_slot, by_slot, whole, whole),
            (by_slot, (by_step_and_slot, by_step_and_slot, by_slot)),
            1,
        ),
    )
