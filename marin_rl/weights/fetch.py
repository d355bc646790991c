# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Receiver of weights: plan the pieces to fetch, write them to buffers, and assemble the arrays.

All checks that need only the manifests are made before any weights are transferred. Pieces are written directly into
the target arrays if possible: the share of a training host in an array usually consists of rows of equal length and
stride, and a piece holds the bytes of these rows in order.
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Collection, Generator, Mapping, Sequence, Set
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
    find_gap,
    overlap,
    shape_of,
    slices_within,
    volume,
    whole,
)
from marin_rl.weights.protocol import (
    CorruptTransferError,
    MismatchedWeightsError,
    NoWeightsError,
    ServerLostError,
    VersionGoneError,
)
from marin_rl.weights.tree import named_leaves, replace_leaves

T = TypeVar("T")


@runtime_checkable
class WeightSource(Protocol):
    """Pieces of one or more training hosts. Thread-safe."""

    @property
    def streams(self) -> int:
        """Number of concurrent streams."""
        ...

    def versions(self) -> list[WeightVersion]:
        """Return the complete versions, oldest first.

        Raises:
            WeightTransferError: If the source does not respond or rejects the call.
        """
        ...

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """Return the manifests of one version.

        Raises:
            VersionGoneError: If the version is not available.
            WeightTransferError: If the source does not respond or rejects the call.
        """
        ...

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """Yield the bytes (uint8) of the chunks in order, unchecked; fewer chunks if the stream was cut.

        Raises:
            VersionGoneError: If the version is dropped during the transfer.
            WeightTransferError: If the stream fails.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TargetArray:
    """An array of the receiver's model."""

    shape: tuple[int, ...]
    """Shape of the array."""
    dtype: np.dtype
    """Dtype of the array."""
    sharding: jax.sharding.Sharding | None
    """Sharding of the array; None keeps it on the host as a numpy array."""

    def boxes(self) -> set[Bounds]:
        """Return the boxes of the shards of this process."""
        if self.sharding is None:
            return {whole(self.shape)}
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return {bounds_of(index, self.shape) for index in indices if index is not None}


@dataclasses.dataclass(frozen=True, order=True)
class PieceKey:
    """Identifies a piece among several manifests."""

    manifest: int
    """Index of the manifest."""
    piece: int
    """Index into `Manifest.pieces`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The pieces to fetch and the arrays to assemble."""

    targets: Mapping[str, TargetArray]
    """Arrays of the receiver by name."""
    pieces: Mapping[str, Mapping[PieceKey, Piece]]
    """Pieces to fetch, by array name."""

    def fetched(self) -> list[PieceKey]:
        """Return all pieces to fetch, in manifest order."""
        return sorted(key for pieces in self.pieces.values() for key in pieces)


def target_arrays(like: object) -> dict[str, TargetArray]:
    """Return the target arrays of a tree of arrays or `jax.ShapeDtypeStruct`s, by name."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: TargetArray(
            tuple(leaf.shape),
            np.dtype(leaf.dtype),
            None if isinstance(leaf, np.ndarray) else leaf.sharding or default,
        )
        for name, leaf in named_leaves(like).items()
    }


def make_plan(targets: Mapping[str, TargetArray], manifests: Sequence[Manifest], *, cast: bool) -> Plan:
    """Choose the pieces that the receiver's devices need.

    Args:
        targets: Arrays of the receiver, by name.
        manifests: One manifest per training host, all of one version.
        cast: Whether floating-point arrays may be sent in another floating-point dtype than the receiver's.

    Returns:
        The plan, which balances the bytes over the hosts.

    Raises:
        MismatchedWeightsError: If names, shapes or dtypes differ, or pieces are missing or inconsistent; the message
            names array and piece.
    """
    held: dict[str, dict[PieceKey, Piece]] = {}
    for number, manifest in enumerate(manifests):
        for index, piece in enumerate(manifest.pieces):
            held.setdefault(piece.name, {})[PieceKey(number, index)] = piece
    check_names(targets.keys(), held.keys())
    loads = [0] * len(manifests)
    chosen = {}
    for name, target in targets.items():
        for piece in held[name].values():
            check_compatible(name, target, piece.shape, jnp.dtype(piece.dtype), cast=cast)
        boxes = target.boxes()
        _check_cover(name, boxes, held[name].values())
        chosen[name] = _choose(held[name], boxes, loads)
    return Plan(targets, chosen)


def check_names(targets: Set[str], held: Set[str]) -> None:
    """Check that published and required arrays have the same names.

    Args:
        targets: Names of the receiver's arrays.
        held: Names of the published arrays.

    Raises:
        MismatchedWeightsError: If the sets differ.
    """
    missing, extra = sorted(targets - held), sorted(held - targets)
    if missing or extra:
        raise MismatchedWeightsError(
            "the published weights do not match the receiver's model: "
            + "; ".join(
                f"{verb} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                for verb, names in (("they lack", missing), ("the model lacks", extra))
                if names
            )
        )


def check_compatible(name: str, target: TargetArray, shape: tuple[int, ...], sent: np.dtype, *, cast: bool) -> None:
    """Check shape and dtype of a published array against the receiver's array.

    Args:
        name: Name of the array.
        target: The receiver's array.
        shape: Published shape.
        sent: Published dtype.
        cast: Whether floating-point arrays may be sent in another floating-point dtype than the receiver's.

    Raises:
        MismatchedWeightsError: If they differ.
    """
    if shape != target.shape:
        raise MismatchedWeightsError(f"{name} was published with shape {shape}; the receiver needs {target.shape}")
    floats = jnp.issubdtype(sent, jnp.floating) and jnp.issubdtype(target.dtype, jnp.floating)
    if sent != target.dtype and not (cast and floats):
        raise MismatchedWeightsError(
            f"{name} was published as {sent.name}; the receiver needs {target.dtype.name}. Set weights.dtype to cast "
            "between floating-point dtypes"
        )


def _check_cover(name: str, boxes: set[Bounds], pieces: Collection[Piece]) -> None:
    for box in boxes:
        gap = find_gap(box, [piece.bounds for piece in pieces])
        if gap is not None:
            indices = [f"{start}:{stop}" for start, stop in gap]
            raise MismatchedWeightsError(
                f"no training host holds {indices} of {name}; a sender is missing or incomplete"
            )


def _choose(held: Mapping[PieceKey, Piece], boxes: set[Bounds], loads: list[int]) -> dict[PieceKey, Piece]:
    """Choose the pieces that overlap the boxes; of replicas, the one on the least loaded host."""
    copies: dict[Bounds, list[PieceKey]] = {}
    for key, piece in held.items():
        if any(overlap(piece.bounds, box) is not None for box in boxes):
            copies.setdefault(piece.bounds, []).append(key)
    chosen = {}
    for keys in copies.values():
        first = held[keys[0]]
        for key in keys[1:]:
            if held[key].checksums != first.checksums:
                raise MismatchedWeightsError(f"training hosts {keys[0].manifest} and {key.manifest} differ on {first}")
        key = min(keys, key=lambda key: loads[key.manifest])
        loads[key.manifest] += first.num_bytes
        chosen[key] = held[key]
    return chosen


ALIGNMENT = 64
"""Alignment in bytes with which the CPU backend uses host memory as an array without a copy."""


class ReceiveBuffers:
    """Memory for all pieces of a plan. Several threads may write different pieces."""

    def __init__(self, plan: Plan) -> None:
        """Allocate the memory.

        Args:
            plan: The plan to allocate for.
        """
        self._rows: dict[PieceKey, np.ndarray] = {}
        self._boxes: dict[tuple[str, Bounds], np.ndarray] = {}
        self._separate: dict[PieceKey, np.ndarray] = {}
        for name, target in plan.targets.items():
            for box in target.boxes():
                pieces = plan.pieces[name].items()
                self._assign(name, target, box, {key: piece for key, piece in pieces if overlap(piece.bounds, box)})
        for pieces in plan.pieces.values():
            for key in pieces.keys() - self._rows.keys():
                self._separate[key] = _aligned_empty(pieces[key].num_bytes)
                self._rows[key] = self._separate[key].reshape(1, -1)

    def _assign(self, name: str, target: TargetArray, box: Bounds, pieces: Mapping[PieceKey, Piece]) -> None:
        """Write pieces directly into a box if they tile it without overlap."""
        inside = all(overlap(piece.bounds, box) == piece.bounds for piece in pieces.values())
        same_dtype = all(jnp.dtype(piece.dtype) == target.dtype for piece in pieces.values())
        # The plan guarantees that the pieces cover the box.
        if not (inside and same_dtype and sum(volume(piece.bounds) for piece in pieces.values()) == volume(box)):
            return
        memory = _aligned_empty(volume(box) * target.dtype.itemsize)
        by_bytes = memory.reshape(*shape_of(box), target.dtype.itemsize)
        try:
            rows = {key: _rows(by_bytes[slices_within(piece.bounds, box)], piece, box) for key, piece in pieces.items()}
        except ValueError:
            # A piece that is cut along several dimensions has rows with several strides.
            return
        self._rows |= rows
        self._boxes[name, box] = memory.view(target.dtype).reshape(shape_of(box))

    def write(self, key: PieceKey, start: int, data: np.ndarray) -> None:
        """Write bytes of a piece.

        Args:
            key: The piece.
            start: Offset of the first byte within the piece.
            data: The bytes, uint8.
        """
        rows = self._rows[key]
        length = rows.shape[1]
        row, column = divmod(start, length)
        # The rest of a partial row, complete rows, and the start of another row.
        head = min(length - column, len(data)) if column else 0
        whole = (len(data) - head) // length
        first, tail = row + bool(column), head + whole * length
        if head:
            rows[row, column : column + head] = data[:head]
        rows[first : first + whole] = data[head:tail].reshape(whole, length)
        if tail < len(data):
            rows[first + whole, : len(data) - tail] = data[tail:]

    def box(self, name: str, box: Bounds) -> np.ndarray | None:
        """Return a box of an array if its pieces were written directly into it, otherwise None."""
        return self._boxes.get((name, box))

    def separate_piece(self, key: PieceKey) -> np.ndarray | None:
        """Return the bytes of a piece with separate memory; None if it was written into an array."""
        return self._separate.get(key)


def _rows(part: np.ndarray, piece: Piece, box: Bounds) -> np.ndarray:
    """Return a view `[row, byte]` of the memory of a piece; raise ValueError if its rows have several strides."""
    cut = [
        dimension for dimension, (own, all_of_it) in enumerate(zip(piece.bounds, box, strict=True)) if own != all_of_it
    ]
    length = math.prod(part.shape[cut[-1] if cut else 0 :])
    return part.reshape(-1, length, copy=False)


def _aligned_empty(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def assemble(like: T, plan: Plan, buffers: ReceiveBuffers) -> T:
    """Place the received arrays on the receiver's devices.

    Args:
        like: Tree with the structure and the non-array leaves of the result.
        plan: The plan that was fetched.
        buffers: Buffers with all bytes of the plan; no further writes are allowed.

    Returns:
        `like` with the received arrays.

    Raises:
        MismatchedWeightsError: If two pieces hold different values for the same elements.
    """
    arrays = {}
    for name, target in plan.targets.items():
        parts = {
            piece.bounds: data.view(jnp.dtype(piece.dtype)).reshape(shape_of(piece.bounds))
            for key, piece in plan.pieces[name].items()
            if (data := buffers.separate_piece(key)) is not None
        }
        _check_overlaps_agree(name, parts)
        arrays[name] = _place(name, target, buffers, parts)
    return replace_leaves(like, arrays)


def _check_overlaps_agree(name: str, parts: Mapping[Bounds, np.ndarray]) -> None:
    boxes = list(parts)
    for number, left in enumerate(boxes):
        for right in boxes[:number]:
            shared = overlap(left, right)
            if shared is None:
                continue
            both = [np.ascontiguousarray(parts[box][slices_within(shared, box)]) for box in (left, right)]
            if both[0].tobytes() != both[1].tobytes():
                indices = [f"{start}:{stop}" for start, stop in shared]
                raise MismatchedWeightsError(f"two pieces of {name} hold different values at {indices}")


def _place(
    name: str, target: TargetArray, buffers: ReceiveBuffers, parts: Mapping[Bounds, np.ndarray]
) -> jax.Array | np.ndarray:
    filled: dict[Bounds, np.ndarray] = {}
    for box in target.boxes():
        received = buffers.box(name, box)
        filled[box] = _fill(box, target.dtype, parts) if received is None else received
    if target.sharding is None:
        return filled[whole(target.shape)]

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return filled[bounds_of(index, target.shape)]

    return jax.make_array_from_callback(target.shape, target.sharding, part, dtype=target.dtype)


def _fill(box: Bounds, dtype: np.dtype, parts: Mapping[Bounds, np.ndarray]) -> np.ndarray:
    filled = np.empty(shape_of(box), dtype)
    for bounds, part in parts.items():
        shared = overlap(bounds, box)
        if shared is not None:
            filled[slices_within(shared, box)] = part[slices_within(shared, bounds)]
    return filled


class ShardedReceiver:
    """Receives from servers or a folder; see [`WeightReceiver`][marin_rl.weights.protocol.WeightReceiver]."""

    def __init__(
        self, sources: Sequence[WeightSource], retry: RetryConfig, *, cast: bool, clock: Clock | None = None
    ) -> None:
        """Set up the receiver without connecting.

        Args:
            sources: Sources that together have every piece.
            retry: Limits of retries after an error.
            cast: Whether floating-point arrays may be sent in another floating-point dtype than the receiver's.
            clock: Clock for tests; None for the real one.
        """
        if not sources:
            raise ValueError("a receiver of weights needs at least one address, got 0")
        self._sources = tuple(sources)
        self._retry = retry
        self._cast = cast
        self._clock = clock or Clock()

    def newest(self) -> WeightVersion | None:
        """See [`WeightReceiver`][marin_rl.weights.protocol.WeightReceiver]."""
        return retrying(self._retry, (ServerLostError, CorruptTransferError), self._find_newest, self._clock)

    def receive(self, like: T, version: WeightVersion | None = None) -> tuple[T, WeightVersion]:
        """See [`WeightReceiver`][marin_rl.weights.protocol.WeightReceiver]."""
        transient = (ServerLostError, CorruptTransferError, NoWeightsError)
        errors = transient if version is not None else (*transient, VersionGoneError)
        return retrying(self._retry, errors, functools.partial(self._receive_once, like, version), self._clock)

    def close(self) -> None:
        """Do nothing: no resources are held between calls."""

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
        plan = make_plan(target_arrays(like), manifests, cast=self._cast)
        return assemble(like, plan, _download(owned, plan)), chosen


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


class _Stream:
    """Chunks of one manifest that are read sequentially."""

    def __init__(self, source: WeightSource, number: int, manifest: Manifest) -> None:
        self.source = source
        self.number = number
        self.manifest = manifest
        self.chunks: list[Chunk] = []

    def read(self, buffers: ReceiveBuffers, stop: threading.Event) -> None:
        """Write the chunks to the buffers; return early if `stop` is set."""
        done = 0
        with contextlib.closing(self.source.fetch(self.manifest, self.chunks)) as arriving:
            for chunk, data in zip(self.chunks, arriving, strict=False):
                if stop.is_set():
                    return
                start, _ = self.manifest.span(chunk)
                self.manifest.check(chunk, data, str(self.source))
                buffers.write(PieceKey(self.number, chunk.piece), start, data)
                done += 1
        if done < len(self.chunks):
            raise CorruptTransferError(
                f"{self.source}: the stream of version {self.manifest.version} ended after {done} of "
                f"{len(self.chunks)} chunks"
            )


def _download(owned: Sequence[tuple[WeightSource, Manifest]], plan: Plan) -> ReceiveBuffers:
    """Fetch the pieces of a plan; its keys index the manifests in `owned`."""
    buffers, keys = ReceiveBuffers(plan), plan.fetched()
    streams = []
    for number, (source, manifest) in enumerate(owned):
        pieces = [key.piece for key in keys if key.manifest == number]
        streams += _split(source, number, manifest, pieces)
    stop = threading.Event()

    def read(stream: _Stream) -> None:
        try:
            stream.read(buffers, stop)
        except BaseException:
            stop.set()
            raise

    if streams:
        with ThreadPoolExecutor(len(streams), thread_name_prefix="receive weights") as threads:
            reading = [threads.submit(read, stream) for stream in streams]
        for future in reading:
            future.result()
    return buffers


def _split(source: WeightSource, number: int, manifest: Manifest, pieces: Sequence[int]) -> list[_Stream]:
    """Split pieces into streams of about equal size."""
    chunks = [chunk for piece in pieces for chunk in manifest.chunks(piece)]
    total = sum(stop - start for start, stop in map(manifest.span, chunks))
    streams = [_Stream(source, number, manifest) for _ in range(source.streams)]
    before = 0
    for chunk in chunks:
        streams[before * len(streams) // total].chunks.append(chunk)
        start, stop = manifest.span(chunk)
        before += stop - start
    return [stream for stream in streams if stream.chunks]
