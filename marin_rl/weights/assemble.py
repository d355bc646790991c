# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Assemble received pieces into arrays on the receiver's devices."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.weights.bounds import Bounds, bounds_of, overlap, shape_of, slices_within, whole
from marin_rl.weights.errors import MismatchedWeightsError
from marin_rl.weights.plan import Plan, TargetArray
from marin_rl.weights.receive_buffers import ReceiveBuffers
from marin_rl.weights.tree import replace_leaves

T = TypeVar("T")


def assemble(like: T, plan: Plan, buffers: ReceiveBuffers) -> T:
    """Place the received arrays on the receiver's devices.

    Args:
        like: Tree with the structure and the non-array leaves of the result.
        plan: The plan that was fetched.
        buffers: Buffers with all bytes of the plan; no further writes are allowed.

    Returns:
        `like` with the received arrays.

    Raises:
        MismatchedWeightsError: If two pieces hold different values for the same elements.
    """
    arrays = {}
    for name, target in plan.targets.items():
        parts = {
            piece.bounds: data.view(jnp.dtype(piece.dtype)).reshape(shape_of(piece.bounds))
            for key, piece in plan.pieces[name].items()
            if (data := buffers.separate_piece(key)) is not None
        }
        _check_overlaps_agree(name, parts)
        arrays[name] = _place(name, target, buffers, parts)
    return replace_leaves(like, arrays)


def _check_overlaps_agree(name: str, parts: Mapping[Bounds, np.ndarray]) -> None:
    boxes = list(parts)
    for number, left in enumerate(boxes):
        for right in boxes[:number]:
            shared = overlap(left, right)
            if shared is None:
                continue
            both = [np.ascontiguousarray(parts[box][slices_within(shared, box)]) for box in (left, right)]
            if both[0].tobytes() != both[1].tobytes():
                indices = [f"{start}:{stop}" for start, stop in shared]
                raise MismatchedWeightsError(f"two pieces of {name} hold different values at {indices}")


def _place(
    name: str, target: TargetArray, buffers: ReceiveBuffers, parts: Mapping[Bounds, np.ndarray]
) -> jax.Array | np.ndarray:
    filled: dict[Bounds, np.ndarray] = {}
    for box in target.boxes():
        received = buffers.box(name, box)
        filled[box] = _fill(box, target.dtype, parts) if received is None else received
    if target.sharding is None:
        return filled[whole(target.shape)]

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return filled[bounds_of(index, target.shape)]

    return jax.make_array_from_callback(target.shape, target.sharding, part, dtype=target.dtype)


def _fill(box: Bounds, dtype: np.dtype, parts: Mapping[Bounds, np.ndarray]) -> np.ndarray:
    filled = np.empty(shape_of(box), dtype)
    for bounds, part in parts.items():
        shared = overlap(bounds, box)
        if shared is not None:
            filled[slices_within(shared, box)] = part[slices_within(shared, bounds)]
    return filled
