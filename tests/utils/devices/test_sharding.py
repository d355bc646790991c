# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import types
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from marin_rl.learner.policy_model import initialize_policy
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.devices.sharding import ShardingError, check_sharding, on_each_shard, sharding_of
from marin_rl.utils.devices.trainer_config import TrainerConfig

VOCAB = 264


def check_on_mesh(tiny, trainer: TrainerConfig, **sizes: int) -> None:
    mappings = [{"embed": "data", "kv_head": "model"}, {"kv_head": "model", "batch": ("replica", "data")}]
    mesh = {"replica": 1, "data": 1, "model": 1} | sizes
    check_sharding(PolicySpec(tiny.QWEN3, VOCAB, trainer).policy, mesh, mappings)


def test_mesh_that_does_not_divide_the_model_is_named(tiny, trainer) -> None:
    check_on_mesh(tiny, trainer, model=2, data=16)
    with pytest.raises(ShardingError, match=r"kv_head has 2 elements, which 4 shards.*model_axis_size to one of 1, 2"):
        check_on_mesh(tiny, trainer, model=4)
    with pytest.raises(ShardingError, match=r"axis embed has 16 elements, which 12 shards.* data .*trainer.fsdp_axis"):
        check_on_mesh(tiny, trainer, data=12)


def test_weights_are_not_made_for_a_mesh_that_does_not_divide_them(
    tiny, trainer: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = types.SimpleNamespace(shape={"replica": 1, "data": 3, "model": 1})
    monkeypatch.setattr(TrainerConfig, "device_mesh", mesh)
    with pytest.raises(ShardingError, match="axis embed has 16 elements, which 3 shards"):
        initialize_policy(tiny.LLAMA, ChatTokenizer(byte_tokenizer()), trainer, key=jax.random.PRNGKey(0))
    spec = PolicySpec(tiny.LLAMA, VOCAB, trainer)
    # The checkpoint is not read.
    checkpoint = Checkpoint(Path("absent"), 0, {}, "", {}, {})
    for use in (
        lambda: spec.place(spec.policy),
        lambda: spec.place(spec.trained),
        lambda: spec.restore_policy(checkpoint),
    ):
        with pytest.raises(ShardingError, match="axis embed has 16 elements, which 3 shards"):
            use()


MAPPING = {"batch": ("replica", "data"), "kv_head": "model"}


def test_sharding_is_that_of_the_axis_mapping():
    Batch, Heads = Axis("batch", 8), Axis("kv_head", 4)
    assert sharding_of(Batch, None, Heads) == PartitionSpec(None, None, None)
    with hax.axis_mapping(MAPPING):
        assert sharding_of(Batch, None, Heads) == PartitionSpec(("replica", "data"), None, "model")
        assert sharding_of(Axis("position", 3)) == PartitionSpec(None)


def test_function_is_unchanged_without_a_mesh():
    assert on_each_shard(len, (PartitionSpec(),), PartitionSpec()) is len


@pytest.mark.parametrize(
    ("spec", "shape"), [(PartitionSpec(), (8, 6, 4)), (PartitionSpec("data", None, "model"), (4, 6, 2))]
)
def test_function_runs_on_shards(spec: PartitionSpec, shape: tuple[int, ...]):
    inside: list[tuple[int, ...]] = []

    def total(array: jax.Array) -> jax.Array:
        inside.append(array.shape)
        return array.sum(1)

    result = PartitionSpec(*(axis for index, axis in enumerate(spec) if index != 1))
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(mesh):
        outside = jax.eval_shape(on_each_shard(total, (spec,), result), jax.ShapeDtypeStruct((8, 6, 4), jnp.float32))
    assert (inside[-1], outside.shape) == (shape, (8, 4))
