# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weights from a sender to a receiver."""

import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.models.llama import LlamaConfig

from marin_rl.config.workers_config import TransferDtype, WeightTransferConfig
from marin_rl.distributed.weight_manifest import MismatchedWeightsError, NoWeightsError
from marin_rl.distributed.weight_receiver import WeightReceiver, open_receiver
from marin_rl.distributed.weight_sender import TrainingHost, WeightSender, open_sender
from marin_rl.utils.levanter_line import seq_len
from tests import fork_server
from tests.cpu_host import cpu_host
from tests.distributed.weight_endpoints import ONCE, SECRET, assert_same

FLIGHT = WeightTransferConfig(streams=3, retry=ONCE)


@contextlib.contextmanager
def ends(config: WeightTransferConfig = FLIGHT) -> Iterator[tuple[WeightSender, WeightReceiver]]:
    before = set(threading.enumerate())
    sender = open_sender(config, SECRET, TrainingHost.current())
    receiver = open_receiver(config, [sender.address], SECRET)
    try:
        yield sender, receiver
    finally:
        sender.close()
    assert set(threading.enumerate()) <= before


class Model(eqx.Module):
    embeddings: hax.NamedArray
    bias: jax.Array
    activation: str = eqx.field(static=True)


def every_kind() -> dict[str, object]:
    noise = np.random.default_rng(0)
    return {
        "model": Model(
            hax.named(jnp.asarray(noise.normal(size=(7, 5)), jnp.float32), ("vocab", "embed")),
            jnp.asarray(noise.normal(size=9), jnp.bfloat16),
            "relu",
        ),
        # Longer than two chunks and not a multiple of the chunk size.
        "long": jnp.asarray(noise.normal(size=2_700_001), jnp.float32),
        "odd": jnp.asarray([0.0, -0.0, jnp.nan, jnp.inf, 1e-42], jnp.float32),
        "scalar": jnp.asarray(3, jnp.int32),
        "nothing": jnp.zeros((0, 4)),
        "truth": jnp.asarray([[True], [False]]),
        "numpy": np.arange(5, dtype=np.int64) << 40,
        "number": 2.5,
        "word": None,
    }


def test_received_weights_equal_published_weights_bitwise():
    weights = every_kind()
    with ends() as (sender, receiver):
        assert receiver.newest() is None
        with pytest.raises(NoWeightsError, match="no version of the weights is available"):
            receiver.receive(weights)
        sender.publish(weights, 3)
        sender.flush()
        assert receiver.newest() == 3
        received, version = receiver.receive(weights)
    assert version == 3
    assert_same(received, weights)


def test_policy_is_received_from_shapes_only():
    llama = LlamaConfig(**seq_len(8), hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=2, num_kv_heads=2)
    like = eqx.filter_eval_shape(llama.build, hax.Axis("vocab", 32), key=jax.random.PRNGKey(0))
    noise = np.random.default_rng(0)
    policy = jax.tree.map(lambda leaf: jnp.asarray(noise.normal(size=leaf.shape), leaf.dtype), like)
    with ends() as (sender, receiver):
        sender.publish(policy, 1)
        sender.flush()
        received, _ = receiver.receive(like)
    assert_same(received, policy)


def test_bfloat16_transfer_rounds_once():
    config = dataclasses.replace(FLIGHT, dtype=TransferDtype.BFLOAT16)
    weights = {"f": jnp.asarray(np.random.default_rng(1).normal(size=1000), jnp.float32), "i": jnp.arange(3)}
    with ends(config) as (sender, receiver):
        sender.publish(weights, 1)
        sender.flush()
        wide, _ = receiver.receive(weights)
        narrow, _ = receiver.receive({"f": jax.ShapeDtypeStruct((1000,), jnp.bfloat16), "i": weights["i"]})
        with pytest.raises(MismatchedWeightsError, match=r"\['i'\] is int32\[3\] as published and floating\[3\] in"):
            receiver.receive({"f": weights["f"], "i": jnp.zeros(3)})
    rounded = weights["f"].astype(jnp.bfloat16)
    assert_same(wide, {"f": rounded.astype(jnp.float32), "i": weights["i"]})
    assert_same(narrow, {"f": rounded, "i": weights["i"]})


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jnp.zeros((3, 2))}, r"\['w'\] is float32\[2, 3\] as published and float32\[3, 2\] in"),
        ({"w": jnp.zeros((2, 3), jnp.bfloat16)}, r"\['w'\] is float32\[2, 3\] as published and bfloat16\[2, 3\] in"),
        ({"w": jnp.zeros((2, 3), jnp.int32)}, r"\['w'\] is float32\[2, 3\] as published and int32\[2, 3\] in"),
        ({"v": jnp.zeros((2, 3))}, r"\['w'\] is float32\[2, 3\] as published and absent in"),
        ({"w": jnp.zeros((2, 3)), "v": jnp.zeros(1)}, r"\['v'\] is absent as published and float32\[1\] in"),
    ],
)
def test_weights_of_another_model_are_rejected(like: dict, message: str):
    with ends() as (sender, receiver):
        sender.publish({"w": jnp.zeros((2, 3))}, 3)
        sender.flush()
        with pytest.raises(MismatchedWeightsError, match=message):
            receiver.receive(like)


def test_received_weights_may_be_donated():
    """Received arrays share no memory with the sender."""
    overwrite = jax.jit(lambda weights: weights - 7, donate_argnums=0)
    weights = {"w": jnp.arange(300_000.0)}
    with ends() as (sender, receiver):
        sender.publish(weights, 1)
        sender.flush()
        first, _ = receiver.receive(weights)
        overwrite(first["w"]).block_until_ready()
        second, _ = receiver.receive(weights)
        assert_same(second, weights)


@pytest.mark.medium
def test_weights_are_resharded_from_four_hosts_to_other_meshes():
    command = [sys.executable, "-m", "tests.distributed.resharding"]
    done = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    meshes = ["same", "turned", "flat", "part", "single"]
    assert measured == {"devices": 8, "equal": dict.fromkeys(meshes, True), "placed": dict.fromkeys(meshes, True)}
