# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.weights.config import InProcessConfig
from marin_rl.weights.errors import ServerLostError
from marin_rl.weights.in_process import InProcessReceiver, InProcessSender
from marin_rl.weights.snapshot import TrainingHost
from tests.weights.ends import closing


def test_arrays_that_lie_right_are_handed_over_without_a_copy():
    with closing(InProcessSender(dtype=None)) as sender:
        weights = {"w": jnp.arange(1000.0)}
        sender.publish(weights, 1)
        one, _ = InProcessReceiver(sender.address, cast=False).receive(weights)
        two, _ = InProcessReceiver(sender.address, cast=False).receive(weights)
    assert one["w"].unsafe_buffer_pointer() == two["w"].unsafe_buffer_pointer()
    assert one["w"].unsafe_buffer_pointer() != weights["w"].unsafe_buffer_pointer()


def test_numpy_arrays_are_the_receivers_own():
    with closing(InProcessSender(dtype=None)) as sender:
        sender.publish({"w": np.zeros(3)}, 1)
        receiver = InProcessReceiver(sender.address, cast=False)
        one, _ = receiver.receive({"w": np.zeros(3)})
        one["w"][:] = 5
        assert (receiver.receive({"w": np.zeros(3)})[0]["w"] == 0).all()


def test_a_sender_that_was_closed_is_not_found():
    sender = InProcessConfig().open_sender("", TrainingHost.current())
    receiver = InProcessConfig().open_receiver([sender.address], "")
    sender.close()
    with pytest.raises(ServerLostError, match=r"no open sender of this process has the address 'in-process:\d+'"):
        receiver.newest()


def test_a_sender_that_is_forgotten_frees_its_weights():
    sender = InProcessSender(dtype=None)
    address = sender.address
    sender.publish({"w": jnp.zeros(3)}, 1)
    del sender
    gc.collect()
    with pytest.raises(ServerLostError):
        InProcessReceiver(address, cast=False).newest()


def test_no_thread_is_needed():
    before = threading.active_count()
    with closing(InProcessSender(dtype="bfloat16")) as sender:
        sender.publish({"w": jnp.zeros(3)}, 1)
        assert sender.published == 1
        like = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
        assert InProcessReceiver(sender.address, cast=True).receive(like)[0]["w"].dtype == jnp.float32
        assert threading.active_count() == before
