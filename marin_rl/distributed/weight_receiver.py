# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Receiver of weights: choose the pieces that the devices need, fetch them, and assemble the arrays.

All checks that need only the manifests are made before any weights are transferred.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed.weight_manifest import (
    ArrayPiece,
    Chunk,
    CorruptTransferError,
    Manifest,
    MismatchedWeightsError,
    NoWeightsError,
    VersionGoneError,
    WeightServerLostError,
    WeightTransferError,
)
from marin_rl.distributed.weight_server import FlightSource
from marin_rl.types import WeightVersion
from marin_rl.utils.devices.arrays import describe, first_difference, numeric_arrays, replace_arrays
from marin_rl.utils.devices.boxes import (
    Array,
    Bounds,
    grid_cells,
    local_boxes,
    overlap,
    place_boxes,
    shape_of,
    slices_within,
    volume,
)
from marin_rl.utils.retry import Clock, RetryConfig, retrying

T = TypeVar("T")
Target = Array | jax.ShapeDtypeStruct
"""An array of the receiver's model, or its shape."""

TRANSIENT_ERRORS = (WeightServerLostError, CorruptTransferError, NoWeightsError, VersionGoneError)
"""Errors that a retry may resolve."""

POLL = 0.05
"""Seconds between two polls of senders for a version."""


class WeightReceiver:
    """Fetches weights; one per worker. It holds no resources between calls."""

    def __init__(
        self, sources: Sequence[FlightSource], retry: RetryConfig, *, cast: bool, clock: Clock | None = None
    ) -> None:
        """Set up the receiver for the weight servers of all training hosts, without connecting.

        `cast` permits floating-point arrays of another floating-point dtype than the receiver's. Tests pass a clock.
        """
        self._sources = tuple(sources)
        self._retry = retry
        self._cast = cast
        self._clock = clock or Clock()

    def newest(self) -> WeightVersion | None:
        """Return the newest version that every sender has, or None before the first.

        Raises:
            WeightTransferError: if a sender does not respond.
        """
        return retrying(self._retry, (WeightServerLostError, CorruptTransferError), self._find_newest, self._clock)

    def wait_for(self, version: WeightVersion, timeout: float) -> None:
        """Wait at most `timeout` seconds until every sender has a version, or a newer one.

        Raises:
            WeightTransferError: if a sender does not publish it within the timeout, or does not respond.
        """
        began = self._clock.now()
        while (newest := self.newest()) is None or newest < version:
            if self._clock.now() - began > timeout:
                raise WeightTransferError(
                    f"version {version} of the weights is not published by all training hosts after {timeout:g} s; "
                    "see their logs"
                )
            self._clock.sleep(POLL)

    def receive(self, like: T) -> tuple[T, WeightVersion]:
        """Fetch the newest version.

        Args:
            like: tree with arrays or `jax.ShapeDtypeStruct`s as leaves. Their shardings determine the shards to fetch
                and their devices; leaves without a sharding are placed on the default device.

        Returns:
            `like` with the published arrays, and their version.

        Raises:
            MismatchedWeightsError: if the published weights do not fit `like`.
            WrongSecretError: if a sender has a different secret.
            WeightTransferError: if the weights do not arrive within the retry limits.
        """
        return retrying(self._retry, TRANSIENT_ERRORS, functools.partial(self._receive_once, like), self._clock)

    def _find_newest(self) -> WeightVersion | None:
        held = [set(source.versions()) for source in self._sources]
        return max(set.intersection(*held), default=None)

    def _receive_once(self, like: T) -> tuple[T, WeightVersion]:
        version = self._find_newest()
        if version is None:
            raise NoWeightsError("no version of the weights is available on all training hosts yet")
        manifests = [source.manifest(version) for source in self._sources]
        targets = numeric_arrays(like)
        plan = choose_pieces(targets, manifests, cast=self._cast)
        pieces = {key: manifests[key.manifest].pieces[key.piece] for keys in plan.values() for key in keys}
        buffers = {key: _aligned_empty(piece.num_bytes) for key, piece in pieces.items()}
        _download(list(zip(self._sources, manifests, strict=True)), buffers)
        arrays = {}
        for name, target in targets.items():
            # Each array frees its pieces, so that the host needs memory for one more array only.
            arrays[name] = assemble(target, [(pieces[key], buffers.pop(key)) for key in plan[name]])
        return replace_arrays(like, arrays), version


class PieceKey(NamedTuple):
    """Identifies a piece among several manifests."""

    manifest: int
    """Index of the manifest."""
    piece: int
    """Index into `Manifest.pieces`."""


def choose_pieces(
    targets: Mapping[str, Target], manifests: Sequence[Manifest], *, cast: bool
) -> dict[str, list[PieceKey]]:
    """Choose the pieces that the receiver's devices need.

    There is one manifest per training host, all of one version. `cast` permits floating-point arrays of another
    floating-point dtype than the receiver's.

    Returns:
        The pieces to fetch, by array name; of pieces with equal boxes, one.

    Raises:
        MismatchedWeightsError: if names, shapes or dtypes differ, or pieces are missing; the message names the array.
    """
    held: dict[str, dict[Bounds, PieceKey]] = {}
    published: dict[str, ArrayPiece] = {}
    for number, manifest in enumerate(manifests):
        for index, piece in enumerate(manifest.pieces):
            held.setdefault(piece.name, {})[piece.bounds] = PieceKey(number, index)
            published[piece.name] = piece
    described = [{name: _describe(array, cast) for name, array in arrays.items()} for arrays in (published, targets)]
    if difference := first_difference(*described):
        raise MismatchedWeightsError(
            f"the published weights do not fit the receiver's model: {difference[0]} is {difference[1]} as published "
            f"and {difference[2]} in the model; weights.dtype casts between floating-point dtypes"
        )
    chosen = {}
    for name, target in targets.items():
        # Shards of an array have equal shapes.
        cell = [max(size, 1) for size in shape_of(published[name].bounds)]
        boxes = local_boxes(target.shape, _sharding(target))
        needed = {bounds for box in boxes for bounds in grid_cells(box, cell)}
        if missing := sorted(needed - held[name].keys()):
            raise MismatchedWeightsError(
                f"no training host holds {[f'{start}:{stop}' for start, stop in missing[0]]} of {name}; a sender is "
                "missing or incomplete"
            )
        chosen[name] = [held[name][bounds] for bounds in sorted(needed)]
    return chosen


def _describe(array: ArrayPiece | Target, cast: bool) -> str:
    """Describe an array; with `cast`, all floating-point dtypes are equal."""
    is_any = cast and jnp.issubdtype(jnp.dtype(array.dtype), jnp.floating)
    return f"floating{list(array.shape)}" if is_any else describe(array)


ALIGNMENT = 64
"""Alignment in bytes with which the CPU backend uses host memory as an array without a copy."""


def _aligned_empty(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def assemble(target: Target, pieces: Sequence[tuple[ArrayPiece, np.ndarray]]) -> Array:
    """Place an array on the receiver's devices.

    `pieces` cover the boxes of the target, each with its bytes (uint8). A piece that is a box is used without a copy.
    """
    parts = [
        (piece.bounds, data.view(jnp.dtype(piece.dtype)).reshape(shape_of(piece.bounds))) for piece, data in pieces
    ]
    sharding = _sharding(target)
    boxes = {box: _fill(box, target.dtype, parts) for box in local_boxes(target.shape, sharding)}
    return place_boxes(target.shape, sharding, boxes)


def _sharding(target: Target) -> jax.sharding.Sharding | None:
    """Return the sharding of an array; None for one in host memory."""
    if isinstance(target, np.ndarray):
        return None
    return target.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _fill(box: Bounds, dtype: np.dtype, parts: Sequence[tuple[Bounds, np.ndarray]]) -> np.ndarray:
    for bounds, data in parts:
        if bounds == box and data.dtype == dtype:
            return data
    filled = _aligned_empty(volume(box) * dtype.itemsize).view(dtype).reshape(shape_of(box))
    for bounds, data in parts:
        shared = overlap(bounds, box)
        if shared is not None:
            filled[slices_within(shared, box)] = data[slices_within(shared, bounds)]
    return filled


def _download(owned: Sequence[tuple[FlightSource, Manifest]], buffers: Mapping[PieceKey, np.ndarray]) -> None:
    """Fetch pieces into `buffers`, in concurrent streams; `PieceKey.manifest` is an index into `owned`."""
    failed = threading.Event()

    def read(number: int, chunks: Sequence[Chunk]) -> None:
        source, manifest = owned[number]
        done = 0
        try:
            with contextlib.closing(source.fetch(manifest, chunks)) as arriving:
                for chunk, data in zip(chunks, arriving, strict=False):
                    if failed.is_set():
                        return
                    start, stop = manifest.span(chunk)
                    if len(data) != stop - start:
                        raise CorruptTransferError(
                            f"{source}: chunk {chunk.number} of {manifest.pieces[chunk.piece]}, version "
                            f"{manifest.version}, has {len(data)} of {stop - start} bytes"
                        )
                    buffers[PieceKey(number, chunk.piece)][start:stop] = data
                    done += 1
            if done < len(chunks):
                raise CorruptTransferError(
                    f"{source}: the stream of version {manifest.version} ended after {done} of {len(chunks)} chunks"
                )
        except BaseException:
            failed.set()
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


def open_receiver(config: WeightTransferConfig, addresses: Sequence[str], secret: str) -> WeightReceiver:
    """Open the receiver of a worker, without connecting.

    `addresses` are the senders of all training hosts, in any order.
    """
    sources = [FlightSource(address, secret, streams=config.streams) for address in addresses]
    return WeightReceiver(sources, config.retry, cast=config.sent_dtype is not None)
