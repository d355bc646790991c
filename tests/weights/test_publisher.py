# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.weights.publisher import BackgroundPublisher
from marin_rl.weights.snapshot import Snapshot, TrainingHost


def make(offer) -> BackgroundPublisher:
    return BackgroundPublisher(TrainingHost.current(), None, 1024, offer)


def values(snapshot: Snapshot) -> np.ndarray:
    return snapshot.data[0].view(np.float32)


def test_weights_may_be_donated_as_soon_as_publish_returns():
    offered: list[Snapshot] = []
    publisher = make(offered.append)
    step = jax.jit(lambda weights: weights + 1, donate_argnums=0)
    weights = jnp.zeros(300_000)
    for version in range(15):
        publisher.publish({"w": weights}, version)
        weights = step(weights)
    publisher.close()
    assert [snapshot.manifest.version for snapshot in offered] == list(range(15))
    for version, snapshot in enumerate(offered):
        assert (values(snapshot) == version).all()


def test_publish_returns_before_the_version_is_visible():
    may_end, offered = threading.Event(), []

    def offer(snapshot: Snapshot) -> None:
        may_end.wait()
        offered.append(snapshot.manifest.version)

    publisher = make(offer)
    publisher.publish({"w": jnp.zeros(3)}, 1)
    assert publisher.published is None
    may_end.set()
    publisher.flush()
    assert offered == [1]
    assert publisher.published == 1
    publisher.close()


def test_what_fails_in_the_background_is_raised_by_the_next_call():
    def offer(snapshot: Snapshot) -> None:
        raise OSError("no space left")

    publisher = make(offer)
    publisher.publish({"w": jnp.zeros(3)}, 1)
    with pytest.raises(OSError, match="no space left"):
        publisher.publish({"w": jnp.zeros(3)}, 2)
    publisher.publish({"w": jnp.zeros(3)}, 2)
    with pytest.raises(OSError, match="no space left"):
        publisher.close()
    assert publisher.published is None


@pytest.mark.parametrize("version", [4, 5])
def test_versions_only_grow(version: int):
    publisher = make(lambda snapshot: None)
    publisher.publish({"w": jnp.zeros(3)}, 5)
    with pytest.raises(ValueError, match=f"version {version} cannot be published after version 5"):
        publisher.publish({"w": jnp.zeros(3)}, version)
    publisher.close()


def test_closing_ends_the_thread():
    publisher = make(lambda snapshot: None)
    publisher.publish({"w": jnp.zeros(3)}, 1)
    publisher.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("publish weights")]
