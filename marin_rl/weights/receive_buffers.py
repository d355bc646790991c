# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Host memory for received pieces, which are written directly into the target arrays if possible.

The share of a training host in an array usually consists of rows of equal length and stride. A piece holds the bytes of
these rows in order, so its chunks can be written to the target array without an intermediate copy.
"""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from marin_rl.weights.bounds import Bounds, overlap, shape_of, slices_within, volume
from marin_rl.weights.manifest import Piece
from marin_rl.weights.plan import PieceKey, Plan, TargetArray

ALIGNMENT = 64
"""Alignment in bytes with which the CPU backend uses host memory as an array without a copy."""


class ReceiveBuffers:
    """Memory for all pieces of a plan. Several threads may write different pieces."""

    def __init__(self, plan: Plan) -> None:
        """Allocate the memory.

        Args:
            plan: The plan to allocate for.
        """
        self._rows: dict[PieceKey, np.ndarray] = {}
        self._boxes: dict[tuple[str, Bounds], np.ndarray] = {}
        self._separate: dict[PieceKey, np.ndarray] = {}
        for name, target in plan.targets.items():
            for box in target.boxes():
                pieces = plan.pieces[name].items()
                self._assign(name, target, box, {key: piece for key, piece in pieces if overlap(piece.bounds, box)})
        for pieces in plan.pieces.values():
            for key in pieces.keys() - self._rows.keys():
                self._separate[key] = _aligned_empty(pieces[key].num_bytes)
                self._rows[key] = self._separate[key].reshape(1, -1)

    def _assign(self, name: str, target: TargetArray, box: Bounds, pieces: Mapping[PieceKey, Piece]) -> None:
        """Write pieces directly into a box if they tile it without overlap."""
        inside = all(overlap(piece.bounds, box) == piece.bounds for piece in pieces.values())
        same_dtype = all(jnp.dtype(piece.dtype) == target.dtype for piece in pieces.values())
        # The plan guarantees that the pieces cover the box.
        if not (inside and same_dtype and sum(volume(piece.bounds) for piece in pieces.values()) == volume(box)):
            return
        memory = _aligned_empty(volume(box) * target.dtype.itemsize)
        by_bytes = memory.reshape(*shape_of(box), target.dtype.itemsize)
        try:
            rows = {key: _rows(by_bytes[slices_within(piece.bounds, box)], piece, box) for key, piece in pieces.items()}
        except ValueError:
            # A piece that is cut along several dimensions has rows with several strides.
            return
        self._rows |= rows
        self._boxes[name, box] = memory.view(target.dtype).reshape(shape_of(box))

    def write(self, key: PieceKey, start: int, data: np.ndarray) -> None:
        """Write bytes of a piece.

        Args:
            key: The piece.
            start: Offset of the first byte within the piece.
            data: The bytes, uint8.
        """
        rows = self._rows[key]
        length = rows.shape[1]
        row, column = divmod(start, length)
        # The rest of a partial row, complete rows, and the start of another row.
        head = min(length - column, len(data)) if column else 0
        whole = (len(data) - head) // length
        first, tail = row + bool(column), head + whole * length
        if head:
            rows[row, column : column + head] = data[:head]
        rows[first : first + whole] = data[head:tail].reshape(whole, length)
        if tail < len(data):
            rows[first + whole, : len(data) - tail] = data[tail:]

    def box(self, name: str, box: Bounds) -> np.ndarray | None:
        """Return a box of an array if its pieces were written directly into it, otherwise None."""
        return self._boxes.get((name, box))

    def separate_piece(self, key: PieceKey) -> np.ndarray | None:
        """Return the bytes of a piece with separate memory; None if it was written into an array."""
        return self._separate.get(key)


def _rows(part: np.ndarray, piece: Piece, box: Bounds) -> np.ndarray:
    """Return a view `[row, byte]` of the memory of a piece; raise ValueError if its rows have several strides."""
    cut = [
        dimension for dimension, (own, all_of_it) in enumerate(zip(piece.bounds, box, strict=True)) if own != all_of_it
    ]
    length = math.prod(part.shape[cut[-1] if cut else 0 :])
    return part.reshape(-1, length, copy=False)


def _aligned_empty(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]
