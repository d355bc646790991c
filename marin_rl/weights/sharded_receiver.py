# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Receiver that fetches the shards of a worker's devices from all training hosts concurrently."""

import contextlib
import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from marin_rl.retry import Clock, RetryConfig, retrying
from marin_rl.types import WeightVersion
from marin_rl.weights.assemble import assemble
from marin_rl.weights.errors import (
    CorruptTransferError,
    MismatchedWeightsError,
    NoWeightsError,
    ServerLostError,
    VersionGoneError,
)
from marin_rl.weights.manifest import Chunk, Manifest
from marin_rl.weights.plan import PieceKey, Plan, make_plan, target_arrays
from marin_rl.weights.receive_buffers import ReceiveBuffers
from marin_rl.weights.source import WeightSource

T = TypeVar("T")


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
