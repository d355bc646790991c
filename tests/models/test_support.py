# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import pytest
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, YarnRotaryEmbeddingsConfig
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.qwen import Qwen3Config, QwenConfig

from marin_rl.models.hf_config import PolicyModelError
from marin_rl.models.qwen2 import Qwen2Config
from marin_rl.models.rotary import LinearRotaryConfig, YarnRotaryConfig
from marin_rl.models.support import SAMPLED, TRAINED, check_model

SIZES: dict[str, Any] = {
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
GEMMA2 = Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=None)
MODELS: dict[str, LmConfig] = {
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma2": GEMMA2,
    "gpt2": Gpt2Config(hidden_dim=32, num_layers=2, num_heads=4),
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}


def test_every_supported_architecture_is_listed():
    assert tuple(MODELS) == TRAINED


@pytest.mark.parametrize("name", MODELS)
def test_only_some_architectures_can_be_sampled(name: str):
    check_model(MODELS[name], built_in_sampler=False, max_length=1024)
    if name in SAMPLED:
        check_model(MODELS[name], built_in_sampler=True, max_length=1024)
        return
    with pytest.raises(PolicyModelError, match=rf"model.type '{name}' .* samples llama, qwen2, qwen3\. .*type: openai"):
        check_model(MODELS[name], built_in_sampler=True, max_length=1024)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (QwenConfig(**SIZES), r"'qwen' is not supported; use qwen2; supported are gemma"),
        (Gemma3Config(**SIZES), r"'gemma3' is not supported; supported are gemma"),
        (LlamaConfig(**{**SIZES, "num_layers": -1}), r"^model\.num_layers is -1; it must be at least 1$"),
        (Qwen3Config(**{**SIZES, "intermediate_dim": 0}), r"^model\.intermediate_dim is 0; it must be at least 1$"),
    ],
)
def test_error_names_an_unsupported_architecture(config: LmConfig, problem: str):
    with pytest.raises(PolicyModelError, match=problem):
        check_model(config, built_in_sampler=False, max_length=16)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (LlamaConfig(**SIZES, use_bias=True), r"model.use_bias: True \(Hugging Face: False\)"),
        (LlamaConfig(**SIZES, head_dim=16), r"model.head_dim: 16 \(Hugging Face: 8\)"),
        (LlamaConfig(**SIZES, use_layer_norm_weight=False), r"model.use_layer_norm_weight: False \(Hugging Face: True"),
        (LlamaConfig(**SIZES, use_qk_norm=True), "cannot be exported .* use_qk_norm"),
        (MixtralConfig(**SIZES, n_shared_experts=1), r"model.n_shared_experts: 1 \(Hugging Face: 0\)"),
        (MistralConfig(**SIZES, rope=YarnRotaryConfig(factor=2.0)), r"model.rope: .*Hugging Face: \(10000.0, None"),
        (Gpt2Config(hidden_dim=32, num_heads=4, mlp_scale=2), r"model.mlp_scale: 2 \(Hugging Face: 4\)"),
        (Gemma2Config(**SIZES, head_dim=8), "final_logit_softcapping is 30.0, implemented is None"),
        (GemmaConfig(**SIZES), "head_dim is 256, implemented is 8"),
        (Gpt2Config(hidden_dim=32, num_heads=4, resid_pdrop=0.1), r"dropout is not applied.*model.resid_pdrop to 0"),
        (Olmo2Config(**SIZES, attention_dropout=0.1), r"Set model.attention_dropout to 0 \(it is 0.1\)"),
        (Qwen3Config(**SIZES, use_bias=True), "attention_bias is True, implemented is False"),
        (LlamaConfig(**SIZES, rope=DefaultRotaryEmbeddingsConfig(factor=4.0)), r"use model.rope.type: hf_linear"),
        (LlamaConfig(**SIZES, rope=YarnRotaryEmbeddingsConfig(factor=4.0)), r"unlike transformers; use hf_yarn"),
    ],
)
def test_error_names_a_setting_without_a_hugging_face_form(config: LmConfig, problem: str):
    with pytest.raises(PolicyModelError, match=problem):
        check_model(config, built_in_sampler=False, max_length=16)


@pytest.mark.parametrize("rope", [LinearRotaryConfig(factor=4.0), YarnRotaryConfig(factor=4.0)])
@pytest.mark.parametrize("choice", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_scaled_rotary_embeddings_can_be_exported(choice: type, rope):
    check_model(choice(**SIZES, rope=rope), built_in_sampler=True, max_length=16)


def test_sequences_must_fit_into_the_attention_window():
    mistral = MistralConfig(**SIZES, sliding_window=64)
    check_model(mistral, built_in_sampler=False, max_length=64)
    with pytest.raises(PolicyModelError, match=r"rollouts.max_length is 65, .* last 64 positions .* to 64 or less"):
        check_model(mistral, built_in_sampler=False, max_length=65)
