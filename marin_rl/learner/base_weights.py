# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Identity of the base of an adapter: a fingerprint of its weights, which checkpoints hold instead of the weights."""

import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
from levanter.models.lm_model import LmHeadModel

from marin_rl.utils import multihost
from marin_rl.utils.devices.arrays import named_arrays
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.errors import UserError

SEEDS = (0x9E3779B9, 0x7F4A7C15)
"""Each adds 32 bits for every array."""


class OtherBaseError(UserError):
    """An adapter was trained on other weights than those in `initialize_from`."""


def fingerprint(model: LmHeadModel, trainer: TrainerConfig) -> str:
    """Return a fingerprint of the names, types, shapes and bits of all arrays; collective over all processes.

    Every element is mixed with its index, and the results are added modulo 2³². So the devices compute it where the
    weights are, and it does not depend on their sharding. It detects other weights, and is no protection from an
    attacker. `trainer` has the mesh of the weights.
    """
    arrays = named_arrays(model)
    with trainer.use_device_mesh():
        sums = multihost.fetch(_sums(list(arrays.values())))
    described = [
        (name, array.dtype.name, list(array.shape), values.tolist())
        for (name, array), values in zip(arrays.items(), sums, strict=True)
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


@jax.jit
def _sums(arrays: list[jax.Array]) -> jax.Array:
    """Return the sums of each array, one for each seed: `[array, seed]`."""
    return jnp.stack([jnp.stack([_sum(array, seed) for seed in SEEDS]) for array in arrays])


def _sum(array: jax.Array, seed: int) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    index = jnp.full((), seed, jnp.uint32)
    for axis in range(array.ndim):
        stride = jnp.uint32(math.prod(array.shape[axis + 1 :]) % 2**32)
        index = index + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * stride
    return jnp.sum(_mix(bits ^ _mix(index)), dtype=jnp.uint32)


def _mix(word: Any) -> Any:
    """Mix the bits of 32-bit words, each bit of the result with every bit of the word (the end of MurmurHash3)."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def check_base(saved: str, found: str, source: str) -> None:
    """Check that the base is the one on which an adapter was trained.

    `saved` is the fingerprint in the checkpoint, empty if it has no adapter, and `found` that of the weights now.
    `source` is `initialize_from`, for the message.

    Raises:
        OtherBaseError: if they differ.
    """
    if saved != found:
        raise OtherBaseError(
            f"initialize_from {source!r} has other weights (fingerprint {found[:12]}) than those on which the adapter "
            f"was trained ({saved[:12]}); restore them, or start another run with --run_dir NEW"
        )
