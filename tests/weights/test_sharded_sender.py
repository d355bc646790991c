# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.background_job import BackgroundJob
from marin_rl.weights.publish import ShardedSender, Snapshot, TrainingHost


class Outlet:
    """Backend that passes snapshots to a function."""

    address = "the tested outlet"

    def __init__(self, put: Callable[[Snapshot], None]) -> None:
        self.put = put
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def make(put: Callable[[Snapshot], None]) -> ShardedSender:
    return open_sender(Outlet(put))


def open_sender(backend: Outlet) -> ShardedSender:
    return ShardedSender(backend, TrainingHost.current(), dtype=None, chunk_bytes=1024)


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
    assert sender.published is None
    may_end.set()
    sender.flush()
    assert offered == [1]
    assert sender.published == 1
    sender.close()


def test_background_error_is_raised_by_next_call():
    def put(snapshot: Snapshot) -> None:
        raise OSError("no space left")

    sender = make(put)
    sender.publish({"w": jnp.zeros(3)}, 1)
    with pytest.raises(OSError, match="no space left"):
        sender.publish({"w": jnp.zeros(3)}, 2)
    sender.publish({"w": jnp.zeros(3)}, 2)
    with pytest.raises(OSError, match="no space left"):
        sender.close()
    assert sender.published is None


@pytest.mark.parametrize("version", [4, 5])
def test_versions_must_increase(version: int):
    sender = make(lambda snapshot: None)
    sender.publish({"w": jnp.zeros(3)}, 5)
    with pytest.raises(ValueError, match=f"version {version} cannot be published after version 5"):
        sender.publish({"w": jnp.zeros(3)}, version)
    sender.close()


def test_close_ends_the_thread():
    sender = make(lambda snapshot: None)
    sender.publish({"w": jnp.zeros(3)}, 1)
    sender.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("publish weights")]


def test_close_waits_for_publication_before_closing_backend(monkeypatch: pytest.MonkeyPatch):
    may_end, found = threading.Event(), []
    close = BackgroundJob.close

    def let_it_end_and_close(job: BackgroundJob) -> None:
        may_end.set()
        close(job)

    def put(snapshot: Snapshot) -> None:
        may_end.wait()
        found.append(backend.is_closed)

    monkeypatch.setattr(BackgroundJob, "close", let_it_end_and_close)
    backend = Outlet(put)
    sender = open_sender(backend)
    assert sender.address == "the tested outlet"
    sender.publish({"w": jnp.zeros(3)}, 1)
    sender.close()
    assert found == [False]
    assert backend.is_closed


def test_close_closes_backend_after_failed_publication():
    def put(snapshot: Snapshot) -> None:
        raise OSError("no space left")

    backend = Outlet(put)
    sender = open_sender(backend)
    sender.publish({"w": jnp.zeros(3)}, 1)
    with pytest.raises(OSError, match="no space left"):
        sender.close()
    assert backend.is_closed
