# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From what has landed to arrays on the receiver's devices."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.weights.bounds import Bounds, bounds_of, overlap, shape_of, slices_within, whole
from marin_rl.weights.errors import MismatchedWeightsError
from marin_rl.weights.plan import Plan, Wanted
from marin_rl.weights.receive_buffers import ReceiveBuffers
from marin_rl.weights.tree import replace_leaves

T = TypeVar("T")


def assemble(like: T, plan: Plan, landing: ReceiveBuffers) -> T:
    """Put what was fetched on the receiver's devices.

    Args:
        like: gives the tree its structure and everything that is no array.
        plan: what was fetched.
        landing: has all its bytes; nobody writes to them any more.

    Raises:
        MismatchedWeightsError: if two pieces hold different values for the same place.
    """
    arrays = {}
    for name, want in plan.wanted.items():
        parts = {
            piece.bounds: data.view(jnp.dtype(piece.dtype)).reshape(shape_of(piece.bounds))
            for key, piece in plan.pieces[name].items()
            if (data := landing.apart(key)) is not None
        }
        _check_contradictions(name, parts)
        arrays[name] = _place(name, want, landing, parts)
    return replace_leaves(like, arrays)


def _check_contradictions(name: str, parts: Mapping[Bounds, np.ndarray]) -> None:
    boxes = list(parts)
    for number, left in enumerate(boxes):
        for right in boxes[:number]:
            shared = overlap(left, right)
            if shared is None:
                continue
            both = [np.ascontiguousarray(parts[box][slices_within(shared, box)]) for box in (left, right)]
            if both[0].tobytes() != both[1].tobytes():
                where = [f"{start}:{stop}" for start, stop in shared]
                raise MismatchedWeightsError(f"two pieces of {name} hold different values at {where}")


def _place(
    name: str, want: Wanted, landing: ReceiveBuffers, parts: Mapping[Bounds, np.ndarray]
) -> jax.Array | np.ndarray:
    filled: dict[Bounds, np.ndarray] = {}
    for box in want.boxes():
        landed = landing.box(name, box)
        filled[box] = _fill(box, want.dtype, parts) if landed is None else landed
    if want.sharding is None:
        return filled[whole(want.shape)]

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return filled[bounds_of(index, want.shape)]

    return jax.make_array_from_callback(want.shape, want.sharding, part, dtype=want.dtype)


def _fill(box: Bounds, dtype: np.dtype, parts: Mapping[Bounds, np.ndarray]) -> np.ndarray:
    filled = np.empty(shape_of(box), dtype)
    for bounds, part in parts.items():
        shared = overlap(bounds, box)
        if shared is not None:
            filled[slices_within(shared, box)] = part[slices_within(shared, bounds)]
    return filled
