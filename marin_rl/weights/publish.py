# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sender of weights: device copy, snapshot in host memory, and publication from a background thread."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.background_job import BackgroundJob
from marin_rl.retry import Clock
from marin_rl.types import WeightVersion
from marin_rl.weights.manifest import Bounds, Chunk, Manifest, Piece, bounds_of, checksum, whole
from marin_rl.weights.protocol import WeightSender, WeightTransferError
from marin_rl.weights.tree import named_leaves

Array = jax.Array | np.ndarray


def copy_arrays(arrays: Mapping[str, Array], dtype: str | None) -> dict[str, Array]:
    """Start copies with the shardings of the originals, without waiting for the devices.

    Arrays of one mesh are copied in one jitted program, compiled at the first call. The runtime executes the copies
    before later programs, so the originals may be donated immediately.

    Args:
        arrays: the originals by name.
        dtype: dtype that floating-point arrays are cast to; None for no cast.
    """
    copies: dict[str, Array] = {}
    groups: dict[Hashable, dict[str, jax.Array]] = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array):
            sharding = array.sharding
            key = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else frozenset(sharding.device_set)
            groups.setdefault(key, {})[name] = array
        else:
            copies[name] = np.array(array, dtype=_copy_dtype(array, dtype), copy=True)
    for group in groups.values():
        program = copy_program(tuple(array.sharding for array in group.values()), dtype)
        copies.update(zip(group, program(list(group.values())), strict=True))
    return {name: copies[name] for name in arrays}


@functools.cache
def copy_program(shardings: tuple[jax.sharding.Sharding, ...], dtype: str | None) -> jax.stages.Wrapped:
    """Return the jitted program of `copy_arrays` for arrays with these shardings."""

    def copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        targets = [_copy_dtype(array, dtype) for array in arrays]
        # jit may alias an unchanged input with its output; jnp.copy prevents that.
        return [
            jnp.copy(array) if array.dtype == target else array.astype(target)
            for array, target in zip(arrays, targets, strict=True)
        ]

    return jax.jit(copy, out_shardings=list(shardings))


def _copy_dtype(array: Array, dtype: str | None) -> np.dtype:
    return array.dtype if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating) else jnp.dtype(dtype)


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


def take_snapshot(arrays: dict[str, Array], version: WeightVersion, host: TrainingHost, chunk_bytes: int) -> Snapshot:
    """Copy the shards of a host to host memory and compute their checksums; waits for the devices.

    Only the first replica of a shard is read, so each shard is sent once over all hosts. Every host sends numpy arrays.

    Args:
        arrays: arrays that are not modified elsewhere. The dictionary is emptied, which frees device memory early.
        version: version of the weights.
        host: the training host of this process.
        chunk_bytes: bytes per chunk.
    """
    pieces, data = [], []
    while arrays:
        name = next(iter(arrays))
        array = arrays.pop(name)
        for bounds, part in _own_parts(array, host):
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            starts = range(0, len(flat), chunk_bytes)
            checksums = tuple(checksum(flat[start : start + chunk_bytes]) for start in starts)
            pieces.append(Piece(name, array.shape, array.dtype.name, bounds, checksums))
            data.append(flat)
    manifest = Manifest(version, host.index, host.count, chunk_bytes, tuple(pieces))
    return Snapshot(manifest, tuple(data))


def _own_parts(array: Array, host: TrainingHost) -> Iterator[tuple[Bounds, Array]]:
    if not isinstance(array, jax.Array):
        yield whole(array.shape), array
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and shard.device in host.devices:
            assert shard.data is not None
            yield bounds_of(shard.index, array.shape), shard.data


@runtime_checkable
class WeightBackend(Protocol):
    """Makes the newest versions of one training host available to receivers."""

    address: str
    """Address that receivers connect to."""

    def put(self, snapshot: Snapshot) -> None:
        """Make a version available and drop the oldest if there are too many. Calls must not be concurrent."""
        ...

    def close(self) -> None:
        """Drop all versions and release threads, ports and files."""
        ...


class ShardedSender:
    """Publishes snapshots of the shards of a host from a background thread; see `WeightSender`."""

    def __init__(self, backend: WeightBackend, host: TrainingHost, *, dtype: str | None, chunk_bytes: int) -> None:
        """Set up the sender without starting a thread.

        Args:
            backend: destination of the snapshots; the sender closes it.
            host: the training host of this process.
            dtype: dtype that floating-point arrays are cast to; None for no cast.
            chunk_bytes: bytes per chunk.
        """
        self.address = backend.address
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._backend = backend
        self._host = host
        self._dtype = dtype
        self._chunk_bytes = chunk_bytes
        self._job = BackgroundJob("publish weights")
        self._last: WeightVersion | None = None

    def publish(self, weights: object, version: WeightVersion) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._job.flush()
        if self._last is not None and version <= self._last:
            raise ValueError(
                f"version {version} cannot be published after version {self._last}; versions must increase"
            )
        arrays = copy_arrays(named_leaves(weights), self._dtype)
        for array in arrays.values():
            for _, part in _own_parts(array, self._host):
                if isinstance(part, jax.Array):
                    part.copy_to_host_async()
        self._last = version
        self._job.start(lambda: self._backend.put(take_snapshot(arrays, version, self._host, self._chunk_bytes)))

    def flush(self) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._job.flush()

    def close(self) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        try:
            self._job.close()
        finally:
            self._backend.close()


POLL = 0.05
"""Seconds between two polls of the other hosts."""


class MultiHostSender:
    """Publishes the shards of this host; a version is published when all hosts have it. See `WeightSender`."""

    def __init__(
        self,
        own: WeightSender,
        newest_of_all: Callable[[], WeightVersion | None],
        *,
        timeout: float,
        clock: Clock | None = None,
    ) -> None:
        """Set up the sender without publishing.

        Args:
            own: sender of this host.
            newest_of_all: returns the newest version that every host has, as `WeightReceiver.newest` does.
            timeout: seconds that `flush` waits for the other hosts.
            clock: clock for tests; None for the real one.
        """
        self.address = own.address
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._own = own
        self._newest_of_all = newest_of_all
        self._timeout = timeout
        self._clock = clock or Clock()
        self._last: WeightVersion | None = None

    def publish(self, weights: object, version: WeightVersion) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._own.publish(weights, version)
        self._last = version

    def flush(self) -> None:
        """Wait until all hosts have published the last version of this host.

        Raises:
            WeightTransferError: if another host does not publish it within the timeout.
        """
        self._own.flush()
        began = self._clock.now()
        while self._last is not None and ((newest := self._newest_of_all()) is None or newest < self._last):
            if self._clock.now() - began > self._timeout:
                raise WeightTransferError(
                    f"version {self._last} of the weights is published by this training host, but after "
                    f"{self._timeout:g} s not by all others; see their logs"
                )
            self._clock.sleep(POLL)

    def close(self) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._own.close()
