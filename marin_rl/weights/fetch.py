# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Receiver of weights: fetch pieces into buffers and assemble the arrays.

All checks that need only the manifests are made before any weights are transferred. Pieces are written directly into
the target arrays if possible: the share of a training host in an array usually consists of rows of equal length and
stride, and a piece holds the bytes of these rows in order.
"""

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.retry import Clock, RetryConfig, retrying
from marin_rl.types import WeightVersion
from marin_rl.weights.manifest import (
    Bounds,
    Chunk,
    Manifest,
    Piece,
    bounds_of,
    overlap,
    shape_of,
    slices_within,
    volume,
    whole,
)
from marin_rl.weights.plan import PieceKey, TargetArray, choose_pieces, target_arrays
from marin_rl.weights.protocol import (
    CorruptTransferError,
    MismatchedWeightsError,
    NoWeightsError,
    ServerLostError,
    VersionGoneError,
)
from marin_rl.weights.tree import replace_leaves

T = TypeVar("T")


@runtime_checkable
class WeightSource(Protocol):
    """Pieces of one or more training hosts. Thread-safe."""

    streams: int
    """Number of concurrent streams."""

    def versions(self) -> list[WeightVersion]:
        """Return the complete versions, oldest first.

        Raises:
            WeightTransferError: if the source does not respond or rejects the call.
        """
        ...

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """Return the manifests of one version.

        Raises:
            VersionGoneError: if the version is not available.
            WeightTransferError: if the source does not respond or rejects the call.
        """
        ...

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """Yield the bytes (uint8) of the chunks in order, unchecked; fewer chunks if the stream was cut.

        Raises:
            VersionGoneError: if the version is dropped during the transfer.
            WeightTransferError: if the stream fails.
        """
        ...


class WeightReceiver:
    """Fetches weights; one per worker. It holds no resources between calls."""

    def __init__(
        self, sources: Sequence[WeightSource], retry: RetryConfig, *, cast: bool, clock: Clock | None = None
    ) -> None:
        """Set up the receiver without connecting.

        Args:
            sources: sources that together have every piece.
            retry: limits of retries after an error.
            cast: whether floating-point arrays may be sent in another floating-point dtype than the receiver's.
            clock: clock for tests; None for the real one.
        """
        if not sources:
            raise ValueError("a receiver of weights needs at least one address, got 0")
        self._sources = tuple(sources)
        self._retry = retry
        self._cast = cast
        self._clock = clock or Clock()

    def newest(self) -> WeightVersion | None:
        """Return the newest version that every sender has, or None before the first.

        Raises:
            WeightTransferError: if a sender does not respond.
        """
        return retrying(self._retry, (ServerLostError, CorruptTransferError), self._find_newest, self._clock)

    def receive(self, like: T, version: WeightVersion | None = None) -> tuple[T, WeightVersion]:
        """Fetch one version.

        Args:
            like: tree with arrays or `jax.ShapeDtypeStruct`s as leaves. Their shardings determine the shards to fetch
                and their devices; leaves without a sharding are placed on the default device.
            version: the version to fetch; None for the newest.

        Returns:
            `like` with the published arrays, and their version.

        Raises:
            VersionGoneError: if `version` is given and a sender does not have it.
            MismatchedWeightsError: if the published weights do not fit `like`.
            WrongSecretError: if a sender has a different secret.
            WeightTransferError: if the weights do not arrive within the retry limits.
        """
        transient = (ServerLostError, CorruptTransferError, NoWeightsError)
        errors = transient if version is not None else (*transient, VersionGoneError)
        return retrying(self._retry, errors, functools.partial(self._receive_once, like, version), self._clock)

    def _find_newest(self) -> WeightVersion | None:
        held = [set(source.versions()) for source in self._sources]
        return max(set.intersection(*held), default=None)

    def _receive_once(self, like: T, version: WeightVersion | None) -> tuple[T, WeightVersion]:
        chosen = self._find_newest() if version is None else version
        if chosen is None:
            raise NoWeightsError("no version of the weights is available on all training hosts yet")
        owned = [(source, manifest) for source in self._sources for manifest in source.manifests(chosen)]
        manifests = [manifest for _, manifest in owned]
        _check_hosts(manifests, chosen)
        targets = target_arrays(like)
        plan = choose_pieces(targets, manifests, cast=self._cast)
        buffers = {name: ArrayBuffers(target, plan[name]) for name, target in targets.items()}
        _download(owned, {key: buffers[name] for name, pieces in plan.items() for key in pieces})
        return replace_leaves(like, {name: buffer.assemble() for name, buffer in buffers.items()}), chosen


def _check_hosts(manifests: Sequence[Manifest], version: WeightVersion) -> None:
    for manifest in manifests:
        if manifest.version != version:
            raise CorruptTransferError(f"requested version {version}, got the manifest of version {manifest.version}")
    hosts = sorted(manifest.host for manifest in manifests)
    for count in {manifest.hosts for manifest in manifests}:
        if hosts != list(range(count)):
            raise MismatchedWeightsError(
                f"{count} training hosts publish the weights, but the receiver reads from hosts {hosts}; pass the "
                "address of each host once"
            )


ALIGNMENT = 64
"""Alignment in bytes with which the CPU backend uses host memory as an array without a copy."""


class ArrayBuffers:
    """Memory for the pieces of one array. Several threads may write different pieces."""

    def __init__(self, target: TargetArray, pieces: Mapping[PieceKey, Piece]) -> None:
        """Allocate the memory.

        Args:
            target: the receiver's array.
            pieces: the pieces to fetch; they cover the boxes of `target`.
        """
        self._target = target
        self._pieces = pieces
        self._rows: dict[PieceKey, np.ndarray] = {}
        self.boxes: dict[Bounds, np.ndarray] = {}
        """Boxes of the array whose pieces are written directly into them."""
        for box in target.boxes():
            self._assign(box, {key: piece for key, piece in pieces.items() if overlap(piece.bounds, box)})
        self.separate = {key: _aligned_empty(pieces[key].num_bytes) for key in pieces.keys() - self._rows.keys()}
        """Bytes of all other pieces, uint8."""
        self._rows |= {key: memory.reshape(1, -1) for key, memory in self.separate.items()}

    def _assign(self, box: Bounds, pieces: Mapping[PieceKey, Piece]) -> None:
        """Write pieces directly into a box if they tile it without overlap."""
        dtype = self._target.dtype
        inside = all(overlap(piece.bounds, box) == piece.bounds for piece in pieces.values())
        same_dtype = all(jnp.dtype(piece.dtype) == dtype for piece in pieces.values())
        if not (inside and same_dtype and sum(volume(piece.bounds) for piece in pieces.values()) == volume(box)):
            return
        memory = _aligned_empty(volume(box) * dtype.itemsize)
        by_bytes = memory.reshape(*shape_of(box), dtype.itemsize)
        try:
            rows = {key: _rows(by_bytes[slices_within(piece.bounds, box)], piece, box) for key, piece in pieces.items()}
        except ValueError:
            # A piece that is cut along several dimensions has rows with several strides.
            return
        self._rows |= rows
        self.boxes[box] = memory.view(dtype).reshape(shape_of(box))

    def write(self, key: PieceKey, start: int, data: np.ndarray) -> None:
        """Write bytes of a piece.

        Args:
            key: the piece.
            start: offset of the first byte within the piece.
            data: the bytes, uint8.
        """
        rows = self._rows[key]
        length = rows.shape[1]
        row, column = divmod(start, length)
        # The rest of a partial row, complete rows, and the start of another row.
        head = min(length - column, len(data)) if column else 0
        complete = (len(data) - head) // length
        first, tail = row + bool(column), head + complete * length
        if head:
            rows[row, column : column + head] = data[:head]
        rows[first : first + complete] = data[head:tail].reshape(complete, length)
        if tail < len(data):
            rows[first + complete, : len(data) - tail] = data[tail:]

    def assemble(self) -> jax.Array | np.ndarray:
        """Place the array on the receiver's devices. No further writes are allowed.

        Raises:
            MismatchedWeightsError: if two pieces hold different values for the same elements.
        """
        parts = []
        for key, data in self.separate.items():
            piece = self._pieces[key]
            parts.append((piece, data.view(jnp.dtype(piece.dtype)).reshape(shape_of(piece.bounds))))
        _check_overlaps_agree(parts)
        target = self._target
        filled = {
            box: self.boxes[box] if box in self.boxes else _fill(box, target.dtype, parts) for box in target.boxes()
        }
        if target.sharding is None:
            return filled[whole(target.shape)]

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return filled[bounds_of(index, target.shape)]

        return jax.make_array_from_callback(target.shape, target.sharding, part, dtype=target.dtype)


def _rows(part: np.ndarray, piece: Piece, box: Bounds) -> np.ndarray:
    """Return a view `[row, byte]` of the memory of a piece; raise ValueError if its rows have several strides."""
    cut = [dimension for dimension, (own, full) in enumerate(zip(piece.bounds, box, strict=True)) if own != full]
    length = math.prod(part.shape[cut[-1] if cut else 0 :])
    return part.reshape(-1, length, copy=False)


def _aligned_empty(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def _check_overlaps_agree(parts: Sequence[tuple[Piece, np.ndarray]]) -> None:
    for pair in itertools.combinations(parts, 2):
        shared = overlap(pair[0][0].bounds, pair[1][0].bounds)
        if shared is None:
            continue
        left, right = (np.ascontiguousarray(data[slices_within(shared, piece.bounds)]) for piece, data in pair)
        if left.tobytes() != right.tobytes():
            indices = [f"{start}:{stop}" for start, stop in shared]
            raise MismatchedWeightsError(f"two pieces of {pair[0][0].name} hold different values at {indices}")


def _fill(box: Bounds, dtype: np.dtype, parts: Sequence[tuple[Piece, np.ndarray]]) -> np.ndarray:
    filled = np.empty(shape_of(box), dtype)
    for piece, data in parts:
        shared = overlap(piece.bounds, box)
        if shared is not None:
            filled[slices_within(shared, box)] = data[slices_within(shared, piece.bounds)]
    return filled


def _download(owned: Sequence[tuple[WeightSource, Manifest]], buffers: Mapping[PieceKey, ArrayBuffers]) -> None:
    """Fetch the pieces of `buffers` in concurrent streams; `PieceKey.manifest` is an index into `owned`."""
    stop = threading.Event()

    def read(number: int, chunks: Sequence[Chunk]) -> None:
        source, manifest = owned[number]
        done = 0
        try:
            with contextlib.closing(source.fetch(manifest, chunks)) as arriving:
                for chunk, data in zip(chunks, arriving, strict=False):
                    if stop.is_set():
                        return
                    manifest.check(chunk, data, str(source))
                    key = PieceKey(number, chunk.piece)
                    buffers[key].write(key, manifest.span(chunk)[0], data)
                    done += 1
            if done < len(chunks):
                raise CorruptTransferError(
                    f"{source}: the stream of version {manifest.version} ended after {done} of {len(chunks)} chunks"
                )
        except BaseException:
            stop.set()
            raise

    streams = []
    for number, (source, manifest) in enumerate(owned):
        pieces = sorted(key.piece for key in buffers if key.manifest == number)
        streams += [(number, chunks) for chunks in _split(manifest, pieces, source.streams)]
    if streams:
        with ThreadPoolExecutor(len(streams), thread_name_prefix="receive weights") as threads:
            reading = [threads.submit(read, number, chunks) for number, chunks in streams]
        for future in reading:
            future.result()


def _split(manifest: Manifest, pieces: Sequence[int], streams: int) -> list[list[Chunk]]:
    """Split the chunks of pieces into streams of about equal size."""
    chunks = [chunk for piece in pieces for chunk in manifest.chunks(piece)]
    sizes = [stop - start for start, stop in map(manifest.span, chunks)]
    total = sum(sizes)
    parts: list[list[Chunk]] = [[] for _ in range(streams)]
    for chunk, before in zip(chunks, itertools.accumulate(sizes, initial=0), strict=False):
        parts[before * streams // total].append(chunk)
    return [part for part in parts if part]
