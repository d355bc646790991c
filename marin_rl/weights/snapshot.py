# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Snapshot of one version of the weights in host memory, in pieces."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from marin_rl.types import WeightVersion
from marin_rl.weights.bounds import Bounds, bounds_of, whole
from marin_rl.weights.device_copy import Array
from marin_rl.weights.manifest import Chunk, Manifest, Piece, checksum


@dataclasses.dataclass(frozen=True)
class TrainingHost:
    """A training host and its devices."""

    index: int
    """Index of the host, from 0."""
    count: int
    """Number of training hosts."""
    devices: frozenset[jax.Device]
    """Devices of the shards that this host sends."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"training host {self.index} of {self.count}: the index must be from 0 to {self.count - 1}"
            )

    @staticmethod
    def current() -> "TrainingHost":
        """Return the host of this jax process, with its local devices."""
        return TrainingHost(jax.process_index(), jax.process_count(), frozenset(jax.local_devices()))


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


def start_copy_to_host(arrays: Mapping[str, Array], host: TrainingHost) -> None:
    """Start asynchronous copies to the host of the shards that `take_snapshot` reads."""
    for array in arrays.values():
        if isinstance(array, jax.Array):
            for _, data in _own_shards(array, host):
                data.copy_to_host_async()


def take_snapshot(arrays: dict[str, Array], version: WeightVersion, host: TrainingHost, chunk_bytes: int) -> Snapshot:
    """Copy the shards of a host to host memory and compute their checksums; waits for the devices.

    Only the first replica of a shard is read, so each shard is sent once over all hosts. Every host sends numpy arrays.

    Args:
        arrays: Arrays that are not modified elsewhere. The dictionary is emptied, which frees device memory early.
        version: Version of the weights.
        host: The training host of this process.
        chunk_bytes: Bytes per chunk.
    """
    pieces, data = [], []
    while arrays:
        name = next(iter(arrays))
        array = arrays.pop(name)
        for bounds, part in _parts(array, host):
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            starts = range(0, len(flat), chunk_bytes)
            checksums = tuple(checksum(flat[start : start + chunk_bytes]) for start in starts)
            pieces.append(Piece(name, array.shape, array.dtype.name, bounds, checksums))
            data.append(flat)
    manifest = Manifest(version, host.index, host.count, chunk_bytes, tuple(pieces))
    return Snapshot(manifest, tuple(data))


def _own_shards(array: jax.Array, host: TrainingHost) -> Iterator[tuple[Bounds, jax.Array]]:
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and shard.device in host.devices:
            assert shard.data is not None
            yield bounds_of(shard.index, array.shape), shard.data


def _parts(array: Array, host: TrainingHost) -> Iterator[tuple[Bounds, np.ndarray]]:
    if not isinstance(array, jax.Array):
        yield whole(array.shape), array
        return
    for bounds, data in _own_shards(array, host):
        yield bounds, np.asarray(data)
