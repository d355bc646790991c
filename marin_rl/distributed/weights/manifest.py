# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The manifest of one version of the weights on one training host, and the errors of a transfer.

A manifest lists boxes of arrays, which are sent in chunks. TLS protects the bytes on the way; a receiver compares their
number with the manifest.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from marin_rl.types import WeightVersion
from marin_rl.utils.errors import UserError

T = TypeVar("T")
Array = jax.Array | np.ndarray

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each dimension; `()` for an array without dimensions."""


class WeightTransferError(UserError):
    """Raised when weights do not arrive; the message names the server and the reason."""


class WrongSecretError(WeightTransferError):
    """Raised when the server has a different secret. Never retried."""


class MismatchedWeightsError(WeightTransferError):
    """Raised when published weights do not fit the receiver's model: a wrong or missing name, shape, dtype or piece.

    Never retried.
    """


class VersionGoneError(WeightTransferError):
    """Raised when a version is dropped during its transfer. Retried with the newest version."""


class NoWeightsError(WeightTransferError):
    """Raised when no version is available on all servers yet."""


class CorruptTransferError(WeightTransferError):
    """Raised for missing, surplus or corrupt bytes. Retried."""


class WeightServerLostError(WeightTransferError):
    """Raised when a server does not respond or disconnects during a transfer. Retried."""


def bounds_of(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
    """Return the box that an index of slices without steps selects.

    >>> bounds_of((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def whole(shape: Sequence[int]) -> Bounds:
    """Return the box of a complete array."""
    return tuple((0, size) for size in shape)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in bounds)


def volume(bounds: Bounds) -> int:
    """Return the number of elements in a box."""
    return math.prod(shape_of(bounds))


def overlap(left: Bounds, right: Bounds) -> Bounds | None:
    """Return the intersection of two boxes of one array, or None if it is empty.

    >>> overlap(((0, 4), (0, 2)), ((2, 8), (1, 5)))
    ((2, 4), (1, 2))
    >>> overlap(((0, 2),), ((2, 4),)) is None
    True
    """
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def slices_within(part: Bounds, box: Bounds) -> tuple[slice, ...]:
    """Return the index of `part` within an array that covers only `box`.

    >>> slices_within(((2, 4),), ((1, 5),))
    (slice(1, 3, None),)
    """
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True))


def find_gap(target: Bounds, held: Sequence[Bounds]) -> Bounds | None:
    """Return a box inside `target` that no box of `held` covers, or None if `target` is covered.

    >>> find_gap(((0, 4), (0, 2)), [((0, 4), (0, 1)), ((0, 2), (1, 2))])
    ((2, 4), (1, 2))
    """
    if volume(target) == 0:
        return None
    parts = [part for box in held if (part := overlap(target, box)) is not None]
    # A cell between neighbouring cuts is either fully covered or not covered at all.
    cuts = [
        sorted({*edges, *(edge for part in parts for edge in part[dimension])})
        for dimension, edges in enumerate(target)
    ]
    covered = np.zeros([len(edges) - 1 for edges in cuts], dtype=bool)
    for part in parts:
        covered[tuple(slice(c.index(a), c.index(b)) for c, (a, b) in zip(cuts, part, strict=True))] = True
    if covered.all():
        return None
    cell = np.argwhere(~covered)[0]
    return tuple((edges[at], edges[at + 1]) for edges, at in zip(cuts, cell, strict=True))


@dataclasses.dataclass(frozen=True)
class ArrayPiece:
    """A box of one array, sent in row-major order and in chunks."""

    name: str
    """Key path of the array in the tree."""
    shape: tuple[int, ...]
    """Shape of the complete array."""
    dtype: str
    """Name of the dtype during the transfer."""
    bounds: Bounds
    """The box of the array."""

    @property
    def num_bytes(self) -> int:
        """Total size of all chunks."""
        return volume(self.bounds) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"piece {[f'{start}:{stop}' for start, stop in self.bounds]} of {self.name}"


class Chunk(NamedTuple):
    """A contiguous byte range of a piece."""

    piece: int
    """Index into `Manifest.pieces`."""
    number: int
    """Index of the chunk within its piece."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of the pieces of one version on one training host."""

    version: WeightVersion
    """Version of the weights."""
    chunk_bytes: int
    """Chunk size; the last chunk of a piece may be shorter."""
    pieces: tuple[ArrayPiece, ...]
    """The pieces, in the order of the arrays."""

    def num_chunks(self, piece: int) -> int:
        """Return the number of chunks of a piece."""
        return -(-self.pieces[piece].num_bytes // self.chunk_bytes)

    def chunks(self, piece: int) -> list[Chunk]:
        """Return the chunks of a piece, in order."""
        return [Chunk(piece, number) for number in range(self.num_chunks(piece))]

    def has(self, chunk: Chunk) -> bool:
        """Return whether the chunk exists."""
        return 0 <= chunk.piece < len(self.pieces) and 0 <= chunk.number < self.num_chunks(chunk.piece)

    def span(self, chunk: Chunk) -> tuple[int, int]:
        """Return the start and stop offset of a chunk within its piece."""
        start = chunk.number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.pieces[chunk.piece].num_bytes)

    def encode(self) -> bytes:
        """Encode the manifest as JSON."""
        return _JSON.dump_json(self)

    @staticmethod
    def decode(text: bytes, source: str) -> "Manifest":
        """Decode a manifest from `encode`; errors name the sender, `source`.

        Raises:
            CorruptTransferError: if the text is not a manifest.
        """
        try:
            return _JSON.validate_json(text, strict=True)
        except pydantic.ValidationError as error:
            raise CorruptTransferError(f"{source}: the manifest ({len(text)} bytes) is corrupt: {error}") from error


_JSON = pydantic.TypeAdapter(Manifest)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The pieces of one version on one training host."""

    manifest: Manifest
    """Description of the pieces."""
    data: tuple[np.ndarray, ...]
    """Bytes of each piece: uint8, `[num_bytes]`."""

    def chunk(self, chunk: Chunk) -> np.ndarray:
        """Return a view of the bytes of a chunk."""
        start, stop = self.manifest.span(chunk)
        return self.data[chunk.piece][start:stop]
