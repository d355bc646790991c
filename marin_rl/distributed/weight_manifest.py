# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The manifest of one version of the weights on one training host, and the errors of a transfer.

A manifest lists boxes of arrays, which are sent in chunks. TLS protects the bytes on the way; a receiver compares their
number with the manifest.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pydantic

from marin_rl.types import WeightVersion
from marin_rl.utils.devices.boxes import Bounds, volume
from marin_rl.utils.errors import UserError


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
