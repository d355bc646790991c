# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One version of the weights on the host, in pieces: what a server serves and a folder holds."""

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
    """Which part of the training devices a sender speaks for."""

    index: int
    """Which host, from 0."""
    count: int
    """Training hosts in all."""
    devices: frozenset[jax.Device]
    """The devices whose shards this host sends."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"training host {self.index} of {self.count}: the index runs from 0 to {self.count - 1}")

    @staticmethod
    def current() -> "TrainingHost":
        """This process, as jax counts them, with its own devices."""
        return TrainingHost(jax.process_index(), jax.process_count(), frozenset(jax.local_devices()))


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All that one training host holds of one version."""

    manifest: Manifest
    """What it is."""
    data: tuple[np.ndarray, ...]
    """The bytes of each piece: uint8, `[num_bytes]`."""

    def chunk(self, chunk: Chunk) -> np.ndarray:
        """The bytes of one chunk, not copied."""
        start, stop = self.manifest.span(chunk)
        return self.data[chunk.piece][start:stop]


def start_copy_to_host(arrays: Mapping[str, Array], host: TrainingHost) -> None:
    """Ask the devices to copy what `take_snapshot` will read, without waiting."""
    for array in arrays.values():
        if isinstance(array, jax.Array):
            for _, data in _own_shards(array, host):
                data.copy_to_host_async()


def take_snapshot(arrays: dict[str, Array], version: WeightVersion, host: TrainingHost, chunk_bytes: int) -> Snapshot:
    """Read a host's shards and compute their checksums; waits for the devices.

    Of shards that are held several times the first replica is taken, so over all hosts each is sent once. Arrays that
    lie outside the devices are sent by every host.

    Args:
        arrays: copies that nobody else writes to; emptied on the way, so that device memory is freed early.
        version: the version.
        host: whose shards.
        chunk_bytes: bytes of a chunk.
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
