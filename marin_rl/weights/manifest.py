# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a training host holds of one version: its pieces, in chunks with checksums."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import xxhash

from marin_rl.types import WeightVersion
from marin_rl.weights.bounds import Bounds, overlap, volume, whole
from marin_rl.weights.errors import CorruptTransferError

MAX_CHUNK_BYTES = 64 * 2**20
"""The longest chunk: far below the 2 GiB that Arrow and gRPC allow one message."""


def checksum(data: np.ndarray) -> int:
    """XXH3 (64 bits) of uint8 data. It is ten times as fast as CRC-32 and, like it, no protection against intent."""
    return xxhash.xxh3_64_intdigest(data.data)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of one array, as its bytes travel: row-major, in chunks."""

    name: str
    """The array's key path in the tree."""
    shape: tuple[int, ...]
    """Shape of the complete array."""
    dtype: str
    """Name of the dtype that travels."""
    bounds: Bounds
    """Which box of the array it is."""
    checksums: tuple[int, ...]
    """Checksum of each chunk, in order."""

    def __post_init__(self) -> None:
        if overlap(self.bounds, whole(self.shape)) != self.bounds and volume(self.bounds):
            raise ValueError(f"{self} lies outside the array, whose shape is {self.shape}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return volume(self.bounds) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"piece {[f'{start}:{stop}' for start, stop in self.bounds]} of {self.name}"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A run of bytes of a piece."""

    piece: int
    """Index into `Manifest.pieces`."""
    number: int
    """Index into `Piece.checksums`."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that one training host holds of one version."""

    version: WeightVersion
    """The version."""
    host: int
    """Which training host, from 0."""
    hosts: int
    """How many there are."""
    chunk_bytes: int
    """Bytes of every chunk but a piece's last."""
    pieces: tuple[Piece, ...]
    """In the order in which they lie in a file."""

    def chunks(self, piece: int) -> list[Chunk]:
        """The chunks of a piece, in order."""
        return [Chunk(piece, number) for number in range(len(self.pieces[piece].checksums))]

    @property
    def num_chunks(self) -> int:
        """Chunks of all pieces."""
        return sum(len(piece.checksums) for piece in self.pieces)

    def has(self, chunk: Chunk) -> bool:
        """Whether there is such a chunk."""
        return 0 <= chunk.piece < len(self.pieces) and 0 <= chunk.number < len(self.pieces[chunk.piece].checksums)

    def span(self, chunk: Chunk) -> tuple[int, int]:
        """First byte of a chunk within its piece, and the one after its last."""
        start = chunk.number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.pieces[chunk.piece].num_bytes)

    def check(self, chunk: Chunk, data: np.ndarray, source: str) -> None:
        """Compare what arrived with what was published.

        Args:
            chunk: which chunk it should be.
            data: its bytes.
            source: where they come from, for the message.

        Raises:
            CorruptTransferError: if it is another length or another content.
        """
        piece = self.pieces[chunk.piece]
        start, stop = self.span(chunk)
        where = f"{source}: chunk {chunk.number} of {piece}, version {self.version},"
        if len(data) != stop - start:
            raise CorruptTransferError(f"{where} has {len(data)} bytes instead of {stop - start}")
        if checksum(data) != piece.checksums[chunk.number]:
            raise CorruptTransferError(f"{where} fails its checksum")

    def to_json(self) -> bytes:
        """The manifest as it travels and rests."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_json(text: bytes) -> "Manifest":
        """The manifest that `to_json` wrote.

        Raises:
            ValueError: if the text is none.
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
            raise ValueError(f"not a manifest of weights: {error}") from error
