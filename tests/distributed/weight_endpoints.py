# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Senders, servers and receivers for the tests of weight transfers."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np
import pyarrow.flight as flight

from marin_rl.distributed.weight_manifest import Chunk, Manifest, Snapshot
from marin_rl.distributed.weight_receiver import WeightReceiver
from marin_rl.distributed.weight_sender import WeightSender, take_snapshot
from marin_rl.distributed.weight_server import TLS_NAME, FlightSource, WeightServer, make_secret, tls_identity
from marin_rl.types import WeightVersion
from marin_rl.utils.devices.arrays import numeric_arrays
from marin_rl.utils.retry import Clock, RetryConfig

SECRET = make_secret()
Server = TypeVar("Server", bound=WeightServer)
ONCE = RetryConfig(give_up_seconds=0.0)


@contextlib.contextmanager
def closing(sender: WeightSender) -> Iterator[WeightSender]:
    try:
        yield sender
    finally:
        sender.close()


def snapshot_of(tree: object, version: WeightVersion, chunk_bytes: int = 1024) -> Snapshot:
    """Return the snapshot of a single training host."""
    return take_snapshot(numeric_arrays(tree), version, frozenset(jax.devices()), chunk_bytes)


def split(snapshot: Snapshot, hosts: int) -> list[Snapshot]:
    """Distribute the pieces of a snapshot round-robin over several hosts."""
    parts = []
    for host in range(hosts):
        pieces = snapshot.manifest.pieces[host::hosts]
        manifest = dataclasses.replace(snapshot.manifest, pieces=pieces)
        parts.append(Snapshot(manifest, snapshot.data[host::hosts]))
    return parts


def source_of(server: WeightServer, secret: str = SECRET, streams: int = 1) -> FlightSource:
    return FlightSource(server.address, secret, streams=streams)


def client_of(server: WeightServer) -> flight.FlightClient:
    """Connect a plain Flight client with the run's secret."""
    identity = tls_identity(SECRET)
    return flight.FlightClient(
        server.address,
        tls_root_certs=identity.root,
        cert_chain=identity.certificate,
        private_key=identity.key,
        override_hostname=TLS_NAME,
    )


@contextlib.contextmanager
def serving(server_type: type[Server] = WeightServer) -> Iterator[Server]:
    """Run a server without versions."""
    server = server_type(SECRET, "the tested host", host="127.0.0.1", port=0)
    try:
        yield server
    finally:
        server.close()


class HookedSource:
    """Source that calls a hook before every response and after every chunk."""

    def __init__(self, source: FlightSource, hook: Callable[[str], None]) -> None:
        self.streams = source.streams
        self._source = source
        self._hook = hook

    def __str__(self) -> str:
        return str(self._source)

    def versions(self) -> list[WeightVersion]:
        self._hook("versions")
        return self._source.versions()

    def manifest(self, version: WeightVersion) -> Manifest:
        self._hook("manifest")
        return self._source.manifest(version)

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        for data in self._source.fetch(manifest, chunks):
            yield data
            self._hook("chunk")


def receiver_of(
    *sources: FlightSource,
    retry: RetryConfig = ONCE,
    cast: bool = False,
    sleep: Callable[[float], None] | None = None,
) -> WeightReceiver:
    """Make a receiver with a simulated clock."""
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if sleep is not None:
            sleep(seconds)

    return WeightReceiver(sources, retry, cast=cast, clock=Clock(now=lambda: math.fsum(waited), sleep=wait))


def assert_same(actual: object, expected: object) -> None:
    """Assert equal structure, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert type(left) is type(right)
        if isinstance(right, jax.Array | np.ndarray):
            assert left.dtype == right.dtype
            assert left.shape == right.shape
            assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
        else:
            assert left == right
