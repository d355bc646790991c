# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Manifest of the pieces of one version on one training host, in chunks with checksums."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import xxhash

from marin_rl.types import WeightVersion
from marin_rl.weights.bounds import Bounds, overlap, volume, whole
from marin_rl.weights.errors import CorruptTransferError

MAX_CHUNK_BYTES = 64 * 2**20
"""Maximum chunk size, far below the message limit of Arrow and gRPC, 2 GiB."""


def checksum(data: np.ndarray) -> int:
    """Return the 64-bit XXH3 of uint8 data: ten times as fast as CRC-32, and not cryptographic either."""
    return xxhash.xxh3_64_intdigest(data.data)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of one array, sent in row-major order and in chunks."""

    name: str
    """Key path of the array in the tree."""
    shape: tuple[int, ...]
    """Shape of the complete array."""
    dtype: str
    """Name of the dtype during the transfer."""
    bounds: Bounds
    """The box of the array."""
    checksums: tuple[int, ...]
    """Checksum of each chunk, in order."""

    def __post_init__(self) -> None:
        if overlap(self.bounds, whole(self.shape)) != self.bounds and volume(self.bounds):
            raise ValueError(f"{self} is outside the array, which has shape {self.shape}")

    @property
    def num_bytes(self) -> int:
        """Total size of all chunks."""
        return volume(self.bounds) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"piece {[f'{start}:{stop}' for start, stop in self.bounds]} of {self.name}"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A contiguous byte range of a piece."""

    piece: int
    """Index into `Manifest.pieces`."""
    number: int
    """Index into `Piece.checksums`."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of the pieces of one version on one training host."""

    version: WeightVersion
    """Version of the weights."""
    host: int
    """Index of the training host, from 0."""
    hosts: int
    """Number of training hosts."""
    chunk_bytes: int
    """Chunk size; the last chunk of a piece may be shorter."""
    pieces: tuple[Piece, ...]
    """Pieces in file order."""

    def chunks(self, piece: int) -> list[Chunk]:
        """Return the chunks of a piece, in order."""
        return [Chunk(piece, number) for number in range(len(self.pieces[piece].checksums))]

    @property
    def num_chunks(self) -> int:
        """Number of chunks of all pieces."""
        return sum(len(piece.checksums) for piece in self.pieces)

    def has(self, chunk: Chunk) -> bool:
        """Return whether the chunk exists."""
        return 0 <= chunk.piece < len(self.pieces) and 0 <= chunk.number < len(self.pieces[chunk.piece].checksums)

    def span(self, chunk: Chunk) -> tuple[int, int]:
        """Return the start and stop offset of a chunk within its piece."""
        start = chunk.number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.pieces[chunk.piece].num_bytes)

    def check(self, chunk: Chunk, data: np.ndarray, source: str) -> None:
        """Check received bytes against length and checksum.

        Args:
            chunk: The expected chunk.
            data: The received bytes.
            source: Name of the sender, for error messages.

        Raises:
            CorruptTransferError: If length or checksum differ.
        """
        piece = self.pieces[chunk.piece]
        start, stop = self.span(chunk)
        label = f"{source}: chunk {chunk.number} of {piece}, version {self.version},"
        if len(data) != stop - start:
            raise CorruptTransferError(f"{label} has {len(data)} bytes instead of {stop - start}")
        if checksum(data) != piece.checksums[chunk.number]:
            raise CorruptTransferError(f"{label} fails its checksum")

    def to_json(self) -> bytes:
        """Encode the manifest for transfer and storage."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_json(text: bytes) -> "Manifest":
        """Decode a manifest from `to_json`.

        Raises:
            ValueError: If the text is not a manifest.
        """
        try:
            fields = json.loads(text)
            pieces = tuple(
                Piece(
                    name=piece["name"],
                    shape=tuple(piece["shape"]),
                    dtype=piece["dtype"],
                    bounds=tuple((start, stop) for start, stop in piece["bounds"]),
                    checksums=tuple(piece["checksums"]),
                )
                for piece in fields.pop("pieces")
            )
            return Manifest(pieces=pieces, **fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"invalid manifest of weights: {error}") from error
