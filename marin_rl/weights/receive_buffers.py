# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Where pieces are written as they arrive: into the arrays that are wanted, wherever that can be.

A training host's share of an array lies within the array as rows of one length, one distance apart. A piece is the
bytes of these rows, one after the other, so it is written where it belongs without a copy of its own.
"""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from marin_rl.weights.bounds import Bounds, overlap, shape_of, slices_within, volume
from marin_rl.weights.manifest import Piece
from marin_rl.weights.plan import PieceKey, Plan, Wanted

ALIGNMENT = 64
"""Bytes. The CPU backend takes host memory as an array without a copy where it is aligned so."""


class ReceiveBuffers:
    """Memory for all that a plan fetches. Pieces may be written from several threads."""

    def __init__(self, plan: Plan) -> None:
        """Set memory aside; nothing is written yet.

        Args:
            plan: what is fetched.
        """
        self._rows: dict[PieceKey, np.ndarray] = {}
        self._boxes: dict[tuple[str, Bounds], np.ndarray] = {}
        self._apart: dict[PieceKey, np.ndarray] = {}
        for name, want in plan.wanted.items():
            for box in want.boxes():
                pieces = plan.pieces[name].items()
                self._land(name, want, box, {key: piece for key, piece in pieces if overlap(piece.bounds, box)})
        for pieces in plan.pieces.values():
            for key in pieces.keys() - self._rows.keys():
                self._apart[key] = _aligned_empty(pieces[key].num_bytes)
                self._rows[key] = self._apart[key].reshape(1, -1)

    def _land(self, name: str, want: Wanted, box: Bounds, pieces: Mapping[PieceKey, Piece]) -> None:
        """Have pieces written into a box, if they fill it and each place belongs to one of them."""
        inside = all(overlap(piece.bounds, box) == piece.bounds for piece in pieces.values())
        as_wanted = all(jnp.dtype(piece.dtype) == want.dtype for piece in pieces.values())
        # They cover the box, as the plan has made sure.
        if not (inside and as_wanted and sum(volume(piece.bounds) for piece in pieces.values()) == volume(box)):
            return
        memory = _aligned_empty(volume(box) * want.dtype.itemsize)
        by_bytes = memory.reshape(*shape_of(box), want.dtype.itemsize)
        try:
            rows = {key: _rows(by_bytes[slices_within(piece.bounds, box)], piece, box) for key, piece in pieces.items()}
        except ValueError:
            # Cut along several dimensions, its rows are at several distances.
            return
        self._rows |= rows
        self._boxes[name, box] = memory.view(want.dtype).reshape(shape_of(box))

    def write(self, key: PieceKey, start: int, data: np.ndarray) -> None:
        """Put bytes where they belong.

        Args:
            key: the piece.
            start: the first byte, within the piece.
            data: uint8.
        """
        rows = self._rows[key]
        length = rows.shape[1]
        row, column = divmod(start, length)
        # The rest of a row that was begun, whole rows, and the beginning of another.
        head = min(length - column, len(data)) if column else 0
        whole = (len(data) - head) // length
        first, tail = row + bool(column), head + whole * length
        if head:
            rows[row, column : column + head] = data[:head]
        rows[first : first + whole] = data[head:tail].reshape(whole, length)
        if tail < len(data):
            rows[first + whole, : len(data) - tail] = data[tail:]

    def box(self, name: str, box: Bounds) -> np.ndarray | None:
        """A part of an array that was written as it is wanted; None where pieces are apart."""
        return self._boxes.get((name, box))

    def apart(self, key: PieceKey) -> np.ndarray | None:
        """The bytes of a piece that has memory of its own; None where it was written into an array."""
        return self._apart.get(key)


def _rows(part: np.ndarray, piece: Piece, box: Bounds) -> np.ndarray:
    """The piece's place as `[row, byte]`, a view; ValueError where there is none."""
    cut = [
        dimension for dimension, (own, all_of_it) in enumerate(zip(piece.bounds, box, strict=True)) if own != all_of_it
    ]
    length = math.prod(part.shape[cut[-1] if cut else 0 :])
    return part.reshape(-1, length, copy=False)


def _aligned_empty(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]
