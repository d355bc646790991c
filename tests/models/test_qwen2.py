# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from levanter.models.lm_model import LmConfig
from transformers import Qwen2Config as HfQwen2Config

from marin_rl.models.qwen2 import Qwen2Config

SIZES = {"hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def test_only_queries_keys_and_values_have_biases():
    attention = Qwen2Config(**SIZES).attention_config()
    assert (attention.use_bias, attention.use_output_bias) == (True, False)
    assert not Qwen2Config(**SIZES).use_bias


def test_the_name_in_a_config_and_the_converter():
    config = Qwen2Config(**SIZES)
    assert LmConfig.get_choice_class("qwen2") is Qwen2Config
    assert LmConfig.get_choice_name(Qwen2Config) == "qwen2"
    assert config.to_hf_config(264).vocab_size == 264
    assert Qwen2Config.from_hf_config(config.to_hf_config(264)) == config
    assert isinstance(config.to_hf_config(264, {"bos_token_id": 7}), HfQwen2Config)
    assert config.to_hf_config(264, {"bos_token_id": 7}).bos_token_id == 7
