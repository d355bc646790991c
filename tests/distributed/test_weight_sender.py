# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed.weight_manifest import Snapshot, WeightTransferError
from marin_rl.distributed.weight_sender import TrainingHost, WeightSender, open_sender, take_snapshot
from marin_rl.distributed.weight_server import FlightSource
from tests.distributed.weight_endpoints import SECRET, closing, receiver_of, snapshot_of

# Snapshots.


@given(length=st.integers(0, 100), chunk_bytes=st.integers(1, 500), dtype=st.sampled_from(["float32", "int8", "bool"]))
def test_chunks_concatenate_to_the_piece(length: int, chunk_bytes: int, dtype: str):
    array = (np.arange(2 * length) % 3).astype(dtype)[::2]
    snapshot = snapshot_of({"w": array}, 4, chunk_bytes)
    chunks = snapshot.manifest.chunks(0)
    parts = [snapshot.chunk(chunk) for chunk in chunks]
    assert b"".join(part.tobytes() for part in parts) == array.tobytes()
    assert all(len(part) == chunk_bytes for part in parts[:-1])
    for chunk, part in zip(chunks, parts, strict=True):
        start, stop = snapshot.manifest.span(chunk)
        assert len(part) == stop - start
        assert np.shares_memory(part, snapshot.data[0])


def test_device_memory_is_released_during_snapshot():
    arrays = {"w": jnp.zeros(3), "b": jnp.zeros(2)}
    assert len(take_snapshot(arrays, 1, frozenset(jax.devices()), 1024).data) == 2
    assert arrays == {}


# Publication by one host.


class Outlet:
    """Fake server that passes snapshots to a function."""

    address = "the tested outlet"

    def __init__(self, put: Callable[[Snapshot], None]) -> None:
        self.put = put
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def make(put: Callable[[Snapshot], None]) -> WeightSender:
    return sender_to(Outlet(put))


def sender_to(outlet: Outlet) -> WeightSender:
    return WeightSender(outlet, frozenset(jax.devices()), chunk_bytes=1024)


def values(snapshot: Snapshot) -> np.ndarray:
    return snapshot.data[0].view(np.float32)


def test_weights_may_be_donated_as_soon_as_publish_returns():
    offered: list[Snapshot] = []
    sender = make(offered.append)
    step = jax.jit(lambda weights: weights + 1, donate_argnums=0)
    weights = jnp.zeros(300_000)
    for version in range(15):
        sender.publish({"w": weights}, version)
        weights = step(weights)
    sender.close()
    assert [snapshot.manifest.version for snapshot in offered] == list(range(15))
    for version, snapshot in enumerate(offered):
        assert (values(snapshot) == version).all()


def test_publish_returns_before_version_is_available():
    may_end, offered = threading.Event(), []

    def put(snapshot: Snapshot) -> None:
        may_end.wait()
        offered.append(snapshot.manifest.version)

    sender = make(put)
    sender.publish({"w": jnp.zeros(3)}, 1)
    assert offered == []
    may_end.set()
    sender.flush()
    assert offered == [1]
    sender.close()


def test_background_error_is_raised_by_next_call():
    def put(snapshot: Snapshot) -> None:
        raise OSError("no space left")

    outlet = Outlet(put)
    sender = sender_to(outlet)
    sender.publish({"w": jnp.zeros(3)}, 1)
    with pytest.raises(OSError, match="no space left"):
        sender.publish({"w": jnp.zeros(3)}, 2)
    sender.publish({"w": jnp.zeros(3)}, 2)
    with pytest.raises(OSError, match="no space left"):
        sender.close()
    assert outlet.is_closed


@pytest.mark.parametrize("version", [4, 5])
def test_versions_must_increase(version: int):
    sender = make(lambda snapshot: None)
    sender.publish({"w": jnp.zeros(3)}, 5)
    with pytest.raises(ValueError, match=f"version {version} cannot be published after version 5"):
        sender.publish({"w": jnp.zeros(3)}, version)
    sender.close()


# Publication by several hosts.


WEIGHTS = {"w": np.arange(6, dtype=np.float32)}


def open_host(index: int) -> WeightSender:
    return open_sender(WeightTransferConfig(), SECRET, TrainingHost(index, frozenset()))


def sources_of(*senders: WeightSender) -> list[FlightSource]:
    return [FlightSource(sender.address, SECRET, streams=1) for sender in senders]


def test_receiver_waits_for_all_hosts():
    pauses = []
    with closing(open_host(0)) as own, closing(open_host(1)) as other:

        def lag(seconds: float) -> None:
            pauses.append(newest.newest())
            if len(pauses) == 3:
                other.publish(WEIGHTS, 1)
                other.flush()

        newest = receiver_of(*sources_of(own, other))
        own.publish(WEIGHTS, 1)
        own.flush()
        with pytest.raises(WeightTransferError, match=r"version 1 .* not published by all training hosts after 0\.2 s"):
            newest.wait_for(1, 0.2)
        receiver_of(*sources_of(own, other), sleep=lag).wait_for(1, 60.0)
        assert newest.newest() == 1
    assert pauses == [None, None, None]
