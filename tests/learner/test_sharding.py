# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import types

import jax
import pytest
from haliax import Axis

from marin_rl.config.train_config import TrainerConfig
from marin_rl.learner.policy_model import initialize_policy, model_shape, restored_shape
from marin_rl.learner.sharding import ShardingError, check_sharding
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer

VOCAB = Axis("vocab", 264)


def check_on_mesh(tiny, trainer: TrainerConfig, **sizes: int) -> None:
    mappings = [{"embed": "data", "kv_head": "model"}, {"kv_head": "model", "batch": ("replica", "data")}]
    mesh = {"replica": 1, "data": 1, "model": 1} | sizes
    check_sharding(model_shape(tiny.QWEN3, VOCAB, trainer), mesh, mappings)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"model": 4},
            r"axis kv_head has 2 elements, which 4 shards.* model do not divide; set.*model_axis_size to one of 1, 2",
        ),
        ({"data": 64}, r"axis embed has 16 elements, which 64 shards.* data do not divide; .*trainer.fsdp_axis"),
    ],
)
def test_mesh_that_does_not_divide_the_model_is_named(tiny, trainer, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        check_on_mesh(tiny, trainer, **sizes)


def test_mesh_that_divides_the_model_passes(tiny, trainer) -> None:
    check_on_mesh(tiny, trainer, model=2, data=16)


def test_weights_are_not_made_for_a_mesh_that_does_not_divide_them(
    tiny, trainer: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = types.SimpleNamespace(shape={"replica": 1, "data": 3, "model": 1})
    monkeypatch.setattr(TrainerConfig, "device_mesh", mesh)
    with pytest.raises(ShardingError, match="axis embed has 16 elements, which 3 shards"):
        initialize_policy(tiny.LLAMA, ChatTokenizer(byte_tokenizer()), trainer, key=jax.random.PRNGKey(0))
    with pytest.raises(ShardingError, match="axis embed has 16 elements, which 3 shards"):
        restored_shape(tiny.LLAMA, VOCAB, trainer)
