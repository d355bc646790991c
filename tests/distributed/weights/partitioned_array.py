# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An array that is partitioned over training hosts."""

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.distributed.weights.fetch import PieceKey, assemble, choose_pieces, target_arrays
from marin_rl.distributed.weights.manifest import Bounds, Manifest, Piece, checksum

FULL = np.arange(24, dtype=np.float32).reshape(6, 4)
LIKE = {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32)}
NAME = "['w']"


def box(*edges: tuple[int, int]) -> Bounds:
    return edges


class Hosts:
    """Return snapshots of training hosts that each have some boxes of one array."""

    def __init__(self, *boxes: list[Bounds]) -> None:
        self.parts = [[FULL[tuple(slice(*edge) for edge in bounds)].copy() for bounds in held] for held in boxes]
        self.boxes = boxes

    @property
    def manifests(self) -> list[Manifest]:
        return [
            Manifest(
                1,
                host,
                len(self.boxes),
                2**20,
                tuple(
                    Piece(NAME, (6, 4), "float32", bounds, (checksum(part.reshape(-1).view(np.uint8)),))
                    for bounds, part in zip(held, parts, strict=True)
                ),
            )
            for host, (held, parts) in enumerate(zip(self.boxes, self.parts, strict=True))
        ]

    def plan(self, *, cast: bool = False, like=LIKE) -> dict[str, dict[PieceKey, Piece]]:
        return choose_pieces(target_arrays(like), self.manifests, cast=cast)

    def assembled(self, like=LIKE, *, cast: bool = False) -> jax.Array | np.ndarray:
        """Return the array that is assembled from the chosen pieces."""
        pieces = self.plan(like=like, cast=cast)[NAME]
        held = [
            (piece, self.parts[key.manifest][key.piece].reshape(-1).view(np.uint8)) for key, piece in pieces.items()
        ]
        return assemble(target_arrays(like)[NAME], held)
